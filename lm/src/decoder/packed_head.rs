//! The head in NVFP4, for inference.

use anyhow::Result;
use burn::module::Param;
use burn::nn::Linear;
use burn_nvfp4::nn::Nvfp4Linear;

use super::Decoder;
use crate::interchange::Scheme;

impl Decoder {
    /// The same model, whose logits are computed with a head in NVFP4 (W4A16, to nearest): a step of
    /// decoding reads a quarter of its bytes. They are rounded to the type of the activations. The
    /// weight in high precision stays, and is the one that is saved; where it is the embedding,
    /// tokens are looked up in it.
    ///
    /// # Errors
    /// When the width of the model is no multiple of 16.
    pub fn with_packed_head(mut self) -> Result<Self> {
        let linear = Linear {
            weight: Param::from_tensor(self.head_weight()),
            bias: None,
        };
        let linear = Nvfp4Linear::from_linear(linear, &Scheme::W4a16.recipe())?;
        self.packed_head = Some(linear.try_to_packed()?);
        Ok(self)
    }
}
