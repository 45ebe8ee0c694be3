//! Quantization error of a run per layer, sampled from real steps at a low cost.
//!
//! A sample reads a part of each operand: evenly spaced stored rows with about 256 Ki elements. The
//! step copies them on its device, about 1.5 MB per operand, without synchronization. After the
//! step the host reads the copies and evaluates them on all cores. Other steps have no cost.
//!
//! Transformed operands (those of wgrad in most recipes, and all with MS-EDEN) are measured in the
//! rotated domain: their dequantized codes against the transformed source.
//!
//! The tokens and weights of all experts of a layer are sampled together, each value with the
//! global scale of its expert. An expert's share of the sampled tokens is its share of all tokens;
//! the weights of all experts have equal shares.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn_nvfp4::{Nvfp4LinearConfig, Nvfp4Recipe, telemetry::Telemetry};
//! # use burn_core::tensor::{Device, Distribution, Tensor};
//!
//! let device = Device::flex().autodiff();
//! let layer = Nvfp4LinearConfig::new(64, 32).with_recipe(Nvfp4Recipe::new()).init(&device);
//! let telemetry = Telemetry::start(&layer);
//! let x = Tensor::<2>::random([32, 64], Distribution::Normal(0.0, 1.0), &device);
//! let gradients = layer.forward(x).square().sum().backward();
//! for sample in telemetry.finish() {
//!     println!("{} {}: {:.1} dB", sample.layer, sample.operand, sample.sqnr_db);
//! }
//! # }
//! ```

#[cfg(feature = "train")]
pub mod metrics;
mod operand;
mod sample;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_core::module::Module;
use burn_core::tensor::Device;
use rayon::prelude::*;

pub use operand::{CSV_HEADER, OperandSample};

use crate::ops::{Probe, SampledOperand};
use crate::state::{self, LayerState};

/// Sampler for every `n`-th training step of a model, for any training loop. Clones share the
/// count.
#[derive(Debug, Clone)]
pub struct TelemetrySampler {
    every: usize,
    steps: Arc<AtomicUsize>,
}

impl TelemetrySampler {
    /// Creates a sampler of the first step and every `every`-th step after it; of no step if
    /// `every` is 0.
    pub fn new(every: usize) -> Self {
        Self {
            every,
            steps: Arc::default(),
        }
    }

    /// Runs `step`, one forward and backward of `model`, and returns its samples, which are empty
    /// if the step is not sampled.
    pub fn sample<M: Module, T>(
        &self,
        model: &M,
        step: impl FnOnce() -> T,
    ) -> (T, Vec<OperandSample>) {
        let number = self.steps.fetch_add(1, Ordering::Relaxed);
        if self.every == 0 || !number.is_multiple_of(self.every) {
            return (step(), Vec::new());
        }
        let telemetry = Telemetry::start(model);
        let result = step();
        (result, telemetry.finish())
    }
}

/// Samples every NVFP4 operand of a model's linear layers (explicit, decorated or grouped) from
/// [`start`](Self::start) to [`finish`](Self::finish). Run one forward and backward between the
/// two. Operands in other formats are not sampled.
///
/// In layers of [`tensor_parallel`](crate::nn::tensor_parallel) a rank samples its shards, and all
/// tokens where these are gathered. All ranks of the group must sample the same forward and
/// backward.
#[derive(Debug)]
pub struct Telemetry {
    layers: Vec<(String, LayerState, Probe)>,
    devices: Vec<Device>,
}

impl Telemetry {
    /// Starts to sample `model`, and all clones of its layers.
    pub fn start<M: Module>(model: &M) -> Self {
        let layers = state::layers(model)
            .into_iter()
            .map(|layer| {
                let probe = Probe::default();
                layer.state.set_probe(Some(probe.clone()));
                (layer.path, layer.state, probe)
            })
            .collect();
        Self {
            layers,
            devices: model.devices(),
        }
    }

    /// Stops, and returns the samples in the order of the layers. Waits for the devices, because
    /// the GEMMs of decorated layers run only when Burn's fusion executes them.
    pub fn finish(self) -> Vec<OperandSample> {
        for device in &self.devices {
            if let Err(error) = device.sync() {
                tracing::warn!(?error, "telemetry: the step failed");
            }
        }
        let mut sampled = Vec::new();
        for (path, _, probe) in &self.layers {
            sampled.extend(probe.read().into_iter().map(|sampled| (path, sampled)));
        }
        let sample = |(path, sampled): (&String, SampledOperand)| {
            let layer = path.clone();
            Some(OperandSample {
                layer,
                ..sampled.statistics()?
            })
        };
        sampled.into_par_iter().filter_map(sample).collect()
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        for (_, state, _) in &self.layers {
            state.set_probe(None);
        }
    }
}
