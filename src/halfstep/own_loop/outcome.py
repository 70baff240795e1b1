"""What a loop of one's own learns of a step: plain numbers, read when they are asked for."""

from __future__ import annotations

from halfstep.step.facts import Facts, Reading


class Outcome:
    """What became of one step. The first property read waits for the device, so read it when you report."""

    def __init__(self, facts: Facts | Reading) -> None:
        self._facts = facts

    @property
    def reading(self) -> Reading:
        """Everything at once, as plain numbers."""
        if isinstance(self._facts, Facts):
            self._facts = self._facts.read()
        return self._facts

    @property
    def step(self) -> int:
        """Which step it was: attempted steps before it."""
        return self.reading.attempted

    @property
    def loss(self) -> float:
        """The window's loss, unscaled."""
        return self.reading.loss

    @property
    def grad_norm(self) -> float:
        """Norm over all gradients, unscaled, before clipping."""
        return self.reading.grad_norm

    @property
    def lr(self) -> float:
        """The learning rate it ran with: of the first parameter group of the first optimizer."""
        return self.reading.lr

    @property
    def scale(self) -> float:
        """The loss scale it ran with; 1 where nothing is scaled."""
        return self.reading.scale

    @property
    def committed(self) -> bool:
        """Whether the weights moved."""
        return not self.reading.is_bad

    @property
    def reason(self) -> str:
        """Why they did not; empty if they did."""
        return self.reading.reason

    def __repr__(self) -> str:
        r = self.reading
        became = "committed" if self.committed else f"skipped: {r.reason}"
        return f"Outcome(step {r.attempted} {became}, loss {r.loss:.4g}, grad_norm {r.grad_norm:.4g}, lr {r.lr:.2e})"
