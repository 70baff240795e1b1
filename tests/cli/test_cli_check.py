"""`halfstep check` as a user meets it: output, exit codes, patches, explanations, without torch."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["check", *argv])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


@pytest.fixture
def guide_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "radio.yaml").write_text("trainer:\n  amp: True\n  fp16: False  # by AMP\n")
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    return tmp_path


def test_guide_4_shows_what_runs_and_both_errors(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "radio.yaml", "acc.yaml")
    assert code == 1
    assert "fp16-without-scaling" in out
    assert "radio.yaml:2" in out
    assert "acc.yaml:2" in out
    assert "beats accelerate's file" in out
    assert "2 errors" in out


@pytest.mark.parametrize(
    "text",
    [
        "workload: unet\ntrain: {epochz: 3}\n",
        "workload: unett\n",
        "workload: unet\ntrain: {epochs: many}\n",
        "workload: unet\nglobals: {a: '${globals.a}'}\ndata: {dir: '${globals.a}'}\n",
        "workload: unet\nglobals: {a: " + "x" * 1000 + ", b: '" + "${globals.a}" * 99 + "', c: '" + "${globals.b}" * 99
        + "'}\ndata: {dir: '${globals.c}'}\n",
        "workload: unet\npreset: fastest\n",
        "workload: unet\nmodel: {path: mine}\n",
    ],
)  # fmt: skip
def test_an_own_config_that_train_refuses_is_refused_in_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["train", "own.yaml"])
    words = capsys.readouterr().err.strip()
    assert words.startswith("error: ")
    code, out, err = run(capsys, "own.yaml")
    assert (code, err.strip()) == (2, words)
    assert "nothing wrong" not in out


def test_an_own_config_that_train_takes_has_nothing_wrong_and_own_workloads_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise RuntimeError('imported')\n")
    for workload in ("unet", "mine:build", "${globals.name}\nglobals: {name: 'mine:build'}"):
        (tmp_path / "own.yaml").write_text(f"workload: {workload}\nprecision: bf16\n")
        code, out, err = run(capsys, "own.yaml")
        assert (code, err) == (0, "")
        assert "nothing wrong" in out


def test_fix_prints_a_patch_and_changes_nothing(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "radio.yaml", "acc.yaml", "--fix")
    assert code == 1
    assert "+  fp16: True  # by AMP" in out
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


def test_this_machine_can_be_asked(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "acc.yaml", "--hardware")
    assert code in (0, 1)
    assert not err


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


def test_check_works_without_torch_and_never_imports_it(guide_4: Path) -> None:
    hide = "import sys; sys.modules['torch'] = None"
    code = f"{hide}\nfrom halfstep.cli.main import main\nmain(['check', 'acc.yaml', 'train.py'])"
    (guide_4 / "train.py").write_text("loss.backward()\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=guide_4, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_two_files_take_less_than_half_a_second_of_work(guide_4: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "halfstep", "check", "radio.yaml", "acc.yaml"], capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, so that a busy machine does not matter; 0.42 s on a Neoverse-N1 core, doubled for slower ones.
    assert after.ru_utime - before.ru_utime < 0.9


def test_a_folder_without_scripts_is_no_green_light(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
    with pytest.raises(SystemExit) as stopped:
        main(["check", str(tmp_path)])
    assert stopped.value.code == 2
    assert "--project" in capsys.readouterr().err.replace("\n", " ")


def test_findings_come_before_the_tables(guide_4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "radio.yaml", "acc.yaml")
    assert out.index("[fp16-without-scaling]") < out.index("written as") < out.index("in effect")


def test_a_claim_of_a_guide_is_contradicted_with_the_measurement(
    guide_4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "radio.yaml", "acc.yaml")
    assert '"Unsupported dtype BFloat16" in its FFT block' in out
    assert "H200" in out


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
