//! Converts a GGUF file of the Llama architecture to a model folder.
//!
//! A file has metadata (typed values by key), a list of tensors (name, axes with the contiguous one
//! first, type, offset), and their data. No allocation depends on a number in the file: strings and
//! arrays are bounded by the available bytes. See `docs/gguf.md` of ggml-org/ggml.
//!
//! Linear layers in NVFP4 keep their codes and block scales: the folder is then one of ModelOpt's.
//! llama.cpp's converter writes their global scales as tensors `NAME.scale` and `NAME.input_scale`.

mod blocks;
mod file;
mod rope;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};

use crate::checkpoint::write_json;
use crate::decoder::names::{self, Expected};
use crate::hf::config::{BlockConfig, CONFIG_FILE};
use crate::hf::generation::check_token;
use crate::hf::tokenizer::{TOKENIZER_FILE, Tokenizer};
use crate::hf::{
    DecoderConfig, Dtype, Family, FeedForwardConfig, LayerConfig, NewFolder, Rope, RopeScaling,
    TOKENIZER_CONFIG, TensorWriter, tensors,
};
use crate::interchange::convert::write_configs;
use crate::interchange::exclude::exclusions;
use crate::interchange::names::{FusedGroup, fused_group, is_linear};
use crate::interchange::{
    Dialect, GlobalScale, Group, LayerFormat, PackedWeight, QuantConfig, Scheme,
};
use blocks::GgufType;
use file::Value;
pub use file::{GgufFile, GgufTensor};

/// Converts the GGUF file `path` to the model folder `target` under transformers names, with a
/// `config.json`. Of a split file, `path` is any part; the others are beside it.
///
/// Linear layers in NVFP4 keep their codes and scales, in ModelOpt's dialect: W4A16, or W4A4 if the
/// file has scales of their inputs. Projections that readers fuse keep them if all of them are in
/// NVFP4 with the same scales. All other tensors get the type `dtype` (`F32`, `BF16` or
/// `F16`). Restores the row order of queries and keys, which llama.cpp's converter permutes. Writes
/// `tokenizer.json` for a byte-level BPE tokenizer that splits words like GPT-2, SmolLM or Llama 3.
///
/// # Errors
/// Returns an error if the file is malformed, a part is missing, it is not of the Llama
/// architecture, has tensors of types that are not read, has missing or unknown tensors, has
/// unknown keys that may affect the computation, or has a tokenizer that contradicts itself or the
/// model, or if the folder cannot be written.
pub fn import(path: &Path, target: &Path, dtype: Dtype) -> Result<Imported> {
    let file = GgufFile::open(path)?;
    import_file(&file, target, dtype).with_context(|| path.display().to_string())
}

/// Result of [`import`].
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// Configuration of the model.
    pub config: DecoderConfig,
    /// Number of linear layers that stayed in NVFP4.
    pub nvfp4_layers: usize,
    /// Scales of inputs that have no use, because the layer is not in NVFP4 in the folder.
    pub unused_scales: Vec<String>,
    /// Reason why no `tokenizer.json` was written, if so.
    pub no_tokenizer: Option<String>,
}

fn import_file(file: &GgufFile, target: &Path, dtype: Dtype) -> Result<Imported> {
    let type_name = match dtype {
        Dtype::F32 => "float32",
        Dtype::BF16 => "bfloat16",
        Dtype::F16 => "float16",
        other => bail!("`dtype` is {other:?}, but must be F32, BF16 or F16"),
    };
    let config = config(file)?;
    refuse_unknown(file)?;
    let mut json = config.to_json(type_name);
    let read = DecoderConfig::from_json(&json).context("config.json of this file")?;
    ensure!(
        read == config,
        "the metadata has a number that config.json cannot hold"
    );
    // This tensor is known: `config` derived the rope scaling from it.
    let mut known = BTreeSet::from([rope::FACTORS.to_owned()]);
    let new = NewFolder::create(target)?;
    let expected = names::expected(&config);
    let elements: usize = (expected.iter())
        .map(|tensor| tensor.shape.iter().product::<usize>())
        .sum();
    let writer = TensorWriter::create(new.path(), TensorWriter::SHARD_BYTES)?;
    let mut writer = writer.with_progress(elements * dtype.bitsize() / 8);
    let mut layers = Layers::default();
    let packed = packed_layers(file, &expected)?;
    for tensor in &expected {
        let name = gguf_name(&tensor.name);
        let context = || format!("tensor `{name}`");
        let stored = Stored::read(file, &name).with_context(context)?;
        ensure!(
            stored.shape == tensor.shape,
            "tensor `{name}` is {:?}, but must be {:?}",
            stored.shape,
            tensor.shape
        );
        known.extend([scale_name(&name, "scale"), scale_name(&name, "input_scale")]);
        known.insert(name.clone());
        let heads = match &tensor.name {
            name if name.ends_with("q_proj.weight") => Some(config.heads),
            name if name.ends_with("k_proj.weight") => Some(config.kv_heads),
            _ => None,
        };
        let order = heads.map(|heads| (heads, config.head));
        match layer_of(&tensor.name) {
            Some(module) if packed.contains(module) => {
                let weight = stored.packed(order).with_context(context)?;
                Dialect::ModelOpt.write(&mut writer, module, &weight)?;
                layers.add_packed(module, &weight);
            }
            module => {
                let values = stored.values(order).with_context(context)?;
                check_range(&values, dtype).with_context(context)?;
                writer.add(&tensor.name, dtype, &tensor.shape, &bytes(&values, dtype))?;
                layers.unquantized.extend(module.map(str::to_owned));
                if stored.input_scale.is_some() {
                    layers.unused_scales.push(scale_name(&name, "input_scale"));
                }
            }
        }
    }
    let unknown: Vec<String> = file
        .names()
        .filter(|name| !known.contains(*name))
        .map(|name| format!("`{name}`"))
        .collect();
    ensure!(
        unknown.is_empty(),
        "tensors that a Llama without them would not compute like: {}",
        tensors::list(&unknown)
    );
    writer.finish()?;
    match layers.quantization()? {
        None => write_json(&new.path().join(CONFIG_FILE), &json)?,
        Some(quantization) => {
            json.insert("quantization_config".into(), quantization.inline());
            write_configs(new.path(), &json, &quantization)?;
        }
    }
    let no_tokenizer = match tokenizer::tokenizer_json(file)? {
        Err(reason) => Some(reason),
        Ok(json) => {
            write_json(&new.path().join(TOKENIZER_FILE), &json)?;
            let settings = tokenizer::tokenizer_config(file)?;
            write_json(&new.path().join(TOKENIZER_CONFIG), &settings)?;
            Tokenizer::read(new.path(), config.vocab, &config.eos)?;
            None
        }
    };
    new.finish()?;
    Ok(Imported {
        config,
        nvfp4_layers: layers.packed.len(),
        unused_scales: layers.unused_scales,
        no_tokenizer,
    })
}

/// Returns the module of a linear layer's weight, but not the head, which engines do not read in
/// NVFP4.
fn layer_of(tensor: &str) -> Option<&str> {
    let module = tensor.strip_suffix(".weight")?;
    (is_linear(module) && module.contains(".layers.")).then_some(module)
}

/// Returns the linear layers that stay in NVFP4: readers fuse projections (q/k/v, gate/up), so all of
/// a group must be in NVFP4, with the same scales.
fn packed_layers<'a>(file: &GgufFile, expected: &'a [Expected]) -> Result<BTreeSet<&'a str>> {
    let mut groups: BTreeMap<FusedGroup, Vec<(&'a str, Option<Scales>)>> = BTreeMap::new();
    for module in expected.iter().filter_map(|tensor| layer_of(&tensor.name)) {
        let alone = FusedGroup {
            parent: module.into(),
            kind: "",
        };
        let name = gguf_name(&format!("{module}.weight"));
        let stored = Stored::read(file, &name).with_context(|| format!("tensor `{name}`"))?;
        let is_packed = stored.tensor.kind() == GgufType::NVFP4;
        let scales = is_packed.then_some((stored.scale, stored.input_scale));
        let group = fused_group(module).unwrap_or(alone);
        groups.entry(group).or_default().push((module, scales));
    }
    let stays = |group: &&Vec<(&'a str, Option<Scales>)>| {
        let first = group[0].1;
        first.is_some() && group.iter().all(|(_, scales)| *scales == first)
    };
    let modules = groups.values().filter(stays).flatten();
    Ok(modules.map(|(module, _)| *module).collect())
}

/// Factor of the values and of the quantized input of a layer.
type Scales = (Option<f32>, Option<f32>);

/// Linear layers as they are written.
#[derive(Default)]
struct Layers {
    /// Layers in NVFP4, and whether the file has a scale of their inputs.
    packed: Vec<(String, bool)>,
    /// Layers in high precision.
    unquantized: Vec<String>,
    /// Scales of inputs of other tensors than those in NVFP4.
    unused_scales: Vec<String>,
}

impl Layers {
    fn add_packed(&mut self, module: &str, weight: &PackedWeight) {
        let has_input = weight.input_global().is_some();
        self.packed.push((module.to_owned(), has_input));
    }

    /// Returns the quantization of the folder, if a layer is in NVFP4.
    ///
    /// # Errors
    /// Returns an error if some inputs have a scale and others have none.
    fn quantization(&self) -> Result<Option<QuantConfig>> {
        let find = |wanted: bool| self.packed.iter().find(|(_, found)| *found == wanted);
        let scheme = match (find(true), find(false)) {
            (None, None) => return Ok(None),
            (Some(_), None) => Scheme::W4a4,
            (None, Some(_)) => Scheme::W4a16,
            (Some((with, _)), Some((without, _))) => bail!(
                "there is a scale of the input of {with}, but none of the input of {without}: all \
                 layers in NVFP4 must have one, or none of them"
            ),
        };
        let unquantized = self.unquantized.iter().map(String::as_str);
        let format = LayerFormat::Nvfp4(scheme);
        Ok(Some(QuantConfig {
            dialect: Dialect::ModelOpt,
            groups: vec![Group::linear(format)],
            kv_cache_fp8: false,
            pre_quant: false,
            exclude: exclusions(unquantized, Dialect::ModelOpt),
        }))
    }
}

/// A tensor with its scales.
struct Stored<'a> {
    tensor: GgufTensor<'a>,
    /// Axes, contiguous one last.
    shape: Vec<usize>,
    /// Factor of all values, from `NAME.scale`.
    scale: Option<f32>,
    /// Factor of the layer's quantized input, from `NAME.input_scale`.
    input_scale: Option<f32>,
}

impl<'a> Stored<'a> {
    /// Reads the tensor `name`.
    ///
    /// # Errors
    /// Returns an error if there is none, or if its scales are no single positive numbers.
    fn read(file: &'a GgufFile, name: &str) -> Result<Self> {
        let tensor = file.tensor(name)?;
        let scale = |which: &str| -> Result<Option<f32>> {
            let name = scale_name(name, which);
            let Some(tensor) = file.find(&name) else {
                return Ok(None);
            };
            let values = tensor.to_f32()?;
            match values[..] {
                [value] if value > 0.0 => Ok(Some(value)),
                _ => bail!("`{name}` is {values:?}, but must be one positive number"),
            }
        };
        Ok(Self {
            shape: tensor.axes().iter().rev().copied().collect(),
            scale: scale("scale")?,
            input_scale: scale("input_scale")?,
            tensor,
        })
    }

    /// Returns the values. `order` has the number and the size of the heads whose rows the
    /// converter has permuted.
    fn values(&self, order: Option<(usize, usize)>) -> Result<Vec<f32>> {
        let mut values = self.tensor.to_f32()?;
        if let Some(scale) = self.scale {
            values.iter_mut().for_each(|value| *value *= scale);
        }
        Ok(unpermute(values, order))
    }

    /// Returns codes and scales of an NVFP4 tensor; see [`values`](Self::values).
    fn packed(&self, order: Option<(usize, usize)>) -> Result<PackedWeight> {
        let &[n, k] = &self.shape[..] else {
            bail!("it is {:?}, but must be a matrix", self.shape);
        };
        let (codes, scales) = blocks::nvfp4_codes_and_scales(self.tensor.bytes());
        PackedWeight::new(
            [n, k],
            unpermute(codes, order),
            unpermute(scales, order),
            GlobalScale::Multiply(self.scale.unwrap_or(1.0)),
            self.input_scale.map(GlobalScale::Multiply),
        )
    }
}

/// Returns the name of a scale of the tensor `name`.
fn scale_name(name: &str, which: &str) -> String {
    format!("{}.{which}", name.strip_suffix(".weight").unwrap_or(name))
}

/// Returns an error if a value rounds to infinity in `dtype`.
fn check_range(values: &[f32], dtype: Dtype) -> Result<()> {
    let overflows = |value: f32| match dtype {
        Dtype::F16 => f16::from_f32(value).is_infinite(),
        Dtype::BF16 => bf16::from_f32(value).is_infinite(),
        _ => false,
    };
    let found = values.iter().position(|value| overflows(*value));
    ensure!(
        found.is_none(),
        "value {} is {:e}, which {dtype:?} cannot hold: choose F32",
        found.unwrap_or_default(),
        found.map_or(0.0, |at| values[at])
    );
    Ok(())
}

/// Keys of the architecture that are read, or that have no effect in a model with its tensors.
const KEYS: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
];

/// Returns an error for unknown keys of the architecture that may affect the computation.
fn refuse_unknown(file: &GgufFile) -> Result<()> {
    let unknown: Vec<String> = file
        .metadata()
        .filter(|(key, value)| {
            let name = key.strip_prefix("llama.");
            let says_nothing = match value {
                Value::Integer(number) => *number == 0,
                // `attention.scale` replaces the scale of scores instead of multiplying it.
                Value::Float(number) => {
                    let is_factor = ["_scale", "scale_", "_factor"]
                        .iter()
                        .any(|part| key.contains(part));
                    *number == 0.0 || is_factor && *number == 1.0
                }
                Value::Bool(flag) => *flag == key.ends_with("causal"),
                Value::String(text) => text.is_empty(),
                _ => false,
            };
            name.is_some_and(|name| !KEYS.contains(&name)) && !says_nothing
        })
        .map(|(key, value)| format!("`{key}` ({value})"))
        .collect();
    ensure!(
        unknown.is_empty(),
        "keys that may change what the model computes, and that are not supported: {}",
        unknown.join(", ")
    );
    Ok(())
}

/// Builds the configuration from the metadata.
fn config(file: &GgufFile) -> Result<DecoderConfig> {
    let architecture = match file.value("general.architecture") {
        Some(Value::String(name)) => name.as_str(),
        _ => bail!("`general.architecture` is absent, or no string"),
    };
    ensure!(
        architecture == "llama",
        "`general.architecture` is `{architecture}`, but must be `llama`"
    );
    let count = |key: &str| -> Result<usize> {
        let value = file.optional_count(key)?;
        let value = value.with_context(|| format!("`{key}` is absent"))?;
        ensure!(value > 0, "`{key}` is 0, but must be positive");
        Ok(value)
    };
    let heads = count("llama.attention.head_count")?;
    let kv_heads = file
        .optional_count("llama.attention.head_count_kv")?
        .unwrap_or(heads);
    let d_model = count("llama.embedding_length")?;
    let head = match file.optional_count("llama.attention.key_length")? {
        Some(head) => head,
        None => d_model / heads,
    };
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
        if let Some(other) = file.optional_count(key)? {
            ensure!(
                other == head,
                "`{key}` is {other}, but must be {head}, the size of a head"
            );
        }
    }
    ensure!(
        heads.is_multiple_of(kv_heads) && head > 0 && head.is_multiple_of(2),
        "{heads} heads of {head} with {kv_heads} of keys and values are not possible"
    );
    ensure!(
        file.optional_count("llama.expert_count")?
            .is_none_or(|experts| experts == 0),
        "`llama.expert_count` is not 0: models with experts are not imported"
    );
    let layers = count("llama.block_count")?;
    // Every layer has tensors, so there are at least as many tensors as layers.
    ensure!(
        layers <= file.names().count(),
        "`llama.block_count` is {layers}, but there are fewer tensors"
    );
    let hidden = count("llama.feed_forward_length")?;
    let layer = LayerConfig {
        window: None,
        rope: 0,
        feed_forward: FeedForwardConfig::Dense { hidden },
    };
    let embedding = file.tensor("token_embd.weight")?;
    let &[_, vocab] = embedding.axes() else {
        bail!("tensor `token_embd.weight` is no matrix");
    };
    let epsilon = file.number("llama.attention.layer_norm_rms_epsilon")?;
    let token = |key: &str| -> Result<Option<u32>> {
        Ok(file.optional_count(key)?.map(|token| token as u32))
    };
    let bos = token("tokenizer.ggml.bos_token_id")?;
    let eos = token("tokenizer.ggml.eos_token_id")?;
    let pad = token("tokenizer.ggml.padding_token_id")?;
    for (name, id) in [("bos", bos), ("eos", eos), ("pad", pad)] {
        check_token(name, id, vocab)?;
    }
    Ok(DecoderConfig {
        family: Family::Llama,
        vocab,
        d_model,
        heads,
        kv_heads,
        head,
        layers: vec![layer; layers],
        epsilon: epsilon.context("`llama.attention.layer_norm_rms_epsilon` is absent")?,
        ropes: vec![rope(file, head)?],
        max_positions: count("llama.context_length")?,
        tied: file.find("output.weight").is_none(),
        block: BlockConfig::default(),
        scaled_embedding: false,
        logit_cap: None,
        extra_layers: 0,
        bos,
        eos: eos.into_iter().collect(),
        pad,
    })
}

fn rope(file: &GgufFile, head: usize) -> Result<Rope> {
    let theta = file.number("llama.rope.freq_base")?.unwrap_or(1e4);
    ensure!(
        theta.is_finite() && theta > 1.0,
        "`llama.rope.freq_base` is {theta}, but must be a number above 1"
    );
    let factor = file.number("llama.rope.scaling.factor")?;
    let scaling = match (file.value("llama.rope.scaling.type"), factor) {
        (None, None | Some(1.0)) => RopeScaling::Default,
        (Some(Value::String(kind)), _) if kind == "none" => RopeScaling::Default,
        (Some(Value::String(kind)), Some(factor)) if kind == "linear" && factor >= 1.0 => {
            RopeScaling::Linear { factor }
        }
        (kind, factor) => bail!(
            "`llama.rope.scaling` is of type {} and factor {}, but must be `linear` with a factor \
             of at least 1, or absent",
            kind.map_or("none".into(), Value::to_string),
            factor.map_or("none".into(), |factor| factor.to_string())
        ),
    };
    let plain = Rope { theta, scaling };
    let Some(factors) = file.find(rope::FACTORS) else {
        return Ok(plain);
    };
    ensure!(
        plain.scaling == RopeScaling::Default,
        "there are both `llama.rope.scaling` and `{}`",
        rope::FACTORS
    );
    let found = factors
        .to_f32()
        .and_then(|factors| rope::of_factors(&factors, theta, head));
    found.with_context(|| format!("tensor `{}`", rope::FACTORS))
}

/// Returns the name in the GGUF file of the transformers tensor `name`.
fn gguf_name(name: &str) -> String {
    let layer = name.strip_prefix("model.layers.");
    let Some((index, part)) = layer.and_then(|rest| rest.split_once('.')) else {
        return match name {
            "model.embed_tokens.weight" => "token_embd.weight",
            "model.norm.weight" => "output_norm.weight",
            _ => "output.weight",
        }
        .into();
    };
    let part = match part.strip_suffix(".weight").unwrap_or(part) {
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        other => other,
    };
    format!("blk.{index}.{part}.weight")
}

/// Restores the row order of transformers in a matrix with `order`: heads, and rows per head.
/// llama.cpp rotates elements `2 i` and `2 i + 1` of a head, and transformers `i` and
/// `i + head / 2`: the converter moved row `(h, p, i)` to `(h, i, p)`.
fn unpermute<T: Copy>(values: Vec<T>, order: Option<(usize, usize)>) -> Vec<T> {
    let Some((heads, head)) = order else {
        return values;
    };
    let width = values.len() / (heads * head);
    let half = head / 2;
    let mut rows = Vec::with_capacity(values.len());
    for h in 0..heads {
        for p in 0..2 {
            for i in 0..half {
                let row = h * head + 2 * i + p;
                rows.extend_from_slice(&values[row * width..][..width]);
            }
        }
    }
    rows
}

fn bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values
            .iter()
            .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
            .collect(),
        Dtype::F16 => values
            .iter()
            .flat_map(|v| f16::from_f32(*v).to_le_bytes())
            .collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}
