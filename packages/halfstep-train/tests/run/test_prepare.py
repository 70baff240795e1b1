"""prepare is the same everywhere: fp32, outside autocast, without gradients, with a key that knows each sample."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import frozen_workload
from halfstep_train.data import noise
from halfstep_train.data.loader import Key, Loader
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.engine import Engine
from halfstep_train.run.validate import validate
from halfstep_train.tune.channels_last import convolves_images, match_layout, to_channels_last_, wants_channels_last
from halfstep_train.workloads import from_dict
from whole_runs import assemble_run


def assembled(**values: Any) -> Assembly:
    settings = {"device": "cpu", "data.num_workers": 0, "train.batch_size": 4, "train.fast": "off",
                "precision.default": "bf16", "precision.simulate": True}  # fmt: skip
    changed = {name.replace("__", "."): value for name, value in values.items()}
    return assemble_run(from_dict("frozen_workload:build", {**settings, **changed}).config)


def windows_of(parts: Assembly) -> list[list[dict[str, Tensor]]]:
    return list(parts.step.windows(parts.train_loader.iterate_epoch(0)))


def engine_of(parts: Assembly, seen: list[dict[str, Tensor]]) -> Engine:
    return Engine(parts, "eager", lambda text, level: None, lambda outputs, batch: seen.append(batch))


def test_training_and_validation_prepare_alike() -> None:
    parts = assembled()
    frozen_workload.SEEN.clear()
    engine_of(parts, [])(windows_of(parts)[0])
    validate(parts.workload, parts.model, parts.plan, parts.val_loader)
    assert {note["training"] for note in frozen_workload.SEEN} == {True, False}
    for note in frozen_workload.SEEN:
        assert note["product"] == torch.float32
        assert not note["grad"]
        assert not note["autocast"]


def test_noise_in_training_does_not_depend_on_accumulation() -> None:
    drawn = []
    for settings in ({"train__batch_size": 4, "train__accumulate": 2}, {"train__batch_size": 8}):
        parts, seen = assembled(**settings), list[dict[str, Tensor]]()
        engine = engine_of(parts, seen)
        for window in windows_of(parts)[:2]:
            engine(window)
        drawn.append(torch.cat([batch["eps"] for batch in seen]))
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("batch_size", [2, 4])
def test_noise_in_validation_is_a_function_of_the_sample_not_of_the_runs_seed(batch_size: int) -> None:
    parts = assembled()

    class Noted(frozen_workload.Error):
        noted: ClassVar[list[Tensor]] = []

        def update(self, outputs: Tensor, batch: Any) -> None:
            self.noted.append(batch["eps"])

    workload = dataclasses.replace(parts.workload, metrics=Noted)
    Noted.noted.clear()
    loader = Loader(workload.val_samples, batch_size=batch_size, shuffle=False, seed=batch_size)
    validate(workload, parts.model, parts.plan, loader)
    whole = noise.normal(Key.for_validation(), 9, (frozen_workload.WIDTH,), "cpu")
    assert torch.equal(torch.cat(Noted.noted), whole)


def test_only_models_that_convolve_images_and_are_known_to_take_it_get_another_layout() -> None:
    parts = assembled()
    tokens = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    tokens.register_parameter("positions", nn.Parameter(torch.zeros(1, 3, 4, 4)))
    assert not convolves_images(tokens)
    assert not wants_channels_last("auto", "unet", parts.plan, tokens)
    assert wants_channels_last("auto", "unet", parts.plan, nn.Conv2d(3, 4, 3))
    assert not wants_channels_last("auto", parts.name, parts.plan, nn.Conv2d(3, 4, 3)), (
        "a user's model may flatten its input"
    )


def test_factors_of_channels_keep_strides_that_their_gradients_have() -> None:
    model = nn.Sequential(nn.Conv2d(4, 1, 1))
    model.register_parameter("gain", nn.Parameter(torch.ones(1, 4, 1, 1)))
    to_channels_last_(model)
    assert model.gain.stride() == torch.ones(1, 4, 1, 1).stride()
    assert model[0].weight.stride() == (4, 1, 4, 4), "a kernel of one channel is one all the same"


def test_a_model_of_video_and_images_and_its_five_dimensional_batch_take_the_layout() -> None:
    model = to_channels_last_(nn.Sequential(nn.Conv3d(3, 4, 3), nn.Conv2d(4, 4, 3)))
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    batch = match_layout(model, {"video": torch.zeros(2, 3, 4, 5, 5), "image": torch.zeros(2, 3, 5, 5)})
    assert batch["video"].is_contiguous()
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)


def test_what_prepare_cuts_out_of_a_larger_tensor_reaches_the_step_as_it_will_lie_in_a_captured_one() -> None:
    wide = torch.arange(24.0).view(4, 6)
    batch = match_layout(nn.Linear(2, 2), {"cut": wide[:, :5], "turned": wide.T})
    assert batch["cut"].is_contiguous()
    assert torch.equal(batch["cut"], wide[:, :5])
    assert batch["turned"].stride() == wide.T.stride(), "dense in another order: a copy lies the same"
