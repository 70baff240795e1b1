"""What cannot fit a CPU's memory is refused, and nothing that can."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from halfstep.bench.fits import TAKEN, Least, least_memory, refuse_too_large
from halfstep.bench.problem import problem_for
from halfstep.bench.settings import bench_config
from halfstep.config.schema import RunConfig
from halfstep.errors import MemoryLimitError

BATCH = 2


def config(workload: str = "unet", *words: str) -> RunConfig:
    return bench_config(workload, words, {"batch_size": BATCH, "image_size": 32}, small=True)


def least(*words: str, precisions: tuple[str, ...] = ("fp32",), ways: tuple[str, ...] = ("eager",)) -> Least:
    return least_memory(config("unet", *words), precisions, ways)


@pytest.mark.parametrize("workload", ["unet", "resnet18", "resnet50", "vit_s_16"])
def test_a_real_step_keeps_at_least_what_is_counted_and_not_many_times_as_much(workload: str) -> None:
    problem = problem_for(config(workload), torch.device("cpu"))
    model, kept = problem.make_model(), dict[int, Tensor]()
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        problem.loss(model, problem.prepare(problem.host_batch))
    real = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)
    counted = BATCH * least_memory(problem.config, ("fp32",), ("eager",)).sample_bytes
    assert counted <= real <= 2 * TAKEN * counted


def test_weights_twice_a_gradient_and_two_moments_are_twenty_bytes() -> None:
    assert least().parameter_bytes == 20
    assert least("optimizer.name=sgd").parameter_bytes == 12
    assert least("train.memory=low").parameter_bytes == 12
    assert least(precisions=("bf16",)).parameter_bytes == 10


def test_activations_count_only_where_all_of_them_are_surely_kept() -> None:
    assert least().sample_bytes > 0
    assert least(precisions=("bf16",)).sample_bytes == least().sample_bytes // 2
    assert least(ways=("compile",)).sample_bytes == 0
    for word in ("train.memory=low", "train.activation_checkpointing=true"):
        assert least(word).sample_bytes == 0


def test_what_fits_to_the_byte_is_not_refused_and_a_byte_less_is_with_what_would_fit() -> None:
    wish, found = config(), least()
    needed = found.fixed_bytes + BATCH * found.sample_bytes
    refuse_too_large(wish, ("fp32",), ("eager",), needed)
    with pytest.raises(MemoryLimitError, match="unet at batch 2 needs") as refused:
        refuse_too_large(wish, ("fp32",), ("eager",), needed - 1)
    assert refused.value.fix.startswith("--batch-size 1 or less")
    with pytest.raises(MemoryLimitError) as refused:
        refuse_too_large(wish, ("fp32",), ("eager",), found.fixed_bytes - 1)
    assert refused.value.fix.startswith("a smaller model")
    assert f"{found.num_parameters:,} parameters of 20 bytes" in refused.value.why


def test_a_model_of_any_size_is_counted_without_being_built() -> None:
    huge = least("model.base_channels=8192", ways=("compile",))
    assert huge.num_parameters > 10**11
    assert dataclasses.replace(huge, num_parameters=3).fixed_bytes == 60
