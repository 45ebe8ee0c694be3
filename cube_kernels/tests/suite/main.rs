//! Tests of the formats, the oracle and the kernels.
//!
//! `NVFP4_TEST_DEVICE` selects the device that kernels run on: `cpu` (CubeCL's CPU runtime, the
//! default) or `cuda`. The modules `*_source` need no device: they compile the kernels' CUDA
//! source.

#[macro_use]
mod support;

mod accuracy;
mod golden;
mod oracle;
mod stochastic;

#[cfg(feature = "cube")]
mod attention;
#[cfg(feature = "cube")]
mod cutlass;
#[cfg(feature = "cube")]
mod dequantize;
#[cfg(feature = "cube")]
mod embedding;
#[cfg(feature = "cube")]
mod emulated;
#[cfg(feature = "cube")]
mod fp8;
#[cfg(feature = "cube")]
mod gemm;
#[cfg(feature = "cube")]
mod gemm_cublaslt;
#[cfg(feature = "cube")]
mod gemm_fused;
#[cfg(feature = "cube")]
mod gemm_grouped;
#[cfg(feature = "cube")]
mod gemm_mn_major;
#[cfg(feature = "cube")]
mod gemm_portable;
#[cfg(feature = "cube")]
mod gemm_small_m;
#[cfg(feature = "cube")]
mod gemm_stream_k;
#[cfg(feature = "cube")]
mod gemm_tcgen05;
#[cfg(feature = "cube")]
mod gemm_tcgen05_forms;
#[cfg(feature = "cuda")]
mod graph;
#[cfg(feature = "cuda")]
mod graph_branch;
#[cfg(feature = "cube")]
mod greedy;
#[cfg(feature = "cube")]
mod groups;
#[cfg(feature = "cube")]
mod kernels;
#[cfg(feature = "cube")]
mod layouts;
#[cfg(feature = "cube")]
mod loss;
#[cfg(feature = "cube")]
mod ms_eden;
#[cfg(feature = "cube")]
mod mx_tiles;
#[cfg(feature = "cube")]
mod mxfp8;
#[cfg(feature = "cube")]
mod norm;
#[cfg(feature = "cube")]
mod optimizer;
#[cfg(feature = "cube")]
mod peers_bugs;
#[cfg(feature = "cube")]
mod prologue;
#[cfg(feature = "cube")]
mod quantize;
#[cfg(feature = "cube")]
mod quantize_plan;
#[cfg(feature = "cube")]
mod repeated;
#[cfg(feature = "cube")]
mod router;
#[cfg(feature = "cube")]
mod scale_tiles;
#[cfg(feature = "cube")]
mod scales_asked;
#[cfg(feature = "cube")]
mod shapes;
#[cfg(feature = "cube")]
mod shards;
#[cfg(feature = "cube")]
mod tcgen05_model;
#[cfg(feature = "cube")]
mod tcgen05_stages;
#[cfg(feature = "cube")]
mod units;
#[cfg(feature = "cube")]
mod unscaled;

#[cfg(all(feature = "cpu", feature = "cuda"))]
mod gemm_source;
#[cfg(all(feature = "cpu", feature = "cuda"))]
mod registry_source;
