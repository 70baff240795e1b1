"""Lightning and Fabric with guarded steps. docs/integrations/lightning.md is the guide.

    trainer = Trainer(plugins=[HalfstepPrecision("bf16")])           for `lightning` and `pytorch_lightning`
    guard = hs.integrations.lightning.guard(fabric, model, optimizer)    after fabric.setup

Lightning hands the precision plugin the closure that runs training_step, zero_grad and backward: one method owns the
whole step. So there are two levels.

    captured   hs.Step runs training_step as its loss function, and replays the step as a CUDA graph where it can. The
               hooks around backward and the optimizer step do not run, so it is not used where one is overridden.
    guard      Lightning runs everything; guard.py checks the step, and commits or drops it.

`self.log` writes into Lightning's collections, which cannot be traced. While a captured step runs, `log` and `log_dict`
note their arguments, and Lightning's own methods run afterwards, as in training_step.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, Unpack, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from halfstep.errors import ConfigError
from halfstep.fast.fast_path import say
from halfstep.hardware.probe import probe
from halfstep.integrations.captured import CapturedLoop, detach_copy, find_obstacle
from halfstep.integrations.guard import (
    HostAdvice,
    HostGuard,
    HostOptions,
    check_loop,
    refuse_second_guard,
    refuse_unguardable,
    take_host_options,
)
from halfstep.own_loop.arguments import check_choice, read_precision, refuse_unknown
from halfstep.own_loop.step import Step
from halfstep.precision.contexts import get_autocast_dtype
from halfstep.precision.decide import Precision, decide
from halfstep.step.commit import refuse_closure

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
NAMES = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true", "tf32": "32-true"}  # Lightning's, by ours
ONE_DEVICE = ("SingleDeviceStrategy",)
GUARDABLE = (*ONE_DEVICE, "DDPStrategy")
MODULE_HOOKS = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "backward",
    "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip
CALLBACK_HOOKS = MODULE_HOOKS[:4]
SCALER_KEY = "MixedPrecision"  # where Lightning stores its own GradScaler
ADVICE = HostAdvice(
    overflow='HalfstepPrecision("bf16")', clip="Trainer(gradient_clip_val=1.0)",
    step="self.optimizers().step() in manual optimization",
)  # fmt: skip


class HalfstepPrecision:
    """A precision plugin that drops bad steps: weights, buffers, optimizer, schedule and loss scale stay as they were.

    Arguments:
        precision: "auto", "bf16", "fp16", "tf32", "fp32" or an hs.Precision.
        level: "captured" runs the whole step in hs.Step, as a CUDA graph where it can be traced; "guard" checks the
            steps that Lightning runs; "auto" takes captured on one GPU if no hook around backward, zero_grad or the
            optimizer step is overridden and gradients are not accumulated.
        schedule, capsules, max_consecutive, also: as in halfstep.integrations.guard.HostGuard.
        fast, skip_spikes, ...: of a captured step, as in hs.Step.
    """

    precision: Any = "32-true"

    def __new__(cls, *args: Any, **kwargs: Any) -> HalfstepPrecision:
        if cls is HalfstepPrecision:
            cls = make_plugin_class(find_package())
        return object.__new__(cls)

    def __init__(
        self,
        precision: str | torch.dtype | Precision = "auto",
        *,
        level: Literal["auto", "captured", "guard"] = "auto",
        **options: Any,
    ) -> None:
        check_choice("level", level, ("auto", "captured", "guard"))
        self._asked, self._level = read_precision(precision), level
        self._options, self._step_options = take_host_options(options), options
        refuse_unknown(options, Step.__init__)
        self._dtype: torch.dtype | None = None
        self._device = "cpu"
        self.scaler: torch.amp.GradScaler | None = None
        self._stored_scale: dict[str, Any] = {}
        self._granted, self._why_guard = "fp32", ""
        self._model: Any = None
        self._optimizer: Optimizer | None = None
        self._configs: list[Any] = []
        self._steps: HostGuard | CapturedSteps | None = None
        self._num_dropped = 0

    @property
    def step(self) -> Step | None:
        """Return the hs.Step of captured steps: its `mode` and `certificate` show what runs. None at level "guard"."""
        return self._steps.step if isinstance(self._steps, CapturedSteps) else None

    @property
    def num_dropped(self) -> int:
        """Return the number of dropped steps of the current training, or of the last one; waits for the device."""
        return self._num_dropped if self._steps is None else self._steps.num_dropped

    @property
    def _guard(self) -> HostGuard | None:
        return self._steps if isinstance(self._steps, HostGuard) else None

    # --- set-up ---

    def connect(self, model: Any, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Choose precision and level. The guard is made at the first step, when a checkpoint has been loaded."""
        self._end()
        pl_module = _unwrap_module(model)
        device = next(model.parameters()).device
        self._device = device.type
        plan = decide(self._asked, probe(str(device)), pl_module)
        self._granted, self.precision = plan.granted, NAMES.get(plan.granted, plan.granted)
        self._dtype = get_autocast_dtype(plan.granted)
        if not optimizers:  # validation or prediction alone
            return model, optimizers, lr_schedulers
        _refuse_strategy(pl_module.trainer.strategy, GUARDABLE)
        if len(optimizers) != 1:
            raise ConfigError(
                f"HalfstepPrecision guards one optimizer, but configure_optimizers returned {len(optimizers)}",
                why="Lightning does not show which of them a loss belongs to",
                fix="one optimizer with several parameter groups, or Lightning's own precision=...",
            )
        refuse_closure(optimizers[0])
        self._model, self._optimizer, self._configs = model, optimizers[0], lr_schedulers
        self._why_guard = "" if self._level == "guard" else _find_obstacle(pl_module)
        if self._why_guard and self._level == "captured":
            raise ConfigError(
                f"this training cannot be captured: {self._why_guard}", fix='level="guard", or level="auto"'
            )
        if self._granted not in NAMES or self._granted == "tf32" and self._is_guard:
            raise ConfigError(
                f"precision {self._granted!r} is not supported inside Lightning at level 'guard'",
                why="the guard leaves the computation to Lightning, which does not support it",
                fix="'bf16', 'fp16' or 'fp32'; for tf32 torch.set_float32_matmul_precision('high') with 'fp32'",
            )
        for warning in plan.warnings if self._is_guard else ():  # a captured step gives them itself
            say(warning)
        if self._granted == "fp16":
            self.scaler = torch.amp.GradScaler(self._device)
        return model, optimizers, lr_schedulers

    @property
    def _is_guard(self) -> bool:
        return self._level == "guard" or bool(self._why_guard)

    def _begin(self) -> None:
        """Make guard or step, once optimizer, schedulers and scaler hold what a checkpoint stored."""
        if self._optimizer is None or self._steps is not None:
            return
        if self.scaler is not None and self._stored_scale:
            self.scaler.load_state_dict(self._stored_scale)
        limits = ["global_step, which counts dropped steps"]
        limits += [
            f"{type(c.scheduler).__name__}, which follows its metric" for c in self._configs if c.reduce_on_plateau
        ]
        by_step = [config for config in self._configs if config.interval == "step" and not config.reduce_on_plateau]
        trainer = _unwrap_module(self._model).trainer
        if self._is_guard:
            if self._why_guard:
                limits.append(f"steps are not captured: {self._why_guard}")
            self._steps = guard = HostGuard(
                "Lightning", self._model, self._optimizer, ADVICE, precision=self._granted, scaler=self.scaler,
                limits=limits, **self._options,
            )  # fmt: skip
            for config in by_step:
                config.scheduler = guard.follow(config.scheduler)
        else:
            self._steps = captured = CapturedSteps(
                "Lightning", self._model, self._optimizer, by_step[0].scheduler if by_step else None, ADVICE,
                precision=self._asked, clip_norm=trainer.gradient_clip_val or 0.0, scaler=self.scaler,
                clip_type="value" if trainer.gradient_clip_algorithm == "value" else "l2", limits=limits,
                **{k: value for k, value in self._options.items() if k != "schedule"}, **self._step_options,
            )  # fmt: skip
            for config in by_step:
                config.scheduler = captured.scheduler
        self._steps.announce()
        for callback in trainer.callbacks:
            average = getattr(callback, "_average_model", None)  # of a WeightAveraging
            if isinstance(average, nn.Module):
                self._steps.guard_average(callback, "on_train_batch_end", average)

    def _end(self) -> None:
        try:
            # While another error is being handled, a second one would hide it.
            if self._steps is not None and sys.exc_info()[0] is None:
                self._steps.finish()
        finally:
            if self._steps is not None:
                self._num_dropped = self._steps.num_dropped
                self._steps.close()
            for config in self._configs:
                config.scheduler = getattr(config.scheduler, "inner", config.scheduler)
            self._steps = self._optimizer = self.scaler = None
            self._configs = []

    def teardown(self) -> None:
        self._end()

    # --- a step ---

    def train_step_context(self) -> contextlib.AbstractContextManager[None]:
        self._begin()
        if self._guard is not None:
            # Lightning calls training_step, not the module, so no forward hook of the module opens the window.
            self._guard.open_window()
            self._guard.keep({"batch": _unwrap_module(self._model).trainer._results.batch})
        return self.forward_context()

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Enter autocast as Lightning's own plugin does."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self._dtype, cache_enabled=False)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        if self._guard is not None:
            self._guard.record(tensor)  # already divided by accumulate_grad_batches
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return cast(Any, super()).pre_backward(tensor, module)

    def optimizer_step(self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, judge its gradients as Lightning's hooks and clipping left them, and step or not."""
        if kwargs:
            raise ConfigError(f"optimizer.step() was given {', '.join(kwargs)}, which a guarded step does not support")
        self._begin()
        if isinstance(self._steps, CapturedSteps):
            return self._steps.run(closure)
        assert self._steps is not None
        result = closure()
        if self.scaler is not None and any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            self.scaler.unscale_(optimizer)
        cast(Any, self)._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:
            return None  # training_step returned None: Lightning skips this step
        self._steps.step()
        return result

    def clip_gradients(self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> Any:
        if clip_val and gradient_clip_algorithm == "value" and self._guard is not None:
            self._guard.look_at_gradients()
        return cast(Any, super()).clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip as Lightning does, and note the norm: to measure it again takes as long as to clip."""
        parameters = list(cast(Any, self).main_params(optimizer))
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_val)
        if self._guard is not None:
            self._guard.note_norm(norm, parameters)

    # --- checkpoints: the loss scale under Lightning's own key, so that either plugin can load it ---

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None and self.step is not None:
            self.scaler.load_state_dict(self.step.scaler.state_dict())
        if self.scaler is not None:
            checkpoint[SCALER_KEY] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._stored_scale = checkpoint.get(SCALER_KEY, {})

    def __reduce__(self) -> Any:  # a class made at run time; processes that Lightning spawns get the plugin
        return _restore_plugin, (find_package(), vars(self))


def find_package() -> str:
    """Return which of Lightning's two package names this process uses."""
    loaded = [name for name in PACKAGES if f"{name}.trainer" in sys.modules]
    if len(loaded) == 1:
        return loaded[0]
    if loaded:
        raise ConfigError(
            "both lightning and pytorch_lightning are imported",
            why="their classes differ, and a plugin of one is refused by the other's Trainer",
            fix="import one of them; or halfstep.integrations.lightning.make_plugin_class('pytorch_lightning')('bf16')",
        )
    for name in PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"{name}.trainer")
            return name
    raise ConfigError("Lightning is not installed", fix="pip install 'lightning>=2.6'")


_CLASSES: dict[str, type[HalfstepPrecision]] = {}


def make_plugin_class(package: str) -> type[HalfstepPrecision]:
    """Return HalfstepPrecision as a subclass of one package's own Precision, which its Trainer asks for."""
    if package not in _CLASSES:
        base = importlib.import_module(f"{package}.plugins.precision").Precision
        _CLASSES[package] = type("HalfstepPrecision", (HalfstepPrecision, base), {"__module__": __name__})
    return _CLASSES[package]


def _restore_plugin(package: str, state: dict[str, Any]) -> HalfstepPrecision:
    plugin = object.__new__(make_plugin_class(package))
    vars(plugin).update(state)
    return plugin


def _unwrap_module(model: Any) -> Any:
    """Return the LightningModule inside DDP."""
    return model if hasattr(model, "automatic_optimization") else model.module


def _refuse_strategy(strategy: Any, allowed: tuple[str, ...]) -> None:
    names = [kind.__name__ for kind in type(strategy).__mro__]
    if not any(name in allowed for name in names) or "XLA" in names[0] or "Deep" in names[0]:
        refuse_unguardable(names[0], 'strategy="auto" on one device, or strategy="ddp"')


def _find_obstacle(pl_module: Any) -> str:
    """Return why the steps of a training are not run by hs.Step; empty if nothing is known to prevent it."""
    trainer, host = pl_module.trainer, _import_host(pl_module)
    is_overridden = host.utilities.model_helpers.is_overridden
    # Another strategy than that of one device has ranks, also if it has one only.
    num_ranks = 1 if type(trainer.strategy).__name__ in ONE_DEVICE else 2
    if obstacle := find_obstacle(trainer.strategy.root_device, num_ranks):
        return obstacle
    if not pl_module.automatic_optimization:
        return "the module optimizes manually"
    if getattr(pl_module, "_compiler_ctx", None) is not None:
        return "the module is compiled as a whole; a captured step compiles itself"
    if trainer.accumulate_grad_batches != 1 or any(
        type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks
    ):
        return "gradients are accumulated, and Lightning runs all but the last micro-batch outside of the step"
    if host.utilities.signature_utils.is_param_in_hook_signature(
        pl_module.training_step, "dataloader_iter", explicit=True
    ):
        return "training_step takes dataloader_iter"
    by_step = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
    if by_step and (len(trainer.lr_scheduler_configs) > 1 or by_step[0].frequency != 1):
        return "there are several schedulers, or one that does not follow every step"
    if by_step and getattr(by_step[0].scheduler, "cycle_momentum", False):
        return f"{type(by_step[0].scheduler).__name__} changes momentum at every step (cycle_momentum=True)"
    for name in MODULE_HOOKS:
        if is_overridden(name, pl_module):
            return f"{type(pl_module).__name__} overrides {name}"
    for callback in trainer.callbacks:
        for name in CALLBACK_HOOKS:
            if is_overridden(name, callback, host.Callback):
                return f"the callback {type(callback).__name__} overrides {name}"
    return ""


def _import_host(pl_module: Any) -> ModuleType:
    """Return the package that a LightningModule comes from."""
    bases = [kind.__module__ for kind in type(pl_module).__mro__ if kind.__name__ == "LightningModule"]
    return importlib.import_module(PACKAGES[0] if bases[0].startswith("lightning.") else PACKAGES[1])


# --- captured steps ---


class CapturedSteps(CapturedLoop):
    """Run a LightningModule's training_step in hs.Step."""

    def __init__(self, host: str, pl_module: Any, *rest: Any, **more: Any) -> None:
        super().__init__(host, pl_module, *rest, **more)
        self.pl_module, self.calls = pl_module, LogCalls()
        self._loss_fn = _make_loss_fn(pl_module, self.calls)
        # The same objects in every step: a guard of the trace may compare identities.
        self._methods = {"log": self.calls.log, "log_dict": self.calls.log_dict}

    def run(self, closure: Any) -> Any:
        """Make one step in place of Lightning's closure, and give the closure its result."""
        module, calls = self.pl_module, self.calls
        # What Lightning's own closure would call training_step with: batch, and batch_idx if it takes that.
        arguments = dict(closure._step_fn.args[0])
        vars(module).update(self._methods)
        try:
            self(self._loss_fn, [arguments])
        finally:
            for name in self._methods:
                del vars(module)[name]
        optimization = module.trainer.fit_loop.epoch_loop.automatic_optimization
        closure._result = optimization.output_result_cls(calls.loss, extra=calls.extra)
        before, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            for name, args, kwargs in calls.noted:
                getattr(module, name)(*args, **kwargs)
        finally:
            module._current_fx_name = before
        return closure._result.loss


class LogCalls:
    """What training_step returned and logged. Each call replaces the lists: a trace may run more than once."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.extra: dict[str, Any] = {}
        self.loss: Any = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.noted.append(("log", (name, detach_copy(value), *args), kwargs))

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        values = {k: detach_copy(v) for k, v in dictionary.items()} if type(dictionary) is dict else dictionary
        self.noted.append(("log_dict", (values, *args), kwargs))


def _make_loss_fn(pl_module: Any, calls: LogCalls) -> Callable[[Any], Tensor]:
    def run_training_step(arguments: dict[str, Any]) -> Tensor:
        calls.noted = []
        output = pl_module.training_step(*arguments.values())
        extra: dict[str, Any] = {}
        loss = output
        if output is not None and not isinstance(output, Tensor):
            loss = output["loss"]
            extra = {name: value for name, value in output.items() if name != "loss"}
        if loss is None:
            raise ConfigError(
                "training_step returned None",
                why="a captured step cannot skip itself",
                fix='return the loss: a step that is not finite is dropped; or HalfstepPrecision(level="guard")',
            )
        calls.extra = tree_map(detach_copy, extra) if extra else {}
        calls.loss = loss.detach().clone()
        return loss

    return run_training_step


# --- Fabric ---


FABRIC_ADVICE = HostAdvice(
    overflow='Fabric(precision="bf16-mixed")', clip="fabric.clip_gradients(model, optimizer, max_norm=1.0)",
    step="step() of the optimizer that fabric.setup returned",
)  # fmt: skip


class FabricGuard(HostGuard):
    """The guard of one optimizer that Fabric has set up; `guard` makes it."""

    def __init__(self, fabric: Any, models: list[Any], optimizer: Any, **more: Any) -> None:
        plugin = fabric.strategy.precision
        names = {theirs: ours for ours, theirs in NAMES.items() if ours != "tf32"}
        super().__init__(
            "Fabric", [one._forward_module for one in models], optimizer.optimizer, FABRIC_ADVICE,
            precision=names.get(str(plugin.precision), "fp32"), scaler=getattr(plugin, "scaler", None), **more,
        )  # fmt: skip
        self._replace(fabric, "backward", self._backward)
        self._replace(fabric, "clip_gradients", self._clip_gradients)
        self._replace(optimizer, "step", self._step_optimizer)
        self._mark(fabric)

    def _backward(self, before: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.record(tensor)
        return before(tensor, *args, **kwargs)

    def _clip_gradients(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Fabric's default would raise, after a wait, for what the guard drops.
        if kwargs.get("clip_val") is not None:
            self.look_at_gradients()
        norm = before(*args, **{"error_if_nonfinite": False, **kwargs})
        if norm is not None:  # over all parameters of the optimizer
            self.note_norm(norm, self._step.find_trained_parameters())
        return norm


def guard(
    fabric: Any,
    model: Any,
    optimizer: Any = None,  # refused: a forgotten one gets an explanation
    **options: Unpack[HostOptions],
) -> FabricGuard:
    """Guard the steps of an optimizer that Fabric has set up. Call it once, after fabric.setup. ::

        model, optimizer = fabric.setup(model, optimizer)
        guard = hs.integrations.lightning.guard(fabric, model, optimizer)
        scheduler = guard.follow(scheduler)  # if there is one

    The arguments and the result are those of hs.integrations.accelerate.guard.
    """
    fix = "model, optimizer = fabric.setup(model, optimizer), then guard(fabric, model, optimizer)"
    if not hasattr(fabric, "strategy") or not hasattr(fabric, "backward"):
        raise ConfigError(f"guard takes a Fabric first, not {type(fabric).__name__}", fix=fix)
    refuse_second_guard(fabric)
    _refuse_strategy(fabric.strategy, GUARDABLE)

    def is_set_up(one: Any) -> bool:  # an optimizer or a module that Fabric has wrapped
        return "_strategy" in vars(one) or "_forward_module" in getattr(one, "_modules", {})

    models = check_loop(fabric, model, optimizer, is_set_up, fix)
    limits = ["counters and averages of your loop", "schedulers without guard.follow(scheduler)"]
    made = FabricGuard(fabric, models, optimizer, limits=limits, **options)
    made.announce()
    return made
