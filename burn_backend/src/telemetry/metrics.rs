//! Telemetry as metrics of burn-train (feature `train`).
//!
//! The output of a training step holds the samples of that step (most steps have none) and passes
//! them to the metrics:
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! # use burn_core as burn;
//! # use burn_core::module::Module;
//! # use burn_core::tensor::Tensor;
//! # use burn_nvfp4::Nvfp4Linear;
//! use burn_nvfp4::telemetry::metrics::TelemetryInput;
//! use burn_nvfp4::telemetry::TelemetrySampler;
//! use burn_train::metric::{Adaptor, LossInput};
//! use burn_train::{RegressionOutput, TrainOutput, TrainStep};
//!
//! #[derive(Module, Debug)]
//! struct Net {
//!     layer: Nvfp4Linear,
//!     #[module(skip)]
//!     sampler: TelemetrySampler, // TelemetrySampler::new(100): every 100th step
//! }
//!
//! struct Output {
//!     regression: RegressionOutput,
//!     telemetry: TelemetryInput,
//! }
//!
//! impl Adaptor<TelemetryInput> for Output {
//!     fn adapt(&self) -> TelemetryInput {
//!         self.telemetry.clone()
//!     }
//! }
//! # impl Adaptor<LossInput> for Output {
//! #     fn adapt(&self) -> LossInput {
//! #         self.regression.adapt()
//! #     }
//! # }
//! # impl burn_train::ItemLazy for Output {
//! #     fn sync(self) -> Result<Self, burn_core::tensor::ExecutionError> {
//! #         Ok(Self { regression: self.regression.sync()?, telemetry: self.telemetry })
//! #     }
//! # }
//!
//! impl TrainStep for Net {
//!     type Input = (Tensor<2>, Tensor<2>);
//!     type Output = Output;
//!
//!     fn step(&self, (x, target): (Tensor<2>, Tensor<2>)) -> TrainOutput<Output> {
//!         let ((regression, grads), samples) = self.sampler.sample(self, || {
//!             let output = self.layer.forward(x);
//!             let loss = (output.clone() - target.clone()).square().mean();
//!             let grads = loss.backward();
//!             (RegressionOutput::new(loss, output, target), grads)
//!         });
//!         TrainOutput::new(self, grads, Output { regression, telemetry: samples.into() })
//!     }
//! }
//! # }
//! ```
//!
//! The training registers them: `.metric_train_numeric(TelemetryMetric::mean(Statistic::Sqnr))`, or
//! one per layer, by [`TelemetryMetric::for_layers`].

use std::sync::Arc;

use burn_core::module::Module;
use burn_core::tensor::TensorReadError;
use burn_train::metric::state::{FormatOptions, NumericMetricState};
use burn_train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use super::OperandSample;
use crate::state;

/// Statistic of operands that a [`TelemetryMetric`] shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statistic {
    /// [`OperandSample::sqnr_db`]; operands without quantization error are excluded.
    Sqnr,
    /// [`OperandSample::signal_to_noise`]: the norm of the operand over that of its quantization
    /// noise. For `dgrad.dy`, a value below √3 is the signal to leave 4-bit gradients. Operands
    /// without quantization error are excluded.
    SignalToNoise,
    /// [`OperandSample::zeros`], in percent.
    Zeros,
    /// [`OperandSample::saturated`], in percent.
    Saturated,
    /// [`OperandSample::underflowed_blocks`], in percent.
    UnderflowedBlocks,
    /// [`OperandSample::amax`].
    Amax,
    /// Percentage of the operands that were rounded stochastically; the others were rounded to
    /// nearest.
    Stochastic,
}

impl Statistic {
    /// All statistics.
    pub const ALL: [Self; 7] = [
        Self::Sqnr,
        Self::SignalToNoise,
        Self::Zeros,
        Self::Saturated,
        Self::UnderflowedBlocks,
        Self::Amax,
        Self::Stochastic,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Sqnr => "SQNR",
            Self::SignalToNoise => "Signal over Noise",
            Self::Zeros => "Lost to Zero",
            Self::Saturated => "Saturated Codes",
            Self::UnderflowedBlocks => "Underflowed Blocks",
            Self::Amax => "Amax",
            Self::Stochastic => "Rounded Stochastically",
        }
    }

    fn unit(self) -> Option<&'static str> {
        match self {
            Self::Sqnr => Some("dB"),
            Self::SignalToNoise | Self::Amax => None,
            Self::Zeros | Self::Saturated | Self::UnderflowedBlocks | Self::Stochastic => Some("%"),
        }
    }

    fn higher_is_better(self) -> bool {
        matches!(self, Self::Sqnr | Self::SignalToNoise)
    }

    fn of(self, sample: &OperandSample) -> f64 {
        match self {
            Self::Sqnr => sample.sqnr_db,
            Self::SignalToNoise => sample.signal_to_noise,
            Self::Zeros => 100.0 * sample.zeros,
            Self::Saturated => 100.0 * sample.saturated,
            Self::UnderflowedBlocks => 100.0 * sample.underflowed_blocks,
            Self::Amax => f64::from(sample.amax),
            Self::Stochastic => 100.0 * f64::from(u8::from(sample.stochastic)),
        }
    }
}

/// Samples of one training step; empty if the step was not sampled.
#[derive(Debug, Clone, Default)]
pub struct TelemetryInput {
    samples: Arc<Vec<OperandSample>>,
}

impl From<Vec<OperandSample>> for TelemetryInput {
    fn from(samples: Vec<OperandSample>) -> Self {
        Self {
            samples: Arc::new(samples),
        }
    }
}

/// Metric of a [`Statistic`]: its mean over the selected operands of a step, which are all of them,
/// or those of one name or one layer. Steps without a sample have no value and do not change the
/// metric.
#[derive(Clone)]
pub struct TelemetryMetric {
    statistic: Statistic,
    operand: Option<String>,
    layer: Option<String>,
    name: MetricName,
    state: NumericMetricState,
    /// True if the last step had a value.
    current: bool,
    /// True if any step had a value.
    any: bool,
}

impl TelemetryMetric {
    /// Creates a metric of the mean over all operands of all layers.
    pub fn mean(statistic: Statistic) -> Self {
        Self::new(statistic, None, None)
    }

    /// Creates one metric per layer of `model`, of the mean over all its operands.
    pub fn for_layers<M: Module>(statistic: Statistic, model: &M) -> Vec<Self> {
        state::layers(model)
            .into_iter()
            .map(|layer| Self::new(statistic, None, Some(layer.path)))
            .collect()
    }

    /// Selects operands of this name, one of those in [`OperandSample::operand`].
    pub fn of_operand(self, operand: &str) -> Self {
        Self::new(self.statistic, Some(operand.into()), self.layer)
    }

    /// Selects the layer at this path.
    pub fn of_layer(self, layer: &str) -> Self {
        Self::new(self.statistic, self.operand, Some(layer.into()))
    }

    fn new(statistic: Statistic, operand: Option<String>, layer: Option<String>) -> Self {
        let parts = [Some(statistic.name()), operand.as_deref(), layer.as_deref()];
        let name: Vec<&str> = parts.into_iter().flatten().collect();
        Self {
            name: Arc::new(name.join(" ")),
            statistic,
            operand,
            layer,
            state: NumericMetricState::new(),
            current: false,
            any: false,
        }
    }

    /// Returns the mean over the selected samples, if any.
    fn value_of(&self, samples: &[OperandSample]) -> Option<f64> {
        let matches = |wanted: &Option<String>, found: &str| {
            wanted.as_deref().is_none_or(|wanted| wanted == found)
        };
        let values: Vec<f64> = samples
            .iter()
            .filter(|sample| {
                matches(&self.operand, sample.operand) && matches(&self.layer, &sample.layer)
            })
            .map(|sample| self.statistic.of(sample))
            .filter(|value| value.is_finite())
            .collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    fn format(&self) -> FormatOptions {
        let options = FormatOptions::new(self.name.clone()).precision(3);
        match self.statistic.unit() {
            Some(unit) => options.unit(unit),
            None => options,
        }
    }
}

impl Metric for TelemetryMetric {
    type Input = TelemetryInput;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: self.statistic.unit().map(String::from),
            higher_is_better: self.statistic.higher_is_better(),
        }
        .into()
    }

    fn update(
        &mut self,
        item: &TelemetryInput,
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        let value = self.value_of(&item.samples);
        self.current = value.is_some();
        Ok(match value {
            Some(value) => {
                self.any = true;
                self.state.update(value, 1);
                self.state.compute_update(self.format())
            }
            None => SerializedEntry::not_available(self.statistic.unit()),
        })
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(match self.any {
            true => self.state.compute_final(self.format()),
            false => SerializedEntry::not_available(self.statistic.unit()),
        })
    }

    fn clear(&mut self) {
        self.state.reset();
        self.current = false;
        self.any = false;
    }
}

impl Numeric for TelemetryMetric {
    fn value(&self) -> Option<NumericEntry> {
        self.current.then(|| self.state.current_value())
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.any.then(|| self.state.running_value())
    }

    fn final_value(&self) -> NumericEntry {
        self.state.final_value()
    }
}
