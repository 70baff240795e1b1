"""CUDA's autocast lists as data: ATen/autocast_mode.h and the op reference of torch.amp's documentation.

Names are ATen overloads. Left out: `_thnn_fused_lstm_cell`, `_thnn_fused_gru_cell` and
`_scaled_dot_product_flash_attention`, kernels that exist on CUDA only and are reached through listed ones.
"""

from __future__ import annotations

import torch

LOWER = (
    *("_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "convolution"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm"),
    *("baddbmm", "bmm", "chain_matmul", "linalg_multi_dot"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention"),
)
"""Run in the autocast format."""

RECURRENT = tuple(f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data"))
"""Run whole by cuDNN: in fp16 whatever autocast's format is, of which a bf16 plan warns (decide.py)."""

FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus"),
    *("layer_norm", "native_layer_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm"),
    *(("rms_norm",) if torch.__version__ >= "2.12" else ()),  # on the list since torch 2.12
    *("nuclear_norm.dim", "norm.Scalar", "norm.ScalarOpt_dim", "cosine_similarity", "poisson_nll_loss"),
    *("cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits"),
    *("dist", "pdist", "cdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
"""Inputs upcast, run in fp32."""

FP32_BY_DTYPE = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)
"""Run in fp32 unless the caller names a dtype."""

PROMOTE = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put"),
    *("tensordot", "scatter_add"),
)
"""Run in the widest format of the inputs."""

BANNED = ("binary_cross_entropy",)
"""Refused: its gradient overflows fp16. `binary_cross_entropy_with_logits` is safe."""

KEPT = (
    *("conv1d.padding", "conv2d.padding", "conv3d.padding", "_addmm_activation", "mkldnn_rnn_layer"),
    *("_native_multi_head_attention", "cat", "stack", "index_copy"),
)
"""On the CPU's list only, yet to the same effect: other entries to listed ops, and plain type promotion."""
