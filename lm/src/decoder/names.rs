//! Tensors of a model folder: their names in transformers, and their shapes.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use nvfp4_formats::BLOCK;

use crate::hf::tensors::list;
use crate::hf::{DecoderConfig, Family, FeedForwardConfig, Scoring, TensorFolder};

/// One tensor that a model folder must have.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Name of the tensor.
    pub name: String,
    /// Shape; `[d_out, d_in]` for weights.
    pub shape: Vec<usize>,
}

/// Name of the embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the final norm.
pub const NORM: &str = "model.norm.weight";
/// Name of the head; absent if tied to the embedding.
pub const HEAD: &str = "lm_head.weight";

/// Name of the attention sinks in a layer.
pub const SINKS: &str = "self_attn.sinks";

/// Returns the path of layer `index`, with a trailing dot.
pub fn layer(index: usize) -> String {
    format!("model.layers.{index}.")
}

/// Returns the path of the attention of layer `index`.
pub fn attention(index: usize) -> String {
    format!("{}self_attn", layer(index))
}

/// Names of the norms of a layer.
pub struct NormNames {
    /// Norm before the attention.
    pub attention: &'static str,
    /// Norm before the feed-forward.
    pub feed_forward: &'static str,
    /// Norms after the attention and after the feed-forward, if present.
    pub post: Option<[&'static str; 2]>,
}

/// Returns the names of the norms of every layer.
pub fn norms(config: &DecoderConfig) -> NormNames {
    let (attention, second) = ("input_layernorm", "post_attention_layernorm");
    match config.block.post_norms {
        false => NormNames {
            attention,
            feed_forward: second,
            post: None,
        },
        true => NormNames {
            attention,
            feed_forward: "pre_feedforward_layernorm",
            post: Some([second, "post_feedforward_layernorm"]),
        },
    }
}

/// A module that is fused with others into one projection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name of the module.
    pub name: String,
    /// Number of its output columns in the projection.
    pub outputs: usize,
}

/// Describes the widths of a projection that quantization does not support, with the fields of
/// `config.json` that define them; `None` if all are multiples of 16. The projection consists of
/// the modules `parts` with `d_in` inputs.
pub fn odd_widths(config: &DecoderConfig, parts: &[Part], d_in: usize) -> Option<String> {
    let outputs: usize = parts.iter().map(|part| part.outputs).sum();
    if d_in.is_multiple_of(BLOCK) && outputs.is_multiple_of(BLOCK) {
        return None;
    }
    let field = |width: usize| {
        let is_attention = parts.iter().any(|part| part.name.contains(".self_attn."));
        if width == config.d_model {
            "`hidden_size`"
        } else if !is_attention {
            "`intermediate_size`"
        } else if let Some(latent) = &config.block.latent {
            match width {
                _ if latent.q_rank == Some(width) => "`q_lora_rank`",
                _ if width == latent.kv_rank => "`kv_lora_rank`",
                _ if width == latent.kv_rank + latent.rope => {
                    "`kv_lora_rank` plus `qk_rope_head_dim`"
                }
                _ => "`num_attention_heads` times the size of a head",
            }
        } else if width == config.heads * config.head {
            "`num_attention_heads` times `head_dim`"
        } else {
            "`num_key_value_heads` times `head_dim`"
        }
    };
    let odd = parts.iter().map(|part| part.outputs).chain([d_in]);
    let odd: BTreeSet<usize> = odd.filter(|width| !width.is_multiple_of(BLOCK)).collect();
    let odd = odd
        .into_iter()
        .map(|width| format!("{} is {width}", field(width)));
    let modules = parts.iter().map(|part| {
        let Part { name, outputs } = part;
        format!("{name} [{outputs}, {d_in}]")
    });
    Some(format!(
        "{}: {}, but layers in NVFP4 need multiples of {BLOCK}",
        modules.collect::<Vec<_>>().join(" and "),
        odd.collect::<Vec<_>>().join(" and ")
    ))
}

/// Returns the name of the module with the experts of a layer.
pub fn moe(family: Family) -> &'static str {
    match family {
        Family::Mixtral => "block_sparse_moe",
        _ => "mlp",
    }
}

/// Returns the name of the router in the module with the experts.
pub fn router(family: Family) -> &'static str {
    match family {
        Family::GptOss => "router",
        _ => "gate",
    }
}

/// Returns the names of gate, up and down, of an expert or of a dense feed-forward.
pub fn gate_up_down(family: Family) -> [&'static str; 3] {
    match family {
        Family::Mixtral => ["w1", "w3", "w2"],
        _ => ["gate_proj", "up_proj", "down_proj"],
    }
}

/// An input of linear layers in a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// Input of queries, keys and values; with latent attention, of their low-rank projections.
    Qkv,
    /// Input of the queries' second projection in latent attention.
    LatentQuery,
    /// Input of the second projection of keys and values in latent attention.
    LatentKv,
    /// Input of the attention's output projection.
    Out,
    /// Input of gate and up, in a dense feed-forward or in experts.
    GateUp,
    /// Input of the down projection.
    Down,
    /// Input of gate and up in the feed-forward beside experts.
    SharedGateUp,
    /// Input of the down projection in the feed-forward beside experts.
    SharedDown,
}

impl Site {
    /// All inputs.
    pub const ALL: [Self; 8] = [
        Self::Qkv,
        Self::LatentQuery,
        Self::LatentKv,
        Self::Out,
        Self::GateUp,
        Self::Down,
        Self::SharedGateUp,
        Self::SharedDown,
    ];

    /// Returns the name of the first module that reads this input, in layer `index`, and in expert
    /// `expert` if there are experts.
    pub fn module(self, config: &DecoderConfig, index: usize, expert: Option<usize>) -> String {
        let (Self::GateUp | Self::Down, Some(expert)) = (self, expert) else {
            return format!("{}{}", layer(index), self.leaves(config)[0]);
        };
        let [gate, _, down] = gate_up_down(config.family);
        let leaf = if self == Self::GateUp { gate } else { down };
        format!(
            "{}{}.experts.{expert}.{leaf}",
            layer(index),
            moe(config.family)
        )
    }

    /// Returns the path of its projection in a [`DecoderLayer`](super::DecoderLayer).
    pub fn path(self) -> &'static str {
        match self {
            Self::Qkv => "attention.qkv",
            Self::LatentQuery => "attention.latent.query.up",
            Self::LatentKv => "attention.latent.kv.up",
            Self::Out => "attention.out",
            Self::GateUp => "feed_forward.Dense.gate_up",
            Self::Down => "feed_forward.Dense.down",
            Self::SharedGateUp => "feed_forward.Moe.shared.gate_up",
            Self::SharedDown => "feed_forward.Moe.shared.down",
        }
    }

    /// Returns the modules that its projection fuses in layer `index`, which has `outputs` output
    /// columns. Those of experts are none.
    pub fn parts(self, config: &DecoderConfig, index: usize, outputs: usize) -> Vec<Part> {
        let leaves = self.leaves(config);
        let (wide, narrow) = (config.heads * config.head, config.kv_heads * config.head);
        let widths = match (self, &config.block.latent) {
            (Self::Qkv, None) => vec![wide, narrow, narrow],
            (Self::Qkv, Some(latent)) => {
                let low = latent.kv_rank + latent.rope;
                vec![outputs - low, low]
            }
            _ => vec![outputs / leaves.len(); leaves.len()],
        };
        let parts = leaves.iter().zip(widths);
        let parts = parts.map(|(leaf, outputs)| Part {
            name: format!("{}{leaf}", layer(index)),
            outputs,
        });
        parts.collect()
    }

    /// Returns the names of the modules that read this input, outside of experts.
    pub(crate) fn leaves(self, config: &DecoderConfig) -> &'static [&'static str] {
        let latent = &config.block.latent;
        match self {
            Self::Qkv => match latent.map(|latent| latent.q_rank.is_some()) {
                None => &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                Some(true) => &["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
                Some(false) => &["self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"],
            },
            Self::LatentQuery => &["self_attn.q_b_proj"],
            Self::LatentKv => &["self_attn.kv_b_proj"],
            Self::Out => &["self_attn.o_proj"],
            Self::GateUp => &["mlp.gate_proj", "mlp.up_proj"],
            Self::Down => &["mlp.down_proj"],
            Self::SharedGateUp => &["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
            Self::SharedDown => &["mlp.shared_experts.down_proj"],
        }
    }
}

/// Names of the norms of latent attention: before the second projection of queries, and before
/// that of keys and values.
pub const LATENT_NORMS: [&str; 2] = ["self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"];

/// Name of the bias that a sigmoid router adds to scores for the choice of experts.
pub const CORRECTION: &str = "gate.e_score_correction_bias";

/// Suffixes of tensor names that a model does not use, with the reason.
const UNUSED: [(&str, &str); 3] = [
    (
        "rotary_emb.inv_freq",
        "frequencies of rotary positions, which follow from config.json",
    ),
    (
        "rotary_emb.cos_cached",
        "cosines of rotary positions, which follow from config.json",
    ),
    (
        "rotary_emb.sin_cached",
        "sines of rotary positions, which follow from config.json",
    ),
];

/// Returns the reason why a tensor of this name is not used, if it is known to have no meaning.
fn unused(config: &DecoderConfig, name: &str, shape: &[usize]) -> Option<&'static str> {
    if name.contains(".mlp.shared_experts.") && shape.contains(&0) {
        return Some("a shared expert without elements, as `n_shared_experts` is 0");
    }
    if is_extra(config, name) {
        return Some("a layer that predicts further tokens, which no text here is made with");
    }
    let found = UNUSED.iter().find(|(end, _)| name.ends_with(end));
    found.map(|(_, reason)| *reason)
}

/// Returns true if `name` is in a layer that predicts further tokens.
pub fn is_extra(config: &DecoderConfig, name: &str) -> bool {
    let first = config.layers.len();
    let index = name.strip_prefix("model.layers.").and_then(|rest| {
        let (index, _) = rest.split_once('.')?;
        index.parse::<usize>().ok()
    });
    index.is_some_and(|index| (first..first + config.extra_layers).contains(&index))
}

/// Differences between the tensors of a folder and those of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Differences {
    /// Names and shapes of missing tensors.
    pub missing: Vec<String>,
    /// Tensors whose shape or type is wrong, with the found and expected values.
    pub wrong: Vec<String>,
    /// Names of tensors that the model does not have.
    pub unknown: Vec<String>,
    /// Tensors that are known to have no meaning, with the reason.
    pub unused: Vec<(String, &'static str)>,
}

impl Differences {
    /// Returns the differences for which a folder is refused, one line per kind.
    pub fn problems(&self) -> Vec<String> {
        let all = [
            ("missing", &self.missing),
            ("not what the configuration says", &self.wrong),
            ("unknown", &self.unknown),
        ];
        let all = all.into_iter().filter(|(_, names)| !names.is_empty());
        all.map(|(what, names)| {
            let verb = match names.len() {
                1 => "tensor is",
                _ => "tensors are",
            };
            format!("{} {verb} {what}: {}", names.len(), list(names))
        })
        .collect()
    }

    /// Checks that there is no difference, except tensors known to have no meaning.
    ///
    /// # Errors
    /// Returns an error that names all differences, if any.
    pub fn check(&self) -> Result<()> {
        let problems = self.problems();
        ensure!(
            problems.is_empty(),
            "the tensors do not fit the configuration: {}",
            problems.join("; ")
        );
        Ok(())
    }
}

/// Compares tensors with the configuration: those of `tensors` named in `plain`, and the `packed`
/// modules, which have transformers names and, where known, shapes.
pub fn differences<'a>(
    config: &DecoderConfig,
    tensors: &TensorFolder,
    plain: impl IntoIterator<Item = &'a str>,
    packed: &BTreeMap<String, Option<[usize; 2]>>,
) -> Differences {
    let plain: BTreeSet<&str> = plain.into_iter().collect();
    let mut packed: BTreeMap<&str, Option<[usize; 2]>> = packed
        .iter()
        .map(|(name, shape)| (&**name, *shape))
        .collect();
    let mut found = Differences::default();
    let mut known = BTreeSet::new();
    for Expected { name, shape } in expected(config) {
        let wrong = |found: &[usize]| format!("`{name}` is {found:?}, not {shape:?}");
        let module = name.strip_suffix(".weight").unwrap_or(&name);
        if let Some(own) = packed.remove(module) {
            let own = own.filter(|own| own[..] != shape[..]);
            found.wrong.extend(own.map(|own| wrong(&own)));
        } else {
            match tensors.find(&name).filter(|_| plain.contains(&*name)) {
                None => found.missing.push(format!("`{name}` {shape:?}")),
                Some(tensor) if tensor.shape != shape => found.wrong.push(wrong(tensor.shape)),
                Some(tensor) if !tensor.is_float() => found.wrong.push(format!(
                    "`{name}` is of type {:?}, not F32, BF16 or F16",
                    tensor.dtype
                )),
                Some(_) => {}
            }
        }
        known.insert(name);
    }
    for name in plain.iter().filter(|name| !known.contains(**name)) {
        let bytes = |name: &str| tensors.find(name).map(|tensor| tensor.bytes());
        let shape = tensors.find(name).map_or(&[][..], |tensor| tensor.shape);
        if let Some(reason) = unused(config, name, shape) {
            found.unused.push(((*name).into(), reason));
        } else if config.tied && *name == HEAD && bytes(HEAD) == bytes(EMBEDDING) {
            found
                .unused
                .push(((*name).into(), "the embedding, which is the head"));
        } else if config.tied && *name == HEAD {
            found.unknown.push(format!(
                "`{name}`, which is not `{EMBEDDING}` although `tie_word_embeddings` is true"
            ));
        } else {
            found.unknown.push(format!("`{name}`"));
        }
    }
    let layers = packed.keys().map(|module| format!("`{module}`"));
    found.unknown.extend(layers);
    found
}

/// Returns all tensors of a model, grouped by layer.
pub fn expected(config: &DecoderConfig) -> Vec<Expected> {
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[usize]| {
        let shape = shape.to_vec();
        all.push(Expected { name, shape });
    };
    let (d_model, head) = (config.d_model, config.head);
    add(EMBEDDING.into(), &[config.vocab, d_model]);
    for (index, layer_config) in config.layers.iter().enumerate() {
        let path = layer(index);
        let mut linear = |name: &str, d_out: usize, d_in: usize, bias: bool| {
            add(format!("{path}{name}.weight"), &[d_out, d_in]);
            if bias {
                add(format!("{path}{name}.bias"), &[d_out]);
            }
        };
        let (wide, narrow) = (config.heads * head, config.kv_heads * head);
        let biases = config.block.biases;
        let latent = config.block.latent;
        match latent {
            None => {
                linear("self_attn.q_proj", wide, d_model, biases.qkv);
                linear("self_attn.k_proj", narrow, d_model, biases.qkv);
                linear("self_attn.v_proj", narrow, d_model, biases.qkv);
                linear("self_attn.o_proj", d_model, wide, biases.out);
            }
            Some(latent) => {
                let (query, low) = (config.heads * latent.query(), latent.kv_rank + latent.rope);
                match latent.q_rank {
                    None => linear("self_attn.q_proj", query, d_model, false),
                    Some(rank) => {
                        linear("self_attn.q_a_proj", rank, d_model, false);
                        linear("self_attn.q_b_proj", query, rank, false);
                    }
                }
                linear("self_attn.kv_a_proj_with_mqa", low, d_model, false);
                let [keys, values] = [latent.nope, latent.value].map(|size| config.heads * size);
                linear("self_attn.kv_b_proj", keys + values, latent.kv_rank, false);
                linear("self_attn.o_proj", d_model, values, biases.out);
            }
        }
        let [gate, up, down] = gate_up_down(config.family);
        match layer_config.feed_forward {
            FeedForwardConfig::Dense { hidden } => {
                linear("mlp.gate_proj", hidden, d_model, biases.feed_forward);
                linear("mlp.up_proj", hidden, d_model, biases.feed_forward);
                linear("mlp.down_proj", d_model, hidden, biases.feed_forward);
            }
            FeedForwardConfig::Moe {
                experts,
                hidden,
                shared,
                ..
            } => {
                let moe = moe(config.family);
                let (router, bias) = (router(config.family), biases.experts);
                linear(&format!("{moe}.{router}"), experts, d_model, bias);
                if let Some(hidden) = shared {
                    linear("mlp.shared_experts.gate_proj", hidden, d_model, false);
                    linear("mlp.shared_experts.up_proj", hidden, d_model, false);
                    linear("mlp.shared_experts.down_proj", d_model, hidden, false);
                }
                for expert in 0..experts {
                    let expert = format!("{moe}.experts.{expert}");
                    linear(&format!("{expert}.{gate}"), hidden, d_model, bias);
                    linear(&format!("{expert}.{up}"), hidden, d_model, bias);
                    linear(&format!("{expert}.{down}"), d_model, hidden, bias);
                }
            }
        }
        if let FeedForwardConfig::Moe {
            experts,
            scoring: Scoring::GroupedSigmoid { .. },
            ..
        } = layer_config.feed_forward
        {
            add(
                format!("{path}{}.{CORRECTION}", moe(config.family)),
                &[experts],
            );
        }
        if let Some(latent) = latent {
            let ranks = [latent.q_rank, Some(latent.kv_rank)];
            for (norm, rank) in LATENT_NORMS.into_iter().zip(ranks) {
                if let Some(rank) = rank {
                    add(format!("{path}{norm}.weight"), &[rank]);
                }
            }
        }
        let norms = norms(config);
        let all = [norms.attention, norms.feed_forward].into_iter();
        for norm in all.chain(norms.post.into_iter().flatten()) {
            add(format!("{path}{norm}.weight"), &[d_model]);
        }
        if config.block.sinks {
            add(format!("{path}{SINKS}"), &[config.heads]);
        }
        if config.block.qk_norm {
            for norm in ["q_norm", "k_norm"] {
                add(format!("{path}self_attn.{norm}.weight"), &[head]);
            }
        }
    }
    add(NORM.into(), &[d_model]);
    if !config.tied {
        add(HEAD.into(), &[config.vocab, d_model]);
    }
    all
}
