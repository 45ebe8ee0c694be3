//! Cross entropy with burn-nn's interface. The other losses are burn-nn's own.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Device, Int, Tensor};
use nvfp4_formats::Nvfp4Error;

pub use burn_nn::loss::*;

use super::cast;
use crate::functions::or_panic;
use crate::loss::{CrossEntropy, check_targets, try_cross_entropy};
use crate::validate;

/// Configuration of [`CrossEntropyLoss`]; same fields and defaults as
/// `burn_nn::loss::CrossEntropyLossConfig`.
#[derive(Config, Debug)]
pub struct CrossEntropyLossConfig {
    /// Targets whose rows are ignored.
    pub pad_tokens: Option<Vec<usize>>,
    /// Factor of the loss of each class; positive.
    pub weights: Option<Vec<f32>>,
    /// Label smoothing: share of the probability that is spread over all classes, from 0 to 1.
    pub smoothing: Option<f32>,
    /// True if the input is logits, false if it is probabilities.
    #[config(default = true)]
    pub logits: bool,
}

impl CrossEntropyLossConfig {
    /// Creates a loss on `device`.
    ///
    /// # Errors
    /// Returns an error if `smoothing` is outside `[0, 1]`, or a weight is not positive.
    pub fn try_init(&self, device: &Device) -> Result<CrossEntropyLoss, Nvfp4Error> {
        if let Some(smoothing) = self.smoothing.filter(|share| !(0.0..=1.0).contains(share)) {
            let expected = "a number from 0 to 1";
            return Err(Nvfp4Error::value(
                "smoothing",
                smoothing.to_string(),
                expected,
            ));
        }
        let mut weights = self.weights.iter().flatten();
        if let Some(weight) = weights.find(|weight| weight.is_nan() || **weight <= 0.0) {
            let expected = "positive numbers";
            return Err(Nvfp4Error::value("weights", weight.to_string(), expected));
        }
        let weights = self.weights.as_ref();
        Ok(CrossEntropyLoss {
            pad_tokens: self.pad_tokens.clone(),
            weights: weights.map(|weights| Tensor::from_floats(weights.as_slice(), device)),
            smoothing: self.smoothing,
            logits: self.logits,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> CrossEntropyLoss {
        or_panic("CrossEntropyLossConfig::init", self.try_init(device))
    }
}

/// Cross entropy, the mean over the rows that are not ignored. Replaces
/// `burn_nn::loss::CrossEntropyLoss`: same fields.
///
/// [`cross_entropy`](crate::loss::cross_entropy) computes loss and gradient in one pass, in `f32`.
/// Burn's operations compute losses with `weights`, with more than one of `pad_tokens`, or of
/// probabilities; each of these forwards emits a [`tracing`] event of level `DEBUG`.
///
/// If all rows are ignored, the fused loss is 0, and burn-nn's is NaN.
#[derive(Module, Debug)]
pub struct CrossEntropyLoss {
    /// Targets whose rows are ignored.
    #[module(skip)]
    pub pad_tokens: Option<Vec<usize>>,
    /// Factor of the loss of each class, `[classes]`.
    pub weights: Option<Tensor<1>>,
    /// Label smoothing: share of the probability that is spread over all classes.
    #[module(skip)]
    pub smoothing: Option<f32>,
    /// True if the input is logits, false if it is probabilities.
    #[module(skip)]
    pub logits: bool,
}

impl CrossEntropyLoss {
    /// Creates a loss that ignores rows with the target `pad_index`, if it is given.
    pub fn new(pad_index: Option<usize>, device: &Device) -> Self {
        CrossEntropyLossConfig::new()
            .with_pad_tokens(pad_index.map(|index| vec![index]))
            .init(device)
    }

    /// Computes the loss, `[1]`, of `logits` (`[rows, classes]`; `f32`, `bf16` or `f16`) against
    /// `targets` (`[rows]`), in the dtype of the logits.
    ///
    /// # Errors
    /// Same as [`try_cross_entropy`]; also if there is not one of `weights` per class.
    pub fn try_forward(
        &self,
        logits: Tensor<2>,
        targets: Tensor<1, Int>,
    ) -> Result<Tensor<1>, Nvfp4Error> {
        let dtype = logits.dtype().into();
        match self.fused() {
            Ok(params) => Ok(cast(try_cross_entropy(logits, targets, params)?, dtype)),
            Err(reason) => {
                validate::operand("logits", &logits)?;
                let [rows, classes] = logits.dims();
                check_targets(&logits, "logits", &targets, (rows, classes))?;
                if let Some(weights) = &self.weights {
                    let why = || "one per class of `logits`".into();
                    validate::shape("weights", weights.dims(), [classes], why)?;
                }
                tracing::debug!(reason, "cross entropy by Burn's operations");
                let burns = burn_nn::loss::CrossEntropyLoss {
                    pad_tokens: self.pad_tokens.clone(),
                    weights: self.weights.clone(),
                    smoothing: self.smoothing,
                    logits: self.logits,
                };
                Ok(burns.forward(logits, targets))
            }
        }
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        or_panic(
            "CrossEntropyLoss::forward",
            self.try_forward(logits, targets),
        )
    }

    /// Returns the parameters of the fused loss, or the reason why it cannot compute this one.
    fn fused(&self) -> Result<CrossEntropy, &'static str> {
        if self.weights.is_some() {
            return Err("weights");
        }
        if !self.logits {
            return Err("probabilities");
        }
        let ignore = match self.pad_tokens.as_deref().unwrap_or_default() {
            // No target.
            [] => i32::MIN,
            [token] => i32::try_from(*token).unwrap_or(i32::MIN),
            _ => return Err("several pad_tokens"),
        };
        Ok(CrossEntropy {
            ignore,
            smoothing: self.smoothing.unwrap_or_default(),
            ..CrossEntropy::default()
        })
    }
}
