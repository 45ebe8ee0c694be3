//! Quantization recipes: which operands are quantized, and by which rules.

mod phases;
mod policy;
mod presets;
mod quant;
mod schedule;

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::ParamGroup;
use nvfp4_formats::{Hadamard, HadamardSize, Nvfp4Error, RandomStream};
use serde::{Deserialize, Serialize};

use crate::ops::LinearSpec;
use crate::rng::{
    ROLE_DGRAD, ROLE_DGRAD_SIGNS, ROLE_DGRAD_W, ROLE_FPROP_W, ROLE_FPROP_X, ROLE_WGRAD,
    ROLE_WGRAD_SIGNS, ROLE_WGRAD_X, RngState, stream as stream_id,
};
use quant::{Draw, GemmOperands};

pub use crate::ops::{AmaxGranularity, BackwardSource, BlockShape};
pub use nvfp4_formats::{BlockScaling, ErrorNorm};
pub use phases::{NamedPhase, NamedSchedule, RecipePhase, RecipeSchedule};
pub use policy::LayerPolicy;
pub use quant::{OperandFormat, QuantSpec, RoundingMode};
pub use schedule::{Healing, LayerMode};

/// Operands of the fprop GEMM, `y = x w`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FpropRecipe {
    /// Input, quantized along its features.
    pub x: QuantSpec,
    /// Weight, quantized along its input features.
    pub w: QuantSpec,
}

/// Operands of the dgrad GEMM, `dx = dy wᵀ`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DgradRecipe {
    /// Output gradient, quantized along its features.
    pub dy: QuantSpec,
    /// Weight, quantized along its output features.
    pub w: QuantSpec,
}

/// Operands of the wgrad GEMM, `dw = xᵀ dy`, both quantized along the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WgradRecipe {
    /// Input.
    pub x: QuantSpec,
    /// Output gradient.
    pub dy: QuantSpec,
}

/// Quantization recipe of a training run: the quantization of each operand of each GEMM, the layers
/// in high precision, and the step at which quantization stops.
///
/// The defaults are the published NVFP4 pretraining recipe ([`nvidia`](Self::nvidia)); other
/// recipes are available by name ([`preset`](Self::preset)). The recipe is a Burn [`Config`], which
/// is saved and loaded as JSON. Pass it to [`Nvfp4LinearConfig`](crate::Nvfp4LinearConfig), and
/// call [`apply`](Self::apply) on the finished model to select the high-precision layers.
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
    /// Forward GEMM.
    #[config(default = "FpropRecipe { x: QuantSpec::NVFP4, w: QuantSpec::NVFP4_2D }")]
    pub fprop: FpropRecipe,
    /// Input-gradient GEMM.
    #[config(
        default = "DgradRecipe { dy: QuantSpec::NVFP4.stochastic(), w: QuantSpec::NVFP4_2D }"
    )]
    pub dgrad: DgradRecipe,
    /// Weight-gradient GEMM.
    #[config(default = "WgradRecipe { \
                   x: QuantSpec::NVFP4.rht(16), dy: QuantSpec::NVFP4.rht(16).stochastic() }")]
    pub wgrad: WgradRecipe,
    /// Source of the backward's `x` and `w`: the original tensors of the forward, or its
    /// dequantized operands.
    #[config(default = "BackwardSource::Original")]
    pub source: BackwardSource,
    /// Seed of all random bits of the model. Layers, and the operands of a layer, draw from
    /// separate streams that never share bits.
    #[config(default = 0)]
    pub seed: u64,
    /// Signs of the RHT: a set bit `i` negates element `i` of every 16 elements, also in larger
    /// transforms. The default is TransformerEngine's.
    #[config(default = 0xD7E8)]
    pub rht_signs: u16,
    /// True to draw all signs of the RHT from the seed instead of `rht_signs`.
    #[config(default = false)]
    pub rht_seeded: bool,
    /// Layers that stay in high precision, selected by weight: path (`"path.to.layer.weight"`) or
    /// parameter id. Their GEMMs run in the dtype of the input. Takes effect on
    /// [`apply`](Self::apply).
    pub high_precision: Option<ParamGroup>,
    /// Layers that stay in high precision by their position in the model, in addition to
    /// `high_precision`.
    #[config(default = "LayerPolicy::None")]
    pub layers: LayerPolicy,
    /// High precision for the end of the run: short for a [`schedule`](Self::schedule), which the
    /// training loop [applies](RecipeSchedule::apply).
    pub healing: Option<Healing>,
    /// True to quantize a weight once for all forwards between two changes of it, such as the
    /// micro-batches of gradient accumulation or the batches of a validation. Costs the memory of
    /// the quantized weights between steps.
    #[config(default = true)]
    pub cache_weights: bool,
}

impl Default for Nvfp4Recipe {
    fn default() -> Self {
        Self::new()
    }
}

/// Compares all settings; compares groups by their debug output, because [`ParamGroup`] does not
/// implement equality.
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
    /// Enables or disables the RHT of size 16 on both operands of wgrad.
    pub fn with_rht(mut self, rht: bool) -> Self {
        for operand in [&mut self.wgrad.x, &mut self.wgrad.dy] {
            *operand = operand.map(|spec| spec.rht = rht.then_some(16));
        }
        self
    }

    /// Selects stochastic rounding or rounding to nearest for the output gradient, in both GEMMs.
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

    /// Selects 16x16 blocks for weights, so that fprop and dgrad use the same quantized weight, or
    /// separate 1x16 blocks for each of the two quantized tensors.
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

    /// Checks that every GEMM has a kernel and every number is in its range.
    ///
    /// # Errors
    /// Returns an error that names the GEMM, the operand, and the reason why the combination is not
    /// supported.
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

    /// Returns the operands of the three GEMMs: `x` and `w` of fprop, `dy` and `w` of dgrad, `x`
    /// and `dy` of wgrad.
    pub fn operands(&self) -> [QuantSpec; 6] {
        let Self {
            fprop,
            dgrad,
            wgrad,
            ..
        } = self;
        [fprop.x, fprop.w, dgrad.dy, dgrad.w, wgrad.x, wgrad.dy]
    }

    /// Reads a recipe from a JSON object with any of its fields. Missing fields are those of
    /// [`new`](Self::new). (`Config::load` of Burn needs all fields, and ignores unknown ones.)
    ///
    /// # Errors
    /// Returns an error if the text is no JSON object, a field is unknown, or a value is invalid.
    pub fn from_json(json: &str) -> Result<Self, Nvfp4Error> {
        let invalid = |error: serde_json::Error| {
            Nvfp4Error::value("recipe", error.to_string(), "a JSON object of its fields")
        };
        let given: serde_json::Map<_, _> = serde_json::from_str(json).map_err(invalid)?;
        let mut fields = serde_json::to_value(Self::new()).map_err(invalid)?;
        for (name, value) in given {
            let Some(field) = fields.get_mut(&name) else {
                let fields = fields.as_object().into_iter().flatten();
                let names: Vec<&str> = fields.map(|(name, _)| name.as_str()).collect();
                return Err(Nvfp4Error::value(
                    "recipe",
                    format!("the field {name}"),
                    format!("the fields {}", names.join(", ")),
                ));
            };
            *field = value;
        }
        serde_json::from_value(fields).map_err(invalid)
    }

    /// Returns true if any operand is quantized.
    pub fn is_quantized(&self) -> bool {
        self.operands().iter().any(QuantSpec::is_quantized)
    }

    /// Resolves the operands of a layer's GEMMs, with the random draws of `rng_state`.
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
                    // Both operands of a GEMM draw the same signs; each step draws different ones.
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
            // No preset draws random bits in the forward; a custom recipe can.
            fprop_x: fprop.x.resolve(draw(ROLE_FPROP_X, ROLE_DGRAD_SIGNS)),
            fprop_w: fprop.w.resolve(draw(ROLE_FPROP_W, ROLE_DGRAD_SIGNS)),
            dgrad_dy: dgrad.dy.resolve(draw(ROLE_DGRAD, ROLE_DGRAD_SIGNS)),
            dgrad_w: dgrad.w.resolve(draw(ROLE_DGRAD_W, ROLE_DGRAD_SIGNS)),
            wgrad_x: wgrad.x.resolve(draw(ROLE_WGRAD_X, ROLE_WGRAD_SIGNS)),
            wgrad_dy: wgrad.dy.resolve(draw(ROLE_WGRAD, ROLE_WGRAD_SIGNS)),
            source: *source,
        }
    }

    /// Returns the transform of wgrad. It is the same for all layers, steps and ranks.
    fn transform(&self, size: HadamardSize, rng_state: &RngState) -> Hadamard {
        if self.rht_seeded {
            return Hadamard::seeded_with_size(size, rng_state.seed);
        }
        let signs = u64::from(rng_state.rht_signs) * 0x0001_0001_0001_0001;
        Hadamard::new(size, [signs, signs])
    }
}

/// Returns the patterns of `group`. Burn has no accessor for them, but its `Debug` form quotes them.
pub(crate) fn patterns(group: &ParamGroup) -> String {
    let text = format!("{group:?}");
    let patterns: Vec<String> = (text.split('"').skip(1).step_by(2))
        .map(|pattern| format!("`{pattern}`"))
        .collect();
    match patterns[..] {
        [] => "a group of parameters".to_owned(),
        _ => patterns.join(", "),
    }
}
