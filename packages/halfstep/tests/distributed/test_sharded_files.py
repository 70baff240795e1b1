"""Files of sharded checkpoints: what two ranks write and read back, and which damage is refused.

own_loop/test_sharded_saves.py has other numbers of ranks, failed writes and the file of the whole model."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from halfstep.disk import read_sealed, seal
from halfstep.distributed.sharded_files import (
    MANIFEST,
    BackgroundSave,
    StoredShards,
    check_coverage,
    find_mesh,
    name_file,
)
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError
from halfstep.state_files import unpack
from ranks_together import together

pytestmark = pytest.mark.ranks


def build() -> nn.Module:
    """7 and 5 rows are uneven for two ranks, and the single row of the last layer leaves one rank without any."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 6), nn.Linear(6, 5), nn.Linear(5, 1))


def shard(mesh: DeviceMesh | None = None) -> nn.Module:
    """Shard the model; one of its weights is cut by columns."""
    model = build()
    fully_shard(model[3], mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        seed = 100 * number + dist.get_rank()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "rank": dist.get_rank()}


def put_back(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def take_local(model: nn.Module) -> dict[str, Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for n, t in found.items()}


def save(folder: Path, state: Any, world: World, step: int = 3) -> BackgroundSave:
    def make_folder() -> Path:
        folder.mkdir()
        return folder

    return BackgroundSave(make_folder, state, world, step=step, publish=lambda _: None)


def load(folder: Path, world: World | None, model: nn.Module | None) -> Any:
    mesh = find_mesh(model.parameters()) if model is not None else None
    return unpack(*StoredShards(folder, world).open(mesh))["state"]


@contextmanager
def joined(rank: int, size: int, port: int) -> Iterator[World]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    yield World(limit_s=30)
    dist.destroy_process_group()


def gather_whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in model.state_dict().items()}


def write_and_read(rank: int, size: int, port: int, folder: Path) -> dict[str, Any]:
    """Write and read everything in one launch."""
    found: dict[str, Any] = {}
    with joined(rank, size, port) as world:
        model = shard()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, 3)
        first = save(folder / "first", collect(model, optimizer), world)
        at_save = take_local(model)
        train(model, optimizer, 2)  # while the file is written
        trained = take_local(model)
        first.wait()
        put_back(load(folder / "first", world, model), model, optimizer)
        found["is_back"] = all(map(torch.equal, take_local(model).values(), at_save.values()))
        train(model, optimizer, 2)
        found["goes_on"] = all(map(torch.equal, take_local(model).values(), trained.values()))
        found["statistics"] = at_save["1.running_mean"]

        replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        hybrid = shard(replicas)
        save(folder / "hybrid", {"model": dict(hybrid.state_dict())}, world).wait()
        before = take_local(hybrid)
        for parameter in hybrid.parameters():
            parameter.detach().zero_()
        hybrid.load_state_dict(load(folder / "hybrid", world, hybrid)["model"])
        found["hybrid_is_back"] = all(map(torch.equal, take_local(hybrid).values(), before.values()))

        save(folder / "later", collect(model, optimizer), world, step=4).wait()
        found["whole"] = gather_whole(model)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saves")
    return folder, together(2, write_and_read, folder / "found", folder)


def test_two_ranks_continue_bit_exactly_from_what_they_wrote_while_training(written: Any) -> None:
    _, found = written
    assert all(one["is_back"] and one["goes_on"] and one["hybrid_is_back"] for one in found)
    assert not torch.equal(found[0]["statistics"], found[1]["statistics"])  # each rank has its own, and got it back


def test_one_process_reads_whole_tensors(written: Any) -> None:
    folder, found = written
    state = load(folder / "later", None, None)
    assert state["model"].keys() == build().state_dict().keys()
    for name, tensor in found[0]["whole"].items():
        assert torch.equal(state["model"][name], tensor), name


def test_only_the_first_replica_writes(written: Any) -> None:
    folder, _ = written
    sizes = [(folder / "hybrid" / name_file(rank)).stat().st_size for rank in range(2)]
    assert load_file(folder / "hybrid" / name_file(1)).keys() <= {"state.model.1.num_batches_tracked"}
    assert sizes[1] < sizes[0]


def edit(folder: Path, change: Any) -> None:
    manifest = read_sealed((folder / MANIFEST).read_bytes())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(seal(manifest)))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


WEIGHT = "state.model.0.weight"
TAMPERED = {
    "no first shard": (lambda f: (f / name_file(0)).unlink(), "rank-00000.safetensors is missing"),
    "foreign": (
        lambda f: shutil.copy(f.parent / "of another" / name_file(1), f / name_file(1)),
        "rank-00001.safetensors (belongs to another save|has)",
    ),
    "older": (
        lambda f: shutil.copy(f.parent / "of another" / name_file(1), f / name_file(2)),
        "rank-00002.safetensors does not belong to this save",
    ),
    "swapped ranks": (lambda f: shutil.copy(f / name_file(0), f / name_file(1)), "rank-00001.safetensors"),
    "truncated": (
        lambda f: (f / name_file(1)).write_bytes((f / name_file(1)).read_bytes()[:-8]),
        r"rank-00001.safetensors has \d+ bytes, but \d+ were written",
    ),
    "flipped byte": (lambda f: flip(f / name_file(1)), "rank-00001.safetensors was changed .* SHA-256"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json is missing"),
    "flipped manifest": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace('"start": 4', '"start": 3')[:-1]),
        "manifest.json",
    ),
    "gap": (lambda f: edit(f, lambda m: m["sharded"][WEIGHT]["pieces"].pop(0)), f"slices of {WEIGHT} leave a gap at 0"),
    "end": (lambda f: edit(f, lambda m: m["sharded"][WEIGHT]["pieces"].pop()), f"slices of {WEIGHT} end at 4 of 7"),
    "overlap": (
        lambda f: edit(f, lambda m: m["sharded"][WEIGHT]["pieces"][1].__setitem__(1, 3)),
        f"slices of {WEIGHT} leave an overlap at 3 of 7",
    ),
    "one rank fewer": (lambda f: edit(f, lambda m: m.update(ranks=1)), "one file for each of 1 ranks: it lists 2"),
    "no mesh": (lambda f: edit(f, lambda m: m.update(mesh="x")), "TypeError"),
    "another shape": (
        lambda f: edit(f, lambda m: m["sharded"][WEIGHT]["shape"].__setitem__(1, 5)),
        f"manifest and rank-00000.safetensors differ in {WEIGHT}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAMPERED)
def test_what_was_tampered_with_is_refused_by_name(case: str, written: Any, tmp_path: Path) -> None:
    folder, _ = written
    shutil.copytree(folder / "first", tmp_path / "save")
    shutil.copytree(folder / "later", tmp_path / "of another")
    tamper, says = TAMPERED[case]
    tamper(tmp_path / "save")
    with pytest.raises(CheckpointError, match=f"checkpoint save is damaged: .*{says}"):
        StoredShards(tmp_path / "save", None)


def test_an_intact_manifest_covers_everything(written: Any) -> None:
    folder, _ = written
    manifest = read_sealed((folder / "first" / MANIFEST).read_bytes())
    check_coverage(manifest)
    assert (manifest["ranks"], manifest["step"], manifest["mesh"]) == (2, 3, [0, 1])
    assert manifest["sharded"]["state.model.3.weight"]["pieces"] == [[0, 0, 3], [1, 3, 3]]
    assert manifest["sharded"]["state.model.3.weight"]["dim"] == 1
    assert manifest["sharded"][WEIGHT] == {"dtype": "F32", "shape": [7, 4], "dim": 0, "pieces": [[0, 0, 4], [1, 4, 3]]}
