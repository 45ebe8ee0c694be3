//! NVFP4 tensors on the host: formats, and the reference numerics that every kernel matches.
//!
//! NVFP4 stores a tensor as 4-bit E2M1 codes, one E4M3 scale per block of 16 codes along the
//! contraction axis, and one `f32` maximum (`amax`) from which the global scale derives.
//!
//! - [`format`](mod@format) defines the bits: the codecs, and [`QuantizedTensor`], a packed matrix
//!   on the host.
//! - [`policy`] defines the choices: rounding, random bits, transform. [`QuantParams`] are those of
//!   one quantized tensor.
//! - [`reference`](mod@reference) computes everything on the CPU. It is the oracle against which
//!   every kernel of `nvfp4-kernels` is compared byte for byte, and CPU training runs on it.
//! - [`ptq`] quantizes the weights of trained models.

pub mod describe;
pub mod error;
pub mod format;
mod params;
pub mod policy;
pub mod ptq;
pub mod reference;

pub use error::Nvfp4Error;
pub use format::{
    block::{BLOCK, Format, MX_BLOCK},
    layout::{Layout, Usage},
    tensor::{Amax, Origin, QuantizedTensor},
};
pub use params::{EdenDraw, QuantParams, QuantRounding};
pub use policy::{
    AmaxGranularity, AttentionParams, BlockPosition, BlockScaling, BlockShape, ErrorNorm, Gap,
    Gaps, Hadamard, HadamardSize, RandomStream, Rounding, StoredForm,
};
pub use reference::{CrossEntropy, KlDivergence, Reduction};
