//! Options of the quantization of a folder.

use anyhow::{Result, ensure};
use regex::Regex;
use serde_json::json;

use super::Method;
use super::budget::Choices;
use super::journal::MadeFrom;
use super::smooth::Smoothing;
use crate::interchange::{Dialect, Scheme};

/// Options of quantization.
#[derive(Debug, Clone)]
pub struct QuantizeOptions {
    /// Dialect of the output.
    pub dialect: Dialect,
    /// Quantized operands.
    pub scheme: Scheme,
    /// Quantization method of weights.
    pub method: Method,
    /// Modules to skip, in addition to routers and the head.
    pub exclude: Vec<Regex>,
    /// Modules to quantize to FP8 instead of NVFP4.
    pub fp8: Vec<Regex>,
    /// Formats chosen for a number of bits per weight; without them, NVFP4 and `fp8`.
    pub formats: Option<Choices>,
    /// Dequantization factor of every quantized input, instead of amax / 2688 from the calibration.
    pub input_scale: Option<f32>,
    /// True to write scales for an FP8 key-value cache.
    pub kv_cache_fp8: bool,
    /// Smoothing of inputs before quantization.
    pub smooth: Smoothing,
}

impl QuantizeOptions {
    /// Checks that options that need calibration have it.
    ///
    /// # Errors
    /// Returns an error that names the option.
    pub(super) fn check(&self, calibrated: bool) -> Result<()> {
        ensure!(
            self.scheme == Scheme::W4a16 || self.input_scale.is_some() || calibrated,
            "scheme is w4a4, which needs the largest magnitude of every layer's input: calibrate \
             on text, or give an input scale"
        );
        ensure!(
            self.method != Method::Gptq || calibrated,
            "method is gptq, which needs the second moments of every layer's input: calibrate on \
             text, or choose rtn, 4over6 or search"
        );
        ensure!(
            self.smooth == Smoothing::None || calibrated,
            "smooth is {}, which needs the size of every layer's input features: calibrate on text",
            self.smooth.name()
        );
        let in_fp8 = !self.fp8.is_empty() || self.formats.is_some();
        ensure!(
            self.fp8.is_empty() || self.formats.is_none(),
            "bits is given, which chooses the layers in FP8, but fp8 is given too"
        );
        ensure!(
            !in_fp8 || calibrated || self.dialect == Dialect::CompressedTensors,
            "dialect is modelopt, whose FP8 layers have static scales of their inputs: calibrate on \
             text, or choose compressed-tensors"
        );
        if in_fp8 {
            self.refuse_smoothing()?;
        }
        ensure!(
            !self.kv_cache_fp8 || calibrated,
            "kv is fp8, which needs the largest keys and values of every layer: calibrate on text"
        );
        Ok(())
    }

    /// Returns an error if inputs are smoothed, which layers in FP8 do not support.
    pub(super) fn refuse_smoothing(&self) -> Result<()> {
        ensure!(
            self.smooth == Smoothing::None,
            "smooth is {}, which is not supported with layers in FP8",
            self.smooth.name()
        );
        Ok(())
    }

    /// Returns the options by their names on the command line.
    pub(super) fn made_from(&self) -> MadeFrom {
        let [exclude, fp8] = [&self.exclude, &self.fp8]
            .map(|regexes| regexes.iter().map(Regex::as_str).collect::<Vec<_>>());
        let options = [
            ("version", json!(env!("CARGO_PKG_VERSION"))),
            ("dialect", json!(self.dialect.name())),
            ("scheme", json!(self.scheme.name())),
            ("method", json!(self.method.name())),
            ("exclude", json!(exclude)),
            ("fp8", json!(fp8)),
            (
                "bits",
                json!(self.formats.as_ref().map(|formats| formats.budget)),
            ),
            (
                "formats",
                json!(self.formats.as_ref().map(Choices::formats)),
            ),
            (
                "input-scale",
                json!(self.input_scale.map(|scale| scale.to_string())),
            ),
            ("kv", json!(if self.kv_cache_fp8 { "fp8" } else { "bf16" })),
            ("smooth", json!(self.smooth.name())),
        ];
        options.map(|(name, value)| (name.to_owned(), value)).into()
    }
}
