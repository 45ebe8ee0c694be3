//! Modules.
//!
//! [`Nvfp4Linear`] is the plain layer; [`Nvfp4GroupedLinear`] is one layer per expert, all in one
//! launch. [`Nvfp4Attention`], [`Nvfp4SwiGlu`], [`Nvfp4FeedForward`], [`Nvfp4Moe`] and
//! [`Nvfp4TransformerBlock`] build on them. GEMMs with a common input are fused (queries, keys and
//! values; gate and up): the input is quantized once, and the parts of the weight share one global
//! scale. [`ExpertParallelMoe`] is the mixture of experts with its experts sharded over ranks.
//!
//! [`Nvfp4PackedLinear`] and [`Nvfp4PackedGroupedLinear`] are for inference: their weights are
//! stored in NVFP4. The weight of [`Fp8Linear`] is stored in FP8.
//!
//! [`tensor_parallel`] has layers whose weights are sharded over ranks.
//!
//! [`Embedding`] and [`LmHead`] are the first and last layers of a language model, in high
//! precision.

mod attention;
mod block;
mod embedding;
mod feed_forward;
mod fp8;
mod grouped;
mod head;
mod linear;
mod moe;
mod norm;
mod operand_weight;
mod packed;
mod parts;
mod routing;
pub mod tensor_parallel;

pub use attention::{Nvfp4Attention, Nvfp4AttentionConfig, RopeCache, RopeCacheConfig};
pub use block::{BlockOutput, Nvfp4TransformerBlock, Nvfp4TransformerBlockConfig};
pub use embedding::{Embedding, EmbeddingConfig};
pub use feed_forward::{
    Nvfp4FeedForward, Nvfp4SwiGlu, Nvfp4SwiGluConfig, SwiGlu, try_swiglu_of, try_swiglu_of_experts,
};
pub use fp8::Fp8Linear;
pub use grouped::{Nvfp4GroupedLinear, Nvfp4GroupedLinearConfig};
pub use head::LmHead;
pub use linear::{Nvfp4Linear, Nvfp4LinearConfig};
pub use moe::{
    ExpertDispatch, ExpertParallelMoe, MoeOutput, Nvfp4Moe, Nvfp4MoeConfig, expert_parameters,
};
pub(crate) use norm::Neighbours;
pub use norm::{LayerNorm, LayerNormConfig, ResidualStream, RmsNorm, RmsNormConfig};
pub use packed::{
    Activations, BlockScales, NormLinear, Nvfp4PackedGroupedLinear, Nvfp4PackedLinear, Nvfp4Weight,
};
pub use routing::Routing;

use burn_core::tensor::{DType, FloatDType, Tensor};

/// Casts `x` to `dtype`; no operation if it has that dtype.
pub(crate) fn cast<const D: usize>(x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    if x.dtype() == DType::from(dtype) {
        x
    } else {
        x.cast(dtype)
    }
}

/// Flattens a tensor of any rank to a matrix of rows; also returns the original shape, to restore
/// it on the result.
fn rows<const D: usize>(x: Tensor<D>) -> (Tensor<2>, [usize; D]) {
    const { assert!(D > 0, "the input needs at least one axis") };
    let dims = x.dims();
    let rows = dims[..D - 1].iter().product();
    (x.reshape([rows, dims[D - 1]]), dims)
}
