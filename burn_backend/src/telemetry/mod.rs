//! What quantization does to a run, layer by layer: sampled from real steps, cheap enough to leave on
//! every so many.
//!
//! A sample looks at a slab of each operand: as many stored rows as hold about 256 Ki elements. Those are
//! read back, so a sampled step waits for the device; other steps pay nothing.
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

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn_core::backend::tensor::FloatTensor;
use burn_core::module::Module;
use burn_core::tensor::{Device, FloatDType, Slice, TensorData};
use futures_lite::future::block_on;
use nvfp4_kernels::format::{e2m1, e4m3};
use nvfp4_kernels::{BLOCK, PackedAxis};
use serde::Serialize;

use crate::ops::{Nvfp4Ops, Operand, OperandSpec};
use crate::state::{self, LayerState};

/// Elements of an operand that a sample reads, about.
const SLAB: usize = 1 << 18;

/// What was seen of one operand of one layer in one step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperandSample {
    /// Path of the layer in the model.
    pub layer: String,
    /// `fprop.x`, `fprop.w` or `dgrad.dy`.
    pub operand: &'static str,
    /// Signal over quantization noise, in decibel; infinite where nothing was lost.
    pub sqnr_db: f64,
    /// Norm of the values over the norm of the noise. For `dgrad.dy` it is the signal of "FP4 All the
    /// Way" (arXiv 2505.19115): below √3, 4-bit gradients no longer help, and it is time to switch.
    pub signal_to_noise: f64,
    /// Share of the values that are not zero and became zero.
    pub zeros: f64,
    /// Share of the codes at the end of the grid, ±6.
    pub saturated: f64,
    /// Share of the blocks with a value that is not zero and a scale that is.
    pub underflowed_blocks: f64,
    /// Largest magnitude of the operand, all of it; of the first row where each has its own.
    pub amax: f32,
    /// Whether it was rounded stochastically.
    pub stochastic: bool,
}

/// The names of the columns of [`OperandSample::csv`].
pub const CSV_HEADER: &str =
    "layer,operand,sqnr_db,signal_to_noise,zeros,saturated,underflowed_blocks,amax,stochastic";

impl OperandSample {
    /// The sample as a line of comma-separated values, in the order of [`CSV_HEADER`].
    pub fn csv(&self) -> String {
        let Self {
            layer,
            operand,
            sqnr_db,
            signal_to_noise,
            zeros,
            saturated,
            underflowed_blocks,
            amax,
            stochastic,
        } = self;
        format!(
            "{layer},{operand},{sqnr_db:.3},{signal_to_noise:.4},{zeros:.6},{saturated:.6},\
             {underflowed_blocks:.6},{amax:e},{stochastic}"
        )
    }
}

/// Samples every so many training steps of a model that is trained by someone else's loop. Clones count
/// together.
#[derive(Debug, Clone)]
pub struct TelemetrySampler {
    every: usize,
    steps: Arc<AtomicUsize>,
}

impl TelemetrySampler {
    /// A sampler of the first step and every `every`-th after it; of none if `every` is 0.
    pub fn new(every: usize) -> Self {
        Self {
            every,
            steps: Arc::default(),
        }
    }

    /// Run `step`, one forward and backward of `model`, and hand out what was seen: nothing, unless the
    /// step is one to sample.
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

/// Looks at every NVFP4 operand of a model's linear layers, explicit or decorated, from
/// [`start`](Self::start) to [`finish`](Self::finish): put one forward and backward between them. Operands
/// in other formats, those after a transform, and those of experts are not looked at.
#[derive(Debug)]
pub struct Telemetry {
    layers: Vec<(String, LayerState, Probe)>,
    devices: Vec<Device>,
}

impl Telemetry {
    /// Begin to look at `model`, and at all clones of its layers.
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

    /// Stop, and hand out what was seen, in the order of the layers. Waits for what is under way: the
    /// products of decorated layers run when Burn's fusion comes to them.
    pub fn finish(self) -> Vec<OperandSample> {
        for device in &self.devices {
            if let Err(error) = device.sync() {
                tracing::warn!(?error, "telemetry: the step failed");
            }
        }
        let mut samples = Vec::new();
        for (path, _, probe) in &self.layers {
            let mut seen = probe.seen.lock().expect("no panic while it is held");
            for mut sample in seen.drain(..) {
                sample.layer.clone_from(path);
                samples.push(sample);
            }
        }
        samples
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        for (_, state, _) in &self.layers {
            state.set_probe(None);
        }
    }
}

/// Where a layer leaves what it sees of its operands.
#[derive(Debug, Clone, Default)]
pub(crate) struct Probe {
    seen: Arc<Mutex<Vec<OperandSample>>>,
}

impl Probe {
    /// Look at `operand`, made of `x` as `spec` asks.
    pub(crate) fn look<B: Nvfp4Ops>(
        &self,
        name: &'static str,
        x: &FloatTensor<B>,
        operand: &Operand<B>,
        spec: &OperandSpec,
    ) {
        let Operand::Nvfp4(packed) = operand else {
            return;
        };
        let layout = packed.layout;
        let (outer, inner) = (layout.outer(), layout.inner());
        if layout.hadamard.is_some() || outer * inner == 0 {
            return;
        }
        let rows = (SLAB / inner).clamp(1, outer);
        let slices = match layout.axis {
            PackedAxis::Cols => [Slice::from(0..rows), Slice::from(0..inner)],
            PackedAxis::Rows => [Slice::from(0..inner), Slice::from(0..rows)],
        };
        let x = B::float_cast(B::float_slice(x.clone(), &slices), FloatDType::F32);
        let x = match layout.axis {
            PackedAxis::Cols => x,
            PackedAxis::Rows => B::float_swap_dims(x, 0, 1),
        };
        let part = |width: usize| [Slice::from(0..rows), Slice::from(0..width)];
        let codes = B::int_slice(packed.codes.clone(), &part(layout.blocks() * 2));
        let scales = B::int_slice(packed.scales.clone(), &part(layout.blocks()));
        let read = (
            block_on(B::float_into_data(x)),
            block_on(B::int_into_data(codes)),
            block_on(B::int_into_data(scales)),
            block_on(B::float_into_data(packed.amax.clone())),
        );
        let (Ok(x), Ok(codes), Ok(scales), Ok(amax)) = read else {
            tracing::warn!(name, "telemetry: the operand could not be read");
            return;
        };
        let amax = values(&amax);
        let factors: Vec<f32> = (0..rows)
            .map(|row| amax[row.min(amax.len() - 1)] / layout.scaling.range())
            .collect();
        let slab = Slab {
            x: values(&x),
            codes: codes.iter::<u32>().collect(),
            scales: scales.iter::<u8>().collect(),
            inner,
            blocks: layout.blocks(),
        };
        let mut sample = slab.sample(name, &factors);
        sample.amax = amax[0];
        sample.stochastic = !spec.is_deterministic();
        self.seen
            .lock()
            .expect("no panic while it is held")
            .push(sample);
    }
}

fn values(data: &TensorData) -> Vec<f32> {
    data.iter::<f32>().collect()
}

/// Stored rows of an operand, and the values that they were made of.
struct Slab {
    /// `[rows, inner]`.
    x: Vec<f32>,
    /// `[rows, blocks * 2]`.
    codes: Vec<u32>,
    /// `[rows, blocks]`.
    scales: Vec<u8>,
    inner: usize,
    blocks: usize,
}

impl Slab {
    /// What is seen with the global scale of each row.
    fn sample(&self, operand: &'static str, factors: &[f32]) -> OperandSample {
        let (mut signal, mut noise) = (0.0, 0.0);
        let (mut nonzero, mut zeros, mut saturated) = (0usize, 0usize, 0usize);
        let (mut full_blocks, mut underflowed) = (0usize, 0usize);
        for (row, x) in self.x.chunks_exact(self.inner).enumerate() {
            for (block, x) in x.chunks(BLOCK).enumerate() {
                let index = row * self.blocks + block;
                let scale = e4m3::decode(self.scales[index]);
                if x.iter().any(|value| *value != 0.0) {
                    full_blocks += 1;
                    underflowed += usize::from(scale == 0.0);
                }
                for (i, &value) in x.iter().enumerate() {
                    let code = (self.codes[2 * index + i / 8] >> (4 * (i % 8)) & 15) as u8;
                    let decoded = e2m1::decode(code) * scale * factors[row];
                    signal += f64::from(value).powi(2);
                    noise += (f64::from(value) - f64::from(decoded)).powi(2);
                    nonzero += usize::from(value != 0.0);
                    zeros += usize::from(value != 0.0 && decoded == 0.0);
                    saturated += usize::from(code & 7 == 7);
                }
            }
        }
        let share = |count: usize, of: usize| count as f64 / of.max(1) as f64;
        OperandSample {
            layer: String::new(),
            operand,
            sqnr_db: 10.0 * (signal / noise).log10(),
            signal_to_noise: (signal / noise).sqrt(),
            zeros: share(zeros, nonzero),
            saturated: share(saturated, self.x.len()),
            underflowed_blocks: share(underflowed, full_blocks),
            amax: 0.0,
            stochastic: false,
        }
    }
}
