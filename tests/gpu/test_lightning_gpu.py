"""Captured steps inside Lightning, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from host_faults import FAULTS, same_bits
from tiny_lightning import fit, make_module, make_trainer, make_watcher

pytestmark = pytest.mark.gpu


def make_plugin(**more: Any) -> Any:
    from halfstep.integrations.lightning import make_plugin_class

    return make_plugin_class("lightning.pytorch")(more.pop("precision", "fp32"), max_consecutive=9, **more)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("level", ["guard", "captured"])
def test_a_bad_step_leaves_everything_as_it_was(level: str, precision: str) -> None:
    pytest.importorskip("lightning")
    faults = {14 + 3 * number: fault for number, fault in enumerate(FAULTS)}
    plugin = make_plugin(level=level, precision=precision, **({"fast": "graph"} if level == "captured" else {}))
    modes: set[str] = set()
    watcher = make_watcher("lightning.pytorch", faults)
    begin = watcher.on_train_batch_start
    watcher.on_train_batch_start = lambda *args: (modes.add(str(plugin.step and plugin.step.mode)), begin(*args))
    fit(make_module(), make_trainer(plugin=plugin, callbacks=[watcher], accelerator="gpu"), 30)
    kept = slice(0, 3)  # without the loss scale, which an overflow of gradients lowers
    same = [n for n in range(30) if same_bits(watcher.states[n][kept], watcher.states[n + 1][kept])]
    assert set(same) >= set(faults)
    assert precision == "fp16" or same == sorted(faults)
    assert ("graph" in modes) == (level == "captured")


def test_a_captured_run_logs_and_schedules_as_lightnings_own() -> None:
    pytest.importorskip("lightning")
    own = fit(make_module(), make_trainer(accelerator="gpu"), 30)
    plugin = make_plugin(level="captured", fast="graph")
    captured = fit(make_module(), make_trainer(plugin=plugin, accelerator="gpu"), 30)
    for name, value in own.callback_metrics.items():
        # Sums of a few dozen fp32 numbers in another order, over thirty steps of Adam.
        torch.testing.assert_close(captured.callback_metrics[name], value, rtol=1e-3, atol=1e-4)
    schedulers = [trainer.lr_scheduler_configs[0].scheduler for trainer in (own, captured)]
    assert schedulers[0].last_epoch == schedulers[1].last_epoch == 30
