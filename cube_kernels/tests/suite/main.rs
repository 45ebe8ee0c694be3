//! Tests of the kernels.
//!
//! `NVFP4_TEST_DEVICE` selects the device that kernels run on: `cpu` (CubeCL's CPU runtime, the
//! default) or `cuda`. The modules `*_source` need no device: they compile the kernels' CUDA
//! source.

#[macro_use]
mod support;

mod attention;
#[cfg(all(feature = "cpu", target_os = "linux", target_arch = "x86_64"))]
mod barrier;
mod benched;
mod cutlass;
mod dequantize;
mod embedding;
mod emulated;
mod fp8;
mod gemm;
mod gemm_cublaslt;
mod gemm_fused;
mod gemm_grouped;
mod gemm_mn_major;
mod gemm_portable;
mod gemm_small_m;
mod gemm_stream_k;
mod gemm_tcgen05;
mod gemm_tcgen05_forms;
#[cfg(feature = "cuda")]
mod graph;
#[cfg(feature = "cuda")]
mod graph_branch;
mod greedy;
mod groups;
mod kernels;
mod layouts;
mod loss;
mod ms_eden;
mod mx_tiles;
mod mxfp8;
mod norm;
mod optimizer;
mod peers_bugs;
mod permute_amax;
mod prologue;
mod ptq;
mod quantize;
mod quantize_plan;
mod repeated;
mod router;
mod scale_tiles;
mod scales_asked;
mod shapes;
mod shards;
mod tcgen05_model;
mod tcgen05_stages;
mod units;
mod unscaled;

#[cfg(all(feature = "cpu", feature = "cuda"))]
mod gemm_source;
#[cfg(all(feature = "cpu", feature = "cuda"))]
mod registry_source;
