//! `nvfp4 quantize`.

mod interrupt;
mod result;

use std::fs;
use std::hash::Hasher;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::tensor::FloatDType;
use clap::Args;
use fnv::FnvHasher;
use nvfp4_lm::decoder::{Decoder, KvPrecision};
use nvfp4_lm::eval::Windows;
use nvfp4_lm::finetune::data::TextReader;
use nvfp4_lm::hf::{DecoderConfig, NewFolder};
use nvfp4_lm::interchange::{Dialect, Scheme};
use nvfp4_lm::quantize::journal::{MadeFrom, has_journal};
use nvfp4_lm::quantize::text::{CalibrationText, calibrate, sample};
use nvfp4_lm::quantize::{
    Calibration, Engine, Method, Quantization, QuantizeOptions, Smoothing, check_bits,
    choose_formats,
};
use nvfp4_lm::tokens::Texts;
use regex::Regex;

use crate::device::ComputeType;
use crate::options::shared::{DeviceOption, JsonOption, OutFolder};
use crate::perplexity::{TextsPerplexity, perplexity, windows};
use crate::terminal::{note, warn, without_tokenizer};
use interrupt::Interrupt;
use result::{CalibrationData, Evaluation, QuantizeResult};

/// Default number of tokens per calibration sequence, unless the model's maximum context is
/// shorter.
const CALIBRATION_LENGTH: usize = 512;
/// Number of calibration tokens below which the command warns.
const FEW_TOKENS: usize = 65_536;

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
    /// Model and options must match the interrupted run. The output is identical byte for byte,
    /// except that a calibration on a GPU may differ in the last bits of its sums.
    #[arg(long)]
    resume: bool,
    /// Skip modules whose name matches this regular expression; may be given several times
    ///
    /// Routers and the output head are never quantized. Projections that readers fuse with a
    /// skipped one (q/k/v, gate/up, the experts of a layer) are skipped too.
    #[arg(long, value_name = "REGEX")]
    exclude: Vec<String>,
    /// Quantize modules whose name matches this regular expression to FP8 instead of NVFP4; may be
    /// given several times
    ///
    /// Projections that readers fuse with such a one (q/k/v, gate/up, the experts of a layer) are
    /// in FP8 too. For compressed-tensors, weights have a scale per channel and inputs of w4a4 one
    /// per token; for ModelOpt, weights and inputs have one scale each, which requires
    /// --calibration.
    #[arg(long, value_name = "REGEX")]
    fp8: Vec<String>,
    /// Choose NVFP4, FP8 or the model's type for each layer, with at most this number of bits per
    /// weight of the linear layers, scales included
    ///
    /// Measures what each format of each group of fused layers costs: the KL divergence of the model
    /// with only this group quantized, on up to 16 sequences of the calibration. Bits go to the
    /// groups with the largest decrease per bit. Requires --calibration. Holds the whole model in
    /// memory, twice for a moment.
    #[arg(
        long,
        value_name = "BITS",
        requires = "calibration",
        conflicts_with = "fp8"
    )]
    bits: Option<f64>,
    /// Use this input scale for every quantized layer, instead of calibrating one per layer
    #[arg(long, value_name = "FACTOR")]
    input_scale: Option<f32>,
    /// Store keys and values in this format
    ///
    /// For fp8, the folder contains the scales of the cache: amax / 448 per layer; keys are
    /// measured after the rotary embedding. Requires --calibration.
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    kv: KvPrecision,
    /// Calibrate on the texts in these files and folders, with an f32 forward pass
    ///
    /// Provides the importance of each input feature (`search`, `gptq`), second moments (`gptq`),
    /// activation scales (`w4a4`) and cache scales (`--kv fp8`). Holds one layer of the model and
    /// the inputs of the next in memory.
    /// Each row of a .jsonl file or of a list in a .json file and every other file is a text. A row
    /// is {"text": TEXT}, {"prompt": TEXT, "completion": TEXT} or {"messages": [{"role": ROLE,
    /// "content": TEXT}, ..]}, which the model's chat template renders, or a row of ShareGPT or
    /// Alpaca. In a folder, files that end in .txt, .md and .jsonl and such .json files are read.
    /// Give at least 65,536 tokens of text like the model's inputs.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    calibration: Vec<PathBuf>,
    /// Cut the calibration texts into sequences of this many tokens [default: 512, or the model's
    /// maximum context]
    #[arg(long, value_name = "N", requires = "calibration")]
    calibration_length: Option<usize>,
    /// Use at most this many sequences, taken in turn from the files
    #[arg(
        long,
        value_name = "N",
        default_value_t = 128,
        requires = "calibration"
    )]
    calibration_sequences: usize,
    /// Report the perplexity of the texts in these files and folders before and after quantization
    ///
    /// Reads them like --calibration. Holds the whole model in memory, as `nvfp4 eval` does: NVFP4
    /// weights stay packed.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    eval: Vec<PathBuf>,
    /// Evaluate the texts of --eval in windows of this many tokens [default: 2048, or the model's
    /// maximum context]
    #[arg(long, value_name = "N", requires = "eval")]
    eval_length: Option<usize>,
    /// Advance the window by this many tokens [default: half a window]
    #[arg(long, value_name = "N", requires = "eval")]
    eval_stride: Option<usize>,
    #[command(flatten)]
    device: DeviceOption,
    #[command(flatten)]
    json: JsonOption,
}

impl Quantize {
    pub(crate) fn run(self) -> Result<()> {
        let mut options = self.options()?;
        let config = DecoderConfig::read(&self.model)?;
        let windows = windows("eval-length", self.eval_length, self.eval_stride, &config)?;
        let read = self.calibration_text(&config)?;
        self.check_out()?;
        if let Some(bits) = self.bits {
            check_bits(&self.model, &options, bits)?;
        }
        let reader = match self.calibration.is_empty() && self.eval.is_empty() {
            // Quantization alone needs no tokenizer.
            true => None,
            false => Some(TextReader::read(&self.model)?),
        };
        let texts = |option: &str, paths: &[PathBuf]| match (&reader, paths) {
            (None, _) | (_, []) => Ok(None),
            (Some(reader), paths) => reader.texts(option, paths).map(Some),
        };
        let eval = texts("eval", &self.eval)?;
        let calibration_texts = texts("calibration", &self.calibration)?;
        let tokens = calibration_texts.as_ref().map(|texts| {
            let files = texts.files.iter().map(|file| file.documents.concat());
            sample(&files.collect::<Vec<_>>(), read)
        });
        let mut warnings = Vec::new();
        let mut warning = |text: String| {
            warn(&text);
            warnings.push(text);
        };
        without_tokenizer(&self.model)
            .into_iter()
            .for_each(&mut warning);
        let few = tokens.as_ref().and_then(|it| few_tokens(it.len(), read));
        few.into_iter().for_each(&mut warning);
        if tokens.is_none() && matches!(self.method, Method::Search | Method::FourOverSix) {
            warning(
                "no calibration: errors of all input features count the same, E[x²] = 1".into(),
            );
        }
        let reads = calibrates_on(tokens.as_deref(), read);
        let mut calibration = None;
        if let (Some(bits), Some(tokens)) = (self.bits, &tokens) {
            let model = self.decoder()?;
            let found = calibrate(&model, tokens, read)?;
            let text = (&tokens[..], read.length);
            let chosen = choose_formats(&self.model, &model, &options, &found, text, bits)?;
            options.formats = Some(chosen);
            calibration = Some(found);
        }
        let run = match self.resume {
            true => Quantization::resume(&self.model, &self.out, &options, reads)?,
            false => Quantization::start(&self.model, &self.out, &options, reads)?,
        };
        let interrupt = Interrupt::watch(&self.out)?;
        let before = self.perplexity(&self.model, eval.as_ref(), windows)?;
        let device = self.device.name()?.open()?.without_autodiff();
        let run = run.with_engine(Engine::of(&device));
        let kept = match (&tokens, calibration) {
            (Some(_), Some(found)) => Some(Self::kept_calibration(&run, found)?),
            (Some(_), None) => run.calibration()?,
            (None, _) => Some(Calibration::new()),
        };
        let quantized = match (&tokens, kept) {
            (Some(tokens), None) => run.calibrate(&device, tokens, read)?,
            (_, kept) => run.finish(&kept.unwrap_or_default())?,
        };
        interrupt.finished();
        let after = self.perplexity(&self.out, eval.as_ref(), windows)?;
        let calibration = calibration_texts.as_ref().zip(quantized.calibration_tokens);
        let result = QuantizeResult {
            model: &self.model,
            out: &self.out,
            dialect: self.dialect.name(),
            scheme: self.scheme.name(),
            method: self.method.name(),
            smooth: self.smooth.name(),
            calibration: calibration
                .map(|(texts, used)| CalibrationData::new(texts, used, read.length)),
            evaluation: before
                .zip(after)
                .map(|(before, after)| Evaluation::new(before, after)),
            quantized: &quantized,
            warnings,
        };
        self.json.print(&result, QuantizeResult::lines)
    }

    /// Checks the folder of the output before anything else is read. A resumed run says so if there
    /// is nothing in it.
    fn check_out(&self) -> Result<()> {
        let out = self.out.display();
        if has_journal(&self.out) {
            return Ok(());
        }
        if !self.resume {
            // Nothing is kept.
            drop(NewFolder::create(&self.out)?);
            return Ok(());
        }
        ensure!(
            self.out.is_dir(),
            "resume is given, but there is nothing to resume in out {out}: it does not exist"
        );
        if fs::read_dir(&*self.out)?.next().is_none() {
            note!("out {out} is empty: nothing to resume, the quantization begins");
        }
        Ok(())
    }

    /// Returns the amount of text that calibration reads.
    fn calibration_text(&self, config: &DecoderConfig) -> Result<CalibrationText> {
        config.check_length("calibration-length", self.calibration_length.unwrap_or(0))?;
        let length = self.calibration_length;
        let length = length.unwrap_or(CALIBRATION_LENGTH.min(config.longest()));
        for (name, value) in [
            ("calibration-length", length),
            ("calibration-sequences", self.calibration_sequences),
        ] {
            ensure!(value > 0, "{name} is 0, but it must be at least 1");
        }
        Ok(CalibrationText {
            length,
            sequences: self.calibration_sequences,
            products: self.method == Method::Gptq,
        })
    }

    /// Returns the calibration of a resumed run, or `found`, which is then kept for resuming.
    fn kept_calibration(run: &Quantization, found: Calibration) -> Result<Calibration> {
        if let Some(kept) = run.calibration()? {
            return Ok(kept);
        }
        run.keep_calibration(&found)?;
        Ok(found)
    }

    /// Loads the model to record the inputs of its linear layers.
    fn decoder(&self) -> Result<Decoder> {
        let device = self.device.name()?.open()?.without_autodiff();
        Decoder::load(&self.model, &device, FloatDType::F32)
    }

    /// Returns the perplexity of `texts` under the model in `folder`, if there are any texts.
    fn perplexity(
        &self,
        folder: &Path,
        texts: Option<&Texts>,
        windows: Windows,
    ) -> Result<Option<TextsPerplexity>> {
        let Some(texts) = texts else {
            return Ok(None);
        };
        let name = self.device.name()?;
        let device = name.open()?.without_autodiff();
        let dtype = ComputeType::or_of(None, name);
        let model = Decoder::load_for_inference(folder, &device, dtype, None)?;
        perplexity(&model, texts, windows).map(Some)
    }

    fn options(&self) -> Result<QuantizeOptions> {
        let regexes = |option: &str, texts: &[String]| -> Result<Vec<Regex>> {
            let regex = |text: &String| {
                Regex::new(text).with_context(|| {
                    format!("{option} is {text:?}, which is not a valid regular expression")
                })
            };
            texts.iter().map(regex).collect()
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
            exclude: regexes("exclude", &self.exclude)?,
            fp8: regexes("fp8", &self.fp8)?,
            input_scale: scale,
            kv_cache_fp8: self.kv == KvPrecision::Fp8,
            smooth: self.smooth,
            formats: None,
        })
    }
}

/// Returns the inputs that calibration depends on, by option name.
fn calibrates_on(tokens: Option<&[u32]>, read: CalibrationText) -> MadeFrom {
    let Some(tokens) = tokens else {
        return MadeFrom::new();
    };
    let mut hasher = FnvHasher::default();
    tokens
        .iter()
        .for_each(|token| hasher.write(&token.to_le_bytes()));
    let reads = [
        ("calibration", format!("{:016x}", hasher.finish()).into()),
        ("calibration-length", read.length.into()),
        ("calibration-sequences", read.sequences.into()),
    ];
    reads.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Returns a warning if calibration on `tokens` tokens says little about the inputs of layers.
fn few_tokens(tokens: usize, read: CalibrationText) -> Option<String> {
    let CalibrationText {
        length, sequences, ..
    } = read;
    let advice = match tokens == length * sequences {
        true => format!(
            "--calibration-sequences {} for sequences of {length} tokens",
            FEW_TOKENS.div_ceil(length)
        ),
        false => "more text with --calibration, which takes several files and folders".into(),
    };
    (tokens < FEW_TOKENS).then(|| {
        format!(
            "calibration reads {tokens} tokens; scales and statistics of fewer than 65,536 are \
             unreliable: give {advice}"
        )
    })
}
