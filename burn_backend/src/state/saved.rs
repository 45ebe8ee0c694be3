//! Layer state that is saved next to a model's record.

use std::collections::BTreeMap;

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use nvfp4_formats::Nvfp4Error;

use super::layer::{FoundLayer, LayerState, layers};
use crate::recipe::LayerMode;
use crate::rng::RngState;

/// RNG states of the NVFP4 layers of a model, by layer path.
///
/// Save it next to the model's record and apply it to the loaded model: the resumed run then draws
/// exactly the bits of an uninterrupted run. It is a Burn [`Config`], which can be saved as a JSON
/// file, and serde can embed it in another.
///
/// ```no_run
/// use burn_core::config::Config;
/// # use burn_core::{module::Module, tensor::Device};
/// # use burn_nvfp4::{Nvfp4Linear, Nvfp4State};
/// # use std::error::Error;
/// # fn save_and_load(model: Nvfp4Linear, fresh: Nvfp4Linear) -> Result<(), Box<dyn Error>> {
/// Nvfp4State::collect(&model).save("model.nvfp4.json")?;
/// model.save_file("model.bpk")?;
/// // In another process:
/// let model = fresh.load_file("model.bpk");
/// Nvfp4State::load("model.nvfp4.json")?.apply(&model)?;
/// # Ok(())
/// # }
/// ```
#[derive(Config, Debug, Default, PartialEq, Eq)]
pub struct Nvfp4State {
    /// RNG states of the layers, by path (`""` for a model that is itself a layer).
    pub layers: BTreeMap<String, RngState>,
    /// Modes of the layers that do not follow their recipe, by path.
    #[config(default = "BTreeMap::new()")]
    pub modes: BTreeMap<String, LayerMode>,
}

impl Nvfp4State {
    /// Collects the state of every NVFP4 layer of `model`.
    pub fn collect<M: Module>(model: &M) -> Self {
        Self::of_ranks(&layers(model), LayerState::rng_state)
    }

    /// Collects the state of `layers` on the rank with the most forwards: each fork counts
    /// separately, and the thread that holds the layers need not be the one that trains.
    #[cfg(feature = "train")]
    pub(crate) fn of(layers: &[FoundLayer]) -> Self {
        Self::of_ranks(layers, LayerState::furthest)
    }

    fn of_ranks(found: &[FoundLayer], rng_state: impl Fn(&LayerState) -> RngState) -> Self {
        let modes = found
            .iter()
            .map(|layer| (layer.path.clone(), layer.state.requested_mode()))
            .filter(|(_, mode)| *mode != LayerMode::Recipe)
            .collect();
        let layers = found
            .iter()
            .map(|layer| (layer.path.clone(), rng_state(&layer.state)))
            .collect();
        Self { layers, modes }
    }

    /// Restores this state in every layer of `model`, and all clones of them.
    ///
    /// # Errors
    /// Returns an error if a layer of the model is missing in this state, or a layer in this state
    /// is missing in the model; nothing is then changed.
    pub fn apply<M: Module>(&self, model: &M) -> Result<(), Nvfp4Error> {
        self.apply_to(&layers(model))
    }

    /// Restores this state in `found`, the layers of a model.
    pub(crate) fn apply_to(&self, found: &[FoundLayer]) -> Result<(), Nvfp4Error> {
        let missing: Vec<&str> = found
            .iter()
            .map(|layer| layer.path.as_str())
            .filter(|path| !self.layers.contains_key(*path))
            .collect();
        let unused: Vec<&str> = self
            .layers
            .keys()
            .map(String::as_str)
            .chain(self.modes.keys().map(String::as_str))
            .filter(|path| !found.iter().any(|layer| layer.path == *path))
            .collect();
        if !missing.is_empty() || !unused.is_empty() {
            return Err(Nvfp4Error::value(
                "state",
                [
                    ("no state of", missing),
                    ("states of layers that the model lacks,", unused),
                ]
                .into_iter()
                .filter(|(_, paths)| !paths.is_empty())
                .map(|(what, paths)| format!("{what} {}", paths.join(", ")))
                .collect::<Vec<_>>()
                .join("; "),
                "exactly the NVFP4 layers of the model",
            ));
        }
        self.layers.values().try_for_each(RngState::check)?;
        for layer in found {
            layer.state.set_rng_state(self.layers[&layer.path])?;
            let mode = self.modes.get(&layer.path).copied();
            layer.state.set_mode(mode.unwrap_or_default());
        }
        Ok(())
    }
}
