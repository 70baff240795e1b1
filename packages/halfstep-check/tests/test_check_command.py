"""`halfstep-check` as a user meets it: output, exit codes, patches, explanations, selected rules."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import halfstep_check
from halfstep_check.cli import main, make_command


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


@pytest.fixture
def guide_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "radio.yaml").write_text("trainer:\n  amp: True\n  fp16: False  # by AMP\n")
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    return tmp_path


def test_guide_4_shows_both_errors_what_runs_and_a_measurement(
    guide_4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "radio.yaml", "acc.yaml")
    assert code == 1
    for text in ("radio.yaml:2", "acc.yaml:2", "beats accelerate's file", "2 errors", "on an H200"):
        assert text in out
    assert '"Unsupported dtype BFloat16" in its FFT block' in out, "which contradicts the guide"
    # Findings come before the tables.
    assert out.index("[fp16-without-scaling]") < out.index("written as") < out.index("in effect")


def test_fix_prints_a_patch_and_changes_nothing(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "radio.yaml", "acc.yaml", "--fix")
    assert code == 1
    assert "-  fp16: False  # by AMP\n+  fp16: True  # by AMP" in out
    assert out.count("\n@@") == 2
    assert "fp16: False" in (guide_4 / "radio.yaml").read_text()


def test_write_aligns_the_files_and_then_exits_zero(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "radio.yaml", "acc.yaml", "--write")
    assert code == 0
    assert "nothing wrong" in out
    assert "wrote radio.yaml" in err
    assert (guide_4 / "radio.yaml.before-halfstep").exists()


def test_json_and_sarif_are_json_alone(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "radio.yaml", "acc.yaml", "--json")
    assert code == 1
    assert json.loads(out)["effective"]["precision"]["value"] == "fp16"
    code, out, _ = run(capsys, "radio.yaml", "acc.yaml", "--sarif")
    assert code == 1
    assert {result["ruleId"] for result in json.loads(out)["runs"][0]["results"]} == {
        "fp16-without-scaling",
        "precision-conflict",
    }


def test_environment_variables_join_with_env(
    guide_4: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert "environment" not in run(capsys, "acc.yaml")[1]
    code, out, _ = run(capsys, "acc.yaml", "--env")
    assert code == 1
    assert "ACCELERATE_MIXED_PRECISION" in out


def test_a_gpu_by_name_adds_what_it_cannot_do(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "acc.yaml", "--gpu", "a100")[0] == 0
    code, out, _ = run(capsys, "acc.yaml", "--gpu", "t4")
    assert code == 1
    assert "hardware-emulates" in out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"halfstep-check {halfstep_check.__version__}\n", "")


def test_a_misspelled_ignore_comment_is_reported_with_the_nearest_rule(
    guide_4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (guide_4 / "train.py").write_text("x = 1  # halfstep: ignore[clip-before-unscal]\n")
    code, out, _ = run(capsys, "train.py")
    assert code == 0
    assert "train.py:1" in out
    assert "'clip-before-unscal'" in out
    assert "did you mean 'clip-before-unscale'" in out


def test_explain_gives_reason_example_and_threads(capsys: pytest.CaptureFixture[str]) -> None:
    main_code, out, _ = run(capsys, "--explain", "clip-before-unscale")
    assert main_code == 0
    assert "unscale_" in out
    assert "pytorch/examples#1196" in out
    assert "item-every-step" in run(capsys, "--explain", "all")[1]


def test_unreadable_input_is_exit_two_with_a_message(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (guide_4 / "broken.yaml").write_text("a: [1,\n")
    for name in ("broken.yaml", "missing.yaml"):
        code, _, err = run(capsys, name)
        assert code == 2
        assert name in err
        assert "Traceback" not in err
    code, _, err = run(capsys)
    assert code == 2
    assert "nothing to check" in err


def test_a_folder_without_scripts_is_no_green_light(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "--project" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("columns", ["40", "60", "200"])
def test_nothing_leaves_the_width_of_the_terminal(
    columns: str, guide_4: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    folder = guide_4 / ("long_" * 20)
    folder.mkdir()
    for name in ("radio.yaml", "acc.yaml"):
        (guide_4 / name).rename(folder / name)
    _, out, _ = run(capsys, str(folder / "radio.yaml"), str(folder / "acc.yaml"))
    assert max(map(len, out.splitlines())) <= int(columns)


DUAL = """\
try:
    from torch.amp import GradScaler, autocast
except ImportError:
    from torch.cuda.amp import GradScaler, autocast
scaler = GradScaler('cuda')
"""


def test_write_leaves_an_import_for_two_versions_alone(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = guide_4 / "train.py"
    script.write_text(DUAL)
    code, _, err = run(capsys, "train.py", "--write")
    assert code == 0
    assert script.read_text() == DUAL
    assert "wrote" not in err


def test_write_says_which_findings_it_did_not_apply(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (guide_4 / "train.py").write_text(
        "import torch\nscaler = torch.cuda.amp.GradScaler()\nscaler.scale(loss).backward()\n"
        "torch.nn.utils.clip_grad_norm_(params, 1.0)\nscaler.step(optimizer)\nscaler.update()\n"
    )
    code, _, err = run(capsys, "train.py", "--write")
    assert code == 1
    assert "wrote train.py" in err
    assert "not applied: train.py:4 [clip-before-unscale]" in err
    once = (guide_4 / "train.py").read_text()
    assert 'torch.amp.GradScaler("cuda")' in once
    assert "wrote" not in run(capsys, "train.py", "--write")[2]
    assert (guide_4 / "train.py").read_text() == once


def test_hardware_says_what_to_install(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "acc.yaml", "--hardware")
    assert (code, out) == (2, "")
    assert err.startswith("error: --hardware needs halfstep-train\n  why: ")
    assert "-e packages/halfstep -e packages/halfstep-train" in err
    assert "--hardware" not in run(capsys, "--help")[1]


def test_a_config_of_halfsteps_own_is_read_and_said_to_be_unvalidated(
    guide_4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (guide_4 / "own.yaml").write_text("workload: unet\nprecision: bf16\ntrain: {epochz: 3}\n")
    code, out, err = run(capsys, "own.yaml", "acc.yaml")
    assert (code, err) == (0, "")
    assert "own.yaml: read without halfstep's schema" in out
    (guide_4 / "own.yaml").write_text("workload: unet\nprecision: bf17\n")
    code, out, _ = run(capsys, "own.yaml")
    assert code == 1
    assert "unknown precision 'bf17'" in out


TWO_BUGS = """\
import torch
scaler = torch.cuda.amp.GradScaler()
for x in loader:
    optimizer.zero_grad()
    scaler.scale(model(x)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
"""
"""clip-before-unscale and step-without-update, and the note deprecated-amp."""


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        ((), {"clip-before-unscale", "step-without-update", "deprecated-amp"}),
        (("--select", "clip-before-unscale"), {"clip-before-unscale"}),
        (("--select", "clip-before-unscale, deprecated-amp"), {"clip-before-unscale", "deprecated-amp"}),
        (("--select", "clip-twice", "--select", "step-without-update"), {"step-without-update"}),
        (("--ignore", "clip-before-unscale,step-without-update"), {"deprecated-amp"}),
        (("--select", "clip-before-unscale,clip-twice", "--ignore", "clip-before-unscale"), set()),
    ],
)
def test_rules_are_selected_and_ignored(
    guide_4: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], rules: set[str]
) -> None:
    (guide_4 / "train.py").write_text(TWO_BUGS)
    code, out, _ = run(capsys, "train.py", "--json", *flags)
    assert {finding["rule"] for finding in json.loads(out)["findings"]} == rules
    assert code == int(bool(rules - {"deprecated-amp"}))
    shown_code, shown, _ = run(capsys, "train.py", *flags)
    assert shown_code == code
    assert ("rules" in shown.splitlines()[-1]) == bool(flags), "the summary says that not all rules were applied"
    assert ("nothing wrong" in shown) == (not rules)


def test_a_patch_and_ignore_comments_follow_the_selection(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (guide_4 / "train.py").write_text(TWO_BUGS.replace("1.0)", "1.0)  # halfstep: ignore"))
    assert "ignored by comment" not in run(capsys, "train.py", "--select", "deprecated-amp")[1]
    assert run(capsys, "train.py", "--fix", "--ignore", "deprecated-amp")[1] == ""
    assert "+scaler = torch.amp.GradScaler" in run(capsys, "train.py", "--fix")[1]


@pytest.mark.parametrize("flag", ["--select", "--ignore", "--explain"])
def test_an_unknown_rule_is_an_error_with_the_nearest(
    guide_4: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    code, out, err = run(capsys, "acc.yaml", flag, "clip-befor-unscale")
    assert (code, out) == (2, "")
    assert "unknown rule 'clip-befor-unscale'" in err
    assert "clip-before-unscale" in err


def test_mistakes_on_the_command_line_have_our_form(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "acc.yaml", "--sarf")
    assert code == 2
    assert err.startswith("error: No such option: --sarf")
    assert "did you mean --sarif? halfstep-check --help explains every argument" in err
    assert "unknown GPU 'tt9'" in run(capsys, "acc.yaml", "--gpu", "tt9")[2]


README = Path(__file__).parents[1] / "README.md"
TYPED = re.findall(r"^halfstep-check (.*?)(?: *#.*| > .*)?$", README.read_text(), flags=re.MULTILINE)


def test_the_readme_shows_commands_that_parse_and_output_that_is_real(
    guide_4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()
    app.command()(make_command())
    assert len(TYPED) >= 4
    for words in TYPED:
        get_command(app).make_context("halfstep-check", shlex.split(words))
    (guide_4 / "train.py").write_text(
        TWO_BUGS.replace(".cuda", "").replace("()\n", '("cuda")\n', 1) + "    scaler.update()\n"
    )
    out = run(capsys, "train.py")[1]
    assert "\n".join(line.rstrip() for line in out.splitlines()) in README.read_text()


def test_a_reader_who_leaves_changes_no_exit_code(guide_4: Path) -> None:
    (guide_4 / "train.py").write_text(TWO_BUGS)
    started = f"{sys.executable} -m halfstep_check"
    line = f"{started} --explain all | head -1; {started} train.py > /dev/full; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "cannot use the output: No space left" in done.stderr
    assert done.stdout.splitlines()[-1] == "2"


def test_it_imports_its_three_packages_alone() -> None:
    allowed = {*sys.stdlib_module_names, "halfstep_check", "rich", "typer", "yaml", "_typeshed"}
    trees = [ast.parse(file.read_text()) for file in Path(halfstep_check.__path__[0]).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= allowed


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--select", "precision-conflict", "--ignore", "precision-conflict"), "no rule is left to apply"),
        (("--fix", "--json"), "--fix prints a patch"),
        (("--fix", "--sarif"), "--fix prints a patch"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(
    guide_4: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str
) -> None:
    code, out, err = run(capsys, "acc.yaml", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {text}")
    assert "fix:" in err
