"""The others in the field, timed on the same problem in the same process: `--against lightning,accelerate,plain`.

Each peer runs as its documentation shows and once more at its best by hand (see `peer_setup`). They are no
dependencies of halfstep: only who compares needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from halfstep.bench.peer_accelerate import import_accelerate, train_accelerate
from halfstep.bench.peer_isolation import float32_as_asked, isolated, quiet
from halfstep.bench.peer_lightning import import_lightning, train_lightning
from halfstep.bench.peer_plain import train_plain
from halfstep.bench.peer_setup import Loop, PeerMissing, PeerSetup, Variant
from halfstep.bench.runner import AfterStep, Problem, Runner
from halfstep.errors import ConfigError, HardwareError, PrecisionError, nearest

__all__ = ["PEERS", "PEER_PRECISIONS", "PeerMissing", "PeerRunner", "peers", "require_peers"]

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
            raise ConfigError(f"{steps} steps cannot be trained", fix="ask for at least one")
        by_hand, device = self.setup.by_hand, self.setup.problem.device
        if self.precision == "fp16" and device.type == "cpu" and self.name in FP16_ON_CPU:
            raise HardwareError(f"{self.name} cannot train fp16 on the CPU", why=FP16_ON_CPU[self.name])
        with isolated(device), float32_as_asked(self.precision, by_hand=by_hand):
            torch.backends.cudnn.benchmark = by_hand
            return self.loop(self.setup, steps, after_step)


def require_peers(names: Sequence[str]) -> None:
    """Raise PeerMissing for one that is not installed: to be known before anything is timed."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"unknown peer {name!r}", fix=nearest(name, PEERS))
        if name in IMPORTS:
            with quiet():  # their imports warn
                IMPORTS[name]()


def peers(
    names: Sequence[str],
    problem: Problem,
    precision: str,
    *,
    variants: Sequence[Variant] = ("documented", "tuned"),
    _compiler: str = "inductor",
) -> list[Runner]:
    """Runners of the named peers, two each. `_compiler` is for tests: the light backends of torch.compile."""
    require_peers(names)
    if precision not in PEER_PRECISIONS:
        raise PrecisionError(
            f"peers cannot be timed in {precision!r}",
            why=f"without further packages they take {', '.join(PEER_PRECISIONS)}",
            fix="leave that precision or --against out",
        )
    return [
        PeerRunner(name=name, variant=variant, precision=precision, setup=setup, loop=PEERS[name])
        for name in names
        for variant in variants
        for setup in [PeerSetup(problem=problem, precision=precision, variant=variant, compiler=_compiler)]
    ]
