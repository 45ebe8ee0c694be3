//! Operations that backends implement by kernels.

use burn_core as burn;
use nvfp4_formats::StoredForm;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend,
    autodiff::checkpoint::strategy::CheckpointStrategy,
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::FloatDType;

use super::branch::{Branch, BranchPoint};
use super::collective::CollectiveOps;
use super::layers::{Activation, ActivationOps};
#[cfg(feature = "cubecl-backend")]
use super::meta;
use super::rows;
use super::tensors::{
    ComputedAmax, GatherSpec, GemmGroups, GivenAmax, MaybeTensor, Named, Operand, QuantizeRequest,
    QuantizeSource, QuantizedData, QuantizedMatrix, QuantizedPair, RowGroups, UnpermuteGradients,
};

/// NVFP4 operations on the primitives of a backend; backends implement each by separate kernels.
///
/// Matrices are 2-D floats of dtype `f32`, `bf16` or `f16`. Under `Autodiff` all results are
/// constants: [`Nvfp4Ops`](super::Nvfp4Ops) contains the differentiable operations.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait Nvfp4KernelOps: ActivationOps + CollectiveOps {
    /// Marks a point of `branch`, and returns `operand`. Work queued between the end and the join
    /// of the branch must not depend on it, but backends may run everything in queue order.
    #[fusion(meta = meta::branch)]
    fn nvfp4_branch(
        #[extension_type] operand: Operand<Self>,
        branch: Branch,
        point: BranchPoint,
    ) -> Operand<Self> {
        let _ = (branch, point);
        operand
    }

    /// Returns the quantized tensors of `request`, with one read of its source if one kernel writes
    /// both.
    ///
    /// The number of columns must be a multiple of 16 for a row-wise NVFP4 tensor; a column-wise
    /// one is padded with zeros. With 16x16 blocks the number of rows must be a multiple of 16 too.
    /// With [`RowGroups::Offsets`] blocks must be 1x16 or 1x32, and the storage packed.
    /// [`StoredForm::WholeTiles`] requires tokens in 1x16 blocks. Tensors of a quantized source are
    /// packed.
    #[fusion(meta = meta::quantize)]
    fn nvfp4_quantize(#[extension_type] request: QuantizeRequest<Self>) -> QuantizedPair<Self>;

    /// Computes the amax values of the tensors of `request`, in formats with a global scale,
    /// without quantizing: those of both usages in one read. Also returns the values of an
    /// activation.
    #[fusion(meta = meta::amax)]
    fn nvfp4_amax(#[extension_type] request: QuantizeRequest<Self>) -> ComputedAmax<Self>;

    /// Converts `source`, a quantized matrix or a stack of them by `groups`, to this packed `form`:
    /// for tensors that were assembled in rows of scales and are read in tiles. No operation if it
    /// has that form already, or on Flex.
    #[fusion(meta = meta::in_form)]
    fn nvfp4_in_form(
        #[extension_type] source: QuantizedMatrix<Self>,
        #[extension_type] groups: RowGroups<Self>,
        form: StoredForm,
    ) -> QuantizedMatrix<Self>;

    /// Dequantizes `source` in the orientation of its source, `[rows, cols]`. Transformed values
    /// stay in the rotated domain. With groups, `source` must be row-wise; rows of no group are
    /// undefined.
    #[fusion(meta = meta::dequantize)]
    fn nvfp4_dequantize(
        #[extension_type] source: QuantizedMatrix<Self>,
        #[extension_type] groups: RowGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// Computes the GEMM of two operands, see [`GemmGroups`], accumulated in `f32` and rounded once
    /// to `dtype`. `alpha` is one operand's global scale times the other's.
    ///
    /// Two float operands must have one dtype, and a float operand must not be combined with a
    /// quantized one whose K dimension is padded. A packed operand is never dequantized as a whole
    /// for a bf16 one if [`nvfp4_kernels`] has a kernel that reads both; for an MN-major one, that
    /// is the case on every GPU.
    #[fusion(meta = meta::gemm)]
    fn nvfp4_gemm(
        #[extension_type] a: Operand<Self>,
        #[extension_type] b: Operand<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] groups: GemmGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// Computes `added` plus the dense GEMM of two operands, summed in `f32` and rounded once to the
    /// dtype of `added`. The result has the memory of `added`, which is copied first if another
    /// tensor shares it. Otherwise like [`nvfp4_gemm`](Self::nvfp4_gemm).
    #[fusion(meta = meta::add_gemm)]
    fn nvfp4_add_gemm(
        added: FloatTensor<Self>,
        #[extension_type] a: Operand<Self>,
        #[extension_type] b: Operand<Self>,
    ) -> FloatTensor<Self>;

    /// Returns, for each of `rows` rows, the value of its group from `values`, `f32[groups]`; 0 for
    /// rows of no group.
    #[fusion(meta = meta::broadcast_group_values)]
    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self>;

    /// Sums the rows of each group of `x` (`[tokens, cols]`), `f32[groups, cols]`.
    #[fusion(meta = meta::segment_sum)]
    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self>;

    /// Sums the columns of `x` (`[rows, cols]`), `f32[cols]`; zeros if there are no rows.
    #[fusion(meta = meta::column_sums)]
    fn nvfp4_column_sums(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Computes the gradients of [`nvfp4_moe_unpermute`](super::Nvfp4Ops::nvfp4_moe_unpermute),
    /// given that of its output (`[tokens, width]`), which has the dtype of `y`.
    #[fusion(meta = meta::moe_unpermute_backward)]
    fn nvfp4_moe_unpermute_backward(
        dout: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
        named: Named,
    ) -> UnpermuteGradients<Self> {
        rows::unpermute_backward::<Self>(dout, y, weights, (places, choices), named)
    }

    /// Gathers `out[i] = x[numbers[i]]` for `x` (`[rows, width]`) and `numbers` (`[n]`). Rows for
    /// indices out of range are undefined, and those of none of the `groups` if amax values are
    /// requested.
    #[fusion(meta = meta::gather_rows)]
    fn nvfp4_gather_rows(
        x: FloatTensor<Self>,
        numbers: IntTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        spec: GatherSpec,
    ) -> FloatTensor<Self> {
        drop(groups);
        rows::gather::<Self>(x, numbers, spec.named)
    }

    /// Computes `out[i] = Σⱼ weights[i, j] · x[places[i, j]]`, or without `weights` the sum of the
    /// rows, for `x` (`[rows, width]`), `weights` (`f32[n, copies]`) and row indices `places`
    /// (`[n, copies]`) with at least one column. Accumulates in `f32`, in the order of `j`, and
    /// rounds once to the dtype of `x`. Indices out of range are skipped.
    #[fusion(meta = meta::sum_rows)]
    fn nvfp4_sum_rows(
        x: FloatTensor<Self>,
        #[extension_type] weights: MaybeTensor<Self>,
        places: IntTensor<Self>,
        named: Named,
    ) -> FloatTensor<Self> {
        rows::sum::<Self>(x, weights, places, named)
    }

    /// Computes [`nvfp4_activation`](ActivationOps::nvfp4_activation) of the rows of `x`, or, with
    /// `grad`, [`nvfp4_activation_backward`](ActivationOps::nvfp4_activation_backward). With
    /// [`RowGroups::Window`], rows of no group are undefined.
    #[fusion(meta = meta::activation_of_groups)]
    fn nvfp4_activation_of_groups(
        x: FloatTensor<Self>,
        #[extension_type] grad: MaybeTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        drop(groups);
        activated::<Self>(x, grad, activation)
    }
}

impl<B: Nvfp4KernelOps, C: CheckpointStrategy> Nvfp4KernelOps for Autodiff<B, C> {
    fn nvfp4_quantize(request: QuantizeRequest<Self>) -> QuantizedPair<Self> {
        B::nvfp4_quantize(inner_request(request)).map(constant)
    }

    fn nvfp4_amax(request: QuantizeRequest<Self>) -> ComputedAmax<Self> {
        let ComputedAmax {
            values,
            rowwise,
            columnwise,
        } = B::nvfp4_amax(inner_request(request));
        ComputedAmax {
            values: values.map(Self::from_inner),
            rowwise: rowwise.map(Self::from_inner),
            columnwise: columnwise.map(Self::from_inner),
        }
    }

    fn nvfp4_in_form(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        form: StoredForm,
    ) -> QuantizedMatrix<Self> {
        constant(B::nvfp4_in_form(inner(source), inner_groups(groups), form))
    }

    fn nvfp4_dequantize(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (source, groups) = (inner(source), inner_groups(groups));
        Self::from_inner(B::nvfp4_dequantize(source, groups, dtype))
    }

    fn nvfp4_branch(operand: Operand<Self>, branch: Branch, point: BranchPoint) -> Operand<Self> {
        match B::nvfp4_branch(inner_operand(operand), branch, point) {
            Operand::Quantized(quantized) => Operand::Quantized(constant(quantized)),
            Operand::QuantizedMnMajor(quantized) => Operand::QuantizedMnMajor(constant(quantized)),
            Operand::Float(x, usage) => Operand::Float(Self::from_inner(x), usage),
        }
    }

    fn nvfp4_gemm(
        a: Operand<Self>,
        b: Operand<Self>,
        bias: MaybeTensor<Self>,
        groups: GemmGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (a, b) = (inner_operand(a), inner_operand(b));
        let bias = bias.map(|bias| bias.into_primitive());
        let groups = match groups {
            GemmGroups::None => GemmGroups::None,
            GemmGroups::M { offsets, others } => GemmGroups::M { offsets, others },
            GemmGroups::K {
                offsets,
                tokens,
                others,
            } => GemmGroups::K {
                offsets,
                tokens,
                others,
            },
        };
        Self::from_inner(B::nvfp4_gemm(a, b, bias, groups, dtype))
    }

    fn nvfp4_add_gemm(
        added: FloatTensor<Self>,
        a: Operand<Self>,
        b: Operand<Self>,
    ) -> FloatTensor<Self> {
        let (a, b) = (inner_operand(a), inner_operand(b));
        Self::from_inner(B::nvfp4_add_gemm(added.into_primitive(), a, b))
    }

    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        let values = values.into_primitive();
        Self::from_inner(B::nvfp4_broadcast_group_values(values, offsets, rows))
    }

    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_segment_sum(x.into_primitive(), offsets))
    }

    fn nvfp4_column_sums(x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_column_sums(x.into_primitive()))
    }

    fn nvfp4_moe_unpermute_backward(
        dout: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
        named: Named,
    ) -> UnpermuteGradients<Self> {
        let (dout, y) = (dout.into_primitive(), y.into_primitive());
        let weights = weights.into_primitive();
        let found = B::nvfp4_moe_unpermute_backward(dout, y, weights, places, choices, named);
        UnpermuteGradients {
            rows: Self::from_inner(found.rows),
            weights: Self::from_inner(found.weights),
        }
    }

    fn nvfp4_gather_rows(
        x: FloatTensor<Self>,
        numbers: IntTensor<Self>,
        groups: RowGroups<Self>,
        spec: GatherSpec,
    ) -> FloatTensor<Self> {
        let (x, groups) = (x.into_primitive(), inner_groups(groups));
        Self::from_inner(B::nvfp4_gather_rows(x, numbers, groups, spec))
    }

    fn nvfp4_sum_rows(
        x: FloatTensor<Self>,
        weights: MaybeTensor<Self>,
        places: IntTensor<Self>,
        named: Named,
    ) -> FloatTensor<Self> {
        let weights = weights.map(|weights| weights.into_primitive());
        let x = x.into_primitive();
        Self::from_inner(B::nvfp4_sum_rows(x, weights, places, named))
    }

    fn nvfp4_activation_of_groups(
        x: FloatTensor<Self>,
        grad: MaybeTensor<Self>,
        groups: RowGroups<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        let (x, grad) = (x.into_primitive(), grad.map(|grad| grad.into_primitive()));
        let groups = inner_groups(groups);
        Self::from_inner(B::nvfp4_activation_of_groups(x, grad, groups, activation))
    }
}

/// Computes the activation of `x`, or its gradient if `grad`, the gradient of its output, is given.
pub(super) fn activated<B: ActivationOps>(
    x: FloatTensor<B>,
    grad: MaybeTensor<B>,
    activation: Activation,
) -> FloatTensor<B> {
    match grad.into_option() {
        None => B::nvfp4_activation(x, activation),
        Some(grad) => B::nvfp4_activation_backward(grad, x, activation),
    }
}

/// Converts a quantized matrix to a constant of the autodiff backend.
pub(super) fn constant<B: Backend, C: CheckpointStrategy>(
    quantized: QuantizedMatrix<B>,
) -> QuantizedMatrix<Autodiff<B, C>> {
    let outer = <Autodiff<B, C> as AutodiffBackend>::from_inner;
    QuantizedMatrix {
        data: match quantized.data {
            QuantizedData::Packed { codes, scales } => QuantizedData::Packed { codes, scales },
            QuantizedData::Bf16Unscaled(values) => QuantizedData::Bf16Unscaled(outer(values)),
        },
        amax: quantized.amax.map(outer),
        layout: quantized.layout,
    }
}

/// Converts a quantized matrix to the inner backend.
pub(crate) fn inner<B: Nvfp4KernelOps, C: CheckpointStrategy>(
    quantized: QuantizedMatrix<Autodiff<B, C>>,
) -> QuantizedMatrix<B> {
    QuantizedMatrix {
        data: match quantized.data {
            QuantizedData::Packed { codes, scales } => QuantizedData::Packed { codes, scales },
            QuantizedData::Bf16Unscaled(values) => {
                QuantizedData::Bf16Unscaled(values.into_primitive())
            }
        },
        amax: quantized.amax.map(|amax| amax.into_primitive()),
        layout: quantized.layout,
    }
}

/// Converts a request to the inner backend.
fn inner_request<B: Nvfp4KernelOps, C: CheckpointStrategy>(
    request: QuantizeRequest<Autodiff<B, C>>,
) -> QuantizeRequest<B> {
    let maybe = |tensor: MaybeTensor<Autodiff<B, C>>| tensor.map(|tensor| tensor.into_primitive());
    QuantizeRequest {
        source: match request.source {
            QuantizeSource::Matrix(x) => QuantizeSource::Matrix(x.into_primitive()),
            QuantizeSource::Activation {
                x,
                grad,
                activation,
            } => QuantizeSource::Activation {
                x: x.into_primitive(),
                grad: maybe(grad),
                activation,
            },
            QuantizeSource::Quantized { tensor, via } => QuantizeSource::Quantized {
                tensor: inner(tensor),
                via,
            },
        },
        groups: inner_groups(request.groups),
        amax: match request.amax {
            GivenAmax::Absent => GivenAmax::Absent,
            GivenAmax::Each {
                rowwise,
                columnwise,
            } => GivenAmax::Each {
                rowwise: maybe(rowwise),
                columnwise: maybe(columnwise),
            },
            GivenAmax::Entry(maxima, entry) => GivenAmax::Entry(maxima.into_primitive(), entry),
        },
        rowwise: request.rowwise,
        columnwise: request.columnwise,
        unscaled: request.unscaled,
    }
}

/// Converts an operand to the inner backend.
fn inner_operand<B: Nvfp4KernelOps, C: CheckpointStrategy>(
    operand: Operand<Autodiff<B, C>>,
) -> Operand<B> {
    match operand {
        Operand::Quantized(quantized) => Operand::Quantized(inner(quantized)),
        Operand::QuantizedMnMajor(quantized) => Operand::QuantizedMnMajor(inner(quantized)),
        Operand::Float(x, usage) => Operand::Float(x.into_primitive(), usage),
    }
}

/// Converts groups to the inner backend.
pub(super) fn inner_groups<B: Backend, C: CheckpointStrategy>(
    groups: RowGroups<Autodiff<B, C>>,
) -> RowGroups<B> {
    match groups {
        RowGroups::Whole => RowGroups::Whole,
        RowGroups::Batch(count) => RowGroups::Batch(count),
        RowGroups::Offsets(offsets) => RowGroups::Offsets(offsets),
        RowGroups::Window { offsets, earlier } => RowGroups::Window { offsets, earlier },
    }
}
