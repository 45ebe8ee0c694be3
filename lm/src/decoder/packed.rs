//! The NVFP4 weights of a quantized folder, as layers that keep them packed.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_nvfp4::nn::{Activations, Nvfp4PackedGroupedLinear, Nvfp4PackedLinear, Nvfp4Weight};

use crate::hf::TensorFolder;
use crate::interchange::checkpoint::LayerInfo;
use crate::interchange::names::canonical;
use crate::interchange::{Checkpoint, GlobalScale, PackedWeight, Scheme};

/// A quantized folder, whose modules have the names of transformers here.
pub(super) struct PackedFolder<'a> {
    checkpoint: &'a Checkpoint,
    /// The names of packed modules in the folder.
    names: BTreeMap<String, &'a str>,
}

impl<'a> PackedFolder<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        let names = checkpoint.layers().keys();
        let names = names.map(|name| (canonical(name), name.as_str())).collect();
        Self { checkpoint, names }
    }

    /// All tensors.
    pub fn tensors(&self) -> &'a TensorFolder {
        self.checkpoint.tensors()
    }

    /// The packed modules.
    pub fn modules(&self) -> BTreeSet<&str> {
        self.names.keys().map(String::as_str).collect()
    }

    /// The module, if it is packed.
    pub fn layer(&self, module: &str) -> Option<&'a LayerInfo> {
        let name = self.names.get(module)?;
        self.checkpoint.layers().get(*name)
    }

    /// The weight of a packed module.
    pub fn weight(&self, module: &str) -> Result<PackedWeight> {
        let name = self.names.get(module);
        let name = name.with_context(|| format!("`{module}` is not quantized"))?;
        self.checkpoint.weight(name)
    }

    /// Whether the modules `paths`, which are one weight, are packed: all of them, or none.
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

    /// The modules `paths` as one layer, with concatenated outputs, and `bias`.
    pub fn linear(
        &self,
        paths: &[String],
        bias: Option<Tensor<1>>,
        scheme: Option<Scheme>,
        device: &Device,
    ) -> Result<Nvfp4PackedLinear> {
        let Fused { weight, input } = self.fused(paths, 1, device)?;
        let (activations, input) = activations(input, scheme, device);
        let layer = Nvfp4PackedLinear::try_new(weight, activations, input, bias);
        layer.with_context(|| format!("`{}`", paths[0]))
    }

    /// The modules `paths`, equally many for each of the `experts`, as one layer.
    pub fn grouped(
        &self,
        paths: &[String],
        experts: usize,
        scheme: Option<Scheme>,
        device: &Device,
    ) -> Result<Nvfp4PackedGroupedLinear> {
        let Fused { weight, input } = self.fused(paths, experts, device)?;
        let (activations, input) = activations(input, scheme, device);
        let layer = Nvfp4PackedGroupedLinear::try_new(weight, activations, input, None);
        layer.with_context(|| format!("`{}`", paths[0]))
    }

    /// The weights of `paths`, one below another, with one global scale for the parts of each
    /// matrix of the `stack`.
    fn fused(&self, paths: &[String], stack: usize, device: &Device) -> Result<Fused> {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        let (mut rows, mut width) = (0, None);
        let (mut globals, mut inputs) = (Vec::new(), Vec::new());
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
        })
    }
}

/// A weight of several modules.
struct Fused {
    weight: Nvfp4Weight,
    /// The factors that dequantize the input, one for each matrix.
    input: Option<Vec<f32>>,
}

/// Whether two global scales are the same bits.
fn same(a: Option<GlobalScale>, b: Option<GlobalScale>) -> bool {
    let bits = |scale: GlobalScale| scale.value().to_bits();
    a.map(bits) == b.map(bits)
}

/// What layers do with their inputs in `scheme`, or by default with static global scales in W4A4
/// and with none in W4A16; and the scales on `device`.
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
