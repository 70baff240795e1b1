"""Launchers that start a command several times: a run that knows nothing of the others must not begin."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.errors import ConfigError

LAUNCHERS = {
    "WORLD_SIZE": "torchrun or accelerate launch",
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}
"""The variable by which each says how many processes it has started."""


def refuse_many_processes(variables: Mapping[str, str]) -> None:
    """Each process would train a run of its own, on the same data and into folders beside each other."""
    for name, launcher in LAUNCHERS.items():
        count = variables.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"{name}={count}: this command was started {count} times, as by {launcher}",
                why="halfstep trains in one process on one device so far: these would be separate runs",
                fix=f"start it once, without {launcher} or with one process; if nothing else was started, unset {name}",
            )
