//! Assembly of whole operands from the shards that ranks quantized.

use burn_core::backend::{TensorMetadata, tensor::FloatTensor, tensor::IntTensor};
use burn_core::tensor::Shape;
use nvfp4_formats::{AmaxGranularity, StoredForm, Usage};

use super::super::collective::Step;
use super::super::segments::{offsets, slices};
use super::super::spec::{OperandSpec, QuantParams};
use super::super::tensors::{Operand, QuantizeSource, QuantizedData, QuantizedMatrix};
use super::super::{Nvfp4KernelOps, float_dtype};
use super::places::Axis;
use super::{LinearSharding, Role};
use crate::parallel::ProcessGroup;

impl LinearSharding {
    /// Gathers the whole operand from the shards of all ranks along `axis`, whose segments on each
    /// rank have these lengths.
    pub(super) fn gathered<B: Nvfp4KernelOps>(
        &self,
        operand: Operand<B>,
        axis: Axis,
        lens: &[usize],
    ) -> Operand<B> {
        match operand {
            Operand::Float(x, usage) => {
                let dim = match (usage, axis) {
                    (Usage::Rowwise, Axis::Outer) | (Usage::Columnwise, Axis::Inner) => 0,
                    (Usage::Rowwise, Axis::Inner) | (Usage::Columnwise, Axis::Outer) => 1,
                    // The matrices are stacked along the rows, whichever axis is K.
                    (_, Axis::Stack) => 0,
                };
                Operand::Float(self.gathered_floats::<B>(x, dim, lens), usage)
            }
            Operand::Quantized(quantized) => {
                Operand::Quantized(self.gathered_matrix(quantized, axis, lens))
            }
            Operand::QuantizedMnMajor(_) => {
                unreachable!("ranks quantize their parts along the contraction")
            }
        }
    }

    /// Gathers a quantized operand with row-major scales. The scales of a stack may be in tiles,
    /// which begin anew at each matrix.
    pub(super) fn gathered_matrix<B: Nvfp4KernelOps>(
        &self,
        quantized: QuantizedMatrix<B>,
        axis: Axis,
        lens: &[usize],
    ) -> QuantizedMatrix<B> {
        let size = self.group.size();
        let mut layout = quantized.layout;
        match (layout.usage, axis) {
            (Usage::Rowwise, Axis::Outer) | (Usage::Columnwise, Axis::Inner) => layout.rows *= size,
            (Usage::Rowwise, Axis::Inner) | (Usage::Columnwise, Axis::Outer) => layout.cols *= size,
            (_, Axis::Stack) => {
                assert_eq!(layout.usage, Usage::Rowwise, "a stack is stored so");
                layout.rows *= size;
            }
        }
        // An amax per stored row, or per matrix, is gathered too; any other amax is the same on all
        // ranks.
        let per_part = match axis {
            Axis::Outer => layout.amax == AmaxGranularity::PerRow,
            Axis::Inner => false,
            Axis::Stack => true,
        };
        let amax = quantized.amax.clone().map(|amax| match per_part {
            true => self.gathered_rows::<B>(amax),
            false => amax,
        });
        let inner = quantized.layout.padded_inner();
        let (codes, scales) = quantized.into_packed();
        let gathered = |x| self.gathered_ints::<B>(x, axis, inner, lens);
        QuantizedMatrix {
            data: QuantizedData::Packed {
                codes: gathered(codes),
                scales: gathered(scales),
            },
            amax,
            layout,
        }
    }

    /// Gathers rows or columns of all ranks, segment by segment.
    fn gathered_floats<B: Nvfp4KernelOps>(
        &self,
        x: FloatTensor<B>,
        dim: usize,
        lens: &[usize],
    ) -> FloatTensor<B> {
        let size = self.group.size();
        let [rows, cols] = [x.shape()[0], x.shape()[1]];
        let all = self.gathered_rows::<B>(x);
        let all = B::float_reshape(all, Shape::new([size, rows, cols]));
        // Moves the rank axis before the gathered dimension.
        let all = match dim {
            0 => all,
            _ => B::float_swap_dims(all, 0, 1),
        };
        if lens.len() == 1 {
            let shape = match dim {
                0 => Shape::new([size * rows, cols]),
                _ => Shape::new([rows, size * cols]),
            };
            return B::float_reshape(all, shape);
        }
        let parts = offsets(lens).into_iter().map(|(first, len)| {
            let slices = slices(&all.shape().to_vec(), dim + 1, first, len);
            let shape = match dim {
                0 => Shape::new([size * len, cols]),
                _ => Shape::new([rows, size * len]),
            };
            B::float_reshape(B::float_slice(all.clone(), &slices), shape)
        });
        B::float_cat(parts.collect(), dim)
    }

    /// Gathers codes or scales of all ranks; `inner` is the number of elements of a stored row.
    fn gathered_ints<B: Nvfp4KernelOps>(
        &self,
        x: IntTensor<B>,
        axis: Axis,
        inner: usize,
        lens: &[usize],
    ) -> IntTensor<B> {
        let size = self.group.size();
        let [outer, width] = [x.shape()[0], x.shape()[1]];
        let all = B::nvfp4_exchange_int(x, self.constant(Step::AllGather));
        if matches!(axis, Axis::Outer | Axis::Stack) {
            return all;
        }
        let all = B::int_reshape(all, Shape::new([size, outer, width]));
        let all = B::int_swap_dims(all, 0, 1);
        if lens.len() == 1 {
            return B::int_reshape(all, Shape::new([outer, size * width]));
        }
        let lens: Vec<_> = lens.iter().map(|len| len * width / inner).collect();
        let parts = offsets(&lens).into_iter().map(|(first, len)| {
            let slices = slices(&[outer, size, width], 2, first, len);
            let part = B::int_slice(all.clone(), &slices);
            B::int_reshape(part, Shape::new([outer, size * len]))
        });
        B::int_cat(parts.collect(), 1)
    }
}

/// Returns the quantized tensor of the tokens of all ranks along `usage` by `params`, which must
/// have a global scale. `x` are this rank's tokens.
pub(crate) fn gathered_tokens<B: Nvfp4KernelOps>(
    x: FloatTensor<B>,
    usage: Usage,
    params: QuantParams,
    group: &ProcessGroup,
) -> QuantizedMatrix<B> {
    let sharding = LinearSharding::of_rows(group);
    let spec = OperandSpec::Quantized(params);
    let asked = Some((&spec, StoredForm::Rows));
    let (row, col) = match usage {
        Usage::Rowwise => (asked, None),
        Usage::Columnwise => (None, asked),
    };
    let (dtype, x) = (float_dtype(x.dtype()), QuantizeSource::Matrix(x));
    let (row, col) = sharding.quantize::<B>(x, Role::Input, row, col, dtype);
    match row.or(col) {
        Some(Operand::Quantized(made)) => made,
        _ => unreachable!("a quantized operand was asked for"),
    }
}
