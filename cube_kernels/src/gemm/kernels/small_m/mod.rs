//! The GEMM for 1 to 16 rows of `a` and a packed `b` (decoding), on every GPU from sm_80 on. It runs
//! on H100 and H200. Dispatch asks it before the kernels of an architecture, and
//! [`fused_linear`](crate::gemm::fused_linear()) calls it with a norm and SwiGLU.
//!
//! - `kernel`: the kernels, without and with RMSNorm.
//! - `launch`: requirements, choice and launch.
//! - `shape`: specializations.
//! - `mainloop`, `output`: the work of a warp; the epilogue.

pub(in crate::gemm) mod kernel;
pub(in crate::gemm) mod launch;
mod mainloop;
mod output;
pub(in crate::gemm) mod shape;

pub use launch::SmallM;
pub(crate) use launch::{Left, NormLeft, SmallMLaunch, queue, refuses_norm};
