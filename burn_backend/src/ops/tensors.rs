//! The tensors that cross the extension trait.
#![allow(
    clippy::large_enum_variant,
    reason = "an operand moves a few times a layer, and extension types hold no Box"
)]

use burn_core as burn;

use burn_core::backend::{
    Backend, ExtensionType,
    tensor::{FloatTensor, IntTensor},
};
use nvfp4_kernels::{Layout, Usage};

use super::spec::QuantParams;
use super::stored::StoredForm;

/// A float tensor, or none: what crosses the extension trait holds no `Option`.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum MaybeTensor<B: Backend> {
    /// None.
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
    /// The tensor, if there is one.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }

    /// The same with another tensor.
    pub(super) fn map<C: Backend>(
        self,
        f: impl FnOnce(FloatTensor<B>) -> FloatTensor<C>,
    ) -> MaybeTensor<C> {
        match self {
            Self::Absent => MaybeTensor::Absent,
            Self::Present(tensor) => MaybeTensor::Present(f(tensor)),
        }
    }
}

/// The amax values for a rowwise and a columnwise tensor, one each: `f32[1]`.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct AmaxPair<B: Backend> {
    /// For the rowwise tensor.
    pub rowwise: FloatTensor<B>,
    /// For the columnwise tensor.
    pub columnwise: FloatTensor<B>,
}

impl<B: Backend> AmaxPair<B> {
    /// One value for both.
    pub(super) fn of_both(amax: FloatTensor<B>) -> Self {
        Self {
            rowwise: amax.clone(),
            columnwise: amax,
        }
    }
}

/// The values of an activation, or of its gradient, and their amax values.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct ActivationAmaxes<B: Backend> {
    /// `[rows, cols]`.
    pub values: FloatTensor<B>,
    /// Theirs.
    #[extension_type]
    pub amax: AmaxPair<B>,
}

/// The elements of a quantized matrix, by [`Storage`](nvfp4_kernels::Storage).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum QuantizedData<B: Backend> {
    /// Codes and block scales.
    Packed {
        /// Codes. Of 4 bits, `u32[outer, blocks * 2]`: eight to a word, the first in the lowest
        /// four bits. Of 8 bits, `u8[outer, blocks * 32]`.
        codes: IntTensor<B>,
        /// Block scales, `u8[outer, blocks]`: the bytes of the format's scales, row-major. In
        /// 128x4 tiles they have as many bytes as these take, with `outer` padded to 128 for each
        /// matrix of a stack and for each group of rows, and `blocks` to 4.
        scales: IntTensor<B>,
    },
    /// Code times block scale, which is exact in bf16 and not yet multiplied by the global scale:
    /// `bf16[outer, blocks * 16]`. A GEMM without FP4 instructions multiplies these; an operand of
    /// one such GEMM need not be packed before. In dense GEMMs only.
    Bf16Unscaled(FloatTensor<B>),
    /// The same in the order in which the W4A16 GEMM of Hopper reads its left operand, which alone
    /// reads it: `bf16[outer, blocks * 16]`, rows of whole 128 columns.
    Bf16Arranged(FloatTensor<B>),
}

/// A quantized matrix on a backend, in any format.
///
/// With groups of rows, `layout` is that of all groups as one matrix, and there is one amax for
/// each group, or one for each stored row, of each group in the columnwise tensor (`groups x
/// cols`):
///
/// - the quantized tensors of a stack of weights are rowwise ones of `[experts * d_in, d_out]` and
///   of the transposed weights, `[experts * d_out, d_in]`;
/// - the rowwise tensor of tokens is that of `[tokens, cols]`; rows of no group are undefined;
/// - the columnwise tensor of tokens concatenates the groups, each padded to whole blocks (or
///   transforms), so that `rows` of its layout is their number at most; the elements behind the
///   last group are undefined.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct QuantizedMatrix<B: Backend> {
    /// The elements in stored orientation.
    #[extension_type]
    pub data: QuantizedData<B>,
    /// The largest magnitudes of the source (after the transform, if there is one), `f32`; absent
    /// in a format without a global scale.
    #[extension_type]
    pub amax: MaybeTensor<B>,
    /// What the buffers mean.
    pub layout: Layout,
}

impl<B: Backend> QuantizedMatrix<B> {
    /// The codes and block scales.
    ///
    /// # Panics
    /// If the storage is not [`Storage::Packed`](nvfp4_kernels::Storage::Packed).
    pub fn into_packed(self) -> (IntTensor<B>, IntTensor<B>) {
        match self.data {
            QuantizedData::Packed { codes, scales } => (codes, scales),
            QuantizedData::Bf16Unscaled(_) | QuantizedData::Bf16Arranged(_) => {
                panic!("the tensor is stored as bf16 values")
            }
        }
    }
}

/// Which quantized tensors of a matrix to make, each with the form that it is stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantUsages {
    /// The rowwise one.
    pub rowwise: Option<(QuantParams, StoredForm)>,
    /// The columnwise one.
    pub columnwise: Option<(QuantParams, StoredForm)>,
}

impl QuantUsages {
    /// One tensor.
    pub const fn one(usage: Usage, params: QuantParams, form: StoredForm) -> Self {
        let one = Some((params, form));
        match usage {
            Usage::Rowwise => Self {
                rowwise: one,
                columnwise: None,
            },
            Usage::Columnwise => Self {
                rowwise: None,
                columnwise: one,
            },
        }
    }

    /// Both tensors, packed, with block scales in rows.
    pub const fn both(rowwise: QuantParams, columnwise: QuantParams) -> Self {
        Self {
            rowwise: Some((rowwise, StoredForm::ROWS)),
            columnwise: Some((columnwise, StoredForm::ROWS)),
        }
    }

    /// Each tensor by `f`.
    pub(super) fn map(
        self,
        f: impl Fn(QuantParams, StoredForm, Usage) -> (QuantParams, StoredForm),
    ) -> Self {
        let one = |made: Option<(QuantParams, StoredForm)>, usage| {
            made.map(|(params, form)| f(params, form, usage))
        };
        Self {
            rowwise: one(self.rowwise, Usage::Rowwise),
            columnwise: one(self.columnwise, Usage::Columnwise),
        }
    }
}

/// The quantized tensors of a matrix that [`QuantUsages`] asks for.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum QuantizedPair<B: Backend> {
    /// The rowwise one.
    Rowwise(#[extension_type] QuantizedMatrix<B>),
    /// The columnwise one.
    Columnwise(#[extension_type] QuantizedMatrix<B>),
    /// Both: rowwise, columnwise.
    Both(
        #[extension_type] QuantizedMatrix<B>,
        #[extension_type] QuantizedMatrix<B>,
    ),
}

impl<B: Backend> QuantizedPair<B> {
    /// The tensors that were made.
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

    /// The rowwise and the columnwise tensor, as far as they were made.
    pub(super) fn into_options(self) -> (Option<QuantizedMatrix<B>>, Option<QuantizedMatrix<B>>) {
        match self {
            Self::Rowwise(one) => (Some(one), None),
            Self::Columnwise(one) => (None, Some(one)),
            Self::Both(rowwise, columnwise) => (Some(rowwise), Some(columnwise)),
        }
    }

    /// Each tensor by `f`.
    pub(super) fn map<C: Backend>(
        self,
        f: impl Fn(QuantizedMatrix<B>) -> QuantizedMatrix<C>,
    ) -> QuantizedPair<C> {
        match self {
            Self::Rowwise(one) => QuantizedPair::Rowwise(f(one)),
            Self::Columnwise(one) => QuantizedPair::Columnwise(f(one)),
            Self::Both(rowwise, columnwise) => QuantizedPair::Both(f(rowwise), f(columnwise)),
        }
    }

    /// The only tensor.
    ///
    /// # Panics
    /// If there are two.
    pub fn into_one(self) -> QuantizedMatrix<B> {
        match self {
            Self::Rowwise(one) | Self::Columnwise(one) => one,
            Self::Both(..) => panic!("both usages were quantized"),
        }
    }

    /// The rowwise and the columnwise tensor.
    ///
    /// # Panics
    /// If there is one.
    pub fn into_both(self) -> (QuantizedMatrix<B>, QuantizedMatrix<B>) {
        match self {
            Self::Both(rowwise, columnwise) => (rowwise, columnwise),
            _ => panic!("one usage was quantized"),
        }
    }
}

/// One rowwise tensor in both [storages](nvfp4_kernels::Storage).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct BothStorages<B: Backend> {
    /// Codes, and block scales in rows.
    #[extension_type]
    pub packed: QuantizedMatrix<B>,
    /// Code times block scale in bf16.
    #[extension_type]
    pub unscaled: QuantizedMatrix<B>,
}

/// One operand of a GEMM, in any format: `outer` stored rows, each as long as the contraction, but
/// where a variant says otherwise.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum Operand<B: Backend> {
    /// A quantized matrix.
    Quantized(#[extension_type] QuantizedMatrix<B>),
    /// A packed NVFP4 matrix, or a stack of them, whose stored rows are the contraction: as `b` of
    /// a GEMM that is not grouped along K, the weight of a layer as its forward reads it, for the
    /// gradient by the input. It is not transformed and has no amax for each stored row.
    QuantizedMnMajor(#[extension_type] QuantizedMatrix<B>),
    /// The matrix itself, contracted along this axis of it; of a stack of weights, the matrices
    /// one below the other, each contracted along this axis of it.
    Float(FloatTensor<B>, Usage),
}

/// The parameters of a linear layer.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct LinearParams<B: Backend> {
    /// `[d_in, d_out]`, or a stack of these, one for each group of rows.
    pub weight: FloatTensor<B>,
    /// `[d_out]`, or one for each group.
    #[extension_type]
    pub bias: MaybeTensor<B>,
}

/// Which rows of a matrix are quantized together.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum RowGroups<B: Backend> {
    /// All rows.
    Whole,
    /// This many matrices of equally many rows, one below the other: a stack of weights.
    Batch(usize),
    /// Groups of any sizes, 0 included: tokens. `u32[groups + 1]`, ascending from 0: where each
    /// group begins, and where the last ends.
    Offsets(IntTensor<B>),
    /// The same, where other devices have further groups: rows behind the last of these groups
    /// belong to them, and what they hold does not matter.
    Window {
        /// Where each of these groups begins, and where the last ends.
        offsets: IntTensor<B>,
        /// What the groups before these take in the tensor of all groups, behind whose blocks those
        /// of these draw random bits: `u32[5]`, their rows in units of each of
        /// [`EARLIER_UNITS`](nvfp4_kernels::reference::EARLIER_UNITS).
        earlier: IntTensor<B>,
    },
}

/// True if every number of a row, or of a place, names one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// Every one does.
    All,
    /// Some are the number of all rows, or places, and name none: that of another device.
    Some,
}

/// What a GEMM leaves in rows of no group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtherRows {
    /// Zeros.
    Zero,
    /// Anything: nobody reads them.
    Undefined,
}

/// Which dimension of a GEMM is grouped.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum GemmGroups<B: Backend> {
    /// None: `out[m, n] = alpha · Σₖ a[m, k] · b[n, k] + bias[n]` over the stored rows of both
    /// operands.
    None,
    /// M: `out[i, n] = alpha · Σₖ a[i, k] · b[g, n, k] + bias[g, n]` for the rows `i` of group `g`,
    /// whose offsets these are. `a` is the rowwise operand of tokens, `b` that of a stack,
    /// `[experts * n, k]` as it is stored, or `[experts * k, n]` of an MN-major one, `bias`
    /// `[experts, n]`.
    M {
        /// Where each group of rows begins.
        offsets: IntTensor<B>,
        /// What rows of no group are.
        others: OtherRows,
    },
    /// K: `out[g, m, n] = alpha · Σₖ a[m, k] · b[n, k]` over the tokens `k` of group `g`, zeros for
    /// an empty group. `a` and `b` are operands of one format, contracted along the tokens.
    K {
        /// Where each group of tokens begins.
        offsets: IntTensor<B>,
        /// Number of tokens.
        tokens: usize,
        /// What tokens of no group are.
        others: OtherRows,
    },
}

/// The gradients of a weighted sum of rows.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct UnpermuteGradients<B: Backend> {
    /// By the rows, of their shape and type.
    pub rows: FloatTensor<B>,
    /// By the weights, `f32[tokens, copies]`.
    pub weights: FloatTensor<B>,
}
