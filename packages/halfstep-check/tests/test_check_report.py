"""The report around the rules: unreadable files, ignore comments, projects, SARIF, and the catalogue itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from halfstep_check.check import check, read_lightning_version
from halfstep_check.export import export_json, export_sarif
from halfstep_check.rules import RULES

BUG = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    scaler.scale(model(x)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0){comment}
    scaler.step(optimizer)
    scaler.update()
"""


def test_an_unreadable_file_is_exit_code_two_and_the_others_are_still_checked(tmp_path: Path) -> None:
    good, bad = tmp_path / "train.py", tmp_path / "broken.yaml"
    good.write_text(BUG.format(comment=""))
    bad.write_text("trainer: [1,\n")
    report = check([good, bad, tmp_path / "missing.yaml"])
    assert report.exit_code == 2
    assert [finding.rule for finding in report.findings] == ["clip-before-unscale"]
    assert len(report.unreadable) == 2
    assert all(str(tmp_path) in error.what for error in report.unreadable)


@pytest.mark.parametrize(
    ("rules", "is_silenced"),
    [("[clip-before-unscale]", True), ("", True), ("[clip-twice, clip-before-unscale]", True), ("[clip-twice]", False)],
)
def test_an_ignore_comment_silences_the_rules_of_its_line(rules: str, is_silenced: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(BUG.format(comment=f"  # halfstep: ignore{rules}"))
    report = check([path])
    assert (len(report.findings), report.num_ignored, report.exit_code) == ((0, 1, 0) if is_silenced else (1, 0, 1))


def test_information_alone_does_not_fail_the_check(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"bf16": {"enabled": true}}')
    report = check([path])
    assert [finding.rule for finding in report.findings] == ["deepspeed-bf16-weights"]
    assert report.exit_code == 0


def test_a_project_is_searched_and_its_pins_are_read(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "movi.yaml").write_text("trainer: {precision: bf16-mixed, max_epochs: 3}\n")
    (tmp_path / "configs" / "classes.json").write_text('{"cat": 0}')
    (tmp_path / "poetry.lock").write_text('[[package]]\nname = "pytorch-lightning"\nversion = "1.9.5"\n')
    (tmp_path / "train.py").write_text(BUG.format(comment=""))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "other.py").write_text(BUG.format(comment=""))
    report = check([], project=tmp_path)
    assert sorted(finding.rule for finding in report.findings) == ["clip-before-unscale", "unknown-value"]
    assert report.num_scripts == 1


def test_what_past_runs_left_behind_is_no_config_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("workload: unet\nprecision: bf16\n")
    run = tmp_path / "runs" / "unet-1"
    (run / "report").mkdir(parents=True)
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "report/evaluation.json"):
        (run / name).write_text('{"workload": "unet", "precision": "fp16"}')
    assert [source.name for source in check([], project=tmp_path).sources] == [str(tmp_path / "train.yaml")]


def test_many_configs_of_one_kind_in_a_project_are_many_runs_not_a_conflict(tmp_path: Path) -> None:
    for name, precision in (("a", "bf16-mixed"), ("b", "16-mixed"), ("c", "32-true")):
        (tmp_path / f"{name}.yaml").write_text(f"trainer: {{precision: {precision}}}\n")
    assert check([], project=tmp_path).findings == ()
    named = check([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    assert [finding.rule for finding in named.findings] == ["precision-conflict"]


def write_project(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


LAUNCHED = {
    "conf/acc.yaml": "distributed_type: MULTI_GPU\nmixed_precision: bf16\n",
    "src/train.py": "accelerator = Accelerator(mixed_precision='fp16')\n",
}
LAUNCH = "accelerate launch --config_file conf/acc.yaml {}\n"
PROJECTS: dict[str, tuple[dict[str, str], list[str]]] = {
    "a launcher joins its config and its script": (
        LAUNCHED | {"scripts/run.sh": LAUNCH.format("src/train.py")}, ["precision-conflict"],
    ),
    "a launcher of another script joins nothing": (LAUNCHED | {"run.sh": LAUNCH.format("src/evaluate.py")}, []),
    "many launchers of one script report a cause once": (
        LAUNCHED | {f"run{seed}.sh": LAUNCH.format(f"src/train.py --seed {seed}") for seed in range(5)},
        ["precision-conflict"],
    ),
    "a module started with -m and an import are links": (
        LAUNCHED | {"run.sh": LAUNCH.format("-m src.main"), "src/main.py": "from src.train import accelerator\n"},
        ["precision-conflict"],
    ),
    "a script that names one of many configs is compared with none": (
        {
            "train.py": "CONFIGS = ['a.yaml', 'b.yaml']\naccelerator = Accelerator(mixed_precision='fp16')\n",
            "a.yaml": "distributed_type: NO\nmixed_precision: bf16\n",
            "b.yaml": "distributed_type: NO\nmixed_precision: fp16\n",
        },
        [],
    ),
    "a config that builds on another of its kind is no conflict": (
        {"train.yaml": "use_amp: false\n", "train_amp.yaml": "parent: train.yaml\nuse_amp: true\namp_dtype: float16\n"},
        [],
    ),
    "files that nothing links are not compared": (
        {
            "a.yaml": "trainer: {amp: False, fp16: False}\n",
            "accelerate.yaml": "distributed_type: MULTI_GPU\nmixed_precision: fp16\n",
            "lit.yaml": "trainer: {precision: bf16-mixed, gradient_clip_val: 1.0}\n",
            "train.py": "import torch\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        },
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PROJECTS)
def test_only_linked_files_of_a_project_are_compared(case: str, tmp_path: Path) -> None:
    files, rules = PROJECTS[case]
    assert [finding.rule for finding in check([], project=write_project(tmp_path, files)).findings] == rules


def test_hydra_groups_are_part_of_the_config_that_names_them(tmp_path: Path) -> None:
    files = {
        "train.py": '@hydra.main(config_path="configs", config_name="train")\ndef main(cfg):\n    clip(cfg)\n'
        "def clip(cfg):\n    torch.nn.utils.clip_grad_norm_(params, 1.0)\n",
        "configs/train.yaml": "defaults:\n  - trainer: gpu\n",
        "configs/trainer/gpu.yaml": "_target_: lightning.Trainer\ngradient_clip_val: 0.5\n",
        "configs/trainer/cpu.yaml": "_target_: lightning.Trainer\ngradient_clip_val: 0.1\n",
    }
    report = check([], project=write_project(tmp_path, files))
    assert [finding.rule for finding in report.findings] == ["clip-two-layers"]
    assert "gpu.yaml" in str(report.findings[0].related)


@pytest.mark.parametrize("folder", ["vendor", "third_party", "tests", "lib/site-packages"])
def test_other_peoples_code_and_tests_are_left_out_of_a_project(folder: str, tmp_path: Path) -> None:
    write_project(tmp_path, {f"{folder}/train.py": BUG.format(comment=""), "main.py": "print()\n"})
    assert check([], project=tmp_path).num_scripts == 1


def test_a_large_tree_is_read_in_a_pool_with_the_same_findings(tmp_path: Path) -> None:
    write_project(tmp_path, {f"{number:03}/train.py": BUG.format(comment="") for number in range(120)})
    assert [finding.rule for finding in check([], project=tmp_path).findings] == ["clip-before-unscale"] * 120


def test_framework_calls_in_several_scripts_are_several_runs(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("trainer = L.Trainer(precision='bf16-mixed')\n")
    (tmp_path / "b.py").write_text("accelerator = Accelerator(mixed_precision='fp16')\n")
    assert check([tmp_path]).findings == ()
    assert [f.rule for f in check([tmp_path / "a.py", tmp_path / "b.py"]).findings] == ["precision-conflict"]


def test_paths_that_cannot_be_read_are_unreadable_input(tmp_path: Path) -> None:
    assert check([], project=tmp_path / "gone").exit_code == 2
    assert check([tmp_path / ("x" * 5000)]).exit_code == 2  # longer than a file system takes


def test_the_global_batch_is_not_computed_from_accumulations_that_disagree(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 4\n")
    (tmp_path / "args.json").write_text('{"output_dir": "out", "gradient_accumulation_steps": 8}')
    batch = '"train_batch_size": 128, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4'
    (tmp_path / "ds.json").write_text(f"{{{batch}}}")
    report = check([tmp_path / name for name in ("acc.yaml", "args.json", "ds.json")])
    assert [finding.rule for finding in report.findings] == ["accumulation-conflict"]


def test_sarif_points_at_line_and_column_names_files_by_uri_and_describes_its_rules(tmp_path: Path) -> None:
    path = tmp_path / "my train.py"
    path.write_text(BUG.format(comment=""))
    log = json.loads(json.dumps(export_sarif(check([path]).findings, "1.0")))
    run = log["runs"][0]
    assert log["version"] == "2.1.0"
    assert run["results"][0]["ruleId"] == run["tool"]["driver"]["rules"][0]["id"] == "clip-before-unscale"
    where = run["results"][0]["locations"][0]["physicalLocation"]
    assert where["region"] == {"startLine": 5, "startColumn": 5}
    assert where["artifactLocation"]["uri"] == path.as_uri()


def test_json_holds_sources_effective_values_and_findings(tmp_path: Path) -> None:
    path = tmp_path / "lit.yaml"
    path.write_text("trainer:\n  precision: bf16-true\n")
    content = json.loads(json.dumps(export_json(check([path]))))
    assert content["exit_code"] == 0
    assert content["effective"]["weights"]["value"] == "bf16"
    assert content["findings"][0]["line"] == 2
    assert content["sources"][0]["says"][0] == {
        "topic": "precision",
        "value": "bf16",
        "spelled": "trainer.precision: bf16-true",
        "line": 2,
    }


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_every_rule_explains_itself(rule) -> None:  # type: ignore[no-untyped-def]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
    assert rule.title
    assert len(rule.why) > 60
    assert rule.bad != rule.good
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in rule.threads)


SAVES_WITHOUT_THE_SCALER = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    optimizer.zero_grad()
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""


@pytest.mark.parametrize(
    ("resume", "severity", "code"), [("", "info", 0), ("optimizer.load_state_dict(old)\n", "warning", 1)]
)
def test_an_unsaved_scaler_fails_a_check_only_where_the_file_resumes(
    tmp_path: Path, resume: str, severity: str, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAVES_WITHOUT_THE_SCALER + resume)
    report = check([script])
    found = [f for f in export_json(report)["findings"] if f["rule"] == "scaler-not-saved"]
    assert [f["severity"] for f in found] == [severity]
    assert report.exit_code == code


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("pytorch-lightning==1.9.5", "1.9.5"),
        ('pytorch-lightning = "^1.8.3"', "1.8.3"),
        ("torch\nlightning>=2.1", "2.1"),
        ('dependencies = ["pytorch_lightning~=2.0"]', "2.0"),
        ("torch==2.4", ""),
    ],
)
def test_the_pinned_lightning_version_is_found(text: str, version: str) -> None:
    assert read_lightning_version(text) == version


def test_a_file_of_another_kind_says_which_kinds_are_read(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text("# notes: [unfinished")
    report = check([path])
    assert report.exit_code == 2
    assert "YAML" in report.unreadable[0].why


def test_a_file_of_a_folder_that_cannot_be_read_is_named_and_not_counted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from torch.amp import GradScaler\ndef f(:\n")
    (tmp_path / "accelerate.yaml").write_text("mixed_precision: [bf16\n")
    report = check([], project=tmp_path)
    assert [Path(text.split(":")[0]).name for text in sorted(report.skipped)] == ["accelerate.yaml", "train.py"]
    assert (report.num_scripts, report.exit_code) == (0, 0)
