"""Kinds from names as profilers print them: torch, cuDNN, cuBLAS, CUTLASS, FlashAttention, the compiler's Triton.

`ON_H200` are names that a profiler printed on an H200 (torch 2.11, CUDA 13, cuDNN 9), some cut at their end. Of the
others many are shortened, or composed from patterns known from public traces and from torch's sources: they pin the
rules, and not every one of them was seen in exactly this form.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import halfstep
from halfstep_train.bench.step_profile import (
    MEMORY_BOUND,
    OWN_RULES,
    OpKind,
    classify_kernel,
    classify_operator,
)

NATIVE = "void at::native::"
ANONYMOUS = f"{NATIVE}(anonymous namespace)::"
COPY = "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}"
LISTS = "at::native::(anonymous namespace)::TensorListMetadata"

ON_H200 = {
    "_join_gradient": OpKind.CHAIN,
    "_partial_sums": OpKind.CHAIN,
    "halved_kernel": OpKind.MATMUL,
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1_"
    "execute_segment_k_off_kernel__5x_cudnn": OpKind.CONV_FORWARD,
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>"
    "(cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8::Params)": OpKind.CONV_FORWARD,
    "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize256x64x64_warpgroupsize1x1x1_g1_"
    "execute_segment_k_off_kernel__5x_cudnn": OpKind.CONV_INPUT_GRADIENT,
    "sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64_warpgroupsize1x1x1_g1_"
    "execute_segment_k_on_kernel__5x_cudnn": OpKind.CONV_WEIGHT_GRADIENT,
    "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22ImplicitGemmMultistage"
    "INS_4gemm9GemmShapeILi64ELi64ELi64EEENS4_52Conv2dWgradOutputGradientTileAccessIteratorOptimizedINS_11MatrixShape"
    "ILi64ELi64EEENS_10bfloat16_t": OpKind.CONV_WEIGHT_GRADIENT,
    "void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<xmma__5x_cudnn::implicit_gemm::"
    "wgrad_indexed::Warp_specialized_params<": OpKind.CONV_WEIGHT_GRADIENT,
    "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_bias_TNT": OpKind.MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, ": OpKind.MATMUL,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x256_32x4_nn_align2>(": OpKind.MATMUL,
    # attention, although one says fprop
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0": (
        OpKind.ATTENTION
    ),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0": (
        OpKind.ATTENTION
    ),
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>": OpKind.ATTENTION,
    "void cudnn::fusion::convert_dq_to_16bits<true>": OpKind.ATTENTION,
    "triton_poi_fused__native_batch_norm_legit_functional_convolution_backward_native_batch_norm_backward_"
    "threshold_backward_8": OpKind.FUSED,
    "triton_red_fused__native_batch_norm_legit_functional_26": OpKind.FUSED,
    "void nhwcAddPaddingKernel<__nv_bfloat16, __nv_bfloat16, float, true, (cudnnKernelDataType_t)0>": OpKind.LAYOUT,
    f"{ANONYMOUS}multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, "
    "at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, ": (
        OpKind.OPTIMIZER
    ),
    "Memset (Device)": OpKind.FILL,
}

KERNELS = ON_H200 | {
    # cuDNN and CUTLASS convolutions
    "sm86_xmma_fprop_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64_stage3_warpsize1x4x1_g8_"
    "tensor16x8x16_execute_kernel__5x_cudnn": OpKind.CONV_FORWARD,
    "cudnn_generated_fort_native_sm80_convFwd_pointwise_pointwise": OpKind.CONV_FORWARD,
    "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, int)": (
        OpKind.CONV_FORWARD
    ),
    "void convolve_common_engine_float_NHWC<__nv_bfloat16, __nv_bfloat16, 128, 5, 5, 3, 3, 3>": OpKind.CONV_FORWARD,
    "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false>": OpKind.CONV_FORWARD,
    "void conv2d_c1_k1_nhwc_kernel_specialized<__half, __half, __half, float, float, 5, 1, 8, 3, true>(float)": (
        OpKind.CONV_FORWARD
    ),
    "_5x_cudnn_ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1": OpKind.CONV_FORWARD,
    "void fft2d_r2c_32x32<float, false, 0u, false>(float2*, float const*, int)": OpKind.CONV_FORWARD,
    f"{ANONYMOUS}conv_depthwise2d_forward_kernel<3, c10::BFloat16, int>": OpKind.CONV_FORWARD,
    "sm90_xmma_dgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32_warpgroupsize1x1x1_g1_"
    "execute_segment_k_on_kernel__5x_cudnn": OpKind.CONV_INPUT_GRADIENT,
    "sm80_xmma_depthwise_convolution_dgrad_tiling_f16f16_f32f32_f32_nhwckrsc_nhwc_tilesize1x8x8_1x5x5_1x1x1_1x1x1_"
    "stage2_warpsize4x1x1_g64_betaFalse_execute_helper_kernel__5x_cudnn": OpKind.CONV_INPUT_GRADIENT,
    "void dgrad2d_c1_k1_nhwc_kernel_specialized_window<__half, float, float, 5, 1, true>(float, __half const*)": (
        OpKind.CONV_INPUT_GRADIENT
    ),
    f"{ANONYMOUS}conv_depthwise2d_backward_kernel<3, 1, float, int>": OpKind.CONV_INPUT_GRADIENT,
    "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2x2x1_"
    "g1_tensor16x8x16_execute_kernel__5x_cudnn": OpKind.CONV_WEIGHT_GRADIENT,
    "void cudnn::cnn::wgrad2d_c1_k1_nhwc_reduction_kernel<__half, float, 1, 5, 5>(cudnnTensorStruct)": (
        OpKind.CONV_WEIGHT_GRADIENT
    ),
    "void cudnn::winograd_nonfused::winogradWgradData4x4<float, float>": OpKind.CONV_WEIGHT_GRADIENT,
    f"{ANONYMOUS}conv_depthwise2d_grad_weight_kernel<float, int>": OpKind.CONV_WEIGHT_GRADIENT,
    "void conv_depthwise3d_cuda_backward_weight_kernel<c10::Half, float>": OpKind.CONV_WEIGHT_GRADIENT,
    # matrix products
    "nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NTN": OpKind.MATMUL,
    "nvjet_sm100_tst_64x16_64x16_2x4_2cta_h_bz_splitK_TNT": OpKind.MATMUL,
    "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_"
    "cublas": OpKind.MATMUL,
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma": OpKind.MATMUL,
    "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn": OpKind.MATMUL,
    "ampere_sgemm_128x64_tn": OpKind.MATMUL,
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4>(cutlass_80_tensorop::Params)": (
        OpKind.MATMUL
    ),
    "void cublasLt::splitKreduce_kernel<32, 16, int, __half, __half, float, false>": OpKind.MATMUL,
    "void gemv2T_kernel_val<int, int, float, float, float, 128, 16, 4, 4, false, false>": OpKind.MATMUL,
    "triton_tem_fused_addmm_3": OpKind.MATMUL,
    # attention
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>": OpKind.ATTENTION,
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>": OpKind.ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)": (
        OpKind.ATTENTION
    ),
    "fmha_cutlassB_bf16_aligned_128x64_k65536_sm80": OpKind.ATTENTION,
    "triton_tem_fused_flex_attention_0": OpKind.ATTENTION,
    # the compiler's: what they mention they do not compute
    "triton_red_fused__native_batch_norm_legit_functional_native_batch_norm_backward_threshold_backward_98": (
        OpKind.FUSED
    ),
    "triton_poi_fused_convolution_relu_3": OpKind.FUSED,
    "triton_poi_fused_convolution_4": OpKind.FUSED,
    "triton_poi_fused_convolution_backward_div_hardtanh_backward_native_batch_norm_backward_4": OpKind.FUSED,
    "triton_per_fused_native_layer_norm_0": OpKind.FUSED,
    "triton_poi_fused_add_addmm_gelu_mul_1": OpKind.FUSED,
    "triton_poi_fused__to_copy_add_mul_relu_18": OpKind.FUSED,
    "triton_per_fused__softmax__to_copy_view_where_14": OpKind.FUSED,
    "triton_poi_fused__to_copy_convolution_0": OpKind.CAST,
    "triton_poi_fused__to_copy_t_0": OpKind.CAST,
    "triton_poi_fused_clone_7": OpKind.LAYOUT,
    "triton_for_fused_0": OpKind.OPTIMIZER,
    # normalisation
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, int, 512, true, 1, true>(cudnnTensorStruct)": (
        OpKind.NORMALISATION
    ),
    "void cudnn::bn_bw_1C11_singleread_spec<__half2, 512, 1, 2, 0>": OpKind.NORMALISATION,
    f"{NATIVE}batch_norm_backward_reduce_channels_last_kernel<4, c10::BFloat16, float, float>": OpKind.NORMALISATION,
    f"{NATIVE}batch_norm_transform_input_channels_last_kernel<c10::BFloat16, float, float, 4>": OpKind.NORMALISATION,
    f"{ANONYMOUS}vectorized_layer_norm_kernel<float, float, false>(int, float)": OpKind.NORMALISATION,
    f"{ANONYMOUS}GammaBetaBackwardCUDAKernelTemplate<float, float, 64u, 16u>": OpKind.NORMALISATION,
    f"{ANONYMOUS}RowwiseMomentsCUDAKernel<c10::BFloat16>(long, float)": OpKind.NORMALISATION,
    # elementwise
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>>": (
        OpKind.ELEMENTWISE
    ),
    f"{NATIVE}unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4, "
    "at::native::memory::LoadWithCast<2>, at::native::memory::StoreWithCast<1>>": OpKind.ELEMENTWISE,
    f"{NATIVE}elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float>>>>": OpKind.ELEMENTWISE,
    f"{ANONYMOUS}max_pool_backward_nhwc<c10::BFloat16, float>(c10::BFloat16 const*)": OpKind.ELEMENTWISE,
    "void pooling_bw_kernel_max_nchw_fully_packed_large<float, float, 3, (cudnnNanPropagation_t)0>": OpKind.ELEMENTWISE,
    f"{ANONYMOUS}CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 4>": (
        OpKind.ELEMENTWISE
    ),
    f"{ANONYMOUS}cunn_SoftMaxForward<4, float, float, float, at::native::SoftMaxForwardEpilogue>": OpKind.ELEMENTWISE,
    f"{ANONYMOUS}nll_loss2d_forward_kernel<float, float, long>(float*, float*)": OpKind.ELEMENTWISE,
    f"{ANONYMOUS}upsample_bilinear2d_out_frame<float, float>(int, float)": OpKind.ELEMENTWISE,
    f"{ANONYMOUS}distribution_elementwise_grid_stride_kernel<float, 4>": OpKind.ELEMENTWISE,
    f"{NATIVE}(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4>": OpKind.ELEMENTWISE,
    # reductions
    f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>>>": (
        OpKind.REDUCTION
    ),
    "void at_cuda_detail::cub::DeviceReduceSingleTileKernel<at_cuda_detail::cub::DeviceReducePolicy<int>>": (
        OpKind.REDUCTION
    ),
    # casts
    f"{NATIVE}vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda(float)#1}, std::array<char*, 2ul>>": OpKind.CAST,
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda(c10::BFloat16)#1}>": OpKind.CAST,
    f"{NATIVE}vectorized_elementwise_kernel<8, at::native::float16_copy_kernel_cuda(at::TensorIteratorBase&)>": (
        OpKind.CAST
    ),
    f"{NATIVE}unrolled_elementwise_kernel<{COPY}, std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned int>, "
    "at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1>>": OpKind.CAST,
    f"{NATIVE}elementwise_kernel<128, 4, at::native::gpu_kernel_impl<{COPY}>>": OpKind.CAST,
    "void cudnn::ops::convertTensor_kernel<float, float, float, (cudnnKernelDataType_t)2>": OpKind.CAST,
    f"{ANONYMOUS}multi_tensor_apply_kernel<{LISTS}<2>, at::native::(anonymous namespace)::UnaryOpFunctor<float, 2, 1, "
    "1>, at::native::Copy<c10::BFloat16, float>>": OpKind.CAST,
    # layout
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>": (
        OpKind.LAYOUT
    ),
    "void cudnn::ops::nhwcToNchwKernel<__half, __half, float, true, false, (cudnnKernelDataType_t)0>": OpKind.LAYOUT,
    f"{NATIVE}elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{COPY}>>": OpKind.LAYOUT,
    # optimizer
    f"{ANONYMOUS}multi_tensor_apply_kernel<{LISTS}<2>, at::native::(anonymous namespace)::BinaryOpListAlphaFunctor<"
    "float, 2, 2, 0>, std::plus<float>, float>": OpKind.OPTIMIZER,
    f"{ANONYMOUS}multi_tensor_apply_kernel<{LISTS}<1>, at::native::LpNormFunctor<float, (at::native::NormType)1>>": (
        OpKind.OPTIMIZER
    ),
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::lerp_scalar_kernel(at::TensorIteratorBase&)>": (
        OpKind.OPTIMIZER
    ),
    # memory
    "Memcpy HtoD (Pinned -> Device)": OpKind.COPY_IN,
    "Memcpy DtoH (Device -> Pageable)": OpKind.COPY_OUT,
    "Memcpy DtoD (Device -> Device)": OpKind.COPY,
    f"{NATIVE}vectorized_elementwise_kernel<4, {COPY}, std::array<char*, 2ul>>": OpKind.COPY,
    f"{ANONYMOUS}multi_tensor_apply_kernel<{LISTS}<2>, at::native::(anonymous namespace)::UnaryOpFunctor<"
    "c10::BFloat16, 2, 1, 1>, at::native::Copy<c10::BFloat16, c10::BFloat16>>": OpKind.COPY,
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>": OpKind.FILL,
    "void cudnn::engines_precompiled::setTensor5d_kernel<float>": OpKind.FILL,
    # nobody's
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": OpKind.OTHER,
    "user_kernel": OpKind.OTHER,
}

OPERATORS = {
    "aten::mkldnn_convolution": OpKind.CONV_FORWARD,
    "aten::_convolution": OpKind.CONV_FORWARD,
    "aten::convolution_backward": OpKind.CONV_BACKWARD,
    "aten::addmm": OpKind.MATMUL,
    "aten::_scaled_dot_product_flash_attention_for_cpu": OpKind.ATTENTION,
    "aten::native_batch_norm_backward": OpKind.NORMALISATION,
    "aten::_fused_adamw_": OpKind.OPTIMIZER,
    "aten::_foreach_mul_": OpKind.OPTIMIZER,
    "aten::copy_ in aten::_to_copy": OpKind.CAST,
    "aten::copy_ in aten::clone": OpKind.LAYOUT,
    "aten::copy_ in aten::add": OpKind.COPY,
    "aten::max_pool2d_with_indices": OpKind.ELEMENTWISE,
    "aten::threshold_backward": OpKind.ELEMENTWISE,
    "aten::sum": OpKind.REDUCTION,
    "aten::zero_": OpKind.FILL,
    "aten::empty_strided": OpKind.BOOKKEEPING,
    "aten::t": OpKind.BOOKKEEPING,
    "autograd::engine::evaluate_function: ConvolutionBackward0": OpKind.BOOKKEEPING,
    "ConvolutionBackward0": OpKind.BOOKKEEPING,
    "graph_0_cpp_fused__log_softmax_relu_3": OpKind.FUSED,
    "## Call CompiledFxGraph ficoju6nsttrvieknbiswhfiswzxxkb4f7drxu6nqrmuncr3mmtq ##": OpKind.FUSED,
    "Torch-Compiled Region: 0/0": OpKind.BOOKKEEPING,
    "CompiledFunctionBackward": OpKind.BOOKKEEPING,
    "TorchDynamo Cache Lookup": OpKind.BOOKKEEPING,
    "my_extension": OpKind.OTHER,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_known_by_its_name(name: str) -> None:
    assert classify_kernel(name) is KERNELS[name]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_known_by_its_name(name: str) -> None:
    assert classify_operator(name) is OPERATORS[name]


def test_every_kind_but_the_cpus_own_has_a_kernel_in_the_table() -> None:
    assert set(OpKind) - set(KERNELS.values()) == {OpKind.CONV_BACKWARD, OpKind.BOOKKEEPING}


def own_kernels() -> list[str]:
    """Names of kernels that are launched, as `name[grid](...)`, in our Triton files."""
    source = Path(halfstep.__file__).parent
    files = [*source.rglob("*_triton.py")]
    calls = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    launched = [
        call.func.value for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
    ]
    return sorted({name.id for name in launched if isinstance(name, ast.Name)})


@pytest.mark.parametrize("name", own_kernels())
def test_each_kernel_of_our_own_has_a_kind(name: str) -> None:
    assert any(re.search(pattern, name) for _, pattern in OWN_RULES)
    arithmetic = {OpKind.CONV_FORWARD, OpKind.CONV_WEIGHT_GRADIENT, OpKind.MATMUL, OpKind.ATTENTION}
    assert classify_kernel(name) in MEMORY_BOUND | arithmetic
