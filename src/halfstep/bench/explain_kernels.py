"""What a device kernel or a CPU operator does, from its name alone.

Names are all a profiler gives under a CUDA graph, where no operator stands behind a kernel any more. The first rule
that fits wins, so what says most stands first: `sm90_xmma_wgrad_implicit_gemm` is a weight gradient before it is a
gemm.

A Triton kernel of the compiler is named after every operator it took part in. A convolution or matrix product among
them was called from a library; the kernel only adds its bias, casts its input or reads its output. So
`triton_poi_fused_convolution_relu_3` is a fused elementwise kernel, never a convolution. Only the compiler's templates,
`triton_tem_`, multiply themselves.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Kind(StrEnum):
    """What time is spent on."""

    CONV_FORWARD = "convolution forward"
    CONV_INPUT_GRADIENT = "convolution input gradient"
    CONV_WEIGHT_GRADIENT = "convolution weight gradient"
    CONV_BACKWARD = "convolution backward"
    """Both gradients in one operator, as a CPU has them."""
    MATMUL = "matrix product"
    ATTENTION = "attention"
    FUSED = "fused by the compiler"
    """Elementwise operators, normalisations and their reductions in one Triton or C++ kernel."""
    CHAIN = "fused by hand"
    """Normalisations, activations and their reductions in halfstep's own kernels between convolutions or matmuls."""
    ELEMENTWISE = "elementwise"
    """One operator a kernel; pooling, concatenation, softmax and losses too."""
    NORMALISATION = "normalisation"
    REDUCTION = "reduction"
    CAST = "cast"
    LAYOUT = "layout copy"
    OPTIMIZER = "optimizer and clipping"
    COPY_IN = "copy from the host"
    COPY_OUT = "copy to the host"
    COPY = "copy on the device"
    FILL = "fill"
    BOOKKEEPING = "allocation and autograd"
    """On a CPU only: what an operator costs besides its work."""
    OTHER = "other"


MEMORY_BOUND = {Kind.FUSED, Kind.CHAIN, Kind.ELEMENTWISE, Kind.NORMALISATION, Kind.REDUCTION, Kind.CAST}
MEMORY_BOUND |= {Kind.LAYOUT, Kind.OPTIMIZER, Kind.COPY, Kind.FILL}
"""A few operations a byte: these run as fast as the device's memory."""

_AROUND = r"(?:convolution_backward|convolution|_unsafe_view|view|permute|transpose|unsqueeze|expand|t)_"
"""Operators that leave no work of their own in a pointwise Triton kernel."""

_COPY = r"direct_copy_kernel_cuda"

OWN_RULES: tuple[tuple[Kind, str], ...] = (
    (Kind.CONV_FORWARD, r"^_convolve$"),
    (Kind.CONV_WEIGHT_GRADIENT, r"^_weight_gradient$"),
    (Kind.MATMUL, r"^(?:doubled|halved|weight_parts)_kernel$"),
    (Kind.ATTENTION, r"^_attention\w*$"),
    (Kind.OPTIMIZER, r"^_(?:update|count|average)$"),
    (Kind.CHAIN, r"^(?:logits|head_\w+|pool\w*)_kernel$|^_(?:partial_sums|finish\w*|normalised|gradient_of_raw)$"),
    (
        Kind.CHAIN,
        r"^_(?:join\w*|pair_gradients|pool\w*|pad|arrange|add_norm\w*|gelu\w*|packed|rows_to_gradients|group_\w+|add_branch|row_sums)$",
    ),
)
"""halfstep's own kernels, in kernels/ and step/; nobody else's name is a whole Python name."""

KERNEL_RULES: tuple[tuple[Kind, str], ...] = (
    (Kind.COPY_IN, r"^Memcpy HtoD"),
    (Kind.COPY_OUT, r"^Memcpy DtoH"),
    (Kind.COPY, r"^Memcpy"),
    (Kind.FILL, r"^Memset"),
    (Kind.ATTENTION, r"^triton_tem_.*(?:attention|sdpa)"),
    (Kind.CONV_FORWARD, r"^triton_tem_.*convolution"),
    (Kind.MATMUL, r"^triton_tem_"),
    (Kind.OPTIMIZER, r"^triton_for_"),  # the compiler's foreach kernels
    (Kind.CAST, rf"^triton_poi_fused_(?:{_AROUND})*_to_copy_(?:{_AROUND})*\d+$"),
    (Kind.LAYOUT, rf"^triton_poi_fused_(?:{_AROUND})*clone_(?:{_AROUND})*\d+$"),
    (Kind.FUSED, r"^triton_"),
    (Kind.ATTENTION, r"flash_(?:fwd|bwd)|flash::|fmha|sdpa|flashattn|flash_attn"),
    # What cuDNN runs around its attention's backward.
    (Kind.ATTENTION, r"cudnn::fusion::(?:compute_dot_do_o|convert_dq)"),
    # A foreach copy between equal types moves, between others casts.
    (Kind.COPY, r"multi_tensor_apply_kernel.*native::Copy<([\w:]+), \1>"),
    (Kind.CAST, r"multi_tensor_apply_kernel.*native::Copy<"),
    (Kind.OPTIMIZER, r"multi_tensor_apply_kernel|FusedAdam|FusedSgd|FusedAdagrad|lerp|kOptimizer"),
    (Kind.LAYOUT, r"nchwToNhwc|nhwcToNchw|nhwcAddPadding|tensorTransform|transpose_readWrite"),
    (Kind.CONV_WEIGHT_GRADIENT, r"wgrad|conv\w*_(?:grad|backward)_weight|bwd_filter"),
    (Kind.CONV_INPUT_GRADIENT, r"dgrad|conv_depthwise\w*_backward|bwd_data"),
    (Kind.CONV_FORWARD, r"fprop|convFwd|convolve|conv2d|conv_depthwise|winograd|fft2d|im2col"),
    # Strided copies in one type turn a tensor round; contiguous ones are vectorised; the rest change the type.
    (Kind.LAYOUT, rf"gpu_kernel_impl_nocast<.*{_COPY}"),
    (Kind.COPY, rf"vectorized_elementwise_kernel<.*{_COPY}|{_COPY}.*WithoutCast"),
    (Kind.CAST, rf"{_COPY}|float16\w*_copy_kernel|bfloat16\w*_copy_kernel|float8\w*_copy_kernel|convertTensor_kernel"),
    (Kind.NORMALISATION, r"batch_?norm|bn_(?:fw|bw)|(?:layer|group|rms)_?norm|RowwiseMoments|GammaBetaBackward"),
    (Kind.NORMALISATION, r"ComputeInternalGradients|ComputeFusedParams|ComputeBackwardFusedParams"),
    (Kind.MATMUL, r"gemm|nvjet|gemv|cublas|splitK|cutlass"),
    (Kind.FILL, r"FillFunctor|setTensor\dd"),
    (Kind.REDUCTION, r"reduce_kernel|DeviceReduce|reduce_1Block|dot_kernel"),
    (Kind.ELEMENTWISE, r"elementwise|softmax|pool|nll_loss|CatArrayBatched|upsample|dropout|embedding"),
    (Kind.ELEMENTWISE, r"index|gather|scatter|_pad\d?d|triu_tril|scalePackedTensor|cub::Device|where_kernel"),
)

OPERATOR_RULES: tuple[tuple[Kind, str], ...] = (
    # The compiler's C++ kernels are not recorded one by one: they are what their graph does besides operators.
    (Kind.FUSED, r"cpp_fused|^## Call CompiledFxGraph"),
    (Kind.ATTENTION, r"^aten::_?scaled_dot_product|attention"),
    (Kind.CONV_BACKWARD, r"^aten::\w*convolution\w*_backward|^aten::_slow_conv\w*_backward"),
    (Kind.CONV_FORWARD, r"^aten::\w*convolution|^aten::\w*conv\dd|^mkldnn::_convolution"),
    (Kind.MATMUL, r"^aten::(?:addmm|mm|bmm|baddbmm|matmul|linear|dot|mv|addmv)_?$|^mkl|^mkldnn::_linear"),
    (Kind.OPTIMIZER, r"^aten::_fused_|^aten::_foreach|^aten::lerp|^aten::(?:linalg_vector_norm|_amp_)"),
    (Kind.NORMALISATION, r"(?:batch|layer|group|rms)_norm"),
    (Kind.CAST, r"copy_ in aten::_to_copy$"),
    (Kind.LAYOUT, r"copy_ in aten::(?:clone|contiguous)$"),
    (Kind.COPY, r"^aten::copy_"),
    (Kind.FILL, r"^aten::(?:fill_|zero_|zeros|ones|full)"),
    (Kind.REDUCTION, r"^aten::(?:sum|mean|amax|amin|max|min|norm|var|std|all|any)$"),
    (Kind.BOOKKEEPING, r"^aten::(?:empty|as_strided|view|_?reshape|t$|transpose|permute|expand|detach|to$|slice)"),
    (Kind.BOOKKEEPING, r"^aten::(?:_to_copy|clone|contiguous|resize|resolve|flatten|unsqueeze|squeeze|select|item)"),
    (Kind.BOOKKEEPING, r"^aten::(?:_unsafe_view|_local_scalar|alias|set_|lift|result_type|narrow|unbind|split|chunk)"),
    (Kind.BOOKKEEPING, r"^autograd::|^torch::autograd::|Backward\d+$|^detach"),
    (Kind.BOOKKEEPING, r"^Torch-Compiled|^CompiledFunction|^TorchDynamo|^AOTDispatcher|^Pregraph"),
    (Kind.ELEMENTWISE, r"^aten::"),
)


def _compiled(rules: tuple[tuple[Kind, str], ...]) -> tuple[tuple[Kind, re.Pattern[str]], ...]:
    return tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in rules)


_KERNELS, _OPERATORS = _compiled(OWN_RULES + KERNEL_RULES), _compiled(OPERATOR_RULES)


def kind_of_kernel(name: str) -> Kind:
    """What a CUDA kernel, memory copy or memset does."""
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), Kind.OTHER)


def kind_of_operator(name: str) -> Kind:
    """What a CPU operator does; `aten::copy_ in PARENT` names a copy with the operator that asked for it."""
    return next((kind for kind, pattern in _OPERATORS if pattern.search(name)), Kind.OTHER)
