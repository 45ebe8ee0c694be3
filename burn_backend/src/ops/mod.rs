//! The extension trait, and the values that cross it.
//!
//! Arguments are trusted here: [`functions`](crate::functions) checks them before anything is
//! queued, because an implementation may run later, on another thread, where it can only panic.

pub(crate) mod autodiff;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod packed;

use burn_core as burn;

use burn_core::backend::{Backend, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn_core::tensor::{DType, FloatDType};
use nvfp4_kernels::{Hadamard, PackedAxis, Rounding};

pub use packed::{Bias, Packed, PackedLayout, PackedPair};
#[cfg(feature = "cubecl-backend")]
pub use packed::{BiasMetadata, PackedMetadata, PackedPairMetadata};
#[cfg(feature = "cubecl-backend")]
use packed::{dequantize_meta, matmul_meta, packed_meta, pair_meta};

/// How to make one packed copy of a matrix, in 1x16 blocks along `axis`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizeSpec {
    /// The axis along which the blocks lie: along rows ([`PackedAxis::Cols`]), or along columns
    /// ([`PackedAxis::Rows`], stored transposed).
    pub axis: PackedAxis,
    /// How elements round.
    pub rounding: Rounding,
    /// The transform applied along the packed axis first; only for [`PackedAxis::Rows`].
    pub hadamard: Option<Hadamard>,
}

/// How to make the row-wise and the column-wise copy of a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PairSpec {
    /// One scale for each 16x16 tile, rounded to nearest: the two copies are exact transposes.
    Tile,
    /// 1x16 blocks in each copy.
    Blocks {
        /// How elements of the row-wise copy round.
        row: Rounding,
        /// How elements of the column-wise copy round.
        col: Rounding,
        /// The transform applied along the columns for the column-wise copy.
        hadamard: Option<Hadamard>,
    },
}

/// What [`Nvfp4Ops::nvfp4_linear`] does beyond its shapes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearSpec {
    /// Scale the weight in 16x16 tiles, so that forward and dgrad see the same quantized weight;
    /// otherwise each copy has its own 1x16 blocks.
    pub weight_2d: bool,
    /// The transform of both operands of wgrad, along the tokens.
    pub hadamard: Option<Hadamard>,
    /// How the output's gradient rounds in its row-wise copy, for dgrad.
    pub dgrad: Rounding,
    /// How the output's gradient rounds in its column-wise copy, for wgrad.
    pub wgrad: Rounding,
}

impl LinearSpec {
    /// How to make both copies of the weight.
    fn weight(&self) -> PairSpec {
        if self.weight_2d {
            PairSpec::Tile
        } else {
            PairSpec::Blocks {
                row: Rounding::Nearest,
                col: Rounding::Nearest,
                hadamard: None,
            }
        }
    }

    /// How to make the row-wise copy of the input, for the forward product.
    fn input_row() -> QuantizeSpec {
        QuantizeSpec {
            axis: PackedAxis::Cols,
            rounding: Rounding::Nearest,
            hadamard: None,
        }
    }
}

/// NVFP4 operations on the primitives of a backend.
///
/// Matrices are 2-D floats of type `f32`, `bf16` or `f16`. Of the operations only
/// [`nvfp4_linear`](Self::nvfp4_linear) is differentiable; under `Autodiff` the results of the
/// others are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait Nvfp4Ops: Backend {
    /// Pack `x` (`[rows, cols]`), with the global scale of its own maximum.
    ///
    /// `cols` must be a multiple of 16 for [`PackedAxis::Cols`]; a column-wise copy pads its last
    /// block with zeros.
    #[fusion(meta = packed_meta)]
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self>;

    /// Both copies of `x` (`[rows, cols]`) in one pass.
    ///
    /// `cols` must be a multiple of 16; for tiles, `rows` as well.
    #[fusion(meta = pair_meta)]
    fn nvfp4_quantize_pair(x: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self>;

    /// The values of `packed` in the orientation of its source, `[rows, cols]`. A copy made with a
    /// transform stays transformed.
    #[fusion(meta = dequantize_meta)]
    fn nvfp4_dequantize(
        #[extension_type] packed: Packed<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// `out[m, n] = alpha · Σₖ a[m, k] · b[n, k] + bias[n]` over the stored rows of both operands,
    /// accumulated in `f32` and rounded once to `dtype`.
    #[fusion(meta = matmul_meta)]
    fn nvfp4_matmul(
        #[extension_type] a: Packed<Self>,
        #[extension_type] b: Packed<Self>,
        #[extension_type] bias: Bias<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// `y = Q(x) Q(w) + bias` for `x` (`[m, d_in]`), `w` (`[d_in, d_out]`) and `bias` (`[d_out]`),
    /// in the type of `x`. `Autodiff` overrides it with its own backward.
    #[fusion(default)]
    fn nvfp4_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        spec: LinearSpec,
    ) -> FloatTensor<Self> {
        let dtype = float_dtype(x.dtype());
        let x = Self::nvfp4_quantize(x, LinearSpec::input_row());
        let w = weight_for_forward::<Self>(w, &spec);
        Self::nvfp4_matmul(x, w, bias, dtype)
    }
}

/// The column-wise copy of the weight alone, where no backward will ask for the other.
fn weight_for_forward<B: Nvfp4Ops>(w: FloatTensor<B>, spec: &LinearSpec) -> Packed<B> {
    match spec.weight() {
        pair @ PairSpec::Tile => B::nvfp4_quantize_pair(w, pair).col,
        PairSpec::Blocks { col, hadamard, .. } => B::nvfp4_quantize(
            w,
            QuantizeSpec {
                axis: PackedAxis::Rows,
                rounding: col,
                hadamard,
            },
        ),
    }
}

/// The float type of a tensor that is known to hold one of the three supported types.
pub(crate) fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F32 => FloatDType::F32,
        DType::BF16 => FloatDType::BF16,
        DType::F16 => FloatDType::F16,
        other => panic!("element type {other:?}: expected F32, BF16 or F16"),
    }
}

/// Report work to `tracing`: one event for each copy or product that a backend computes.
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
fn trace_op(op: &'static str, copy: &'static str, rows: usize, cols: usize) {
    tracing::trace!(target: "burn_nvfp4::ops", op, copy, rows, cols);
}

/// The name of a copy in traces.
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
fn copy_name(axis: PackedAxis) -> &'static str {
    match axis {
        PackedAxis::Cols => "row",
        PackedAxis::Rows => "col",
    }
}
