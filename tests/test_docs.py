"""The docs are true: commands parse, settings exist, snippets run, scripts and links are there."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.main import get_command

import halfstep as hs
from doc_pages import PAGES, ROOT, Shown, after_halfstep, blocks, commands, inline, shell_lines
from halfstep_train.cli.main import build_app, main, normalise_dashes
from halfstep_train.config.aliases import KEY_ALIASES, PRECISION_KEYS
from halfstep_train.config.statements import find_open_section, list_fields, list_sections
from halfstep_train.data.loader import Key
from halfstep_train.guide.guide import QUESTIONS, read_answers
from halfstep_train.workloads import KINDS, load

COMMANDS = get_command(build_app()).commands  # type: ignore[attr-defined]
SHOWN = [(shown, words) for page in PAGES for shown, words in commands(page)]
TRAINED = [(shown, words) for shown, words in SHOWN if words[0] == "train" and words[1:2] and words[1] in set(KINDS)]
RUN_ELSEWHERE = {
    "lightning.md",
    "monai.md",
    "nnunet.md",
    "timm.md",
    "own_loop.md",
    "loop_kinds.md",
    "resume.md",
    "from_plain_amp.md",
    "from_nanogpt.md",
}
"""By test_own_loop_page.py, block after block."""
HOSTS = ROOT / "docs" / "integrations"
"""Its pages need other packages: tests/integrations runs them."""
SNIPPETS = [
    block
    for page in PAGES
    for block in blocks(page, "python")
    if page.name not in RUN_ELSEWHERE and page.parent != HOSTS
]
YAML = [block for page in PAGES for block in blocks(page, "yaml")]
SETTING = re.compile(r"([a-z_]+(?:\.[a-z0-9_*]+)+)(?:[=:].*)?")
FILES = (
    ".py",
    ".json",
    ".jsonl",
    ".yaml",
    ".md",
    ".png",
    ".onnx",
    ".safetensors",
    ".txt",
    ".csv",
    ".pth",
    ".html",
    ".bin",
)
NO_SETTINGS = {"optimizer.step", "optimizer.param_groups", "scaler.scale", "scaler.update", "scaler.unscale_"}
NO_SETTINGS |= {"guard.dropped", "guard.num_dropped", "trainer.num_dropped"}
"""Python's, and another project's key."""


def named(shown: Shown) -> str:
    return str(shown)


@functools.cache
def all_keys() -> set[str]:
    """Every setting and section of every workload, by each of its spellings."""
    schemas = [KINDS.of(name).get_schema(name) for name in KINDS]
    own = {key for schema in schemas for key in (*list_fields(schema), *list_sections(schema))}
    return own | set(KEY_ALIASES) | set(PRECISION_KEYS)


def is_known(key: str) -> bool:
    if find_open_section(key):
        return True
    if key.endswith("*"):  # `ema.*`, `model.tau_*`: several of them
        return any(known.startswith(key.rstrip("*")) for known in all_keys())
    return key.replace("-", "_") in all_keys()


@pytest.mark.parametrize(("shown", "words"), SHOWN, ids=map(named, (shown for shown, _ in SHOWN)))
def test_every_command_line_parses_and_its_settings_exist(shown: Shown, words: list[str]) -> None:
    name, *rest = normalise_dashes(words)
    assert name in COMMANDS
    if rest:  # a name alone is a name, not a line to type
        COMMANDS[name].make_context(name, list(rest))
    keys = [word.partition("=")[0] for word in rest if re.match(r"[a-z_]+(\.[\w*]+)+=", word)]
    assert [key for key in keys if not is_known(key)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_every_help_text_parse(name: str) -> None:
    text = importlib.import_module(f"halfstep_train.cli.{name.replace('-', '_')}").command.__doc__
    lines = [Shown(name, line.strip()) for line in text.splitlines() if line.strip().startswith("halfstep ")]
    assert lines, "a help text has an example"
    for words in (words for line in lines for words in after_halfstep(line)):
        COMMANDS[words[0]].make_context(words[0], normalise_dashes(words[1:]))


@pytest.mark.parametrize(("shown", "words"), TRAINED, ids=map(named, (shown for shown, _ in TRAINED)))
def test_every_training_that_is_shown_has_a_valid_config(
    shown: Shown, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--show-config", "--json"])
    assert not stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_named_in_the_text_exist(page: Path) -> None:
    sections = {key.split(".")[0] for key in all_keys() if "." in key}
    found = ((shown, SETTING.fullmatch(shown.text)) for shown in inline(page))
    keys = [(shown.where, match[1]) for shown, match in found if match and not match[1].endswith(FILES)]
    assert [
        (where, key)
        for where, key in keys
        if key.split(".")[0] in sections and not is_known(key) and key not in NO_SETTINGS
    ] == []


@pytest.mark.parametrize("block", YAML, ids=named)
def test_yaml_is_a_config_that_loads_or_answers_of_the_guide(block: Shown, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    if "task:" in block.text:
        path.write_text(block.text)
        assert read_answers(path, QUESTIONS)
    elif "uses:" not in block.text:  # steps of a CI: their commands are parsed above
        path.write_text(block.text if "workload:" in block.text else f"workload: unet\n{block.text}")
        assert load(str(path)).config


def names_used(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that code takes out of halfstep."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("halfstep"):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("hs", "halfstep")
        ):
            yield "halfstep", node.attr


@pytest.mark.parametrize("block", SNIPPETS, ids=named)
def test_snippets_compile_and_what_they_take_from_halfstep_is_there(block: Shown) -> None:
    for module, name in names_used(ast.parse(block.text)):
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), f"{module} has no {name}"


NOT_RUN = ("...", "DistributedDataParallel", "fully_shard")
"""Outlines, and what needs several processes (packages/halfstep/tests/step/test_ranks.py)."""


@pytest.mark.parametrize("block", [one for one in SNIPPETS if not any(word in one.text for word in NOT_RUN)], ids=named)
def test_snippets_run(block: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 1)))
    optimizer, x = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(8, 4)
    names = {
        "hs": hs, "torch": torch, "nn": nn, "model": model, "optimizer": optimizer, "x": x, "window": [x],
        "loader": [x] * 4, "step": hs.Step(model, optimizer, "fp32"), "key": Key.for_training(0, 0),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "loss_fn": lambda x: model(x).square().mean(),
    }  # fmt: skip
    exec(compile(block.text, block.where, "exec"), names)


def test_scripts_and_targets_that_are_named_are_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for page in PAGES:
        for shown in shell_lines(page):
            for script in re.findall(r"\b((?:benchmarks|demos|examples|tests|packages)/[\w/-]+\.py)", shown.text):
                assert (ROOT / script).exists(), f"{shown.where} names {script}"
            if target := re.match(r"make ([a-z-]+)", shown.text):
                assert target[1] in targets, f"{shown.where}: make {target[1]}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
