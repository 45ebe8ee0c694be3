//! Shows the inputs of a decoder's linear layers to an observer, for calibration.

use anyhow::Result;
use burn::tensor::Tensor;
use burn_nvfp4::ExpertOffsets;

use super::names::Site;

/// Input of linear layers.
pub struct LinearInput<'a> {
    /// Index of the decoder layer.
    pub layer: usize,
    /// Linear layers that read the input.
    pub site: Site,
    /// Input, `[rows, d_in]`, in the type of the activations.
    pub x: &'a Tensor<2>,
    /// Rows of each expert, if there are several.
    pub experts: Option<&'a ExpertOffsets>,
}

/// Observes the inputs of all linear layers except the head and routers, in model order.
pub trait Observer {
    /// Called with each input.
    ///
    /// # Errors
    /// Returns an error if the observer cannot use the input. It ends the call of the model.
    fn observe(&mut self, input: LinearInput<'_>) -> Result<()>;

    /// Called with the keys (after norm and rotary embedding) and the values that layer `layer`
    /// would cache, `[batch, time, kv_heads, head]` each.
    ///
    /// # Errors
    /// Returns an error if the observer cannot use them. It ends the call of the model.
    fn observe_cache(&mut self, layer: usize, k: &Tensor<4>, v: &Tensor<4>) -> Result<()> {
        let _ = (layer, k, v);
        Ok(())
    }
}
