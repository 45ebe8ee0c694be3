//! State shared by all layers in one call of a decoder.

use anyhow::Result;
use burn::tensor::Tensor;
use burn_nvfp4::ExpertOffsets;

use super::cache::{Chunk, KvCache};
use super::names::Site;
use super::observe::{LinearInput, Observer};
use super::packed_rows::PackedRows;
use super::positions::Tables;

/// State shared by all layers of a call.
pub(super) struct Call<'a> {
    /// Tables of each rotary embedding of the model.
    pub tables: Vec<Tables>,
    /// Documents packed into rows; if none, each row is one document.
    pub rows: Option<&'a PackedRows>,
    /// Key-value cache; if none, sequences start at position 0.
    pub cache: Option<(&'a mut KvCache, Chunk)>,
    /// Observer of the inputs of linear layers.
    pub observer: Option<&'a mut dyn Observer>,
}

impl Call<'_> {
    /// Passes `x` to the observer, if any.
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

    /// Passes the keys and values that a cache would store to the observer, if any.
    pub(super) fn show_cache(&mut self, layer: usize, k: &Tensor<4>, v: &Tensor<4>) -> Result<()> {
        match &mut self.observer {
            None => Ok(()),
            Some(observer) => observer.observe_cache(layer, k, v),
        }
    }
}
