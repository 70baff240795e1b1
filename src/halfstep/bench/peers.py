"""The others in the field, timed on the same problem in the same process: `--against lightning,accelerate,plain`.

A peer's name stands for two runners: as its documentation shows, and once more tuned by hand (see `peer_setup`). One
variant alone is `plain:graphs`. Peers are not dependencies of halfstep: only who compares needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from halfstep.bench.peer_loops import (
    import_accelerate,
    import_lightning,
    train_accelerate,
    train_lightning,
    train_plain,
)
from halfstep.bench.peer_setup import Loop, PeerSetup, Variant, float32_as_asked, isolated, quiet
from halfstep.bench.problem import AfterStep, Problem, Runner
from halfstep.errors import ConfigError, HardwareError, PrecisionError, format_count, nearest
from halfstep.tune.fresh_thread import place_for_graphs

PEERS: Mapping[str, Loop] = {"plain": train_plain, "lightning": train_lightning, "accelerate": train_accelerate}
IMPORTS: Mapping[str, Callable[[], object]] = {"lightning": import_lightning, "accelerate": import_accelerate}
PEER_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""What each of them takes without further packages."""

FP16_ON_CPU = {"lightning": "it would train in bf16 instead", "accelerate": "it would train in fp32 instead"}
"""Who cannot, and what it would do without saying so to anybody who reads no warnings."""


@dataclass(kw_only=True, slots=True)
class PeerRunner:
    """One peer in one variant, ready to train."""

    name: str
    variant: str
    precision: str
    setup: PeerSetup
    loop: Loop

    def train(self, steps: int, after_step: AfterStep) -> float:
        """Train from the seeded start; whatever goes wrong inside, compilation included, is raised as it came."""
        if steps < 1:
            raise ConfigError(f"{format_count(steps, 'step')} cannot be trained", fix="ask for at least one")
        by_hand, device = self.setup.by_hand, self.setup.problem.device
        if self.precision == "fp16" and device.type == "cpu" and self.name in FP16_ON_CPU:
            raise HardwareError(f"{self.name} cannot train fp16 on the CPU", why=FP16_ON_CPU[self.name])
        if self.variant == "graphs" and device.type != "cuda":
            raise HardwareError(f"{self.name} graphs needs CUDA", why="the compiler captures CUDA graphs only")
        with isolated(device), float32_as_asked(self.precision, by_hand=by_hand):
            torch.backends.cudnn.benchmark = by_hand
            if self.variant == "graphs":
                place_for_graphs()
            return self.loop(self.setup, steps, after_step)


VARIANTS: tuple[Variant, ...] = get_args(Variant)
UNASKED: tuple[Variant, ...] = ("documented", "tuned")
"""What a name alone stands for."""


def peer_name(word: str) -> str:
    """`plain` of `plain` and of `plain:graphs`."""
    return word.partition(":")[0]


def variants_of(word: str) -> tuple[Variant, ...]:
    """Those that a word of `--against` stands for."""
    asked = word.partition(":")[2]
    return tuple(variant for variant in VARIANTS if variant == asked) if asked else UNASKED


def require_peers(words: Sequence[str]) -> None:
    """Raise ConfigError for one nobody knows, PeerMissing for one not installed: before anything is timed."""
    known = [*PEERS, *(f"{name}:{variant}" for name in PEERS for variant in VARIANTS)]
    for word in words:
        if word not in known:
            raise ConfigError(f"unknown peer {word!r}", fix=nearest(word, known))
        if peer_name(word) in IMPORTS:
            with quiet():  # their imports warn
                IMPORTS[peer_name(word)]()


def peers(words: Sequence[str], problem: Problem, precision: str, *, _compiler: str = "inductor") -> list[Runner]:
    """Runners of the named peers and variants. `_compiler` is for tests: the light backends of torch.compile."""
    require_peers(words)
    if precision not in PEER_PRECISIONS:
        raise PrecisionError(
            f"peers cannot be timed in {precision!r}",
            why=f"without further packages they take {', '.join(PEER_PRECISIONS)}",
            fix="leave that precision or --against out",
        )
    if problem.num_phases > 1:
        raise HardwareError(
            f"{problem.config.workload} trains in {problem.num_phases} phases",
            why="a peer's loop makes one optimizer step, so it would be timed at other work",
            fix="leave --against out",
        )
    return [
        PeerRunner(name=name, variant=variant, precision=precision, setup=setup, loop=PEERS[name])
        for word in words
        for name in [peer_name(word)]
        for variant in variants_of(word)
        for setup in [PeerSetup(problem=problem, precision=precision, variant=variant, compiler=_compiler)]
    ]
