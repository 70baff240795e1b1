"""Random training programs: a small model, a loss function, options of hs.Step, and what users do between steps.

A `Program` is plain data, so that a failing one can be copied from the output and run by hand:

    PYTHONPATH=tests/support python -c 'from fuzzed_loops import *; assert_same(Program(layers=("dropout",)))'

`compare` trains it with fast="off" and captured, and lists every difference: outcomes and exceptions of each step,
weights, buffers, optimizer state, averages, generators, and all objects that the user's code keeps.
packages/halfstep/tests/fast/test_fuzz_captured.py draws programs, and prints the smallest that differs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

import fuzzed_pieces
import halfstep as hs
from fuzzed_pieces import (
    ACTIONS,
    ALL_TERMS,
    BATCHES,
    BY_FORM,
    CALLABLES,
    CLASSES,
    EAGER_LAYERS,
    EAGER_TERMS,
    INPUTS,
    LAYERS,
    NUM_STEPS,
    OPTIMIZERS,
    OPTIONS,
    SCHEDULES,
    TERMS,
    TOKENS,
    Action,
    Model,
    Program,
    Sample,
    World,
    make_loss_fn,
    seed,
)
from halfstep.fast import compiled_trial
from halfstep.fast import fast_path as fast
from halfstep.step.step import GuardedStep
from replay_stand_in import BackwardStandIn, StandIn

# --- running a program ---


def make_world(program: Program) -> World:
    model = Model(program.layers)
    world = World(program, model, OPTIMIZERS[program.optimizer](model))
    world.saved["calls"] = torch.zeros((), dtype=torch.long)
    world.terms = [ALL_TERMS[name] for name in program.terms if name in ALL_TERMS]
    options: dict[str, Any] = {}
    for name in program.options:
        options |= OPTIONS[name](world)
    mode: Any = {"compiled": "auto", "checked": "graph"}.get(program.mode, program.mode)
    captures = hs.Fast(mode, num_steps=1000, max_graphs=1 if "one_graph" in program.options else 8)
    world.step = hs.Step(model, world.optimizers, "fp32", fast=captures, **options)
    if "second_step" in program.options:
        optimizer = torch.optim.SGD(model.parameters(), 2**-6, fused=True)
        world.second = hs.Step(model, optimizer, "fp32", fast=hs.Fast(mode, num_steps=1000))
    return world


def make_window(world: World, draws: torch.Generator) -> list[Any]:
    rows, spoiled = world.rows, world.spoiled
    num_batches = 3 if "accumulate" in world.program.options else 1
    if spoiled in ("one_row", "no_rows"):
        rows = int(spoiled == "one_row")
    if spoiled == "short_window":
        num_batches = 1
    window = []
    for number in range(num_batches):
        rows += number if "uneven" in world.saved else 0
        x = torch.randn(rows, INPUTS, generator=draws)
        y = torch.randint(0, CLASSES, (rows,), generator=draws)
        tokens = torch.randint(0, TOKENS, (rows,), generator=draws)
        if spoiled in ("nan", "inf", "huge"):
            x *= {"nan": float("nan"), "inf": float("inf"), "huge": 1e38}[spoiled]
        if spoiled == "nan_row":
            x[:1] = float("nan")
        if spoiled == "label":
            y[:1] = CLASSES
        if spoiled == "ignored":
            y[:] = -100
        if spoiled == "token":
            tokens[:1] = TOKENS
        x = x.to(world.dtype)
        if world.static is not None and num_batches == 1:
            if world.static and world.static[0].shape == x.shape and world.static[0].dtype == x.dtype:
                for own, new in zip(world.static, (x, y, tokens), strict=True):
                    own.copy_(new)
                x, y, tokens = world.static
            else:
                world.static = x, y, tokens
        window.append(BATCHES[world.program.batch][0](x, y, tokens))
    world.spoiled = ""
    return window


@dataclass
class Run:
    """Everything that a training run left, step by step and at its end; tensors as they were then."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    modes: list[str] = field(default_factory=list)
    said: str = ""
    num_replays: int = 0
    stale: set[str] = field(default_factory=set)
    warned: list[str] = field(default_factory=list)


def run(program: Program, mode: str) -> Run:
    """Train a program: mode "off", "graph", "checked", which compares every replay with the user's code again, or
    "compiled", where auto tries compiled code at once."""
    program = dataclasses.replace(program, mode=mode)
    fuzzed_pieces.FACTOR = 1.0
    seed(None, 0)  # type: ignore[arg-type]
    found = Run()
    with keep_backend(), stand_in(found), try_at_once(mode), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            world = make_world(program)
            try:
                train(world, found)
            finally:
                for handle in world.handles:
                    handle.remove()
    found.said, found.warned = said.getvalue(), [str(one.message) for one in warned]
    return found


def train(world: World, found: Run) -> None:
    draws = torch.Generator().manual_seed(1)
    make = make_loss_fn(world)
    actions: dict[int, list[Action]] = {}
    for action in world.program.actions:
        actions.setdefault(action[0], []).append(action)
    for number in range(NUM_STEPS):
        seen: dict[str, Any] = {}
        for _, name, value in actions.get(number, ()):
            with note_exception(seen, name):
                ACTIONS[name](world, value)
        if "annealed" in world.saved:
            world.numbers["beta"] = world.alpha = 1.0 + 0.1 * number
            world.set_in_closure(1.0 + 0.1 * number)
        window = make_window(world, draws)
        with note_exception(seen, "step"):
            if world.saved.pop("split", False):
                facts = world.step.compute(make(number), window)
                world.step.commit(facts)
                outcome = hs.Outcome(facts) if hasattr(hs, "Outcome") else None
            else:
                outcome = world.step(make(number), window)
            if outcome is not None:
                seen["outcome"] = dataclasses.asdict(outcome.reading)
        if world.second is not None and number % 2:
            with note_exception(seen, "second step"):
                seen["second"] = world.second(make.other, window[:1]).loss
        clean_up(world)
        found.modes.append(world.step.mode)
        seen |= copy_user_state(world, window)
        found.steps.append(seen)
    last: dict[str, Any] = {}
    with note_exception(last, "finish"):
        world.step.finish()
    with note_exception(last, "state_dict"):
        last |= copy_end_state(world)
    found.end = last


def clean_up(world: World) -> None:
    """Undo what is meant for one step."""
    world.flags["raises"] = world.flags["interrupts"] = world.flags["commit raises"] = False
    if "once" in world.saved:
        world.saved.pop("once").remove()
    if "repaired" in world.saved:
        weight, then = world.saved.pop("repaired")
        with torch.no_grad():
            first = (0,) * weight.ndim  # it may have other strides by now
            weight[first] = then[first]


@contextlib.contextmanager
def note_exception(seen: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        seen[f"exception of {name}"] = f"{type(error).__name__}: {error}"


def copy_user_state(world: World, window: list[Any]) -> dict[str, Any]:
    """Return copies of what the user could look at after a step."""
    attributes = {
        f"{name}.{key}": value
        for name, module in world.model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (int, float, Tensor, list)) and not key.startswith("_")
    }
    return copy_values({
        "weights": world.model.state_dict(), "kept": world.kept, "recent": world.recent, "numbers": world.numbers,
        "flags": world.flags, "commits": world.commits,
        "attributes": attributes, "written count": world.saved["calls"], "torch generator": torch.get_rng_state(),
        "window": [vars(b) if isinstance(b, Sample) else b for b in window], "extra": world.extra.state_dict(),
        "own generator": world.generator.get_state(),
        "attempted": world.step.attempted, "committed": world.step.committed,
    })  # fmt: skip


def copy_end_state(world: World) -> dict[str, Any]:
    buffers = dict(world.model.named_buffers())
    return copy_values({
        "buffers": buffers, "optimizers": [optimizer.state_dict() for optimizer in world.optimizers],
        "step": {k: v for k, v in world.step.state_dict().items() if k not in ("position", "watch")},
        "average": world.step.ema.state_dict() if world.step.ema else None,
        "python generator": random.getstate(), "numpy generator": np.random.get_state()[1:3],
    })  # fmt: skip


def copy_values(tree: Any) -> Any:
    return tree_map(lambda one: one.detach().clone() if isinstance(one, Tensor) else copy.copy(one), tree)


def find_difference(one: Any, other: Any) -> str:
    """Return the name of the first value that differs, with both values; empty if all bits are equal."""
    ones, others = ({keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]} for tree in (one, other))
    for name in ones | others:
        if name not in ones or name not in others:
            return f"{name}: only {'captured' if name in others else 'off'}: {(ones | others)[name]!r}"
        if not are_same(ones[name], others[name]):
            return f"{name}: off {describe(ones[name])}, captured {describe(others[name])}"
    return ""


def are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # NaN has many bit patterns, and which one arises depends on the order of the operands.
        is_like = one.dtype == other.dtype and one.shape == other.shape
        return is_like and bool((one.isnan() & other.isnan() | (one == other)).all())
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and (one == other or one != one and other != other)


def describe(leaf: Any) -> str:
    return f"{leaf.dtype}{tuple(leaf.shape)} {leaf.flatten()[:4].tolist()}" if isinstance(leaf, Tensor) else repr(leaf)


@dataclass
class Compared:
    differences: list[str]
    off: Run
    captured: Run

    @property
    def was_captured(self) -> bool:
        return self.captured.num_replays > 1


def compare(program: Program) -> Compared:
    """Train a program with fast="off" and in its mode, and list the first difference of each kind."""
    off, captured = run(program, "off"), run(program, program.mode)
    found = []
    for number, (one, other) in enumerate(zip(off.steps, captured.steps, strict=True)):
        if difference := find_difference(one, other):
            found.append(f"step {number}{difference}")
            break
    if difference := find_difference(off.end, captured.end):
        found.append(f"end{difference}")
    found += [f"a CUDA graph would have used old memory: {name}" for name in sorted(captured.stale)]
    found += [f"false alarm: {line}" for line in captured.warned if "suspect" in line and not found]
    torch._dynamo.reset()
    return Compared(found, off, captured)


def assert_same(program: Program) -> Compared:
    compared = compare(program)
    if compared.differences:
        raise AssertionError("\n".join([str(program), *compared.differences, compared.captured.said.strip()]))
    return compared


@contextlib.contextmanager
def keep_backend() -> Iterator[None]:
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    before = cudnn.benchmark, cudnn.deterministic, mkldnn.enabled
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, mkldnn.enabled = before
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def try_at_once(mode: str) -> Iterator[None]:
    """Let fast="auto" try compiled code after the first replay, with torch's kernels in place of Inductor's."""
    share = 1e9 if mode == "checked" else fast.CHECK_SHARE
    with (
        mock.patch.multiple(fast, LOOK_EVERY=1, CHECK_SHARE=share, COMPARE_SHARE=1e9),
        mock.patch.multiple(compiled_trial, COMPILED="aten", TIMED=2),
        mock.patch.multiple(compiled_trial.CompileHistory, expect=expect_no_cost, write=mock.DEFAULT),
    ):
        yield


def expect_no_cost(history: object, num_nodes: int) -> tuple[float, float]:
    return -1.0, compiled_trial.LIKELY_SAVING


@contextlib.contextmanager
def stand_in(found: Run) -> Iterator[None]:
    """Replay on the CPU, with what a CUDA graph freezes in addition to what StandIn does: settings of optimizers, and
    the memory of weights and optimizer state."""

    class Frozen(StandIn):
        def __init__(self, step: GuardedStep, loss_fn: Any, *arguments: Any) -> None:
            # A capture runs nothing, and StandIn restores only what belongs to the step.
            written = inspect.getclosurevars(loss_fn).nonlocals["traced"].list_written()
            before = [tensor.detach().clone() for tensor in written]
            super().__init__(step, loss_fn, *arguments)
            with torch.no_grad():
                for tensor, then in zip(written, before, strict=True):
                    tensor.copy_(then)
            self.settings = [dict(group) for group in list_groups(step)]
            self.memory = list_memory(step)

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            found.num_replays += 1
            now = list_memory(self.step)
            found.stale |= {name for name, address in self.memory.items() if now.get(name) != address}
            groups = list_groups(self.step)
            before = [dict(group) for group in groups]
            for group, then in zip(groups, self.settings, strict=True):
                group.update(then)
            try:
                return super().__call__(*arguments, **named)
            finally:
                for group, then, frozen in zip(groups, before, self.settings, strict=True):
                    group.update({name: value for name, value in then.items() if group[name] is frozen[name]})

    class Counted(BackwardStandIn):
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            found.num_replays += 1
            return super().__call__(*arguments, **named)

    with mock.patch.dict(fast.CAPTURES, {"cpu": (Frozen, Counted)}):
        yield


def list_groups(step: GuardedStep) -> list[dict[str, Any]]:
    return [group for optimizer in step.optimizers for group in optimizer.param_groups]


def list_memory(step: GuardedStep) -> dict[str, int]:
    """Return the addresses of trained weights and of their optimizer state."""
    found = {}
    for k, optimizer in enumerate(step.optimizers):
        for number, weight in enumerate(weight for group in optimizer.param_groups for weight in group["params"]):
            own = {"weight": weight, **optimizer.state.get(weight, {})}
            tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
            found |= {f"{name} {number} of optimizer {k}": value.data_ptr() for name, value in tensors.items()}
    return found


# --- drawing programs ---

MODES = ("graph", "checked", "compiled")

KEEPS = {"average_in_list", "divide_by_average", "carry", "keep", "keep_input", "keep_alias",
         "keep_then_fail", "remembered_rows", "replaced_buffer", "cached", "spectral_norm", "running"}  # fmt: skip
"""Captured pieces that change Python objects."""

KNOWN_FAULTS: dict[str, Callable[[Program], bool]] = {
    # The code has run, and what it kept is never filled. On a GPU a bad label or token ends the process.
    "a replay raises, which only the stand-in for replays does": lambda program: (
        bool(program.names & KEEPS)
        and any(name == "spoil" and number % 7 in (3, 4) for _, name, number in program.actions)
    ),
    "custom functions of autograd round in another way before torch 2.12, which the certificate says": lambda program: (
        torch.__version__ < "2.12" and "autograd_function" in program.layers
    ),
    "torch 2.10 traces add_ with alpha as two operations, which round one by one": lambda program: (
        torch.__version__ < "2.11" and "written_buffer" in program.layers
    ),
}
"""Faults that are known and not fixed yet: programs that would show them are not drawn."""


def draw_names(some: Any, at_most: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(sorted(some)), max_size=at_most, unique=True).map(tuple)


def is_allowed(program: Program) -> bool:
    schedules = sum(kind in program.options for kind in SCHEDULES)
    clips = sum(name in program.options for name in ("clip", "clip_value"))
    return schedules <= 1 and clips <= 1 and not any(shows(program) for shows in KNOWN_FAULTS.values())


def programs(mode: str = "graph") -> st.SearchStrategy[Program]:
    """Draw programs without known faults, of which most can be captured."""
    return draw_program(mode).filter(is_allowed)


@st.composite
def draw_program(draw: st.DrawFn, mode: str) -> Program:
    """Draw a program. One in eight has a layer that stays eager, and one in eight such a term."""
    layers = draw(draw_names(LAYERS, 3))
    terms = draw(draw_names([*TERMS, *BY_FORM], 3))
    if draw(st.integers(0, 7)) == 7:
        layers += (draw(st.sampled_from(sorted(EAGER_LAYERS))),)
    if draw(st.integers(0, 7)) == 7:
        terms += (draw(st.sampled_from(sorted(EAGER_TERMS))),)
    when = st.integers(0, NUM_STEPS - 1) | st.integers(fast.WARMUP_STEPS + 1, NUM_STEPS - 1)
    what = st.sampled_from([*sorted(ACTIONS), *["spoil"] * 5, *["set_float", "set_rate", "write_weights"] * 2])
    action = st.tuples(when, what, st.integers(0, 13))
    return Program(
        layers,
        terms,
        draw(draw_names(OPTIONS, 2)),
        tuple(sorted(draw(st.lists(action, max_size=5)))),
        draw(st.sampled_from(["adamw", "adamw", "sgd", *OPTIMIZERS])),
        draw(st.sampled_from(["function", "function", *CALLABLES])),
        draw(st.sampled_from(sorted(BATCHES))),
        mode,
    )
