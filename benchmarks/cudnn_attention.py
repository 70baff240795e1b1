"""Where cuDNN's attention gives NaN for finite numbers, and what it gains elsewhere over torch's other kernels.

    python benchmarks/cudnn_attention.py [--seconds 150] [--out DIR]

Scores of all queries and keys are -120. Shapes whose output or gradients are not finite are stored, as are times of
forward and backward by kernel in bf16. Two reports from the field have cases of their own: one query with 128 keys
(NVIDIA/cudnn-frontend#1072) and large batches (kyutai-labs/pocket-tts#264), also with ordinary scores. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from recording import store

LENGTHS = (1, 8, 16, 32, 49, 50, 63, 64, 65, 77, 96, 100, 127, 128, 129, 160, 192, 196, 197, 224, 256, 257, 320, 512,
           576, 577, 1024, 1088)  # fmt: skip
QUERIES = (1, 64, 128, 256)  # besides as many as there are keys
HEADS, MODES = (64, 40, 128), ((False, False), (True, False), (False, True))  # is causal, has a mask
SHAPES = {
    "GPT-2 124M": (16, 12, 1024, 1024, 64, True), "GPT-2 XL": (4, 25, 1024, 1024, 64, True),
    "ViT-L": (64, 16, 197, 197, 64, False), "DINOv2": (32, 12, 577, 577, 64, False),
    "SD U-Net, 64 pixels": (8, 8, 4096, 4096, 40, False), "SD U-Net, words": (8, 8, 4096, 77, 40, False),
    "RadioDiff's condition": (8, 8, 64, 64, 64, False),
}  # fmt: skip
KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
SCORE = -120.0
BATCH = (2, 2)  # samples and heads of the survey
REPORTED = {
    "one query, 128 keys": [((b, h), q, k, head, score) for b, h in ((1, 1), (2, 2), (128, 16)) for q in (1, 2)
                            for k in (127, 128, 256) for head in (64, 128) for score in (SCORE, 0.0)],
    "large batches": [((b, 16), t, t, head, score) for b in (64, 128, 256) for t in (50, 64, 100, 125, 128, 250, 256)
                      for head in (64, 128) for score in (SCORE, 0.0)],
}  # fmt: skip
"""By report: (samples, heads), queries, keys, channels of a head, the score of all pairs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="for the survey")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    reported = {name: survey_reported(cases) for name, cases in REPORTED.items()}
    print(reported, flush=True)
    until, bad, tried = time.monotonic() + arguments.seconds, [], []
    for shape in shapes():
        if time.monotonic() > until:
            break
        tried.append(shape)
        bad += [shape] if has_fault(*shape) else []
    print(f"{len(bad)} of {len(tried)} shapes are not finite; keys: {sorted({keys for *_, keys in bad})}", flush=True)
    times = {name: {kernel: in_ms(kernel, *shape) for kernel in KERNELS} for name, shape in SHAPES.items()}
    results = {
        "cudnn": torch.backends.cudnn.version(),
        "tried": len(tried),
        "last": tried[-1],
        "bad": by_mode(bad),
        "reported": reported,
        "ms": times,
    }
    store("cudnn_attention", results, torch.device("cuda"), arguments.out)


def shapes() -> Iterator[tuple[str, int, bool, bool, int, int]]:
    """Format, channels of a head, is causal, has a mask, queries, keys."""
    for dtype, head, (is_causal, has_mask), keys in itertools.product(("bfloat16", "float16"), HEADS, MODES, LENGTHS):
        for queries in {keys} if is_causal else {keys, *QUERIES}:
            yield dtype, head, is_causal, has_mask, queries, keys


def survey_reported(cases: list[tuple[tuple[int, int], int, int, int, float]]) -> dict[str, Any]:
    """Try each case in bf16 without a mask and with causal attention; list those that are not finite."""
    bad = []
    for batch, queries, keys, head, score in cases:
        for is_causal in (False, True) if queries == keys else (False,):
            if has_fault("bfloat16", head, is_causal, False, queries, keys, batch=batch, score=score):
                kind = " causal" if is_causal else ""
                bad.append(f"{batch[0]}x{batch[1]} {queries}x{keys}{kind}, heads of {head}, scores of {score:g}")
    return {"tried": len(cases), "bad": bad}


def has_fault(
    dtype: str, head: int, is_causal: bool, has_mask: bool, queries: int, keys: int, *,
    batch: tuple[int, int] = BATCH, score: float = SCORE,
) -> bool:  # fmt: skip
    torch.manual_seed(0)
    sizes = ((queries, 0.1), (keys, 0.1), (keys, 1))
    q, k, v = (torch.randn(*batch, n, head, device="cuda") * (size if score else 1) for n, size in sizes)
    if score:
        q[..., 0], k[..., 0] = 1.0, score * head**0.5
    inputs = [part.to(getattr(torch, dtype)).requires_grad_() for part in (q, k, v)]
    mask = torch.ones(queries, keys, dtype=torch.bool, device="cuda") if has_mask else None
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=is_causal)
    except RuntimeError:  # a shape that cuDNN does not take
        return False
    found = [out, *torch.autograd.grad(out, inputs, torch.randn_like(out))]
    return not all(bool(part.isfinite().all()) for part in found)


def by_mode(bad: list[tuple[str, int, bool, bool, int, int]]) -> dict[str, str]:
    """Queries x keys, for each format, head and kind of attention."""
    found: dict[str, list[str]] = {}
    for dtype, head, is_causal, has_mask, queries, keys in bad:
        kind = " causal" if is_causal else " with a mask" if has_mask else ""
        found.setdefault(f"{dtype}, heads of {head}{kind}", []).append(f"{queries}x{keys}")
    return {mode: ", ".join(pairs) for mode, pairs in found.items()}


def in_ms(kernel: str, batch: int, heads: int, queries: int, keys: int, head: int, is_causal: bool) -> float:
    q, k, v = (by_heads(batch, tokens, heads, head) for tokens in (queries, keys, keys))

    def step() -> Any:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        for _ in range(5):
            step()
        torch.cuda._sleep(50_000_000)  # launches queue up meanwhile
        begin.record()
        for _ in range(20):
            step()
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20


def by_heads(batch: int, tokens: int, heads: int, head: int) -> Tensor:
    shape = batch, tokens, heads, head
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()


if __name__ == "__main__":
    main()
