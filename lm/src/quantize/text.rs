//! Calibrates on text: runs the model and collects statistics of its linear layers' inputs.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};

use super::calibrate::Collector;
use super::engine::Engine;
use super::stats::Calibration;
use crate::decoder::names::{attention, expected};
use crate::decoder::observe::{LinearInput, Observer};
use crate::decoder::{Decoder, LayerwiseDecoder};
use crate::hf::{DecoderConfig, TensorFolder};
use crate::interchange::names::is_linear;
use crate::model::cast;
use crate::progress::{Unit, Work};

/// Amount of text to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CalibrationText {
    /// Tokens per sequence; each sequence is read separately, from position 0.
    pub length: usize,
    /// Maximum number of sequences.
    pub sequences: usize,
    /// True to collect the second moments `E[x xᵀ]`, which GPTQ needs: 8 k² bytes for each input of
    /// k features.
    pub products: bool,
}

impl CalibrationText {
    /// Returns the length of sequences of `tokens`.
    ///
    /// # Errors
    /// Returns an error if there is no token, a size is 0, or a sequence exceeds the model's maximum
    /// context.
    fn check(&self, tokens: &[u32], config: &DecoderConfig) -> Result<usize> {
        let Self {
            length, sequences, ..
        } = *self;
        ensure!(
            length > 0 && sequences > 0,
            "calibration reads {sequences} sequences of {length} tokens, but both must be positive"
        );
        ensure!(!tokens.is_empty(), "the text of the calibration is empty");
        let length = length.min(tokens.len());
        config.check_length("the length of a calibration's sequence", length)?;
        Ok(length)
    }
}

/// Selects the calibration tokens of `files`, each the tokens of one file. The tokens of all files
/// are concatenated and cut into sequences. Up to [`CalibrationText::sequences`] of them are taken:
/// the first that begins in each file, then the second of each, and so on. Returns them in the order
/// of the files; all tokens if they do not fill a sequence.
pub fn sample(files: &[Vec<u32>], options: CalibrationText) -> Vec<u32> {
    let all = files.concat();
    let length = options.length;
    if length == 0 || all.len() <= length {
        return all;
    }
    let mut chosen = Vec::new();
    let (mut file, mut end, mut rank) = (0, 0, 0);
    for begin in (0..=all.len() - length).step_by(length) {
        while begin >= end {
            end += files[file].len();
            (file, rank) = (file + 1, 0);
        }
        chosen.push((rank, begin));
        rank += 1;
    }
    // Sorting is stable: sequences of one rank keep the order of the files.
    chosen.sort_by_key(|(rank, _)| *rank);
    chosen.truncate(options.sequences);
    chosen.sort_by_key(|(_, begin)| *begin);
    let tokens = chosen.iter().map(|(_, begin)| &all[*begin..begin + length]);
    tokens.collect::<Vec<_>>().concat()
}

/// Collects the input statistics of the linear layers of `model`, in high precision, over `tokens`.
///
/// The tokens are cut into sequences. An incomplete last sequence is skipped, unless it is the only
/// one.
///
/// # Errors
/// Returns an error if there is no token, a size is 0, or a sequence exceeds the model's maximum
/// context. Returns an error that names the layer if an input is not finite.
pub fn calibrate(model: &Decoder, tokens: &[u32], options: CalibrationText) -> Result<Calibration> {
    let config = model.config();
    let length = options.check(tokens, config)?;
    let CalibrationText {
        sequences,
        products,
        ..
    } = options;
    let mut inputs = Inputs {
        collector: Collector::new(products, Engine::of(&model.device())),
        config,
    };
    let device = model.device();
    let total = sequences.min(tokens.len() / length);
    let mut work = Work::begin("calibrate", Unit::Sequences, 0, total);
    for (done, sequence) in tokens.chunks_exact(length).take(total).enumerate() {
        model
            .observed(tensor_of(sequence, &device), &mut inputs)
            .with_context(|| format!("calibration, sequence {done}"))?;
        work.add(1);
    }
    inputs.finish()
}

/// Returns the tokens of a sequence, `[1, time]`.
fn tensor_of(sequence: &[u32], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = sequence.iter().map(|&id| id as i32).collect();
    let length = ids.len();
    Tensor::from_data(TensorData::new(ids, [1, length]), device)
}

/// A calibration that runs the model layer by layer, and holds the statistics of one layer.
pub(super) struct LayerCalibration<'a> {
    decoder: LayerwiseDecoder<'a>,
    config: &'a DecoderConfig,
    engine: Engine,
    products: bool,
    tokens: Option<u64>,
    caches: BTreeMap<String, [f32; 2]>,
    /// Statistics of the last layer that ran.
    last: Calibration,
}

impl<'a> LayerCalibration<'a> {
    /// Begins a calibration like that of [`calibrate`], in f32 on `device`, of the model of
    /// `tensors`.
    ///
    /// # Errors
    /// Returns the errors of [`calibrate`].
    pub fn new(
        config: &'a DecoderConfig,
        tensors: &'a TensorFolder,
        device: &'a Device,
        (engine, tokens, options): (Engine, &[u32], CalibrationText),
    ) -> Result<Self> {
        let length = options.check(tokens, config)?;
        let sequences = tokens.chunks_exact(length).take(options.sequences);
        let sequences = sequences.map(|sequence| tensor_of(sequence, device));
        let decoder = LayerwiseDecoder::new(config, tensors, (device, FloatDType::F32), sequences);
        Ok(Self {
            decoder: decoder?,
            config,
            engine,
            products: options.products,
            tokens: None,
            caches: BTreeMap::new(),
            last: Calibration::new(),
        })
    }

    /// Runs the layers up to `layer`, and returns its statistics. Layers are asked for in ascending
    /// order.
    ///
    /// # Errors
    /// Returns an error if there is no such layer, or it ran before the last one. Returns an error
    /// that names the layer if an input is not finite.
    pub fn layer(&mut self, layer: usize) -> Result<&Calibration> {
        ensure!(
            layer + 1 >= self.decoder.layers(),
            "the inputs of layer {layer} are gone"
        );
        while self.decoder.layers() <= layer {
            // The memory of the last layer's moments is free for the next.
            self.last = Calibration::new();
            let products = self.products && self.decoder.layers() == layer;
            let mut inputs = Inputs {
                collector: Collector::new(products, self.engine.clone()),
                config: self.config,
            };
            self.decoder.run_layer(&mut inputs).context("calibration")?;
            self.last = inputs.finish()?;
            self.tokens = self.tokens.max(self.last.tokens());
            self.caches.append(&mut self.last.caches);
        }
        Ok(&self.last)
    }

    /// Runs the other layers, and returns the amax values of all caches.
    ///
    /// # Errors
    /// Returns an error if a layer cannot be loaded, or an input is not finite.
    pub fn caches(&mut self) -> Result<&BTreeMap<String, [f32; 2]>> {
        if let Some(last) = self.config.layers.len().checked_sub(1) {
            self.layer(last)?;
        }
        Ok(&self.caches)
    }

    /// Returns the number of tokens read.
    pub const fn tokens(&self) -> Option<u64> {
        self.tokens
    }
}

/// Inputs of a model, by the names of its modules.
struct Inputs<'a> {
    collector: Collector,
    config: &'a DecoderConfig,
}

impl Inputs<'_> {
    /// Returns the statistics of the inputs that were observed.
    fn finish(self) -> Result<Calibration> {
        let expected = expected(self.config);
        let names = expected.iter().map(|tensor| tensor.name.as_str());
        let modules = names.filter_map(|name| name.strip_suffix(".weight"));
        self.collector
            .finish(modules.filter(|module| is_linear(module)))
    }
}

impl Observer for Inputs<'_> {
    fn observe(&mut self, input: LinearInput<'_>) -> Result<()> {
        let LinearInput {
            layer,
            site,
            x,
            experts,
        } = input;
        let inputs = self.collector.read(x);
        let inputs = inputs.with_context(|| format!("layer {layer}"))?;
        let Some(experts) = experts else {
            let module = site.module(self.config, layer, None);
            return self.collector.observe(&module, &inputs, 0..inputs.tokens());
        };
        let offsets = experts.offsets().clone().into_data();
        let offsets: Vec<usize> = offsets
            .iter::<i64>()
            .map(|offset| offset as usize)
            .collect();
        for (expert, ends) in offsets.windows(2).enumerate() {
            if ends[0] < ends[1] {
                let module = site.module(self.config, layer, Some(expert));
                self.collector.observe(&module, &inputs, ends[0]..ends[1])?;
            }
        }
        Ok(())
    }

    fn observe_cache(&mut self, layer: usize, k: &Tensor<4>, v: &Tensor<4>) -> Result<()> {
        let amax = |x: &Tensor<4>| -> f32 {
            let amax = cast(x.clone().abs().max(), FloatDType::F32);
            amax.into_scalar()
        };
        self.collector
            .observe_cache(&attention(layer), [amax(k), amax(v)])
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::hf::tensors::TensorFolder;
    use crate::interchange::Checkpoint;
    use crate::interchange::names::expert_projection;
    use crate::progress::tests::told;
    use nvfp4_test_support::golden;

    const WHOLE: CalibrationText = CalibrationText {
        length: 64,
        sequences: 4,
        products: false,
    };

    fn load(folder: &Path) -> Decoder {
        Decoder::load(folder, &Device::flex(), FloatDType::F32).unwrap()
    }

    /// Returns the text that Model Optimizer calibrated on, and the amax values of the inputs that
    /// it recorded, in bf16.
    fn golden_calibration(folder: &Path) -> (Vec<u32>, Vec<(String, f32)>) {
        let tensors = TensorFolder::open_file(&folder.join("calibration.safetensors")).unwrap();
        let ids = tensors.get("calibration_input_ids").unwrap().bytes();
        let ids = ids.chunks_exact(8);
        let ids = ids.map(|id| u64::from_le_bytes(id.try_into().unwrap()) as u32);
        let amax = tensors.iter().filter_map(|tensor| {
            let module = tensor.name.strip_suffix("input_quantizer.amax")?;
            Some((module.to_owned(), tensor.to_f32().unwrap()[0]))
        });
        (ids.collect(), amax.collect())
    }

    #[track_caller]
    fn assert_near(found: f32, expected: f32, what: &str) {
        // The tool's forward is in bf16: inputs, gate, up and their product are rounded, by up to
        // 2^-8 each.
        let error = (found - expected).abs() / expected;
        assert!(error < 2f32.powi(-6), "{what}: {found}, not {expected}");
    }

    #[test]
    fn inputs_of_a_dense_model_are_those_that_model_optimizer_saw() {
        let (base, export) = (golden("llama3-tiny"), golden("llama3-tiny-modelopt-nvfp4"));
        let (ids, expected) = golden_calibration(&export);
        let found = calibrate(&load(&base), &ids, WHOLE).unwrap();
        let found = found.inputs;
        assert_eq!(expected.len(), 14);
        assert_eq!(found.len(), 14);
        for (module, amax) in expected {
            let module = module.trim_end_matches('.');
            assert_eq!(found[module].tokens(), 256);
            assert_near(found[module].amax(), amax, module);
        }
    }

    #[test]
    fn inputs_of_experts_are_those_of_their_tokens() {
        let base = golden("qwen3moe-tiny");
        let (ids, expected) = golden_calibration(&golden("qwen3moe-tiny-modelopt-nvfp4"));
        let found = calibrate(&load(&base), &ids, WHOLE).unwrap();
        let found = found.inputs;
        let mut compared = 0;
        for (module, amax) in expected {
            let of_experts = |leaf: &str| {
                let layer = module.split(".mlp.").next().unwrap();
                let own = found.iter().filter(|(name, _)| {
                    name.starts_with(&format!("{layer}.mlp.")) && name.ends_with(leaf)
                });
                let stats: Vec<_> = own.map(|(_, stats)| stats).collect();
                assert!(stats.len() > 1);
                // Each token goes to the same number of experts.
                let tokens: u64 = stats.iter().map(|stats| stats.tokens()).sum();
                assert_eq!(tokens % 256, 0);
                stats.iter().map(|stats| stats.amax()).fold(0.0, f32::max)
            };
            let largest = match module.rsplit('.').next().unwrap() {
                "down_proj_" => of_experts(".down_proj"),
                "gate_up_proj_" => of_experts(".gate_proj"),
                _ => found[module.trim_end_matches('.')].amax(),
            };
            assert_near(largest, amax, &module);
            compared += 1;
        }
        assert_eq!(compared, 12);
        assert!(
            found
                .keys()
                .any(|module| expert_projection(module).is_some())
        );
    }

    /// Keys are measured after the rotary embedding, as in both tools. llm-compressor's observer
    /// keeps a moving average, in which each sequence after the first has a weight of 0.01.
    #[test]
    fn caches_are_those_that_both_tools_saw() {
        let root = golden("");
        let model = load(&root.join("llama3-tiny"));
        // Three such weights move the average by less than 2^-6, because no sequence's amax exceeds
        // that of the first by half.
        for (name, file, sequences, tolerance) in [
            (
                "modelopt-nvfp4-kvfp8",
                "calibration.safetensors",
                4,
                2f32.powi(-6),
            ),
            ("ct-nvfp4-kvfp8", "reference.safetensors", 1, 2f32.powi(-5)),
        ] {
            let export = root.join(format!("llama3-tiny-{name}"));
            let tensors = TensorFolder::open_file(&export.join(file)).unwrap();
            let ids = tensors.get("calibration_input_ids").unwrap().bytes();
            let ids: Vec<u32> = (ids.chunks_exact(8))
                .map(|id| u64::from_le_bytes(id.try_into().unwrap()) as u32)
                .collect();
            let options = CalibrationText { sequences, ..WHOLE };
            let found = calibrate(&model, &ids, options).unwrap();
            let export = Checkpoint::open(&export).unwrap();
            assert_eq!(export.kv_scales().len(), 2);
            for (attention, expected) in export.kv_scales() {
                for (amax, scale) in found.caches[attention].iter().zip(expected) {
                    let (found, expected) = (amax / 448.0, scale.unwrap());
                    let error = (found - expected).abs() / expected;
                    assert!(
                        error < tolerance,
                        "{name}: {attention}: {found}, not {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn sequences_are_taken_in_turn_from_the_files() {
        let files: [Vec<u32>; 3] = [0..10, 100..103, 200..213].map(Iterator::collect);
        let sampled = |length, sequences| {
            let options = CalibrationText {
                length,
                sequences,
                products: false,
            };
            sample(&files, options)
        };
        // Sequences begin at 0, 4, 8 in the first file, and at 12, 16, 20 of all tokens in the
        // second and the third.
        assert_eq!(sampled(4, 1), [0, 1, 2, 3]);
        let second = [102, 200, 201, 202];
        assert_eq!(sampled(4, 2), [vec![0, 1, 2, 3], second.to_vec()].concat());
        let third = [203, 204, 205, 206];
        let in_turn = [&[0, 1, 2, 3][..], &second, &third].concat();
        assert_eq!(sampled(4, 3), in_turn);
        // The incomplete last sequence is skipped.
        assert_eq!(sampled(4, 99), files.concat()[..24]);
        assert_eq!(sampled(30, 99), files.concat());
        assert!(sampled(4, 0).is_empty());
    }

    #[test]
    fn a_text_is_cut_into_sequences() {
        let model = load(&golden("llama3-tiny"));
        let ids: Vec<u32> = (0..50).collect();
        let read = |length, sequences| {
            let options = CalibrationText {
                length,
                sequences,
                products: true,
            };
            let (found, told) = told("calibrate", || calibrate(&model, &ids, options));
            found.map(|found| (found.inputs["model.layers.1.mlp.down_proj"].tokens(), told))
        };
        let done = vec![(0, 3), (1, 3), (2, 3), (3, 3)];
        assert_eq!(read(16, 9).unwrap(), (48, done));
        assert_eq!(read(16, 2).unwrap().0, 32);
        assert_eq!(read(1000, 2).unwrap(), (50, vec![(0, 1), (1, 1)]));
        for (length, sequences) in [(0, 1), (1, 0)] {
            assert!(read(length, sequences).is_err());
        }
    }
}
