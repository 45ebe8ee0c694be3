//! State of NVFP4 layers, and its serialization next to a model.
//!
//! Burn's module records hold tensors by path, and loading refuses entries that one side lacks. A
//! layer's counter in the record would make its checkpoints differ from those of `burn_nn::Linear`.
//! Therefore the state of a layer is invisible to Burn's visitors and mappers, and [`Nvfp4State`]
//! is saved next to the record: collect it from the model when saving, and apply it to the model
//! after loading.

mod layer;
mod saved;

use burn_core::module::Module;
use nvfp4_formats::Nvfp4Error;

use crate::recipe::{LayerMode, Nvfp4Recipe, patterns};
use crate::rng::RANK_SHIFT;

#[cfg(any(feature = "train", feature = "cpu", feature = "cuda"))]
pub(crate) use layer::FoundLayer;
pub(crate) use layer::layers;

pub use crate::rng::RngState;
pub use layer::LayerState;
pub use saved::Nvfp4State;

/// Assigns the ids 0, 1, 2, … to the NVFP4 layers of `model` in the order of its fields.
///
/// A layer that was built without an id got the next one of the process, which depends on the other
/// layers that the process has built. After this call the ids depend only on the model.
pub fn assign_layer_ids<M: Module>(model: &M) {
    for (id, layer) in (0..).zip(layers(model)) {
        let rng_state = RngState {
            layer: id,
            ..layer.state.rng_state()
        };
        layer
            .state
            .set_rng_state(rng_state)
            .expect("a model has less than 2^56 layers");
    }
}

/// Sets the mode of every NVFP4 layer of `model`, for the next and all later forwards. Layers that
/// the recipe keeps in high precision stay in high precision.
///
/// Clones of the model share the setting; [`Nvfp4State`] saves it.
pub fn set_mode<M: Module>(model: &M, mode: LayerMode) {
    for layer in layers(model) {
        layer.state.set_mode(mode);
    }
}

/// Sets the rank for which the NVFP4 layers of `model` draw random bits, in a run with one process
/// per rank: no two ranks share bits of stochastic rounding. Ranks that compute parts of the same
/// tensors, as in tensor parallelism, must pass the same number.
///
/// Clones of the model share the setting on all devices.
///
/// # Errors
/// Returns an error if `rank` is 2^16 or more.
pub fn set_rank<M: Module>(model: &M, rank: usize) -> Result<(), Nvfp4Error> {
    let limit = 1 << (u64::BITS - RANK_SHIFT);
    if rank >= limit {
        let expected = format!("less than {limit} (2^16)");
        return Err(Nvfp4Error::value("rank", rank.to_string(), expected));
    }
    for layer in layers(model) {
        layer.state.set_rank(rank as u64);
    }
    Ok(())
}

impl Nvfp4Recipe {
    /// Applies `high_precision` and `layers` to every NVFP4 layer of `model`: the selected layers
    /// compute in high precision from now on, all others by the recipe. Returns the number of
    /// layers in high precision.
    ///
    /// Clones of the model share the setting.
    ///
    /// # Errors
    /// Returns an error if the model has no NVFP4 layer, or the group contains none of them: a
    /// pattern that matches nothing is a mistake.
    pub fn apply<M: Module>(&self, model: &M) -> Result<usize, Nvfp4Error> {
        let layers = layers(model);
        if layers.is_empty() {
            return Err(Nvfp4Error::value(
                "model",
                "no Nvfp4Linear layer",
                "a model with at least one",
            ));
        }
        let paths: Vec<&str> = layers.iter().map(|layer| layer.path.as_str()).collect();
        let mut kept = self.layers.matches(&paths)?;
        if let Some(group) = &self.high_precision {
            let matched: Vec<bool> = layers
                .iter()
                .map(|layer| group.matches(&layer.id, Some(&layer.weight_path())))
                .collect();
            if !matched.contains(&true) {
                let paths: Vec<String> = layers.iter().map(|layer| layer.weight_path()).collect();
                return Err(Nvfp4Error::value(
                    "high_precision",
                    format!(
                        "{}, which matches no NVFP4 layer of the model",
                        patterns(group)
                    ),
                    format!("a group with at least one of {}", paths.join(", ")),
                ));
            }
            for (kept, matched) in kept.iter_mut().zip(matched) {
                *kept |= matched;
            }
        }
        for (layer, &kept) in layers.iter().zip(&kept) {
            layer.state.set_high_precision(kept);
        }
        Ok(kept.into_iter().filter(|kept| *kept).count())
    }
}
