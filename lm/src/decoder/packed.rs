//! Loads the NVFP4 weights of a quantized folder as layers that keep them packed.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_nvfp4::nn::{Activations, Nvfp4PackedGroupedLinear, Nvfp4PackedLinear, Nvfp4Weight};

use super::projection::{Experts, Projection};
use super::scaled::{ScaledPackedExperts, ScaledPackedLinear};
use crate::interchange::checkpoint::LayerInfo;
use crate::interchange::names::canonical;
use crate::interchange::{Checkpoint, Fp8Layer, GlobalScale, PackedWeight, PreQuantScale, Scheme};

/// A quantized folder, whose modules are looked up by their transformers names.
pub(super) struct PackedFolder<'a> {
    checkpoint: &'a Checkpoint,
    /// Maps transformers names of packed modules to their names in the folder.
    names: BTreeMap<String, &'a str>,
    /// Layers in FP8, by transformers names.
    fp8: BTreeMap<String, &'a Fp8Layer>,
}

impl<'a> PackedFolder<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        let names = checkpoint.layers().keys();
        let names = names.map(|name| (canonical(name), name.as_str())).collect();
        let fp8 = checkpoint.fp8_layers().iter();
        let fp8 = fp8.map(|(name, layer)| (canonical(name), layer)).collect();
        Self {
            checkpoint,
            names,
            fp8,
        }
    }

    /// Returns the packed modules with their shapes.
    pub fn shapes(&self) -> BTreeMap<String, Option<[usize; 2]>> {
        let shape = |module: &String| self.layer(module).map(|layer| [layer.n, layer.k]);
        let modules = self.names.keys();
        modules
            .map(|module| (module.clone(), shape(module)))
            .collect()
    }

    /// Returns the module, if it is packed.
    pub fn layer(&self, module: &str) -> Option<&'a LayerInfo> {
        let name = self.names.get(module)?;
        self.checkpoint.layers().get(*name)
    }

    /// Returns the layer in FP8 `module`, if it is one.
    pub fn fp8_layer(&self, module: &str) -> Option<&'a Fp8Layer> {
        self.fp8.get(module).copied()
    }

    /// Returns the weight of a packed module.
    pub fn weight(&self, module: &str) -> Result<PackedWeight> {
        let name = self.names.get(module);
        let name = name.with_context(|| format!("`{module}` is not quantized"))?;
        self.checkpoint.weight(name)
    }

    /// Returns true if the fused modules `paths` are packed; returns an error if only some of them
    /// are.
    pub fn has_all(&self, paths: &[String]) -> Result<bool> {
        let is_packed = |path: &&String| self.layer(path).is_some();
        let Some(packed) = paths.iter().find(is_packed) else {
            return Ok(false);
        };
        if let Some(plain) = paths.iter().find(|path| !is_packed(path)) {
            anyhow::bail!("`{packed}` is in NVFP4, but `{plain}` is not: they are one weight here");
        }
        Ok(true)
    }

    /// Loads the modules `paths` as one layer, with concatenated outputs and `bias`.
    pub fn linear(
        &self,
        paths: &[String],
        bias: Option<Tensor<1>>,
        scheme: Option<Scheme>,
        device: &Device,
    ) -> Result<Projection> {
        let fused = self.fused(paths, 1, device)?;
        let (activations, input) = activations(fused.input, scheme, device);
        let linear = Nvfp4PackedLinear::try_new(fused.weight, activations, input, bias);
        let linear = linear.with_context(|| format!("`{}`", paths[0]))?;
        Ok(match fused.pre_quant {
            None => Projection::Packed(linear),
            Some(scale) => {
                let scale = scale.flatten(0, 1);
                Projection::Scaled(ScaledPackedLinear::new(scale, linear))
            }
        })
    }

    /// Loads the modules `paths`, the same number for each of the `experts`, as one layer with
    /// `bias`, `[experts, outputs]`.
    pub fn grouped(
        &self,
        paths: &[String],
        experts: usize,
        bias: Option<Tensor<2>>,
        (scheme, device): (Option<Scheme>, &Device),
    ) -> Result<Experts> {
        let fused = self.fused(paths, experts, device)?;
        let (activations, input) = activations(fused.input, scheme, device);
        let linear = Nvfp4PackedGroupedLinear::try_new(fused.weight, activations, input, bias);
        let linear = linear.with_context(|| format!("`{}`", paths[0]))?;
        Ok(match fused.pre_quant {
            None => Experts::Packed(linear),
            Some(scale) => Experts::Scaled(ScaledPackedExperts::new(scale, linear)),
        })
    }

    /// Concatenates the weights of `paths` along their rows. The parts of each matrix of the
    /// `stack` share one global scale.
    fn fused(&self, paths: &[String], stack: usize, device: &Device) -> Result<Fused> {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        let (mut rows, mut width) = (0, None);
        let (mut globals, mut inputs) = (Vec::new(), Vec::new());
        let mut features = Features::default();
        for parts in paths.chunks(paths.len() / stack) {
            let mut shared: Option<(GlobalScale, Option<GlobalScale>)> = None;
            for path in parts {
                let part = self.weight(path)?;
                let found = (part.global(), part.input_global());
                let (global, input) = *shared.get_or_insert(found);
                ensure!(
                    same(Some(found.0), Some(global)) && same(found.1, input),
                    "`{path}` has other global scales than `{}`: they are one weight here, whose \
                     parts share them",
                    parts[0]
                );
                let k = *width.get_or_insert(part.k());
                ensure!(
                    part.k() == k,
                    "`{path}` has {} input features, but `{}` has {k}",
                    part.k(),
                    paths[0]
                );
                let is_first = *path == parts[0];
                features.add(path, part.pre_quant(), (part.k(), is_first))?;
                rows += part.n();
                codes.extend_from_slice(part.codes());
                scales.extend_from_slice(part.scales());
            }
            let (global, input) = shared.context("a weight has parts")?;
            globals.push(global.decode());
            inputs.extend(input.map(GlobalScale::decode));
        }
        ensure!(
            inputs.is_empty() || inputs.len() == stack,
            "`{}`: {} of {stack} experts have a global scale of their input",
            paths[0],
            inputs.len()
        );
        let shape = [rows, width.context("a weight has parts")?];
        let weight = Nvfp4Weight::try_from_bytes(shape, codes, scales, globals, device);
        Ok(Fused {
            weight: weight.with_context(|| format!("`{}`", paths[0]))?,
            input: (!inputs.is_empty()).then_some(inputs),
            pre_quant: features.tensor(stack, device),
        })
    }
}

/// Fused weight of several modules.
struct Fused {
    weight: Nvfp4Weight,
    /// Input dequantization factors, one per matrix.
    input: Option<Vec<f32>>,
    /// Scales by which the input of each matrix is multiplied, `[stack, k]`.
    pre_quant: Option<Tensor<2>>,
}

/// Input feature scales of a stack of matrices, concatenated.
#[derive(Default)]
struct Features {
    values: Vec<f32>,
    /// True if at least one layer has such scales; the others then have ones.
    is_scaled: bool,
    last: Option<PreQuantScale>,
}

impl Features {
    /// Adds the module `path`, a part of a matrix with `k` input features; all parts of a matrix
    /// share these.
    fn add(
        &mut self,
        path: &str,
        scale: Option<&PreQuantScale>,
        (k, is_first): (usize, bool),
    ) -> Result<()> {
        if !is_first {
            ensure!(
                scale == self.last.as_ref(),
                "`{path}` multiplies its input by another scale than the layers with which it is \
                 one weight here"
            );
            return Ok(());
        }
        match scale {
            Some(scale) => self.values.extend_from_slice(scale.values()),
            None => self.values.resize(self.values.len() + k, 1.0),
        }
        self.is_scaled |= scale.is_some();
        self.last = scale.cloned();
        Ok(())
    }

    fn tensor(self, stack: usize, device: &Device) -> Option<Tensor<2>> {
        let k = self.values.len() / stack;
        let data = TensorData::new(self.values, [stack, k]);
        self.is_scaled
            .then(|| Tensor::from_data(data, (device, DType::F32)))
    }
}

/// Returns true if two global scales have the same bits.
fn same(a: Option<GlobalScale>, b: Option<GlobalScale>) -> bool {
    let bits = |scale: GlobalScale| scale.value().to_bits();
    a.map(bits) == b.map(bits)
}

/// Returns the activation quantization in `scheme`, and the scales on `device`. By default, W4A4
/// uses static global scales and W4A16 quantizes nothing.
fn activations(
    input: Option<Vec<f32>>,
    scheme: Option<Scheme>,
    device: &Device,
) -> (Activations, Option<Tensor<1>>) {
    match (scheme, input) {
        (Some(Scheme::W4a16), _) | (None, None) => (Activations::HighPrecision, None),
        (Some(Scheme::W4a4), None) => (Activations::DYNAMIC, None),
        (_, Some(factors)) => {
            let count = factors.len();
            let data = TensorData::new(factors, [count]);
            let factors = Tensor::from_data(data, (device, DType::F32));
            (Activations::Static, Some(factors))
        }
    }
}
