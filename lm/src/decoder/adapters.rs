//! LoRA adapters of a decoder: insertion, initialization, application of a folder in PEFT's format,
//! and export as such a folder.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData};
use regex::Regex;
use serde_json::json;

use super::Decoder;
use super::adapter_folder::{AdapterFolder, PARTS, TENSORS, tensor_name};
use super::lora::{AdaptedModule, Adapter, FrozenBase, LoraConfig, LoraProjection};
use super::names::{self, Part, Site};
use super::projection::Projection;
use crate::checkpoint::write_json;
use crate::hf::folder::ADAPTER_FILE;
use crate::hf::tensors::list;
use crate::hf::{Dtype, FeedForwardConfig, NewFolder, TensorWriter, WHOLE_FILE};
use crate::random::normal;

impl Decoder {
    /// Freezes the parameters and adds adapters, whose initial values depend only on `seed` and
    /// their names. The model must have been prepared by [`into_training`](Self::into_training), or
    /// by [`into_frozen`](Self::into_frozen) for packed weights.
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid, if its targets match no module or one that
    /// cannot have an adapter, or if the model was not prepared for training.
    pub fn into_lora(self, config: &LoraConfig, seed: u64) -> Result<Self> {
        let targets = config.check()?;
        self.refuse_experts(&targets)?;
        let (own, device) = (self.config.clone(), self.device());
        let mut model = self.no_grad();
        let mut count = 0;
        for (index, layer) in model.layers.iter_mut().enumerate() {
            for (site, projection) in layer.projections_mut() {
                let parts = site.parts(&own, index, projection.shape()[1]);
                let adapters =
                    adapters(projection, &parts, &targets, (config.rank, seed), &device)?;
                count += adapters.len();
                if adapters.is_empty() {
                    continue;
                }
                ensure!(
                    !matches!(projection, Projection::Dense(_)),
                    "adapters are beside projections that were made for training"
                );
                *projection = beside(projection.clone(), adapters, config.scale())?;
            }
        }
        ensure!(
            count > 0,
            "lora-targets is {:?}, which matches no projection such as {}",
            config.targets,
            Site::Qkv.module(&own, 0, None)
        );
        Ok(model.with_ids_of_paths())
    }

    /// Applies the adapters of `folder`, in the type of the activations, beside the weights of the
    /// model, which may be packed. The model is for inference, or for merging by
    /// [`save`](Self::save).
    ///
    /// # Errors
    /// Returns an error that names the module or the tensor if an adapter is for a module that is
    /// no projection of attention or of a dense feed-forward, if it has another shape than the
    /// module or another rank than the configuration of the folder, or if it is incomplete.
    pub fn with_adapter(self, folder: &AdapterFolder) -> Result<Self> {
        let (own, device, dtype) = (self.config.clone(), self.device(), self.dtype);
        let context = || format!("adapter {}", folder.path().display());
        let mut left = folder.modules().with_context(context)?;
        let mut model = self;
        for (index, layer) in model.layers.iter_mut().enumerate() {
            for (site, projection) in layer.projections_mut() {
                let [d_in, d_out] = projection.shape();
                let parts = site.parts(&own, index, d_out);
                let (mut adapters, mut first) = (Vec::new(), 0);
                for Part { name, outputs } in parts {
                    if let Some(found) = left.remove(&*name) {
                        let [a, b] = found.values([d_in, outputs]).with_context(context)?;
                        let tensor = |values: Vec<f32>, shape: [usize; 2]| {
                            let data = TensorData::new(values, shape).convert_dtype(dtype.into());
                            Tensor::from_data(data, (&device, DType::from(dtype)))
                        };
                        let columns = first..first + outputs;
                        adapters.push(Adapter {
                            module: AdaptedModule { name, columns },
                            a: tensor(a, [d_in, folder.rank()]),
                            b: tensor(b, [folder.rank(), outputs]),
                        });
                    }
                    first += outputs;
                }
                if !adapters.is_empty() {
                    *projection = beside(projection.clone(), adapters, folder.scale())
                        .with_context(context)?;
                }
            }
        }
        let left: Vec<String> = left.keys().map(|module| format!("`{module}`")).collect();
        ensure!(
            left.is_empty(),
            "{} does not fit the model, which has no projection {}; adapters are applied to those \
             of attention and of dense feed-forwards",
            context(),
            list(&left)
        );
        Ok(model)
    }

    /// Refuses targets among experts: their fused weight cannot have adapters.
    fn refuse_experts(&self, targets: &Regex) -> Result<()> {
        for (index, layer) in self.config.layers.iter().enumerate() {
            let FeedForwardConfig::Moe { experts, .. } = layer.feed_forward else {
                continue;
            };
            let moe = names::moe(self.config.family);
            for expert in 0..experts {
                for part in names::gate_up_down(self.config.family) {
                    let name = format!("{}{moe}.experts.{expert}.{part}", names::layer(index));
                    ensure!(
                        !targets.is_match(&name),
                        "lora-targets matches {name}, but experts cannot have adapters"
                    );
                }
            }
        }
        Ok(())
    }

    /// Returns all adapters.
    pub(crate) fn adapters(&self) -> Vec<Adapter> {
        let mut found = Vec::new();
        for layer in &self.layers {
            for (_, projection) in layer.projections() {
                if let Projection::Lora(lora) = projection {
                    found.extend(lora.adapters());
                }
            }
        }
        found
    }

    /// Writes the adapters to the new folder `out`, in PEFT's format, for the model `base`.
    ///
    /// # Errors
    /// Returns an error if the model has no adapters, the folder has files, or a file cannot be
    /// written.
    pub fn save_adapter(&self, out: &Path, config: &LoraConfig, base: &Path) -> Result<()> {
        let adapters = self.adapters();
        ensure!(!adapters.is_empty(), "the model has no adapter");
        let new = NewFolder::create(out)?;
        let names = adapters.iter().map(|adapter| &*adapter.module.name);
        let names: Vec<&str> = names.collect();
        let json = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": config.rank,
            "lora_alpha": config.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "target_modules": names,
        });
        write_json(&new.path().join(ADAPTER_FILE), &json)?;
        let mut writer = TensorWriter::create(new.path(), u64::MAX)?;
        for adapter in adapters {
            for (part, weight) in PARTS.into_iter().zip([adapter.a, adapter.b]) {
                let name = tensor_name(&adapter.module.name, part);
                let weight = weight.transpose();
                let shape = weight.dims();
                let data = weight.into_data().convert_dtype(DType::F32);
                writer.add(&name, Dtype::F32, &shape, data.as_bytes())?;
            }
        }
        writer.finish()?;
        let written = new.path().join(WHOLE_FILE);
        fs::rename(&written, new.path().join(TENSORS))
            .with_context(|| written.display().to_string())?;
        new.finish()
    }
}

/// Puts `adapters` beside `projection`.
fn beside(projection: Projection, adapters: Vec<Adapter>, scale: f64) -> Result<Projection> {
    let base = match projection {
        Projection::Dense(linear) => FrozenBase::Dense(linear),
        Projection::Nvfp4(linear) => FrozenBase::Nvfp4(linear),
        Projection::Packed(linear) => FrozenBase::Packed(linear),
        Projection::Scaled(linear) => FrozenBase::Scaled(linear),
        Projection::Rounded(linear) => FrozenBase::Rounded(linear),
        Projection::Lora(_) => bail!("the model has adapters already"),
    };
    Ok(Projection::Lora(LoraProjection::new(base, adapters, scale)))
}

/// Creates adapters for those modules in `parts` of `projection` that are targets.
fn adapters(
    projection: &Projection,
    parts: &[Part],
    targets: &Regex,
    (rank, seed): (usize, u64),
    device: &Device,
) -> Result<Vec<Adapter>> {
    let [d_in, _] = projection.shape();
    let mut first = 0;
    let mut found = Vec::new();
    for Part { name, outputs } in parts {
        if targets.is_match(name) {
            ensure!(
                rank <= d_in.min(*outputs),
                "lora is {rank}, but {name} is [{outputs}, {d_in}]: the rank must be at most its \
                 smaller side"
            );
            // Standard deviation of PEFT's uniform initialization.
            let values = normal(seed, name, d_in * rank, (3.0 * d_in as f64).powf(-0.5));
            let a = TensorData::new(values, [d_in, rank]);
            let module = AdaptedModule {
                name: name.clone(),
                columns: first..first + outputs,
            };
            found.push(Adapter {
                module,
                a: Tensor::from_data(a, (device, DType::F32)),
                b: Tensor::zeros([rank, *outputs], (device, DType::F32)),
            });
        }
        first += outputs;
    }
    Ok(found)
}
