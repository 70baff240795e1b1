"""A call for every entry of CUDA's autocast lists, shared by the simulated test (CPU) and the real one (GPU).

Each sample takes `t(*shape)`, which makes a tensor of the dtype under test with values in (0.1, 0.9): inside the domain
of every function here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Make = Callable[..., Tensor]
Sample = Callable[[Make], Any]
aten = torch.ops.aten


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def index(t: Make, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=t(1).device)


def signs(t: Make, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=t(1).dtype, device=t(1).device)


LOWER: dict[str, Sample] = {
    "_convolution": lambda t: torch._convolution(
        t(1, 2, 5, 5), t(2, 2, 3, 3), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, False, False, True, True
    ),
    "_convolution.deprecated": lambda t: torch._convolution(
        t(1, 2, 5, 5), t(2, 2, 3, 3), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, False, False, True
    ),
    "conv1d": lambda t: F.conv1d(t(1, 2, 5), t(2, 2, 3)),
    "conv2d": lambda t: F.conv2d(t(1, 2, 5, 5), t(2, 2, 3, 3), t(2)),
    "conv3d": lambda t: F.conv3d(t(1, 2, 4, 4, 4), t(2, 2, 3, 3, 3)),
    "conv_tbc": lambda t: torch.conv_tbc(t(5, 2, 3), t(3, 3, 4), t(4)),
    "convolution": lambda t: torch.convolution(
        t(1, 2, 5, 5), t(2, 2, 3, 3), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1
    ),
    "conv_transpose1d": lambda t: F.conv_transpose1d(t(1, 2, 5), t(2, 2, 3)),
    "conv_transpose2d.input": lambda t: F.conv_transpose2d(t(1, 2, 5, 5), t(2, 2, 3, 3)),
    "conv_transpose3d.input": lambda t: F.conv_transpose3d(t(1, 2, 4, 4, 4), t(2, 2, 3, 3, 3)),
    "prelu": lambda t: F.prelu(t(2, 3), t(1)),
    "addmm": lambda t: torch.addmm(t(2, 4), t(2, 3), t(3, 4)),
    "addmv": lambda t: torch.addmv(t(2), t(2, 3), t(3)),
    "addr": lambda t: torch.addr(t(2, 3), t(2), t(3)),
    "matmul": lambda t: torch.matmul(t(2, 2, 3), t(3, 4)),
    "einsum": lambda t: torch.einsum("bij,bjk->bik", t(2, 3, 4), t(2, 4, 5)),
    "mm": lambda t: torch.mm(t(2, 3), t(3, 4)),
    "mv": lambda t: torch.mv(t(2, 3), t(3)),
    "linalg_vecdot": lambda t: torch.linalg.vecdot(t(2, 3), t(2, 3)),
    "linear": lambda t: F.linear(t(2, 3), t(4, 3), t(4)),
    "addbmm": lambda t: torch.addbmm(t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "bmm": lambda t: torch.bmm(t(2, 3, 4), t(2, 4, 5)),
    "chain_matmul": lambda t: aten.chain_matmul([t(2, 3), t(3, 4), t(4, 5)]),
    "linalg_multi_dot": lambda t: torch.linalg.multi_dot([t(2, 3), t(3, 4), t(4, 5)]),
    "lstm_cell": lambda t: torch.lstm_cell(t(2, 3), (t(2, 4), t(2, 4)), t(16, 3), t(16, 4), t(16), t(16)),
    "gru_cell": lambda t: torch.gru_cell(t(2, 3), t(2, 4), t(12, 3), t(12, 4), t(12), t(12)),
    "rnn_tanh_cell": lambda t: torch.rnn_tanh_cell(t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "rnn_relu_cell": lambda t: torch.rnn_relu_cell(t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(
        t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)
    ),
}

UNARY = ["acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"]
UNARY += ["sinh", "tan"]
LOSSES = ("poisson_nll_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "binary_cross_entropy_with_logits")
FP32: dict[str, Sample] = {
    **{name: (lambda t, name=name: getattr(torch, name)(t(3))) for name in UNARY},
    **{name: (lambda t, name=name: getattr(F, name)(t(3), t(3))) for name in LOSSES},
    "pow.Tensor_Scalar": lambda t: torch.pow(t(3), 1.7),
    "pow.Tensor_Tensor": lambda t: torch.pow(t(3), t(3)),
    "pow.Scalar": lambda t: torch.pow(1.7, t(3)),
    "softplus": lambda t: F.softplus(t(3)),
    "layer_norm": lambda t: F.layer_norm(t(2, 3), (3,), t(3), t(3)),
    "native_layer_norm": lambda t: torch.native_layer_norm(t(2, 3), (3,), t(3), t(3), 1e-5),
    **({"rms_norm": lambda t: F.rms_norm(t(2, 3), (3,), t(3))} if torch.__version__ >= "2.12" else {}),
    "group_norm": lambda t: F.group_norm(t(2, 4, 3), 2, t(4), t(4)),
    "frobenius_norm.dim": lambda t: torch.frobenius_norm(t(2, 3), (0, 1)),
    "nuclear_norm": lambda t: torch.nuclear_norm(t(2, 3)),
    "nuclear_norm.dim": lambda t: torch.nuclear_norm(t(2, 3), (0, 1)),
    "norm.Scalar": lambda t: aten.norm.Scalar(t(3), 2),
    "norm.ScalarOpt_dim": lambda t: aten.norm.ScalarOpt_dim(t(2, 3), 2, [1], False),
    "cosine_similarity": lambda t: F.cosine_similarity(t(2, 3), t(2, 3)),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t(2, 3), t(2, 3), signs(t, 2)),
    "nll_loss": lambda t: F.nll_loss(t(2, 3), index(t, 2)),
    "nll_loss2d": lambda t: F.nll_loss(t(2, 3, 4, 4), index(t, 2, 4, 4)),
    "hinge_embedding_loss": lambda t: F.hinge_embedding_loss(t(3), signs(t, 3)),
    "kl_div": lambda t: F.kl_div(t(2, 3), t(2, 3), reduction="sum"),
    "margin_ranking_loss": lambda t: F.margin_ranking_loss(t(3), t(3), signs(t, 3)),
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t(2, 3), index(t, 2, 3)),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t(3), signs(t, 3)),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t(2, 3), t(2, 3), t(2, 3)),
    "multi_margin_loss": lambda t: F.multi_margin_loss(t(2, 3), index(t, 2)),
    "dist": lambda t: torch.dist(t(3), t(3)),
    "pdist": lambda t: torch.pdist(t(3, 2)),
    "cdist": lambda t: torch.cdist(t(2, 3), t(4, 3)),
    "renorm": lambda t: torch.renorm(t(2, 3), 2, 0, 1.0),
    "logsumexp": lambda t: torch.logsumexp(t(2, 3), 1),
    "upsample_nearest1d": lambda t: F.interpolate(t(1, 2, 4), scale_factor=2, mode="nearest"),
    "_upsample_nearest_exact1d": lambda t: F.interpolate(t(1, 2, 4), scale_factor=2, mode="nearest-exact"),
    "upsample_nearest2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="nearest"),
    "_upsample_nearest_exact2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="nearest-exact"),
    "upsample_nearest3d": lambda t: F.interpolate(t(1, 2, 3, 3, 3), scale_factor=2, mode="nearest"),
    "_upsample_nearest_exact3d": lambda t: F.interpolate(t(1, 2, 3, 3, 3), scale_factor=2, mode="nearest-exact"),
    "upsample_linear1d": lambda t: F.interpolate(t(1, 2, 4), scale_factor=2, mode="linear"),
    "upsample_bilinear2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "_upsample_bilinear2d_aa": lambda t: F.interpolate(t(1, 2, 4, 4), size=3, mode="bilinear", antialias=True),
    "upsample_trilinear3d": lambda t: F.interpolate(t(1, 2, 3, 3, 3), scale_factor=2, mode="trilinear"),
    "upsample_bicubic2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bicubic"),
    "_upsample_bicubic2d_aa": lambda t: F.interpolate(t(1, 2, 4, 4), size=3, mode="bicubic", antialias=True),
}

FP32_BY_DTYPE: dict[str, Sample] = {
    "prod": lambda t: torch.prod(t(3)),
    "prod.dim_int": lambda t: torch.prod(t(2, 3), 1),
    "softmax.int": lambda t: torch.softmax(t(2, 3), 1),
    "log_softmax.int": lambda t: torch.log_softmax(t(2, 3), 1),
    "cumprod": lambda t: torch.cumprod(t(3), 0),
    "cumsum": lambda t: torch.cumsum(t(3), 0),
    "linalg_vector_norm": lambda t: torch.linalg.vector_norm(t(3)),
    "linalg_matrix_norm": lambda t: torch.linalg.matrix_norm(t(2, 3), 1),
    "linalg_matrix_norm.str_ord": lambda t: torch.linalg.matrix_norm(t(2, 3), "fro"),
    "sum": lambda t: torch.sum(t(3)),
    "sum.dim_IntList": lambda t: torch.sum(t(2, 3), 1),
}

PROMOTE: dict[str, Callable[[Make, Make], Any]] = {
    "addcdiv": lambda t, u: torch.addcdiv(t(3), u(3), t(3)),
    "addcmul": lambda t, u: torch.addcmul(t(3), u(3), t(3)),
    "atan2": lambda t, u: torch.atan2(t(3), u(3)),
    "bilinear": lambda t, u: F.bilinear(t(2, 3), u(2, 4), t(5, 3, 4)),
    "cross": lambda t, u: torch.cross(t(2, 3), u(2, 3), dim=1),
    "dot": lambda t, u: torch.dot(t(3), u(3)),
    "vdot": lambda t, u: torch.vdot(t(3), u(3)),
    "grid_sampler": lambda t, u: F.grid_sample(t(1, 2, 4, 4), u(1, 3, 3, 2), align_corners=False),
    "index_put": lambda t, u: torch.index_put(t(3), (index(t, 1),), u(1)),
    "tensordot": lambda t, u: torch.tensordot(t(2, 3), u(3, 4), dims=1),
    "scatter_add": lambda t, u: torch.scatter_add(t(3), 0, index(t, 1), u(1)),
}


def binary_cross_entropy(t: Make) -> Tensor:
    return F.binary_cross_entropy(t(3), t(3))


def maker(dtype: torch.dtype, device: str) -> Make:
    """`t(*shape)` of this dtype and device, with values in (0.1, 0.9)."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: (torch.rand(shape, generator=generator) * 0.8 + 0.1).to(device, dtype)
