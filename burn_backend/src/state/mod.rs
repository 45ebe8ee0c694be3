//! State of NVFP4 layers, and its serialization next to a model.
//!
//! Burn's module records hold tensors by path, and loading refuses entries that one side lacks. A
//! layer's counter in the record would make its checkpoints differ from those of `burn_nn::Linear`.
//! Therefore the state of a layer is invisible to Burn's visitors and mappers, and [`Nvfp4State`]
//! is saved next to the record: collect it from the model when saving, and apply it to the model
//! after loading.

mod layer;
mod saved;

use std::sync::Arc;

use burn_core::module::Module;
use nvfp4_formats::Nvfp4Error;

use crate::recipe::{LayerMode, Nvfp4Recipe, RecipeSchedule, patterns};
use crate::rng::RANK_SHIFT;

pub(crate) use layer::{FoundLayer, layers};

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

/// Returns the NVFP4 layers of `model`.
///
/// # Errors
/// Returns an error if there are none.
fn layers_to_quantize<M: Module>(model: &M) -> Result<Vec<FoundLayer>, Nvfp4Error> {
    let layers = layers(model);
    match layers.is_empty() {
        false => Ok(layers),
        true => Err(Nvfp4Error::value(
            "model",
            "no NVFP4 layer",
            "at least one, such as `Nvfp4Linear`",
        )),
    }
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
        let layers = layers_to_quantize(model)?;
        let kept = self.kept(&layers)?;
        for (layer, &kept) in layers.iter().zip(&kept) {
            layer.state.set_high_precision(kept);
        }
        Ok(kept.into_iter().filter(|kept| *kept).count())
    }

    /// Returns true for each layer in `layers`, those of a model, that stays in high precision.
    fn kept(&self, layers: &[FoundLayer]) -> Result<Vec<bool>, Nvfp4Error> {
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
        Ok(kept)
    }
}

impl RecipeSchedule {
    /// Makes every NVFP4 layer of `model` follow the phase of step `step` (from 0) of `steps`, for
    /// the next and all later forwards; returns the index of the phase. Call it before each step,
    /// also in a resumed run. It replaces the recipes that the layers were built with; their seeds
    /// and offsets stay. End a [graph](crate::graph) when the index changes, and capture the step
    /// again.
    ///
    /// If the phases keep different layers in high precision, each phase that quantizes selects its
    /// own, as [`Nvfp4Recipe::apply`] does.
    ///
    /// # Errors
    /// Returns the errors of [`check_model`](Self::check_model).
    pub fn apply<M: Module>(&self, model: &M, step: u64, steps: u64) -> Result<usize, Nvfp4Error> {
        let index = self.index_at(step, steps);
        let phase = &self.phases()[index];
        if self.selects_layers() && phase.is_quantized() {
            phase.recipe.apply(model)?;
        }
        let mut shared = None;
        for layer in layers(model) {
            if layer.state.recipe().as_deref() != Some(&phase.recipe) {
                let recipe = shared.get_or_insert_with(|| Arc::new(phase.recipe.clone()));
                layer.state.set_recipe(recipe.clone());
            }
            layer.state.set_mode(phase.mode);
        }
        Ok(index)
    }

    /// Checks before the first step that every phase can be [applied](Self::apply) to `model`.
    ///
    /// # Errors
    /// Returns an error if a phase quantizes and the model has no NVFP4 layer. Returns an error that
    /// names the phase if its recipe keeps layers in high precision that the model lacks.
    pub fn check_model<M: Module>(&self, model: &M) -> Result<(), Nvfp4Error> {
        if !self.phases().iter().any(|phase| phase.is_quantized()) {
            return Ok(());
        }
        let layers = layers_to_quantize(model)?;
        if !self.selects_layers() {
            return Ok(());
        }
        for (index, phase) in self.phases().iter().enumerate() {
            if phase.is_quantized() {
                phase.recipe.kept(&layers).map_err(|error| {
                    let found = format!("phase {} (`{}`)", index + 1, phase.label());
                    let expected = format!("a recipe that fits the model: {error}");
                    Nvfp4Error::value("schedule", found, expected)
                })?;
            }
        }
        Ok(())
    }
}
