//! Recipes by name.

use nvfp4_formats::{BlockScaling, ErrorNorm, Nvfp4Error};

use super::quant::QuantSpec;
use super::{BackwardSource, DgradRecipe, FpropRecipe, Nvfp4Recipe, WgradRecipe};

const HIGH: QuantSpec = QuantSpec::HIGH_PRECISION;

/// Name and constructor of a recipe.
type Preset = (&'static str, fn() -> Nvfp4Recipe);

/// All presets, by name.
const PRESETS: [Preset; 12] = [
    ("nvidia", Nvfp4Recipe::nvidia),
    ("nvidia_4over6", Nvfp4Recipe::nvidia_4over6),
    ("nvidia_headroom", Nvfp4Recipe::nvidia_headroom),
    ("quartet2", Nvfp4Recipe::quartet2),
    ("per_token", Nvfp4Recipe::per_token),
    ("fwd_nvfp4_bwd_mxfp8", Nvfp4Recipe::fwd_nvfp4_bwd_mxfp8),
    (
        "fwd_nvfp4_bwd_mxfp8_dequantized",
        Nvfp4Recipe::fwd_nvfp4_bwd_mxfp8_dequantized,
    ),
    ("fwd_nvfp4_bwd_bf16", Nvfp4Recipe::fwd_nvfp4_bwd_bf16),
    ("weight_only_qat", Nvfp4Recipe::weight_only_qat),
    ("mxfp8", Nvfp4Recipe::mxfp8),
    ("mxfp4", Nvfp4Recipe::mxfp4),
    ("bf16", Nvfp4Recipe::bf16),
];

impl Nvfp4Recipe {
    /// Returns the names that [`preset`](Self::preset) accepts.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|(name, _)| *name)
    }

    /// Returns the preset called `name`.
    ///
    /// # Errors
    /// Returns an error if no preset has that name; the message lists the names.
    pub fn preset(name: &str) -> Result<Self, Nvfp4Error> {
        let found = PRESETS.iter().find(|(preset, _)| *preset == name);
        found.map(|(_, recipe)| recipe()).ok_or_else(|| {
            let names: Vec<&str> = Self::preset_names().collect();
            Nvfp4Error::value("recipe", name, names.join(", "))
        })
    }

    /// TransformerEngine's default recipe: activations in 1x16 blocks rounded to nearest, weights
    /// in 16x16 blocks, gradients rounded stochastically, and an RHT of size 16 on both operands of
    /// wgrad. This is the recipe of NVIDIA's pretraining report (arXiv 2509.25149).
    pub fn nvidia() -> Self {
        Self::new()
    }

    /// [`nvidia`](Self::nvidia) with four over six (arXiv 2512.02010) for operands rounded to
    /// nearest without a transform: `x` and `w` of fprop, and `w` of dgrad.
    pub fn nvidia_4over6() -> Self {
        let four = |operand: QuantSpec| operand.scale(BlockScaling::FourOverSix(ErrorNorm::Mae));
        let recipe = Self::new();
        Self {
            fprop: FpropRecipe {
                x: four(recipe.fprop.x),
                w: four(recipe.fprop.w),
            },
            dgrad: DgradRecipe {
                w: four(recipe.dgrad.w),
                ..recipe.dgrad
            },
            ..recipe
        }
    }

    /// [`nvidia`](Self::nvidia) with headroom in the block scales of the gradients, so that
    /// stochastic rounding is unbiased.
    pub fn nvidia_headroom() -> Self {
        let recipe = Self::new();
        let room = |operand: QuantSpec| operand.scale(BlockScaling::Headroom);
        Self {
            dgrad: DgradRecipe {
                dy: room(recipe.dgrad.dy),
                ..recipe.dgrad
            },
            wgrad: WgradRecipe {
                dy: room(recipe.wgrad.dy),
                ..recipe.wgrad
            },
            ..recipe
        }
    }

    /// Quartet II (arXiv 2601.22813): 1x16 blocks with four over six in the forward; MS-EDEN of
    /// gradients and of the dequantized forward operands in the backward.
    pub fn quartet2() -> Self {
        let forward = QuantSpec::NVFP4.scale(BlockScaling::FourOverSix(ErrorNorm::Mse));
        let eden = QuantSpec::MS_EDEN;
        Self {
            fprop: FpropRecipe {
                x: forward,
                w: forward,
            },
            dgrad: DgradRecipe { dy: eden, w: eden },
            wgrad: WgradRecipe { x: eden, dy: eden },
            source: BackwardSource::Forward,
            ..Self::new()
        }
    }

    /// [`nvidia`](Self::nvidia) with one amax per token of `x` and `dy`, so that the result of a
    /// token does not depend on its batch. In wgrad, whose K dimension is the tokens, there is one
    /// amax per feature. Based on TransformerEngine's pull request 3045.
    pub fn per_token() -> Self {
        let recipe = Self::new();
        Self {
            fprop: FpropRecipe {
                x: recipe.fprop.x.per_row(),
                ..recipe.fprop
            },
            dgrad: DgradRecipe {
                dy: recipe.dgrad.dy.per_row(),
                ..recipe.dgrad
            },
            wgrad: WgradRecipe {
                x: recipe.wgrad.x.per_row(),
                dy: recipe.wgrad.dy.per_row(),
            },
            ..recipe
        }
    }

    /// NVFP4 forward; MXFP8 backward from the original tensors.
    pub fn fwd_nvfp4_bwd_mxfp8() -> Self {
        let mx = QuantSpec::MXFP8;
        Self {
            dgrad: DgradRecipe { dy: mx, w: mx },
            wgrad: WgradRecipe { x: mx, dy: mx },
            ..Self::new()
        }
    }

    /// [`fwd_nvfp4_bwd_mxfp8`](Self::fwd_nvfp4_bwd_mxfp8) with the backward's `x` and `w` computed
    /// from the dequantized forward operands: only 4-bit tensors are saved between forward and
    /// backward.
    pub fn fwd_nvfp4_bwd_mxfp8_dequantized() -> Self {
        Self {
            source: BackwardSource::Forward,
            ..Self::fwd_nvfp4_bwd_mxfp8()
        }
    }

    /// Quantization-aware training: NVFP4 forward, and high-precision backward from the dequantized
    /// operands (straight-through estimator).
    pub fn fwd_nvfp4_bwd_bf16() -> Self {
        Self {
            dgrad: DgradRecipe { dy: HIGH, w: HIGH },
            wgrad: WgradRecipe { x: HIGH, dy: HIGH },
            source: BackwardSource::Forward,
            ..Self::new()
        }
    }

    /// Weight-only quantization-aware training: weights are rounded to the values of an NVFP4
    /// checkpoint. Everything else stays in high precision.
    pub fn weight_only_qat() -> Self {
        let recipe = Self::fwd_nvfp4_bwd_bf16();
        Self {
            fprop: FpropRecipe {
                x: HIGH,
                w: QuantSpec::NVFP4,
            },
            ..recipe
        }
    }

    /// MXFP8 for all operands: a baseline for NVFP4, in addition to bf16.
    pub fn mxfp8() -> Self {
        let mx = QuantSpec::MXFP8;
        Self {
            fprop: FpropRecipe { x: mx, w: mx },
            ..Self::fwd_nvfp4_bwd_mxfp8()
        }
    }

    /// MXFP4 for all operands, rounded to nearest: a baseline for NVFP4's smaller blocks and
    /// two-level scaling.
    pub fn mxfp4() -> Self {
        let mx = QuantSpec::MXFP4;
        Self {
            fprop: FpropRecipe { x: mx, w: mx },
            dgrad: DgradRecipe { dy: mx, w: mx },
            wgrad: WgradRecipe { x: mx, dy: mx },
            ..Self::new()
        }
    }

    /// No quantization: GEMMs in the dtype of the activations, by the same kernels.
    pub fn bf16() -> Self {
        Self {
            fprop: FpropRecipe { x: HIGH, w: HIGH },
            dgrad: DgradRecipe { dy: HIGH, w: HIGH },
            wgrad: WgradRecipe { x: HIGH, dy: HIGH },
            ..Self::new()
        }
    }
}
