//! `nvfp4 quantize`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::tensor::FloatDType;
use clap::Args;
use indicatif::HumanBytes;
use nvfp4_lm::decoder::Decoder;
use nvfp4_lm::hf::{GenerationConfig, Tokenizer};
use nvfp4_lm::interchange::{Dialect, Scheme};
use nvfp4_lm::quantize::folder::Calibration;
use nvfp4_lm::quantize::text::{CalibrationText, calibrate};
use nvfp4_lm::quantize::{Method, QuantizeOptions, Quantized, quantize_folder};
use regex::Regex;

use crate::device::DeviceName;
use crate::layers::LayerBar;
use crate::table::table;

#[derive(Args)]
pub(crate) struct Quantize {
    /// Quantize the model in this folder: config.json and safetensors files
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Write it to this folder, which must be empty or absent
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Write it for the readers of this dialect
    #[arg(long, value_name = "DIALECT", default_value = "compressed-tensors")]
    dialect: Dialect,
    /// Quantize weights only, or activations too
    #[arg(long, value_name = "SCHEME", default_value = "w4a16")]
    scheme: Scheme,
    /// Quantize weights by this method
    #[arg(long, value_name = "METHOD", default_value = "search")]
    method: Method,
    /// Leave modules whose name this regular expression matches as they are; may be repeated
    ///
    /// Routers and the output head are always left. A projection that readers fuse with one that
    /// is left (q/k/v, gate/up) is left too.
    #[arg(long, value_name = "REGEX")]
    exclude: Vec<String>,
    /// Dequantize every quantized input by this factor, instead of calibrating one for each layer
    #[arg(long, value_name = "FACTOR")]
    input_scale: Option<f32>,
    /// Calibrate on the text of this file: the model reads it, in f32
    ///
    /// It gives the importance of each input feature (`search`, `gptq`), second moments (`gptq`)
    /// and the scales of activations (`w4a4`). The whole model is in memory for it.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Cut the calibration's text into sequences of this many tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    calibration_length: usize,
    /// Read at most this many sequences of it
    #[arg(long, value_name = "N", default_value_t = 128)]
    calibration_sequences: usize,
    /// Calibrate on this device: flex, cpu or cuda:N [default: cuda:0 if there is one, else flex]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,
}

impl Quantize {
    pub(crate) fn run(self) -> Result<()> {
        let options = self.options()?;
        let calibration = match &self.calibration {
            Some(file) => self.calibrate(file)?,
            None => Calibration::new(),
        };
        let mut bar = LayerBar::new("quantize");
        let show = &mut |done: usize, total: usize, layer: &str| bar.show(done, total, layer);
        let done = quantize_folder(&self.model, &self.out, &options, &calibration, show)?;
        bar.finish();
        for line in report(&done) {
            println!("{line}");
        }
        if matches!(self.method, Method::Search | Method::FourOverSix) && calibration.is_empty() {
            println!("no calibration: errors of all input features count the same, E[x²] = 1");
        }
        println!(
            "{} {} by {} written to {}",
            self.dialect.name(),
            self.scheme.name(),
            self.method.name(),
            self.out.display()
        );
        Ok(())
    }

    /// What the model's linear layers read while it reads `file`.
    fn calibrate(&self, file: &Path) -> Result<Calibration> {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let device = DeviceName::or_best(self.device)?.open()?.without_autodiff();
        let model = Decoder::load(&self.model, &device, FloatDType::F32)?;
        let settings = GenerationConfig::read(&self.model, model.config())?;
        let tokenizer = Tokenizer::read(&self.model, model.config().vocab, &settings.eos)?;
        let tokens = tokenizer.encode(&text, true)?;
        let options = CalibrationText {
            length: self.calibration_length,
            sequences: self.calibration_sequences,
            products: self.method == Method::Gptq,
        };
        let mut bar = LayerBar::new("calibrate");
        let found = calibrate(&model, &tokens, options, &mut |done, total| {
            bar.show(done, total, "");
        })?;
        bar.finish();
        Ok(found)
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
        })
    }
}

/// What was quantized and what was not.
fn report(done: &Quantized) -> Vec<String> {
    let head = ["layer", "shape", "before", "after", "SQNR dB"];
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
        ]);
    }
    let mut lines = table("llrrr", &rows);
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
