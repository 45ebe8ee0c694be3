//! Converts a GGUF file of the Llama architecture to a model folder.
//!
//! A file has metadata (typed values by key), a list of tensors (name, axes with the contiguous one
//! first, type, offset), and their data. No allocation depends on a number in the file: strings and
//! arrays are bounded by the available bytes. See `docs/gguf.md` of ggml-org/ggml.

mod blocks;
mod read;
mod rope;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};

use super::config::{BlockConfig, CONFIG_FILE};
use super::generation::check_token;
use super::tokenizer::{TOKENIZER_FILE, Tokenizer};
use super::tokenizer_config::TOKENIZER_CONFIG;
use super::{
    DecoderConfig, Dtype, Family, FeedForwardConfig, LayerConfig, NewFolder, Rope, RopeScaling,
    TensorWriter,
};
use crate::checkpoint::write_json;
use read::Value;
pub use read::{GgufFile, GgufTensor};

/// Converts the GGUF file `path` to the model folder `target`, with tensors of type `dtype` (`F32`,
/// `BF16` or `F16`) under their transformers names, and a `config.json`. Restores the row order of
/// queries and keys, which llama.cpp's converter permutes. Writes `tokenizer.json` for a byte-level
/// BPE tokenizer that splits words like GPT-2 or SmolLM.
///
/// # Errors
/// Returns an error if the file is malformed or part of a split file, is not of the Llama
/// architecture, has tensors of types other than F32, F16, BF16, Q8_0 and Q4_1, has missing or
/// unknown tensors, has unknown keys that may affect the computation, or has a tokenizer that
/// contradicts itself or the model, or if the folder cannot be written.
pub fn import(path: &Path, target: &Path, dtype: Dtype) -> Result<Imported> {
    let file = GgufFile::open(path)?;
    import_file(&file, target, dtype).with_context(|| path.display().to_string())
}

/// Result of [`import`].
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// Configuration of the model.
    pub config: DecoderConfig,
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
    refuse_part(file)?;
    let config = config(file)?;
    refuse_unknown(file)?;
    let expected = crate::decoder::names::expected(&config);
    // This tensor is known: `config` derived the rope scaling from it.
    let mut known = BTreeSet::from([rope::FACTORS.to_owned()]);
    let new = NewFolder::create(target)?;
    write_json(&new.path().join(CONFIG_FILE), &config.to_json(type_name))?;
    let elements: usize = (expected.iter())
        .map(|tensor| tensor.shape.iter().product::<usize>())
        .sum();
    let writer = TensorWriter::create(new.path(), TensorWriter::SHARD_BYTES)?;
    let mut writer = writer.with_progress(elements * dtype.bitsize() / 8);
    for tensor in &expected {
        let name = gguf_name(&tensor.name);
        let stored = file.tensor(&name)?;
        let shape: Vec<usize> = stored.axes().iter().rev().copied().collect();
        ensure!(
            shape == tensor.shape,
            "tensor `{name}` is {shape:?}, but must be {:?}",
            tensor.shape
        );
        let mut values = stored
            .to_f32()
            .with_context(|| format!("tensor `{name}`"))?;
        check_range(&values, dtype).with_context(|| format!("tensor `{name}`"))?;
        if tensor.name.ends_with("q_proj.weight") {
            values = unpermute(&values, config.heads, config.head);
        } else if tensor.name.ends_with("k_proj.weight") {
            values = unpermute(&values, config.kv_heads, config.head);
        }
        writer.add(&tensor.name, dtype, &shape, &bytes(&values, dtype))?;
        known.insert(name);
    }
    let unknown: Vec<String> = file
        .names()
        .filter(|name| !known.contains(*name))
        .map(|name| format!("`{name}`"))
        .collect();
    ensure!(
        unknown.is_empty(),
        "tensors that a Llama without them would not compute like: {}",
        super::tensors::list(&unknown)
    );
    writer.finish()?;
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
        no_tokenizer,
    })
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

/// Returns an error for a part of a split file.
fn refuse_part(file: &GgufFile) -> Result<()> {
    let parts = file.optional_count("split.count")?.unwrap_or(0);
    let part = file.optional_count("split.no")?.unwrap_or(0) + 1;
    ensure!(
        parts <= 1,
        "this is part {part} of {parts} (split.no, split.count): join the parts first, with \
         `llama-gguf-split --merge`"
    );
    Ok(())
}

/// Returns an error for unknown keys of the architecture that may affect the computation.
fn refuse_unknown(file: &GgufFile) -> Result<()> {
    let unknown: Vec<String> = file
        .metadata()
        .filter(|(key, value)| {
            let name = key.strip_prefix("llama.");
            let says_nothing = match value {
                Value::Integer(number) => *number == 0,
                Value::Float(number) => *number == 0.0 || *number == 1.0,
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
        tied: !file.names().any(|name| name == "output.weight"),
        block: BlockConfig::default(),
        scaled_embedding: false,
        logit_cap: None,
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
    if !file.names().any(|name| name == rope::FACTORS) {
        return Ok(plain);
    }
    ensure!(
        plain.scaling == RopeScaling::Default,
        "there are both `llama.rope.scaling` and `{}`",
        rope::FACTORS
    );
    let factors = file.tensor(rope::FACTORS)?.to_f32();
    let found = factors.and_then(|factors| rope::of_factors(&factors, theta, head));
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

/// Restores the row order of transformers. llama.cpp rotates elements `2 i` and `2 i + 1` of a
/// head, and transformers `i` and `i + head / 2`: the converter moved row `(h, p, i)` to
/// `(h, i, p)`.
fn unpermute(values: &[f32], heads: usize, head: usize) -> Vec<f32> {
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
