//! Parameters of attention.

use nvfp4_formats::AttentionParams;

use crate::ops::spec::OutputAmax;

/// Parameters of attention other than its tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Head size.
    pub head: usize,
    /// Parameters of scores and softmax.
    pub params: AttentionParams,
    /// Amax values that the next layer needs to quantize the output; the pass that writes the
    /// output computes them if possible. Does not affect any bit of the results.
    pub amax: Option<OutputAmax>,
}
