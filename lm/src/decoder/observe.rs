//! What the linear layers of a decoder read, shown to an observer: calibration looks at it.

use anyhow::Result;
use burn::tensor::Tensor;
use burn_nvfp4::ExpertOffsets;

use super::names::Site;

/// An input of linear layers.
pub struct LinearInput<'a> {
    /// The number of the decoder layer.
    pub layer: usize,
    /// Which linear layers read it.
    pub site: Site,
    /// `[rows, d_in]`, in the type of the activations.
    pub x: &'a Tensor<2>,
    /// Which expert reads which rows, where several do.
    pub experts: Option<&'a ExpertOffsets>,
}

/// Looks at the inputs of all linear layers but the head and routers, in the order of the model.
pub trait Observer {
    /// Takes one of them.
    ///
    /// # Errors
    /// What the observer cannot take ends the call.
    fn observe(&mut self, input: LinearInput<'_>) -> Result<()>;

    /// Takes the keys, normalised and rotated, and the values that layer `layer` would cache,
    /// `[batch, time, kv_heads, head]` each.
    ///
    /// # Errors
    /// As [`observe`](Self::observe).
    fn observe_cache(&mut self, layer: usize, k: &Tensor<4>, v: &Tensor<4>) -> Result<()> {
        let _ = (layer, k, v);
        Ok(())
    }
}
