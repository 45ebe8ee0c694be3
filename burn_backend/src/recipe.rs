//! What to quantize, and how.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::{Module, ParamGroup};
use nvfp4_kernels::{Hadamard, Nvfp4Error, RandomStream, Rounding};

use crate::ops::LinearSpec;
use crate::state::{self, LayerRandomness};

/// The recipe of a run: which parts of NVFP4 training are on, and which layers it leaves alone.
///
/// The defaults are the published NVFP4 pretraining recipe: a random Hadamard transform of both
/// wgrad operands, stochastic rounding of the output's gradient, weights scaled in 16x16 tiles.
/// It is a Burn [`Config`], so it is saved and loaded as JSON. Give it to
/// [`Nvfp4LinearConfig`](crate::Nvfp4LinearConfig), and [`apply`](Self::apply) it to the finished
/// model to place the high-precision layers.
#[derive(Config, Debug)]
pub struct Nvfp4Recipe {
    /// Rotate both operands of wgrad by the random Hadamard transform along the tokens, which
    /// spreads outliers over their block.
    #[config(default = true)]
    pub rht: bool,
    /// Round the output's gradient stochastically, so that its quantization is unbiased; otherwise
    /// to nearest.
    #[config(default = true)]
    pub stochastic_rounding: bool,
    /// Scale weights in 16x16 tiles, so that forward and dgrad use the same quantized weight.
    /// Otherwise each of the two copies has its own 1x16 blocks.
    #[config(default = true)]
    pub weight_2d: bool,
    /// Seed of stochastic rounding, for the whole model. Layers, and the two copies of a gradient,
    /// draw from streams of it that never share bits.
    #[config(default = 0)]
    pub seed: u64,
    /// Signs of the transform: bit `i` set negates element `i` of each 16. The default is
    /// TransformerEngine's.
    #[config(default = 0xD7E8)]
    pub rht_signs: u16,
    /// Layers that stay in high precision: those whose weight (`"path.to.layer.weight"`, or its
    /// id) is in the group. They multiply in the type of their input. [`apply`](Self::apply) puts
    /// it into effect.
    pub high_precision: Option<ParamGroup>,
}

impl Default for Nvfp4Recipe {
    fn default() -> Self {
        Self::new()
    }
}

/// Two recipes are equal when all their switches are, and when their groups print alike: a
/// [`ParamGroup`] has no equality of its own.
impl PartialEq for Nvfp4Recipe {
    fn eq(&self, other: &Self) -> bool {
        let Self {
            rht,
            stochastic_rounding,
            weight_2d,
            seed,
            rht_signs,
            high_precision,
        } = self;
        *rht == other.rht
            && *stochastic_rounding == other.stochastic_rounding
            && *weight_2d == other.weight_2d
            && *seed == other.seed
            && *rht_signs == other.rht_signs
            && format!("{high_precision:?}") == format!("{:?}", other.high_precision)
    }
}

impl Nvfp4Recipe {
    /// Put `high_precision` into effect in `model`, for every [`Nvfp4Linear`](crate::Nvfp4Linear)
    /// in it: those in the group compute in high precision from now on, all others in NVFP4.
    /// Returns how many are in high precision.
    ///
    /// Clones of the model share the setting.
    ///
    /// # Errors
    /// When the model has no such layer, or the group contains none of them: a pattern that
    /// matches nothing is a mistake, and it would go unnoticed.
    pub fn apply<M: Module>(&self, model: &M) -> Result<usize, Nvfp4Error> {
        let layers = state::layers(model);
        if layers.is_empty() {
            return Err(Nvfp4Error::value(
                "model",
                "no Nvfp4Linear layer",
                "a model with at least one",
            ));
        }
        let Some(group) = &self.high_precision else {
            layers
                .iter()
                .for_each(|layer| layer.state.set_high_precision(false));
            return Ok(0);
        };
        let matched: Vec<bool> = layers
            .iter()
            .map(|layer| group.matches(&layer.id, Some(&layer.weight_path())))
            .collect();
        let count = matched.iter().filter(|matched| **matched).count();
        if count == 0 {
            let paths: Vec<String> = layers.iter().map(|layer| layer.weight_path()).collect();
            return Err(Nvfp4Error::value(
                "high_precision",
                format!("{group:?}, which contains no NVFP4 layer of the model"),
                format!("a group with at least one of {}", paths.join(", ")),
            ));
        }
        for (layer, matched) in layers.iter().zip(matched) {
            layer.state.set_high_precision(matched);
        }
        Ok(count)
    }

    /// What one product does, drawing from `randomness`.
    pub(crate) fn linear_spec(&self, randomness: &LayerRandomness) -> LinearSpec {
        let rounding = |role: u64| {
            if self.stochastic_rounding {
                let LayerRandomness {
                    seed,
                    layer,
                    offset,
                    ..
                } = *randomness;
                Rounding::Stochastic(RandomStream::new(seed, state::stream(layer, role), offset))
            } else {
                Rounding::Nearest
            }
        };
        LinearSpec {
            weight_2d: self.weight_2d,
            hadamard: self.rht.then(|| Hadamard::from_signs(randomness.rht_signs)),
            dgrad: rounding(state::ROLE_DGRAD),
            wgrad: rounding(state::ROLE_WGRAD),
        }
    }
}
