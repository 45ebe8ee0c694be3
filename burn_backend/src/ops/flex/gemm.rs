//! GEMMs of dequantized panels by Flex's own matmul; sums equal those of the oracle up to their
//! order.

use std::ops::Range;

use burn_core::backend::{Flex, ops::FloatTensorOps};
use burn_core::tensor::{DType, FloatDType, Shape, Slice, TensorData};
use burn_flex::FlexTensor;
use nvfp4_formats::{
    Amax, AmaxGranularity, BLOCK, Format, Layout, Origin, QuantizedTensor, Usage, reference,
};
use rayon::prelude::*;

use super::super::tensors::{MaybeTensor, Operand, QuantizedData, QuantizedMatrix};
use super::super::{float_dtype, trace_op};
use super::tensors::{amax_values, bytes_of, matrix, narrow, trusted};

/// Tensor that is added to the sums of a dense GEMM.
pub(super) enum Addend {
    /// None.
    None,
    /// One value per column.
    Bias(FlexTensor),
    /// One value per element.
    Matrix(FlexTensor),
}

impl Addend {
    /// Converts an optional bias.
    pub fn of_bias(bias: Option<FlexTensor>) -> Self {
        bias.map_or(Self::None, Self::Bias)
    }
}

/// Computes a dense GEMM. `addend` is added to the scaled sums in `f32`.
pub(super) fn dense(
    a: Operand<Flex>,
    b: Operand<Flex>,
    addend: Addend,
    dtype: FloatDType,
) -> FlexTensor {
    let (a, b) = (StoredOperand::new(a), StoredOperand::new(b));
    let (m, n) = (a.outer, b.outer);
    trace_op("gemm", "", m, n);
    let mut out = sums(&a, &b, reference::panels);
    if let (Factors::One, Factors::One, Addend::None) = (&a.factors, &b.factors, &addend) {
        return narrow(out, dtype);
    }
    // The rows of a bias are all the same one.
    let (added, stride) = match addend {
        Addend::None => (None, 0),
        Addend::Bias(bias) => (Some(bias), 0),
        Addend::Matrix(added) => (Some(added), n),
    };
    let added = added.map(|added| Flex::float_cast(added, FloatDType::F32).to_contiguous());
    let added = added.as_ref().map(|added| added.storage::<f32>());
    // No other tensor shares the sums, so this writes in place.
    out.storage_mut::<f32>()
        .par_chunks_mut(n.max(1))
        .with_min_len(1 + 8192 / n.max(1))
        .enumerate()
        .for_each(|(m, row)| {
            let left = a.factors.of(m);
            match &b.factors {
                Factors::PerRow(factors) => {
                    let columns = row.iter_mut().zip(factors);
                    columns.for_each(|(y, right)| *y *= left * right);
                }
                factors => {
                    let factor = left * factors.of(0);
                    row.iter_mut().for_each(|y| *y *= factor);
                }
            }
            if let Some(added) = added {
                let added = &added[m * stride..];
                row.iter_mut().zip(added).for_each(|(y, added)| *y += added);
            }
        });
    narrow(out, dtype)
}

/// Computes the GEMM of all stored rows of `a` and `b`, without global scales:
/// `f32[a.outer, b.outer]`.
///
/// Packed operands are dequantized one panel of rows at a time (`panels` divides `outer` rows of
/// `depth` elements), which bounds the memory of dequantized values. Each output is summed within
/// one panel of either operand. With the panels of [`reference::panels`], which are long enough for
/// Flex to use the same loops, it has the bits of an undivided GEMM.
fn sums<P: Iterator<Item = Range<usize>> + ExactSizeIterator>(
    a: &StoredOperand,
    b: &StoredOperand,
    panels: impl Fn(usize, usize) -> P,
) -> FlexTensor {
    let (m, n) = (a.outer, b.outer);
    if m * n * a.depth == 0 {
        return FlexTensor::zeros(Shape::new([m, n]), DType::F32);
    }
    let parts = |operand: &StoredOperand| match &operand.elements {
        // A float operand is one panel.
        Elements::Float(_) => std::iter::once(0..operand.outer).collect::<Vec<_>>(),
        _ => panels(operand.outer, operand.depth).collect(),
    };
    let (rows, columns) = (parts(a), parts(b));
    let matmul = |left, right: &FlexTensor| {
        Flex::float_matmul(left, Flex::float_swap_dims(right.clone(), 0, 1))
    };
    if let ([rows], [columns]) = (rows.as_slice(), columns.as_slice()) {
        return matmul(a.rows(rows), &b.rows(columns));
    }
    let mut out = vec![0f32; m * n];
    for columns in &columns {
        let right = b.rows(columns);
        for rows in &rows {
            let part = matmul(a.rows(rows), &right);
            let part = part.storage::<f32>().par_chunks(columns.len());
            out[rows.start * n..rows.end * n]
                .par_chunks_mut(n)
                .with_min_len(1 + 8192 / columns.len())
                .zip(part)
                .for_each(|(out, part)| out[columns.clone()].copy_from_slice(part));
        }
    }
    FlexTensor::from_data(TensorData::new(out, [m, n]))
}

/// Operand in stored orientation, `outer` rows of `depth` elements, without its global scales.
pub(super) struct StoredOperand {
    elements: Elements,
    outer: usize,
    depth: usize,
    factors: Factors,
}

/// Elements of an operand: contiguous tensors of a packed matrix, or `f32`.
enum Elements {
    Packed {
        codes: FlexTensor,
        scales: FlexTensor,
        layout: Layout,
    },
    /// MN-major packed matrix: each stored row is one index of K.
    PackedMnMajor {
        codes: FlexTensor,
        scales: FlexTensor,
        layout: Layout,
    },
    Float(FlexTensor),
}

/// Global scales by which the sums are multiplied.
enum Factors {
    One,
    Tensor(f32),
    PerRow(Vec<f32>),
}

impl Factors {
    /// Returns the global scales of a quantized matrix.
    fn new(amax: MaybeTensor<Flex>, layout: &Layout) -> Self {
        if !layout.format.has_global_scale() {
            return Self::One;
        }
        let range = layout.scaling.range();
        let factors: Vec<f32> = amax_values(amax).iter().map(|amax| amax / range).collect();
        match layout.amax {
            AmaxGranularity::PerTensor => Self::Tensor(factors[0]),
            AmaxGranularity::PerRow => Self::PerRow(factors),
        }
    }

    fn of(&self, outer: usize) -> f32 {
        match self {
            Self::One => 1.0,
            Self::Tensor(factor) => *factor,
            Self::PerRow(factors) => factors[outer],
        }
    }
}

impl StoredOperand {
    pub fn new(operand: Operand<Flex>) -> Self {
        match operand {
            Operand::Quantized(quantized) => Self::quantized(quantized),
            Operand::QuantizedMnMajor(quantized) => Self::mn_major(quantized),
            Operand::Float(x, usage) => {
                let x = if float_dtype(x.dtype()) == FloatDType::F32 {
                    x
                } else {
                    Flex::float_cast(x, FloatDType::F32)
                };
                let x = match usage {
                    Usage::Rowwise => x,
                    Usage::Columnwise => Flex::float_swap_dims(x, 0, 1),
                };
                let (outer, depth) = matrix(&x);
                Self {
                    elements: Elements::Float(x),
                    outer,
                    depth,
                    factors: Factors::One,
                }
            }
        }
    }

    pub fn quantized(quantized: QuantizedMatrix<Flex>) -> Self {
        let layout = quantized.layout;
        let factors = Factors::new(quantized.amax, &layout);
        match quantized.data {
            QuantizedData::Packed { codes, scales } => Self {
                outer: layout.outer(),
                depth: layout.padded_inner(),
                factors,
                elements: Elements::Packed {
                    codes: codes.to_contiguous(),
                    scales: scales.to_contiguous(),
                    layout,
                },
            },
            QuantizedData::Bf16Unscaled(values) => Self {
                factors,
                ..Self::new(Operand::Float(values, Usage::Rowwise))
            },
        }
    }

    /// Converts an MN-major packed NVFP4 matrix: each stored row is one index of K.
    fn mn_major(quantized: QuantizedMatrix<Flex>) -> Self {
        let layout = quantized.layout;
        let is_taken = layout.format == Format::Nvfp4
            && layout.form.is_packed()
            && layout.amax == AmaxGranularity::PerTensor
            && layout.hadamard.is_none();
        assert!(
            is_taken,
            "`b` is an MN-major tensor of {layout:?}: expected packed NVFP4 with one amax and \
             without a transform"
        );
        let factors = Factors::new(quantized.amax.clone(), &layout);
        let (codes, scales) = quantized.into_packed();
        Self {
            outer: layout.inner(),
            depth: layout.outer(),
            factors,
            elements: Elements::PackedMnMajor {
                codes: codes.to_contiguous(),
                scales: scales.to_contiguous(),
                layout,
            },
        }
    }

    /// Returns some rows in `f32`, exactly; all rows if the operand is not packed.
    pub fn rows(&self, rows: &Range<usize>) -> FlexTensor {
        let values = match &self.elements {
            Elements::Packed {
                codes,
                scales,
                layout,
            } => {
                let blocks = layout.blocks();
                let scales = &scales.storage::<u8>()[blocks * rows.start..blocks * rows.end];
                let codes = code_rows(codes, rows);
                if layout.format.has_global_scale() {
                    let mut values = vec![0.0; rows.len() * self.depth];
                    reference::decode_blocks_into(&codes, scales, &mut values);
                    values
                } else {
                    // Each stored row, including padding, as a row of a row-wise matrix.
                    let layout = Layout {
                        rows: rows.len(),
                        ..layout.stored()
                    };
                    let (scales, amax) = (scales.to_vec(), Amax::Absent);
                    let origin = Origin::default();
                    let packed = QuantizedTensor::from_parts(layout, codes, scales, amax, origin);
                    reference::mx_dequantize(&trusted(packed))
                }
            }
            Elements::PackedMnMajor {
                codes,
                scales,
                layout,
            } => return mn_major_rows(codes, scales, layout, rows),
            Elements::Float(x) => {
                debug_assert_eq!(*rows, 0..self.outer);
                return x.clone();
            }
        };
        FlexTensor::from_data(TensorData::new(values, [rows.len(), self.depth]))
    }
}

/// Returns some output rows of an MN-major packed matrix, in `f32`, K-major: decodes the blocks of
/// each stored row that contain them.
fn mn_major_rows(
    codes: &FlexTensor,
    scales: &FlexTensor,
    layout: &Layout,
    rows: &Range<usize>,
) -> FlexTensor {
    let (depth, width) = (layout.outer(), layout.blocks());
    let blocks = rows.start / BLOCK..rows.end.div_ceil(BLOCK);
    let columns = blocks.len() * BLOCK;
    let (codes, scales) = (codes.storage::<u32>(), scales.storage::<u8>());
    let mut values = vec![0.0; depth * columns];
    let of_stored_rows = values.par_chunks_mut(columns.max(1)).enumerate();
    of_stored_rows.for_each(|(row, values)| {
        let (first, end) = (row * width + blocks.start, row * width + blocks.end);
        // A block has two words of codes.
        let codes = bytes_of(&codes[2 * first..2 * end]);
        reference::decode_blocks_into(&codes, &scales[first..end], values);
    });
    let values = FlexTensor::from_data(TensorData::new(values, [depth, columns]));
    let first = rows.start - blocks.start * BLOCK;
    let own = [0..depth, first..first + rows.len()].map(Slice::from);
    Flex::float_swap_dims(Flex::float_slice(values, &own), 0, 1)
}

/// Returns the bytes of some rows of contiguous codes.
fn code_rows(codes: &FlexTensor, rows: &Range<usize>) -> Vec<u8> {
    let (_, width) = matrix(codes);
    let range = width * rows.start..width * rows.end;
    match codes.dtype() {
        DType::U32 => bytes_of(&codes.storage::<u32>()[range]),
        _ => codes.storage::<u8>()[range].to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use nvfp4_formats::{Rounding, StoredForm};

    use super::super::super::Nvfp4KernelOps;
    use super::super::super::spec::QuantParams;
    use super::super::super::tensors::QuantizeRequest;
    use super::super::tensors::upload;
    use super::*;

    fn uploaded(packed: QuantizedTensor) -> Operand<Flex> {
        let (scales, amax) = (packed.scales().to_vec(), packed.amax().values().to_vec());
        Operand::Quantized(upload(packed.codes(), scales, amax, *packed.layout()))
    }

    /// Creates a packed operand of `outer` rows of `depth` elements, with data that covers all
    /// codes.
    fn packed(outer: usize, depth: usize, seed: u32) -> Operand<Flex> {
        let mut state = seed | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        let values: Vec<f32> = (0..outer * depth)
            .map(|_| next() as f32 / u32::MAX as f32 - 0.5)
            .collect();
        let amax = Amax::Tensor(reference::amax(&values));
        let policy = QuantParams::nvfp4(Rounding::Nearest);
        let usage = Usage::Rowwise;
        let packed = reference::quantize(&values, outer, depth, usage, &amax, &policy, 0);
        uploaded(trusted(packed))
    }

    fn whole(outer: usize, _: usize) -> std::iter::Once<Range<usize>> {
        std::iter::once(0..outer)
    }

    /// Splitting either operand into panels changes no bit.
    #[test]
    fn gemms_in_panels_are_those_of_whole_operands() {
        for (m, n, depth) in [
            (1, 1300, 16384),
            (3, 1500, 16384),
            (70, 1281, 14336),
            (1290, 40, 16384),
            (700, 1300, 14336),
        ] {
            let count = reference::panels(n, depth).len() * reference::panels(m, depth).len();
            assert!(count > 1, "{m} x {n} x {depth}");
            let (a, b) = (
                StoredOperand::new(packed(m, depth, 1)),
                StoredOperand::new(packed(n, depth, 2)),
            );
            let found = sums(&a, &b, reference::panels);
            let expected = sums(&a, &b, whole);
            let bits = |x: &FlexTensor| -> Vec<u32> {
                x.storage::<f32>().iter().map(|x| x.to_bits()).collect()
            };
            assert!(bits(&found) == bits(&expected), "{m} x {n} x {depth}");
            assert!(found.storage::<f32>().iter().any(|x| *x != 0.0));
        }
    }

    /// Every kind of operand, in short panels of integers, whose sums are exact in any order.
    #[test]
    fn panels_of_every_kind_of_operand() {
        let few = |outer: usize, _: usize| {
            let starts: Vec<usize> = (0..outer).step_by(3).collect();
            let parts = starts
                .into_iter()
                .map(|start| start..(start + 3).min(outer));
            parts.collect::<Vec<_>>().into_iter()
        };
        let (m, n, depth) = (7, 11, 64);
        let values = |outer: usize, step: usize| -> FlexTensor {
            let values: Vec<f32> = (0..outer * depth)
                .map(|i| match i % depth {
                    // Block scales, and the scale of the tensor, become powers of two.
                    i if i % 16 == 0 => 6.0,
                    _ => [0.0, 1.0, -2.0, 4.0][i * step % 7 % 4],
                })
                .collect();
            FlexTensor::from_data(TensorData::new(values, [outer, depth]))
        };
        let nvfp4 = |x: FlexTensor| {
            let (outer, depth) = matrix(&x);
            let amax = Amax::Tensor(2688.0);
            let policy = QuantParams::nvfp4(Rounding::Nearest);
            let usage = Usage::Rowwise;
            let values = x.storage::<f32>();
            let packed = reference::quantize(values, outer, depth, usage, &amax, &policy, 0);
            uploaded(trusted(packed))
        };
        let mxfp8 = |x| {
            let usage = Usage::Rowwise;
            let request = QuantizeRequest::of_matrix(x);
            let request = request.along(usage, QuantParams::mxfp8(), StoredForm::Rows);
            let made = Flex::nvfp4_quantize(request);
            Operand::Quantized(made.into_one())
        };
        let float = |x| Operand::Float(x, Usage::Rowwise);
        let kinds: [&dyn Fn(FlexTensor) -> Operand<Flex>; 3] = [&nvfp4, &mxfp8, &float];
        let (x, y) = (values(m, 5), values(n, 3));
        let expected = Flex::float_matmul(x.clone(), Flex::float_swap_dims(y.clone(), 0, 1));
        for left in kinds {
            for right in kinds {
                let (a, b) = (
                    StoredOperand::new(left(x.clone())),
                    StoredOperand::new(right(y.clone())),
                );
                let found = sums(&a, &b, few);
                assert_eq!(found.storage::<f32>(), expected.storage::<f32>());
            }
        }
    }

    /// A range of columns of an MN-major operand has the bits of the whole, wherever its blocks
    /// begin.
    #[test]
    fn panels_of_an_mn_major_operand() {
        let (n, depth) = (48, 24);
        let Operand::Quantized(quantized) = packed(depth, n, 3) else {
            unreachable!("it is packed");
        };
        let whole = StoredOperand::quantized(quantized.clone()).rows(&(0..depth));
        let whole = whole.storage::<f32>();
        let own = StoredOperand::new(Operand::QuantizedMnMajor(quantized));
        assert_eq!((own.outer, own.depth), (n, depth));
        for columns in [0..48, 5..21, 16..32, 31..33, 47..48] {
            let found = own.rows(&columns).to_contiguous();
            let expected: Vec<f32> = columns
                .flat_map(|column| (0..depth).map(move |row| whole[row * n + column]))
                .collect();
            assert_eq!(found.storage::<f32>(), expected);
        }
    }
}
