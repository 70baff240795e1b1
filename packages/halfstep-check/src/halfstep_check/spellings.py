"""How each framework spells a precision, in our words. What a framework does not list, it refuses."""

from __future__ import annotations

ACCELERATE_WORDS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}

LIGHTNING_2_WORDS = {
    "32-true": "fp32",
    "32": "fp32",
    "64-true": "fp64",
    "64": "fp64",
    "16-mixed": "fp16",
    "16": "fp16",
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "16-true": "fp16-true",
    "bf16-true": "bf16-true",
    "transformer-engine": "fp8",
    "transformer-engine-float16": "fp8",
}
"""Lightning 2.x, fabric `connector.py`: the short ones are its historical aliases."""

LIGHTNING_1_WORDS = {"16": "fp16", "32": "fp32", "64": "fp64", "bf16": "bf16", "mixed": "fp16"}
"""Lightning 1.5 to 1.9, `PrecisionType`."""

COMPOSER_WORDS = {"fp32": "fp32", "amp_fp16": "fp16", "amp_bf16": "bf16", "amp_fp8": "fp8"}

HF_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"), "like the weights"),
    **dict.fromkeys(
        (
            *("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "ademamix_8bit", "lion_8bit", "rmsprop_bnb_8bit"),
            *("paged_adamw_8bit", "paged_ademamix_8bit", "paged_lion_8bit"),
            *("galore_adamw_8bit", "galore_adamw_8bit_layerwise"),
        ),
        "8-bit",
    ),
    "adamw_torch_4bit": "4-bit",
    **dict.fromkeys(
        (
            *("ademamix", "lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"),
            *("paged_adamw_32bit", "paged_ademamix_32bit", "paged_lion_32bit"),
        ),
        "fp32",
    ),
    "adafactor": "factored, no momentum",
}
"""transformers 5 `OptimizerNames` and how each stores its state; those where it depends on more are left out."""

TITAN_WORDS = {"bfloat16": "bf16", "float32": "fp32"}
"""torchtitan's `mixed_precision_param`; there is no loss scaling, so no float16."""

DTYPE_WORDS = {
    "float32": "fp32",
    "fp32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float64": "fp64",
    "double": "fp64",
    "float8": "fp8",
    "fp8": "fp8",
    "16": "fp16",
    "32": "fp32",
}
"""Names of dtypes, as torch and configs write them."""


def parse_dtype(word: object) -> str | None:
    """Return the format that `torch.bfloat16`, `bfloat16`, `BF16` or `bf16` names."""
    return DTYPE_WORDS.get(str(word).lower().removeprefix("torch."))
