"""Facts of the formats against torch.finfo and the casts of torch; what becomes of a written number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from halfstep.errors import FormatError
from halfstep.formats import FORMATS, find_fate, find_format, round_value

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize(("name", "dtype"), TORCH_DTYPES.items())
def test_computed_facts_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    fmt, info = FORMATS[name], torch.finfo(dtype)
    assert fmt.largest == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.spacing_at_1 == info.eps
    assert fmt.storage_bits == info.bits == fmt.bits


@pytest.mark.parametrize(("name", "dtype"), TORCH_DTYPES.items())
def test_smallest_subnormal_is_the_lowest_bit_pattern(name: str, dtype: torch.dtype) -> None:
    words = {64: torch.int64, 32: torch.int32, 16: torch.int16, 8: torch.uint8}
    lowest = torch.tensor([1], dtype=words[FORMATS[name].storage_bits]).view(dtype)
    assert lowest.double().item() == FORMATS[name].smallest_subnormal


def test_tf32_has_the_range_of_fp32_and_the_mantissa_of_fp16() -> None:
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert (tf32.smallest_normal, tf32.spacing_at_1) == (fp32.smallest_normal, fp16.spacing_at_1)
    assert (tf32.bits, tf32.storage_bits) == (19, 32)


def test_decimal_digits_count_the_implicit_bit() -> None:
    assert FORMATS["fp32"].decimal_digits == pytest.approx(7.22, abs=0.01)
    assert FORMATS["bf16"].decimal_digits == pytest.approx(2.41, abs=0.01)


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(FormatError, match="'bf61'") as caught:
        find_format("bf61")
    assert "bf16" in caught.value.fix


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
@given(x=st.floats(width=32))
@example(x=-0.0)
@example(x=math.inf)
@example(x=65520.0)  # halfway between fp16's largest and the number that would follow it
@example(x=65519.0)
@example(x=2.0**-25)  # halfway to fp16's smallest subnormal: even is zero
@example(x=464.0)  # halfway between e4m3's 448 and the 480 it does not have
@example(x=1.1754942e-38)  # the largest subnormal of fp32
def test_rounding_one_number_is_the_cast_of_torch(name: str, x: float) -> None:
    ours = round_value(x, FORMATS[name])
    if name.startswith("fp8") and not abs(ours) <= FORMATS[name].largest:
        return  # torch 2.11 and 2.13 differ on fp8 overflow; ours is defined by the format and tested below
    torchs = torch.tensor(x, dtype=torch.float32).to(TORCH_DTYPES[name]).double().item()
    assert ours == torchs or (math.isnan(ours) and math.isnan(torchs))
    assert math.isnan(ours) or math.copysign(1, ours) == math.copysign(1, torchs)


@given(x=st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_tf32_keeps_ten_bits_and_is_never_further_than_half_a_step(x: float) -> None:
    rounded = round_value(x, FORMATS["tf32"])
    if math.isfinite(rounded) and rounded != 0:
        assert abs(rounded - x) <= math.ulp(rounded) * 2 ** (52 - 10) / 2 or abs(x) < FORMATS["tf32"].smallest_normal
    assert round_value(rounded, FORMATS["tf32"]) == rounded


def test_overflow_is_infinity_where_the_format_has_one_and_nan_where_not() -> None:
    assert round_value(-1e9, FORMATS["fp8_e5m2"]) == -math.inf
    assert math.isnan(round_value(1e9, FORMATS["fp8_e4m3"]))
    assert math.isnan(round_value(math.inf, FORMATS["fp8_e4m3"]))


@pytest.mark.parametrize(
    ("written", "name", "kind", "result"),
    [
        ("70000", "fp16", "overflow", math.inf),
        ("70000", "fp32", "exact", 70000.0),
        ("1e-8", "fp16", "flushed to zero", 0.0),
        ("1e-7", "fp16", "subnormal", 2 * 2.0**-24),
        ("1.0009765625", "fp16", "exact", 1.0009765625),
        ("1.0009765625", "bf16", "rounded", 1.0),
        ("-3.5", "fp8_e4m3", "exact", -3.5),
        ("0.1", "fp64", "rounded", 0.1),
        ("1e400", "fp64", "overflow", math.inf),
        ("1e-400", "fp64", "flushed to zero", 0.0),
        ("inf", "fp16", "exact", math.inf),
        ("-Infinity", "bf16", "exact", -math.inf),
        ("0", "bf16", "exact", 0.0),
        ("-0.0e5", "bf16", "exact", -0.0),
        (" 1_000 ", "fp16", "exact", 1000.0),
    ],
)
def test_a_written_number_meets_its_fate(written: str, name: str, kind: str, result: float) -> None:
    fate = find_fate(written, FORMATS[name])
    assert (fate.kind, fate.result) == (kind, result)


def test_infinity_in_a_format_without_one_is_an_overflow_to_nan() -> None:
    fate = find_fate("inf", FORMATS["fp8_e4m3"])
    assert fate.kind == "overflow"
    assert math.isnan(fate.result)


def test_the_relative_error_is_against_the_number_as_written() -> None:
    assert find_fate("0.1", FORMATS["bf16"]).relative_error == pytest.approx(9.765625e-4)
    assert find_fate("1e-8", FORMATS["fp16"]).relative_error == 1.0
    assert find_fate("inf", FORMATS["fp16"]).relative_error is None


@pytest.mark.parametrize("word", ["foo", "1/3", "", "1,5", "0x10"])
def test_what_is_not_a_number_is_refused_with_the_word(word: str) -> None:
    with pytest.raises(FormatError, match="is not a number") as caught:
        find_fate(word, FORMATS["fp16"])
    assert repr(word) in caught.value.what
