//! NVFP4 training for [Burn](burn) models.
//!
//! NVFP4 stores a tensor as 4-bit floating-point numbers with an 8-bit scale per block of 16 and
//! one global scale. This crate trains with it: the forward and backward GEMMs of linear layers
//! take NVFP4 operands, while master weights and optimizer state stay in f32.
//!
//! The crate is a facade:
//!
//! - at its root, everything of [`burn_nvfp4`]: [`Nvfp4Linear`], which replaces Burn's `Linear`,
//!   [`nn`], which replaces `burn::nn`, and [`Nvfp4Recipe`], which configures the quantization;
//! - [`formats`], the formats and the reference numerics on the host;
//! - `kernels` (features `cpu` and `cuda`), the CubeCL kernels, for use without Burn.
//!
//! The command `nvfp4` is in the crate `nvfp4-cli`, and the language model that it trains in the
//! crate `nvfp4-lm`. Neither is a dependency of this crate.
//!
//! # Example
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Tensor};
//! use nvfp4::{Nvfp4LinearConfig, Nvfp4Recipe};
//!
//! let device = Device::flex().autodiff();
//! let layer = Nvfp4LinearConfig::new(64, 32).with_recipe(Nvfp4Recipe::new()).init(&device);
//! let x = Tensor::<2>::ones([8, 64], &device);
//! let gradients = layer.forward(x).sum().backward();
//! assert!(layer.weight.val().grad(&gradients).is_some());
//! # }
//! ```
//!
//! # Features
//!
//! `flex` (default) runs on Burn's pure-Rust CPU backend, `cpu` on CubeCL's CPU runtime, `cuda` on
//! NVIDIA GPUs. All can be enabled at once; the device is chosen at run time. `train` adds
//! telemetry as metrics of burn-train.

pub use burn_nvfp4::*;

/// Formats and reference numerics on the host; independent of Burn and CubeCL.
pub use nvfp4_formats as formats;
/// CubeCL kernels; independent of Burn.
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use nvfp4_kernels as kernels;

/// Compiles and runs the examples of the book; those of the decorator only on a Cube device.
/// Examples with burn-train are in `train_tests`.
#[cfg(all(doctest, feature = "flex"))]
mod book {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/src/quick-start.md")]
    struct QuickStart;
    #[doc = include_str!("../docs/src/coming-from.md")]
    struct ComingFrom;
    #[doc = include_str!("../docs/src/recipes.md")]
    struct Recipes;
    #[doc = include_str!("../docs/src/own-model.md")]
    struct OwnModel;
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[doc = include_str!("../docs/src/decorator.md")]
    struct Decorator;
    #[doc = include_str!("../docs/src/contributing/recipe.md")]
    struct AddARecipe;
}
