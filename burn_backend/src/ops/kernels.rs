//! The operations that have kernels.

use burn_core as burn;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend,
    autodiff::checkpoint::strategy::CheckpointStrategy,
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::FloatDType;
use nvfp4_kernels::Usage;

use super::branch::{Branch, BranchPoint};
use super::collective::CollectiveOps;
use super::layers::{Activation, ActivationOps};
#[cfg(feature = "cubecl-backend")]
use super::meta;
use super::rows;
use super::spec::QuantParams;
use super::stored::StoredForm;
use super::tensors::{
    ActivationAmaxes, AmaxPair, BothStorages, GemmGroups, MaybeTensor, Named, Operand, QuantUsages,
    QuantizedData, QuantizedMatrix, QuantizedPair, RowGroups, UnpermuteGradients,
};

/// NVFP4 operations on the primitives of a backend, each of which backends compute by kernels of
/// their own.
///
/// Matrices are 2-D floats of type `f32`, `bf16` or `f16`. Under `Autodiff` all results are
/// constants: [`Nvfp4Ops`](super::Nvfp4Ops) has what is differentiable.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait Nvfp4KernelOps: ActivationOps + CollectiveOps {
    /// `operand`, at a point of `branch`. What is queued between its end and its join must need
    /// nothing of it, but backends may run all of it in its order.
    #[fusion(meta = meta::branch)]
    fn nvfp4_branch(
        #[extension_type] operand: Operand<Self>,
        branch: Branch,
        point: BranchPoint,
    ) -> Operand<Self> {
        let _ = (branch, point);
        operand
    }

    /// The quantized tensors of `x` (`[rows, cols]`) with the `usages`, from one read of `x` where
    /// one kernel makes both.
    ///
    /// `cols` must be a multiple of 16 for a rowwise NVFP4 tensor; a columnwise one is padded with
    /// zeros. 16x16 blocks need `rows` to be a multiple of 16 too. With [`RowGroups::Offsets`]
    /// blocks are 1x16 or 1x32, and codes are stored. [`StoredForm::WholeTiles`] are of tokens, in
    /// 1x16 blocks.
    #[fusion(meta = meta::quantize)]
    fn nvfp4_quantize(
        x: FloatTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self>;

    /// The amax values of `x` (`[rows, cols]`) from which the tensor with this usage is quantized:
    /// one, or one for each stored row, `f32`.
    ///
    /// `params` are of a format with a global scale.
    #[fusion(meta = meta::amax)]
    fn nvfp4_amax(x: FloatTensor<Self>, params: QuantParams, usage: Usage) -> FloatTensor<Self>;

    /// [`nvfp4_amax`](Self::nvfp4_amax) of both usages, each of which has one of the whole matrix
    /// and none of which is made by MS-EDEN: in one read.
    #[fusion(meta = meta::amax_pair)]
    fn nvfp4_amax_pair(
        x: FloatTensor<Self>,
        rowwise: QuantParams,
        columnwise: QuantParams,
    ) -> AmaxPair<Self> {
        AmaxPair {
            rowwise: Self::nvfp4_amax(x.clone(), rowwise, Usage::Rowwise),
            columnwise: Self::nvfp4_amax(x, columnwise, Usage::Columnwise),
        }
    }

    /// The values that [`nvfp4_quantize_activation`](Self::nvfp4_quantize_activation) quantizes of
    /// one matrix, and their [amax values](Self::nvfp4_amax_pair), in the pass that computes them.
    #[fusion(meta = meta::activation_amaxes)]
    fn nvfp4_activation_amaxes(
        x: FloatTensor<Self>,
        #[extension_type] grad: MaybeTensor<Self>,
        activation: Activation,
        rowwise: QuantParams,
        columnwise: QuantParams,
    ) -> ActivationAmaxes<Self> {
        let values = activated::<Self>(x, grad, activation);
        ActivationAmaxes {
            amax: Self::nvfp4_amax_pair(values.clone(), rowwise, columnwise),
            values,
        }
    }

    /// [`nvfp4_quantize`](Self::nvfp4_quantize) of one matrix, packed, from amax values that
    /// [`nvfp4_amax`](Self::nvfp4_amax) found of it, or of a larger one of which it is a part:
    /// those of each usage in a format with a global scale.
    #[fusion(meta = meta::quantize_with_amax)]
    fn nvfp4_quantize_with_amax(
        x: FloatTensor<Self>,
        #[extension_type] rowwise_amax: MaybeTensor<Self>,
        #[extension_type] columnwise_amax: MaybeTensor<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self>;

    /// The same with one amax for all usages: entry `entry` of `maxima`.
    #[fusion(meta = meta::quantize_with_entry)]
    fn nvfp4_quantize_with_entry(
        x: FloatTensor<Self>,
        maxima: FloatTensor<Self>,
        entry: usize,
        usages: QuantUsages,
    ) -> QuantizedPair<Self>;

    /// The quantized tensors of `activation` of the rows of `x`, or, with `grad`, of its gradient
    /// by `x`, given that of its output: those that [`nvfp4_quantize`](Self::nvfp4_quantize) makes
    /// of [`nvfp4_activation`](ActivationOps::nvfp4_activation) or
    /// [`nvfp4_activation_backward`](ActivationOps::nvfp4_activation_backward), bit for bit.
    ///
    /// Where amax values are wanted, GPUs find them in the pass that computes the activation.
    #[fusion(meta = meta::quantize_activation)]
    fn nvfp4_quantize_activation(
        x: FloatTensor<Self>,
        #[extension_type] grad: MaybeTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        activation: Activation,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        let values = activated::<Self>(x, grad, activation);
        Self::nvfp4_quantize(values, groups, usages)
    }

    /// The rowwise tensor of `x`, or of `activation` of its rows, in both storages: those that
    /// [`nvfp4_quantize`](Self::nvfp4_quantize) makes as [`StoredForm::ROWS`] and as
    /// [`StoredForm::Bf16Unscaled`] with the same random bits, if there are any. Where one GEMM
    /// multiplies values and the tensor is kept for another use, GPUs write both from one read.
    ///
    /// `params` are NVFP4 in 1x16 blocks, not made by MS-EDEN.
    #[fusion(meta = meta::quantize_in_both_storages)]
    fn nvfp4_quantize_in_both_storages(
        x: FloatTensor<Self>,
        activation: Option<Activation>,
        params: QuantParams,
    ) -> BothStorages<Self>;

    /// The values of `source`, which is NVFP4, packed and not transformed, quantized straight from
    /// its codes, by MS-EDEN or to an MX format. For an MX format the values are rounded to `via`
    /// first. With groups, which are those of `source`, `source` is rowwise. The result is packed,
    /// in this `form`.
    #[fusion(meta = meta::requantize)]
    fn nvfp4_requantize(
        #[extension_type] source: QuantizedMatrix<Self>,
        #[extension_type] groups: RowGroups<Self>,
        usage: Usage,
        params: QuantParams,
        form: StoredForm,
        via: FloatDType,
    ) -> QuantizedMatrix<Self>;

    /// `source`, a quantized matrix or a stack of them by `groups`, in this packed `form`: for what
    /// was put together in rows of scales and is read in tiles. As it is where it has that form
    /// already, and on Flex.
    #[fusion(meta = meta::in_form)]
    fn nvfp4_in_form(
        #[extension_type] source: QuantizedMatrix<Self>,
        #[extension_type] groups: RowGroups<Self>,
        form: StoredForm,
    ) -> QuantizedMatrix<Self>;

    /// The values of `source` in the orientation of its source, `[rows, cols]`. With a transform
    /// they stay in the rotated domain. With groups, `source` is rowwise; rows of no group are
    /// undefined.
    #[fusion(meta = meta::dequantize)]
    fn nvfp4_dequantize(
        #[extension_type] source: QuantizedMatrix<Self>,
        #[extension_type] groups: RowGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// The GEMM of two operands, see [`GemmGroups`], accumulated in `f32` and rounded once to
    /// `dtype`. `alpha` is one operand's global scale times the other's.
    ///
    /// Two float operands have one type, and none is multiplied with a quantized one whose
    /// contraction is padded. A packed operand is never dequantized as a whole for a bf16 one where
    /// [`nvfp4_kernels`] has a kernel that reads both, which is so on every GPU where it is
    /// MN-major.
    #[fusion(meta = meta::gemm)]
    fn nvfp4_gemm(
        #[extension_type] a: Operand<Self>,
        #[extension_type] b: Operand<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] groups: GemmGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// The value of its group for each of `rows` rows, from `values`, `f32[groups]`; 0 for rows of
    /// no group.
    #[fusion(meta = meta::broadcast_group_values)]
    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self>;

    /// The sum of the rows of each group of `x` (`[tokens, cols]`), `f32[groups, cols]`.
    #[fusion(meta = meta::segment_sum)]
    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self>;

    /// The gradients of [`nvfp4_moe_unpermute`](super::Nvfp4Ops::nvfp4_moe_unpermute), given that
    /// of its output (`[tokens, width]`), which has the type of `y`.
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

    /// `out[i] = x[numbers[i]]` for `x` (`[rows, width]`) and `numbers` (`[n]`), of which some may
    /// name no row: theirs are undefined.
    #[fusion(meta = meta::named_rows)]
    fn nvfp4_named_rows(x: FloatTensor<Self>, numbers: IntTensor<Self>) -> FloatTensor<Self> {
        rows::named::<Self>(x, numbers)
    }

    /// `out[i] = Σⱼ weights[i, j] · x[places[i, j]]`, without `weights` the sum of the rows: for
    /// `x` (`[rows, width]`), `weights` (`f32[n, copies]`) and `places` (`[n, copies]`), row
    /// numbers, at least one column of them. In `f32`, in the order of `j`, rounded once to the
    /// type of `x`. A number that names no row adds nothing.
    #[fusion(meta = meta::sum_rows)]
    fn nvfp4_sum_rows(
        x: FloatTensor<Self>,
        #[extension_type] weights: MaybeTensor<Self>,
        places: IntTensor<Self>,
        named: Named,
    ) -> FloatTensor<Self> {
        rows::sum::<Self>(x, weights, places, named)
    }

    /// [`nvfp4_activation`](ActivationOps::nvfp4_activation) of the rows of `x`, or, with `grad`,
    /// [`nvfp4_activation_backward`](ActivationOps::nvfp4_activation_backward); with
    /// [`RowGroups::Window`] undefined in rows of no group.
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
    fn nvfp4_quantize(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        B::nvfp4_quantize(x.into_primitive(), inner_groups(groups), usages).map(constant)
    }

    fn nvfp4_amax(x: FloatTensor<Self>, params: QuantParams, usage: Usage) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_amax(x.into_primitive(), params, usage))
    }

    fn nvfp4_amax_pair(
        x: FloatTensor<Self>,
        rowwise: QuantParams,
        columnwise: QuantParams,
    ) -> AmaxPair<Self> {
        constant_pair(B::nvfp4_amax_pair(x.into_primitive(), rowwise, columnwise))
    }

    fn nvfp4_activation_amaxes(
        x: FloatTensor<Self>,
        grad: MaybeTensor<Self>,
        activation: Activation,
        rowwise: QuantParams,
        columnwise: QuantParams,
    ) -> ActivationAmaxes<Self> {
        let (x, grad) = (x.into_primitive(), grad.map(|grad| grad.into_primitive()));
        let made = B::nvfp4_activation_amaxes(x, grad, activation, rowwise, columnwise);
        ActivationAmaxes {
            values: Self::from_inner(made.values),
            amax: constant_pair(made.amax),
        }
    }

    fn nvfp4_quantize_with_amax(
        x: FloatTensor<Self>,
        rowwise_amax: MaybeTensor<Self>,
        columnwise_amax: MaybeTensor<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        let [row, col] =
            [rowwise_amax, columnwise_amax].map(|amax| amax.map(|amax| amax.into_primitive()));
        B::nvfp4_quantize_with_amax(x.into_primitive(), row, col, usages).map(constant)
    }

    fn nvfp4_quantize_with_entry(
        x: FloatTensor<Self>,
        maxima: FloatTensor<Self>,
        entry: usize,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        let (x, maxima) = (x.into_primitive(), maxima.into_primitive());
        B::nvfp4_quantize_with_entry(x, maxima, entry, usages).map(constant)
    }

    fn nvfp4_quantize_activation(
        x: FloatTensor<Self>,
        grad: MaybeTensor<Self>,
        groups: RowGroups<Self>,
        activation: Activation,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        let (x, grad) = (x.into_primitive(), grad.map(|grad| grad.into_primitive()));
        let groups = inner_groups(groups);
        B::nvfp4_quantize_activation(x, grad, groups, activation, usages).map(constant)
    }

    fn nvfp4_quantize_in_both_storages(
        x: FloatTensor<Self>,
        activation: Option<Activation>,
        params: QuantParams,
    ) -> BothStorages<Self> {
        let x = x.into_primitive();
        let BothStorages { packed, unscaled } =
            B::nvfp4_quantize_in_both_storages(x, activation, params);
        BothStorages {
            packed: constant(packed),
            unscaled: constant(unscaled),
        }
    }

    fn nvfp4_requantize(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
        params: QuantParams,
        form: StoredForm,
        via: FloatDType,
    ) -> QuantizedMatrix<Self> {
        let (source, groups) = (inner(source), inner_groups(groups));
        constant(B::nvfp4_requantize(
            source, groups, usage, params, form, via,
        ))
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

    fn nvfp4_named_rows(x: FloatTensor<Self>, numbers: IntTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_named_rows(x.into_primitive(), numbers))
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

/// The activation of `x`, or its gradient by that, given `grad`, the gradient of its output.
fn activated<B: ActivationOps>(
    x: FloatTensor<B>,
    grad: MaybeTensor<B>,
    activation: Activation,
) -> FloatTensor<B> {
    match grad.into_option() {
        None => B::nvfp4_activation(x, activation),
        Some(grad) => B::nvfp4_activation_backward(grad, x, activation),
    }
}

/// Amax values as constants of the autodiff backend.
fn constant_pair<B: Backend, C: CheckpointStrategy>(amax: AmaxPair<B>) -> AmaxPair<Autodiff<B, C>> {
    let outer = <Autodiff<B, C> as AutodiffBackend>::from_inner;
    AmaxPair {
        rowwise: outer(amax.rowwise),
        columnwise: outer(amax.columnwise),
    }
}

/// A quantized matrix as a constant of the autodiff backend.
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

/// A quantized matrix of the inner backend.
pub(super) fn inner<B: Nvfp4KernelOps, C: CheckpointStrategy>(
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

/// An operand of the inner backend.
fn inner_operand<B: Nvfp4KernelOps, C: CheckpointStrategy>(
    operand: Operand<Autodiff<B, C>>,
) -> Operand<B> {
    match operand {
        Operand::Quantized(quantized) => Operand::Quantized(inner(quantized)),
        Operand::QuantizedMnMajor(quantized) => Operand::QuantizedMnMajor(inner(quantized)),
        Operand::Float(x, usage) => Operand::Float(x.into_primitive(), usage),
    }
}

/// Groups of the inner backend.
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
