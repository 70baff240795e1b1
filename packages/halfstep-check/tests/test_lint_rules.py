"""Every lint rule on small scripts of ours: `# <- rule` marks each expected finding, everything else must be silent."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from halfstep_check.lint import lint_tree
from halfstep_check.rules import RULES

SNIPPETS = Path(__file__).parent / "snippets"
MARK = re.compile(r"# <- ([\w, -]+)$")
LINT_RULES = sorted(rule.name for rule in RULES.values() if rule.group != "Configs")


@dataclass(frozen=True)
class Snippet:
    file: str
    kind: str
    title: str
    text: str

    @property
    def expected(self) -> set[tuple[str, int]]:
        lines = enumerate(self.text.splitlines(), start=1)
        marks = [(number, mark.group(1)) for number, line in lines if (mark := MARK.search(line))]
        return {(rule.strip(), number) for number, rules in marks for rule in rules.split(",")}


def snippets_in(path: Path) -> list[Snippet]:
    parts = re.split(r"^=== (header|bad|good)(?:: (.*))?\n", path.read_text(), flags=re.MULTILINE)[1:]
    sections = list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
    header = next((text for kind, _, text in sections if kind == "header"), "")
    return [Snippet(path.stem, kind, title, header + text) for kind, title, text in sections if kind != "header"]


ALL = [snippet for path in sorted(SNIPPETS.glob("*.txt")) for snippet in snippets_in(path)]


@pytest.mark.parametrize("snippet", ALL, ids=[f"{s.file}-{s.kind}-{s.title}" for s in ALL])
def test_snippet_has_exactly_the_findings_it_marks(snippet: Snippet) -> None:
    found = lint_tree(ast.parse(snippet.text), snippet.text, "train.py")
    assert {(finding.rule, finding.place.line) for finding in found} == snippet.expected
    assert bool(snippet.expected) == (snippet.kind == "bad"), "a bad snippet marks its findings, a good one has none"


@pytest.mark.parametrize("rule", LINT_RULES)
def test_every_lint_rule_has_three_failing_and_three_passing_snippets(rule: str) -> None:
    own = [snippet for snippet in ALL if snippet.file == rule]
    failing = [s for s in own if s.kind == "bad" and rule in {name for name, _ in s.expected}]
    passing = [s for s in own if s.kind == "good"]
    assert len(failing) >= 3
    assert len(passing) >= 3


@pytest.mark.parametrize(
    ("path", "is_judged"),
    [
        ("train.py", True),
        ("tests/parity.py", False),
        ("test_parity.py", False),
        ("benchmarks/sweep.py", False),
        ("profile_training.py", False),
        ("latest_training.py", True),
    ],
)
def test_tests_and_benchmarks_are_not_judged_as_training(path: str, is_judged: bool) -> None:
    loop = "for x, y in loader:\n    with torch.autocast('cuda'):\n        loss = model(x, y)\n"
    text = f"import torch\n{loop}    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    assert bool(lint_tree(ast.parse(text), text, path)) == is_judged
    saves = text + "torch.save(model.state_dict(), 'last.pt')\n"
    assert bool(lint_tree(ast.parse(saves), saves, path)) == (is_judged or "test" not in path)
