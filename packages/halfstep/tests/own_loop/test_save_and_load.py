"""hs.save and hs.load: a resumed loop is bit-equal, a killed one finds a whole file, and misfits are explained."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader

import halfstep as hs
from halfstep.errors import CheckpointError
from halfstep.state_files import pack
from halfstep.tensor_files import TensorFile, write_tensors
from public_loops import LOOPS, train, train_and_note
from resumed_loops import Drawing, assert_continues, make_step
from tiny_training import Queue
from warm_processes import process

pytestmark = pytest.mark.filterwarnings("ignore:.*holds no position in the data")


def make(**more: Any) -> tuple[nn.Module, hs.Step]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, make_step(model, **more)


# --- bit-equal ---


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_are_bit_equal_after_a_resume_in_the_middle_of_an_epoch(tmp_path: Path, precision: str) -> None:
    """With dropout, BatchNorm, average, accumulation over a shorter last window, and simulated fp16 with its scale."""
    settings = {"precision": hs.Precision(precision, simulate=precision != "fp32"), "accumulate": 2, "ema_decay": 0.9,
                "clip_norm": 1.0, "schedule": lambda step: 0.9**step, "scaler": {"growth_interval": 3}}  # fmt: skip
    resumed = assert_continues(
        lambda: DataLoader(Drawing(), 5, shuffle=True), tmp_path / "state", 2, 4, settings=settings
    )
    assert resumed.warnings == []


def test_a_state_in_torchs_own_file_is_loaded_with_weights_only(tmp_path: Path) -> None:
    """As most scripts store it: torch.save and torch.load, which unpickles no arrays by default."""

    class OwnOrder(Drawing):
        def __init__(self) -> None:
            super().__init__()
            self.rng, self.other = np.random.RandomState(1), np.random.default_rng(2)
            self.third = np.random.Generator(np.random.MT19937(3))

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) + self.rng.rand() + self.other.random() + self.third.random()

    def run(steps: int, *, resumes: bool = False) -> dict[str, Any]:
        model, step = make(ema_decay=0.9)
        if resumes:
            saved = torch.load(tmp_path / "state.pt")
            model.load_state_dict(saved["model"])
            step.load_state_dict(saved["step"])
        for window in step.windows(DataLoader(OwnOrder(), 4, shuffle=True)):
            step(lambda x: model(x).square().mean(), window)
            if step.attempted == steps:
                torch.save({"model": model.state_dict(), "step": step.state_dict()}, tmp_path / "state.pt")
                break
        return model.state_dict()

    random.seed(0)
    np.random.seed(0)
    whole = run(5)
    random.seed(0)
    np.random.seed(0)
    run(2)
    resumed = run(5, resumes=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_buffers_outside_of_the_state_dict_and_extra_come_back(tmp_path: Path) -> None:
    model, step = make()
    model.register_buffer("cache", torch.arange(3.0), persistent=False)
    extra = {"epoch": 3, "best": float("inf"), "names": ["a", "b"], "pair": (1, None), "table": {2: torch.ones(2)},
             "counts": np.arange(4), "flag": True, "a": {"b": torch.zeros(1)}, "a.b": torch.ones(1),
             "empty": torch.zeros(0, 3)}  # fmt: skip
    hs.save(tmp_path / "new" / "state", step, model, **extra)
    other, its_step = make()
    other.register_buffer("cache", torch.zeros(3), persistent=False)
    found = hs.load(tmp_path / "new" / "state", its_step, other)
    assert torch.equal(other.cache, torch.arange(3.0))  # type: ignore[arg-type]
    assert found.keys() == extra.keys()
    assert (found["epoch"], found["best"], found["names"], found["pair"]) == (3, float("inf"), ["a", "b"], (1, None))
    assert torch.equal(found["table"][2], torch.ones(2))
    assert isinstance(found["counts"], np.ndarray)
    assert (found["a"]["b"].item(), found["a.b"].item()) == (0.0, 1.0)
    assert found["empty"].shape == (0, 3)
    assert os.listdir(tmp_path / "new") == ["state"]


class Quantised(nn.Module):
    """Trains with the rounding of int8: its observer resizes its buffers in place in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.round = FakeQuantize(
            MovingAveragePerChannelMinMaxObserver, dtype=torch.qint8, quant_min=-128, quant_max=127,
            qscheme=torch.per_channel_symmetric, ch_axis=0,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.round(self.inner.weight), self.inner.bias).square().mean()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("kind", [Queue, Quantised])
def test_buffers_that_change_their_size_continue_bit_equal(tmp_path: Path, kind: type[nn.Module]) -> None:
    rows = torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(1))

    def build() -> tuple[nn.Module, hs.Step]:
        torch.manual_seed(0)
        model = kind()
        return model, hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32", ema_decay=0.9)

    model, step = build()
    hs.save(tmp_path / "start", step, model)  # must not keep storages from being resized
    for batch in rows[:3]:
        assert step(model, [batch]).committed
    hs.save(tmp_path / "state", step, model)
    assert step(model, [rows[3]]).committed

    resumed, its_step = build()
    with pytest.warns(UserWarning, match=r"(seen|round.scale, round.zero_point).* got the shape that .*state contains"):
        hs.load(tmp_path / "state", its_step, resumed)
    assert its_step(resumed, [rows[3]]).committed
    for one, other in ((model, resumed), (step, its_step)):
        found, expected = pack(one.state_dict()), pack(other.state_dict())
        assert found[0] == expected[0]
        assert all(torch.equal(tensor, expected[1][name]) for name, tensor in found[1].items())


def test_a_buffer_of_other_dimensions_or_dtype_is_of_another_model(tmp_path: Path) -> None:
    model = Queue()
    hs.save(tmp_path / "state", make_step(model), model)
    for other in (torch.zeros(0), torch.zeros(0, 4, dtype=torch.int64)):
        model.seen = other
        with pytest.raises(CheckpointError, match="a different model") as caught:
            hs.load(tmp_path / "state", make_step(model), model)
        assert "seen is float32 (0, 4), but here" in caught.value.why


def test_saving_leaves_storages_resizable_and_writes_the_bytes_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "whole": torch.randn(5, 3), "half": torch.randn(7).bfloat16(), "transposed": torch.randn(4, 3).t(),
        "empty": torch.zeros(0, 2), "flag": torch.tensor(True), "gaps": torch.arange(8)[::2],
    }  # fmt: skip
    write_tensors(tmp_path / "ours", tensors, {"a": "b"})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", {"a": "b"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert tensors["whole"].resize_(50, 3).shape == (50, 3)
    assert TensorFile(tmp_path / "ours").read("half").resize_(50).shape == (50,)


def test_a_tensor_that_wraps_others_is_refused_instead_of_read_at_address_0(tmp_path: Path) -> None:
    model, step = make()
    model.register_buffer("wrapping", TwoTensor(torch.ones(3), torch.ones(3)))
    with pytest.raises(CheckpointError, match="cannot store a TwoTensor, which has no storage"):
        hs.save(tmp_path / "state", step, model)
    assert not (tmp_path / "state").exists()


def make_special(path: Path, kind: str) -> None:
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    else:
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("making a device needs root")


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
def test_a_pipe_socket_or_device_is_neither_replaced_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, links: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    model, step = make()
    path = Path("special")
    make_special(path, kind)
    if links:
        Path("link").symlink_to(path)
    given, before = Path("link") if links else path, path.stat()
    calls = [
        lambda: hs.save(given, step, model),
        lambda: hs.save_weights(given, model),
        lambda: hs.load(given, step, model),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=f"{given} is {kind}, not a file") as caught:
            call()
        assert caught.value.why
        assert "regular file" in caught.value.fix
    assert (path.stat().st_mode, path.stat().st_ino) == (before.st_mode, before.st_ino)
    assert sorted(os.listdir(".")) == (["link", "special"] if links else ["special"])


def test_a_link_to_a_file_stays_a_link_and_its_target_is_written(tmp_path: Path) -> None:
    model, step = make()
    (tmp_path / "link").symlink_to(tmp_path / "state")
    for _ in range(2):  # the target does not exist at first
        hs.save(tmp_path / "link", step, model, epoch=3)
        assert (tmp_path / "link").is_symlink()
        assert hs.load(tmp_path / "link", step, model) == {"epoch": 3}
    hs.save_weights(tmp_path / "link", model)
    assert (tmp_path / "link").is_symlink()
    assert load_file(tmp_path / "state").keys() == model.state_dict().keys()


def test_tied_weights_and_several_models_and_steps_are_stored_together(tmp_path: Path) -> None:
    def build() -> tuple[list[nn.Module], list[hs.Step]]:
        torch.manual_seed(0)
        tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        tied[1].weight = tied[0].weight
        models = [tied, nn.Linear(4, 4)]
        return models, [make_step(model) for model in models]

    models, steps = build()
    for step, model in zip(steps, models, strict=True):
        step(lambda x, model=model: model(x).square().mean(), [torch.ones(2, 4)])  # type: ignore[misc]
    hs.save(tmp_path / "state", steps, models)
    others, their_steps = build()
    hs.load(tmp_path / "state", their_steps, others)
    assert torch.equal(others[0][0].weight, models[0][0].weight)  # type: ignore[index]
    assert others[0][0].weight is others[0][1].weight  # type: ignore[index]
    assert [one.attempted for one in their_steps] == [1, 1]
    with pytest.raises(CheckpointError, match="and 2 steps, but hs.load was given .* and 1 step"):
        hs.load(tmp_path / "state", their_steps[0], others)


# --- killed at random moments; benchmarks/resume_soak.py does this 25 times for each loop ---


@pytest.mark.slow  # five processes, one after the other
@pytest.mark.parametrize("name", ["classifier", "gan"])
def test_a_loop_killed_at_random_moments_ends_with_the_same_weights(tmp_path: Path, name: str) -> None:
    # All in processes of their own: flags that other tests have set here may select other kernels.
    moments, path, said = random.Random(name), tmp_path / "killed", tmp_path / "said"
    for _ in range(3):
        with process(train, LOOPS[name], path, output=said) as running:
            while running.is_alive() and not path.exists():
                time.sleep(0.005)
            time.sleep(moments.uniform(0, 0.3))
            if running.is_alive():
                os.kill(running.pid, signal.SIGKILL)  # type: ignore[arg-type]
            running.join()
    for whole, result in ((tmp_path / "whole", tmp_path / "expected"), (path, tmp_path / "found")):
        with process(train_and_note, LOOPS[name], whole, result, output=said) as running:
            running.join()
    assert (tmp_path / "found").read_text() == (tmp_path / "expected").read_text(), said.read_text()
    assert not list(tmp_path.glob(".writing*")), "what a killed one left is removed by the next"


# --- damaged and foreign files ---


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    model, step = make()
    step(lambda x: model(x).square().mean(), [torch.ones(2, 4)])
    hs.save(tmp_path / "state", step, model, best=1)
    return tmp_path / "state"


def refuse(path: Path, match: str, **more: Any) -> CheckpointError:
    """The error of loading, after which nothing has changed."""
    model, step = make(**more)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match) as caught:
        hs.load(path, step, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step.attempted == 0
    assert torch.equal(torch.get_rng_state(), generator)
    assert caught.value.fix
    return caught.value


def test_every_damaged_byte_is_found(stored: Path) -> None:
    whole = stored.read_bytes()
    for place in [0, 9, 200, *range(len(whole) // 3, len(whole), len(whole) // 23), len(whole) - 1]:
        stored.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        refuse(stored, "damaged|cannot be read|without the state of a loop")
    for length in (0, 5, 1000, len(whole) - 1):
        stored.write_bytes(whole[:length])
        refuse(stored, "damaged|cannot be read")
    stored.write_bytes(whole)
    model, step = make()
    assert hs.load(stored, step, model) == {"best": 1}


def test_other_files_are_explained_and_never_unpickled(tmp_path: Path) -> None:
    error = refuse(tmp_path / "none", "there is no file")
    assert "os.path.exists" in error.fix
    (tmp_path / "folder").mkdir()
    refuse(tmp_path / "folder", "there is no sharded save in")

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "pickled").write_bytes(pickle.dumps(Trap()))
    torch.save({"a": torch.ones(2)}, tmp_path / "torch.pt")
    for name in ("pickled", "torch.pt"):
        assert "torch.load" in refuse(tmp_path / name, "cannot be read").fix
    assert not (tmp_path / "ran").exists()
    save_file({"weight": torch.ones(2)}, tmp_path / "weights")
    refuse(tmp_path / "weights", "contains tensors without the state of a loop")


def test_another_model_is_named_by_names_shapes_and_dtypes(stored: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2))
    step = make_step(model)
    with pytest.raises(CheckpointError, match="was saved from a different model than this Sequential") as caught:
        hs.load(stored, step, model)
    assert "it lacks 3.weight, 3.bias" in caught.value.why
    assert "2.weight is float32 (1, 4), but here float32 (2, 4)" in caught.value.why
    half, its_step = make()
    half.bfloat16()
    with pytest.raises(CheckpointError) as caught:
        hs.load(stored, its_step, half)
    assert "0.weight is float32 (4, 4), but here bfloat16 (4, 4)" in caught.value.why


def test_a_list_of_models_and_one_model_are_distinguished(tmp_path: Path, stored: Path) -> None:
    model, step = make()
    for models, text in (([model], "a list of 1 model"), ([model, nn.Linear(2, 2)], "a list of 2 models")):
        with pytest.raises(CheckpointError, match=f"contains one model and 1 step, but hs.load was given {text}"):
            hs.load(stored, step, models)
    hs.save(tmp_path / "list", step, [model, nn.Linear(2, 2)])
    with pytest.raises(
        CheckpointError, match="contains a list of 2 models and 1 step, but hs.load .* one model"
    ) as caught:
        hs.load(tmp_path / "list", step, model)
    assert "the same steps and models as hs.save, in the same order" in caught.value.fix


def test_parameters_in_another_order_are_refused_by_name(tmp_path: Path) -> None:
    """Equal shapes, so that torch would load each one's moments into the other."""

    def build(order: int) -> tuple[nn.Module, hs.Step]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return model, hs.Step(model, torch.optim.AdamW(list(model.parameters())[::order], fused=True), "fp32")

    model, step = build(1)
    step(lambda x: model(x).square().mean(), [torch.ones(2, 4)])
    hs.save(tmp_path / "state", step, model)
    model, step = build(-1)
    with pytest.raises(CheckpointError, match="has 0.weight as parameter 0 of the optimizer, which has 1.bias"):
        hs.load(tmp_path / "state", step, model)
    # A compiled model has the same parameters under longer names.
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    step = hs.Step(compiled, torch.optim.SGD(compiled.parameters(), 0.1, fused=True), "fp32", fast="off")
    assert step.state_dict()["parameters"] == [["weight", "bias"]]


def test_another_optimizer_and_another_average_are_refused_before_anything_changes(stored: Path) -> None:
    refuse(stored, "average|ema", ema_decay=0.9)
    model, _ = make()
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True), "fp32")
    before = model[0].weight.clone()  # type: ignore[index,operator]
    with pytest.raises(CheckpointError, match="another optimizer than SGD"):
        hs.load(stored, step, model)
    assert torch.equal(model[0].weight, before)  # type: ignore[index,arg-type]


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"args": object()}, "state.extra.args, a object"),
        ({"log": [1, {"x": {1, 2}}]}, "state.extra.log.1.x, a set"),
        ({"best": np.float32(1)}, "state.extra.best, a float32"),
        ({"by": {(1, 2): 3}}, r"the key \(1, 2\) of state.extra.by"),
        ({"names": np.array(["a"])}, "state.extra.names, an array of dtype <U1"),
        ({"matrix": torch.eye(2).to_sparse()}, "state.extra.matrix, a tensor of layout torch.sparse_coo"),
    ],
)
def test_extra_that_cannot_be_stored_is_named(stored: Path, extra: dict[str, Any], what: str) -> None:
    model, step = make()
    before = stored.read_bytes()
    with pytest.raises(CheckpointError, match=f"hs.save cannot store {what}"):
        hs.save(stored, step, model, **extra)
    assert stored.read_bytes() == before


def test_mistaken_arguments_and_folders_that_cannot_be_written_are_explained(tmp_path: Path) -> None:
    model, step = make()
    with pytest.raises(CheckpointError, match="take an hs.Step, not a Sequential"):
        hs.save(tmp_path / "a", model, step)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="take a torch module, not a OrderedDict"):
        hs.save(tmp_path / "a", step, model.state_dict())  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        hs.save(tmp_path / "file" / "a", step, model)


def test_another_number_of_threads_is_said(stored: Path) -> None:
    model, step = make()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(UserWarning, match="sums can differ in the last bit"):
            hs.load(stored, step, model)
    finally:
        torch.set_num_threads(threads)


def test_a_model_that_the_step_does_not_train_is_refused_and_a_part_of_one_is_warned_about(tmp_path: Path) -> None:
    model, step = make()
    other, _ = make()
    with pytest.raises(CheckpointError, match="the given model has none of the 6 parameters that the step trains"):
        hs.save(tmp_path / "state", step, other)
    hs.save(tmp_path / "state", step, model)
    with pytest.raises(CheckpointError, match="none of the 6 parameters"):
        hs.load(tmp_path / "state", step, other)
    with pytest.warns(UserWarning, match="4 of the 6 parameters that the step trains are not in the given models"):
        hs.save(tmp_path / "state", step, model[0])
