//! Collects statistics of the inputs of a model's linear layers during a forward pass.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use super::stats::{Calibration, InputStats};
use crate::interchange::names::fused_group;

/// Collects the statistics of every linear layer's input.
///
/// Layers that read the same input (q/k/v, gate/up) are counted once: a model reports the input
/// under the name of any of them.
#[derive(Debug, Clone)]
pub struct Collector {
    products: bool,
    inputs: BTreeMap<String, InputStats>,
    caches: BTreeMap<String, [f32; 2]>,
}

impl Collector {
    /// Creates an empty collector. With `products` it collects the second moments `E[x xᵀ]` that
    /// GPTQ needs: 8 k² bytes for each input of k features.
    pub fn new(products: bool) -> Self {
        Self {
            products,
            inputs: BTreeMap::new(),
            caches: BTreeMap::new(),
        }
    }

    /// Adds the inputs `x` `[tokens, k]` of the layer `module`.
    ///
    /// # Errors
    /// Returns an error that names the layer if `k` is 0 or has changed, the length is not a
    /// multiple of it, or a value is not finite.
    pub fn observe(&mut self, module: &str, k: usize, x: &[f32]) -> Result<()> {
        ensure!(k > 0, "{module}: an input of no features");
        let products = self.products;
        let stats = self.inputs.entry(input_of(module));
        let stats = stats.or_insert_with(|| InputStats::new(k, products));
        ensure!(
            stats.k() == k,
            "{module}: an input of {k} features, but there were {}",
            stats.k()
        );
        stats.add(x).with_context(|| module.to_owned())
    }

    /// Adds the largest magnitudes `keys` and `values` of the keys and values of the attention
    /// `module`.
    ///
    /// # Errors
    /// Returns an error that names the attention if one is not finite.
    pub fn observe_cache(&mut self, module: &str, [keys, values]: [f32; 2]) -> Result<()> {
        ensure!(
            keys.is_finite() && values.is_finite(),
            "{module}: the largest key is {keys} and the largest value {values}, but both must be \
             finite"
        );
        let largest = self.caches.entry(module.to_owned()).or_default();
        *largest = [largest[0].max(keys), largest[1].max(values)];
        Ok(())
    }

    /// Returns the statistics of all observed inputs of `modules`, and of all caches.
    pub fn finish<'a>(self, modules: impl IntoIterator<Item = &'a str>) -> Calibration {
        let inputs: BTreeMap<String, Arc<InputStats>> = (self.inputs.into_iter())
            .map(|(name, stats)| (name, Arc::new(stats)))
            .collect();
        let of = |module: &'a str| {
            let stats = inputs.get(&input_of(module))?;
            Some((module.to_owned(), stats.clone()))
        };
        Calibration {
            inputs: modules.into_iter().filter_map(of).collect(),
            caches: self.caches,
        }
    }
}

/// Returns the name of the input that `module` reads.
fn input_of(module: &str) -> String {
    match fused_group(module) {
        Some(group) => format!("{}.{}", group.parent, group.kind),
        None => module.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_read_the_same_input_share_its_statistics() {
        let mut collector = Collector::new(false);
        let (q, k) = ("m.layers.0.self_attn.q_proj", "m.layers.0.self_attn.k_proj");
        collector.observe(q, 2, &[1.0, 2.0, 3.0, -4.0]).unwrap();
        collector.observe(q, 2, &[2.0, 0.0]).unwrap();
        collector
            .observe("m.layers.0.mlp.down_proj", 1, &[0.5])
            .unwrap();
        let error = collector.observe(k, 3, &[0.0; 3]).unwrap_err().to_string();
        assert!(
            error.contains("k_proj") && error.contains("3 features"),
            "{error}"
        );
        let error = collector.observe(q, 2, &[f32::NAN, 0.0]).unwrap_err();
        assert!(format!("{error:#}").contains("q_proj: an input is not finite"));
        let attention = "m.layers.0.self_attn";
        for largest in [[1.0, 5.0], [2.0, 3.0]] {
            collector.observe_cache(attention, largest).unwrap();
        }
        let error = collector.observe_cache(attention, [1.0, f32::INFINITY]);
        assert!(error.unwrap_err().to_string().contains("value inf"));
        let other = "m.layers.0.self_attn.o_proj";
        let calibration = collector.finish([q, k, other]);
        assert_eq!(calibration.caches[attention], [2.0, 5.0]);
        let inputs = calibration.inputs;
        assert_eq!(inputs.len(), 2);
        assert_eq!(inputs[k].tokens(), 3);
        assert_eq!(inputs[k].amax(), 4.0);
        assert_eq!(inputs[q].mean_squares(), [14.0 / 3.0, 20.0 / 3.0]);
    }
}
