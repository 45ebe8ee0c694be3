//! NVFP4 training for [Burn](burn_core): a backend extension, and the layers built on it.
//!
//! - [`recipe`] configures quantization: [`Nvfp4Recipe`], a Burn `Config`. It contains no tensors.
//! - [`nn`] contains [`Nvfp4Linear`], which replaces `burn_nn::Linear` (same parameters, ids and
//!   record layout), [`Nvfp4GroupedLinear`] for experts, and the modules built on them: attention,
//!   feed-forwards, [`Nvfp4Moe`], a transformer block. It has the names of `burn_nn`, to replace
//!   its imports.
//! - [`state`] contains the RNG state of a layer, and [`Nvfp4State`], which saves and restores it
//!   with the model.
//! - [`attention`](mod@attention) is attention on plain tensors, for models without NVFP4 too.
//! - [`functions`] are these operations on plain tensors, and [`experts`] those on tokens sorted by
//!   expert.
//! - [`loss`] contains the cross entropy, with or without the output head, and embeddings.
//! - [`decorate`](mod@decorate) routes the linear layers of unmodified models. It needs the feature
//!   `cpu` or `cuda`.
//! - [`quantize`](mod@quantize) packs the linear weights of a model for inference.
//! - `checkpoint` (feature `train`) adds that state to the checkpoints of burn-train.
//! - [`parallel`] trains on several ranks: data parallelism, FSDP and differentiable collectives.
//!
//! All of it runs on the Flex backend (pure Rust, with the arithmetic of the oracle) and on the Cube
//! backend (CubeCL kernels).
//!
//! ```
//! # use burn_core as burn;
//! use burn::module::Module;
//! use burn::tensor::{Device, Distribution, Tensor, activation::relu};
//! use burn_nvfp4::{Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe};
//!
//! #[derive(Module, Debug)]
//! struct Mlp {
//!     up: Nvfp4Linear,
//!     down: Nvfp4Linear,
//! }
//!
//! # #[cfg(feature = "flex")] {
//! let device = Device::flex().autodiff();
//! let recipe = Nvfp4Recipe::new().with_seed(7);
//! let linear = |d_in, d_out| {
//!     Nvfp4LinearConfig::new(d_in, d_out).with_recipe(recipe.clone()).init(&device)
//! };
//! let model = Mlp { up: linear(32, 64), down: linear(64, 16) };
//!
//! let x = Tensor::<3>::random([2, 8, 32], Distribution::Normal(0.0, 1.0), &device);
//! let y = model.down.forward(relu(model.up.forward(x)));
//! assert_eq!(y.dims(), [2, 8, 16]);
//! let gradients = y.sum().backward();
//! assert_eq!(model.up.weight.grad(&gradients).unwrap().dims(), [32, 64]);
//! # }
//! ```
//!
//! # Numerics
//!
//! A weight is `[d_in, d_out]`, as in Burn. `Q` is the quantization to NVFP4, in blocks of 16 along
//! the K dimension of the GEMM:
//!
//! | GEMM | operands | rounding |
//! |---|---|---|
//! | `y = Q(x) Q(w)` | `x` in 1x16 blocks, `w` in 16x16 tiles | nearest |
//! | `dx = Q(dy) Q(w)ᵀ` | `dy` in 1x16 blocks, the same `Q(w)` row-wise | stochastic for `dy` |
//! | `dw = Q(H x)ᵀ Q(H dy)` | both in 16x1 blocks along the tokens | stochastic for `dy` |
//!
//! `H` is the random Hadamard transform along the tokens. In the last row `x` is rounded to
//! nearest.
//!
//! Between forward and backward only packed 4-bit tensors are saved: the column-wise quantized `x`
//! if `w` needs a gradient, and the row-wise quantized `w` if `x` needs one. GEMMs accumulate in
//! `f32` and round once to the dtype of the output: `y` and `dx` have the dtype of `x`, `dw` that
//! of `w`. The gradient of a bias is the `f32` sum of `dy`, in the dtype of the bias.

pub mod attention;
#[cfg(feature = "train")]
pub mod checkpoint;
pub mod decode;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod decorate;
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
#[path = "decorate_missing.rs"]
pub mod decorate;
pub mod experts;
pub mod functions;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub mod graph;
pub mod loss;
pub mod nn;
#[doc(hidden)]
pub mod ops;
pub mod optim;
pub mod parallel;
pub mod quantize;
pub mod recipe;
pub mod state;
pub mod telemetry;

mod layers;
mod parameterless;
mod rng;
mod survey;
mod validate;
mod whole;

pub use decorate::{Decorator, Nvfp4Report, decorate};
pub use experts::ExpertOffsets;
pub use functions::Nvfp4Tensor;
pub use nn::{
    Nvfp4Attention, Nvfp4AttentionConfig, Nvfp4FeedForward, Nvfp4GroupedLinear,
    Nvfp4GroupedLinearConfig, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Moe, Nvfp4MoeConfig,
    Nvfp4SwiGlu, Nvfp4SwiGluConfig, Nvfp4TransformerBlock, Nvfp4TransformerBlockConfig,
};
pub use nvfp4_formats::{Hadamard, Nvfp4Error, RandomStream, Rounding, Usage};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use ops::device_matrix;
pub use quantize::{QuantizeConfig, QuantizeReport, quantize, quantize_calibrated};
pub use recipe::{LayerMode, Nvfp4Recipe};
pub use state::{Nvfp4State, RngState, set_mode};
