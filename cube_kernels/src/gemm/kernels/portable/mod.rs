//! Kernels for any device, and for every shape and operand that the others refuse. Dispatch asks
//! them last. Both run on hardware: on CubeCL's CPU runtime (`scalar`) and on Hopper.
//!
//! - `cmma`: tiles dequantized in shared memory, for GPUs with 16x16x16 matrix instructions.
//! - `scalar`: one unit per output element, bit-identical to the reference.

pub(in crate::gemm) mod cmma;
pub(in crate::gemm) mod scalar;

pub use cmma::Cmma;
pub use scalar::Scalar;
