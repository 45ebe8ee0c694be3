//! Loads a decoder from the tensors of a folder.
//!
//! Tensors are converted and copied to the device one weight at a time, from the memory-mapped
//! file. Host memory therefore holds at most the largest fused weight, such as the experts of one
//! layer. NVFP4 weights are kept packed or dequantized.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use burn::module::{Param, ParamId};
use burn::nn::{Initializer, Linear};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::nn::{
    Embedding, ExpertDispatch, LmHead, Nvfp4GroupedLinearConfig, RmsNorm, RmsNormConfig,
};
use nvfp4_formats::BLOCK;

use super::attention::{Attention, Heads};
use super::feed_forward::{FeedForward, Gated, Moe};
use super::fused::open_tensors;
use super::latent::{Latent, LowRank};
use super::names::{self, EMBEDDING, HEAD, NORM, SINKS, Site};
use super::packed::PackedFolder;
use super::positions::Positions;
use super::projection::{Experts, Projection};
use super::rounded::{InputRounding, RoundedExperts, RoundedLinear};
use super::stored_part::Part;
use super::{Decoder, DecoderLayer};
use crate::checkpoint::read_json;
use crate::hf::config::{CONFIG_FILE, refuse_packed};
use crate::hf::{
    DecoderConfig, FeedForwardConfig, LatentConfig, LayerConfig, Scoring, TensorFolder,
};
use crate::interchange::checkpoint::{KvScales, is_quantized};
use crate::interchange::{Checkpoint, Scheme};
use crate::model::check_dtype;
use crate::progress::{Unit, Work};

impl Decoder {
    /// Loads the model of tensors in high precision, or in FP8 with scales of blocks, in `folder`
    /// on `device`; parameters and activations get type `dtype`.
    ///
    /// # Errors
    /// Returns an error if a file is absent or malformed, the configuration is refused, tensors are
    /// missing, unknown or of another shape or type than the configuration states (all of them are
    /// named), or the device does not support `dtype`.
    pub fn load(folder: &Path, device: &Device, dtype: FloatDType) -> Result<Self> {
        Self::load_plain(folder, device, dtype, Form::Plain)
    }

    /// Loads the model and quantizes the weights of the layers' projections and experts at load
    /// time, one after another, in 1x16 blocks with rounding to nearest. Fused projections are one
    /// weight. Activations follow `scheme`; if they are quantized, the global scale comes from the
    /// amax of each input.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load). Also returns an error if the width of a weight
    /// is not a multiple of 16.
    pub fn load_quantizing(
        folder: &Path,
        device: &Device,
        dtype: FloatDType,
        scheme: Scheme,
    ) -> Result<Self> {
        Self::load_plain(folder, device, dtype, Form::Quantized(scheme))
    }

    fn load_plain(folder: &Path, device: &Device, dtype: FloatDType, form: Form) -> Result<Self> {
        let path = folder.join(CONFIG_FILE);
        let json = read_json(&path)?;
        let config = refuse_packed(&json).and_then(|()| DecoderConfig::from_json(&json));
        let config = config.with_context(|| path.display().to_string())?;
        let tensors = open_tensors(folder, &config)?.with_fp8_scales(&json);
        let tensors = tensors.with_context(|| folder.display().to_string())?;
        Self::of_plain_tensors(&config, &tensors, (device, dtype), form)
            .with_context(|| folder.display().to_string())
    }

    fn of_plain_tensors(
        config: &DecoderConfig,
        tensors: &TensorFolder,
        (device, dtype): (&Device, FloatDType),
        form: Form,
    ) -> Result<Self> {
        check_tensors(config, tensors)?;
        let loader = Loader::plain(config, tensors, (device, dtype))?;
        Loader { form, ..loader }.decoder()
    }

    /// Loads the model in `folder` in the fastest form for inference: weights of type `dtype` from
    /// a high-precision folder, [packed](Self::load_packed) weights from a quantized one. Layers in
    /// FP8 round their inputs as the folder says, unless `scheme` is W4A16.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load) and [`load_packed`](Self::load_packed). Also
    /// returns an error if `scheme` is given for a high-precision folder.
    pub fn load_for_inference(
        folder: &Path,
        device: &Device,
        dtype: FloatDType,
        scheme: Option<Scheme>,
    ) -> Result<Self> {
        match (is_quantized(folder)?, scheme) {
            (false, None) => Self::load(folder, device, dtype),
            (false, Some(scheme)) => bail!(
                "scheme is {}, but {} is not quantized: give the folder that `nvfp4 quantize` makes of \
                 it",
                scheme.name(),
                folder.display()
            ),
            (true, scheme) => {
                let rounds_inputs = scheme != Some(Scheme::W4a16);
                let form = Form::Packed(scheme);
                Self::load_quantized(folder, (device, dtype), form, rounds_inputs)
            }
        }
    }

    /// Loads the quantized model in `folder` and keeps its NVFP4 weights packed; other weights get
    /// type `dtype`. Inputs of layers in FP8 are not rounded.
    ///
    /// Activations follow `scheme`, by default that of the folder. A W4A4 folder quantizes them
    /// with its static global scales. If W4A4 is requested for a W4A16 folder, the global scale
    /// comes from the amax of each input.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load). Also returns an error if the folder is not
    /// quantized, or has a problem that [`Checkpoint`] names.
    pub fn load_packed(
        folder: &Path,
        device: &Device,
        dtype: FloatDType,
        scheme: Option<Scheme>,
    ) -> Result<Self> {
        Self::load_quantized(folder, (device, dtype), Form::Packed(scheme), false)
    }

    /// Loads the quantized model in `folder` and dequantizes its NVFP4 weights to type `dtype`. The
    /// weights take the memory of the dequantized model.
    ///
    /// # Errors
    /// Returns the errors of [`load_packed`](Self::load_packed). Also returns an error if the
    /// folder quantizes activations, which this model would not do.
    pub fn load_dequantized(folder: &Path, device: &Device, dtype: FloatDType) -> Result<Self> {
        Self::load_quantized(folder, (device, dtype), Form::Plain, false)
    }

    fn load_quantized(
        folder: &Path,
        (device, dtype): (&Device, FloatDType),
        form: Form,
        rounds_inputs: bool,
    ) -> Result<Self> {
        check_dtype(dtype, device)?;
        let checkpoint = Checkpoint::open(folder)?;
        let name = || folder.display().to_string();
        ensure!(
            form != Form::Plain
                || checkpoint
                    .layers()
                    .values()
                    .all(|layer| layer.input_global.is_none()),
            "{}: it quantizes activations (w4a4), and a model of dequantized weights would not",
            name()
        );
        let json = checkpoint.json().as_object();
        let json = json.with_context(|| format!("{CONFIG_FILE} is no object"))?;
        let mut json = json.clone();
        json.remove("quantization_config");
        let config = DecoderConfig::from_json(&json).with_context(name)?;
        let packed = PackedFolder::new(&checkpoint);
        let shapes = packed.shapes();
        let plain = checkpoint.plain().iter().map(String::as_str);
        names::differences(&config, checkpoint.tensors(), plain, &shapes)
            .check()
            .with_context(name)?;
        let decoder = Loader {
            config: &config,
            tensors: checkpoint.tensors(),
            packed: Some(packed),
            form,
            rounds_inputs,
            device,
            dtype,
        }
        .decoder();
        Ok(Decoder {
            kv_scales: kv_scales(&config, checkpoint.kv_scales()).with_context(name)?,
            ..decoder.with_context(name)?
        })
    }
}

/// Target form of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// High precision; packed weights of the folder are dequantized.
    Plain,
    /// Packed weights stay packed, with activations of the given scheme or of the folder's.
    Packed(Option<Scheme>),
    /// Projections and experts, stored in high precision, are quantized.
    Quantized(Scheme),
}

impl Form {
    /// Returns the recipe whose forward quantizes weights as needed, if they are quantized at load
    /// time.
    fn quantizing(self) -> Option<Nvfp4Recipe> {
        match self {
            Self::Plain | Self::Packed(_) => None,
            Self::Quantized(scheme) => Some(scheme.recipe()),
        }
    }
}

impl Loader<'_> {
    fn decoder(&self) -> Result<Decoder> {
        let (config, loader) = (self.config, self);
        let embedding = loader.embedding()?;
        let head = match config.tied {
            true => None,
            false => {
                let weight = loader.weight(&[HEAD.to_owned()])?;
                Some(LmHead::new(param(weight.transpose())))
            }
        };
        let bytes = |prefix: &str| -> usize {
            let all = self.tensors.iter();
            let own = all.filter(|tensor| tensor.name.starts_with(prefix));
            own.map(|tensor| tensor.stored_bytes()).sum()
        };
        let of_layers = (0..config.layers.len()).map(|index| bytes(&names::layer(index)));
        let of_layers: Vec<usize> = of_layers.collect();
        let (sum, total) = (of_layers.iter().sum::<usize>(), bytes(""));
        // Embedding and head are loaded; the tensors of layers are not.
        let mut work = Work::begin("load", Unit::Bytes, total - sum, total);
        let mut layers = Vec::new();
        for ((index, layer), bytes) in config.layers.iter().enumerate().zip(of_layers) {
            layers.push(loader.layer(index, layer)?);
            work.add(bytes);
        }
        Ok(Decoder {
            embedding,
            layers,
            norm: loader.norm(NORM)?,
            head,
            quantized_head: None,
            config: config.clone(),
            dtype: self.dtype,
            positions: Positions::new(config),
            kv_scales: None,
        })
    }
}

/// Returns the scale factors of the keys and values of each layer, 1 where the folder has none;
/// `None` if the folder does not quantize the cache.
fn kv_scales(
    config: &DecoderConfig,
    found: &BTreeMap<String, KvScales>,
) -> Result<Option<Vec<[f32; 2]>>> {
    if found.is_empty() {
        return Ok(None);
    }
    ensure!(
        config.block.latent.is_none(),
        "the folder has scales of an FP8 cache, but those of latent attention are not supported: \
         they belong to compressed keys and values, and the cache here has complete ones"
    );
    let name = |index: usize| format!("model.layers.{index}.self_attn");
    let layers = config.layers.len();
    if let Some(other) = found
        .keys()
        .find(|key| !(0..layers).any(|i| name(i) == **key))
    {
        bail!("`{other}` has scales of a KV cache, but is no attention of the model");
    }
    let of = |index: usize| {
        let scales = found.get(&name(index)).copied().unwrap_or_default();
        scales.map(|scale| scale.unwrap_or(1.0))
    };
    Ok(Some((0..layers).map(of).collect()))
}

/// Checks that the folder has all tensors that the model needs, and no other tensor that may have a
/// meaning.
///
/// # Errors
/// Returns an error that names all differences, if any.
pub fn check_tensors(config: &DecoderConfig, tensors: &TensorFolder) -> Result<()> {
    names::differences(config, tensors, tensors.names(), &BTreeMap::new()).check()
}

pub(super) struct Loader<'a> {
    pub config: &'a DecoderConfig,
    tensors: &'a TensorFolder,
    /// Quantized folder, if some weights are packed.
    packed: Option<PackedFolder<'a>>,
    form: Form,
    /// True to round the inputs of layers in FP8, if the folder says so.
    rounds_inputs: bool,
    pub device: &'a Device,
    dtype: FloatDType,
}

impl<'a> Loader<'a> {
    /// Creates a loader of weights in high precision.
    ///
    /// # Errors
    /// Returns an error if the device does not support `dtype`.
    pub fn plain(
        config: &'a DecoderConfig,
        tensors: &'a TensorFolder,
        (device, dtype): (&'a Device, FloatDType),
    ) -> Result<Self> {
        check_dtype(dtype, device)?;
        Ok(Self {
            config,
            tensors,
            packed: None,
            form: Form::Plain,
            rounds_inputs: false,
            device,
            dtype,
        })
    }
}

impl Loader<'_> {
    pub fn embedding(&self) -> Result<Embedding> {
        let weight = self.weight(&[EMBEDDING.to_owned()])?;
        Ok(Embedding::new(param(weight)))
    }

    pub fn layer(&self, index: usize, layer: &LayerConfig) -> Result<DecoderLayer> {
        let path = names::layer(index);
        let norm = |name: &str| self.norm(&format!("{path}{name}.weight"));
        let norms = names::norms(self.config);
        let [attention_post, feed_forward_post] = match norms.post {
            None => [None, None],
            Some(post) => post.map(Some),
        };
        Ok(DecoderLayer {
            attention_norm: norm(norms.attention)?,
            attention: self.attention(&path, layer)?,
            attention_post_norm: attention_post.map(norm).transpose()?,
            feed_forward_norm: norm(norms.feed_forward)?,
            feed_forward: self.feed_forward(&path, layer)?,
            feed_forward_post_norm: feed_forward_post.map(norm).transpose()?,
            norm_plus_one: self.config.block.norm_plus_one,
        })
    }

    fn attention(&self, path: &str, layer: &LayerConfig) -> Result<Attention> {
        let config = self.config;
        let biases = config.block.biases;
        let norm = |name: &str| self.norm(&format!("{path}{name}.weight"));
        let qk_norm = |name: &str| config.block.qk_norm.then(|| norm(name)).transpose();
        let modules = |site: Site| -> Vec<String> {
            let leaves = site.leaves(config).iter();
            leaves.map(|leaf| format!("{path}{leaf}")).collect()
        };
        let latent = |sizes: LatentConfig| -> Result<Latent> {
            let [query, kv] = names::LATENT_NORMS;
            let low_rank = |name: &str, site: Site| -> Result<LowRank> {
                Ok(LowRank {
                    norm: norm(name)?,
                    up: self.projection(&modules(site), false)?,
                })
            };
            let query = sizes.q_rank.map(|_| low_rank(query, Site::LatentQuery));
            Ok(Latent {
                query: query.transpose()?,
                kv: low_rank(kv, Site::LatentKv)?,
                sizes,
            })
        };
        Ok(Attention {
            qkv: self.projection(&modules(Site::Qkv), biases.qkv)?,
            out: self.projection(&modules(Site::Out), biases.out)?,
            q_norm: qk_norm("self_attn.q_norm")?,
            k_norm: qk_norm("self_attn.k_norm")?,
            latent: config.block.latent.map(latent).transpose()?,
            sinks: match config.block.sinks {
                false => None,
                true => Some(param(self.concatenated(&[format!("{path}{SINKS}")])?)),
            },
            heads: Heads::new(config, layer),
        })
    }

    fn feed_forward(&self, path: &str, layer: &LayerConfig) -> Result<FeedForward> {
        match layer.feed_forward {
            FeedForwardConfig::Dense { .. } => {
                let bias = self.config.block.biases.feed_forward;
                Ok(FeedForward::Dense(self.gated(&format!("{path}mlp"), bias)?))
            }
            FeedForwardConfig::Moe {
                experts,
                top_k,
                normalize,
                scoring,
                shared,
                ..
            } => {
                let moe = format!("{path}{}", names::moe(self.config.family));
                let [gate, up, down] = names::gate_up_down(self.config.family);
                let router = format!("{moe}.{}", names::router(self.config.family));
                let weight = self.weight(&[format!("{router}.weight")])?;
                let router_bias = match self.config.block.biases.experts {
                    false => None,
                    true => Some(param(self.concatenated(&[format!("{router}.bias")])?)),
                };
                Ok(FeedForward::Moe(Moe {
                    router: param(weight.transpose()),
                    router_bias,
                    gate_up: self.experts(&moe, experts, &[gate, up])?,
                    down: self.experts(&moe, experts, &[down])?,
                    correction: self.correction(&moe, scoring)?,
                    shared: shared
                        .map(|_| self.gated(&format!("{moe}.shared_experts"), false))
                        .transpose()?,
                    scoring,
                    top_k,
                    normalize,
                    activation: self.config.block.activation,
                    recompute: false,
                    dispatch: ExpertDispatch::default(),
                }))
            }
        }
    }

    /// Loads the feed-forward at `path`.
    fn gated(&self, path: &str, bias: bool) -> Result<Gated> {
        let part = |name: &str| format!("{path}.{name}");
        Ok(Gated {
            gate_up: self.projection(&["gate_proj", "up_proj"].map(part), bias)?,
            down: self.projection(&[part("down_proj")], bias)?,
            activation: self.config.block.activation,
            recompute: false,
        })
    }

    /// Loads the bias of a sigmoid router, which needs no gradient.
    fn correction(&self, moe: &str, scoring: Scoring) -> Result<Option<Param<Tensor<1>>>> {
        let Scoring::GroupedSigmoid { .. } = scoring else {
            return Ok(None);
        };
        let name = format!("{moe}.{}", names::CORRECTION);
        let bias = self.concatenated_as(&[name], FloatDType::F32)?;
        Ok(Some(Param::initialized(ParamId::new(), bias)))
    }

    /// Loads the layers `paths` as one, with concatenated outputs.
    fn projection(&self, paths: &[String], bias: bool) -> Result<Projection> {
        let of = |what: &str| -> Vec<String> {
            paths.iter().map(|path| format!("{path}.{what}")).collect()
        };
        let bias = match bias {
            false => None,
            true => Some(param(self.concatenated(&of("bias"))?)),
        };
        if let Some((packed, scheme)) = self.kept_packed(paths)? {
            let bias = bias.map(|bias| bias.val());
            return packed.linear(paths, bias, scheme, self.device);
        }
        let recipe = self.form.quantizing();
        let weight: Tensor<2> = self.concatenated_as(&of("weight"), self.dtype_of_weights())?;
        // A transposed view: matrix instructions read weights stored by output most efficiently.
        let weight = param(weight.transpose());
        let linear = Linear { weight, bias };
        if let Some(inputs) = self.rounding(paths)? {
            return Ok(Projection::Rounded(RoundedLinear { linear, inputs }));
        }
        let dense = Projection::Dense(linear);
        let Some(recipe) = recipe else {
            return Ok(dense);
        };
        let [d_in, d_out] = dense.shape();
        let mut parts = Vec::new();
        for name in paths {
            let outputs = self.tensors.get(&format!("{name}.weight"))?.shape[0];
            let name = name.clone();
            parts.push(names::Part { name, outputs });
        }
        if let Some(what) = names::odd_widths(self.config, &parts, d_in) {
            bail!("{what}: they cannot be quantized when the model is loaded");
        }
        dense
            .into_nvfp4(&recipe)
            .and_then(Projection::into_packed)
            .with_context(|| format!("`{}` [{d_out}, {d_in}]", paths[0]))
    }

    /// Returns the type of projection and expert weights. Weights that will be quantized are not
    /// rounded first.
    fn dtype_of_weights(&self) -> FloatDType {
        match self.form {
            Form::Plain | Form::Packed(_) => self.dtype,
            Form::Quantized(_) => FloatDType::F32,
        }
    }

    /// Loads the layers `parts` of each expert of the module `moe` as one.
    fn experts(&self, moe: &str, experts: usize, parts: &[&str]) -> Result<Experts> {
        let name = |expert: usize, part: &str| format!("{moe}.experts.{expert}.{part}");
        let paths: Vec<String> = (0..experts)
            .flat_map(|expert| parts.iter().map(move |part| name(expert, part)))
            .collect();
        let names_of = |leaf: &str| -> Vec<String> {
            paths.iter().map(|path| format!("{path}.{leaf}")).collect()
        };
        let bias: Option<Tensor<2>> = match self.config.block.biases.experts {
            false => None,
            true => {
                let bias: Tensor<1> = self.concatenated(&names_of("bias"))?;
                let width = bias.dims()[0] / experts;
                Some(bias.reshape([experts, width]))
            }
        };
        if let Some((packed, scheme)) = self.kept_packed(&paths)? {
            return packed.grouped(&paths, experts, bias, (scheme, self.device));
        }
        let names = names_of("weight");
        let weight: Tensor<2> = self.concatenated_as(&names, self.dtype_of_weights())?;
        let [rows, d_in] = weight.dims();
        let d_out = rows / experts;
        ensure!(
            d_in.is_multiple_of(BLOCK) && d_out.is_multiple_of(BLOCK),
            "the experts of `{moe}` have {} [{}, {d_in}] (`hidden_size` and the width inside an \
             expert), but layers of experts need multiples of {BLOCK}",
            parts.join(" and "),
            d_out / parts.len()
        );
        let recipe = self.form.quantizing();
        let weight: Tensor<3> = weight.reshape([experts, d_out, d_in]).swap_dims(1, 2);
        let mut layer = Nvfp4GroupedLinearConfig::new(experts, d_in, d_out)
            .with_initializer(Initializer::Zeros)
            .with_recipe(recipe.unwrap_or_else(Nvfp4Recipe::bf16))
            .with_bias(bias.is_some())
            .try_init(self.device)
            .with_context(|| format!("the experts of `{moe}`"))?;
        layer.weight = param(weight);
        layer.bias = bias.map(param);
        if let Some(inputs) = self.rounding(&paths)? {
            let linear = layer;
            return Ok(Experts::Rounded(RoundedExperts { linear, inputs }));
        }
        // Experts whose recipe quantizes nothing are unchanged.
        Experts::Grouped(layer).into_packed()
    }

    /// Returns the rounding of the input of `paths`, which read one input, if it is rounded to FP8.
    fn rounding(&self, paths: &[String]) -> Result<Option<InputRounding>> {
        match &self.packed {
            Some(packed) if self.rounds_inputs => {
                InputRounding::of(paths.iter().map(|path| (path, packed.fp8_layer(path))))
            }
            _ => Ok(None),
        }
    }

    /// Returns the folder and the scheme if the fused weights `paths` stay packed.
    fn kept_packed(&self, paths: &[String]) -> Result<Option<(&PackedFolder<'_>, Option<Scheme>)>> {
        match (&self.packed, self.form) {
            (Some(packed), Form::Packed(scheme)) if packed.has_all(paths)? => {
                Ok(Some((packed, scheme)))
            }
            _ => Ok(None),
        }
    }

    fn norm(&self, name: &str) -> Result<RmsNorm> {
        let gain: Tensor<1> = self.concatenated(&[name.to_owned()])?;
        let [width] = gain.dims();
        let mut norm = RmsNormConfig::new(width)
            .with_epsilon(self.config.epsilon)
            .init(self.device);
        norm.gamma = param(gain);
        Ok(norm)
    }

    /// Loads matrices `[d_out, d_in]` of equal width, concatenated along `d_out`.
    fn weight(&self, names: &[String]) -> Result<Tensor<2>> {
        self.concatenated(names)
    }

    fn part(&self, name: &str) -> Result<Part<'_>> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        match &self.packed {
            Some(packed) if packed.layer(module).is_some() => {
                Ok(Part::Packed(packed.weight(module)?))
            }
            _ => Ok(Part::Plain(self.tensors.get(name)?)),
        }
    }

    /// Concatenates tensors along their first axis, in the type of the model.
    fn concatenated<const D: usize>(&self, names: &[String]) -> Result<Tensor<D>> {
        self.concatenated_as(names, self.dtype)
    }

    /// Concatenates tensors along their first axis, in type `dtype`.
    fn concatenated_as<const D: usize>(
        &self,
        names: &[String],
        dtype: FloatDType,
    ) -> Result<Tensor<D>> {
        let dtype = DType::from(dtype);
        let parts: Vec<Part> = names
            .iter()
            .map(|name| self.part(name))
            .collect::<Result<_>>()?;
        let mut dims = [0; D];
        for (part, name) in parts.iter().zip(names) {
            let shape = part.shape();
            let Ok(found) = <[usize; D]>::try_from(&*shape) else {
                bail!("`{name}`: it has {} axes, not {D}", shape.len());
            };
            let first = dims[0] + found[0];
            dims = found;
            dims[0] = first;
        }
        let data = match (dtype, &parts[..]) {
            (DType::F32, [first, rest @ ..]) => {
                // One part is not copied.
                let mut values = first.values()?;
                for part in rest {
                    values.extend_from_slice(&part.values()?);
                }
                TensorData::new(values, dims)
            }
            _ => {
                let elements: usize = dims.iter().product();
                let mut bytes = Vec::with_capacity(elements * dtype.size());
                for (part, name) in parts.iter().zip(names) {
                    part.append(&mut bytes, dtype, name)?;
                }
                TensorData::from_bytes_vec(bytes, dims, dtype)
            }
        };
        Ok(Tensor::from_data(data, (self.device, dtype)))
    }
}

/// Creates a parameter, which requires a gradient on an autodiff device.
fn param<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    let tensor = match tensor.device().is_autodiff() {
        true => tensor.detach().require_grad(),
        false => tensor,
    };
    Param::from_tensor(tensor)
}
