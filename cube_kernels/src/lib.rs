//! CubeCL kernels for NVFP4 tensors, on any CubeCL runtime.
//!
//! [`nvfp4_formats`] defines the formats, the choices of rounding and scaling, and the reference
//! numerics on the host; every kernel is compared with it byte for byte. Features `cpu` and `cuda`
//! add the runtimes. The feature `proof` is for the tests and benchmarks of this crate: it adds
//! instances of all kernels for source tests, and names of private kernels.
//!
//! Data flows one way: matrix → `amax` → `quantize_*` → packed operand → `gemm` → matrix.

mod environment;

pub mod activation;
pub mod attention;
pub mod bring_up;
pub mod capabilities;
pub(crate) mod cube;
pub mod embedding;
#[cfg(feature = "cuda")]
pub mod foreign;
pub mod fp8;
pub mod gemm;
pub mod graph;
pub mod greedy;
#[cfg(feature = "cuda")]
pub mod kernel_cache;
pub(crate) mod launch;
pub mod loss;
pub(crate) mod memory;
pub mod moe;
pub mod norm;
pub mod optimizer;
#[cfg(feature = "proof")]
pub mod proof;
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
pub mod ptq;
pub mod quantize;
#[cfg(feature = "proof")]
pub mod registry;
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
pub(crate) mod sort;
pub mod tensor;
pub mod zeroed;

pub use cubecl;
pub(crate) use nvfp4_formats::{
    Amax, AmaxGranularity, AttentionParams, BLOCK, BlockPosition, BlockScaling, CrossEntropy,
    ErrorNorm, Format, Gap, Gaps, Hadamard, HadamardSize, KlDivergence, Layout, MX_BLOCK,
    Nvfp4Error, Origin, QuantParams, QuantRounding, QuantizedTensor, RandomStream, Reduction,
    Rounding, StoredForm, Usage, describe, format, policy, reference,
};

/// Returns the client of CubeCL's CPU runtime, for unit tests.
#[cfg(all(test, feature = "cpu"))]
fn cpu_client() -> cubecl::client::Client {
    nvfp4_test_support::cpu_runtime(|| cubecl::Device::Cpu(Default::default()).client())
}
