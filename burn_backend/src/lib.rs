//! NVFP4 training for [Burn](burn_core): a backend extension, and the linear layer built on it.
//!
//! - [`recipe`] says what to do: [`Nvfp4Recipe`], a Burn `Config`. No tensors.
//! - [`nn`] holds [`Nvfp4Linear`](nn::Nvfp4Linear), which stands in for `burn_nn::Linear`: the same
//!   parameters, ids and record layout.
//! - [`state`] is what a layer draws its random bits from, and [`Nvfp4State`], which saves and
//!   restores it with the model.
//! - [`functions`] are the same operations on plain tensors.
//! - [`ops`] is the extension trait, implemented by the Flex backend (pure Rust, on the oracle's
//!   arithmetic), the Cube backend (CubeCL kernels), `Fusion` and `Autodiff`.
//!
//! # Numerics
//!
//! A weight is `[d_in, d_out]`, as in Burn. With `Q` a quantization to NVFP4, blocks of 16 along the
//! contraction of the product at hand:
//!
//! | product | operands | rounding |
//! |---|---|---|
//! | `y = Q(x) Q(w)` | `x` in 1x16 blocks, `w` in 16x16 tiles | nearest |
//! | `dx = Q(dy) Q(w)ᵀ` | `dy` in 1x16 blocks, the row-wise copy of the same `Q(w)` | stochastic for `dy` |
//! | `dw = Q(H x)ᵀ Q(H dy)` | both in 16x1 blocks along the tokens, after the transform `H` | nearest for `x`, stochastic for `dy` |
//!
//! Between forward and backward only packed 4-bit tensors are kept: the column-wise copy of `x` if
//! `w` needs a gradient, the row-wise copy of `w` if `x` needs one. Products accumulate in `f32` and
//! round once to the output's type: `y` and `dx` have the type of `x`, `dw` that of `w`.

pub mod functions;
pub mod nn;
pub mod ops;
pub mod recipe;
pub mod state;

mod validate;

pub use functions::Nvfp4Tensor;
pub use nn::{Nvfp4Linear, Nvfp4LinearConfig};
pub use nvfp4_kernels::{Hadamard, Nvfp4Error, PackedAxis, RandomStream, Rounding};
pub use recipe::Nvfp4Recipe;
pub use state::{LayerRandomness, Nvfp4State};
