//! Low-rank adapters beside frozen projections (LoRA, arXiv 2106.09685).
//!
//! A projection `y = x W` becomes `y = x W + (alpha / rank) (x A) B`, of which `A` (`[d_in, rank]`)
//! and `B` (`[rank, d_out]`) are trained. `B` begins as 0. Projections that are one weight here, such
//! as queries, keys and values, have adapters of their own, under the names that they have in PEFT.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use burn::module::{Module, Param};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_nvfp4::nn::Nvfp4Linear;
use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::feed_forward::FeedForward;
use super::names::{self, Part};
use super::projection::Projection;
use super::{Decoder, DecoderLayer};
use crate::checkpoint::write_json;
use crate::hf::{Dtype, FeedForwardConfig, NewFolder, TensorWriter, WHOLE_FILE};
use crate::model::cast;
use crate::random::normal;

/// The projections of attention and of dense feed-forwards.
pub const DEFAULT_TARGETS: &str = r"\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj$";
/// The file of an adapter's tensors.
const TENSORS: &str = "adapter_model.safetensors";
/// The file that says what the adapter is.
const CONFIG: &str = "adapter_config.json";

/// Which projections have adapters, and of which size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Columns of `A`.
    pub rank: usize,
    /// Adapters count `alpha / rank`.
    pub alpha: f64,
    /// A regular expression of the names of modules, such as
    /// `model.layers.0.self_attn.q_proj`.
    pub targets: String,
}

impl LoraConfig {
    /// The factor of adapters.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Check the numbers, and that the targets are a regular expression.
    ///
    /// # Errors
    /// Names the value that is wrong, and what it may be.
    pub fn check(&self) -> Result<Regex> {
        ensure!(self.rank > 0, "lora is 0, but the rank must be at least 1");
        ensure!(
            self.alpha.is_finite() && self.alpha > 0.0,
            "lora-alpha is {}, but it must be a positive number",
            self.alpha
        );
        Regex::new(&self.targets)
            .with_context(|| format!("lora-targets is {:?}, no regular expression", self.targets))
    }
}

/// A frozen projection with adapters.
#[derive(Module, Debug)]
pub struct LoraProjection {
    /// Not trained; its recipe says whether it is quantized when it is used.
    pub base: Nvfp4Linear,
    /// In the order of the columns that they add to.
    pub adapters: Vec<Adapter>,
    #[module(skip)]
    scale: f64,
}

/// The adapter of one module.
#[derive(Module, Debug)]
pub struct Adapter {
    /// `[d_in, rank]`, f32.
    pub a: Param<Tensor<2>>,
    /// `[rank, outputs]`, f32.
    pub b: Param<Tensor<2>>,
    /// The name of the module.
    #[module(skip)]
    name: String,
    /// Its first column in the projection.
    #[module(skip)]
    first: usize,
}

impl LoraProjection {
    /// `[rows, d_in]` to `[rows, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// When a shape, type or device does not fit.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let y = self.base.try_forward(x.clone())?;
        let dtype: FloatDType = x.dtype().into();
        let added = |adapter: &Adapter| {
            let [a, b] = [&adapter.a, &adapter.b].map(|part| cast(part.val(), dtype));
            x.clone().matmul(a).matmul(b).mul_scalar(self.scale)
        };
        Ok(y.clone() + self.spread(added, &y))
    }

    /// The weight that computes the same, `[d_in, d_out]`, f32.
    pub(super) fn merged(&self) -> Tensor<2> {
        let weight = cast(self.base.weight.val(), FloatDType::F32);
        let product = |adapter: &Adapter| {
            let product = adapter.a.val().matmul(adapter.b.val());
            product.mul_scalar(self.scale)
        };
        weight.clone() + self.spread(product, &weight)
    }

    /// The columns of each adapter where they belong, between zeros, as many as `like` has.
    fn spread(&self, columns: impl Fn(&Adapter) -> Tensor<2>, like: &Tensor<2>) -> Tensor<2> {
        let [rows, width] = like.dims();
        let options = (&like.device(), like.dtype());
        let zeros = |count: usize| Tensor::<2>::zeros([rows, count], options);
        let mut parts = Vec::new();
        let mut end = 0;
        for adapter in &self.adapters {
            if adapter.first > end {
                parts.push(zeros(adapter.first - end));
            }
            let own = columns(adapter);
            end = adapter.first + own.dims()[1];
            parts.push(own);
        }
        if end < width {
            parts.push(zeros(width - end));
        }
        Tensor::cat(parts, 1)
    }
}

impl Decoder {
    /// The model with frozen parameters and adapters, which depend on `seed` and their names. It has
    /// been made for [training](Self::into_training).
    ///
    /// # Errors
    /// When the configuration is wrong, its targets match no module or one that cannot have an
    /// adapter, or the model was not made for training.
    pub fn into_lora(self, config: &LoraConfig, seed: u64) -> Result<Self> {
        let targets = config.check()?;
        self.refuse_experts(&targets)?;
        let own = self.config.clone();
        let mut model = self.no_grad();
        let mut count = 0;
        for (index, layer) in model.layers.iter_mut().enumerate() {
            for (projection, parts) in projections(layer, &own, index) {
                let adapters = adapters(projection, &parts, &targets, (config.rank, seed))?;
                count += adapters.len();
                if adapters.is_empty() {
                    continue;
                }
                let Projection::Nvfp4(base) = projection.clone() else {
                    bail!("adapters are beside projections that were made for training");
                };
                let scale = config.scale();
                *projection = Projection::Lora(LoraProjection {
                    base,
                    adapters,
                    scale,
                });
            }
        }
        ensure!(
            count > 0,
            "lora-targets is {:?}, which matches no projection such as {}self_attn.q_proj",
            config.targets,
            names::layer(0)
        );
        Ok(model.with_ids_of_paths())
    }

    /// Experts are one weight, which has no adapters.
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

    /// All adapters.
    fn adapters(&self) -> Vec<&Adapter> {
        let mut found = Vec::new();
        for layer in &self.layers {
            let attention = [&layer.attention.qkv, &layer.attention.out];
            let dense = match &layer.feed_forward {
                FeedForward::Dense(dense) => vec![&dense.gate_up, &dense.down],
                FeedForward::Moe(_) => vec![],
            };
            for projection in attention.into_iter().chain(dense) {
                if let Projection::Lora(lora) = projection {
                    found.extend(&lora.adapters);
                }
            }
        }
        found
    }

    /// Writes the adapters to the new folder `out`, as PEFT loads them for the model `base`.
    ///
    /// # Errors
    /// When there is none, the folder has files, or the disk refuses.
    pub fn save_adapter(&self, out: &Path, config: &LoraConfig, base: &Path) -> Result<()> {
        let adapters = self.adapters();
        ensure!(!adapters.is_empty(), "the model has no adapter");
        let new = NewFolder::create(out)?;
        let names: Vec<&str> = adapters.iter().map(|adapter| &*adapter.name).collect();
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
        write_json(&new.path().join(CONFIG), &json)?;
        let mut writer = TensorWriter::create(new.path(), u64::MAX)?;
        for adapter in adapters {
            for (part, weight) in [("lora_A", &adapter.a), ("lora_B", &adapter.b)] {
                let name = format!("base_model.model.{}.{part}.weight", adapter.name);
                let weight = weight.val().transpose();
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

/// The projections of layer `index`, with the modules that each consists of.
fn projections<'a>(
    layer: &'a mut DecoderLayer,
    config: &crate::hf::DecoderConfig,
    index: usize,
) -> Vec<(&'a mut Projection, Vec<Part>)> {
    let attention = &mut layer.attention;
    let mut all = vec![
        (&mut attention.qkv, names::qkv(config, index)),
        (&mut attention.out, names::out(config, index)),
    ];
    if let FeedForward::Dense(dense) = &mut layer.feed_forward {
        let hidden = dense.gate_up.dense().0.dims()[1] / 2;
        all.push((&mut dense.gate_up, names::gate_up(hidden, index)));
        all.push((&mut dense.down, names::down(config, index)));
    }
    all
}

/// New adapters of the modules `parts` of `projection` that are targets.
fn adapters(
    projection: &Projection,
    parts: &[Part],
    targets: &Regex,
    (rank, seed): (usize, u64),
) -> Result<Vec<Adapter>> {
    let (weight, _) = projection.dense();
    let ([d_in, _], device) = (weight.dims(), weight.device());
    let mut first = 0;
    let mut found = Vec::new();
    for Part { name, outputs } in parts {
        if targets.is_match(name) {
            ensure!(
                rank <= d_in.min(*outputs),
                "lora is {rank}, but {name} is [{outputs}, {d_in}]: the rank must be at most its \
                 smaller side"
            );
            // The deviation of PEFT's uniform initial values.
            let values = normal(seed, name, d_in * rank, (3.0 * d_in as f64).powf(-0.5));
            let a = Tensor::from_data(TensorData::new(values, [d_in, rank]), (&device, DType::F32));
            let b = Tensor::zeros([rank, *outputs], (&device, DType::F32));
            found.push(Adapter {
                a: Param::from_tensor(a.require_grad()),
                b: Param::from_tensor(b.require_grad()),
                name: name.clone(),
                first,
            });
        }
        first += outputs;
    }
    Ok(found)
}
