//! What the linear layers of a decoder read, shown to an observer: calibration looks at it.

use anyhow::Result;
use burn::tensor::{Int, Tensor};
use burn_nvfp4::ExpertOffsets;

use super::Decoder;
use super::attention::Call;
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
}

impl Call<'_> {
    /// Shows `x` to the observer, if there is one.
    pub(super) fn show(
        &mut self,
        layer: usize,
        site: Site,
        x: &Tensor<2>,
        experts: Option<&ExpertOffsets>,
    ) -> Result<()> {
        match &mut self.observer {
            None => Ok(()),
            Some(observer) => observer.observe(LinearInput {
                layer,
                site,
                x,
                experts,
            }),
        }
    }
}

impl Decoder {
    /// [`features`](Self::features) of `tokens`, with every input of a linear layer shown to
    /// `observer`.
    ///
    /// # Errors
    /// As [`features`](Self::features), and those of the observer.
    pub fn observed(
        &self,
        tokens: Tensor<2, Int>,
        observer: &mut dyn Observer,
    ) -> Result<Tensor<3>> {
        self.without_cache(tokens, Some(observer))
    }
}
