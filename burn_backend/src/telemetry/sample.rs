//! Evaluation of a sampled operand.

use std::borrow::Cow;
use std::ops::Range;

use burn_core::tensor::TensorData;
use nvfp4_formats::format::{e2m1, e4m3};
use nvfp4_formats::reference::padding::padded_offsets;
use nvfp4_formats::{BLOCK, Hadamard, Usage, reference};

use super::operand::OperandSample;
use crate::ops::{AmaxGranularity, SampledOperand};

impl SampledOperand {
    /// Computes the statistics of the sample, without the name of its layer; rows of no expert are
    /// excluded.
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

/// Amax values of an operand, and the range that each of them covers.
struct AmaxValues {
    values: Vec<f32>,
    /// Number of stored rows, if each stored row of each span has a separate amax.
    of_rows: Option<usize>,
    /// Ranges that have one amax otherwise.
    groups: AmaxGroups,
}

/// Range of an operand that belongs to one expert and shares its amax.
enum AmaxGroups {
    /// Each matrix of a stack, with this many stored rows; or the only matrix.
    Matrices { rows: usize },
    /// Stored rows from one offset to the next.
    Rows { offsets: Vec<u32> },
    /// Span of all stored rows.
    Spans,
}

impl AmaxValues {
    /// Returns the amax with which span `span` of the stored row `row` was quantized; `None` for a
    /// row of no expert.
    fn of(&self, row: usize, span: usize) -> Option<f32> {
        let group = match &self.groups {
            AmaxGroups::Matrices { rows } => row / rows,
            AmaxGroups::Rows { offsets } => {
                let begun = offsets.partition_point(|&offset| offset as usize <= row);
                // A row at or after the last offset belongs to no expert.
                (1..offsets.len()).contains(&begun).then(|| begun - 1)?
            }
            AmaxGroups::Spans => span,
        };
        let index = self.of_rows.map_or(group, |rows| span * rows + row);
        self.values.get(index).copied()
    }

    /// Returns the largest amax; NaN if any is NaN.
    fn largest(&self) -> f32 {
        let larger = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
        self.values.iter().copied().fold(0.0, larger)
    }
}

/// Values of each stored row that are quantized, and transformed, separately: all of them, or those
/// of one expert.
struct Span {
    values: Range<usize>,
    /// Index of the first block of the span.
    block: usize,
}

impl Span {
    /// Returns one span of all `inner` values.
    fn whole(inner: usize) -> Vec<Self> {
        vec![Self {
            values: 0..inner,
            block: 0,
        }]
    }

    /// Returns one span per expert, of `tokens` tokens in total, padded to a multiple of `unit`.
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

/// Stored rows of an operand, with the source values of each.
struct Slab {
    /// Source values before the transform, `[rows, inner]`.
    x: Vec<f32>,
    inner: usize,
    spans: Vec<Span>,
    hadamard: Option<Hadamard>,
    /// Codes, `[rows, blocks * 2]`.
    codes: Vec<u32>,
    /// Block scales, `[rows, blocks]`.
    scales: Vec<u8>,
    blocks: usize,
}

impl Slab {
    /// Returns the values that were quantized for `x`, the source of one span: with a transform,
    /// the transformed values, including padding.
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

    /// Computes the statistics with the global scale of each row and span; rows and spans without
    /// one are excluded.
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
