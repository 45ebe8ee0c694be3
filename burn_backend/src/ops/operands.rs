//! Conversion of a matrix, a stack of weights or grouped tokens to operands of GEMMs.
//!
//! A matrix, or grouped tokens, is `[rows, cols]`. A stack of weights is `[experts, rows, cols]`
//! with [`RowGroups::Batch`]. Its quantized operands are row-wise tensors, of the transposed
//! matrices for [`Usage::Columnwise`], stacked along the rows. Its unquantized operands are the
//! original matrices, stacked along the rows.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::{FloatDType, Shape};
use nvfp4_formats::{AmaxGranularity, BlockShape, StoredForm, Usage};

use super::dtype::cast;
use super::kernels::activated;
use super::spec::{OperandSpec, QuantParams};
use super::tensors::{Operand, QuantizeRequest, QuantizeSource, QuantizedData, RowGroups};
use super::{Nvfp4KernelOps, float_dtype};

impl<B: Nvfp4KernelOps> QuantizeSource<B> {
    /// Returns rows and columns; for a stack, those of its last matrix.
    pub(super) fn shape(&self) -> (usize, usize) {
        let last_two = |x: &FloatTensor<B>| {
            let shape = x.shape();
            let axes = shape.num_dims();
            (shape[axes - 2], shape[axes - 1])
        };
        match self {
            Self::Matrix(x) => last_two(x),
            Self::Activation {
                x,
                grad,
                activation,
            } => {
                let (rows, cols) = last_two(x);
                match grad.is_present() {
                    true => (rows, cols),
                    false => (rows, cols / activation.inputs()),
                }
            }
            Self::Quantized { tensor, .. } => (tensor.layout.rows, tensor.layout.cols),
        }
    }

    /// Returns the dtype of the values.
    pub(super) fn dtype(&self) -> FloatDType {
        match self {
            Self::Matrix(x) | Self::Activation { x, .. } => float_dtype(x.dtype()),
            Self::Quantized { via, .. } => *via,
        }
    }

    /// Returns the device.
    pub(super) fn device(&self) -> B::Device {
        match self {
            Self::Matrix(x) | Self::Activation { x, .. } => x.device(),
            Self::Quantized { tensor, .. } => match &tensor.data {
                QuantizedData::Packed { codes, .. } => codes.device(),
                QuantizedData::Bf16Unscaled(values) => values.device(),
            },
        }
    }

    /// Returns the values, computing the activation if necessary.
    pub(super) fn into_values(self) -> FloatTensor<B> {
        match self {
            Self::Matrix(x) => x,
            Self::Activation {
                x,
                grad,
                activation,
            } => activated::<B>(x, grad, activation),
            Self::Quantized { tensor, via } => B::nvfp4_dequantize(tensor, RowGroups::Whole, via),
        }
    }

    /// Computes the values, if necessary, and stores them as a matrix.
    pub(super) fn materialized(self) -> Self {
        Self::Matrix(self.into_values())
    }

    /// Returns the values, whose rows are in these groups.
    fn into_values_of(self, groups: &RowGroups<B>) -> FloatTensor<B> {
        match self {
            Self::Matrix(x) => x,
            Self::Activation {
                x,
                grad,
                activation,
            } => B::nvfp4_activation_of_groups(x, grad, groups.clone(), activation),
            Self::Quantized { tensor, via } => B::nvfp4_dequantize(tensor, groups.clone(), via),
        }
    }
}

/// Returns the operand of `x` by `spec`, with its K dimension along `usage`, in this `form` if
/// possible. An unquantized operand has the dtype `dtype` of the activations.
pub(super) fn quantize<B: Nvfp4KernelOps>(
    x: QuantizeSource<B>,
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
    let form = params.stored_form(form);
    let has_tiles = form.has_tiles();
    // A quantized tensor with an amax per row of the source does not depend on its groups, except
    // for the beginnings of tiles of scales.
    let (x, groups, usage) = match (groups, usage) {
        (RowGroups::Batch(count), _) if is_per_row => {
            let x = flat::<B>(x.into_values(), usage);
            // Matrices of whole tiles have the tiles of one matrix, which is read once.
            let is_whole = (x.shape()[0] / count).is_multiple_of(128);
            let groups = match has_tiles && !is_whole {
                true => groups.clone(),
                false => RowGroups::Whole,
            };
            (QuantizeSource::Matrix(x), groups, Usage::Rowwise)
        }
        (RowGroups::Batch(_), _) => {
            let x = flat::<B>(x.into_values(), Usage::Rowwise);
            (QuantizeSource::Matrix(x), groups.clone(), usage)
        }
        // Random bits depend on the groups if other devices have further groups.
        (RowGroups::Window { .. }, _) if !params.is_deterministic() => (x, groups.clone(), usage),
        (_, Usage::Rowwise) if is_per_row && !has_tiles => (x, RowGroups::Whole, usage),
        _ => (x, groups.clone(), usage),
    };
    let request = QuantizeRequest::new(x)
        .groups(groups)
        .along(usage, params, form);
    Operand::Quantized(B::nvfp4_quantize(request).into_one())
}

/// Returns the row-wise operand of `x` by `spec`, for one GEMM, in `form`, and to be kept, in its
/// packed form. One kernel writes both from one read if possible; otherwise the packed operand is
/// returned twice.
pub(super) fn quantize_kept<B: Nvfp4KernelOps>(
    x: QuantizeSource<B>,
    groups: &RowGroups<B>,
    spec: &OperandSpec,
    dtype: FloatDType,
    form: StoredForm,
) -> (Operand<B>, Operand<B>) {
    if let (StoredForm::Bf16Unscaled, RowGroups::Whole, Some(params)) =
        (form, groups, spec.one_amax())
    {
        let request = QuantizeRequest::new(x).along(Usage::Rowwise, params, StoredForm::Rows);
        let made = B::nvfp4_quantize(request.in_both_storages());
        let (packed, unscaled) = made.into_both_storages();
        return (Operand::Quantized(unscaled), Operand::Quantized(packed));
    }
    let x = quantize::<B>(x, groups, spec, Usage::Rowwise, dtype, form.packed());
    (x.clone(), x)
}

/// Representation of an operand, and the form that its GEMM prefers.
pub(super) type FormedSpec<'a> = (&'a OperandSpec, StoredForm);

/// Returns the row-wise and the column-wise operand of `x`, with one read if one kernel writes
/// both.
pub(super) fn quantize_pair<B: Nvfp4KernelOps>(
    x: QuantizeSource<B>,
    groups: &RowGroups<B>,
    [(row, row_form), (col, col_form)]: [FormedSpec<'_>; 2],
    dtype: FloatDType,
) -> (Operand<B>, Operand<B>) {
    if let (OperandSpec::Quantized(row), OperandSpec::Quantized(col)) = (*row, *col)
        && (is_one_kernel(groups, &row, &col) || shares_screening(groups, &row, &col))
    {
        let x = match row.is_made_from_codes() {
            true => QuantizeSource::Matrix(x.into_values_of(groups)),
            false => x,
        };
        let x = match groups {
            RowGroups::Batch(_) => {
                QuantizeSource::Matrix(flat::<B>(x.into_values(), Usage::Rowwise))
            }
            RowGroups::Whole | RowGroups::Offsets(_) | RowGroups::Window { .. } => x,
        };
        let request = QuantizeRequest::new(x).groups(groups.clone());
        let request = request.along(Usage::Rowwise, row, row.stored_form(row_form));
        let request = request.along(Usage::Columnwise, col, col.stored_form(col_form));
        let (row, col) = B::nvfp4_quantize(request).into_both();
        return (Operand::Quantized(row), Operand::Quantized(col));
    }
    if [row, col] == [&OperandSpec::HighPrecision; 2] {
        // One rounded copy serves both.
        let x = values::<B>(x, groups, dtype);
        let col = Operand::Float(x.clone(), Usage::Columnwise);
        return (Operand::Float(x, Usage::Rowwise), col);
    }
    // Two kernels read it.
    let x = QuantizeSource::Matrix(x.into_values_of(groups));
    let of_rows = quantize::<B>(x.clone(), groups, row, Usage::Rowwise, dtype, row_form);
    let of_columns = quantize::<B>(x, groups, col, Usage::Columnwise, dtype, col_form);
    (of_rows, of_columns)
}

/// Returns true if both tensors are quantized by MS-EDEN from one matrix: their amax values are
/// computed together.
fn shares_screening<B: Backend>(
    groups: &RowGroups<B>,
    row: &QuantParams,
    col: &QuantParams,
) -> bool {
    matches!(groups, RowGroups::Whole) && row.is_ms_eden() && col.is_ms_eden()
}

/// Returns true if one kernel writes both tensors.
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

/// Quantizes the dequantized values of `forward` by `spec`, with the K dimension along `usage`, in
/// this `form` if possible. `groups` are those of the matrix that `forward` was quantized from.
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
            // The stored tensor of a stack is the row-wise tensor of the transposed matrices.
            let usage = match groups {
                RowGroups::Batch(_) => usage.transposed(),
                RowGroups::Whole | RowGroups::Offsets(_) | RowGroups::Window { .. } => usage,
            };
            let (tensor, via) = (source, dtype);
            let request = QuantizeRequest::new(QuantizeSource::Quantized { tensor, via })
                .groups(groups.clone())
                .along(usage, params, params.stored_form(form));
            Operand::Quantized(B::nvfp4_quantize(request).into_one())
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
            let values = QuantizeSource::Matrix(values);
            quantize::<B>(values, groups, &spec, usage, dtype, form)
        }
    }
}

/// Returns the dtype in which a forward operand is dequantized for `spec`: exact for MS-EDEN, that
/// of the activations otherwise.
fn requantize_dtype(spec: &OperandSpec, dtype: FloatDType) -> FloatDType {
    match spec.params() {
        Some(params) if params.is_ms_eden() => FloatDType::F32,
        _ => dtype,
    }
}

/// Returns the values of an unquantized operand in dtype `dtype`.
fn values<B: Nvfp4KernelOps>(
    x: QuantizeSource<B>,
    groups: &RowGroups<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let x = cast::<B>(x.into_values_of(groups), dtype);
    match groups {
        RowGroups::Batch(_) => flat::<B>(x, Usage::Rowwise),
        RowGroups::Whole | RowGroups::Offsets(_) | RowGroups::Window { .. } => x,
    }
}

/// Flattens a stack to one K-major matrix: the rows of the matrices, or of the transposed matrices.
fn flat<B: Backend>(w: FloatTensor<B>, usage: Usage) -> FloatTensor<B> {
    let w = match usage {
        Usage::Rowwise => w,
        Usage::Columnwise => B::float_swap_dims(w, 1, 2),
    };
    let [count, rows, cols] = [w.shape()[0], w.shape()[1], w.shape()[2]];
    B::float_reshape(w, Shape::new([count * rows, cols]))
}

/// Splits one matrix to a stack of `count`.
pub(super) fn stacked<B: Backend>(w: FloatTensor<B>, count: usize) -> FloatTensor<B> {
    let [rows, cols] = [w.shape()[0], w.shape()[1]];
    B::float_reshape(w, Shape::new([count, rows / count, cols]))
}

#[cfg(test)]
mod tests {
    use burn_core::backend::Dispatch;
    use burn_core::tensor::{DType, Distribution, Int, Tensor};
    use nvfp4_formats::reference::{Activation, Gelu};
    use nvfp4_formats::{BlockScaling, ErrorNorm, Layout, RandomStream, Rounding};

    use super::super::context::tests::device;
    use super::super::tensors::{MaybeTensor, QuantizedMatrix};
    use super::*;

    const SHAPE: [usize; 2] = [37, 48];

    /// Returns the layout, and the bytes of all tensors.
    fn parts(made: Operand<Dispatch>) -> (Layout, Vec<Vec<u8>>) {
        let Operand::Quantized(QuantizedMatrix { data, amax, layout }) = made else {
            panic!("{made:?} is not quantized");
        };
        let float = |x| Tensor::<2>::from_dispatch(x).into_data();
        let int = |x| Tensor::<2, Int>::from_dispatch(x).into_data();
        let amax = amax.into_option().map(Tensor::<1>::from_dispatch);
        let mut tensors: Vec<_> = amax.map(Tensor::into_data).into_iter().collect();
        match data {
            QuantizedData::Packed { codes, scales } => tensors.extend([int(codes), int(scales)]),
            QuantizedData::Bf16Unscaled(values) => {
                tensors.push(float(values));
            }
        }
        let bytes = tensors.into_iter().map(|data| data.as_bytes().to_vec());
        (layout, bytes.collect())
    }

    /// Returns the activations of `SHAPE`, and their materialized values.
    fn sources() -> [(QuantizeSource<Dispatch>, QuantizeSource<Dispatch>); 3] {
        let (device, dtype, _) = device();
        let random = |cols| {
            let normal = Distribution::Normal(0.0, 1.0);
            let x = Tensor::<2>::random([SHAPE[0], cols], normal, (&device, DType::F32));
            x.cast(dtype).into_dispatch()
        };
        let (activation, x) = (Activation::SwiGlu, random(2 * SHAPE[1]));
        let forward = QuantizeSource::Activation {
            activation,
            x: x.clone(),
            grad: MaybeTensor::Absent,
        };
        let backward = QuantizeSource::Activation {
            activation: Activation::Gelu(Gelu::Tanh),
            x: random(SHAPE[1]),
            grad: MaybeTensor::Present(random(SHAPE[1])),
        };
        [QuantizeSource::Matrix(random(SHAPE[1])), forward, backward]
            .map(|source| (source.clone(), source.materialized()))
    }

    /// An operand that is multiplied as values and also kept has the bytes of two operands that are
    /// quantized separately.
    #[test]
    fn kept_as_quantized_twice() {
        let nearest = QuantParams::nvfp4(Rounding::Nearest);
        let stochastic = Rounding::Stochastic(RandomStream::new(5, 6, 7));
        let four_over_six = QuantParams {
            scaling: BlockScaling::FourOverSix(ErrorNorm::Mse),
            ..nearest
        };
        let cases = [nearest, four_over_six, QuantParams::nvfp4(stochastic)];
        for (case, (source, values)) in sources().into_iter().enumerate() {
            let dtype = source.dtype();
            assert_eq!(source.shape(), values.shape());
            for params in cases {
                let spec = OperandSpec::Quantized(params);
                let whole = RowGroups::Whole;
                let found = quantize_kept(
                    source.clone(),
                    &whole,
                    &spec,
                    dtype,
                    StoredForm::Bf16Unscaled,
                );
                let (once, kept) = (parts(found.0), parts(found.1));
                let two = [StoredForm::Bf16Unscaled, StoredForm::Rows].map(|form| {
                    let x = values.clone();
                    let made = quantize(x, &whole, &spec, Usage::Rowwise, dtype, form);
                    parts(made)
                });
                let forms = two.each_ref().map(|(layout, _)| layout.form);
                assert_eq!(forms, [StoredForm::Bf16Unscaled, StoredForm::Rows]);
                assert!([once, kept] == two, "source {case}, {params:?}");
            }
        }
    }

    /// If no kernel writes both forms, or they are the same, the operand is the kept one.
    #[test]
    fn kept_in_one_form() {
        let nearest = QuantParams::nvfp4(Rounding::Nearest);
        let per_row = QuantParams {
            amax: AmaxGranularity::PerRow,
            ..nearest
        };
        for (params, form) in [
            (nearest, StoredForm::Rows),
            (per_row, StoredForm::Bf16Unscaled),
        ] {
            let spec = OperandSpec::Quantized(params);
            let [(source, _), ..] = sources();
            let (whole, dtype) = (RowGroups::Whole, source.dtype());
            let found = quantize_kept(source.clone(), &whole, &spec, dtype, form);
            let expected = quantize(
                source,
                &whole,
                &spec,
                Usage::Rowwise,
                dtype,
                StoredForm::Rows,
            );
            let expected = parts(expected);
            assert_eq!(expected.0.form, StoredForm::Rows);
            assert!([found.0, found.1].map(parts) == [expected.clone(), expected]);
        }
        let [(source, values), ..] = sources();
        let dtype = source.dtype();
        let plain = OperandSpec::HighPrecision;
        let found = quantize_kept(
            source,
            &RowGroups::Whole,
            &plain,
            dtype,
            StoredForm::Bf16Unscaled,
        );
        let bytes = |x| {
            let data = Tensor::<2>::from_dispatch(x).into_data();
            data.as_bytes().to_vec()
        };
        let expected = bytes(values.into_values());
        for operand in [found.0, found.1] {
            let Operand::Float(x, Usage::Rowwise) = operand else {
                panic!("{operand:?}");
            };
            assert!(bytes(x) == expected);
        }
    }

    /// A tensor that was quantized in rows and converted to a form equals one quantized in that
    /// form, even if its tokens are padded.
    #[test]
    fn in_form_as_quantized() {
        let (device, _, _) = device();
        let normal = Distribution::Normal(0.0, 1.0);
        let nvfp4 = QuantParams::nvfp4(Rounding::Nearest);
        let (rowwise, columnwise) = (Usage::Rowwise, Usage::Columnwise);
        let cases = [
            (nvfp4, columnwise, StoredForm::WholeTiles, None),
            (nvfp4, columnwise, StoredForm::Tiles, None),
            (nvfp4, rowwise, StoredForm::Tiles, None),
            (nvfp4, rowwise, StoredForm::Tiles, Some(3)),
            (QuantParams::mxfp8(), columnwise, StoredForm::Tiles, None),
            (QuantParams::mxfp8(), rowwise, StoredForm::Tiles, Some(3)),
        ];
        for (params, usage, form, stack) in cases {
            let what = format!("{:?} {usage:?} {form:?} {stack:?}", params.format);
            let x = Tensor::<2>::random([210, 80], normal, (&device, DType::F32));
            let groups = || stack.map_or(RowGroups::Whole, RowGroups::Batch);
            let made = |form| {
                let request = QuantizeRequest::of_matrix(x.clone().into_dispatch());
                let request = request.groups(groups()).along(usage, params, form);
                Dispatch::nvfp4_quantize(request).into_one()
            };
            let parts = |made| parts(Operand::Quantized(made));
            let found = Dispatch::nvfp4_in_form(made(StoredForm::Rows), groups(), form);
            assert_eq!(parts(found), parts(made(form)), "{what}");
            if form == StoredForm::Tiles {
                let rows = Dispatch::nvfp4_in_form(made(form), groups(), StoredForm::Rows);
                assert_eq!(parts(rows), parts(made(StoredForm::Rows)), "{what}, back");
            }
        }
    }
}
