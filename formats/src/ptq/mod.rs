//! Post-training quantization of weights: arithmetic of other tools, block scales by search, GPTQ.
//!
//! - [`GlobalScale`]: a global scale in the convention of a checkpoint format.
//! - [`Rule`]: quantization arithmetic of ModelOpt, compressed-tensors and TransformerEngine.
//! - [`BlockQuantizer`]: selects the scale byte of one block: by its amax, four over six, or search.
//! - [`gptq()`]: compensates rounding errors in later columns; [`linalg`] has its factorizations.
//! - [`values`]: decodes and dequantizes weights, and measures errors.
//!
//! Kernels that quantize weights must match these functions byte for byte.

mod global_scale;
pub mod gptq;
pub mod linalg;
mod rule;
mod search;
pub mod values;

pub use global_scale::{GlobalScale, MIN_FACTOR, RANGE};
pub use gptq::{InverseFactor, gptq};
pub use rule::{Rule, block_amax, nearest};
pub use search::{BlockQuantizer, ScaleChoice, round_rows};
