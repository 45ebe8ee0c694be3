//! From a sampled operand to its statistics.

use std::borrow::Cow;
use std::ops::Range;

use burn_core::tensor::TensorData;
use nvfp4_kernels::format::{e2m1, e4m3};
use nvfp4_kernels::reference::padding::padded_offsets;
use nvfp4_kernels::{BLOCK, Hadamard, Usage, reference};

use super::operand::OperandSample;
use crate::ops::{AmaxGranularity, SampledOperand};

impl SampledOperand {
    /// The statistics of the sample, without the name of its layer; rows of no expert are left out.
    pub(super) fn statistics(&self) -> Option<OperandSample> {
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
            (None, _) => (Span::whole(inner), AmaxGroups::Matrices { rows: outer }),
            (Some(offsets), Usage::Rowwise) => (Span::whole(inner), AmaxGroups::Rows { offsets }),
            (Some(offsets), Usage::Columnwise) => (
                Span::of_groups(&offsets, inner, layout.unit()),
                AmaxGroups::Spans,
            ),
        };
        let amax_values = AmaxValues {
            values: values(&self.amax),
            of_rows: (layout.amax == AmaxGranularity::PerRow).then_some(outer),
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
            let amax = amax_values.of(picked[row], span)?;
            Some(amax / layout.scaling.range())
        };
        let sample = slab.statistics(self.name, factor)?;
        Some(OperandSample {
            amax: amax_values.largest(),
            stochastic: self.stochastic,
            ..sample
        })
    }
}

/// The amax values of an operand, and what each of them covers.
struct AmaxValues {
    values: Vec<f32>,
    /// The number of stored rows, where each stored row of each span has an amax of its own.
    of_rows: Option<usize>,
    /// What has one amax otherwise.
    groups: AmaxGroups,
}

/// What belongs to one expert and shares its amax.
enum AmaxGroups {
    /// Each matrix of a stack, with this many stored rows; or the only matrix.
    Matrices { rows: usize },
    /// The stored rows from an offset to the next.
    Rows { offsets: Vec<u32> },
    /// A span of all stored rows.
    Spans,
}

impl AmaxValues {
    /// The amax with which span `span` of the stored row `row` was quantized; `None` for a row of
    /// no expert.
    fn of(&self, row: usize, span: usize) -> Option<f32> {
        let group = match &self.groups {
            AmaxGroups::Matrices { rows } => row / rows,
            AmaxGroups::Rows { offsets } => {
                let begun = offsets.partition_point(|&offset| offset as usize <= row);
                // A row at or behind the last offset belongs to no expert.
                (1..offsets.len()).contains(&begun).then(|| begun - 1)?
            }
            AmaxGroups::Spans => span,
        };
        let index = self.of_rows.map_or(group, |rows| span * rows + row);
        self.values.get(index).copied()
    }

    /// The largest amax; NaN if any is.
    fn largest(&self) -> f32 {
        let larger = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
        self.values.iter().copied().fold(0.0, larger)
    }
}

/// Values of each stored row that are quantized, and transformed, apart: all, or those of one
/// expert.
struct Span {
    values: Range<usize>,
    /// The first block of the span.
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

/// Stored rows of an operand, and the source values of each.
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
    /// The values that were quantized for `x`, the source of one span: with a transform, the
    /// transformed values, padding included.
    fn quantized<'a>(&self, x: &'a [f32]) -> Cow<'a, [f32]> {
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

    /// The statistics with the global scale of each row and span; those without one are left out.
    fn statistics(
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
                let x = self.quantized(&x[span.values.clone()]);
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
