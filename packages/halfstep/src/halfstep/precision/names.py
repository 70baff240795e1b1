"""Every spelling of a precision that other tools use. Imports neither pydantic nor YAML: hs.Step works without them.

Names come from the guides, Lightning (`bf16-mixed`, `16`), Accelerate (`no`, `fp16`), Composer (`amp_bf16`), Hugging
Face (`fp16: true`), torch (`bfloat16`, `high`).
"""

from __future__ import annotations

from halfstep.errors import ConfigError, suggest_nearest

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "fp8", "bf16-true")
FP8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""How torchao scales the operands of fp8 products: one scale per tensor (the fastest), one per row, or one per row with
the gradients of weights in bf16 (the most exact)."""
MIXED = ("bf16", "fp16", "fp8")
"""Precisions that compute in fewer bits than the weights are stored in: what `use_amp: true` can mean."""

SPELLINGS: dict[str, tuple[str, ...]] = {
    "auto": ("auto",),
    "fp32": (
        *("fp32", "float32", "float", "single", "full", "32", "32-true", "32-bit", "amp_fp32", "highest"),
        *("no", "none", "null", "~", "off", "false"),
    ),
    "tf32": ("tf32", "tensorfloat32", "tf32-mixed", "high"),
    "bf16": ("bf16", "bfloat16", "bf16-mixed", "bfloat16-mixed", "mixed_bfloat16", "mixed_bf16", "amp_bf16", "bfloat"),
    "fp16": (
        *("fp16", "float16", "half", "16", "16-mixed", "16-bit", "fp16-mixed", "float16-mixed"),
        *("mixed_float16", "mixed_fp16", "amp_fp16"),
    ),
    "fp8": (
        *("fp8", "float8", "8", "fp8-mixed", "amp_fp8", "e4m3", "fp8_e4m3", "float8_e4m3", "float8_e4m3fn"),
        *("hybrid", "transformer-engine"),
    ),
    "bf16-true": ("bf16-true", "bfloat16-true", "pure_bf16", "true_bf16"),
}
PRECISION_NAMES: dict[str, str] = {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings}

FP16_WEIGHTS = (
    "fp16 weights lose every update smaller than 1/2048 of the weight, and cannot be unscaled safely",
    "use fp16 (fp32 weights, fp16 compute), or bf16-true to save the memory of the weights",
)
FP64 = ("halfstep trains in fp32 and below", "use fp32, the most exact precision here")
E5M2 = ("two mantissa bits are too few for weights and activations", "use fp8: e4m3 forward, e5m2 for gradients")
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("fp16-true", "16-true", "float16-true", "half-true", "pure_fp16", "true_fp16"), FP16_WEIGHTS),
    **dict.fromkeys(("64", "64-true", "fp64", "float64", "double"), FP64),
    **dict.fromkeys(("e5m2", "fp8_e5m2", "float8_e5m2"), E5M2),
}
"""Spellings with a clear meaning that halfstep does not offer: why, and what to use."""


def normalise_precision(value: object, where: str = "") -> str:
    """Return the precision that a spelling means; `where` names its origin in an error."""
    spelling = str(value).strip().lower().removeprefix("torch.")
    if spelling in PRECISION_NAMES:
        return PRECISION_NAMES[spelling]
    at = f" ({where})" if where else ""
    if spelling in REFUSED:
        why, fix = REFUSED[spelling]
        raise ConfigError(f"precision {value!s} is not supported{at}", why=why, fix=fix)
    fix = suggest_nearest(spelling, PRECISIONS) if spelling else f"one of {', '.join(PRECISIONS)}"
    raise ConfigError(f"unknown precision {str(value)!r}{at}", fix=fix)
