"""How a verdict reaches an optimizer: three methods, chosen by what the optimizer can do, shown with their price.

    found_inf   fused SGD, Adam, AdamW, Adagrad and our AdamW8bit and AdamWBf16 read the flag inside their kernel: free;
                in a CUDA graph AdamW's kernel, and Adam's without decay, is our own (single_pass.py), with torch's bits
    select      torch's others: save parameters and state, step, put back by `where` if bad: costs a copy of both
    host        anything else, and where an optimizer's own state lives on the host: one wait per step

Only torch's own classes are selected: a foreign optimizer may keep Python numbers or replace its state tensors, and
what it changed could not be put back from outside.

The first commit of a parameter is always decided on the host, with one wait: optimizers build their state then, and
fused SGD with momentum leaves an *uninitialised* buffer behind a skipped first step (seen on torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError, HalfstepError
from halfstep.step.adamw8bit import AdamW8bit
from halfstep.step.adamw_bf16 import AdamWBf16
from halfstep.step.flat import Snapshot
from halfstep.step.optimizers import OPTIMIZERS, REFUSED
from halfstep.step.rates import Rates
from halfstep.step.single_pass import SinglePass, takes

CommitMethod = Literal["found_inf", "select", "host"]

READS_FLAG_IN_KERNEL = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, AdamW8bit, AdamWBf16)


def commit_method(optimizer: Optimizer) -> CommitMethod:
    """The cheapest method that leaves everything bit-identical on a bad step."""
    for kind, (reason, fix) in REFUSED.items():
        if isinstance(optimizer, kind):
            raise ConfigError(f"{kind.__name__} cannot be used in a guarded step", why=reason, fix=fix)
    groups = optimizer.param_groups
    # The exact class: a subclass may override step() and ignore the flag.
    if type(optimizer) in READS_FLAG_IN_KERNEL and all(group.get("fused") for group in groups):
        return "found_inf"
    on_host = all(p.device.type == "cpu" for group in groups for p in group["params"])
    is_torchs = type(optimizer) in OPTIMIZERS.values()
    return "select" if is_torchs and (on_host or _is_capturable(optimizer)) else "host"


def numbers(gradient: Tensor) -> Tensor:
    """What of a gradient is scaled and judged: all of it, of a sparse one what it holds."""
    return gradient._values() if gradient.is_sparse else gradient


def _is_capturable(optimizer: Optimizer) -> bool:
    return all(group.get("capturable") for group in optimizer.param_groups)


class Committer:
    def __init__(self, optimizer: Optimizer, rates: Rates | None) -> None:
        self.optimizer, self.rates = optimizer, rates
        self.method = commit_method(optimizer)
        self.takes_tensor_lr = self.method == "found_inf" or self.method == "select" and _is_capturable(optimizer)
        self.stepped: dict[Tensor, bool] = {}  # parameters that it has stepped, and whether it keeps state of them
        self.single_pass: SinglePass | None = None  # while a step is captured: what takes the place of torch's kernel
        if rates is not None and self.takes_tensor_lr:
            rates.bind(optimizer)

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def hint(self) -> str:
        """Where `fused=True` would make skipping free; torch has no fused kernels for complex weights."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        is_one = type(self.optimizer) in READS_FLAG_IN_KERNEL and all(p.is_floating_point() for p in parameters)
        if not is_one or self.method == "found_inf":
            return ""
        price = "a copy of weights and state each step" if self.method == "select" else "one wait each step"
        return f"{self.name} is not fused: skipping safely costs {price}; fused=True makes it free"

    @property
    def extra_bytes(self) -> int:
        """What the method costs in memory while a step commits."""
        if self.method != "select":
            return 0
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        state = [value for own in self.optimizer.state.values() for value in own.values() if torch.is_tensor(value)]
        return sum(t.numel() * t.element_size() for t in (*parameters, *state))

    def commit(self, bad: Tensor, factor: Tensor | None = None) -> None:
        """Step the optimizer with gradients times `factor`, or leave everything as it was where `bad` is set."""
        by_host = self.method == "host" or any(map(self._is_first, self._with_grad()))
        if self.method == "found_inf" and not by_host:
            return self._commit_in_kernel(bad, factor)
        if factor is not None:
            torch._foreach_mul_([numbers(p.grad) for p in self._with_grad() if p.grad is not None], factor)
        return self._commit_by_host(bad) if by_host else self._commit_by_selection(bad)

    def forget(self) -> None:
        """After the state was loaded: the tensors are new ones."""
        self.stepped = {p: bool(own) for p, own in self.optimizer.state.items()}
        if self.rates is not None and self.takes_tensor_lr:
            self.rates.bind(self.optimizer)

    def open_capture(self, device: torch.device) -> SinglePass | None:
        """Before a capture; what comes back has to live as long as the graph, and be filled after the capture."""
        self.single_pass = SinglePass(self.optimizer, device) if takes(self.optimizer, device) else None
        return self.single_pass

    def close_capture(self) -> None:
        """After a capture, whole or broken: what lies in the graph's memory must not be mistaken for our own."""
        self.single_pass = None

    def _is_first(self, parameter: Tensor) -> bool:
        """Whether its state has to be built; again, where somebody has cleared it or loaded an empty one."""
        has_state = self.stepped.get(parameter)
        return has_state is None or has_state and not self.optimizer.state.get(parameter)

    def _commit_by_host(self, bad: Tensor) -> None:
        if bool(bad):
            return
        self._begin_momentum()
        self._step()
        self.stepped |= {p: bool(self.optimizer.state.get(p)) for p in self._with_grad()}

    def _begin_momentum(self) -> None:
        """Fused SGD cannot begin the momentum of one parameter after the others: what it starts from is put there."""
        if type(self.optimizer) is not torch.optim.SGD or self.method != "found_inf" or not self.stepped:
            return
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if group["momentum"] and p.grad is not None and not self.optimizer.state[p]:
                    # A first step makes the buffer the gradient g; m * b + (1 - d) * g is g for b = g * d / m.
                    first = p.grad * (group["dampening"] / group["momentum"])
                    self.optimizer.state[p]["momentum_buffer"] = first

    def _commit_in_kernel(self, bad: Tensor, factor: Tensor | None) -> None:
        if self.single_pass is not None and self.single_pass.fits_gradients:
            return self.single_pass.record(bad, factor)
        # The attributes are how torch's GradScaler talks to fused optimizers; they divide, and write the gradient back.
        said = {"found_inf": bad.float()}
        if factor is not None:
            said["grad_scale"] = factor.float().reciprocal()
        vars(self.optimizer).update(said)
        try:
            self._step()
        finally:
            for name in said:
                delattr(self.optimizer, name)

    def _commit_by_selection(self, bad: Tensor) -> None:
        if any(p.grad is not None and p.grad.is_sparse for p in self._with_grad()):
            self._commit_by_host(bad)  # copies of whole tables would cost more than the wait
            return
        snapshot = Snapshot(self._about_to_be_written())
        snapshot.save()
        self._step()
        snapshot.restore_where(bad)

    def _step(self) -> None:
        if self.rates is not None and not self.takes_tensor_lr:
            self.rates.write_floats(self.optimizer)
        try:
            self.optimizer.step()
        except Exception as error:
            if "closure" not in str(error):
                raise
            raise ConfigError(
                f"{self.name} needs a closure in its step(): {error}",
                why="it evaluates the model several times in one step, so no single verdict exists",
                fix="use an optimizer that steps without one; SAM's second pass fits into on_gradients= "
                "(docs/loop_kinds.md)",
            ) from error

    def _with_grad(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)

    def _about_to_be_written(self) -> list[Tensor]:
        """Parameters that have a gradient now, and their state: others may be frozen for a while."""
        parameters = list(self._with_grad())
        own = (self.optimizer.state[p].values() for p in parameters)
        return parameters + [value for values in own for value in values if torch.is_tensor(value)]


def commit_all(committers: Sequence[Committer], bad: Tensor, factor: Tensor | None) -> None:
    """One that raises finds others stepped already, and may be between two groups of its own: torch counts no writes
    into `p.data`. Copies of all weights at every step, to put them back, would cost more than the checkpoint to go on
    from, so that state is told of."""
    for number, committer in enumerate(committers):
        try:
            committer.commit(bad, factor)
        except BaseException as error:
            earlier = ", ".join(one.name for one in committers[:number])
            if earlier or not isinstance(error, HalfstepError):  # ours come before anything is written
                had = f"{earlier} had stepped when {committer.name} raised, which" if earlier else committer.name
                error.add_note(
                    f"halfstep: {had} may have stepped some of its parameters; the step is not counted, and weights "
                    f"{'are' if earlier else 'may be'} between two steps. Load model and step from your last "
                    "checkpoint to go on"
                )
            raise
