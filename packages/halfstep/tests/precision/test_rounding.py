"""round_to is bit-equal to torch's casts in range, and follows the format beyond it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import FormatError, PrecisionError
from halfstep.formats import FORMATS, find_format, round_value
from halfstep.precision.simulate import round_to

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp32": torch.float32,
}
NARROW = ["tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]

any_bits = st.binary(min_size=4, max_size=512)
"""Bit patterns, not values: every magnitude is equally likely, subnormals, infinities and NaN included."""


def from_bits(bits: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bits[: len(bits) // 4 * 4], dtype=np.float32).copy())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit by bit, so that -0.0 differs from 0.0; any NaN equals any NaN."""
    both_nan = left.isnan() & right.isnan()
    return bool(((left.view(torch.int32) == right.view(torch.int32)) | both_nan).all())


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=150, deadline=None)
@given(bits=any_bits)
def test_rounding_is_bit_equal_to_torchs_cast_in_range(name: str, bits: bytes) -> None:
    x = from_bits(bits)
    ours = round_to(x, name)
    in_range = (
        ours.isfinite() | x.isnan()
    )  # torch releases differ on fp8 overflow, so beyond the range ours is tested apart
    assert same_bits(ours[in_range], x.to(DTYPES[name]).float()[in_range])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(bits=any_bits)
def test_rounding_agrees_with_the_exact_scalar_definition(name: str, bits: bytes) -> None:
    x = from_bits(bits)
    expected = torch.tensor([round_value(value, find_format(name)) for value in x.tolist()])
    assert same_bits(round_to(x, name), expected)


@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3", "fp8_e5m2"])
def test_every_halfway_point_goes_to_the_even_neighbour(name: str) -> None:
    fmt = find_format(name)
    steps = torch.arange(0, 2 ** (fmt.mantissa_bits + 1), dtype=torch.float32)
    halfway = (steps + 0.5) * fmt.smallest_subnormal  # subnormals and the first binade, where spacing is constant
    even = torch.where(steps % 2 == 0, steps, steps + 1) * fmt.smallest_subnormal
    assert same_bits(round_to(halfway, name), even)
    assert same_bits(round_to(-halfway, name), -even)


@pytest.mark.parametrize("name", NARROW)
def test_overflow_is_what_the_format_defines(name: str) -> None:
    fmt = find_format(name)
    largest = torch.tensor([fmt.largest, -fmt.largest])
    beyond = torch.tensor([math.inf, -math.inf])
    assert same_bits(round_to(largest, name), largest)
    rounded = round_to(beyond, name)
    assert same_bits(rounded, beyond) if fmt.has_infinity else rounded.isnan().all()


def test_values_just_past_the_largest_round_back_into_range() -> None:
    # The limit is half a spacing beyond the largest number: 65519.996 is 65504 in fp16, 65520 is infinite.
    x = torch.tensor([65519.996, 65520.0, 464.0, 464.1])
    assert round_to(x, "fp16")[:2].tolist() == [65504.0, math.inf]
    assert round_to(x, "fp8_e4m3")[2].item() == 448.0
    assert round_to(x, "fp8_e4m3")[3].isnan()


def test_tf32_keeps_ten_mantissa_bits_and_the_range_of_fp32() -> None:
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1e-40, 3e38])
    rounded = round_to(x, "tf32")
    assert rounded[:3].tolist() == [1 + 2**-10, 1.0, 1 + 2**-9]
    torch.testing.assert_close(rounded[4], x[4], rtol=2**-11, atol=0)
    assert not (rounded.view(torch.int32) & 0x1FFF).any()


def test_wrong_arguments_are_explained() -> None:
    x = torch.ones(1)
    with pytest.raises(PrecisionError, match="takes fp32"):
        round_to(x.double(), "bf16")
    with pytest.raises(FormatError, match="fp17"):
        round_to(x, "fp17")
