//! Text from a trained model.

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::RngExt;

use crate::checkpoint::Checkpoint;
use crate::data::END_OF_FILE;
use crate::groups::ParallelGroups;
use crate::model::LanguageModel;
use crate::random::stream;

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

/// Continue `prompt` by at most `tokens` bytes, and pass each one to `emit`. Ends early where the
/// model ends the file.
///
/// The model sees the last bytes that fit its context. `temperature` scales the logits: 0 takes the
/// most probable byte, 1 samples from the model's distribution. The same seed gives the same text
/// on the same device.
///
/// # Errors
/// When the prompt is empty, the temperature is negative or not a number, or `emit` fails.
pub fn generate(
    model: &impl LanguageModel,
    device: &Device,
    prompt: &[u8],
    tokens: usize,
    temperature: f64,
    seed: u64,
    mut emit: impl FnMut(u8) -> Result<()>,
) -> Result<()> {
    ensure!(
        !prompt.is_empty(),
        "the prompt is empty, but the model continues at least one byte"
    );
    ensure!(
        temperature.is_finite() && temperature >= 0.0,
        "the temperature is {temperature}, but it must be zero or a positive number"
    );
    let device = device.clone().without_autodiff();
    let mut stream = stream(seed, "sample", 0);
    let mut text = prompt.to_vec();
    for _ in 0..tokens {
        let seen = &text[text.len().saturating_sub(model.context())..];
        let bytes: Vec<i32> = seen.iter().map(|byte| i32::from(*byte)).collect();
        let last = bytes.len() - 1;
        let input = Tensor::<2, Int>::from_data(TensorData::new(bytes, [1, last + 1]), &device);
        let logits = model.forward(input).narrow(0, last, 1).into_data();
        let logits: Vec<f64> = logits.iter::<f32>().map(f64::from).collect();
        let byte = pick(&logits, temperature, stream.random::<f64>());
        if byte == END_OF_FILE {
            break;
        }
        emit(byte)?;
        text.push(byte);
    }
    Ok(())
}

/// The byte at `position`, in `[0, 1)`, of the cumulative distribution that `logits` have at
/// `temperature`.
fn pick(logits: &[f64], temperature: f64, position: f64) -> u8 {
    let best = (0..logits.len())
        .max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
        .unwrap_or(0);
    if temperature == 0.0 {
        return best as u8;
    }
    let weights: Vec<f64> = logits
        .iter()
        .map(|logit| ((logit - logits[best]) / temperature).exp())
        .collect();
    let mut rest = position * weights.iter().sum::<f64>();
    for (byte, weight) in weights.iter().enumerate() {
        rest -= weight;
        if rest < 0.0 {
            return byte as u8;
        }
    }
    best as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_follow_the_distribution() {
        let logits = [0.0, 3f64.ln(), f64::NEG_INFINITY, 4f64.ln()];
        assert_eq!(pick(&logits, 0.0, 0.1), 3);
        let mut counts = [0usize; 4];
        (0..800)
            .for_each(|i| counts[usize::from(pick(&logits, 1.0, (i as f64 + 0.5) / 800.0))] += 1);
        assert_eq!(counts, [100, 300, 0, 400]);
        // Colder, and the most probable one takes more.
        assert_eq!(pick(&logits, 0.5, 0.4), 3);
    }
}
