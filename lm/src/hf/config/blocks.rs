//! Fields of `config.json` that families share.

use anyhow::{Result, bail, ensure};
use burn_nvfp4::attention::MAX_HEAD;
use burn_nvfp4::experts::MAX_EXPERTS;
use serde_json::Value;

use super::super::fields::Fields;
use super::super::rope::Rope;
use super::types::{
    BlockConfig, DecoderConfig, Family, FeedForwardConfig, GateActivation, LayerConfig,
};

/// Values of absent fields, as in the class of transformers, and the arithmetic that no field
/// states.
pub(super) struct Defaults {
    /// True if each query head has keys and values of its own if `num_key_value_heads` is absent,
    /// as in models older than grouped-query attention.
    pub optional_kv_heads: bool,
    /// Head dimension; by default, `hidden_size` divided among the heads.
    pub head: Option<usize>,
    pub theta: f64,
    pub epsilon: f64,
    pub tied: bool,
    pub activation: GateActivation,
    /// Reads the rotary embeddings, given the default theta and the maximum context.
    pub ropes: fn(&Fields, f64, usize) -> Result<Vec<Rope>>,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            optional_kv_heads: false,
            head: None,
            theta: 1e4,
            epsilon: 1e-6,
            tied: false,
            activation: GateActivation::Silu,
            ropes: |fields, theta, max| Ok(vec![Rope::from_fields(fields, theta, max)?]),
        }
    }
}

/// Reads the fields that every family has, as a model without windows, biases and experts.
pub(super) fn decoder(
    fields: &Fields,
    family: Family,
    defaults: Defaults,
) -> Result<DecoderConfig> {
    let heads = fields.positive("num_attention_heads")?;
    let kv_heads = match fields.optional_positive("num_key_value_heads")? {
        Some(count) => count,
        None if defaults.optional_kv_heads || fields.has("num_key_value_heads") => heads,
        None => fields.positive("num_key_value_heads")?,
    };
    ensure!(
        heads.is_multiple_of(kv_heads),
        "`num_key_value_heads` is {kv_heads}, but must be a divisor of `num_attention_heads` \
         ({heads})"
    );
    let d_model = fields.positive("hidden_size")?;
    let head = head_size(fields, &defaults, d_model, heads)?;
    let max_positions = fields.positive("max_position_embeddings")?;
    check_activation(fields, defaults.activation)?;
    let partial = fields.number_or("partial_rotary_factor", 1.0)?;
    ensure!(
        partial == 1.0,
        "`partial_rotary_factor` is {partial}, but must be 1: whole heads are rotated"
    );
    let epsilon = fields.number_or("rms_norm_eps", defaults.epsilon)?;
    ensure!(
        epsilon.is_finite() && epsilon > 0.0,
        "`rms_norm_eps` is {epsilon}, but must be positive"
    );
    let count = fields.positive("num_hidden_layers")?;
    ensure!(
        count <= 10_000,
        "`num_hidden_layers` is {count}, but can be 10000 at most"
    );
    let layer = LayerConfig {
        window: None,
        rope: 0,
        feed_forward: FeedForwardConfig::Dense {
            hidden: fields.positive("intermediate_size")?,
        },
    };
    Ok(DecoderConfig {
        family,
        vocab: fields.positive("vocab_size")?,
        d_model,
        heads,
        kv_heads,
        head,
        layers: vec![layer; count],
        epsilon,
        ropes: (defaults.ropes)(fields, defaults.theta, max_positions)?,
        block: BlockConfig {
            activation: defaults.activation,
            ..BlockConfig::default()
        },
        scaled_embedding: false,
        logit_cap: None,
        max_positions,
        extra_layers: 0,
        tied: fields.bool_or("tie_word_embeddings", defaults.tied)?,
        bos: fields.token("bos_token_id")?,
        eos: fields.tokens("eos_token_id")?,
        pad: fields.token("pad_token_id")?,
    })
}

fn head_size(fields: &Fields, defaults: &Defaults, d_model: usize, heads: usize) -> Result<usize> {
    let head = match fields.optional_positive("head_dim")?.or(defaults.head) {
        Some(head) => head,
        None => {
            ensure!(
                d_model.is_multiple_of(heads),
                "`hidden_size` ({d_model}) must be a multiple of `num_attention_heads` ({heads}) \
                 where there is no `head_dim`"
            );
            d_model / heads
        }
    };
    ensure!(
        head <= MAX_HEAD,
        "the size of a head is {head}, but attention takes at most {MAX_HEAD}"
    );
    ensure!(
        head.is_multiple_of(2),
        "the size of a head is {head}, but must be even for rotary positions"
    );
    Ok(head)
}

fn check_activation(fields: &Fields, activation: GateActivation) -> Result<()> {
    let (names, expected): (&[&'static str], &[&str]) = match activation {
        GateActivation::Silu | GateActivation::ClampedSwiGlu { .. } => {
            (&["hidden_act"], &["silu", "swish"])
        }
        GateActivation::GeluTanh => (&["hidden_activation", "hidden_act"], &["gelu_pytorch_tanh"]),
    };
    for &name in names {
        if let Some(found) = fields.optional_string(name)? {
            ensure!(
                expected.contains(&found),
                "`{name}` is `{found}`, but must be `{}`",
                expected[0]
            );
        }
    }
    Ok(())
}

/// Returns an error if a field states a bias that the family lacks.
pub(super) fn refuse_biases(fields: &Fields, family: Family, names: &[&'static str]) -> Result<()> {
    for &name in names {
        ensure!(
            !fields.bool_or(name, false)?,
            "`{name}` is true, but a model of type `{}` has no such bias",
            family.model_type()
        );
    }
    Ok(())
}

/// Sliding window of a model.
pub(super) struct Sliding {
    /// Maximum number of keys per query.
    pub window: Option<usize>,
    /// `use_sliding_window`.
    pub is_used: Option<bool>,
    /// `max_window_layers`: number of the first layers without a window.
    pub full_layers: Option<usize>,
}

impl Sliding {
    /// Reads the fields; `default` is the window if `sliding_window` is absent.
    pub fn read(fields: &Fields, default: Option<usize>) -> Result<Self> {
        Ok(Self {
            window: match fields.has("sliding_window") {
                true => fields.optional_positive("sliding_window")?,
                false => default,
            },
            is_used: fields.optional_bool("use_sliding_window")?,
            full_layers: fields.optional_count("max_window_layers")?,
        })
    }
}

/// Gives layers the window `window`: those listed in `layer_types`, or those for which `is_sliding`
/// returns true.
pub(super) fn set_windows(
    fields: &Fields,
    config: &mut DecoderConfig,
    window: Option<usize>,
    is_sliding: impl Fn(usize) -> bool,
) -> Result<()> {
    let count = config.layers.len();
    let Some(types) = fields.take("layer_types").filter(|types| !types.is_null()) else {
        ensure!(
            window.is_some() || !(0..count).any(&is_sliding),
            "`sliding_window` is null, but layers of a model of type `{}` have a window unless \
             `layer_types` says otherwise",
            config.family.model_type()
        );
        for (index, layer) in config.layers.iter_mut().enumerate() {
            layer.window = window.filter(|_| is_sliding(index));
        }
        return Ok(());
    };
    let types = types.as_array().map_or(&[][..], |types| types);
    ensure!(
        types.len() == count,
        "`layer_types` has {} entries, but must have {count}, one for each layer",
        types.len()
    );
    for (index, (layer, kind)) in config.layers.iter_mut().zip(types).enumerate() {
        layer.window = match kind.as_str() {
            Some("full_attention") => None,
            Some("sliding_attention") if window.is_some() => window,
            Some("sliding_attention") => bail!(
                "`layer_types[{index}]` is sliding_attention, but there is no `sliding_window` in \
                 use: it must be a number, and `use_sliding_window` must be true where a family has \
                 it"
            ),
            _ => bail!(
                "`layer_types[{index}]` is {kind}, but must be full_attention or sliding_attention"
            ),
        };
    }
    Ok(())
}

/// Gives all layers the window `window`. transformers does not read `layer_types` in these families,
/// so it must agree.
pub(super) fn set_window(
    fields: &Fields,
    config: &mut DecoderConfig,
    window: Option<usize>,
) -> Result<()> {
    set_windows(fields, config, window, |_| window.is_some())?;
    let other = config.layers.iter().position(|it| it.window != window);
    ensure!(
        other.is_none(),
        "`layer_types[{}]` is full_attention, but `sliding_window` is {}: a model of type `{}` has \
         its window in all layers",
        other.unwrap_or_default(),
        window.unwrap_or_default(),
        config.family.model_type()
    );
    Ok(())
}

/// Returns the number of experts and of those per token. transformers takes the two `names` of the
/// count for one field.
pub(super) fn experts(fields: &Fields, names: [&'static str; 2]) -> Result<[usize; 2]> {
    let [first, second] = names;
    let experts = match fields.optional_positive(second)? {
        Some(experts) => {
            let other = fields.positive_or(first, experts)?;
            ensure!(
                other == experts,
                "`{first}` is {other}, but `{second}` is {experts}: they are the same"
            );
            experts
        }
        None => fields.positive(first)?,
    };
    let top_k = fields.positive("num_experts_per_tok")?;
    ensure!(
        experts <= MAX_EXPERTS,
        "the number of experts is {experts}, but a layer has at most {MAX_EXPERTS}"
    );
    ensure!(
        top_k <= experts,
        "`num_experts_per_tok` is {top_k}, but there are {experts} experts"
    );
    Ok([experts, top_k])
}

/// Reads a soft cap, whose value is `default` if the field is absent and none if it is `null`.
pub(super) fn soft_cap(
    fields: &Fields,
    name: &'static str,
    default: Option<f32>,
) -> Result<Option<f32>> {
    let cap = match fields.take(name) {
        None => default,
        Some(Value::Null) => None,
        Some(_) => fields.optional_number(name)?.map(|cap| cap as f32),
    };
    if let Some(cap) = cap {
        ensure!(
            cap.is_finite() && cap > 0.0,
            "`{name}` is {cap}, but must be a positive number or null"
        );
    }
    Ok(cap)
}
