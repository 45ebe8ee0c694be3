//! From a matrix, a stack of weights or tokens in groups to the operands of GEMMs.
//!
//! A matrix, or tokens in groups, is `[rows, cols]`. A stack of weights is `[experts, rows, cols]`
//! with [`RowGroups::Batch`]; its quantized operands are rowwise ones, of the transposed matrices
//! for [`Usage::Columnwise`], one below the other. Its operands that are not quantized are the
//! matrices as they are, one below the other.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::{FloatDType, Shape};
use nvfp4_kernels::reference::Activation;
use nvfp4_kernels::{AmaxGranularity, BlockShape, ScaleLayout, Usage};

use super::dtype::cast;
use super::spec::{OperandSpec, QuantParams};
use super::stored::StoredForm;
use super::tensors::{Operand, QuantUsages, QuantizedPair, RowGroups};
use super::{Nvfp4KernelOps, float_dtype};

/// What is quantized.
#[derive(Clone, Debug)]
pub(crate) enum QuantSource<B: Backend> {
    /// A matrix, or a stack of weights.
    Matrix(FloatTensor<B>),
    /// What [`nvfp4_quantize_activation`](Nvfp4KernelOps::nvfp4_quantize_activation) quantizes.
    Activation {
        /// Which activation.
        activation: Activation,
        /// Its input.
        x: FloatTensor<B>,
        /// The gradient of its output, where that by the input is quantized.
        grad: Option<FloatTensor<B>>,
    },
}

impl<B: Nvfp4KernelOps> QuantSource<B> {
    /// Rows and columns; of a stack, those of the last matrix.
    pub(super) fn shape(&self) -> (usize, usize) {
        let last_two = |x: &FloatTensor<B>| {
            let shape = x.shape();
            let axes = shape.num_dims();
            (shape[axes - 2], shape[axes - 1])
        };
        match self {
            Self::Matrix(x)
            | Self::Activation {
                x, grad: Some(_), ..
            } => last_two(x),
            Self::Activation { activation, x, .. } => {
                let (rows, cols) = last_two(x);
                (rows, cols / activation.inputs())
            }
        }
    }

    /// Its type.
    pub(super) fn dtype(&self) -> FloatDType {
        let (Self::Matrix(x) | Self::Activation { x, .. }) = self;
        float_dtype(x.dtype())
    }

    /// Where it is.
    pub(super) fn device(&self) -> B::Device {
        let (Self::Matrix(x) | Self::Activation { x, .. }) = self;
        x.device()
    }

    /// The matrix.
    pub(super) fn into_values(self) -> FloatTensor<B> {
        match self {
            Self::Matrix(x) => x,
            Self::Activation {
                activation,
                x,
                grad: None,
            } => B::nvfp4_activation(x, activation),
            Self::Activation {
                activation,
                x,
                grad: Some(grad),
            } => B::nvfp4_activation_backward(grad, x, activation),
        }
    }

    /// The same, in memory.
    pub(super) fn materialized(self) -> Self {
        Self::Matrix(self.into_values())
    }

    /// The matrix, whose rows are in these groups.
    fn into_values_of(self, groups: &RowGroups<B>) -> FloatTensor<B> {
        match self {
            Self::Matrix(x) => x,
            Self::Activation {
                activation,
                x,
                grad,
            } => B::nvfp4_activation_of_groups(x, grad.into(), groups.clone(), activation),
        }
    }

    fn quantize(self, groups: RowGroups<B>, usages: QuantUsages) -> QuantizedPair<B> {
        match self {
            Self::Matrix(x) => B::nvfp4_quantize(x, groups, usages),
            Self::Activation {
                activation,
                x,
                grad,
            } => B::nvfp4_quantize_activation(x, grad.into(), groups, activation, usages),
        }
    }
}

/// The operand of `x` by `spec`, contracted along `usage`, in this `form` where it can be. Without
/// quantization it has the type `dtype`, that of the activations.
pub(super) fn quantize<B: Nvfp4KernelOps>(
    x: QuantSource<B>,
    groups: &RowGroups<B>,
    spec: &OperandSpec,
    usage: Usage,
    dtype: FloatDType,
    form: StoredForm,
) -> Operand<B> {
    let OperandSpec::Quantized(params) = *spec else {
        return Operand::Float(values::<B>(x, groups, dtype), usage);
    };
    let is_per_row = params.amax == AmaxGranularity::PerRow;
    let form = form.of(&params);
    let has_tiles = form.scale_layout() == ScaleLayout::Swizzled128x4;
    // A quantized tensor with an amax for each row of the source does not depend on its groups, but
    // for where tiles of scales begin.
    let (x, groups, usage) = match (groups, usage) {
        (RowGroups::Batch(count), _) if is_per_row => {
            let x = flat::<B>(x.into_values(), usage);
            // Matrices of whole tiles have those of one matrix, which is read once.
            let is_whole = (x.shape()[0] / count).is_multiple_of(128);
            let groups = match has_tiles && !is_whole {
                true => groups.clone(),
                false => RowGroups::Whole,
            };
            (QuantSource::Matrix(x), groups, Usage::Rowwise)
        }
        (RowGroups::Batch(_), _) => {
            let x = flat::<B>(x.into_values(), Usage::Rowwise);
            (QuantSource::Matrix(x), groups.clone(), usage)
        }
        // Random bits do where there are further groups.
        (RowGroups::Window { .. }, _) if !params.is_deterministic() => (x, groups.clone(), usage),
        (_, Usage::Rowwise) if is_per_row && !has_tiles => (x, RowGroups::Whole, usage),
        _ => (x, groups.clone(), usage),
    };
    let usages = QuantUsages::one(usage, params, form);
    Operand::Quantized(x.quantize(groups, usages).into_one())
}

/// How two operands of one matrix are represented.
pub(super) struct PairSpec<'a> {
    pub rowwise: &'a OperandSpec,
    pub columnwise: &'a OperandSpec,
    /// Of each, where it can be: rowwise, columnwise.
    pub forms: [StoredForm; 2],
}

/// The rowwise and the columnwise operand of `x`, from one read of it where one kernel makes both.
pub(super) fn quantize_pair<B: Nvfp4KernelOps>(
    x: QuantSource<B>,
    groups: &RowGroups<B>,
    spec: &PairSpec<'_>,
    dtype: FloatDType,
) -> (Operand<B>, Operand<B>) {
    let [row_form, col_form] = spec.forms;
    if let (OperandSpec::Quantized(row), OperandSpec::Quantized(col)) =
        (*spec.rowwise, *spec.columnwise)
        && (is_one_kernel(groups, &row, &col) || shares_screening(groups, &row, &col))
    {
        let x = match row.is_made_from_codes() {
            true => QuantSource::Matrix(x.into_values_of(groups)),
            false => x,
        };
        let x = match groups {
            RowGroups::Batch(_) => QuantSource::Matrix(flat::<B>(x.into_values(), Usage::Rowwise)),
            RowGroups::Whole | RowGroups::Offsets(_) | RowGroups::Window { .. } => x,
        };
        let usages = QuantUsages {
            rowwise: Some((row, row_form.of(&row))),
            columnwise: Some((col, col_form.of(&col))),
        };
        let (row, col) = x.quantize(groups.clone(), usages).into_both();
        return (Operand::Quantized(row), Operand::Quantized(col));
    }
    if [spec.rowwise, spec.columnwise] == [&OperandSpec::HighPrecision; 2] {
        // One rounded copy serves both.
        let x = values::<B>(x, groups, dtype);
        let col = Operand::Float(x.clone(), Usage::Columnwise);
        return (Operand::Float(x, Usage::Rowwise), col);
    }
    // Two kernels read it.
    let x = QuantSource::Matrix(x.into_values_of(groups));
    (
        quantize::<B>(
            x.clone(),
            groups,
            spec.rowwise,
            Usage::Rowwise,
            dtype,
            row_form,
        ),
        quantize::<B>(
            x,
            groups,
            spec.columnwise,
            Usage::Columnwise,
            dtype,
            col_form,
        ),
    )
}

/// Whether both tensors are by MS-EDEN of one matrix, whose amax values are found together.
fn shares_screening<B: Backend>(
    groups: &RowGroups<B>,
    row: &QuantParams,
    col: &QuantParams,
) -> bool {
    matches!(groups, RowGroups::Whole) && row.is_ms_eden() && col.is_ms_eden()
}

/// Whether one kernel makes both tensors.
pub(super) fn is_one_kernel<B: Backend>(
    groups: &RowGroups<B>,
    row: &QuantParams,
    col: &QuantParams,
) -> bool {
    let is_elementwise = |params: &QuantParams| !params.is_made_from_codes();
    let is_batch = matches!(groups, RowGroups::Batch(_));
    is_elementwise(row)
        && is_elementwise(col)
        && match (row.block, col.block) {
            (BlockShape::Block2d, BlockShape::Block2d) => row == col,
            (BlockShape::Block1d, BlockShape::Block1d) => {
                let has_one_amax = |params: &QuantParams| params.amax == AmaxGranularity::PerTensor;
                !is_batch || has_one_amax(row) && has_one_amax(col)
            }
            _ => false,
        }
}

/// The operand by `spec` of the dequantized values of `forward`, contracted along `usage`, in this
/// `form` where it can be; `groups` are those of the matrix that `forward` was quantized from.
pub(super) fn requantize<B: Nvfp4KernelOps>(
    forward: Operand<B>,
    groups: &RowGroups<B>,
    spec: &OperandSpec,
    usage: Usage,
    dtype: FloatDType,
    form: StoredForm,
) -> Operand<B> {
    match (forward, *spec) {
        (Operand::Quantized(source), OperandSpec::Quantized(params))
            if params.is_made_from_codes() && source.layout.format.has_global_scale() =>
        {
            // What is stored of a stack is the rowwise tensor of the transposed matrices.
            let usage = match groups {
                RowGroups::Batch(_) => usage.transposed(),
                RowGroups::Whole | RowGroups::Offsets(_) | RowGroups::Window { .. } => usage,
            };
            let form = form.of(&params);
            let made = B::nvfp4_requantize(source, groups.clone(), usage, params, form, dtype);
            Operand::Quantized(made)
        }
        (forward, spec) => {
            let values = match (forward, groups) {
                (Operand::Quantized(source) | Operand::QuantizedMnMajor(source), _) => {
                    let dtype = requantize_dtype(&spec, dtype);
                    let values = B::nvfp4_dequantize(source, groups.clone(), dtype);
                    match groups {
                        RowGroups::Batch(count) => {
                            B::float_swap_dims(stacked::<B>(values, *count), 1, 2)
                        }
                        RowGroups::Whole | RowGroups::Offsets(_) | RowGroups::Window { .. } => {
                            values
                        }
                    }
                }
                (Operand::Float(x, _), RowGroups::Batch(count)) => stacked::<B>(x, *count),
                (Operand::Float(x, _), _) => x,
            };
            let values = QuantSource::Matrix(values);
            quantize::<B>(values, groups, &spec, usage, dtype, form)
        }
    }
}

/// The type in which a forward operand is dequantized for `spec`: MS-EDEN takes the values exactly,
/// everything else as activations.
fn requantize_dtype(spec: &OperandSpec, dtype: FloatDType) -> FloatDType {
    match spec.params() {
        Some(params) if params.is_ms_eden() => FloatDType::F32,
        _ => dtype,
    }
}

/// The values of an operand that is not quantized, in the type `dtype`.
fn values<B: Nvfp4KernelOps>(
    x: QuantSource<B>,
    groups: &RowGroups<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let x = cast::<B>(x.into_values_of(groups), dtype);
    match groups {
        RowGroups::Batch(_) => flat::<B>(x, Usage::Rowwise),
        RowGroups::Whole | RowGroups::Offsets(_) | RowGroups::Window { .. } => x,
    }
}

/// A stack as one matrix, whose rows are contracted: those of the matrices, or of the transposed
/// ones.
fn flat<B: Backend>(w: FloatTensor<B>, usage: Usage) -> FloatTensor<B> {
    let w = match usage {
        Usage::Rowwise => w,
        Usage::Columnwise => B::float_swap_dims(w, 1, 2),
    };
    let [count, rows, cols] = [w.shape()[0], w.shape()[1], w.shape()[2]];
    B::float_reshape(w, Shape::new([count * rows, cols]))
}

/// One matrix as a stack of `count`.
pub(super) fn stacked<B: Backend>(w: FloatTensor<B>, count: usize) -> FloatTensor<B> {
    let [rows, cols] = [w.shape()[0], w.shape()[1]];
    B::float_reshape(w, Shape::new([count, rows / count, cols]))
}
