"""Pass a run's records on to experiment trackers (`log.track`) and to the user's functions (`train.callbacks`).

A tracker gets the scalars of every record, the config and plan at the start, and the report's files at the end. Where
it sends them is the tracker's own business: it reads its environment variables and login, halfstep none of them. A
resumed run continues the tracker's run, whose id is in `RUN/tracking.json`; records after its checkpoint, which a run
repeats, appear twice with equal values (TensorBoard drops the old ones).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep.disk import parse_json, write_atomically
from halfstep.errors import ConfigError, HalfstepError, TrainingStopped, suggest_install, summarise_error
from halfstep_train.config.foreign import flatten_keys

NOT_CURVES = {"step", "epoch", "total_steps"}
MOST_PARAMS = 100
"""MLflow takes this many parameters per request, of at most LONGEST_PARAM characters each."""
LONGEST_PARAM = 6000


class Listener:
    """Receives every record of a run."""

    name: str
    id = ""
    """Identifies the run in the tracker, so that a resumed run continues it."""
    where = ""
    """How to see what it recorded; empty for callbacks."""

    def add(self, record: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def add_files(self, folder: Path, files: Sequence[Path]) -> None:
        """Do nothing: a listener may have no use for files."""

    def close(self, *, is_complete: bool) -> None:
        """Do nothing: a listener may have nothing open."""


def refuse_missing(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"log.track={missing[0]} needs the package {missing[0]}, which is not installed",
            why="trackers are optional dependencies of halfstep",
            fix=f"{suggest_install(*missing)}, or leave log.track out",
        )


def open_trackers(
    names: Sequence[str],
    folder: Path,
    settings: Mapping[str, Any],
    plan: Mapping[str, Any],
    *,
    after_step: int | None,
    quiet: bool = False,
) -> list[Listener]:
    """Open these trackers. `after_step` is the last recorded step of a resumed run."""
    file = folder / "tracking.json"
    ids: dict[str, str] = parse_json(file.read_text()) if file.is_file() else {}
    # Its rows, one per module, are in plan.json.
    plan = {key: value for key, value in plan.items() if isinstance(value, str | int | float)}
    open_one: dict[str, Callable[[], Listener]] = {
        "tensorboard": lambda: TensorBoard(folder, settings, plan, after_step=after_step),
        "wandb": lambda: WandB(folder, settings, plan, run_id=ids.get("wandb"), quiet=quiet),
        "mlflow": lambda: MLflow(folder, settings, plan, run_id=ids.get("mlflow")),
    }
    opened: list[Listener] = []
    for name in names:
        try:
            opened.append(open_one[name]())
        except Exception as error:
            for one in opened:
                one.close(is_complete=False)
            raise HalfstepError(
                f"cannot start tracking with {name}: {type(error).__name__}: {summarise_error(error)}",
                why="a tracker that cannot start would leave no trace of the run",
                fix=f"check the installation, address and login of {name}, or leave it out of log.track",
            ) from error
    ids |= {one.name: one.id for one in opened if one.id}
    if ids:
        write_atomically(file, json.dumps(ids) + "\n")
    return opened


def select_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record, named by its kind: `train/loss`, `val/iou`."""
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if name not in NOT_CURVES and isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoard(Listener):
    """Writes event files into `RUN/tensorboard`, for `tensorboard --logdir`."""

    name = "tensorboard"

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], plan: Mapping[str, Any], *, after_step: int | None = None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events after the last record are from steps that a resumed run repeats: TensorBoard hides them.
        purge_step = None if after_step is None else after_step + 1
        self.where = shlex.join(["tensorboard", "--logdir", str(folder / "tensorboard")])
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        for title, value in {"config": settings, "plan": plan}.items():
            # Indented by four spaces: Markdown shows it as written.
            text = json.dumps(value, indent=2, default=str).replace("\n", "\n    ")
            self._writer.add_text(title, f"    {text}", after_step or 0)

    def add(self, record: Mapping[str, Any]) -> None:
        for name, value in select_scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self, *, is_complete: bool) -> None:
        self._writer.close()


class WandB(Listener):
    """Sends a run to Weights & Biases; `WANDB_MODE=offline` keeps it in `RUN/wandb`, for `wandb sync`."""

    name = "wandb"

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], plan: Mapping[str, Any], *, run_id: str | None, quiet: bool
    ) -> None:
        import wandb

        # console=off: wandb would wrap stdout, and with it the progress bar.
        self._run: Any = wandb.init(
            dir=str(folder),
            id=run_id,
            name=folder.resolve().name,
            resume="allow" if run_id else None,
            config={**settings, "plan": dict(plan)},
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=quiet),
        )
        self.id = str(self._run.id)
        # An offline run has no address.
        self.where = self._run.url or shlex.join(["wandb", "sync", str(Path(self._run.dir).parent)])
        self._artifact: Callable[..., Any] = wandb.Artifact
        # Records do not come in the order of their steps: an event is recorded before the train record of its step.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def add(self, record: Mapping[str, Any]) -> None:
        self._run.log({**select_scalars(record), "step": record["step"]})

    def add_files(self, folder: Path, files: Sequence[Path]) -> None:
        artifact = self._artifact(f"run-{self.id}", type="run")
        for file in files:
            artifact.add_file(str(file), name=str(file.relative_to(folder)))
        self._run.log_artifact(artifact)

    def close(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


class MLflow(Listener):
    """Sends a run to the store of MLFLOW_TRACKING_URI; by default `mlflow.db` in the working folder."""

    name = "mlflow"

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], plan: Mapping[str, Any], *, run_id: str | None = None
    ) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        started = mlflow.start_run(run_id=run_id, run_name=None if run_id else folder.resolve().name)
        self.id = str(started.info.run_id)
        store = re.sub("//[^/@]*@", "//", mlflow.get_tracking_uri())  # without a password
        self.where = f"run {self.id} in {store}"
        if run_id is not None:  # MLflow refuses to change the parameters of a run
            return
        flat = flatten_keys({**settings, "plan": dict(plan)})
        params = [(key, str(value)[:LONGEST_PARAM]) for key, value in flat.items()]
        for first in range(0, len(params), MOST_PARAMS):
            mlflow.log_params(dict(params[first : first + MOST_PARAMS]))

    def add(self, record: Mapping[str, Any]) -> None:
        # Not synchronous: a store may take milliseconds, and training would wait for it.
        self._mlflow.log_metrics(select_scalars(record), step=record["step"], run_id=self.id, synchronous=False)

    def add_files(self, folder: Path, files: Sequence[Path]) -> None:
        for file in files:
            parent = file.relative_to(folder).parent
            self._mlflow.log_artifact(str(file), artifact_path=None if parent == Path() else str(parent))

    def close(self, *, is_complete: bool) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run("FINISHED" if is_complete else "FAILED")


class CallbackFailed(TrainingStopped):
    """A function of `train.callbacks` raised; the run is saved and can be continued."""


class Callbacks(Listener):
    """Calls the user's functions with each record; after an exception none of them is called again."""

    name = "train.callbacks"

    def __init__(self, functions: Mapping[str, Callable[[dict[str, Any]], object]]) -> None:
        self._functions = functions
        self.failure: CallbackFailed | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        for path, function in self._functions.items() if self.failure is None else ():
            try:
                function(dict(record))
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                self.failure = CallbackFailed(
                    f"the callback {path} raised {type(error).__name__}: {summarise_error(error)} "
                    f"({os.path.relpath(last.filename)}:{last.lineno})"
                )
                self.failure.__cause__ = error
                return
