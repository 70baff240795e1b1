"""hs.save and hs.load of models that fully_shard has sharded: two ranks, one rank, and none."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import halfstep as hs
from halfstep.distributed.sharded_files import find_latest
from halfstep.errors import CheckpointError
from halfstep.step.optim.adamw8bit import AdamW8bit
from ranks_together import together

pytestmark = pytest.mark.ranks

ROWS = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
OPTIMIZERS: dict[str, Any] = {"adamw": partial(torch.optim.AdamW, fused=True), "8bit": AdamW8bit}


def make(optimizer: str, *, shard: bool = True, mesh: Any = None, backwards: bool = False) -> tuple[nn.Module, hs.Step]:
    """Each of two shards of the first weight has 16 blocks of 8-bit state; the last layer has one row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.BatchNorm1d(128), nn.Linear(128, 1))
    if shard:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    made = OPTIMIZERS[optimizer](parameters[::-1] if backwards else parameters, lr=1e-2)
    schedule = hs.per_step(torch.optim.lr_scheduler.ExponentialLR(made, 0.9))
    return model, hs.Step(model, made, "fp32", ema_decay=0.9, clip_norm=1.0, schedule=schedule, fast="off")


def loader(rank: int, size: int) -> torch.utils.data.DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.utils.data.DataLoader(ROWS[rank::size], batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]


def train(model: nn.Module, step: hs.Step, path: Path | None, rank: int = 0, size: int = 1, *, until: int = 6) -> None:
    """Train to step `until`, and save after step 3."""
    for window in step.windows(loader(rank, size)):
        step(lambda x: model(x).square().mean(), window)
        if path is not None and step.attempted == 3:
            hs.save(path, step, model, best=0.5, rows=ROWS[:2])
        if step.attempted == until:
            break
    step.finish()


def take(model: nn.Module, step: hs.Step) -> list[Tensor]:
    """Return this rank's part of weights, buffers and average."""
    found = [*model.state_dict().values(), *step.ema.state_dict().values()]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in found]


def take_whole(model: nn.Module) -> dict[str, Tensor]:
    whole = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in model.state_dict().items()}
    return {name: tensor.clone() for name, tensor in whole.items()}


@contextmanager
def joined(rank: int, size: int, port: int) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


def load(path: Path, step: hs.Step, model: nn.Module, **options: Any) -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = hs.load(path, step, model, **options)
    return extra, [str(one.message) for one in caught]


def save_and_resume(rank: int, size: int, port: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with joined(rank, size, port):
        for name in OPTIMIZERS:
            model, step = make(name)
            train(model, step, folder / name, rank, size)
            straight = take(model, step)
            model, step = make(name)
            extra, found[f"{name} notes"] = load(folder / name, step, model)
            found[f"{name} at save"] = take_whole(model)
            torch.manual_seed(77)  # hs.load restores each rank's generators at the next window
            train(model, step, None, rank, size)
            found[name] = all(map(torch.equal, straight, take(model, step)))
            found["extra"] = extra["best"], torch.equal(extra["rows"], ROWS[:2])
        with step.averaged():
            hs.save_weights(folder / "average.safetensors", model, dtype=torch.bfloat16)
            found["average"] = take_whole(model)
        if rank == 0:  # as on a full disk, in the middle of the file
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match="cannot write .*File too large"):
            hs.save_weights(folder / "average.safetensors", model)  # what was there stays
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        path, found["latest"] = folder / "failing", []
        for limit in (resource.RLIM_INFINITY, 64, resource.RLIM_INFINITY):
            if rank == 1:  # as on a full disk
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            hs.save(path, step, model)
            try:
                step.finish()
            except CheckpointError as error:
                found["failed"] = str(error)
            found["latest"].append(find_latest(path).name)
    return found


def load_alone(rank: int, size: int, port: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with joined(rank, size, port):
        for name in OPTIMIZERS:
            model, step = make(name)
            before = take(model, step)
            other_model, other_step = make(name, backwards=True)
            with pytest.raises(CheckpointError, match="has 0.weight as parameter 0 of the optimizer, which has 3.bias"):
                hs.load(folder / name, other_step, other_model, reshard=True)
            try:
                hs.load(folder / name, step, model)
            except CheckpointError as error:
                found["refusal"] = str(error)
            assert all(map(torch.equal, before, take(model, step)))
            (folder / "file").touch()
            for call in (hs.save, hs.load):
                with pytest.raises(CheckpointError, match="it is a file"):
                    call(folder / "file", step, model)
            _, found[f"{name} notes"] = load(folder / name, step, model, reshard=True)
            found[name] = take_whole(model)
            step.end_pass()  # another number of ranks has other batches
            train(model, step, None)
    return found


def save_replicas(rank: int, size: int, port: int, folder: Path) -> dict[str, Any]:
    """HSDP: two replicas of two shards, and other meshes of the same ranks."""
    found: dict[str, Any] = {}
    with joined(rank, size, port):
        meshes = {
            "2 x 2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
            "4": init_device_mesh("cpu", (4,)),
        }
        for name in OPTIMIZERS:
            for shape, mesh in meshes.items():
                path = folder / f"{name} {shape}"
                model, step = make(name, mesh=mesh)
                train(model, step, path, rank, size)
                straight = take(model, step)
                model, step = make(name, mesh=mesh)
                _, notes = load(path, step, model)
                at_save = take_whole(model)
                train(model, step, None, rank, size)
                found[f"{name} {shape}"] = all(map(torch.equal, straight, take(model, step))), notes

                other = next(mesh for other, mesh in meshes.items() if other != shape)
                model, step = make(name, mesh=other)
                with pytest.raises(CheckpointError, match="was saved with .* but this is ") as refused:
                    hs.load(path, step, model)
                _, notes = load(path, step, model, reshard=True)
                is_same = all(torch.equal(value, at_save[key]) for key, value in take_whole(model).items())
                train(model, step, None, rank, size)
                found[f"{name} {shape} to the other"] = is_same, [refused.value.what, *notes]
        return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saves")
    return folder, together(2, save_and_resume, folder / "found", folder)


def test_a_sharded_loop_resumes_bit_exactly(saved: Any) -> None:
    for one in saved[1]:
        assert one["adamw"]
        assert one["8bit"]
        assert one["extra"] == (0.5, True)
        assert one["adamw notes"] == one["8bit notes"] == []


def test_a_failed_save_is_raised_and_latest_stays(saved: Any) -> None:
    folder, found = saved
    for one in found:
        assert "rank 1: " in one["failed"]
        assert "File too large" in one["failed"]
        first, after_failure, last = one["latest"]
        assert first == after_failure != last
    assert [path.name for path in (folder / "failing").glob("step-*")] == [last]


def test_another_number_of_ranks_loads_with_one_line_if_asked(saved: Any, tmp_path: Path) -> None:
    folder, found = saved
    [alone] = together(1, load_alone, tmp_path, folder)
    assert "was saved with 2 shards, but this is 1 shard" in alone["refusal"]
    assert "hs.load(..., reshard=True)" in alone["refusal"]
    assert ["cannot continue bit-exactly" in note for note in alone["adamw notes"]] == [True]
    assert any("8-bit optimizer state is quantised again" in note for note in alone["8bit notes"])
    at_save = found[0]["8bit at save"]
    assert all(torch.equal(alone["8bit"][name], value) for name, value in at_save.items() if "running" not in name)


def test_replicas_of_shards_resume_bit_exactly_and_reshard_if_asked(tmp_path: Path) -> None:
    ranks = together(4, save_replicas, tmp_path / "found", tmp_path)
    for found in ranks:
        for name in OPTIMIZERS:
            assert found[f"{name} 2 x 2"] == (True, [])
            assert found[f"{name} 4"] == (True, [])
            assert found[f"{name} 2 x 2 to the other"][0]
            assert found[f"{name} 4 to the other"][0]
    what, *notes = ranks[0]["8bit 2 x 2 to the other"][1]
    assert "was saved with 2 shards in 2 replicas, but this is 4 shards" in what
    assert any("cannot continue bit-exactly" in note for note in notes)
    assert any("quantised again" in note for note in notes)
    assert "but this is 2 shards in 2 replicas" in ranks[0]["adamw 4 to the other"][1][0]


def test_an_unsharded_model_loads_a_sharded_save_if_asked(saved: Any) -> None:
    folder, found = saved
    for name in OPTIMIZERS:
        model, step = make(name, shard=False)
        with pytest.raises(CheckpointError, match="was saved with 2 shards, but this is an unsharded model"):
            hs.load(folder / name, step, model)
        _, notes = load(folder / name, step, model, reshard=True)
        assert any("cannot continue bit-exactly" in note for note in notes)
        if name == "8bit":
            whole = model.state_dict()
            assert all(torch.equal(whole[key], value) for key, value in found[0]["8bit at save"].items())
        step.end_pass()
        train(model, step, None)


def test_the_whole_model_is_written_as_one_file(saved: Any, tmp_path: Path) -> None:
    folder, found = saved
    model, _ = make("adamw", shard=False)
    model.load_state_dict(found[0]["average"])
    hs.save_weights(tmp_path / "expected", model, dtype=torch.bfloat16)
    assert (tmp_path / "expected").read_bytes() == (folder / "average.safetensors").read_bytes()
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="cannot write"):
        hs.save_weights(tmp_path / "taken", model)
