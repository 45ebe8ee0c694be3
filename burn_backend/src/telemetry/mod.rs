//! What quantization does to a run, layer by layer: sampled from real steps, cheap enough to leave on
//! every so many.
//!
//! A sample looks at a part of each operand: as many stored rows, evenly spaced, as hold about 256 Ki
//! elements. The step copies them aside on its device, some 1.5 MB an operand, and waits for nothing; at its end
//! they are read and looked at by all cores. Other steps pay nothing.
//!
//! Operands after a transform (those of wgrad by most recipes, and all by MS-EDEN) are measured in the basis
//! that they are multiplied in: what their codes stand for, against the transform of what they were made of.
//!
//! Of a layer of experts it looks at the tokens and at the weights of all of them together, each value
//! against what the global scale of its own expert made of it: an expert has as much of a share in the
//! sample as it has tokens, and the weights of all have the same.
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

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn_core::backend::tensor::{FloatTensor, IntTensor};
use burn_core::backend::{Backend, TensorMetadata};
use burn_core::module::Module;
use burn_core::tensor::{Device, FloatDType, Shape, Slice, TensorData};
use futures_lite::future::block_on;
use nvfp4_kernels::format::{e2m1, e4m3};
use nvfp4_kernels::reference::padding::padded_offsets;
use nvfp4_kernels::{BLOCK, Hadamard, Usage, reference};
use rayon::prelude::*;
use serde::Serialize;

use crate::ops::{AmaxGranularity, Nvfp4Ops, Operand, OperandSpec, PackedLayout};
use crate::state::{self, LayerState};

/// Elements of an operand that a sample reads, about; at least one row of each matrix.
const SLAB: usize = 1 << 18;

/// What was seen of one operand of one layer in one step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperandSample {
    /// Path of the layer in the model.
    pub layer: String,
    /// `fprop.w`, `fprop.x`, `wgrad.x`, `dgrad.dy` or `wgrad.dy`.
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
    /// Largest magnitude of the operand, all of it.
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

/// Looks at every NVFP4 operand of a model's linear layers, explicit, decorated or of experts, from
/// [`start`](Self::start) to [`finish`](Self::finish): put one forward and backward between them. Operands
/// in other formats are not looked at.
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
        let mut parts = Vec::new();
        for (path, _, probe) in &self.layers {
            let mut seen = probe.seen.lock().expect("no panic while it is held");
            parts.extend(seen.drain(..).filter_map(|read| Some((path, read()?))));
        }
        let sample = |(path, part): (&String, Part)| {
            let layer = path.clone();
            Some(OperandSample {
                layer,
                ..part.sample()?
            })
        };
        parts.into_par_iter().filter_map(sample).collect()
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
#[derive(Clone, Default)]
pub(crate) struct Probe {
    seen: Arc<Mutex<Vec<Copied>>>,
}

/// A part of an operand on its device, and how to read it; nothing if that fails.
type Copied = Box<dyn FnOnce() -> Option<Part> + Send>;

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").finish_non_exhaustive()
    }
}

/// What an operand was made of.
pub(crate) struct Source<'a, B: Backend> {
    /// Name of the operand.
    name: &'static str,
    /// The values: `[rows, cols]`, or `[experts, rows, cols]` of a stack.
    values: FloatTensor<B>,
    /// The axis of the matrix, or of each, along which it was packed.
    usage: Usage,
    /// Where each expert's rows begin, if there are experts.
    offsets: Option<&'a IntTensor<B>>,
}

impl<'a, B: Backend> Source<'a, B> {
    /// Rows of an input or of a gradient, packed row by row; those of each expert for themselves where
    /// there are `offsets`.
    pub(crate) fn rows(
        name: &'static str,
        values: FloatTensor<B>,
        offsets: Option<&'a IntTensor<B>>,
    ) -> Self {
        Self {
            name,
            values,
            usage: Usage::Rowwise,
            offsets,
        }
    }

    /// Rows of an input or of a gradient, packed along the tokens, as wgrad takes them; along those of each
    /// expert for themselves where there are `offsets`.
    pub(crate) fn columns(
        name: &'static str,
        values: FloatTensor<B>,
        offsets: Option<&'a IntTensor<B>>,
    ) -> Self {
        Self {
            name,
            values,
            usage: Usage::Columnwise,
            offsets,
        }
    }

    /// A weight, or a stack of them, as the forward packs it.
    pub(crate) fn weight(name: &'static str, values: FloatTensor<B>) -> Self {
        Self {
            name,
            values,
            usage: Usage::Columnwise,
            offsets: None,
        }
    }
}

impl Probe {
    /// Look at `operand`, made of `source` as `spec` asks: at rows that lie evenly among all that are
    /// stored, so that every expert has its share of them.
    pub(crate) fn look<B: Nvfp4Ops>(
        &self,
        source: Source<'_, B>,
        operand: &Operand<B>,
        spec: &OperandSpec,
    ) {
        let Operand::Nvfp4(packed) = operand else {
            return;
        };
        let layout = packed.layout;
        let Source {
            name,
            values: x,
            usage,
            offsets,
        } = source;
        let shape = x.shape();
        let (count, rows, cols) = match shape.num_dims() {
            2 => (1, shape[0], shape[1]),
            _ => (shape[0], shape[1], shape[2]),
        };
        let (outer, inner) = usage.stored_shape(rows, cols);
        if count * outer * inner == 0 {
            return;
        }
        let step = (count * outer * inner).div_ceil(SLAB).clamp(1, outer);
        let every = Slice::new(0, Some(outer as isize), step as isize);
        let all = |len: usize| Slice::from(0..len);
        let x = B::float_reshape(x, Shape::new([count, rows, cols]));
        let x = match usage {
            Usage::Rowwise => B::float_slice(x, &[all(count), every, all(cols)]),
            Usage::Columnwise => {
                let x = B::float_slice(x, &[all(count), all(rows), every]);
                B::float_swap_dims(x, 1, 2)
            }
        };
        let part = |tensor: &IntTensor<B>, width: usize| {
            let tensor = B::int_reshape(tensor.clone(), Shape::new([count, outer, width]));
            B::int_slice(tensor, &[all(count), every, all(width)])
        };
        let blocks = layout.blocks();
        let x = B::float_cast(x, FloatDType::F32);
        let (codes, scales) = (
            part(&packed.codes, blocks * 2),
            part(&packed.scales, blocks),
        );
        let (amax, offsets) = (packed.amax.clone(), offsets.cloned());
        let stochastic = !spec.is_deterministic();
        let read = move || {
            let offsets = offsets.map(|offsets| block_on(B::int_into_data(offsets)));
            let read = (
                block_on(B::float_into_data(x)),
                block_on(B::int_into_data(codes)),
                block_on(B::int_into_data(scales)),
                block_on(B::float_into_data(amax)),
                offsets.transpose(),
            );
            let (Ok(x), Ok(codes), Ok(scales), Ok(amax), Ok(offsets)) = read else {
                tracing::warn!(name, "telemetry: the operand could not be read");
                return None;
            };
            Some(Part {
                name,
                usage,
                layout,
                matrices: count,
                outer,
                inner,
                step,
                stochastic,
                x,
                codes,
                scales,
                amax,
                offsets,
            })
        };
        self.seen
            .lock()
            .expect("no panic while it is held")
            .push(Box::new(read));
    }
}

/// What was read of an operand: every `step`-th of the stored rows of each matrix.
struct Part {
    name: &'static str,
    usage: Usage,
    layout: PackedLayout,
    /// As many as there are in a stack, of `outer` stored rows of `inner` values.
    matrices: usize,
    outer: usize,
    inner: usize,
    step: usize,
    stochastic: bool,
    x: TensorData,
    codes: TensorData,
    scales: TensorData,
    amax: TensorData,
    offsets: Option<TensorData>,
}

impl Part {
    /// What is seen, of a layer without a name; nothing of rows that are no expert's.
    fn sample(&self) -> Option<OperandSample> {
        let &Self {
            usage,
            layout,
            outer,
            inner,
            ..
        } = self;
        let offsets = self.offsets.as_ref();
        let offsets = offsets.map(|offsets| offsets.iter::<u32>().collect::<Vec<_>>());
        let (spans, groups) = match (offsets, usage) {
            (None, _) => (Span::whole(inner), Groups::Matrices { rows: outer }),
            (Some(offsets), Usage::Rowwise) => (Span::whole(inner), Groups::Rows { offsets }),
            (Some(offsets), Usage::Columnwise) => (
                Span::of_groups(&offsets, inner, layout.unit()),
                Groups::Spans,
            ),
        };
        let maxima = Maxima {
            values: values(&self.amax),
            of_rows: (layout.global == AmaxGranularity::PerRow).then_some(outer),
            groups,
        };
        let slab = Slab {
            x: values(&self.x),
            inner,
            spans,
            hadamard: layout.hadamard,
            codes: self.codes.iter::<u32>().collect(),
            scales: self.scales.iter::<u8>().collect(),
            blocks: layout.blocks(),
        };
        let picked: Vec<usize> = (0..self.matrices)
            .flat_map(|matrix| {
                let rows = (0..outer).step_by(self.step);
                rows.map(move |row| matrix * outer + row)
            })
            .collect();
        let factor = |row: usize, span| {
            let amax = maxima.of(picked[row], span)?;
            Some(amax / layout.scaling.range())
        };
        let sample = slab.sample(self.name, factor)?;
        Some(OperandSample {
            amax: maxima.largest(),
            stochastic: self.stochastic,
            ..sample
        })
    }
}

/// The maxima of an operand, and what each is the maximum of.
struct Maxima {
    values: Vec<f32>,
    /// Each stored row has its own, in each span; then the stored rows of one span.
    of_rows: Option<usize>,
    /// What has one else.
    groups: Groups,
}

/// What belongs to one expert.
enum Groups {
    /// Each matrix, of so many stored rows, of a stack; or there is one.
    Matrices { rows: usize },
    /// The stored rows from an offset to the next.
    Rows { offsets: Vec<u32> },
    /// A span of all stored rows.
    Spans,
}

impl Maxima {
    /// The maximum that span number `span` of the stored row `row` was packed with; none for a row of no
    /// expert.
    fn of(&self, row: usize, span: usize) -> Option<f32> {
        let group = match &self.groups {
            Groups::Matrices { rows } => row / rows,
            Groups::Rows { offsets } => {
                let begun = offsets.partition_point(|&offset| offset as usize <= row);
                // As many have begun as there are offsets: the last of them has ended.
                (1..offsets.len()).contains(&begun).then(|| begun - 1)?
            }
            Groups::Spans => span,
        };
        let index = self.of_rows.map_or(group, |rows| span * rows + row);
        self.values.get(index).copied()
    }

    /// The largest; NaN if any is.
    fn largest(&self) -> f32 {
        let larger = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
        self.values.iter().copied().fold(0.0, larger)
    }
}

/// Values of each stored row that are packed, and transformed, for themselves: all, or those of one expert.
struct Span {
    values: Range<usize>,
    /// The first of their blocks.
    block: usize,
}

impl Span {
    /// All of `inner` values.
    fn whole(inner: usize) -> Vec<Self> {
        vec![Self {
            values: 0..inner,
            block: 0,
        }]
    }

    /// Those of each expert, of `tokens` in all, padded to a multiple of `unit`.
    fn of_groups(offsets: &[u32], tokens: usize, unit: usize) -> Vec<Self> {
        let starts = padded_offsets(offsets, tokens, unit);
        let ranges = offsets.windows(2).zip(starts);
        ranges
            .map(|(range, start)| Self {
                values: range[0] as usize..range[1] as usize,
                block: start as usize / BLOCK,
            })
            .collect()
    }
}

fn values(data: &TensorData) -> Vec<f32> {
    data.iter::<f32>().collect()
}

/// Stored rows of an operand, and the values that they were made of.
struct Slab {
    /// `[rows, inner]`, before the transform.
    x: Vec<f32>,
    inner: usize,
    spans: Vec<Span>,
    hadamard: Option<Hadamard>,
    /// `[rows, blocks * 2]`.
    codes: Vec<u32>,
    /// `[rows, blocks]`.
    scales: Vec<u8>,
    blocks: usize,
}

impl Slab {
    /// What was packed of `x`, the values of one span: with a transform those behind it, padding included.
    fn packed<'a>(&self, x: &'a [f32]) -> Cow<'a, [f32]> {
        let Some(hadamard) = &self.hadamard else {
            return x.into();
        };
        let size = hadamard.size().elements();
        let mut values = vec![0.0; x.len().next_multiple_of(size)];
        values[..x.len()].copy_from_slice(x);
        for group in values.chunks_exact_mut(size) {
            reference::transform(group, hadamard);
        }
        values.into()
    }

    /// What is seen with the global scale of each row and span, of those that have one; nothing if none
    /// has.
    fn sample(
        &self,
        operand: &'static str,
        factor: impl Fn(usize, usize) -> Option<f32>,
    ) -> Option<OperandSample> {
        let (mut elements, mut signal, mut noise) = (0usize, 0.0, 0.0);
        let (mut nonzero, mut zeros, mut saturated) = (0usize, 0usize, 0usize);
        let (mut full_blocks, mut underflowed) = (0usize, 0usize);
        for (row, x) in self.x.chunks_exact(self.inner).enumerate() {
            for (number, span) in self.spans.iter().enumerate() {
                let Some(factor) = factor(row, number) else {
                    continue;
                };
                let x = self.packed(&x[span.values.clone()]);
                elements += x.len();
                for (block, x) in x.chunks(BLOCK).enumerate() {
                    let index = row * self.blocks + span.block + block;
                    let scale = e4m3::decode(self.scales[index]);
                    if x.iter().any(|value| *value != 0.0) {
                        full_blocks += 1;
                        underflowed += usize::from(scale == 0.0);
                    }
                    for (i, &value) in x.iter().enumerate() {
                        let code = (self.codes[2 * index + i / 8] >> (4 * (i % 8)) & 15) as u8;
                        let decoded = e2m1::decode(code) * scale * factor;
                        signal += f64::from(value).powi(2);
                        noise += (f64::from(value) - f64::from(decoded)).powi(2);
                        nonzero += usize::from(value != 0.0);
                        zeros += usize::from(value != 0.0 && decoded == 0.0);
                        saturated += usize::from(code & 7 == 7);
                    }
                }
            }
        }
        let share = |count: usize, of: usize| count as f64 / of.max(1) as f64;
        (elements > 0).then(|| OperandSample {
            layer: String::new(),
            operand,
            sqnr_db: 10.0 * (signal / noise).log10(),
            signal_to_noise: (signal / noise).sqrt(),
            zeros: share(zeros, nonzero),
            saturated: share(saturated, elements),
            underflowed_blocks: share(underflowed, full_blocks),
            amax: 0.0,
            stochastic: false,
        })
    }
}
