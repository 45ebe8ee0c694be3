//! Kernels for any device, and for every shape and operand that the others refuse. Dispatch asks
//! them last. Both run on hardware: on CubeCL's CPU runtime (`scalar`) and on Hopper.
//!
//! - `cmma`: tiles dequantized in shared memory, for GPUs with 16x16x16 matrix instructions.
//! - `scalar`: one unit per output element, bit-identical to the reference.

mod cmma;
mod scalar;

pub(crate) use cmma::Cmma;
pub use cmma::{CmmaPlan, UNITS as CMMA_UNITS, cmma_kernel};
pub(crate) use scalar::Scalar;
pub use scalar::{ScalarPlan, scalar_grouped_kernel, scalar_kernel};
