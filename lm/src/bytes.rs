//! Generates text with a byte language model trained by `nvfp4 train`.

use std::path::Path;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde_json::{Map, Value};

use crate::checkpoint::{CONFIG, read_json};
use crate::data::END_OF_FILE;
use crate::groups::ParallelGroups;
use crate::hf::folder::check_folder;
use crate::model::LanguageModel;
use crate::sampling::{Sampler, SamplingConfig};
use crate::train::{ByteRun, Checkpoint};

/// Returns true if `folder` belongs to a run of `nvfp4 train`, to one of its recipes or to a
/// checkpoint; false for a model in Hugging Face format.
///
/// # Errors
/// Returns an error if there is no such folder, if it has a configuration that cannot be read, or if
/// it is that of a run that writes Hugging Face models to a subfolder.
pub fn is_trained(folder: &Path) -> Result<bool> {
    check_folder(folder)?;
    let config = folder.join(CONFIG);
    if !config.exists() {
        return Ok(true);
    }
    let json: Map<String, Value> = read_json(&config)?;
    Ok(!json.contains_key("architectures") && !json.contains_key("model_type"))
}

/// Loads the model of a checkpoint on `device`, for inference.
///
/// # Errors
/// Returns an error if the parameters do not match the configuration of the checkpoint, or if the
/// device does not support its recipe.
pub fn load<M: LanguageModel>(checkpoint: Checkpoint, device: &Device) -> Result<M> {
    let Checkpoint {
        state,
        model: parameters,
        ..
    } = checkpoint;
    let device = device.clone().without_autodiff();
    let ByteRun { config, recipe, .. } = &state.run;
    let model = M::build(config, recipe, &device)?;
    let model = model.try_load_record(ModuleRecord::from_bytes(parameters)?)?;
    state.nvfp4.apply(&model)?;
    let schedule = config.recipe_schedule(recipe)?;
    if !schedule.is_constant() {
        // The phase of the last step.
        schedule.apply(&model, state.step.saturating_sub(1), config.steps)?;
    }
    M::part_of(model, config, &ParallelGroups::single())
}

/// Continues `prompt` by at most `most` bytes, chosen according to `sampling`. Passes each byte to
/// `emit`, which returns true to continue. Ends early when the model emits the end-of-file byte.
///
/// The model reads the last bytes that fit its context.
///
/// # Errors
/// Returns an error if the prompt is empty, the sampling is out of range, a logit is not a number,
/// or `emit` fails.
pub fn generate(
    model: &impl LanguageModel,
    device: &Device,
    prompt: &[u8],
    (most, sampling): (usize, &SamplingConfig),
    mut emit: impl FnMut(u8) -> Result<bool>,
) -> Result<()> {
    ensure!(
        !prompt.is_empty(),
        "the prompt is empty, but the model continues at least one byte"
    );
    let device = device.clone().without_autodiff();
    let tokens: Vec<u32> = prompt.iter().map(|byte| u32::from(*byte)).collect();
    let mut sampler = Sampler::new(sampling, 0, &tokens)?;
    let mut text = prompt.to_vec();
    for _ in 0..most {
        let seen = &text[text.len().saturating_sub(model.context())..];
        let bytes: Vec<i32> = seen.iter().map(|byte| i32::from(*byte)).collect();
        let last = bytes.len() - 1;
        let input = Tensor::<2, Int>::from_data(TensorData::new(bytes, [1, last + 1]), &device);
        let logits = model.forward(input).narrow(0, last, 1).into_data();
        let logits: Vec<f32> = logits.iter::<f32>().collect();
        let byte = sampler.next(&logits)? as u8;
        if byte == END_OF_FILE || !emit(byte)? {
            break;
        }
        text.push(byte);
    }
    Ok(())
}
