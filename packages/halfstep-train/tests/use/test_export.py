"""`halfstep export`: files that other programs load, with the scores of the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halfstep.errors import ConfigError
from halfstep_train.cli.export import ONNX_PACKAGES, refuse_wrong_family, refuse_wrong_formats
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate, open_run
from halfstep_train.use.export import ExportResult, _warn_about_fall, export
from halfstep_train.workloads import KINDS, build, load
from tiny_runs import Told


def export_run(run: Path, to: str, format: str, out: Path) -> ExportResult:
    return export(run, to=to, format=format, out=out, report=Told(run).report)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "input.txt").write_text("the cat sat on the mat and the dog lay on the log; " * 80)
    overrides = [
        *(f"data.dir={folder / 'input.txt'}", "device=cpu", "data.num_workers=0", "log.quiet=true"),
        *("model.depth=1", "model.dim=16", "model.heads=2", "model.context=16", "train.max_steps=4"),
    ]
    return train(load("gpt2", overrides=overrides), out=folder / "run")


@pytest.mark.parametrize("format", ["fp32", "fp16", "bf16"])
def test_safetensors_have_the_scores_of_the_run(trained_unet: Path, tmp_path: Path, format: str) -> None:
    found = export_run(trained_unet, "safetensors", format, tmp_path / "out")
    if format == "fp32":
        expected = evaluate(trained_unet, report=Told(trained_unet).report, precision="fp32").metrics
        assert found.before == pytest.approx({name: expected[name] for name in found.before})
        assert found.after == found.before
    else:
        assert found.after != found.before  # what is scored is what was written
        assert found.after == pytest.approx(found.before, abs=0.02)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    dtypes = {value.dtype for value in stored.values() if value.is_floating_point()}
    assert dtypes == {{"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[format]}
    assert json.loads((tmp_path / "out" / "export.json").read_text())["after"] == found.after


@pytest.mark.slow  # transformers takes seconds to import
def test_transformers_loads_what_gpt2_exports(gpt2: Path, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    found = export_run(gpt2, "safetensors", "bf16", tmp_path / "out")
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert model.config.n_positions == 16
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert found.after["perplexity"] == pytest.approx(found.before["perplexity"], rel=0.05)


@pytest.mark.slow  # torch.onnx takes seconds to load its operators
@pytest.mark.parametrize("format", ["fp32", "fp16", "int8"])
def test_onnx_has_the_scores_of_the_run(trained_resnet: Path, tmp_path: Path, format: str) -> None:
    found = export_run(trained_resnet, "onnx", format, tmp_path / "out")
    assert found.largest_difference is not None
    assert found.largest_difference < {"fp32": 1e-4, "fp16": 0.02, "int8": 0.5}[format]
    assert found.after["loss"] == pytest.approx(found.before["loss"], rel=0.1)
    if format == "int8":
        assert found.quantised_share is not None
        assert 0.95 < found.quantised_share <= 1.0
    assert b"site-packages" not in (tmp_path / "out" / "model.onnx").read_bytes()
    facts = json.loads((tmp_path / "out" / "preprocessing.json").read_text())
    assert (facts["size"], len(facts["classes"]), facts["mean"]) == (32, 10, [0.485, 0.456, 0.406])
    assert run_onnx(tmp_path / "out" / "model.onnx", torch.randn(5, 3, 32, 32)).shape == (5, 10)


@pytest.mark.slow
def test_onnx_of_a_language_model_takes_any_length(gpt2: Path, tmp_path: Path) -> None:
    found = export_run(gpt2, "onnx", "fp32", tmp_path / "out")
    assert found.after["perplexity"] == pytest.approx(found.before["perplexity"], rel=1e-4)
    logits = run_onnx(tmp_path / "out" / "model.onnx", torch.zeros(3, 7, dtype=torch.int64))
    assert logits.shape[:2] == (3, 7)
    assert (tmp_path / "out" / "halfstep_tokenizer.json").exists()


@pytest.mark.slow
def test_onnx_of_an_averaged_unet_draws_its_predictions(trained_unet: Path, tmp_path: Path) -> None:
    found = export_run(trained_unet, "onnx", "int8", tmp_path / "out")
    assert found.weights == "averaged (EMA)"
    assert {"before/contact_sheet.png", "after/contact_sheet.png"} < {
        str(Path(file).relative_to(tmp_path / "out")) for file in found.files
    }


def run_onnx(path: Path, x: torch.Tensor) -> Any:
    """Return the output in a process without torch, as users of the file have it."""
    x.numpy().tofile(path.with_suffix(".raw"))
    script = (
        "import sys, numpy, onnxruntime; path, dtype, *shape = sys.argv[1:]; "
        "x = numpy.fromfile(path.replace('.onnx', '.raw'), dtype).reshape([int(side) for side in shape]); "
        "(y,) = onnxruntime.InferenceSession(path).run(None, {'input': x}); print(*y.shape)"
    )
    arguments = [str(path), str(x.numpy().dtype), *map(str, x.shape)]
    called = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return torch.empty([int(side) for side in called.stdout.split()], device="meta")


def test_a_failed_export_leaves_nothing_behind(
    trained_unet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("halfstep_train.use.export.write_safetensors", stop)
    with pytest.raises(KeyboardInterrupt):
        export_run(trained_unet, "safetensors", "fp32", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- refusals ---


@pytest.mark.parametrize(
    ("to", "format", "part"),
    [
        ("onnx", "bf16", "fp32, fp16, int8"),
        ("safetensors", "int8", "fp32, fp16, bf16"),
    ],
)
def test_formats_that_do_not_exist_are_refused(to: str, format: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_wrong_formats(to, format)
    assert part in caught.value.fix


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuse_wrong_formats("safetensors", "fp16")
    with pytest.raises(ConfigError, match="needs onnx, onnxscript, onnxruntime") as caught:
        refuse_wrong_formats("onnx", "fp32")
    assert all(name in caught.value.fix for name in ONNX_PACKAGES)


@pytest.mark.parametrize(
    ("workload", "fix"), [("diffusion", "model"), ("slotcontrast", "halfstep predict"), ("steve", "halfstep predict")]
)
def test_other_families_name_what_they_have(tmp_path: Path, workload: str, fix: str) -> None:
    (tmp_path / "config.yaml").write_text(f"workload: {workload}\n")
    with pytest.raises(ConfigError, match=f"{workload} cannot be exported") as caught:
        refuse_wrong_family(tmp_path, trust=False)
    assert fix in caught.value.fix


def test_a_metric_that_falls_is_reported(trained_unet: Path) -> None:
    run = open_run(trained_unet)
    workload = build(run.config, run.store)
    assert _warn_about_fall(workload, {"iou": 0.80}, {"iou": 0.793}) == ""
    assert "worse by 2.5%" in _warn_about_fall(workload, {"iou": 0.80}, {"iou": 0.78})


def test_gpt2_is_the_only_exported_family_with_a_layout_of_its_own() -> None:
    kinds = {workload: KINDS.of(workload) for workload in KINDS}
    own = [workload for workload, kind in kinds.items() if kind.export_command and kind.export]
    assert own == ["gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"]
    assert all(kinds[workload].export_command.read for workload in own)  # type: ignore[union-attr]
