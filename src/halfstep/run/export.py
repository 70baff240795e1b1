"""The trained model in a form that others read, where the family has one: RUN/model, written when training ends."""

from __future__ import annotations

from halfstep.disk import whole_folder
from halfstep.errors import CheckpointError
from halfstep.run.assemble import Assembly
from halfstep.run.checkpoint import load
from halfstep.run.folder import RunFolder
from halfstep.run.stored_state import load_for_use
from halfstep.workloads import KINDS


def is_exported(workload: str, folder: RunFolder) -> bool:
    """Whether nothing is left to be exported."""
    return KINDS.of(workload).export is None or folder.model.is_dir()


def export(parts: Assembly, folder: RunFolder) -> None:
    """Write the best weights (the average where there is one), whole or not at all; the model becomes them."""
    kind = KINDS.of(parts.config.workload)
    if kind.export is None:
        return
    checkpoints = folder.checkpoints()
    stored = checkpoints.best() or checkpoints.all()[-1]
    load_for_use(parts.model, load(stored))
    try:
        with whole_folder(folder.model, replaces=True) as hidden:  # one may be there of an earlier end of this run
            kind.part("export")(parts.model.eval(), parts.config, dict(parts.workload.store), hidden)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model into {folder.model}: {error.strerror}",
            why=f"the run itself is whole; its best weights are in {stored}",
            fix="make room, then resume the run: it only exports again",
        ) from error
