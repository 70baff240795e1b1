"""Diagnose why a step went bad by comparing it with the same step in fp32, fp64, eager and without our kernels.

The order of the questions is the classifier: whether the step fails again at all, whether it fails in eager code, the
inputs, the state, whether the code can run in the format, whether weights have grown far beyond their first size, and
only then what the format did to which operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.evidence import samples
from halfstep.evidence.attempts import Attempt, Subject, attempt
from halfstep.evidence.capsule import Capsule
from halfstep.evidence.patches import HALF, WithoutCasts
from halfstep.evidence.ranges import Operation, find_twin, has_fractions
from halfstep.evidence.recorder import find_non_finite
from halfstep.formats import find_format
from halfstep.precision.plan import Plan

OVERFLOW = "overflow of the format"
UNDERFLOW = "underflow, or an undefined result such as x/0"
REFUSED = "an operation that refuses the format"
BAD_INPUT = "bad input"
BAD_STATE = "bad state"
DIVERGED = "diverging weights"
SPIKE = "finite spike from data or rate"
KERNEL = "a kernel or compiler fault"
UPDATE = "an update that is not finite"
CODE = "an error of the code in every format"
NOT_REPRODUCED = "not reproduced"

GROWTH = 10.0
"""Weight matrices this many times their first size have diverged; ordinary training stays below 3."""
GARBAGE = 1e30
"""No weight or statistic is this large; unwritten memory often is."""
LARGE = 700.0
"""exp(700) is near the largest number of fp64: an infinity from smaller inputs is a pole, in every format."""
JUMP = 1e6
"""A custom operation whose output is this many times its input, or the inverse of that, has read or left memory that it
should not."""
MOST_CHANNELS = 256
"""The most channels of a head in torch's attention kernels."""
DTYPE_FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "complex32": "fp16",
                 "complex64": "fp32", "complex128": "fp64"}  # fmt: skip
DIVIDING = ("div", "div_", "reciprocal", "rsqrt", "log", "log2", "log10", "log1p", "sqrt", "pow", "softmax", "_softmax",
            "_log_softmax", "linalg_vector_norm", "norm", "true_divide", "logsumexp", "native_layer_norm",
            "native_group_norm", "native_batch_norm", "atan2", "remainder", "xlogy", "acos", "asin", "var",
            "std", "_softmax_backward_data", "binary_cross_entropy")  # fmt: skip
"""Operations that leave the finite range on a zero, or on nothing but -inf."""

MEAN_OF_NONE = "a mean over nothing: all targets are ignored (ignore_index), or their weights sum to 0"


@dataclass(kw_only=True, slots=True)
class Diagnosis:
    """The cause and the evidence for it."""

    cause: str
    shown: list[str]
    """Sentences, each an observation."""
    origin: Operation | None = None
    attempts: list[Attempt] = field(default_factory=list)
    places: list[samples.BadSample] = field(default_factory=list)
    rows: dict[tuple[int, int], str] = field(default_factory=dict)
    """Names of the samples to drop."""
    averages: list[str] = field(default_factory=list)
    """Names of averages that are not finite."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Bad weights and buffers by name, each with a mask of its bad numbers."""
    fp32_is_good: bool = False
    loss_is_unbounded: bool = False
    """Whether the loss became negative and fell further as the weights grew."""
    start: dict[str, Tensor] = field(default_factory=dict)
    """Weights of the size with which training began, where steps before this one were good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The attempts that the classifier compares."""

    as_was: Attempt
    again: Attempt
    """The unchanged step, run a second time."""
    eager: Attempt
    fp32: Attempt
    fp64: Attempt
    others: Mapping[str, Attempt]

    def list_all(self) -> list[Attempt]:
        eager = [] if self.eager.name == self.as_was.name else [self.as_was]
        return [*eager, self.eager, *self.others.values(), self.fp32, self.fp64]


def run_all(subject: Subject) -> Runs:
    """Run the step as it was, and in its variants."""
    # Under a trace all code runs eagerly, including what is compiled deep inside a model, and such code may stay eager
    # afterwards. So the step as it was runs first.
    as_was, again = (attempt(subject, "as it was", loss=subject.variants.get("as it was")) for _ in range(2))
    eager = attempt(subject, "eager", traced=True)
    in_fp32 = subject.plan_for("fp32", {})
    others = {name: loss for name, loss in subject.variants.items() if name != "as it was"}
    return Runs(
        as_was=as_was,
        again=again,
        eager=replace(eager, name="as it was") if eager.is_like(as_was) else eager,
        fp32=attempt(subject, "fp32", in_fp32, traced=True),
        fp64=_run_in_fp64(subject, in_fp32),
        others={name: attempt(subject, name, loss=loss) for name, loss in others.items()},
    )


def _run_in_fp64(subject: Subject, plan: Plan) -> Attempt:
    """Run the step in fp64, without the code's own casts to narrower formats as far as it runs without them."""
    narrower = (torch.float32, *HALF)
    # From all casts skipped to none: some code fails without its casts.
    for around in (WithoutCasts(narrower, ours=True), WithoutCasts(narrower), None):
        found = attempt(subject, "fp64", plan, dtype=torch.float64, around=around, traced=True)
        if not found.error or around is None or not around.lines:
            break
    return found


def diagnose(subject: Subject, capsule: Capsule) -> Diagnosis:
    """Run the step in every variant and name the cause."""
    runs = run_all(subject)
    names = dict(zip(capsule.about["sample_ids"], capsule.about["sample_names"], strict=False))
    # The order matters: each question assumes that those before it were answered with no.
    found = (
        _diagnose_update(subject, capsule, runs)
        or _diagnose_good_step(subject, capsule, runs, names)
        or _diagnose_chance(runs)
        or _diagnose_code_path(runs)
        or _diagnose_input(subject, runs, names)
        or _diagnose_state(subject, capsule)
        or _diagnose_refusal(subject, runs)
        or _diagnose_growth(subject, capsule, runs)
        or _diagnose_custom_kernel(runs)
        or _diagnose_attention(runs)
        or _diagnose_buffers(subject, runs)
        or _diagnose_numbers(runs)
    )
    found.attempts, found.fp32_is_good = runs.list_all(), runs.fp32.is_good
    found.start = _draw_first_weights(subject, capsule) if _list_losses(capsule) else {}
    if found.cause == OVERFLOW and not runs.fp32.is_good:
        found.shown += _describe_trail(capsule)
    if found.cause in (OVERFLOW, UNDERFLOW, CODE) and not runs.fp32.is_good:
        _add_culprits(subject, found, names)
    return found


def _add_culprits(subject: Subject, found: Diagnosis, names: Mapping[int, str]) -> None:
    """Add samples to blame if no format would have helped, such as one with an empty mask or an id past the vocabulary.

    Numbers that no other sample has make it bad input; only then may several samples be to blame.
    """
    rows = samples.find_culprits(subject)
    places = samples.find_odd_samples(subject.window, rows, names, with_integers=found.cause == CODE)
    if not rows or len(rows) > max(len(places), 1):
        return
    found.rows = {row: samples.name_sample(subject.window, row, names) for row in sorted(rows)}
    found.shown.append(f"without sample {', '.join(found.rows.values())} the step is good")
    if places:
        found.cause, found.places, found.shown = BAD_INPUT, places, [*map(str, places), *found.shown]


def _diagnose_update(subject: Subject, capsule: Capsule, runs: Runs) -> Diagnosis | None:
    """Diagnose an optimizer that writes non-finite weights: in this step, which is good, or in an earlier one, whose
    weights are replaced by 0 to reproduce it."""
    start = capsule.about["start"]
    weights = dict(subject.model.named_parameters())
    written = {
        name: ~subject.state[name].isfinite()
        for name in find_non_finite(subject.state)
        if name in weights and isinstance(start.get(name), float)
    }
    if subject.update is None or not (runs.as_was.is_good and capsule.about["kind"] != "spike" or written):
        return None
    with subject.replace_state({name: subject.state[name].masked_fill(bad, 0.0) for name, bad in written.items()}):
        after = attempt(subject, "updated", num_more=1)
    ruined = [name for name in after.not_finite if name in weights and (name in written or not written)]
    if not ruined:
        return None
    before = "with 0 in place of non-finite values" if written else "loss and gradients are finite"
    shown = [f"{name} is not finite after a step of {subject.update.names}" for name in ruined[:3]]
    shown.append(f"{before}; one update with fresh optimizer state shows it")
    return Diagnosis(cause=UPDATE, shown=shown, tensors=written)


def _diagnose_good_step(subject: Subject, capsule: Capsule, runs: Runs, names: Mapping[int, str]) -> Diagnosis | None:
    if not runs.as_was.is_good:
        return None
    if capsule.about["kind"] != "spike":
        why = capsule.inexact or "same weights, batches and generators, and a finite step"
        not_again = Diagnosis(cause=NOT_REPRODUCED, shown=[f"the step is good when it is run again: {why}"])
        return _diagnose_state(subject, capsule) or not_again
    if (kernel := _diagnose_custom_kernel(runs)) is not None:
        return kernel
    found = samples.find_outliers(subject, names)
    if found:
        shown = [f"sample {name} alone has the loss {loss:.4g}" for _, name, loss in found]
        return Diagnosis(cause=SPIKE, shown=["from data", *shown], rows={place: name for place, name, _ in found})
    return Diagnosis(cause=SPIKE, shown=["from the learning rate: no loss stands out", *_describe_trail(capsule)])


def _diagnose_chance(runs: Runs) -> Diagnosis | None:
    """Diagnose a step that depends on what the capsule does not hold: a counter or generator in the code, or shared
    memory."""
    if not runs.again.is_good:
        return None
    shown = ["run twice, the step fails once and succeeds once: the capsule lacks something that it depends on"]
    return Diagnosis(cause=NOT_REPRODUCED, shown=shown, origin=runs.as_was.origin)


def _diagnose_code_path(runs: Runs) -> Diagnosis | None:
    """Diagnose a step that fails compiled or with our kernels, but not eager with the same dtypes."""
    if runs.as_was.is_good or not runs.eager.is_good:
        return None
    without_ours = runs.others.get("kernels off")
    whose = "our kernels" if without_ours is not None and without_ours.is_good else "the compiler's code"
    return Diagnosis(cause=KERNEL, shown=[f"the eager step is good with the same dtypes: {whose} is at fault"])


def _diagnose_input(subject: Subject, runs: Runs, names: Mapping[int, str]) -> Diagnosis | None:
    places = samples.find_bad_samples(subject.window, names)
    rows = {(place.batch, place.row): place.sample for place in places}
    if not rows:
        return None
    left = samples.drop_samples(subject.window, rows)
    # NaN that the loss ignores, such as NaN targets, is no fault: without those samples the step fails at the same
    # place. Where it is one, the step is then good, or fails elsewhere because of a second fault.
    rest = attempt(subject, "without those samples", window=left, traced=True) if left else None
    if rest is not None and not rest.is_good and _describe_place(rest) == _describe_place(runs.eager):
        return None
    return Diagnosis(cause=BAD_INPUT, shown=[str(place) for place in places], places=places, rows=rows)


def _describe_place(run: Attempt) -> tuple[str, str]:
    return (run.origin.place, run.origin.line) if run.origin is not None else ("", "")


def _diagnose_state(subject: Subject, capsule: Capsule) -> Diagnosis | None:
    whole, start = subject.collect_whole_state(), capsule.about["start"]
    averages = [name for name in capsule.about["not_finite"] if name.startswith("average of ")]
    bad = {name: ~whole[name].isfinite() for name in find_non_finite(whole)}
    shown = [f"{name} {_describe_start(start.get(name))}" for name in (*averages, *bad)]
    garbage = {name: v.abs() > GARBAGE for name, v in whole.items() if name not in bad and _is_garbage(v)}
    shown += [f"{name} contains {_find_largest(whole[name]):.3g}: never written?" for name in garbage]
    if not shown:
        return None
    return Diagnosis(cause=BAD_STATE, shown=shown, averages=averages, tensors={**bad, **garbage})


def _diagnose_buffers(subject: Subject, runs: Runs) -> Diagnosis | None:
    """Diagnose a buffer near the operation with finite but invalid numbers, such as a negative variance or a count that
    was never raised. The step is good with 1 in their place."""
    if runs.eager.origin is None or runs.fp32.is_good:
        return None
    near, buffers = subject.find_state_near(runs.eager.origin.module), subject.list_buffer_names()
    for name, value in ((name, value) for name, value in near.items() if name in buffers):
        bad = torch.ones_like(value, dtype=torch.bool) if not value.any() else value < 0
        with subject.replace_state({name: value.masked_fill(bad, 1.0)}):
            is_cause = bool(bad.any()) and attempt(subject, "other state").is_good
        if is_cause:
            found = "nothing but zeros: never written?" if not value.any() else f"{float(value.min()):.3g}"
            shown = [f"{name} contains {found}", "with 1 in its place the step is good"]
            return Diagnosis(cause=BAD_STATE, shown=shown, origin=runs.eager.origin, tensors={name: bad})
    return None


def _diagnose_refusal(subject: Subject, runs: Runs) -> Diagnosis | None:
    error, origin = runs.eager.error or runs.as_was.error, runs.eager.origin
    if not error:
        return None
    casts = WithoutCasts(HALF)
    if runs.fp32.error and attempt(subject, "", subject.plan_for("fp32", {}), around=casts).is_good and casts.lines:
        shown = [error, f"it also fails in an fp32 step: the code itself casts at {' and '.join(casts.lines)}"]
        return Diagnosis(cause=REFUSED, shown=shown, origin=origin)
    if runs.fp32.error:
        return Diagnosis(cause=CODE, shown=[f"as it was: {error}", f"in fp32: {runs.fp32.error}"], origin=origin)
    return Diagnosis(cause=REFUSED, shown=[error, "in fp32 it runs"], origin=origin)


def _diagnose_growth(subject: Subject, capsule: Capsule, runs: Runs) -> Diagnosis | None:
    start = {name: size for name, size in capsule.about["start"].items() if isinstance(size, float) and size > 0}
    # Buffers and frozen weights do not grow by the learning rate, such as a codebook that forward moves by averages.
    moved = {name for name, weight in subject.model.named_parameters() if weight.requires_grad}
    own = {name: value for name, value in subject.state.items() if name in moved}
    matrices = {name: value for name, value in own.items() if value.ndim >= 2 and name in start}
    squares = {name: float(value.abs().double().square().sum()) for name, value in matrices.items()}
    # Norms over all matrices: of the start from the recorded root mean squares, n · rms² = Σ w².
    before = math.sqrt(sum(value.numel() * start[name] ** 2 for name, value in matrices.items()))
    now = math.sqrt(sum(squares.values()))
    if not matrices or now < GROWTH * before:
        return None
    with subject.replace_state(_draw_first_weights(subject, capsule)):
        if not attempt(subject, "weights of the start").is_good:  # then they are not what is at fault
            return None
    most = max(matrices, key=lambda name: math.sqrt(squares[name] / matrices[name].numel()) / start[name])
    shown = [f"the weights have grown {now / before:.3g} times since training began, {most} the most"]
    shown += _describe_trail(capsule)
    losses = _list_losses(capsule)
    is_unbounded = len(losses) > 1 and losses[-1] < min(2 * losses[0], 0.0)
    return Diagnosis(cause=DIVERGED, shown=shown, origin=runs.eager.origin, loss_is_unbounded=is_unbounded)


@torch.no_grad()
def _draw_first_weights(subject: Subject, capsule: Capsule) -> dict[str, Tensor]:
    """Return weights as at the start of training: random matrices with their recorded root mean square, and for vectors
    (biases, scales of norms) and buffers that have grown to more than twice it, that number."""
    generator, weights = torch.Generator().manual_seed(0), dict(subject.model.named_parameters())
    found = {}
    for name, size in capsule.about["start"].items():
        value = subject.state.get(name)
        if value is None or not isinstance(size, float) or name in weights and not weights[name].requires_grad:
            continue
        if value.ndim >= 2 and name in weights:
            drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype if value.is_complex() else None)
            found[name] = (drawn * size).to(value)
        elif not float(value.abs().double().square().mean().sqrt()) <= 2 * size:
            found[name] = torch.full_like(value, size)
    return found


def _diagnose_custom_kernel(runs: Runs) -> Diagnosis | None:
    """Diagnose a custom operation whose output is not finite, or far larger than its inputs."""
    trace, origin = runs.eager.trace, runs.eager.origin
    if trace is None or origin is not None and runs.fp32.is_good:
        return None
    for op in trace.operations[: origin.index + 1 if origin is not None else None]:
        # An upper estimate of what products and quotients of the inputs can reach.
        given = math.prod(max(r.high, 1 / r.low if r.low else 0.0, 1.0) for r in op.inputs)
        is_odd = op is origin if not op.output.is_finite else op.output.high > JUMP * given
        if not op.is_torch and is_odd and all(r.is_finite for r in op.inputs):
            shown = [f"{op.name} is not an operation of torch, and gives {op.output} in fp32 as well"]
            return Diagnosis(cause=KERNEL, shown=shown + [f"of {r}" for r in op.inputs[:3]], origin=op)
    return None


def _diagnose_attention(runs: Runs) -> Diagnosis | None:
    """Diagnose NaN from finite numbers in attention's backward.

    Between its two products the gradient of a score is rounded to the format, and may overflow there in fp16. Where it
    cannot overflow, everything in attention is finite: then cuDNN's kernel is at fault.
    """
    op = runs.eager.origin
    if op is None or not (op.is_torch and op.is_backward and "attention" in op.name):
        return None
    if not _is_undefined(op) or not runs.fp32.is_good:
        return None
    # dS = P · (dO·Vᵀ - Σ dO·O) with P <= 1: each term is a sum over at most MOST_CHANNELS products, and |O| is at most
    # the largest |V|.
    of_output, _, _, values = op.inputs[:4]  # the output's gradient, queries, keys and values
    format, most = DTYPE_FORMATS[values.dtype], 2 * MOST_CHANNELS * of_output.high * values.high
    shown = [f"{op.place} gives {op.output}", *(f"of {r}" for r in op.inputs[:4])]
    if most > find_format(format).largest:
        shown.append(f"the gradient of a score may be as large as {most:.3g} here, more than {format} can hold")
        return Diagnosis(cause=OVERFLOW, shown=shown, origin=op)
    shown.append("attention's gradient of finite numbers is finite: this kernel of torch is at fault")
    return Diagnosis(cause=KERNEL, shown=shown, origin=op)


def _diagnose_numbers(runs: Runs) -> Diagnosis:
    """Diagnose an operation that left the finite range with good inputs, a good state and weights of their usual
    size."""
    bad = runs.eager
    origin = bad.origin
    if origin is None and math.isfinite(bad.loss) and bad.grad_norm == math.inf:
        return Diagnosis(cause=OVERFLOW, shown=["all gradients are finite; the sum of their squares is not"])
    if origin is None:
        cause = OVERFLOW if runs.fp32.is_good else UNDERFLOW
        return Diagnosis(cause=cause, shown=["no single operation was seen to leave the finite range"])
    if origin.outside is not None:
        shown = [f"{origin.place} is given a tensor of shape {origin.outside} that was not finite before the step"]
        return Diagnosis(cause=BAD_STATE, shown=shown, origin=origin)
    # The same operation in the fp32 run, or in the fp64 run if fp32 fails too.
    own, wider = runs.eager.trace, (runs.fp32 if runs.fp32.is_good else runs.fp64).trace
    twin = find_twin(origin, wider, own) if own is not None and wider is not None else None
    cause = UNDERFLOW if _divides_by_zero(origin, twin) else OVERFLOW
    shown = [f"{origin.place} gives {origin.output}", *(f"of {r}" for r in origin.inputs[:3])]
    if _is_undefined(origin):
        shown.append(MEAN_OF_NONE if origin.name.startswith("nll_loss") else "NaN from finite numbers: undefined there")
    if twin is not None and twin.output.is_finite:
        shown.append(f"in {DTYPE_FORMATS[twin.output.dtype]} it gives {twin.output}")
    if not runs.fp32.is_good:
        shown.append(_describe_wider_formats(runs))
    return Diagnosis(cause=cause, shown=shown, origin=origin)


def _describe_wider_formats(runs: Runs) -> str:
    at = runs.fp32.origin
    if at is not None and at.output.dtype in ("float16", "bfloat16"):
        return f"in an fp32 step it computes in {at.output.dtype} as well: the code itself casts"
    fp64 = "; fp64 could not be run" if runs.fp64.error else ", fp64 is" if runs.fp64.is_good else ", nor is fp64"
    return f"fp32 is not enough{fp64}"


def _divides_by_zero(origin: Operation, twin: Operation | None) -> bool:
    """True if zeros, or only -inf, caused it: in a wider format the output is one that this format could hold."""
    # If the exact result does not fit the format, it is an overflow, whatever the inputs were.
    largest = find_format(DTYPE_FORMATS.get(origin.output.dtype, "fp32")).largest
    if twin is not None and twin.output.is_finite and twin.output.high > largest:
        return False
    if _is_undefined(origin) and (twin is None or not twin.output.is_finite):
        return True
    if twin is not None and twin.output.num_inf and all(r.high < LARGE for r in origin.inputs):
        return True
    # 0 · inf in backward, where a division is a product with the inverse.
    is_product = origin.is_backward and origin.output.num_nan > 0 and any(r.num_zero for r in origin.inputs)
    if origin.name not in DIVIDING and not is_product:
        return False
    return any(r.num_zero or r.num_inf for r in origin.inputs) or bool(origin.output.num_nan)


def _is_undefined(origin: Operation) -> bool:
    """True for NaN from finite inputs: 0/0, the root of -1, a mean over nothing. Overflow would give infinity."""
    return origin.output.num_nan > 0 and all(r.is_finite for r in origin.inputs)


def _describe_trail(capsule: Capsule) -> list[str]:
    """Describe the losses before the fault, if they changed a lot."""
    losses, rate = _list_losses(capsule), float(capsule.about["lr"])  # "nan" where the step did not get so far
    if len(losses) < 2 or abs(losses[-1]) < 2 * abs(losses[0]):
        return []
    return [f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g} in the steps before, at lr {rate:.4g}"]


def _list_losses(capsule: Capsule) -> list[float]:
    return [row["loss"] for row in capsule.about["trail"] if isinstance(row["loss"], float)]


def _describe_start(start: Any) -> str:
    """Describe a non-finite tensor by its recorded size at the start of training: a number, a string if not finite, or
    None."""
    if isinstance(start, float):
        return "is not finite, but was when training began: the optimizer wrote it, or code outside of the steps"
    return "is not finite" if start is None else "was not finite from the start"


def _is_garbage(value: Tensor) -> bool:
    """True for implausibly large numbers, except the largest of a format, which masks hold on purpose."""
    largest = _find_largest(value) if has_fractions(value) else 0.0
    return GARBAGE < largest < 0.999 * torch.finfo(torch.bfloat16).max


def _find_largest(value: Tensor) -> float:
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if len(finite) else 0.0
