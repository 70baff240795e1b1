"""`decide`: turn a precision request and a device's facts into a Plan. Nothing is changed; `Plan.apply` does that."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from halfstep.errors import ConfigError, PrecisionError
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.probe import probe
from halfstep.precision.ladder import Grant, explain_lack, grant
from halfstep.precision.names import FP8_RECIPES, normalise_precision
from halfstep.precision.plan import ROOT, WHOLE_MODEL, Plan, PlanRow

if TYPE_CHECKING:
    import torch

    from halfstep.hardware.fp8_layers import Fp8Gain


class PrecisionRequest(Protocol):
    """What is asked for: a `Precision`, or the settings of a run, which have the same fields."""

    @property
    def default(self) -> str: ...
    @property
    def modules(self) -> Mapping[str, str]: ...
    @property
    def strict(self) -> bool: ...
    @property
    def simulate(self) -> bool: ...
    @property
    def force(self) -> bool: ...
    @property
    def fp8_recipe(self) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """A precision with settings: hs.Step takes it in place of a name. ::

        step = hs.Step(model, optimizer, hs.Precision("bf16", modules={"decoder.head": "fp32"}))

    Arguments:
        default: "auto", "bf16", "fp16", "tf32", "fp32", "fp8" or a torch dtype.
        modules: submodules that run in another precision, by name or pattern.
        strict: refuse a precision that the device lacks instead of using the next best.
        simulate: simulate a precision that this device lacks, such as fp16 on a laptop: for tests, not speed.
        force: run fp8 in every layer that supports it. Without force, fp8 runs only in compiled steps, in layers that
            were measured to be faster, and only if the whole step is faster with it.
        fp8_recipe: "tensorwise" scales each operand of a product as a whole, "rowwise" each row;
            "rowwise_with_gw_hp" also computes the gradients of weights in bf16.
    """

    default: Any = "auto"
    _: dataclasses.KW_ONLY
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    strict: bool = False
    simulate: bool = False
    force: bool = False
    fp8_recipe: str = "tensorwise"

    def __post_init__(self) -> None:
        if not isinstance(self.modules, Mapping):
            raise ConfigError(
                f"modules= is a {type(self.modules).__name__}",
                why="it maps module names to precisions",
                fix='hs.Precision("bf16", modules={"head": "fp32"})',
            )
        if self.fp8_recipe not in FP8_RECIPES:
            raise ConfigError(
                f"unknown fp8_recipe {self.fp8_recipe!r}", fix=f"one of {', '.join(map(repr, FP8_RECIPES))}"
            )


def decide(
    request: str | PrecisionRequest,
    hardware: Hardware,
    model: torch.nn.Module | None = None,
    *,
    modules: Mapping[str, str] | None = None,
    fragile: Iterable[str] = (),
    strict: bool = False,
    simulate: bool = False,
    force: bool = False,
    fp8_gains: Mapping[str, Fp8Gain] | None = None,
    frozen: Mapping[str, torch.nn.Module] | None = None,
) -> Plan:
    """Choose what runs. `fragile` names fp32 islands with their reasons: `"loss: Dice sums"`.

    `fp8_gains` holds the measured gain of fp8 by layer (`fp8.measure_layer_gains`); `force` runs fp8 regardless.
    `frozen` holds modules that the model uses but does not own, by name; `modules` may name them too.
    """
    recipe = "tensorwise"
    if not isinstance(request, str):
        recipe = request.fp8_recipe
        modules = {**request.modules, **(modules or {})}
        strict, simulate, force = strict or request.strict, simulate or request.simulate, force or request.force
        request = request.default

    def ask(name: str) -> Grant:
        return grant(normalise_precision(name), hardware, strict=strict, simulate=simulate)

    default = ask(request)
    parts = {pattern: _restrict_tf32(pattern, ask(asked), default) for pattern, asked in (modules or {}).items()}
    grants = (default, *parts.values())
    frozen_rows: list[PlanRow] = []
    if frozen:
        from halfstep.precision.apply import make_frozen_rows, names_frozen_part

        theirs = {pattern: part for pattern, part in parts.items() if names_frozen_part(pattern, frozen)}
        frozen_rows = make_frozen_rows(frozen, default, theirs)
        parts = {pattern: part for pattern, part in parts.items() if pattern not in theirs}
    plan = Plan(
        asked=default.asked,
        granted=default.precision,
        reason=default.reason,
        device=hardware.device,
        device_name=hardware.name,
        fp8_recipe=recipe,
        simulated=any(answer.simulated for answer in grants),
        rows=(
            *_make_rows(model, default, parts, hardware, fp8_gains or {}, force=force, frozen=tuple(frozen or ())),
            *map(_make_island_row, fragile),
        ),
        frozen=tuple(frozen_rows),
        warnings=tuple(dict.fromkeys(answer.warning for answer in grants if answer.warning)),
    )
    plan = _warn_of_recurrent(plan, model)
    if plan.simulated and recipe != "tensorwise":
        raise PrecisionError(
            f"the fp8 recipe {recipe!r} cannot be simulated",
            why="simulation has one scale per tensor",
            fix="tensorwise",
        )
    if model is not None and any(answer.compute == "fp8" for answer in grants):
        return _check_fp8(plan, model, has_gains=bool(fp8_gains), strict=strict)
    return plan


def needs_fp8_trial(request: PrecisionRequest, hardware: Hardware) -> bool:
    """True if fp8 is asked for, whole or in part, on a device that has it, and has to be measured first."""
    is_asked = "fp8" in map(normalise_precision, (request.default, *request.modules.values()))
    return is_asked and not (request.simulate or request.force or explain_lack("fp8", hardware))


def explain_simulation(request: PrecisionRequest, hardware: Hardware) -> str:
    """Explain why a row of `compare` or `bench` simulates its precision; return "" if the device has it.

    One rule for all commands: `strict` refuses a format that the device lacks. Without it, training goes down the
    ladder (`grant`), but a row that did so would show another format's numbers under its own name.
    """
    if request.strict:
        return ""
    unmeasured = dataclasses.replace(hardware, measurements=())  # training does not measure either
    asked = (request.default, *request.modules.values())
    return next(filter(None, (explain_lack(name, unmeasured) for name in asked if name != "auto")), "")


def decide_again(
    own: Plan,
    model: torch.nn.Module,
    parts: Mapping[str, str],
    precision: str,
    modules: Mapping[str, str],
    **known: Any,
) -> Plan:
    """Make a plan for re-running a step: one precision for everything, or the plan's own with more `modules`.

    It is simulated if the plan is, or if bf16 is asked for without a GPU.
    """
    named = {} if precision else {**parts, **modules}
    simulate = own.simulated or precision == "bf16" and not own.on_cuda
    return decide(precision or own.granted, probe(own.device), model, modules=named, simulate=simulate, **known)


def _warn_of_recurrent(plan: Plan, model: torch.nn.Module | None) -> Plan:
    """Warn that torch's autocast runs cuDNN's recurrent layers in fp16 even when bf16 was declared."""
    if model is None or not plan.on_cuda or plan.simulated:
        return plan
    from torch.nn import RNNBase

    in_bf16 = {row.module.replace(ROOT, "") for row in plan.rows if row.kind != "island" and row.compute == "bf16"}
    layers = [name for name, part in model.named_modules() if isinstance(part, RNNBase) and name in in_bf16]
    if not layers:
        return plan
    warning = (
        f"{', '.join(layers)}: torch's autocast runs recurrent layers in fp16 even under bf16, here without loss "
        f"scaling; precision fp16 scales the loss, modules: {{{layers[0]}: fp32}} keeps fp32's range"
    )
    return dataclasses.replace(plan, warnings=(*plan.warnings, warning))


def _check_fp8(plan: Plan, model: torch.nn.Module, *, has_gains: bool, strict: bool) -> Plan:
    """Fall back to bf16, with a warning, if no layer of an fp8 plan runs in fp8."""
    from halfstep.precision.fp8 import can_take_fp8, fall_back_to_bf16

    if any(row.compute == "fp8" for row in plan.rows):
        return plan
    if has_gains or any(map(can_take_fp8, model.modules())):
        return fall_back_to_bf16(plan, f"no layer of {type(model).__name__} gets faster in fp8", strict=strict)
    why = f"{type(model).__name__} has no layer that supports fp8"
    return fall_back_to_bf16(plan, why, strict=strict, forcible=False)


def _restrict_tf32(pattern: str, part: Grant, default: Grant) -> Grant:
    """Refuse or replace tf32 per module: TF32 is one switch for forward and backward of the whole process."""
    if part.compute == "fp32" and default.compute == "tf32":
        raise PrecisionError(
            f"modules: {{{pattern!r}: {part.asked}}} cannot be applied while the default is tf32",
            why="TF32 is a process-wide switch, and backward runs outside the module",
            fix="use default bf16 or fp32, or an fp32_island() around code that only needs the dtype",
        )
    if part.compute == "tf32" and default.compute != "tf32":
        warning = f"{pattern!r} asked for tf32, running fp32: TF32 is a process-wide switch"
        return Grant(asked=part.asked, precision="fp32", reason="TF32 cannot be switched per module", warning=warning)
    return part


def _make_rows(
    model: torch.nn.Module | None,
    default: Grant,
    parts: Mapping[str, Grant],
    hardware: Hardware,
    gains: Mapping[str, Fp8Gain],
    *,
    force: bool,
    frozen: tuple[str, ...],
) -> list[PlanRow]:
    if model is not None:
        from halfstep.precision.apply import make_rows
        from halfstep.precision.fp8 import Fp8Layers  # torch is needed only once there is a model

        fp8 = Fp8Layers(gains=gains, force=force)
        cuda_lists = default.simulated or hardware.kind != "cpu"
        return make_rows(model, default, parts, cuda_lists=cuda_lists, fp8=fp8, frozen=frozen)
    whole = PlanRow(module=WHOLE_MODEL, storage=default.storage, compute=default.compute, reason="the default")
    return [whole, *(
        PlanRow(module=pattern, storage=part.storage, compute=part.compute, kind="module", precision=part.precision,
            reason=part.explain())
        for pattern, part in parts.items()
    )]  # fmt: skip


def _make_island_row(text: str) -> PlanRow:
    name, _, reason = text.partition(":")
    reason = reason.strip() or "fragile in low precision"
    return PlanRow(module=name.strip(), storage="-", compute="fp32", reason=reason, kind="island")
