//! Collects statistics of the inputs of a model's linear layers during a forward pass.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use burn::tensor::{DType, Tensor};
#[cfg(any(feature = "cpu", feature = "cuda"))]
use nvfp4_kernels::{cubecl::prelude::Client, ptq::InputMoments, tensor::Matrix};

use super::engine::Engine;
use super::stats::{Calibration, InputStats};
use crate::interchange::names::fused_group;

/// Collects the statistics of every linear layer's input.
///
/// Layers that read the same input (q/k/v, gate/up) are counted once: a model reports the input
/// under the name of any of them.
pub struct Collector {
    products: bool,
    engine: Engine,
    inputs: BTreeMap<String, Sums>,
    caches: BTreeMap<String, [f32; 2]>,
}

/// Statistics of an input that are not complete.
enum Sums {
    Host(InputStats),
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    Device(Client, Box<InputMoments>),
}

impl Sums {
    fn k(&self) -> usize {
        match self {
            Self::Host(stats) => stats.k(),
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Device(_, moments) => moments.k(),
        }
    }

    fn finish(self) -> Result<InputStats> {
        match self {
            Self::Host(stats) => Ok(stats),
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Device(client, moments) => InputStats::of_device(&client, moments),
        }
    }
}

/// Inputs of linear layers, `[tokens, k]`, where they are summed.
pub enum LayerInputs {
    /// Values on the host, and k.
    Host(Vec<f32>, usize),
    /// A matrix in device memory.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    Device(Client, Matrix),
}

impl LayerInputs {
    /// Returns the number of features.
    fn features(&self) -> usize {
        match self {
            Self::Host(_, k) => *k,
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Device(_, matrix) => matrix.cols,
        }
    }

    /// Returns empty sums of such inputs.
    fn no_sums(&self, products: bool) -> Sums {
        match self {
            Self::Host(_, k) => Sums::Host(InputStats::new(*k, products)),
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Device(client, matrix) => {
                let moments = InputMoments::new(client, matrix.cols, products);
                Sums::Device(client.clone(), Box::new(moments))
            }
        }
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        match self {
            Self::Host(values, k) => values.len() / k,
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Device(_, matrix) => matrix.rows,
        }
    }
}

impl Collector {
    /// Creates an empty collector, which sums on `engine`. With `products` it collects the second
    /// moments `E[x xᵀ]` that GPTQ needs: 8 k² bytes for each input of k features.
    pub fn new(products: bool, engine: Engine) -> Self {
        Self {
            products,
            engine,
            inputs: BTreeMap::new(),
            caches: BTreeMap::new(),
        }
    }

    /// Returns the inputs `x` where this collector sums.
    ///
    /// # Errors
    /// Returns an error if `x` has no features, or cannot be read.
    pub fn read(&self, x: &Tensor<2>) -> Result<LayerInputs> {
        let [_, k] = x.dims();
        ensure!(k > 0, "an input of no features");
        match self.engine {
            Engine::Host => {
                let values = x.clone().into_data().convert_dtype(DType::F32);
                let values = values.try_into_vec::<f32>();
                let values = values.map_err(|error| anyhow::anyhow!("an input: {error:?}"))?;
                Ok(LayerInputs::Host(values, k))
            }
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Engine::Device(_) => {
                let x = crate::model::cast(x.clone(), burn::tensor::FloatDType::F32);
                let found = burn_nvfp4::device_matrix(x);
                let (client, matrix) = found.context("an input is on another device")?;
                Ok(LayerInputs::Device(client, matrix))
            }
        }
    }

    /// Adds the `rows` of `x` to the inputs of the layer `module`.
    ///
    /// # Errors
    /// Returns an error that names the layer if the number of features has changed, or a value on
    /// the host is not finite; values on a device are checked by [`finish`](Self::finish).
    pub fn observe(&mut self, module: &str, x: &LayerInputs, rows: Range<usize>) -> Result<()> {
        let k = x.features();
        let sums = self.inputs.entry(input_of(module));
        let sums = sums.or_insert_with(|| x.no_sums(self.products));
        ensure!(
            sums.k() == k,
            "{module}: an input of {k} features, but there were {}",
            sums.k()
        );
        let added = match (sums, x) {
            (Sums::Host(stats), LayerInputs::Host(values, k)) => {
                stats.add(&values[rows.start * k..rows.end * k])
            }
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            (Sums::Device(client, moments), LayerInputs::Device(_, matrix)) => {
                moments.add(client, matrix, rows).map_err(Into::into)
            }
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            _ => unreachable!("one collector reads all inputs in one place"),
        };
        added.with_context(|| module.to_owned())
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
    ///
    /// # Errors
    /// Returns an error that names the layer if an input was not finite, or if the device fails.
    pub fn finish<'a>(self, modules: impl IntoIterator<Item = &'a str>) -> Result<Calibration> {
        let inputs = self.inputs.into_iter().map(|(name, sums)| {
            let stats = sums.finish().with_context(|| name.clone())?;
            Ok((name, Arc::new(stats)))
        });
        let inputs: BTreeMap<String, Arc<InputStats>> = inputs.collect::<Result<_>>()?;
        let of = |module: &'a str| {
            let stats = inputs.get(&input_of(module))?;
            Some((module.to_owned(), stats.clone()))
        };
        Ok(Calibration {
            inputs: modules.into_iter().filter_map(of).collect(),
            caches: self.caches,
        })
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
        let mut collector = Collector::new(false, Engine::Host);
        let mut observe = |module: &str, k: usize, values: &[f32]| {
            let inputs = LayerInputs::Host(values.to_vec(), k);
            let rows = 0..inputs.tokens();
            collector.observe(module, &inputs, rows)
        };
        let (q, k) = ("m.layers.0.self_attn.q_proj", "m.layers.0.self_attn.k_proj");
        observe(q, 2, &[1.0, 2.0, 3.0, -4.0]).unwrap();
        observe(q, 2, &[2.0, 0.0]).unwrap();
        observe("m.layers.0.mlp.down_proj", 1, &[0.5]).unwrap();
        let error = observe(k, 3, &[0.0; 3]).unwrap_err().to_string();
        assert!(
            error.contains("k_proj") && error.contains("3 features"),
            "{error}"
        );
        let error = observe(q, 2, &[f32::NAN, 0.0]).unwrap_err();
        assert!(format!("{error:#}").contains("q_proj: an input is not finite"));
        let attention = "m.layers.0.self_attn";
        for largest in [[1.0, 5.0], [2.0, 3.0]] {
            collector.observe_cache(attention, largest).unwrap();
        }
        let error = collector.observe_cache(attention, [1.0, f32::INFINITY]);
        assert!(error.unwrap_err().to_string().contains("value inf"));
        let other = "m.layers.0.self_attn.o_proj";
        let calibration = collector.finish([q, k, other]).unwrap();
        assert_eq!(calibration.caches[attention], [2.0, 5.0]);
        let inputs = calibration.inputs;
        assert_eq!(inputs.len(), 2);
        assert_eq!(inputs[k].tokens(), 3);
        assert_eq!(inputs[k].amax(), 4.0);
        assert_eq!(inputs[q].mean_squares(), [14.0 / 3.0, 20.0 / 3.0]);
    }
}
