//! NVFP4 tensors: formats, host reference numerics, and the CubeCL kernels that match them.
//!
//! NVFP4 stores a tensor as 4-bit E2M1 codes, one E4M3 scale per block of 16 codes along the
//! contraction axis, and one `f32` maximum (`amax`) from which the global scale derives.
//!
//! - [`format`](mod@format) defines the bits: the two codecs, and [`QuantizedTensor`], a packed
//!   matrix on the host.
//! - [`policy`] defines the choices: rounding, random bits, transform.
//! - [`reference`](mod@reference) computes everything on the CPU, without CubeCL. It is the oracle
//!   against which every kernel is compared byte for byte, and CPU training runs on it.
//! - `quantize`, `gemm` and other modules (feature `cube`) launch the kernels, on any CubeCL
//!   runtime.
//!
//! Data flows one way: matrix → `amax` → `quantize_*` → packed operand → `gemm` → matrix.

pub mod describe;
#[cfg(feature = "cube")]
mod environment;
pub mod error;
pub mod format;
pub mod policy;
pub mod reference;

#[cfg(feature = "cube")]
pub mod activation;
#[cfg(feature = "cube")]
pub mod attention;
#[cfg(feature = "cube")]
pub mod capabilities;
#[cfg(feature = "cube")]
pub mod cube;
#[cfg(feature = "cube")]
pub mod embedding;
#[cfg(feature = "cuda")]
pub mod foreign;
#[cfg(feature = "cube")]
pub mod fp8;
#[cfg(feature = "cube")]
pub mod gemm;
#[cfg(feature = "cube")]
pub mod graph;
// `#[cube]` generates public items that cannot carry documentation.
#[cfg(feature = "cube")]
#[allow(missing_docs)]
pub mod greedy;
#[cfg(feature = "cuda")]
pub mod kernel_cache;
#[cfg(feature = "cube")]
pub(crate) mod launch;
#[cfg(feature = "cube")]
pub mod loss;
#[cfg(feature = "cube")]
pub(crate) mod memory;
#[cfg(feature = "cube")]
pub mod moe;
#[cfg(feature = "cube")]
pub mod norm;
#[cfg(feature = "cube")]
pub mod optimizer;
#[cfg(feature = "cube")]
pub mod quantize;
#[cfg(feature = "cube")]
#[doc(hidden)]
pub mod registry;
#[cfg(feature = "cube")]
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
pub(crate) mod sort;
#[cfg(feature = "cube")]
pub mod tensor;
#[cfg(feature = "cube")]
pub mod zeroed;

#[cfg(feature = "cube")]
pub use cubecl;
pub use error::Nvfp4Error;
pub use format::{
    block::{BLOCK, Format, MX_BLOCK},
    layout::{Layout, Usage},
    tensor::{Amax, Origin, QuantizedTensor},
};
pub use policy::{
    AmaxGranularity, AttentionParams, BlockPosition, BlockScaling, BlockShape, ErrorNorm, Gap,
    Gaps, Hadamard, HadamardSize, Nvfp4Params, RandomStream, Rounding, ScaleLayout, Storage,
    StoredForm,
};
pub use reference::{CrossEntropy, KlDivergence, Reduction};
