//! Replaces weights of a model in high precision, to measure what a change of them costs.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use burn::module::Param;
use burn::tensor::{DType, Tensor, TensorData};

use super::Decoder;
use super::feed_forward::FeedForward;
use super::names::{self, Part};
use super::projection::{Experts, Projection};

/// Weights `[d_out, d_in]`, row-major, by module.
pub(crate) type Weights = BTreeMap<String, Vec<f32>>;

impl Decoder {
    /// Replaces the weights of the modules in `weights`: whole projections, or projections of all
    /// experts of a layer.
    ///
    /// # Errors
    /// Returns an error if a module is not in the model, is fused with one that is not in
    /// `weights`, is not in high precision, or has another size.
    pub(crate) fn with_weights(mut self, weights: &Weights) -> Result<Self> {
        let config = self.config.clone();
        let (device, dtype) = (self.device(), self.dtype);
        let tensor = |values: Vec<f32>, shape: [usize; 2]| -> Result<Tensor<2>> {
            ensure!(
                values.len() == shape[0] * shape[1],
                "{} values for weights of {shape:?}",
                values.len()
            );
            let data = TensorData::new(values, shape);
            let tensor = Tensor::from_data(data, (&device, DType::F32));
            Ok(crate::model::cast(tensor, dtype))
        };
        let mut replaced = 0;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            for (site, projection) in layer.projections_mut() {
                let [d_in, d_out] = projection.shape();
                let parts = site.parts(&config, index, d_out);
                let names = parts.into_iter().map(|Part { name, .. }| name);
                let Some((values, count)) = gathered(weights, names)? else {
                    continue;
                };
                let Projection::Dense(linear) = projection else {
                    bail!("layer {index}: a weight to be replaced is not in high precision");
                };
                let weight = tensor(values, [d_out, d_in])?.transpose();
                linear.weight = Param::from_tensor(weight);
                replaced += count;
            }
            let FeedForward::Moe(moe) = &mut layer.feed_forward else {
                continue;
            };
            let path = format!("{}{}", names::layer(index), names::moe(config.family));
            let [gate, up, down] = names::gate_up_down(config.family);
            for (experts, parts) in [
                (&mut moe.gate_up, &[gate, up][..]),
                (&mut moe.down, &[down][..]),
            ] {
                let [count, d_in, d_out] = experts.dense().dims();
                let names = (0..count).flat_map(|expert| {
                    let name = |part| format!("{path}.experts.{expert}.{part}");
                    parts.iter().map(name).collect::<Vec<_>>()
                });
                let Some((values, modules)) = gathered(weights, names)? else {
                    continue;
                };
                let Experts::Grouped(grouped) = experts else {
                    bail!("layer {index}: experts to be replaced are not in high precision");
                };
                let weight = tensor(values, [count * d_out, d_in])?;
                let weight: Tensor<3> = weight.reshape([count, d_out, d_in]).swap_dims(1, 2);
                grouped.weight = Param::from_tensor(weight);
                replaced += modules;
            }
        }
        ensure!(
            replaced == weights.len(),
            "{replaced} of {} weights are those of the model",
            weights.len()
        );
        Ok(self)
    }
}

/// Returns the concatenated values of the modules `names`, and their number; `None` if `weights`
/// has none of them.
fn gathered(
    weights: &Weights,
    names: impl Iterator<Item = String>,
) -> Result<Option<(Vec<f32>, usize)>> {
    let names: Vec<String> = names.collect();
    if !names.iter().any(|name| weights.contains_key(name)) {
        return Ok(None);
    }
    let mut values = Vec::new();
    for name in &names {
        let own = weights.get(name);
        values.extend_from_slice(own.with_context(|| format!("there is no weight of {name}"))?);
    }
    Ok(Some((values, names.len())))
}
