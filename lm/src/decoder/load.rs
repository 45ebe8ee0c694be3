//! A decoder from the tensors of a folder.
//!
//! Tensors are converted and sent to the device one weight at a time, from the mapped file: beside
//! the device's copy, memory holds the largest fused weight (of one layer's experts, where there
//! are any).

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use burn::module::Param;
use burn::nn::{Initializer, Linear, RmsNormConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::nn::{Embedding, LmHead, Nvfp4GroupedLinearConfig, RmsNorm};

use super::attention::Attention;
use super::feed_forward::{FeedForward, Moe, SwiGlu};
use super::names::{self, EMBEDDING, Expected, HEAD, NORM};
use super::positions::Positions;
use super::projection::{Experts, Projection};
use super::{Decoder, DecoderLayer};
use crate::checkpoint::read_json;
use crate::hf::config::{CONFIG_FILE, refuse_quantized};
use crate::hf::tensors::list;
use crate::hf::{DecoderConfig, Dtype, FeedForwardConfig, LayerConfig, StoredTensor, TensorFolder};
use crate::model::check_dtype;

impl Decoder {
    /// The model in `folder`, of high-precision tensors, on `device`; parameters and activations
    /// get type `dtype`.
    ///
    /// # Errors
    /// When a file is absent or malformed, the configuration is refused, tensors are missing,
    /// unknown or of another shape or type than the configuration says (all of them are named), or
    /// the device does not compute in `dtype`.
    pub fn load(folder: &Path, device: &Device, dtype: FloatDType) -> Result<Self> {
        let path = folder.join(CONFIG_FILE);
        let json = read_json(&path)?;
        let config = refuse_quantized(&json).and_then(|()| DecoderConfig::from_json(&json));
        let config = config.with_context(|| path.display().to_string())?;
        let tensors = TensorFolder::open(folder)?;
        Self::from_tensors(&config, &tensors, device, dtype)
            .with_context(|| folder.display().to_string())
    }

    /// The same from open tensors.
    ///
    /// # Errors
    /// As [`load`](Self::load), but for the configuration.
    pub fn from_tensors(
        config: &DecoderConfig,
        tensors: &TensorFolder,
        device: &Device,
        dtype: FloatDType,
    ) -> Result<Self> {
        check_dtype(dtype, device)?;
        check_tensors(config, tensors)?;
        let loader = Loader {
            config,
            tensors,
            device,
            dtype,
        };
        let weight = loader.weight(&[EMBEDDING.to_owned()])?;
        let embedding = Embedding::new(param(weight));
        let head = match config.tied {
            true => None,
            false => {
                let weight = loader.weight(&[HEAD.to_owned()])?;
                Some(LmHead::new(param(weight.transpose())))
            }
        };
        let layers = config.layers.iter().enumerate();
        let layers = layers.map(|(index, layer)| loader.layer(index, layer));
        Ok(Self {
            embedding,
            layers: layers.collect::<Result<_>>()?,
            norm: loader.norm(NORM)?,
            head,
            config: config.clone(),
            dtype,
            positions: Positions::new(config.rope.clone(), config.head),
        })
    }
}

/// Fail unless the folder has what the model needs, and nothing else; the error names all
/// differences.
///
/// # Errors
/// When they differ.
pub fn check_tensors(config: &DecoderConfig, tensors: &TensorFolder) -> Result<()> {
    let expected = names::expected(config);
    let (mut missing, mut wrong) = (Vec::new(), Vec::new());
    for Expected { name, shape } in &expected {
        match tensors.find(name) {
            None => missing.push(format!("`{name}` {shape:?}")),
            Some(tensor) if tensor.shape != *shape => {
                wrong.push(format!("`{name}` is {:?}, not {shape:?}", tensor.shape));
            }
            Some(tensor) if !is_float(tensor.dtype) => wrong.push(format!(
                "`{name}` is of type {:?}, not F32, BF16 or F16",
                tensor.dtype
            )),
            Some(_) => {}
        }
    }
    let known: std::collections::HashSet<&str> = expected
        .iter()
        .map(|expected| expected.name.as_str())
        .collect();
    let is_tied_head = |name: &str| {
        let bytes = |name: &str| tensors.find(name).map(|tensor| tensor.bytes);
        config.tied && name == HEAD && bytes(HEAD) == bytes(EMBEDDING)
    };
    let unknown: Vec<String> = tensors
        .names()
        .filter(|name| !known.contains(name) && !names::is_ignored(name) && !is_tied_head(name))
        .map(|name| format!("`{name}`"))
        .collect();
    let mut problems = Vec::new();
    for (what, names) in [
        ("missing", missing),
        ("not what the configuration says", wrong),
        ("unknown", unknown),
    ] {
        if !names.is_empty() {
            problems.push(format!(
                "{} tensors are {what}: {}",
                names.len(),
                list(&names)
            ));
        }
    }
    ensure!(
        problems.is_empty(),
        "the tensors do not fit the configuration: {}",
        problems.join("; ")
    );
    Ok(())
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

struct Loader<'a> {
    config: &'a DecoderConfig,
    tensors: &'a TensorFolder,
    device: &'a Device,
    dtype: FloatDType,
}

impl Loader<'_> {
    fn layer(&self, index: usize, layer: &LayerConfig) -> Result<DecoderLayer> {
        let path = names::layer(index);
        Ok(DecoderLayer {
            attention_norm: self.norm(&format!("{path}input_layernorm.weight"))?,
            attention: self.attention(&path, layer)?,
            feed_forward_norm: self.norm(&format!("{path}post_attention_layernorm.weight"))?,
            feed_forward: self.feed_forward(&path, layer)?,
        })
    }

    fn attention(&self, path: &str, layer: &LayerConfig) -> Result<Attention> {
        let config = self.config;
        let part = |name: &str| format!("{path}self_attn.{name}");
        let bias = config.attention_bias;
        let qkv = ["q_proj", "k_proj", "v_proj"].map(part);
        let norm = |name: &str| match config.family.has_qk_norm() {
            true => self.norm(&part(name)).map(Some),
            false => Ok(None),
        };
        Ok(Attention {
            qkv: self.projection(&qkv, bias)?,
            out: self.projection(&[part("o_proj")], bias)?,
            q_norm: norm("q_norm.weight")?,
            k_norm: norm("k_norm.weight")?,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head: config.head,
            window: layer.window,
        })
    }

    fn feed_forward(&self, path: &str, layer: &LayerConfig) -> Result<FeedForward> {
        match layer.feed_forward {
            FeedForwardConfig::Dense { .. } => {
                let part = |name: &str| format!("{path}mlp.{name}");
                let bias = self.config.mlp_bias;
                Ok(FeedForward::Dense(SwiGlu {
                    gate_up: self.projection(&["gate_proj", "up_proj"].map(part), bias)?,
                    down: self.projection(&[part("down_proj")], bias)?,
                }))
            }
            FeedForwardConfig::Moe {
                experts,
                top_k,
                normalize,
                ..
            } => {
                let moe = format!("{path}{}", names::moe(self.config.family));
                let [gate, up, down] = names::gate_up_down(self.config.family);
                let router = self.weight(&[format!("{moe}.gate.weight")])?;
                Ok(FeedForward::Moe(Moe {
                    router: param(router.transpose()),
                    gate_up: self.experts(&moe, experts, &[gate, up])?,
                    down: self.experts(&moe, experts, &[down])?,
                    top_k,
                    normalize,
                }))
            }
        }
    }

    /// The layers `paths` as one, with concatenated outputs.
    fn projection(&self, paths: &[String], bias: bool) -> Result<Projection> {
        let of = |what: &str| -> Vec<String> {
            paths.iter().map(|path| format!("{path}.{what}")).collect()
        };
        let weight = self.weight(&of("weight"))?;
        let bias = match bias {
            false => None,
            true => Some(param(self.concatenated(&of("bias"))?)),
        };
        // A view: what is stored by output is what matrix instructions read best.
        let weight = param(weight.transpose());
        Ok(Projection::Dense(Linear { weight, bias }))
    }

    /// The layers `parts` of each expert of the module `moe`, as one.
    fn experts(&self, moe: &str, experts: usize, parts: &[&str]) -> Result<Experts> {
        let name = |expert: usize, part: &str| format!("{moe}.experts.{expert}.{part}.weight");
        let names: Vec<String> = (0..experts)
            .flat_map(|expert| parts.iter().map(move |part| name(expert, part)))
            .collect();
        let weight = self.weight(&names)?;
        let [rows, d_in] = weight.dims();
        let d_out = rows / experts;
        let weight: Tensor<3> = weight.reshape([experts, d_out, d_in]).swap_dims(1, 2);
        let mut layer = Nvfp4GroupedLinearConfig::new(experts, d_in, d_out)
            .with_initializer(Initializer::Zeros)
            .with_recipe(Nvfp4Recipe::bf16())
            .try_init(self.device)
            .with_context(|| format!("the experts of `{moe}`"))?;
        layer.weight = param(weight);
        Ok(Experts::Grouped(layer))
    }

    fn norm(&self, name: &str) -> Result<RmsNorm> {
        let gain: Tensor<1> = self.concatenated(&[name.to_owned()])?;
        let [width] = gain.dims();
        let mut norm = RmsNormConfig::new(width)
            .with_epsilon(self.config.epsilon)
            .init(self.device);
        norm.gamma = param(gain);
        Ok(RmsNorm::from_rms_norm(norm))
    }

    /// Matrices `[d_out, d_in]` of equal width, one below another.
    fn weight(&self, names: &[String]) -> Result<Tensor<2>> {
        self.concatenated(names)
    }

    /// Tensors along their first axis, in the type of the model.
    fn concatenated<const D: usize>(&self, names: &[String]) -> Result<Tensor<D>> {
        let dtype = DType::from(self.dtype);
        let tensors: Vec<StoredTensor> = names
            .iter()
            .map(|name| self.tensors.get(name))
            .collect::<Result<_>>()?;
        let mut bytes =
            Vec::with_capacity(tensors.iter().map(|t| elements(t) * dtype.size()).sum());
        let mut dims = [0; D];
        for tensor in &tensors {
            let Ok(found) = <[usize; D]>::try_from(tensor.shape) else {
                bail!("{tensor}: it has {} axes, not {D}", tensor.shape.len());
            };
            let first = dims[0] + found[0];
            dims = found;
            dims[0] = first;
            append(&mut bytes, tensor, dtype)?;
        }
        let data = TensorData::from_bytes_vec(bytes, dims, dtype);
        Ok(Tensor::from_data(data, (self.device, dtype)))
    }
}

fn elements(tensor: &StoredTensor) -> usize {
    tensor.shape.iter().product()
}

/// The elements of `tensor` as `dtype`, behind `bytes`.
fn append(bytes: &mut Vec<u8>, tensor: &StoredTensor, dtype: DType) -> Result<()> {
    let is_same = matches!(
        (tensor.dtype, dtype),
        (Dtype::F32, DType::F32) | (Dtype::BF16, DType::BF16) | (Dtype::F16, DType::F16)
    );
    if is_same {
        bytes.extend_from_slice(tensor.bytes);
        return Ok(());
    }
    let values = tensor.to_f32()?;
    let count = values.len();
    let data = TensorData::new(values, [count]).convert_dtype(dtype);
    bytes.extend_from_slice(data.as_bytes());
    Ok(())
}

/// A parameter, which requires a gradient on a device of autodiff.
fn param<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    let tensor = match tensor.device().is_autodiff() {
        true => tensor.detach().require_grad(),
        false => tensor,
    };
    Param::from_tensor(tensor)
}
