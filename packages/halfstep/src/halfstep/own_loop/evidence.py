"""Evidence for hs.Step: capsules, `hs.replay` and `hs.ledger`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.errors import CheckpointError, ConfigError, HardwareError
from halfstep.evidence import capsule as capsules
from halfstep.evidence.attempts import LossFn, Subject, refuse_another_model
from halfstep.evidence.observer import Observer
from halfstep.evidence.precision_ledger import Ledger, Weights, make_ledger, watch_step
from halfstep.evidence.recorder import CapsuleContext, Recorder
from halfstep.evidence.replay import Replayed
from halfstep.evidence.replay import replay as replayed
from halfstep.evidence.updates import Update
from halfstep.fast.windows import list_tensors
from halfstep.hardware.probe import probe
from halfstep.own_loop.loss import find_named
from halfstep.precision.decide import decide, decide_again
from halfstep.precision.plan import Plan
from halfstep.step.facts import read_rng_state, restore_rng
from halfstep.step.step import GuardedStep
from halfstep.step.user_warnings import warn_user


def make_recorder(
    folder: str | os.PathLike[str], step: GuardedStep, *, spikes: bool, model: nn.Module | None = None
) -> Recorder:
    """Make the recorder of `hs.Step(capsules=folder)`; `model` is what a replay will be given, if not the step's."""
    rank = None if step.ranks is None else step.ranks.world.rank
    context = CapsuleContext(about={"plan": json.loads(step.plan.to_json())}, rank=rank)
    return Recorder(Path(folder), model or step.model, step, context, notice=warn_user, spikes=spikes)


def count_rows(batch: Any) -> int:
    """Return the number of samples of a batch whose tensors all have one row for each; 1 if they do not."""
    sizes = {len(tensor) for tensor in list_tensors(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else 1


def replay(capsule: str | os.PathLike[str], model: nn.Module, loss_fn: LossFn) -> Replayed:
    """Find out why a step of your own loop went bad. ::

        found = hs.replay("capsules/00000123", model, loss_fn)
        print(found)

    `model` and `loss_fn` are those that were given to hs.Step; weights, buffers and batches come from the capsule. The
    model is not changed.
    """
    read = capsules.read_capsule(Path(capsule))
    if read.is_from_run:
        raise CheckpointError(
            f"the capsule {read.path} comes from a run of `halfstep train`", fix=f"halfstep replay {read.path}"
        )
    refuse_another_model(read, model)
    if not read.state:
        raise CheckpointError(f"the capsule {read.path} has no weights", why="they were too large to store",
                              fix="load your checkpoint of that step, and examine it with hs.simulate")  # fmt: skip
    device = next(model.parameters()).device
    plan = _choose_plan(read.about["plan"], model, device)
    own = {name: value.detach().clone() for name, value in capsules.collect_state(model).items()}
    classes, training, generators = [(m, type(m)) for m in model.modules()], model.training, read_rng_state(device)
    held = find_held_modules(loss_fn, model)
    subject = Subject(
        model=model,
        loss=torch.compiler.set_stance("force_eager")(loss_fn),
        variants={"as it was": loss_fn},
        held=held,
        other_state={name: capsules.copy_state(module) for name, module in held.items()},
        window=[tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, batch) for batch in read.window],
        state=read.state,
        rng=read.rng,
        plan=plan,
        plan_for=partial(decide_again, plan, model, _read_modules(plan)),
        scale=float(read.about["scale"]),
        update=Update.parse(read.about.get("update")),
    )
    try:
        return replayed(subject, read)
    finally:
        subject.state = own
        subject.restore_state()
        for module, kind in classes:
            module.__class__ = kind
        model.train(training)
        restore_rng(generators, device)


def find_held_modules(loss_fn: Any, model: nn.Module) -> dict[str, nn.Module]:
    """Return modules that the loss function refers to besides the model, such as a teacher or a perceptual loss."""
    own, named = set(model.modules()), find_named(loss_fn)
    others = {m: name for name, m in named.items() if isinstance(m, nn.Module) and not own & set(m.modules())}
    inner = {part for module in others for part in module.modules() if part is not module}
    return {name: module for module, name in others.items() if module not in inner}


def _choose_plan(stored: Mapping[str, Any], model: nn.Module, device: torch.device) -> Plan:
    plan = Plan.from_json(json.dumps(stored))
    with contextlib.suppress(HardwareError):
        if probe(plan.device).device == plan.device and torch.device(plan.device).type == device.type:
            return plan
    hardware = probe(str(device))
    return decide(plan.granted, hardware, model, modules=_read_modules(plan), simulate=hardware.kind == "cpu")


def _read_modules(plan: Plan) -> dict[str, str]:
    return {row.module: row.precision for row in plan.rows if row.kind == "module"}


# --- hs.ledger ---

NOT_COMPILED = "the model is compiled: its steps ran uncompiled inside the ledger, which shows the formats of that code"


class SeenSteps:
    """The ledger of the steps made so far inside `with hs.ledger(step) as seen`; print it."""

    def __init__(self, step: GuardedStep, observer: Observer) -> None:
        self._step, self._observer = step, observer

    @property
    def ledger(self) -> Ledger:
        if not self._observer.seen.calls and not self._observer.seen.casts:
            raise ConfigError(
                "the ledger has seen no step", fix="call step(loss_fn, window) inside `with hs.ledger(step) as seen`"
            )
        model = self._step.model
        weights = Weights.collect(model, self._step.optimizers)
        notes = [NOT_COMPILED] if any(hasattr(module, "_orig_mod") for module in model.modules()) else []
        return make_ledger(self._step.plan, self._observer.seen, model, weights, notes=notes, step=self._step.attempted)

    def __str__(self) -> str:
        return str(self.ledger)


@contextmanager
def ledger(step: object) -> Iterator[SeenSteps]:
    """Watch the steps made inside, forward and backward; their results are bit-identical to unwatched ones.

    Example::

        with hs.ledger(step) as seen:
            step(loss_fn, window)
        print(seen)
    """
    guarded = getattr(step, "_step", step)
    if not isinstance(guarded, GuardedStep):
        raise ConfigError(f"hs.ledger takes an hs.Step, not {type(step).__name__}", fix="with hs.ledger(step) as seen:")
    if guarded.sharding is not None:
        raise ConfigError(
            "hs.ledger does not support a sharded model",
            why="it recognises casts of weights by their memory, and FSDP gathers weights into new memory",
            fix="use the same model without fully_shard, with fewer layers if it does not fit: its plan is the same",
        )
    observer = Observer(guarded.model)
    with watch_step(guarded, observer.watch):
        yield SeenSteps(guarded, observer)
