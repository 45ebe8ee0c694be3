//! Evaluates models in the form in which they were saved, without the recipe of the training.

use std::path::Path;

use anyhow::{Context, Result};
use burn::module::Module;
use burn::tensor::{Bytes, Device};
use burn_nvfp4::parallel::ProcessGroup;

use super::loss::cross_entropy_of;
use super::{Finetune, FinetuneConfig, TrainingData, parameters};
use crate::decoder::Decoder;

impl Finetune<'_> {
    /// Serializes the adapters for [`saved_loss`].
    ///
    /// # Errors
    /// Returns an error if they cannot be packed.
    pub fn adapters(&self) -> Result<Bytes> {
        parameters::to_bytes(self.model())
    }
}

/// Returns the cross entropy of the model in `folder` on the validation rows of `data`, in nats per
/// target that counts. A high-precision folder computes in high precision, a quantized one as its
/// scheme says. With `adapters`, they are added to the projections of the folder.
///
/// # Errors
/// Returns an error if the folder cannot be loaded, or if the adapters are not those of `config`.
pub fn saved_loss(
    config: &FinetuneConfig,
    data: &TrainingData,
    folder: &Path,
    adapters: Option<Bytes>,
    device: &Device,
) -> Result<f64> {
    let plain = device.clone().without_autodiff();
    let activation = config.activation.into();
    let model = match adapters {
        None => Decoder::load_for_inference(folder, &plain, activation, None)?,
        Some(adapters) => {
            let lora = config.lora.as_ref();
            let lora = lora.context("the run trains all parameters: there is no adapter")?;
            // Adapters are found by their gradients.
            let device = device.clone().autodiff();
            let base = Decoder::load_for_inference(folder, &device, activation, None)?;
            let model = base.into_frozen(activation)?.into_lora(lora, config.seed)?;
            parameters::load(model, adapters)?.valid()
        }
    };
    let sizes = [config.batch, config.eval_rows];
    cross_entropy_of(&model, &data.valid, sizes, &plain, &ProcessGroup::single())
}
