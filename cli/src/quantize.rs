//! `nvfp4 quantize`.

use std::fs;
use std::hash::Hasher;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::tensor::FloatDType;
use clap::Args;
use fnv::FnvHasher;
use indicatif::HumanBytes;
use nvfp4_lm::decoder::Decoder;
use nvfp4_lm::eval::{CrossEntropy, Windows};
use nvfp4_lm::hf::{DecoderConfig, GenerationConfig, Tokenizer};
use nvfp4_lm::interchange::{Dialect, Scheme};
use nvfp4_lm::quantize::journal::MadeFrom;
use nvfp4_lm::quantize::text::{CalibrationText, calibrate};
use nvfp4_lm::quantize::{
    Calibration, Method, Quantization, QuantizeOptions, Quantized, Smoothing,
};
use regex::Regex;

use crate::device::ComputeType;
use crate::eval::{describe, perplexity, read_texts, tokenizer, windows};
use crate::layers::LayerBar;
use crate::options::shared::{DeviceOption, KvName, OutFolder};
use crate::table::table;

/// Default number of tokens per calibration sequence, unless the model's maximum context is
/// shorter.
const CALIBRATION_LENGTH: usize = 512;
/// Number of calibration tokens below which the report warns.
const FEW_TOKENS: u64 = 512;

#[derive(Args)]
pub(crate) struct Quantize {
    /// Quantize the model in this folder: config.json and safetensors files
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    #[command(flatten)]
    out: OutFolder,
    /// Write the model in this dialect
    #[arg(long, value_name = "DIALECT", default_value = "compressed-tensors")]
    dialect: Dialect,
    /// Quantize weights only, or weights and activations
    #[arg(long, value_name = "SCHEME", default_value = "w4a16")]
    scheme: Scheme,
    /// Quantize weights by this method
    #[arg(long, value_name = "METHOD", default_value = "search")]
    method: Method,
    /// Multiply weights by a power of their input features' size before quantization, and divide
    /// the inputs by it
    ///
    /// `awq` tries powers from 0 to 1 for each input and keeps the one with the smallest error. The
    /// division is folded into the preceding norms and layers, so the model computes the same
    /// function at no cost. Requires --calibration. With --kv fp8 the input of o_proj is not
    /// smoothed, because the values before it are cached.
    #[arg(long, value_name = "SMOOTHING", default_value = "none")]
    smooth: Smoothing,
    /// Resume an interrupted run into the same folder
    ///
    /// Model and options must match the interrupted run. The output is identical byte for byte.
    #[arg(long)]
    resume: bool,
    /// Skip modules whose name matches this regular expression; may be given several times
    ///
    /// Routers and the output head are never quantized. Projections that readers fuse with a
    /// skipped one (q/k/v, gate/up, the experts of a layer) are skipped too.
    #[arg(long, value_name = "REGEX")]
    exclude: Vec<String>,
    /// Use this input scale for every quantized layer, instead of calibrating one per layer
    #[arg(long, value_name = "FACTOR")]
    input_scale: Option<f32>,
    /// Store keys and values in this format
    ///
    /// For fp8, the folder contains the scales of the cache: amax / 448 per layer; keys are measured
    /// after the rotary embedding. Requires --calibration.
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    kv: KvName,
    /// Calibrate on the text of this file, with an f32 forward pass
    ///
    /// Provides the importance of each input feature (`search`, `gptq`), second moments (`gptq`),
    /// activation scales (`w4a4`) and cache scales (`--kv fp8`). Holds the whole model in memory.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Cut the calibration text into sequences of this many tokens [default: 512, or the model's
    /// maximum context]
    #[arg(long, value_name = "N")]
    calibration_length: Option<usize>,
    /// Use at most this many sequences
    #[arg(long, value_name = "N", default_value_t = 128)]
    calibration_sequences: usize,
    /// Report the perplexity of these text files before and after quantization, each evaluated
    /// separately
    ///
    /// Holds the whole model in memory, as `nvfp4 eval` does: NVFP4 weights stay packed.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    eval: Vec<PathBuf>,
    /// Evaluate the texts of --eval in windows of this many tokens [default: 2048, or the model's
    /// maximum context]
    #[arg(long, value_name = "N")]
    eval_length: Option<usize>,
    /// Advance the window by this many tokens [default: half a window]
    #[arg(long, value_name = "N")]
    eval_stride: Option<usize>,
    #[command(flatten)]
    device: DeviceOption,
}

impl Quantize {
    pub(crate) fn run(self) -> Result<()> {
        let options = self.options()?;
        let config = DecoderConfig::read(&self.model)?;
        let windows = windows("eval-length", self.eval_length, self.eval_stride, &config)?;
        config.check_length("calibration-length", self.calibration_length.unwrap_or(0))?;
        let length = self.calibration_length;
        let length = length.unwrap_or(CALIBRATION_LENGTH.min(config.longest()));
        let texts = read_texts(&self.eval)?;
        let text = match &self.calibration {
            Some(file) => {
                Some(fs::read_to_string(file).with_context(|| file.display().to_string())?)
            }
            None => None,
        };
        let tokens = text
            .as_deref()
            .map(|text| self.tokens(text, &config))
            .transpose()?;
        let reads = self.calibrates_on(text.as_deref(), length);
        let run = match self.resume {
            true => Quantization::resume(&self.model, &self.out, &options, reads)?,
            false => Quantization::start(&self.model, &self.out, &options, reads)?,
        };
        let before = self.perplexity(&self.model, &texts, windows)?;
        let calibration = match &tokens {
            Some(tokens) => self.calibration(&run, tokens, length)?,
            None => Calibration::new(),
        };
        let mut bar = LayerBar::new("quantize");
        let show = &mut |done: usize, total: usize, layer: &str| bar.show(done, total, layer);
        let done = run.finish(&calibration, show)?;
        bar.finish();
        for line in report(&done) {
            println!("{line}");
        }
        if let Some(before) = before
            && let Some(after) = self.perplexity(&self.out, &texts, windows)?
        {
            println!("before: {}", describe(&before, windows));
            println!("after:  {}", describe(&after, windows));
        }
        if let (Some(tokens), Some(read)) = (&tokens, done.calibration_tokens) {
            println!(
                "calibrated on {read} of {} tokens, in sequences of {length}{}",
                tokens.len(),
                match read < FEW_TOKENS {
                    true =>
                        format!("; fewer than {FEW_TOKENS} say little about the inputs of layers"),
                    false => String::new(),
                }
            );
        }
        if matches!(self.method, Method::Search | Method::FourOverSix) && calibration.is_empty() {
            println!("no calibration: errors of all input features count the same, E[x²] = 1");
        }
        println!(
            "{} {} by {}{} written to {}",
            self.dialect.name(),
            self.scheme.name(),
            self.method.name(),
            if self.smooth == Smoothing::None {
                ""
            } else {
                ", smoothed,"
            },
            self.out.display()
        );
        Ok(())
    }

    /// Returns the inputs that calibration depends on, by option name.
    fn calibrates_on(&self, text: Option<&str>, length: usize) -> MadeFrom {
        let Some(text) = text else {
            return MadeFrom::new();
        };
        let mut hasher = FnvHasher::default();
        hasher.write(text.as_bytes());
        let reads = [
            ("calibration", format!("{:016x}", hasher.finish()).into()),
            ("calibration-length", length.into()),
            ("calibration-sequences", self.calibration_sequences.into()),
        ];
        reads.map(|(name, value)| (name.to_owned(), value)).into()
    }

    /// Tokenizes the calibration text. Fails if it has only special tokens.
    fn tokens(&self, text: &str, config: &DecoderConfig) -> Result<Vec<u32>> {
        let settings = GenerationConfig::read(&self.model, config)?;
        let tokenizer = Tokenizer::read(&self.model, config.vocab, &settings.eos)?;
        let file = self.calibration.as_deref().unwrap_or(&self.model).display();
        ensure!(
            !tokenizer
                .decode(&tokenizer.encode(text, false)?, false)?
                .is_empty(),
            "calibration {file} has no token of its own, but the inputs of layers are those of a text"
        );
        tokenizer.encode_text(text)
    }

    /// Returns the calibration of a resumed run, or calibrates the model on `tokens`.
    fn calibration(
        &self,
        run: &Quantization,
        tokens: &[u32],
        length: usize,
    ) -> Result<Calibration> {
        if let Some(found) = run.calibration()? {
            return Ok(found);
        }
        let found = self.calibrate(tokens, length)?;
        run.keep_calibration(&found)?;
        Ok(found)
    }

    /// Records the inputs of the model's linear layers during a forward pass over `tokens`.
    fn calibrate(&self, tokens: &[u32], length: usize) -> Result<Calibration> {
        let device = self.device.name()?.open()?.without_autodiff();
        let model = Decoder::load(&self.model, &device, FloatDType::F32)?;
        let options = CalibrationText {
            length,
            sequences: self.calibration_sequences,
            products: self.method == Method::Gptq,
        };
        let mut bar = LayerBar::new("calibrate");
        let found = calibrate(&model, tokens, options, &mut |done, total| {
            bar.show(done, total, "");
        })?;
        bar.finish();
        Ok(found)
    }

    /// Returns the cross entropy of `texts` under the model in `folder`, if there are any texts.
    fn perplexity(
        &self,
        folder: &Path,
        texts: &[String],
        windows: Windows,
    ) -> Result<Option<CrossEntropy>> {
        if texts.is_empty() {
            return Ok(None);
        }
        let name = self.device.name()?;
        let device = name.open()?.without_autodiff();
        let dtype = ComputeType::or_of(None, name);
        let model = Decoder::load_for_inference(folder, &device, dtype, None)?;
        let tokenizer = tokenizer(folder, &model)?;
        perplexity(&model, &tokenizer, texts, windows).map(Some)
    }

    fn options(&self) -> Result<QuantizeOptions> {
        let regex = |text: &String| {
            Regex::new(text).with_context(|| format!("exclude is {text:?}, no regular expression"))
        };
        let scale = self.input_scale;
        ensure!(
            scale.is_none_or(|scale| scale.is_finite() && scale > 0.0),
            "input-scale is {}, but it must be positive and finite",
            scale.unwrap_or_default()
        );
        ensure!(
            scale.is_none() || self.scheme == Scheme::W4a4,
            "input-scale is given, but scheme is w4a16, which does not quantize inputs"
        );
        Ok(QuantizeOptions {
            dialect: self.dialect,
            scheme: self.scheme,
            method: self.method,
            exclude: self.exclude.iter().map(regex).collect::<Result<_>>()?,
            input_scale: scale,
            kv_cache_fp8: self.kv == KvName::Fp8,
            smooth: self.smooth,
        })
    }
}

/// Lists the quantized and the skipped modules.
fn report(done: &Quantized) -> Vec<String> {
    let head = ["layer", "shape", "before", "after", "SQNR dB", "by E[x²]"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let human = |bytes: usize| HumanBytes(bytes as u64).to_string();
    let (mut before, mut after) = (0, 0);
    for layer in &done.layers {
        before += layer.bytes_before;
        after += layer.bytes;
        rows.push(vec![
            layer.module.clone(),
            format!("{} x {}", layer.shape[0], layer.shape[1]),
            human(layer.bytes_before),
            human(layer.bytes),
            format!("{:.2}", layer.sqnr),
            layer
                .weighted_sqnr
                .map_or("-".into(), |sqnr| format!("{sqnr:.2}")),
        ]);
    }
    let mut left = 0;
    for (module, kept, bytes) in &done.kept {
        left += bytes;
        let (bytes, reason) = (human(*bytes), kept.reason().to_owned());
        rows.push(vec![
            module.clone(),
            reason,
            bytes.clone(),
            bytes,
            "-".into(),
            "-".into(),
        ]);
    }
    let mut lines = table("llrrrr", &rows);
    lines.push(format!(
        "{} layers quantized, {} to {}; {} layers left, {}; other tensors {}",
        done.layers.len(),
        human(before),
        human(after),
        done.kept.len(),
        human(left),
        human(done.other_bytes)
    ));
    if !done.unseen.is_empty() {
        lines.push(format!(
            "no token of the calibration reached {}: {}",
            done.unseen.len(),
            done.unseen.join(", ")
        ));
    }
    lines
}
