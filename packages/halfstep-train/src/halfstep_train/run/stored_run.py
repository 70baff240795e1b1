"""What a resumed run continues from: its newest intact checkpoint, on the ranks that there are now."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import format_count
from halfstep.hardware.probe import probe
from halfstep.step.optim.recut_shards import recut_optimizer_states
from halfstep_train.config.schema import RunConfig
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import Assembly, build_workload
from halfstep_train.run.checkpoint import Checkpoint, is_sharded, open_shards
from halfstep_train.run.checkpoint import load as load_checkpoint
from halfstep_train.run.folder import RunFolder, Settled, find_import_paths
from halfstep_train.run.frozen_modules import match_stored, name_lost_files
from halfstep_train.run.loop import Loop
from halfstep_train.run.resume import Changes, explain_finished
from halfstep_train.run.run_rank import RunRank
from halfstep_train.run.sharded_model import make_mesh
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.import_path import sign_code
from halfstep_train.workloads.base.workload import Workload

if TYPE_CHECKING:
    from halfstep.distributed.sharded_files import StoredShards


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A stored run with its newest checkpoint, of a sharded one this rank's part, and what was changed since."""

    folder: RunFolder
    settled: Settled
    changes: Changes
    path: Path
    checkpoint: Checkpoint
    damaged: list[str]  # a line for each newer checkpoint that cannot be used
    shards: StoredShards | None
    note: str  # empty unless another number of ranks wrote it

    @property
    def state(self) -> dict[str, Any]:
        return self.checkpoint.state

    def is_done(self, config: RunConfig, *, tells: bool) -> bool:
        """True if nothing is left to do; a finished run may still lack files that a kill prevented."""
        finished = explain_finished(config, self.state)
        if not finished or not self._is_tidy(config):
            return False
        if tells:
            RunReport(self.folder.path).notice(f"{self.folder.path} is {finished}")
        return True

    def _is_tidy(self, config: RunConfig) -> bool:
        """True if a finished run also has its last validation, mark of the best checkpoint, summary and export."""
        state, folder = self.state, self.folder
        is_validated = (
            state["position"]["epoch"] >= config.train.epochs
            or state["validated_at"] == state["step"]["attempted"]
            or state["num_samples"][1] == 0
        )
        is_marked = not state["is_best"] or folder.open_checkpoints().find_best() == self.path
        has_summary = (folder.report / "summary.json").is_file()
        is_exported = KINDS.of(config.workload).export is None or folder.model.is_dir()
        return is_validated and is_marked and has_summary and is_exported

    def build_workload(self, config: RunConfig) -> Workload:
        """Build the workload with what the run stored about its data and frozen modules."""
        stored = self.state["frozen"]
        with name_lost_files(stored):
            workload = build_workload(config, dict(self.state["store"]))
        return dataclasses.replace(workload, frozen=match_stored(workload.frozen, stored, self.folder.path))

    def fit_to_ranks(self, rank: RunRank, parts: Assembly) -> list[str]:
        """Change a state that another number of ranks wrote, and return notes on it."""
        notes = self._cut_for_fewer_ranks(rank)
        if self.note and self.shards is not None:
            states = self.state["step"]["optimizers"]
            place = ("state", "state", "step", "optimizers")
            recut = recut_optimizer_states(self.shards, parts.model, parts.step.optimizers, states, place)
            notes += [self.note, *recut]
        return notes

    def _cut_for_fewer_ranks(self, rank: RunRank) -> list[str]:
        """Cut batches further after torchrun has lost ranks, so that those that are left need no more memory."""
        state = self.state
        then, now = len(state.get("rank_generators", ())), rank.world.size if rank.world is not None else 1
        if rank.launch is None or not rank.launch.restarts or then <= now:
            return []
        for own in (state, *state.get("phases", {}).values()):
            own["pieces"] = -(-then // now) * int(own["pieces"])
        return [
            f"{format_count(now, 'rank')} instead of {then}: each batch is cut into {state['pieces']} micro-batches, "
            "with the same samples per step"
        ]

    def restore(self, loop: Loop, config: RunConfig) -> None:
        """Restore the run's state, then store accepted changes: a change that fails is not stored."""
        for note in self.changes.notes:
            loop.journal.notice(note)
        loop.restore(self.path, self.checkpoint, self.changes)
        loop.journal.notice(f"resuming from {self.path.name}: {loop.journal.describe_progress()}")
        settled, attempted = self.settled, int(self.state["step"]["attempted"])
        # After a damaged checkpoint the run continues from an earlier one, and repeats later steps with new settings.
        before = [{**one, "until": min(one["until"], attempted)} for one in settled.before]
        if self.changes.keys:
            before.append({"until": attempted, "settings": settled.settings})
        is_same = before == settled.before and settled.code == sign_code(find_import_paths(config))
        is_same = is_same and loop.parts.plan == self.folder.read_plan()  # another number of ranks may have changed it
        if loop.checkpoints.writes and not is_same:
            self.folder.write_settings(config, loop.parts.plan, settled.decided, before)


def open_stored_run(
    folder: RunFolder, settled: Settled, changes: Changes, config: RunConfig, rank: RunRank, device: str, *, allow: bool
) -> StoredRun:
    """Load the newest intact checkpoint; `allow` accepts changes, and one that another number of ranks wrote."""
    damaged: list[str] = []

    def find_newest() -> Path:
        checkpoints = folder.open_checkpoints()
        checkpoints.clean_up()
        checkpoints.find_best()  # raises on a damaged best.json before anything is trained
        return checkpoints.find_newest(on_damaged=damaged.append)

    path = rank.run_on_first(find_newest)
    stored, mesh, note = None, None, ""
    if is_sharded(path):
        stored = open_shards(path, rank.world)
        shards = rank.world is not None and config.train.shard is not False
        mesh = make_mesh(torch.device(probe(device).device)) if shards else None
        # torchrun starts fewer ranks after a machine is lost: the run goes on with them.
        is_restarted = rank.launch is not None and rank.launch.restarts > 0
        way = "--allow-changes" if shards else "train.shard=false --allow-changes"
        fix = f"accept it with {way} (--gpus N starts N ranks)"
        note = stored.refuse_other_mesh(mesh, reshard=allow or is_restarted, fix=fix)
    checkpoint = load_checkpoint(path, stored, mesh)
    return StoredRun(folder, settled, changes, path, checkpoint, damaged, stored, note)
