//! What all layers share in one call of a decoder.

use anyhow::Result;
use burn::tensor::Tensor;
use burn_nvfp4::ExpertOffsets;

use super::cache::{Chunk, KvCache};
use super::names::Site;
use super::observe::{LinearInput, Observer};
use super::packed_rows::PackedRows;
use super::positions::Tables;

/// What all layers of a call share.
pub(super) struct Call<'a> {
    pub tables: Tables,
    /// Where documents lie that share rows; without it, a row is one.
    pub rows: Option<&'a PackedRows>,
    /// Where keys and values are kept; without it, sequences start at position 0.
    pub cache: Option<(&'a mut KvCache, Chunk)>,
    /// Sees what linear layers read.
    pub observer: Option<&'a mut dyn Observer>,
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

    /// Shows the keys and values that a cache would hold to the observer, if there is one.
    pub(super) fn show_cache(&mut self, layer: usize, k: &Tensor<4>, v: &Tensor<4>) -> Result<()> {
        match &mut self.observer {
            None => Ok(()),
            Some(observer) => observer.observe_cache(layer, k, v),
        }
    }
}
