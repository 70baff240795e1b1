"""--fix and --write: only the value changes, comments stay, and a second check finds the files aligned."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from halfstep_check.check import check
from halfstep_check.findings import Edit
from halfstep_check.fix import BACKUP_SUFFIX, apply_edits, collect_changes, write
from halfstep_check.lint import lint_tree
from halfstep_check.shared.errors import ConfigError

TRAIN = """\
# radio maps, stage 2
trainer:
  amp: True         # mixed precision
  fp16: False       # managed by AMP
  lr: 1e-5
"""
ACCELERATE = """\
distributed_type: MULTI_GPU   # two cards
mixed_precision: bf16         # says the report
"""


def guide_4(folder: Path) -> list[Path]:
    (folder / "train.yaml").write_text(TRAIN)
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    return [folder / "train.yaml", folder / "accelerate.yaml"]


def test_writing_guide_4_aligns_it_and_keeps_comments_and_backups(tmp_path: Path) -> None:
    paths = guide_4(tmp_path)
    written = write(collect_changes(check(paths).findings, [str(path) for path in paths]).edits)
    assert written == sorted(str(path) for path in paths)
    assert paths[0].read_text() == TRAIN.replace("fp16: False", "fp16: True")
    assert paths[1].read_text() == ACCELERATE.replace("bf16 ", "fp16 ")
    assert (tmp_path / f"train.yaml{BACKUP_SUFFIX}").read_text() == TRAIN
    again = check(paths)
    assert again.exit_code == 0
    assert {row.topic: row.value for row in again.effective}["scaling"] == "dynamic"


def test_only_files_named_are_written(tmp_path: Path) -> None:
    paths = guide_4(tmp_path)
    assert write(collect_changes(check(paths).findings, [str(paths[0])]).edits) == [str(paths[0])]
    assert paths[1].read_text() == ACCELERATE
    assert not (tmp_path / f"accelerate.yaml{BACKUP_SUFFIX}").exists()


def test_quotes_json_and_carriage_returns_survive(tmp_path: Path) -> None:
    args = tmp_path / "args.json"
    args.write_bytes(b'{\r\n\t"output_dir": "out",\r\n\t"gradient_accumulation_steps": 8\r\n}\r\n')
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text('{"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1}')
    write(collect_changes(check([args, deepspeed]).findings, [str(args), str(deepspeed)]).edits)
    assert args.read_bytes() == b'{\r\n\t"output_dir": "out",\r\n\t"gradient_accumulation_steps": 2\r\n}\r\n'


def test_toml_and_quoted_yaml_values_are_rewritten_in_their_quotes(tmp_path: Path) -> None:
    titan = tmp_path / "titan.toml"
    titan.write_text('[training]\nmixed_precision_reduce = "bfloat16"  # faster?\n')
    write(collect_changes(check([titan]).findings, [str(titan)]).edits)
    assert titan.read_text() == '[training]\nmixed_precision_reduce = "float32"  # faster?\n'
    accelerate = tmp_path / "a.yaml"
    accelerate.write_text("distributed_type: 'NO'\nmixed_precision: 'bf16'\n")
    script = tmp_path / "train.py"
    script.write_text("Accelerator(mixed_precision='no')\n")
    write(collect_changes(check([accelerate, script]).findings, [str(accelerate)]).edits)
    assert accelerate.read_text() == "distributed_type: 'NO'\nmixed_precision: 'no'\n"


def test_no_is_written_in_quotes_because_yaml_reads_the_bare_word_as_false(tmp_path: Path) -> None:
    accelerate, script = tmp_path / "a.yaml", tmp_path / "train.py"
    accelerate.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    script.write_text("Accelerator(mixed_precision='no')\n")
    write(collect_changes(check([accelerate, script]).findings, [str(accelerate)]).edits)
    assert accelerate.read_text().endswith("mixed_precision: 'no'\n")
    assert check([accelerate, script]).exit_code == 0


def fixed(source: str) -> str:
    findings = lint_tree(ast.parse(source), source, "train.py")
    return apply_edits(source, collect_changes(findings).edits.get("train.py", []))


REWRITTEN = {
    "a call with its device": (
        "import torch\nwith torch.cuda.amp.autocast(enabled=use):\n    y = model(x)\n",
        'import torch\nwith torch.amp.autocast("cuda", enabled=use):\n    y = model(x)\n',
    ),
    "an import and all its uses": (
        "from torch.cuda.amp import GradScaler, autocast\ns = GradScaler()\nwith autocast(True):\n    y = model(x)\n",
        "from torch.amp import GradScaler, autocast\n"
        's = GradScaler("cuda")\nwith autocast("cuda", enabled=True):\n    y = model(x)\n',
    ),
    "columns in characters, not bytes": (
        'import torch\nname = "größe"; scaler = torch.cuda.amp.GradScaler()\n',
        'import torch\nname = "größe"; scaler = torch.amp.GradScaler("cuda")\n',
    ),
}
LEFT_ALONE = {
    "an import whose use is not certain": "from torch.cuda.amp import autocast\ncontext = autocast\n",
    "a call through an alias": "from torch.cuda import amp\nscaler = amp.GradScaler()\n",
    "a scaler written for the new module": "from torch.cuda.amp import GradScaler\nscaler = GradScaler('cuda')\n",
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_deprecated_names_are_rewritten_once(case: str) -> None:
    before, after = REWRITTEN[case]
    assert fixed(before) == after
    assert fixed(after) == after


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_not_certain_is_reported_and_left_alone(case: str) -> None:
    source = LEFT_ALONE[case]
    assert [f.rule for f in lint_tree(ast.parse(source), source, "train.py")] == ["deprecated-amp"]
    assert fixed(source) == source


def test_a_script_that_would_not_parse_afterwards_is_not_written(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = f(1)\n")
    broken = Edit(path=str(script), start=(1, 7), end=(1, 8), replacement="")
    with pytest.raises(ConfigError, match="not Python"):
        write({str(script): [broken]})
    assert script.read_text() == "x = f(1)\n"
    assert list(tmp_path.iterdir()) == [script]


def test_old_names_are_all_edited_or_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    loop = "with {}.autocast():\n    pass\nwith torch.cpu.amp.autocast():\n    pass\n"
    for text, is_edited in (
        ("import torch\nfrom torch.cuda import amp\n" + loop.format("amp"), False),  # the import would have to change
        ("import torch\n" + loop.format("torch.cuda.amp"), True),
    ):
        script.write_text(text)
        [finding] = [f for f in check([script]).findings if f.rule == "deprecated-amp"]
        assert bool(finding.edits) == is_edited


def test_a_line_that_must_be_deleted_is_not_aligned(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true}}\n')
    config = tmp_path / "acc.yaml"
    config.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    findings = check([config, tmp_path / "ds.json"]).findings
    refused = [f.place for f in findings if f.rule == "launch-refused"]
    assert refused
    assert not [f for f in findings if f.place in refused and f.edits]
