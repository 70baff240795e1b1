"""The report around the rules: unreadable files, ignore comments, projects, SARIF, and the catalogue itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from halfstep_check.check import check, read_lightning_version
from halfstep_check.export import export_json, export_sarif
from halfstep_check.rules import RULES, get_rule
from halfstep_check.shared.errors import ConfigError

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
    "comment",
    [
        "  # halfstep: ignore[clip-before-unscale]",
        "  # halfstep: ignore",
        "  # halfstep: ignore[clip-twice, clip-before-unscale]",
    ],
)
def test_an_ignore_comment_silences_its_line(comment: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(BUG.format(comment=comment))
    report = check([path])
    assert report.findings == ()
    assert report.num_ignored == 1
    assert report.exit_code == 0


def test_an_ignore_comment_for_another_rule_silences_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(BUG.format(comment="  # halfstep: ignore[clip-twice]"))
    assert check([path]).exit_code == 1


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


def test_files_of_a_project_that_nothing_links_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("trainer: {amp: False, fp16: False}\n")
    (tmp_path / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: fp16\n")
    (tmp_path / "lit.yaml").write_text("trainer: {precision: bf16-mixed, gradient_clip_val: 1.0}\n")
    (tmp_path / "train.py").write_text("import torch\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n")
    assert check([], project=tmp_path).findings == ()


def write_project(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def project_rules(folder: Path) -> list[str]:
    return [finding.rule for finding in check([], project=folder).findings]


LAUNCHED = {
    "conf/acc.yaml": "distributed_type: MULTI_GPU\nmixed_precision: bf16\n",
    "src/train.py": "accelerator = Accelerator(mixed_precision='fp16')\n",
}


def test_a_launcher_joins_its_config_and_its_script(tmp_path: Path) -> None:
    run = "accelerate launch --config_file conf/acc.yaml src/train.py\n"
    assert project_rules(write_project(tmp_path, LAUNCHED | {"scripts/run.sh": run})) == ["precision-conflict"]


def test_a_launcher_that_starts_another_script_joins_nothing(tmp_path: Path) -> None:
    run = "accelerate launch --config_file conf/acc.yaml src/evaluate.py\n"
    assert project_rules(write_project(tmp_path, LAUNCHED | {"run.sh": run})) == []


def test_many_launchers_of_one_script_report_a_cause_once(tmp_path: Path) -> None:
    run = "accelerate launch --config_file conf/acc.yaml src/train.py --seed {}\n"
    launchers = {f"run{seed}.sh": run.format(seed) for seed in range(5)}
    assert project_rules(write_project(tmp_path, LAUNCHED | launchers)) == ["precision-conflict"]


def test_a_module_started_with_m_and_an_import_are_links(tmp_path: Path) -> None:
    files = {
        "run.sh": "accelerate launch --config_file conf/acc.yaml -m src.main\n",
        "src/main.py": "from src.train import accelerator\n",
    }
    assert project_rules(write_project(tmp_path, LAUNCHED | files)) == ["precision-conflict"]


def test_a_script_that_names_one_of_many_configs_is_compared_with_none(tmp_path: Path) -> None:
    files = {
        "train.py": "CONFIGS = ['a.yaml', 'b.yaml']\naccelerator = Accelerator(mixed_precision='fp16')\n",
        "a.yaml": "distributed_type: NO\nmixed_precision: bf16\n",
        "b.yaml": "distributed_type: NO\nmixed_precision: fp16\n",
    }
    assert project_rules(write_project(tmp_path, files)) == []


def test_a_config_that_builds_on_another_of_its_kind_is_no_conflict(tmp_path: Path) -> None:
    files = {
        "train.yaml": "use_amp: false\n",
        "train_amp.yaml": "parent: train.yaml\nuse_amp: true\namp_dtype: float16\n",
    }
    assert project_rules(write_project(tmp_path, files)) == []


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


def test_a_large_tree_is_read_in_a_pool_with_the_same_findings_and_counts_its_files(tmp_path: Path) -> None:
    write_project(tmp_path, {f"{number:03}/train.py": BUG.format(comment="") for number in range(120)})
    seen: list[tuple[int, int]] = []
    report = check([], project=tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert [finding.rule for finding in report.findings] == ["clip-before-unscale"] * 120
    assert seen[-1] == (120, 120)


def test_framework_calls_in_several_scripts_are_several_runs(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("trainer = L.Trainer(precision='bf16-mixed')\n")
    (tmp_path / "b.py").write_text("accelerator = Accelerator(mixed_precision='fp16')\n")
    assert check([tmp_path]).findings == ()
    assert [f.rule for f in check([tmp_path / "a.py", tmp_path / "b.py"]).findings] == ["precision-conflict"]


def test_a_project_folder_that_is_not_there_is_unreadable_input(tmp_path: Path) -> None:
    assert check([], project=tmp_path / "gone").exit_code == 2


def test_the_global_batch_is_not_computed_from_accumulations_that_disagree(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 4\n")
    (tmp_path / "args.json").write_text('{"output_dir": "out", "gradient_accumulation_steps": 8}')
    batch = '"train_batch_size": 128, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4'
    (tmp_path / "ds.json").write_text(f"{{{batch}}}")
    report = check([tmp_path / name for name in ("acc.yaml", "args.json", "ds.json")])
    assert [finding.rule for finding in report.findings] == ["accumulation-conflict"]


def test_sarif_points_at_line_and_column_and_describes_its_rules(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(BUG.format(comment=""))
    log = json.loads(json.dumps(export_sarif(check([path]).findings, "1.0")))
    run = log["runs"][0]
    assert log["version"] == "2.1.0"
    assert run["results"][0]["ruleId"] == run["tool"]["driver"]["rules"][0]["id"] == "clip-before-unscale"
    region = run["results"][0]["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 5, "startColumn": 5}


def test_sarif_names_files_by_uri(tmp_path: Path) -> None:
    path = tmp_path / "my train.py"
    path.write_text(BUG.format(comment=""))
    location = export_sarif(check([path]).findings, "1.0")["runs"][0]["results"][0]["locations"][0]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == path.as_uri()


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


def test_an_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown rule 'clip-before'") as caught:
        get_rule("clip-before")
    assert "clip-before-unscale" in caught.value.fix


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


def test_a_name_too_long_for_a_file_is_a_message(tmp_path: Path) -> None:
    report = check([tmp_path / ("x" * 5000)])
    assert report.exit_code == 2


def test_a_file_of_a_folder_that_cannot_be_read_is_named_and_not_counted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from torch.amp import GradScaler\ndef f(:\n")
    (tmp_path / "accelerate.yaml").write_text("mixed_precision: [bf16\n")
    report = check([], project=tmp_path)
    assert [Path(text.split(":")[0]).name for text in sorted(report.skipped)] == ["accelerate.yaml", "train.py"]
    assert (report.num_scripts, report.exit_code) == (0, 0)
