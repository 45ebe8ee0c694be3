//! Products in groups: the linear layers of a mixture of experts, all experts in one launch.
//!
//! Tokens are sorted by expert, `[tokens, d_in]`, and `offsets` (`u32[experts + 1]`, ascending from
//! 0, none above `tokens`) says where each expert's begin. It stays on the device: shapes depend on
//! the number of tokens and of experts alone.
//!
//! # Numerics
//!
//! The operands are those of [`LinearSpec`], and what is computed is what the plain layer computes for
//! each expert's tokens and weight:
//!
//! - In NVFP4, by MS-EDEN too, each group is quantized as a matrix of its own: it has its own maximum,
//!   before and after the transform, or one for each of its stored rows (per token), and its blocks
//!   along the tokens begin at its first token, the last one, or the last transform, padded with zeros.
//!   So has each expert's weight (numerics, sections 4 and 9).
//! - MXFP8 has no maxima beyond its blocks of 32, which begin at the first token of each group.
//! - High precision, of the original tensors or of dequantized ones, is multiplied as it is.
//!
//! The experts share the random streams of the layer. Block numbers, and those of MS-EDEN's groups of 128,
//! go on from group to group: from `first_row · blocks` on in a row-wise copy, from `columns · (blocks of
//! the earlier groups along the tokens)` on in a column-wise one, so that no two experts draw the same bits.

#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
mod arrangement;
mod autodiff;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "cubecl-backend")]
mod meta;
mod operands;
mod rows;

use burn_core as burn;

use burn_core::backend::{
    Backend, ExtensionType, TensorMetadata, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{FloatDType, Shape};
use nvfp4_kernels::{BlockScaling, Usage};

use super::{
    Bias, CopySpec, EdenSpec, LinearContext, LinearSpec, MxPacked, Nvfp4Ops, Operand, Packed,
    PackedPair, PairSpec, QuantizeSpec, float_dtype,
};

#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
use super::{AmaxGranularity, PackedLayout};
#[cfg(feature = "cubecl-backend")]
use meta::{
    add_rows_meta, depth_meta, eden_groups_meta, eden_groups_packed_meta, group_meta,
    group_pair_meta, mx_groups_meta, mx_groups_packed_meta, rows_meta, spread_meta, stack_meta,
    stack_pair_meta, stack_tiles_meta, sums_meta, weigh_rows_backward_meta, weigh_rows_meta,
};
pub use rows::RowGradients;
#[cfg(feature = "cubecl-backend")]
pub use rows::RowGradientsMetadata;

/// How to make both copies of the groups of a matrix, in 1x16 blocks, each group with global scales of
/// its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupPairSpec {
    /// The row-wise copy; without a transform.
    pub row: CopySpec,
    /// The column-wise copy.
    pub col: CopySpec,
}

/// Which rows of a matrix belong together.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum RowGroups<B: Backend> {
    /// This many matrices of equally many rows, one below the other: a stack of weights.
    Batch(usize),
    /// Groups of any sizes, 0 included: tokens. `u32[groups + 1]`, ascending from 0: where each group begins, and
    /// where the last ends.
    Offsets(IntTensor<B>),
}

/// Grouped operations on the primitives of a backend.
///
/// Only [`nvfp4_grouped_linear`](Self::nvfp4_grouped_linear),
/// [`nvfp4_moe_permute`](Self::nvfp4_moe_permute) and
/// [`nvfp4_moe_unpermute`](Self::nvfp4_moe_unpermute) are differentiable; under `Autodiff` the results
/// of the others are constants.
///
/// A packed stack or matrix of groups is a [`Packed`] whose `amax` has one value for each group, or, per token,
/// one for each stored row, of each group in the column-wise copy (`groups x cols`); or it is an
/// [`MxPacked`]:
///
/// - the copies of a stack of weights are row-wise ones ([`Usage::Rowwise`]) of
///   `[experts * d_in, d_out]` and of the transposed weights, `[experts * d_out, d_in]`;
/// - the row-wise copy of tokens is that of `[tokens, cols]`; rows of no group are undefined;
/// - in the column-wise copy of tokens the groups lie side by side, each padded to whole blocks (or
///   transforms), so that `rows` of its layout is what they take at most; what lies behind the last of
///   them is undefined.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait Nvfp4GroupedOps: Nvfp4Ops {
    /// One copy of each matrix of the stack `w` (`[experts, d_in, d_out]`), in blocks along
    /// `spec.usage`, without a transform.
    #[fusion(meta = stack_meta)]
    fn nvfp4_quantize_stack(w: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self>;

    /// One of the two copies of each matrix of the stack `w` (`[experts, d_in, d_out]`) in 16x16 tiles.
    #[fusion(meta = stack_tiles_meta)]
    fn nvfp4_quantize_stack_tiles(
        w: FloatTensor<Self>,
        usage: Usage,
        scaling: BlockScaling,
    ) -> Packed<Self>;

    /// Both copies of each matrix of the stack `w` (`[experts, d_in, d_out]`), without a transform.
    #[fusion(meta = stack_pair_meta)]
    fn nvfp4_quantize_stack_pair(w: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self>;

    /// One copy of each group of rows of `x` (`[tokens, cols]`).
    #[fusion(meta = group_meta)]
    fn nvfp4_quantize_groups(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: QuantizeSpec,
    ) -> Packed<Self>;

    /// Both copies of each group of rows of `x` (`[tokens, cols]`) in one pass.
    #[fusion(meta = group_pair_meta)]
    fn nvfp4_quantize_groups_pair(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: GroupPairSpec,
    ) -> PackedPair<Self>;

    /// Each group of rows of `x` (`[rows, cols]`) by MS-EDEN along `spec.usage`, as
    /// [`nvfp4_eden`](Nvfp4Ops::nvfp4_eden) but for the numbers of its groups of 128, which go on.
    #[fusion(meta = eden_groups_meta)]
    fn nvfp4_eden_groups(
        x: FloatTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        spec: EdenSpec,
    ) -> Packed<Self>;

    /// [`nvfp4_eden_groups`](Self::nvfp4_eden_groups) of the values of `packed`, whose groups `groups` are, which
    /// is row-wise and not transformed.
    #[fusion(meta = eden_groups_packed_meta)]
    fn nvfp4_eden_groups_packed(
        #[extension_type] packed: Packed<Self>,
        #[extension_type] groups: RowGroups<Self>,
        spec: EdenSpec,
    ) -> Packed<Self>;

    /// Each group of rows of `x` (`[rows, cols]`) in MXFP8 with blocks along `usage`.
    #[fusion(meta = mx_groups_meta)]
    fn nvfp4_mx_quantize_groups(
        x: FloatTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        usage: Usage,
    ) -> MxPacked<Self>;

    /// [`nvfp4_mx_quantize_groups`](Self::nvfp4_mx_quantize_groups) of the values of `packed`, whose groups
    /// `groups` are, rounded to `via`; `packed` is row-wise.
    #[fusion(meta = mx_groups_packed_meta)]
    fn nvfp4_mx_requantize_groups(
        #[extension_type] packed: Packed<Self>,
        #[extension_type] groups: RowGroups<Self>,
        usage: Usage,
        via: FloatDType,
    ) -> MxPacked<Self>;

    /// The value of its group for each of `rows` rows, from `values`, `f32[groups]`; 0 for rows of no
    /// group.
    #[fusion(meta = spread_meta)]
    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self>;

    /// `out[i, n] = α · Σₖ a[i, k] · b[g, n, k] + bias[g, n]` for the rows `i` of group `g`: `a` the
    /// row-wise operand of tokens, `b` that of a stack, `[experts * n, k]` as it is stored, `bias`
    /// `[experts, n]`. Rows of no group are zero.
    ///
    /// On CubeCL whatever is not quantized takes the grouped kernels in `bf16`; in other types all tokens
    /// are multiplied by every expert and what is each one's own is kept, which costs as many times the
    /// work as there are experts.
    #[fusion(meta = rows_meta)]
    fn nvfp4_group_rows(
        #[extension_type] a: Operand<Self>,
        #[extension_type] b: Operand<Self>,
        #[extension_type] bias: Bias<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// `out[g, m, n] = α · Σₖ a[m, k] · b[n, k]` over the tokens `k` of group `g`, zeros for an empty
    /// group: `a` and `b` operands of one format of `tokens` tokens, contracted along them. As for
    /// [`nvfp4_group_rows`](Self::nvfp4_group_rows), floats other than `bf16` cost more on CubeCL.
    #[fusion(meta = depth_meta)]
    fn nvfp4_group_depth(
        #[extension_type] a: Operand<Self>,
        #[extension_type] b: Operand<Self>,
        offsets: IntTensor<Self>,
        tokens: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// The sum of the rows of each group of `x` (`[tokens, cols]`), `f32[experts, cols]`.
    #[fusion(meta = sums_meta)]
    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self>;

    /// `y[i] = x[i] w[g] + bias[g]` for the rows `i` of group `g`, for `x` (`[tokens, d_in]`), `w`
    /// (`[experts, d_in, d_out]`) and `bias` (`[experts, d_out]`), with the operands that `spec` asks
    /// for, in the type of `x`. Rows of no group are zero. `Autodiff` overrides it with its own
    /// backward.
    #[fusion(default)]
    fn nvfp4_grouped_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        offsets: IntTensor<Self>,
        spec: LinearSpec,
        context: LinearContext,
    ) -> FloatTensor<Self> {
        let _ = context;
        let dtype = float_dtype(x.dtype());
        let x = operands::tokens::<Self>(x, &offsets, &spec.fprop_x, Usage::Rowwise, dtype);
        let w = operands::stack::<Self>(w, &spec.fprop_w, Usage::Columnwise, dtype);
        Self::nvfp4_group_rows(x, w, bias, offsets, dtype)
    }

    /// Rows of `x` (`[tokens, width]`) by number: `out[s] = x[index[s]]` for `index` `[slots]`.
    ///
    /// `inverse` (`[tokens, copies]`) holds, for each row of `x`, the slots that it went to; every
    /// slot stands there once. `Autodiff` overrides it: with the inverse the backward is a gather too,
    /// `dx[t] = Σⱼ dout[inverse[t, j]]`, in a fixed order and in `f32`, where that of a plain
    /// selection scatters.
    #[fusion(default)]
    fn nvfp4_moe_permute(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        _inverse: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let slots = index.shape()[0];
        Self::nvfp4_add_rows(x, Self::int_reshape(index, Shape::new([slots, 1])))
    }

    /// `out[t] = Σⱼ weights[t, j] · y[places[t, j]]`, in `f32`, rounded once to the type of `y`: for
    /// `y` (`[slots, width]`), `weights` (`f32[tokens, copies]`) and `places` (`[tokens, copies]`),
    /// which holds every slot once; `choices` (`[slots]`) is its inverse, `t * copies + j`.
    ///
    /// `Autodiff` overrides it with a backward that gathers too.
    #[fusion(default)]
    fn nvfp4_moe_unpermute(
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        _choices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::nvfp4_weigh_rows(y, weights, places)
    }

    /// `out[i] = Σⱼ x[places[i, j]]` for `x` (`[rows, width]`) and `places` (`[n, copies]`), numbers of rows,
    /// at least one of them: in `f32`, in the order of `j`, rounded once to the type of `x`.
    #[fusion(meta = add_rows_meta)]
    fn nvfp4_add_rows(x: FloatTensor<Self>, places: IntTensor<Self>) -> FloatTensor<Self> {
        rows::add::<Self>(x, places)
    }

    /// The same with factors: `out[i] = Σⱼ weights[i, j] · x[places[i, j]]`, `weights` `f32[n, copies]`.
    #[fusion(meta = weigh_rows_meta)]
    fn nvfp4_weigh_rows(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        rows::weigh::<Self>(x, weights, places)
    }

    /// The gradients of [`nvfp4_moe_unpermute`](Self::nvfp4_moe_unpermute), given that of its output (`[tokens,
    /// width]`), which has the type of `y`.
    #[fusion(meta = weigh_rows_backward_meta)]
    fn nvfp4_weigh_rows_backward(
        dout: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
    ) -> RowGradients<Self> {
        rows::weigh_backward::<Self>(dout, y, weights, places, choices)
    }
}

/// Number of maxima of the copy of `groups` groups that `layout` describes.
#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
fn maxima(layout: &PackedLayout, groups: usize) -> usize {
    match (layout.global, layout.usage) {
        (AmaxGranularity::PerTensor, _) => groups,
        (AmaxGranularity::PerRow, Usage::Rowwise) => layout.rows,
        (AmaxGranularity::PerRow, Usage::Columnwise) => groups * layout.cols,
    }
}
