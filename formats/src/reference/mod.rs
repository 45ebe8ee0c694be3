//! The oracle: reference implementations of all operations in plain Rust.
//!
//! The numerics of the host are written only here. Kernels are compared with the oracle byte for
//! byte. CPU training runs on it, so it is also fast: blocks are arrays that the compiler
//! vectorizes, and rows are distributed over all cores.
//!
//! Arithmetic is IEEE binary32, round to nearest even, one operation at a time: no contraction, no
//! approximate reciprocal, no fast-math. Matrices are contiguous, row-major slices of [`Element`]
//! (`f32`, `bf16`, `f16`). Constants that kernels share with the oracle are public.
//!
//! "Numerics, section N" is a section of the book's chapter, `docs/src/numerics.md`.

mod activation;
mod amax;
pub mod attention;
mod block;
mod choice_window;
mod dequantize;
mod element;
mod embedding;
mod exponential;
mod fp8;
mod gelu;
mod gemm;
mod hadamard;
mod kl_divergence;
mod load;
mod loss;
mod ms_eden;
mod mx;
mod norm;
mod optimizer;
mod panels;
mod quantize;
mod random_bits;
mod rounding;
mod router;
mod scaling;
mod simd;

pub mod philox;
pub use crate::format::{padding, swizzle};

pub use crate::policy::EDEN_GROUP;
pub use activation::{Activation, activation, activation_backward, swiglu, swiglu_backward};
pub use amax::{amax, amax_cols, amax_rht, amax_rht_cols, amax_rows};
pub use choice_window::{ChoiceWindow, EARLIER_UNITS, sort_window};
pub use dequantize::{decode_blocks, decode_blocks_into, dequantize};
pub use element::{Element, Elements};
pub use embedding::{EMBEDDING_RUN, TablePart, embedding, embedding_gradient};
pub use exponential::{
    EXP_CUTOFF, EXP_POLYNOMIAL, LN2_HIGH, LN2_LOW, LOG2_E, TO_INTEGER, exp_of_negative, sigmoid,
};
pub use fp8::{FP8_CHUNK, Fp8Rows, fp8_linear, fp8_quantize_rows};
pub use gelu::{
    ERF_POLYNOMIAL, ERF_SPLIT, ERFC_POLYNOMIAL, Gelu, INV_SQRT_2, INV_SQRT_2PI, TANH_CUBE,
    TANH_SCALE, TANH_SLOPE, gelu, gelu_backward,
};
pub use gemm::{alpha, gemm_f32, gemm_f64};
pub use hadamard::transform;
pub use kl_divergence::{KlDivergence, kl_divergence_rows};
pub use loss::{
    CrossEntropy, CrossEntropyResult, LN_2_HIGH, LN_2_LOW, LN_POLYNOMIAL, LOSS_LANES, Reduction,
    SQRT_HALF, cross_entropy, cross_entropy_lanes, cross_entropy_rows, ln, sum_losses,
    target_scale,
};
pub use ms_eden::{
    EDEN_AMAX_FACTOR, EDEN_BLOCK_FACTOR, EdenParams, check_eden_hadamard, eden_amax, eden_position,
    ms_eden, ms_eden_amax, ms_eden_at, round_scale_stochastic,
};
pub use mx::{mx_dequantize, mx_quantize};
pub use norm::{
    GRAD_SUM_LANES, Norm, NormBackward, NormForward, PART_LANES, SUM_LANES, norm_backward,
    norm_forward, norm_part_lanes, norm_parts, norm_parts_are_strips, norm_planes,
};
pub use optimizer::{
    AdamWConstants, AdamWParams, AdamWSchedule, AdamWUpdate, Moment, NORM_EPSILON, SQUARE_CHUNK,
    SQUARE_LANES, adamw, clip_factor, round_bf16_stochastic, square_sums,
};
pub use panels::panels;
pub use quantize::{quantize, quantize_col, quantize_row, quantize_tile, quantize_tile_copy};
pub use random_bits::{
    BitComparison, Question, RandomBits, compare_random_bits, read_random_bits, round_in_order,
};
pub use rounding::{round_nearest, round_stochastic};
pub use router::{
    BatchPart, ROUTER_CHUNK, ROUTER_PLANES, ROUTER_SEGMENTS, Routed, Router, RouterFactors,
    RouterGradients, SortedChoices, route, route_backward, router_losses, router_losses_backward,
    sort_choices,
};
pub use scaling::{GlobalScale, block_scale, encode_multiplier};
