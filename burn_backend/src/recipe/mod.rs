//! Recipes: which operands are quantized, and how.

mod policy;
mod presets;
mod quant;
mod schedule;

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::ParamGroup;
use nvfp4_kernels::{Hadamard, HadamardSize, Nvfp4Error, RandomStream};
use serde::{Deserialize, Serialize};

use crate::ops::LinearSpec;
use crate::rng::{
    ROLE_DGRAD, ROLE_DGRAD_SIGNS, ROLE_DGRAD_W, ROLE_FPROP_W, ROLE_FPROP_X, ROLE_WGRAD,
    ROLE_WGRAD_SIGNS, ROLE_WGRAD_X, RngState, stream as stream_id,
};
use quant::{Draw, GemmOperands};

pub use crate::ops::{AmaxGranularity, BackwardSource, BlockShape};
pub use nvfp4_kernels::{BlockScaling, ErrorNorm};
pub use policy::LayerPolicy;
pub use quant::{OperandFormat, QuantSpec, RoundingMode};
pub use schedule::{Healing, LayerMode};

/// The operands of `y = x w`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FpropRecipe {
    /// The input, along its features.
    pub x: QuantSpec,
    /// The weight, along its input features.
    pub w: QuantSpec,
}

/// The operands of `dx = dy wᵀ`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DgradRecipe {
    /// The output's gradient, along its features.
    pub dy: QuantSpec,
    /// The weight, along its output features.
    pub w: QuantSpec,
}

/// The operands of `dw = xᵀ dy`, both along the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WgradRecipe {
    /// The input.
    pub x: QuantSpec,
    /// The output's gradient.
    pub dy: QuantSpec,
}

/// The recipe of a run: how each operand of each GEMM is quantized, the layers in high precision,
/// and when to stop quantizing.
///
/// The defaults are the published NVFP4 pretraining recipe ([`nvidia`](Self::nvidia)); others have
/// names ([`preset`](Self::preset)). It is a Burn [`Config`], so it is saved and loaded as JSON.
/// Give it to [`Nvfp4LinearConfig`](crate::Nvfp4LinearConfig), and [`apply`](Self::apply) it to the
/// finished model to place the high-precision layers.
///
/// ```
/// use burn_nvfp4::Nvfp4Recipe;
/// use burn_nvfp4::recipe::{BlockScaling, ErrorNorm, Healing};
///
/// let mut recipe = Nvfp4Recipe::preset("nvidia")?
///     .with_seed(7)
///     .with_healing(Some(Healing { at_fraction: 0.9, forward_only: true }));
/// recipe.fprop.x = recipe.fprop.x.scale(BlockScaling::FourOverSix(ErrorNorm::Mae));
/// recipe.check()?;
/// # Ok::<(), burn_nvfp4::Nvfp4Error>(())
/// ```
#[derive(Config, Debug)]
pub struct Nvfp4Recipe {
    /// The forward GEMM.
    #[config(default = "FpropRecipe { x: QuantSpec::NVFP4, w: QuantSpec::NVFP4_2D }")]
    pub fprop: FpropRecipe,
    /// The gradient of the input.
    #[config(
        default = "DgradRecipe { dy: QuantSpec::NVFP4.stochastic(), w: QuantSpec::NVFP4_2D }"
    )]
    pub dgrad: DgradRecipe,
    /// The gradient of the weight.
    #[config(default = "WgradRecipe { \
                   x: QuantSpec::NVFP4.rht(16), dy: QuantSpec::NVFP4.rht(16).stochastic() }")]
    pub wgrad: WgradRecipe,
    /// True if the backward's `x` and `w` are quantized from the forward's tensors, or from its
    /// dequantized operands.
    #[config(default = "BackwardSource::Original")]
    pub source: BackwardSource,
    /// Seed of all random bits, for the whole model. Layers, and the operands of a layer, draw from
    /// streams of it that never share bits.
    #[config(default = 0)]
    pub seed: u64,
    /// Signs of the transform: bit `i` set negates element `i` of each 16 (of a larger transform,
    /// element `i` of each 16 of it). The default is TransformerEngine's.
    #[config(default = 0xD7E8)]
    pub rht_signs: u16,
    /// Draw all signs of the transform from the seed instead of `rht_signs`.
    #[config(default = false)]
    pub rht_seeded: bool,
    /// Layers that stay in high precision: those whose weight (`"path.to.layer.weight"`, or its
    /// id) is in the group. They multiply in the type of their input. It takes effect with
    /// [`apply`](Self::apply).
    pub high_precision: Option<ParamGroup>,
    /// Layers that stay in high precision by their place in the model, besides `high_precision`.
    #[config(default = "LayerPolicy::None")]
    pub layers: LayerPolicy,
    /// When to stop quantizing. The training loop calls [`Healing::mode`] and
    /// [`set_mode`](crate::set_mode).
    pub healing: Option<Healing>,
    /// Quantize a weight once for all forwards between two changes of it: the micro-batches of
    /// gradient accumulation, the batches of a validation. Costs the memory of the quantized
    /// weights between steps.
    #[config(default = true)]
    pub cache_weights: bool,
}

impl Default for Nvfp4Recipe {
    fn default() -> Self {
        Self::new()
    }
}

/// Two recipes are equal when all their settings are, and when their groups print alike: a
/// [`ParamGroup`] has no equality of its own.
impl PartialEq for Nvfp4Recipe {
    fn eq(&self, other: &Self) -> bool {
        let Self {
            fprop,
            dgrad,
            wgrad,
            source,
            seed,
            rht_signs,
            rht_seeded,
            high_precision,
            layers,
            healing,
            cache_weights,
        } = self;
        *fprop == other.fprop
            && *dgrad == other.dgrad
            && *wgrad == other.wgrad
            && *source == other.source
            && *seed == other.seed
            && *rht_signs == other.rht_signs
            && *rht_seeded == other.rht_seeded
            && format!("{high_precision:?}") == format!("{:?}", other.high_precision)
            && *layers == other.layers
            && *healing == other.healing
            && *cache_weights == other.cache_weights
    }
}

impl Nvfp4Recipe {
    /// Both operands of wgrad after the transform of 16, or neither.
    pub fn with_rht(mut self, rht: bool) -> Self {
        for operand in [&mut self.wgrad.x, &mut self.wgrad.dy] {
            *operand = operand.map(|spec| spec.rht = rht.then_some(16));
        }
        self
    }

    /// The output's gradient rounded stochastically, or to nearest, in both GEMMs.
    pub fn with_stochastic_rounding(mut self, stochastic: bool) -> Self {
        let rounding = if stochastic {
            RoundingMode::Stochastic
        } else {
            RoundingMode::Nearest
        };
        for operand in [&mut self.dgrad.dy, &mut self.wgrad.dy] {
            *operand = operand.map(|spec| spec.rounding = rounding);
        }
        self
    }

    /// Weights in 16x16 blocks, so that forward and dgrad use the same quantized weight; otherwise
    /// each of the two quantized tensors has its own 1x16 blocks.
    pub fn with_weight_2d(mut self, is_2d: bool) -> Self {
        let block = match is_2d {
            true => BlockShape::Block2d,
            false => BlockShape::Block1d,
        };
        for operand in [&mut self.fprop.w, &mut self.dgrad.w] {
            *operand = operand.map(|spec| spec.block = block);
        }
        self
    }

    /// Fails unless every GEMM has a kernel and every number is in its range.
    ///
    /// # Errors
    /// Naming the GEMM, the operand, and why the combination is not offered.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        let Self {
            fprop,
            dgrad,
            wgrad,
            ..
        } = self;
        let gemms = [
            ("fprop", [("x", fprop.x), ("w", fprop.w)]),
            ("dgrad", [("dy", dgrad.dy), ("w", dgrad.w)]),
            ("wgrad", [("x", wgrad.x), ("dy", wgrad.dy)]),
        ];
        for (gemm, operands) in gemms {
            GemmOperands { gemm, operands }.check()?;
        }
        self.layers.check()?;
        self.healing.iter().try_for_each(Healing::check)
    }

    /// The operands of the three GEMMs: fprop's `x` and `w`, dgrad's `dy` and `w`, wgrad's `x` and
    /// `dy`.
    pub fn operands(&self) -> [QuantSpec; 6] {
        let Self {
            fprop,
            dgrad,
            wgrad,
            ..
        } = self;
        [fprop.x, fprop.w, dgrad.dy, dgrad.w, wgrad.x, wgrad.dy]
    }

    /// Returns true if any operand is quantized.
    pub fn is_quantized(&self) -> bool {
        self.operands().iter().any(QuantSpec::is_quantized)
    }

    /// The operands of a layer's GEMMs, resolved with the draws of `rng_state`.
    pub fn spec(&self, rng_state: &RngState) -> LinearSpec {
        let stream = |role: u64| {
            let RngState {
                seed,
                layer,
                offset,
                ..
            } = *rng_state;
            RandomStream::new(seed, stream_id(layer, role), offset)
        };
        let draw = |role: u64, signs: u64| {
            move |size: Option<HadamardSize>| {
                let [low, high] = stream(signs).key();
                let signs = u64::from(low) | u64::from(high) << 32;
                Draw {
                    stream: stream(role),
                    transform: self.transform(size.unwrap_or(HadamardSize::H16), rng_state),
                    // Both operands of a GEMM draw the same signs, each step its own.
                    signs: signs.wrapping_add(rng_state.offset.wrapping_mul(Hadamard::SEED_STEP)),
                }
            }
        };
        let Self {
            fprop,
            dgrad,
            wgrad,
            source,
            ..
        } = self;
        LinearSpec {
            // No preset draws in the forward; a recipe may.
            fprop_x: fprop.x.resolve(draw(ROLE_FPROP_X, ROLE_DGRAD_SIGNS)),
            fprop_w: fprop.w.resolve(draw(ROLE_FPROP_W, ROLE_DGRAD_SIGNS)),
            dgrad_dy: dgrad.dy.resolve(draw(ROLE_DGRAD, ROLE_DGRAD_SIGNS)),
            dgrad_w: dgrad.w.resolve(draw(ROLE_DGRAD_W, ROLE_DGRAD_SIGNS)),
            wgrad_x: wgrad.x.resolve(draw(ROLE_WGRAD_X, ROLE_WGRAD_SIGNS)),
            wgrad_dy: wgrad.dy.resolve(draw(ROLE_WGRAD, ROLE_WGRAD_SIGNS)),
            source: *source,
        }
    }

    /// The transform of wgrad. It is the same for all layers and steps, and on all ranks.
    fn transform(&self, size: HadamardSize, rng_state: &RngState) -> Hadamard {
        if self.rht_seeded {
            return Hadamard::seeded_with_size(size, rng_state.seed);
        }
        let signs = u64::from(rng_state.rht_signs) * 0x0001_0001_0001_0001;
        Hadamard::new(size, [signs, signs])
    }
}
