//! Tensors that cross the extension trait.
#![allow(
    clippy::large_enum_variant,
    reason = "an operand moves a few times a layer, and extension types hold no Box"
)]

use burn_core as burn;
use nvfp4_formats::{Layout, StoredForm, Usage, reference::Activation};

use burn_core::backend::{
    Backend, ExtensionType,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::FloatDType;

use super::spec::{OutputAmax, QuantParams};

/// Optional float tensor: arguments of the extension trait cannot contain `Option`.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum MaybeTensor<B: Backend> {
    /// No tensor.
    Absent,
    /// A tensor.
    Present(FloatTensor<B>),
}

impl<B: Backend> From<Option<FloatTensor<B>>> for MaybeTensor<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }
}

impl<B: Backend> MaybeTensor<B> {
    /// Returns the tensor, if any.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }

    /// Returns true if there is a tensor.
    pub(super) fn is_present(&self) -> bool {
        matches!(self, Self::Present(_))
    }

    /// Replaces the tensor.
    pub(crate) fn map<C: Backend>(
        self,
        f: impl FnOnce(FloatTensor<B>) -> FloatTensor<C>,
    ) -> MaybeTensor<C> {
        match self {
            Self::Absent => MaybeTensor::Absent,
            Self::Present(tensor) => MaybeTensor::Present(f(tensor)),
        }
    }
}

/// Values that are quantized, or whose amax is computed.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum QuantizeSource<B: Backend> {
    /// A matrix, `[rows, cols]`.
    Matrix(FloatTensor<B>),
    /// `activation` of the rows of `x`, or, with `grad`, its gradient by `x`, given that of its
    /// output: the values of [`nvfp4_activation`](super::layers::ActivationOps::nvfp4_activation)
    /// or
    /// [`nvfp4_activation_backward`](super::layers::ActivationOps::nvfp4_activation_backward). If
    /// amax values are needed, GPUs compute them in the pass of the activation.
    Activation {
        /// Input of the activation.
        x: FloatTensor<B>,
        /// Gradient of the output.
        #[extension_type]
        grad: MaybeTensor<B>,
        /// Activation.
        activation: Activation,
    },
    /// Dequantized values of an NVFP4 tensor, packed and not transformed, for MS-EDEN and MX
    /// formats. For an MX format the values are first rounded to `via`.
    Quantized {
        /// Tensor. With groups, which are its own, it must be row-wise.
        #[extension_type]
        tensor: QuantizedMatrix<B>,
        /// Type to which the values are rounded.
        via: FloatDType,
    },
}

/// Amax values that are known before a matrix is quantized.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum GivenAmax<B: Backend> {
    /// None: they are computed.
    Absent,
    /// Those of one matrix, or of a larger matrix that contains it, for each usage in a format with
    /// a global scale. One of them serves both usages.
    Each {
        /// For the row-wise tensor.
        #[extension_type]
        rowwise: MaybeTensor<B>,
        /// For the column-wise tensor.
        #[extension_type]
        columnwise: MaybeTensor<B>,
    },
    /// One amax for all usages: this entry of a tensor, which is read in place.
    Entry(FloatTensor<B>, usize),
}

/// Request for the quantized tensors of a matrix, or for their amax values.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct QuantizeRequest<B: Backend> {
    /// Values.
    #[extension_type]
    pub source: QuantizeSource<B>,
    /// Groups of rows.
    #[extension_type]
    pub groups: RowGroups<B>,
    /// Amax values, if known; of one matrix.
    #[extension_type]
    pub amax: GivenAmax<B>,
    /// Parameters and form of the row-wise tensor, if requested.
    pub rowwise: Option<(QuantParams, StoredForm)>,
    /// Parameters and form of the column-wise tensor, if requested.
    pub columnwise: Option<(QuantParams, StoredForm)>,
    /// True for a row-wise tensor in both storages, as [`StoredForm::Rows`] and as
    /// [`StoredForm::Bf16Unscaled`], with the same random bits, if any. For a GEMM that multiplies
    /// values while the tensor is kept for another use, GPUs write both from one read. The tensor
    /// must be NVFP4 in 1x16 blocks, without MS-EDEN.
    pub unscaled: bool,
}

impl<B: Backend> QuantizeRequest<B> {
    /// Returns a request for no tensor of `source` yet, without groups.
    pub fn new(source: QuantizeSource<B>) -> Self {
        Self {
            source,
            groups: RowGroups::Whole,
            amax: GivenAmax::Absent,
            rowwise: None,
            columnwise: None,
            unscaled: false,
        }
    }

    /// Returns a request for no tensor of a matrix yet, without groups.
    pub fn of_matrix(x: FloatTensor<B>) -> Self {
        Self::new(QuantizeSource::Matrix(x))
    }

    /// Requests the tensor along `usage`, stored in `form`.
    pub fn along(mut self, usage: Usage, params: QuantParams, form: StoredForm) -> Self {
        match usage {
            Usage::Rowwise => self.rowwise = Some((params, form)),
            Usage::Columnwise => self.columnwise = Some((params, form)),
        }
        self
    }

    /// Requests both tensors, packed, with row-major block scales.
    pub fn both(self, rowwise: QuantParams, columnwise: QuantParams) -> Self {
        self.along(Usage::Rowwise, rowwise, StoredForm::Rows).along(
            Usage::Columnwise,
            columnwise,
            StoredForm::Rows,
        )
    }

    /// Sets the groups of rows.
    pub fn groups(self, groups: RowGroups<B>) -> Self {
        Self { groups, ..self }
    }

    /// Sets the known amax values.
    pub fn amax(self, amax: GivenAmax<B>) -> Self {
        Self { amax, ..self }
    }

    /// Requests the row-wise tensor in both storages.
    pub(super) fn in_both_storages(self) -> Self {
        let unscaled = true;
        Self { unscaled, ..self }
    }
}

/// Amax values of the tensors of a matrix, `f32`: one each, one per group, or one per stored row.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct ComputedAmax<B: Backend> {
    /// Values of the activation, if the source is one: `[rows, cols]`.
    #[extension_type]
    pub values: MaybeTensor<B>,
    /// Amax values of the row-wise tensor, if requested.
    #[extension_type]
    pub rowwise: MaybeTensor<B>,
    /// Amax values of the column-wise tensor, if requested.
    #[extension_type]
    pub columnwise: MaybeTensor<B>,
}

/// Elements of a quantized matrix, by the [`form`](Layout::form) of its layout.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum QuantizedData<B: Backend> {
    /// Codes and block scales.
    Packed {
        /// Codes. 4-bit codes are `u32[outer, blocks * 2]`: eight codes per word, the first in the
        /// lowest four bits. 8-bit codes are `u8[outer, blocks * 32]`.
        codes: IntTensor<B>,
        /// Block scales, `u8[outer, blocks]`: bytes in the scale format, row-major. In 128x4 tiles
        /// the size includes padding: `outer` to a multiple of 128 for each matrix of a stack and
        /// for each group of rows, and `blocks` to a multiple of 4.
        scales: IntTensor<B>,
    },
    /// Code times block scale, which is exact in bf16 and not yet multiplied by the global scale:
    /// `bf16[outer, blocks * 16]`. A GEMM without FP4 instructions multiplies these; an operand of
    /// one such GEMM need not be packed first. Only in dense GEMMs.
    Bf16Unscaled(FloatTensor<B>),
}

/// Quantized matrix on a backend, in any format.
///
/// With groups of rows, `layout` is that of all groups as one matrix. There is one amax per group,
/// or one per stored row, for each group separately in the column-wise tensor (`groups x cols`):
///
/// - the quantized tensors of a stack of weights are row-wise: that of `[experts * d_in, d_out]`,
///   and that of the transposed weights, `[experts * d_out, d_in]`;
/// - the row-wise tensor of tokens is that of `[tokens, cols]`; rows of no group are undefined;
/// - the column-wise tensor of tokens concatenates the groups, each padded to whole blocks (or
///   transforms), so `rows` of its layout is an upper bound; elements after the last group are
///   undefined.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct QuantizedMatrix<B: Backend> {
    /// Elements in stored orientation.
    #[extension_type]
    pub data: QuantizedData<B>,
    /// Amax values of the source (after the transform, if any), `f32`; absent in a format without a
    /// global scale.
    #[extension_type]
    pub amax: MaybeTensor<B>,
    /// Layout of the buffers.
    pub layout: Layout,
}

impl<B: Backend> QuantizedMatrix<B> {
    /// Returns the codes and block scales.
    ///
    /// # Panics
    /// If the tensor is stored as bf16 values.
    pub fn into_packed(self) -> (IntTensor<B>, IntTensor<B>) {
        match self.data {
            QuantizedData::Packed { codes, scales } => (codes, scales),
            QuantizedData::Bf16Unscaled(_) => {
                panic!("the tensor is stored as bf16 values")
            }
        }
    }
}

/// Quantized tensors of a matrix, as requested by [`QuantizeRequest`].
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum QuantizedPair<B: Backend> {
    /// Row-wise tensor.
    Rowwise(#[extension_type] QuantizedMatrix<B>),
    /// Column-wise tensor.
    Columnwise(#[extension_type] QuantizedMatrix<B>),
    /// Both tensors: row-wise, column-wise.
    Both(
        #[extension_type] QuantizedMatrix<B>,
        #[extension_type] QuantizedMatrix<B>,
    ),
    /// Row-wise tensor in both storages: codes and scales, and bf16 values.
    BothStorages {
        /// Codes, with row-major block scales.
        #[extension_type]
        packed: QuantizedMatrix<B>,
        /// Code times block scale in bf16.
        #[extension_type]
        unscaled: QuantizedMatrix<B>,
    },
}

impl<B: Backend> QuantizedPair<B> {
    /// Wraps the given tensors.
    pub(super) fn new(
        rowwise: Option<QuantizedMatrix<B>>,
        columnwise: Option<QuantizedMatrix<B>>,
    ) -> Self {
        match (rowwise, columnwise) {
            (Some(rowwise), Some(columnwise)) => Self::Both(rowwise, columnwise),
            (Some(rowwise), None) => Self::Rowwise(rowwise),
            (None, Some(columnwise)) => Self::Columnwise(columnwise),
            (None, None) => unreachable!("one usage at least"),
        }
    }

    /// Returns the row-wise and the column-wise tensor, if present.
    pub(super) fn into_options(self) -> (Option<QuantizedMatrix<B>>, Option<QuantizedMatrix<B>>) {
        match self {
            Self::Rowwise(one) | Self::BothStorages { packed: one, .. } => (Some(one), None),
            Self::Columnwise(one) => (None, Some(one)),
            Self::Both(rowwise, columnwise) => (Some(rowwise), Some(columnwise)),
        }
    }

    /// Maps each tensor by `f`.
    pub(super) fn map<C: Backend>(
        self,
        f: impl Fn(QuantizedMatrix<B>) -> QuantizedMatrix<C>,
    ) -> QuantizedPair<C> {
        match self {
            Self::Rowwise(one) => QuantizedPair::Rowwise(f(one)),
            Self::Columnwise(one) => QuantizedPair::Columnwise(f(one)),
            Self::Both(rowwise, columnwise) => QuantizedPair::Both(f(rowwise), f(columnwise)),
            Self::BothStorages { packed, unscaled } => QuantizedPair::BothStorages {
                packed: f(packed),
                unscaled: f(unscaled),
            },
        }
    }

    /// Returns the row-wise tensor in both storages: packed, in bf16.
    ///
    /// # Panics
    /// If it was not requested in both.
    pub(super) fn into_both_storages(self) -> (QuantizedMatrix<B>, QuantizedMatrix<B>) {
        match self {
            Self::BothStorages { packed, unscaled } => (packed, unscaled),
            _ => panic!("one storage was requested"),
        }
    }

    /// Returns the only tensor.
    ///
    /// # Panics
    /// If there are two tensors.
    pub fn into_one(self) -> QuantizedMatrix<B> {
        match self {
            Self::Rowwise(one) | Self::Columnwise(one) => one,
            Self::Both(..) | Self::BothStorages { .. } => panic!("two tensors were quantized"),
        }
    }

    /// Returns the row-wise and the column-wise tensor.
    ///
    /// # Panics
    /// If there is only one tensor.
    pub fn into_both(self) -> (QuantizedMatrix<B>, QuantizedMatrix<B>) {
        match self {
            Self::Both(rowwise, columnwise) => (rowwise, columnwise),
            _ => panic!("one usage was quantized"),
        }
    }
}

/// Operand of a GEMM, in any format: `outer` stored rows of K elements each, unless a variant
/// states otherwise.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum Operand<B: Backend> {
    /// A quantized matrix.
    Quantized(#[extension_type] QuantizedMatrix<B>),
    /// MN-major packed NVFP4 matrix, or a stack of them: each stored row is one index of K. Only as
    /// `b` of a GEMM that is not K-grouped: the weight of a layer, stored as its forward reads it,
    /// in dgrad. It must not be transformed or have an amax per stored row.
    QuantizedMnMajor(#[extension_type] QuantizedMatrix<B>),
    /// Unquantized matrix, with the K dimension along this axis; for a stack of weights, the
    /// matrices stacked along the rows, each with its K dimension along this axis.
    Float(FloatTensor<B>, Usage),
}

/// Parameters of a linear layer.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct LinearParams<B: Backend> {
    /// Weight, `[d_in, d_out]`, or a stack of weights, one per group of rows.
    pub weight: FloatTensor<B>,
    /// Bias, `[d_out]`, or one per group.
    #[extension_type]
    pub bias: MaybeTensor<B>,
}

/// Groups of rows of a matrix that are quantized together.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum RowGroups<B: Backend> {
    /// All rows in one group.
    Whole,
    /// This number of matrices with equal numbers of rows, stacked along the rows: a stack of
    /// weights.
    Batch(usize),
    /// Groups of any sizes, including 0, of tokens. The offsets of the groups are
    /// `u32[groups + 1]`, ascending from 0.
    Offsets(IntTensor<B>),
    /// Groups of any sizes when other devices have further groups: rows after the last of these
    /// groups belong to them; their contents do not matter.
    Window {
        /// Offsets of these groups.
        offsets: IntTensor<B>,
        /// Extent of the earlier groups in the tensor of all groups, after whose blocks these
        /// groups draw random bits: `u32[5]`, their rows in each of the units
        /// [`EARLIER_UNITS`](nvfp4_formats::reference::EARLIER_UNITS).
        earlier: IntTensor<B>,
    },
}

/// Validity of the indices of rows or positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// All indices are valid.
    All,
    /// Some indices equal the number of all rows, or positions, and are invalid: those of another
    /// device.
    Some,
}

/// Gather of rows for experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatherSpec {
    /// Validity of the indices.
    pub named: Named,
    /// Amax values that the experts need to quantize the rows, in their groups; the pass that
    /// writes the rows computes them. Does not affect any bit of the rows.
    pub amax: Option<OutputAmax>,
}

impl From<Named> for GatherSpec {
    /// Returns a gather without amax values.
    fn from(named: Named) -> Self {
        Self { named, amax: None }
    }
}

/// Contents of rows of no group after a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtherRows {
    /// Zeros.
    Zero,
    /// Undefined: nothing reads them.
    Undefined,
}

/// Grouped dimension of a GEMM.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum GemmGroups<B: Backend> {
    /// No groups: `out[m, n] = alpha · Σₖ a[m, k] · b[n, k] + bias[n]` over the stored rows of both
    /// operands.
    None,
    /// M-grouped: `out[i, n] = alpha · Σₖ a[i, k] · b[g, n, k] + bias[g, n]` for the rows `i` of
    /// group `g` in `offsets`. `a` is the row-wise operand of tokens. `b` is that of a stack,
    /// stored as `[experts * n, k]`, or as `[experts * k, n]` if MN-major. `bias` is
    /// `[experts, n]`.
    M {
        /// Offsets of the groups of rows.
        offsets: IntTensor<B>,
        /// Contents of rows of no group.
        others: OtherRows,
    },
    /// K-grouped: `out[g, m, n] = alpha · Σₖ a[m, k] · b[n, k]` over the tokens `k` of group `g`;
    /// zero for an empty group. `a` and `b` are operands of one format, with K along the tokens.
    K {
        /// Offsets of the groups of tokens.
        offsets: IntTensor<B>,
        /// Number of tokens.
        tokens: usize,
        /// Contents of tokens of no group.
        others: OtherRows,
    },
}

/// Gradients of a weighted sum of rows.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct UnpermuteGradients<B: Backend> {
    /// Gradient by the rows, in their shape and dtype.
    pub rows: FloatTensor<B>,
    /// Gradient by the weights, `f32[tokens, copies]`.
    pub weights: FloatTensor<B>,
}
