"""`halfstep export`: write a run's weights for other programs, and score the written file on the validation data.

The file that was written is what is scored: safetensors are read back into the model, an ONNX file runs in
onnxruntime. All of it runs on the CPU, where every format can be compared."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.disk import find_unused_path, open_atomic_folder, write_atomically
from halfstep.errors import ConfigError, format_bytes
from halfstep.hardware.clock import Stopwatch
from halfstep.step.randomness import choose_algorithms
from halfstep.tensor_files import write_tensors
from halfstep_train.report.console import dump_json, make_columns_table, make_pairs_table, print_text, silence
from halfstep_train.report.run_report import RunReport, UsedRun
from halfstep_train.run.folder import refuse_used_folder
from halfstep_train.run.frozen_modules import name_lost_files
from halfstep_train.use.evaluate import LoadedModel, choose_plan, load_data, load_weights, open_run
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.kind import Export, ExportCommand, load_part
from halfstep_train.workloads.base.using import PlainEvaluation
from halfstep_train.workloads.base.workload import Workload

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST_FALL = 0.01
"""A metric that becomes worse by more than this share of its value is reported."""
NUM_CALIBRATED = 64
"""Training samples from which onnxruntime takes the ranges of activations."""
NUM_COMPARED = 4
NUM_TIMED, TIMED_S = 20, 3.0
ONE_FILE_BYTES = 2**31 - 2**20
"""A protocol buffer holds at most 2 GiB: larger weights go into a second file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult(UsedRun):
    """What was written, and its scores, as plain values. `before` and `after` refer to the run's weights in fp32 and to
    the written file."""

    to: str
    format: str
    files: tuple[str, ...]
    metric: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    num_samples: int
    bytes_before: int
    bytes_after: int
    ms_before: float
    """Time of one sample on this CPU in torch; below of the written file, in onnxruntime or read back into torch."""
    ms_after: float
    largest_difference: float | None
    """Between the outputs for the first validation samples."""
    quantised_share: float | None
    warning: str


def export(
    path: Path,
    *,
    to: str,
    format: str,
    report: RunReport,
    data: Path | None = None,
    out: Path | None = None,
    checkpoint: str = "best",
    trust: bool = False,
) -> ExportResult:
    """Write the weights in a format, and compare the scores of the run's weights with those of the written file."""
    clock = Stopwatch()
    run = open_run(path, checkpoint=checkpoint, trust=trust)
    kind = KINDS.of(run.config.workload)
    command = kind.export_command
    assert command is not None, "the command line refuses other families"
    evaluating_as: Any = load_part(kind.evaluate.evaluation) if kind.evaluate else PlainEvaluation
    with name_lost_files(run.frozen):
        config, workload = load_data(run, evaluating_as, data, report)
    plan = choose_plan(run, workload.model, device="cpu", precision="fp32")
    report.warn((*run.notes, *plan.warnings))
    target = out or find_unused_path(run.folder.path / "export" / f"{to}-{format}")
    refuse_used_folder(target)
    # Hidden until everything is written and scored: an interrupted export leaves nothing behind.
    with (
        open_atomic_folder(target, replaces=True) as folder,
        choose_algorithms(deterministic=config.train.deterministic),
    ):
        model = load_weights(run, workload.model, plan, values=workload.values)
        loaded = LoadedModel(run, config, workload, model, plan, report, None)
        before = _score(loaded, evaluating_as, folder / "before")
        x = loaded.look(0)[0][command.input]
        written: nn.Module
        if to == "safetensors":
            written = write_safetensors(model, kind.make_export(config, run.store), command, folder, DTYPES[format])
            largest, share = None, None
        else:
            with report.show_phase("Writing ONNX", 1) as bar:
                share = write_onnx(loaded, command, folder / "model.onnx", format)
                bar.advance()
            written = OnnxModel(folder / "model.onnx")
            shown = [loaded.look(k)[0][command.input] for k in range(min(NUM_COMPARED, len(workload.val_samples)))]
            with torch.no_grad():
                largest = max(float((model(one) - written(one)).abs().max()) for one in shown)
        after = _score(replace(loaded, model=written), evaluating_as, folder / "after")
        facts = load_part(command.describe)(config, run.store, folder)
        write_atomically(folder / "preprocessing.json", dump_json(facts) + "\n")
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        found = ExportResult(
            **run.collect_facts(plan),
            to=to,
            format=format,
            files=tuple(str(target / file.relative_to(folder)) for file in (*files, folder / "export.json")),
            metric=workload.metric,
            before=before,
            after=after,
            num_samples=len(workload.val_samples),
            bytes_before=sum(value.nbytes for value in model.state_dict().values()),
            bytes_after=sum(file.stat().st_size for file in files if file.parent == folder),  # not the pictures
            ms_before=_time_sample(model, x),
            ms_after=_time_sample(written, x),
            largest_difference=largest,
            quantised_share=share,
            warning=_warn_about_fall(workload, before, after),
            seconds=round(clock.elapsed_s, 2),
        )
        write_atomically(folder / "export.json", found.to_json() + "\n")
    return found


def _score(loaded: LoadedModel, evaluating_as: Any, folder: Path) -> dict[str, float]:
    """Return the metrics of the validation split, and draw its pictures."""
    evaluation = evaluating_as(loaded.workload)
    metrics = loaded.score(evaluation, {})
    folder.mkdir()
    if not evaluation.draw_pictures(folder, loaded.look):
        folder.rmdir()
    return metrics


def _time_sample(model: nn.Module, x: Tensor) -> float:
    """Return the shortest time of one sample in milliseconds; others on a busy machine take a hundred times as long."""
    times: list[float] = []
    whole = Stopwatch()
    with torch.no_grad():
        model(x)
        while not times or (len(times) < NUM_TIMED and whole.elapsed_s < TIMED_S):
            clock = Stopwatch()
            model(x)
            times.append(1e3 * clock.elapsed_s)
    return min(times)


def _warn_about_fall(workload: Workload, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    then, now = before[workload.metric], after[workload.metric]
    fall = then - now if workload.mode == "max" else now - then
    if fall <= LARGEST_FALL * abs(then):
        return ""
    return (
        f"{workload.metric} is worse by {fall / abs(then):.1%} of its value: {then:.4f} as trained, {now:.4f} exported"
    )


# --- safetensors ---


def write_safetensors(
    model: nn.Module, write: Export | None, command: ExportCommand, folder: Path, dtype: torch.dtype
) -> nn.Module:
    """Write the weights, in the layout of public implementations where there is one, and return a model that has read
    them back."""
    written = copy.deepcopy(model)
    if write is None:
        weights = {
            name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
            for name, value in model.state_dict().items()
        }
        write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
        written.load_state_dict(load_file(folder / "model.safetensors"))
    else:
        assert command.read is not None, "a family that writes a layout of its own also reads it"
        write(model.state_dict(), folder, torch.device("cpu"))
        path = folder / "model.safetensors"
        write_tensors(path, {name: value.to(dtype) for name, value in load_file(path).items()}, {"format": "pt"})
        load_part(command.read)(written, folder)
    return written


# --- ONNX ---


class OnnxModel(nn.Module):
    """An ONNX file as a model of the workload, run by onnxruntime."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        import onnxruntime

        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits or, with targets, the mean cross-entropy over those that count (0 and above)."""
        (output,) = self.session.run(None, {"input": x.contiguous().numpy()})
        logits = torch.from_numpy(output)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp(min=-1), ignore_index=-1)


class InHalf(nn.Module):
    """A model in fp16 that takes and returns fp32, as programs that feed it expect."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x.half() if x.is_floating_point() else x)
        return output.float()


def write_onnx(loaded: LoadedModel, command: ExportCommand, path: Path, format: str) -> float | None:
    """Write the model with a dynamic batch. For int8 return the share of the weights that was quantised."""
    model = loaded.model
    x = loaded.look(0)[0][command.input]
    shapes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if command.longest is not None:
        shapes[1] = torch.export.Dim("tokens", min=2, max=load_part(command.longest)(loaded.config))
    exported = (InHalf(model) if format == "fp16" else model).eval()
    num_bytes = sum(value.nbytes for value in exported.state_dict().values())
    if format == "int8" and num_bytes > ONE_FILE_BYTES:
        raise ConfigError(
            f"{format_bytes(num_bytes)} of weights cannot be quantised",
            why="onnxruntime's quantizer reads files of at most 2 GiB",
            fix="--format fp16",
        )
    with silence(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / "fp32.onnx" if format == "int8" else path
        try:
            torch.onnx.export(
                exported, (torch.cat([x, x]).contiguous(),), target, dynamo=True, dynamic_shapes=(shapes,),
                input_names=["input"], output_names=["output"], external_data=num_bytes > ONE_FILE_BYTES, verbose=False,
            )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as error:
            raise ConfigError(
                f"torch.onnx cannot export this {loaded.config.workload}",
                why=" ".join(str(error).split())[:300],
                fix="--to safetensors, or a model without custom code",
            ) from error
        share = _quantise(loaded, command, target, path) if format == "int8" else None
    if num_bytes <= ONE_FILE_BYTES:
        _remove_traces(path)
    return share


def _remove_traces(path: Path) -> None:
    """Remove the stack traces that torch notes at each operation: they name folders of this machine."""
    import onnx

    stored = onnx.load(str(path))
    for node in stored.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    onnx.save(stored, str(path))


def _quantise(loaded: LoadedModel, command: ExportCommand, source: Path, target: Path) -> float:
    """Quantise weights and activations to int8, by their ranges over training samples. Return the share of the weights
    that was quantised."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    samples = loaded.workload.train_samples
    picked = list(range(0, len(samples), max(1, len(samples) // NUM_CALIBRATED)))[:NUM_CALIBRATED]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = (loaded.look(index, samples)[0][command.input] for index in picked)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {"input": batch.contiguous().numpy()}

    prepared = source.with_name("prepared.onnx")
    quant_pre_process(str(source), str(prepared))
    quantize_static(
        str(prepared), str(target), Reader(), per_channel=True, weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
    )  # fmt: skip
    stored = onnx.load(str(target)).graph.initializer
    # Weights in 8 bits may be padded or, if two layers share them, stored twice: count what is left in 32 bits.
    left = [one for one in stored if one.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.INT32)]
    num_left = sum(math.prod(one.dims) for one in left if not one.name.endswith(("_scale", "_zero_point")))
    return 1 - num_left / sum(weight.numel() for weight in loaded.model.parameters())


# --- console ---


def show_export(found: ExportResult, console: Console) -> None:
    """Print what was written, and scores, size and time before and after."""
    names = [name for name in found.before if "/" not in name]

    def list_cells(scores: Mapping[str, float], num_bytes: int, ms: float) -> list[str]:
        return [*(f"{scores[name]:.4f}" for name in names), format_bytes(num_bytes), f"{ms:.2f} ms"]

    columns = {
        "": [*names, "size", "time per sample on this CPU"],
        "run, fp32": list_cells(found.before, found.bytes_before, found.ms_before),
        f"{found.to}, {found.format}": list_cells(found.after, found.bytes_after, found.ms_after),
    }
    facts = {"run": found.run, "checkpoint": f"{found.checkpoint}, weights {found.weights}"}
    facts["scored on"] = f"{found.num_samples:,} validation samples"
    console.print(make_pairs_table(facts.items()), soft_wrap=True)
    console.print()
    console.print(make_columns_table(columns, left=[""]), soft_wrap=True)
    console.print()
    if found.largest_difference is not None:
        num_compared = min(NUM_COMPARED, found.num_samples)
        console.print(f"largest difference from halfstep, {num_compared} samples: {found.largest_difference:.3g}")
    if found.quantised_share is not None:
        console.print(f"weights quantised to int8: {found.quantised_share:.1%}")
    if found.warning:
        print_text(console, Text(f"warning: {found.warning}", style="yellow"))
    for path in found.files:
        console.print(Text(f"wrote {path}", style="dim"), soft_wrap=True)
