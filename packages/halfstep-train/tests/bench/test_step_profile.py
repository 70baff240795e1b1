"""Kinds from names as profilers print them: torch, cuDNN, cuBLAS, CUTLASS, FlashAttention, the compiler's Triton.

`ON_H200` are names that a profiler printed on an H200 (torch 2.11, CUDA 13, cuDNN 9), some cut at their end. Of the
others many are shortened, or composed from patterns known from public traces and from torch's sources: they pin the
rules, and not every one of them was seen in exactly this form.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import halfstep
import halfstep_train
from halfstep_train.bench.step_profile import KINDS, classify_kernel, summarise_events

FUSED, COPIES, ATTENTION, OPTIMIZER, CONV, NORM, MATMUL, SMALL = KINDS
OTHER = "other"

NATIVE = "void at::native::"
ANONYMOUS = f"{NATIVE}(anonymous namespace)::"
COPY = "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}"
LISTS = "at::native::(anonymous namespace)::TensorListMetadata"

ON_H200 = {
    "_join_gradient": FUSED,
    "_partial_sums": FUSED,
    "halved_kernel": MATMUL,
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1_"
    "execute_segment_k_off_kernel__5x_cudnn": CONV,
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>"
    "(cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8::Params)": CONV,
    "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize256x64x64_warpgroupsize1x1x1_g1_"
    "execute_segment_k_off_kernel__5x_cudnn": CONV,
    "sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64_warpgroupsize1x1x1_g1_"
    "execute_segment_k_on_kernel__5x_cudnn": CONV,
    "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22ImplicitGemmMultistage"
    "INS_4gemm9GemmShapeILi64ELi64ELi64EEENS4_52Conv2dWgradOutputGradientTileAccessIteratorOptimizedINS_11MatrixShape"
    "ILi64ELi64EEENS_10bfloat16_t": CONV,
    "void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<xmma__5x_cudnn::implicit_gemm::"
    "wgrad_indexed::Warp_specialized_params<": CONV,
    "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_bias_TNT": MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, ": MATMUL,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x256_32x4_nn_align2>(": MATMUL,
    # attention, although one says fprop
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0": (
        ATTENTION
    ),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0": (
        ATTENTION
    ),
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>": ATTENTION,
    "void cudnn::fusion::convert_dq_to_16bits<true>": ATTENTION,
    "triton_poi_fused__native_batch_norm_legit_functional_convolution_backward_native_batch_norm_backward_"
    "threshold_backward_8": FUSED,
    "triton_red_fused__native_batch_norm_legit_functional_26": FUSED,
    "void nhwcAddPaddingKernel<__nv_bfloat16, __nv_bfloat16, float, true, (cudnnKernelDataType_t)0>": COPIES,
    f"{ANONYMOUS}multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, "
    "at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, ": (OPTIMIZER),
    "Memset (Device)": COPIES,
}

KERNELS = ON_H200 | {
    # cuDNN and CUTLASS convolutions
    "sm86_xmma_fprop_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64_stage3_warpsize1x4x1_g8_"
    "tensor16x8x16_execute_kernel__5x_cudnn": CONV,
    "cudnn_generated_fort_native_sm80_convFwd_pointwise_pointwise": CONV,
    "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, int)": (CONV),
    "void convolve_common_engine_float_NHWC<__nv_bfloat16, __nv_bfloat16, 128, 5, 5, 3, 3, 3>": CONV,
    "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false>": CONV,
    "void conv2d_c1_k1_nhwc_kernel_specialized<__half, __half, __half, float, float, 5, 1, 8, 3, true>(float)": (CONV),
    "_5x_cudnn_ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1": CONV,
    "void fft2d_r2c_32x32<float, false, 0u, false>(float2*, float const*, int)": CONV,
    f"{ANONYMOUS}conv_depthwise2d_forward_kernel<3, c10::BFloat16, int>": CONV,
    "sm90_xmma_dgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32_warpgroupsize1x1x1_g1_"
    "execute_segment_k_on_kernel__5x_cudnn": CONV,
    "sm80_xmma_depthwise_convolution_dgrad_tiling_f16f16_f32f32_f32_nhwckrsc_nhwc_tilesize1x8x8_1x5x5_1x1x1_1x1x1_"
    "stage2_warpsize4x1x1_g64_betaFalse_execute_helper_kernel__5x_cudnn": CONV,
    "void dgrad2d_c1_k1_nhwc_kernel_specialized_window<__half, float, float, 5, 1, true>(float, __half const*)": (CONV),
    f"{ANONYMOUS}conv_depthwise2d_backward_kernel<3, 1, float, int>": CONV,
    "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2x2x1_"
    "g1_tensor16x8x16_execute_kernel__5x_cudnn": CONV,
    "void cudnn::cnn::wgrad2d_c1_k1_nhwc_reduction_kernel<__half, float, 1, 5, 5>(cudnnTensorStruct)": (CONV),
    "void cudnn::winograd_nonfused::winogradWgradData4x4<float, float>": CONV,
    f"{ANONYMOUS}conv_depthwise2d_grad_weight_kernel<float, int>": CONV,
    "void conv_depthwise3d_cuda_backward_weight_kernel<c10::Half, float>": CONV,
    # matrix products
    "nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NTN": MATMUL,
    "nvjet_sm100_tst_64x16_64x16_2x4_2cta_h_bz_splitK_TNT": MATMUL,
    "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_"
    "cublas": MATMUL,
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma": MATMUL,
    "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn": MATMUL,
    "ampere_sgemm_128x64_tn": MATMUL,
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4>(cutlass_80_tensorop::Params)": (
        MATMUL
    ),
    "void cublasLt::splitKreduce_kernel<32, 16, int, __half, __half, float, false>": MATMUL,
    "void gemv2T_kernel_val<int, int, float, float, float, 128, 16, 4, 4, false, false>": MATMUL,
    "triton_tem_fused_addmm_3": MATMUL,
    # attention
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>": ATTENTION,
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>": ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)": (
        ATTENTION
    ),
    "fmha_cutlassB_bf16_aligned_128x64_k65536_sm80": ATTENTION,
    "triton_tem_fused_flex_attention_0": ATTENTION,
    # the compiler's: what they mention they do not compute
    "triton_red_fused__native_batch_norm_legit_functional_native_batch_norm_backward_threshold_backward_98": (FUSED),
    "triton_poi_fused_convolution_relu_3": FUSED,
    "triton_poi_fused_convolution_4": FUSED,
    "triton_poi_fused_convolution_backward_div_hardtanh_backward_native_batch_norm_backward_4": FUSED,
    "triton_per_fused_native_layer_norm_0": FUSED,
    "triton_poi_fused_add_addmm_gelu_mul_1": FUSED,
    "triton_poi_fused__to_copy_add_mul_relu_18": FUSED,
    "triton_per_fused__softmax__to_copy_view_where_14": FUSED,
    "triton_poi_fused__to_copy_convolution_0": FUSED,
    "triton_poi_fused__to_copy_t_0": FUSED,
    "triton_poi_fused_clone_7": FUSED,
    "triton_for_fused_0": OPTIMIZER,
    # normalisation
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, int, 512, true, 1, true>(cudnnTensorStruct)": (NORM),
    "void cudnn::bn_bw_1C11_singleread_spec<__half2, 512, 1, 2, 0>": NORM,
    f"{NATIVE}batch_norm_backward_reduce_channels_last_kernel<4, c10::BFloat16, float, float>": NORM,
    f"{NATIVE}batch_norm_transform_input_channels_last_kernel<c10::BFloat16, float, float, 4>": NORM,
    f"{ANONYMOUS}vectorized_layer_norm_kernel<float, float, false>(int, float)": NORM,
    f"{ANONYMOUS}GammaBetaBackwardCUDAKernelTemplate<float, float, 64u, 16u>": NORM,
    f"{ANONYMOUS}RowwiseMomentsCUDAKernel<c10::BFloat16>(long, float)": NORM,
    # elementwise
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>>": (
        SMALL
    ),
    f"{NATIVE}unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4, "
    "at::native::memory::LoadWithCast<2>, at::native::memory::StoreWithCast<1>>": SMALL,
    f"{NATIVE}elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float>>>>": SMALL,
    f"{ANONYMOUS}max_pool_backward_nhwc<c10::BFloat16, float>(c10::BFloat16 const*)": SMALL,
    "void pooling_bw_kernel_max_nchw_fully_packed_large<float, float, 3, (cudnnNanPropagation_t)0>": SMALL,
    f"{ANONYMOUS}CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 4>": (
        COPIES
    ),
    f"{ANONYMOUS}cunn_SoftMaxForward<4, float, float, float, at::native::SoftMaxForwardEpilogue>": SMALL,
    f"{ANONYMOUS}nll_loss2d_forward_kernel<float, float, long>(float*, float*)": SMALL,
    f"{ANONYMOUS}upsample_bilinear2d_out_frame<float, float>(int, float)": SMALL,
    f"{ANONYMOUS}distribution_elementwise_grid_stride_kernel<float, 4>": SMALL,
    f"{NATIVE}(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4>": SMALL,
    # reductions
    f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>>>": (
        SMALL
    ),
    "void at_cuda_detail::cub::DeviceReduceSingleTileKernel<at_cuda_detail::cub::DeviceReducePolicy<int>>": (SMALL),
    # casts
    f"{NATIVE}vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda(float)#1}, std::array<char*, 2ul>>": COPIES,
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda(c10::BFloat16)#1}>": COPIES,
    f"{NATIVE}vectorized_elementwise_kernel<8, at::native::float16_copy_kernel_cuda(at::TensorIteratorBase&)>": (
        COPIES
    ),
    f"{NATIVE}unrolled_elementwise_kernel<{COPY}, std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned int>, "
    "at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1>>": COPIES,
    f"{NATIVE}elementwise_kernel<128, 4, at::native::gpu_kernel_impl<{COPY}>>": COPIES,
    "void cudnn::ops::convertTensor_kernel<float, float, float, (cudnnKernelDataType_t)2>": COPIES,
    f"{ANONYMOUS}multi_tensor_apply_kernel<{LISTS}<2>, at::native::(anonymous namespace)::UnaryOpFunctor<float, 2, 1, "
    "1>, at::native::Copy<c10::BFloat16, float>>": COPIES,
    # layout
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>": (COPIES),
    "void cudnn::ops::nhwcToNchwKernel<__half, __half, float, true, false, (cudnnKernelDataType_t)0>": COPIES,
    f"{NATIVE}elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{COPY}>>": COPIES,
    # optimizer
    f"{ANONYMOUS}multi_tensor_apply_kernel<{LISTS}<2>, at::native::(anonymous namespace)::BinaryOpListAlphaFunctor<"
    "float, 2, 2, 0>, std::plus<float>, float>": OPTIMIZER,
    f"{ANONYMOUS}multi_tensor_apply_kernel<{LISTS}<1>, at::native::LpNormFunctor<float, (at::native::NormType)1>>": (
        OPTIMIZER
    ),
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::lerp_scalar_kernel(at::TensorIteratorBase&)>": (OPTIMIZER),
    # memory
    "Memcpy HtoD (Pinned -> Device)": COPIES,
    "Memcpy DtoH (Device -> Pageable)": COPIES,
    "Memcpy DtoD (Device -> Device)": COPIES,
    f"{NATIVE}vectorized_elementwise_kernel<4, {COPY}, std::array<char*, 2ul>>": COPIES,
    f"{ANONYMOUS}multi_tensor_apply_kernel<{LISTS}<2>, at::native::(anonymous namespace)::UnaryOpFunctor<"
    "c10::BFloat16, 2, 1, 1>, at::native::Copy<c10::BFloat16, c10::BFloat16>>": COPIES,
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>": COPIES,
    "void cudnn::engines_precompiled::setTensor5d_kernel<float>": COPIES,
    # unknown ones
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": OTHER,
    "user_kernel": OTHER,
}

OPERATORS = {
    "aten::mkldnn_convolution": CONV,
    "aten::_convolution": CONV,
    "aten::convolution_backward": CONV,
    "aten::addmm": MATMUL,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "aten::native_batch_norm_backward": NORM,
    "aten::_fused_adamw_": OPTIMIZER,
    "aten::_foreach_mul_": OPTIMIZER,
    "aten::copy_ in aten::_to_copy": COPIES,
    "aten::copy_ in aten::clone": COPIES,
    "aten::copy_ in aten::add": COPIES,
    "aten::max_pool2d_with_indices": SMALL,
    "aten::threshold_backward": SMALL,
    "aten::sum": SMALL,
    "aten::zero_": COPIES,
    "aten::empty_strided": SMALL,
    "graph_0_cpp_fused__log_softmax_relu_3": FUSED,
    "## Call CompiledFxGraph ficoju6nsttrvieknbiswhfiswzxxkb4f7drxu6nqrmuncr3mmtq ##": FUSED,
    "TorchDynamo Cache Lookup": OTHER,
    "my_extension": OTHER,
}


@pytest.mark.parametrize("name", [*KERNELS, *OPERATORS])
def test_a_kernel_is_known_by_its_name(name: str) -> None:
    assert classify_kernel(name) == (KERNELS | OPERATORS)[name]


def list_own_kernels() -> list[str]:
    """Return the names of kernels that are launched, as `name[grid](...)`, in our Triton files."""
    files = [file for package in (halfstep, halfstep_train) for file in Path(package.__path__[0]).rglob("*_triton.py")]
    calls = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    launched = [
        call.func.value for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
    ]
    return sorted({name.id for name in launched if isinstance(name, ast.Name)})


@pytest.mark.parametrize("name", list_own_kernels())
def test_each_of_our_kernels_has_a_kind(name: str) -> None:
    assert classify_kernel(name) in (FUSED, ATTENTION, OPTIMIZER, CONV, MATMUL)


RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar>"
FPROP = "sm90_xmma_fprop_implicit_gemm_bf16"


def event(name: str, start_us: float, end_us: float) -> Any:
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start_us, end=end_us), self_cpu_time_total=end_us - start_us
    )


def test_kernels_add_up_by_name_and_kind_per_step() -> None:
    events = [event(FPROP, 0, 4000), event(RELU, 4000, 5000), event(RELU, 5000, 8000), event(FPROP, 8000, 10000)]
    found = summarise_events(events, 2, 5.0, is_host=False)
    assert [(kernel.name, kernel.ms, kernel.launches) for kernel in found.kernels] == [
        (FPROP, 3.0, 1.0),
        (RELU, 2.0, 1.0),
    ]
    assert (found.kinds_ms, found.launches, found.idle_ms) == ({CONV: 3.0, SMALL: 2.0}, 2.0, 0.0)


def test_idle_time_is_what_no_stream_fills() -> None:
    events = [event(FPROP, 1000, 5000), event(RELU, 4000, 6000), event(RELU, 4500, 5500), event(FPROP, 9000, 11000)]
    assert summarise_events(events, 2, 100.0, is_host=False).idle_ms == 1.5


@pytest.mark.parametrize(("step_ms", "idle_ms"), [(7.0, 1.0), (5.0, 0.0)])
def test_idle_time_that_the_profiler_adds_is_not_counted(step_ms: float, idle_ms: float) -> None:
    events = [event(FPROP, 0, 4000), event(FPROP, 8000, 10000)]
    assert summarise_events(events, 1, step_ms, is_host=False).idle_ms == idle_ms


def test_operators_of_a_cpu_are_scaled_to_the_unprofiled_step() -> None:
    events = [event("aten::relu", 0, 4000), event("aten::mm", 6000, 10000)]
    found = summarise_events(events, 1, 5.0, is_host=True)
    assert (found.kinds_ms, found.idle_ms) == ({SMALL: 2.0, MATMUL: 2.0}, 1.0)
