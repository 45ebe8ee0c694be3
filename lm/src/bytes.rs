//! Text from a byte language model, which `nvfp4 train` has trained.

use std::path::Path;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde_json::{Map, Value};

use crate::checkpoint::{CONFIG, Checkpoint, read_json};
use crate::data::END_OF_FILE;
use crate::groups::ParallelGroups;
use crate::model::LanguageModel;
use crate::sampling::{Sampler, SamplingConfig};

/// Whether `folder` is that of a run of `nvfp4 train`, of one of its recipes or of a checkpoint,
/// and not that of a model in Hugging Face's layout.
///
/// # Errors
/// When it has a configuration that cannot be read, or is that of a run which writes models of that
/// layout to a folder of their own.
pub fn is_trained(folder: &Path) -> Result<bool> {
    let finetuned = folder.join(crate::finetune::config::CONFIG);
    ensure!(
        !finetuned.exists(),
        "{} is the folder of a finetuning: the model that it writes is in {}",
        folder.display(),
        folder.join("model").display()
    );
    let config = folder.join(CONFIG);
    if !config.exists() {
        return Ok(true);
    }
    let json: Map<String, Value> = read_json(&config)?;
    Ok(!json.contains_key("architectures") && !json.contains_key("model_type"))
}

/// The model of a checkpoint, on `device`, for inference.
///
/// # Errors
/// When the parameters do not fit the configuration of the checkpoint, or the device does not
/// support its recipe.
pub fn load<M: LanguageModel>(checkpoint: Checkpoint, device: &Device) -> Result<M> {
    let Checkpoint {
        state,
        model: parameters,
        ..
    } = checkpoint;
    let device = device.clone().without_autodiff();
    let model = M::build(&state.config, &state.recipe, &device)?;
    let model = model.try_load_record(ModuleRecord::from_bytes(parameters)?)?;
    state.nvfp4.apply(&model)?;
    M::part_of(model, &state.config, &ParallelGroups::single())
}

/// Continue `prompt` by at most `most` bytes, chosen as `sampling` says, and pass each one to
/// `emit`, which says whether the text goes on. Ends early where the model ends the file.
///
/// The model sees the last bytes that fit its context.
///
/// # Errors
/// When the prompt is empty, the sampling is out of range, the logits are not numbers, or `emit`
/// fails.
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
