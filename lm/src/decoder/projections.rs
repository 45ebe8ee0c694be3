//! Projections of a layer, by the input that they read.

use super::DecoderLayer;
use super::feed_forward::FeedForward;
use super::names::Site;
use super::projection::Projection;

impl DecoderLayer {
    /// Returns the projections of the layer, without those of experts.
    pub(crate) fn projections(&self) -> Vec<(Site, &Projection)> {
        let attention = &self.attention;
        let mut all = vec![(Site::Qkv, &attention.qkv)];
        if let Some(latent) = &attention.latent {
            all.extend(latent.query.iter().map(|it| (Site::LatentQuery, &it.up)));
            all.push((Site::LatentKv, &latent.kv.up));
        }
        all.push((Site::Out, &attention.out));
        match &self.feed_forward {
            FeedForward::Dense(dense) => {
                all.extend([(Site::GateUp, &dense.gate_up), (Site::Down, &dense.down)]);
            }
            FeedForward::Moe(moe) => all.extend(moe.shared.iter().flat_map(|shared| {
                let gate_up = (Site::SharedGateUp, &shared.gate_up);
                [gate_up, (Site::SharedDown, &shared.down)]
            })),
        }
        all
    }

    /// Returns the projections of the layer to be replaced, in the order of
    /// [`projections`](Self::projections).
    pub(crate) fn projections_mut(&mut self) -> Vec<(Site, &mut Projection)> {
        let attention = &mut self.attention;
        let mut all = vec![(Site::Qkv, &mut attention.qkv)];
        if let Some(latent) = &mut attention.latent {
            all.extend(
                latent
                    .query
                    .iter_mut()
                    .map(|it| (Site::LatentQuery, &mut it.up)),
            );
            all.push((Site::LatentKv, &mut latent.kv.up));
        }
        all.push((Site::Out, &mut attention.out));
        match &mut self.feed_forward {
            FeedForward::Dense(dense) => {
                all.push((Site::GateUp, &mut dense.gate_up));
                all.push((Site::Down, &mut dense.down));
            }
            FeedForward::Moe(moe) => all.extend(moe.shared.iter_mut().flat_map(|shared| {
                let gate_up = (Site::SharedGateUp, &mut shared.gate_up);
                [gate_up, (Site::SharedDown, &mut shared.down)]
            })),
        }
        all
    }
}
