"""What cannot fit a CPU's memory is refused, and nothing that can."""

from __future__ import annotations

import pytest

from halfstep.errors import MemoryLimitError
from halfstep.hardware.device_facts import Hardware
from halfstep_train.bench.problem import load_bench_config, refuse_too_large
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.memory.sizing import StepCost, predict_step_cost

STORE = {"channels": 3, "num_classes": 2, "image_size": 32}


def config(*words: str) -> RunConfig:
    return load_bench_config("unet", words, {"batch_size": 2, "image_size": 32}, small=True)


def cpu(free_bytes: int) -> Hardware:
    return Hardware(kind="cpu", device="cpu", name="CPU", vendor="Arm", memory_free_bytes=free_bytes)


def cost(*words: str) -> StepCost:
    return predict_step_cost(config(*words), STORE, cpu(0), "fp32")


def test_what_fits_to_the_byte_is_not_refused_and_a_byte_less_is_with_what_would_fit() -> None:
    found = cost()
    refuse_too_large(config(), ("fp32", "bf16"), ("eager",), cpu(found.predict_bytes(2)))
    with pytest.raises(MemoryLimitError, match="unet at batch size 2 needs") as refused:
        refuse_too_large(config(), ("bf16", "fp32"), ("eager",), cpu(found.predict_bytes(2) - 1))
    assert refused.value.fix.startswith("--batch-size 1 or less")
    with pytest.raises(MemoryLimitError) as refused:
        refuse_too_large(config(), ("fp32",), ("eager",), cpu(found.fixed_bytes - 1))
    assert refused.value.fix.startswith("a smaller model")
    assert f"{found.num_parameters:,} parameters" in refused.value.why


def test_activations_count_only_where_all_of_them_are_kept() -> None:
    refuse_too_large(config(), ("fp32",), ("compile",), cpu(cost().fixed_bytes))
    refuse_too_large(config("train.memory=low"), ("fp32",), ("eager",), cpu(cost().fixed_bytes))


def test_a_model_of_any_size_is_counted_without_being_built() -> None:
    assert cost("model.base_channels=8192").num_parameters > 10**11
