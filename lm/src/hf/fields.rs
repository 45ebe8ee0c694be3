//! Typed access to the fields of a JSON object; records which fields were read.

use std::cell::RefCell;
use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};

/// Fields of `config.json` that do not affect inference.
const HARMLESS: &[&str] = &[
    "attn_implementation",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "expert_interval",
    "experts_implementation",
    "is_decoder",
    "is_llama_config",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Substrings of field names that matter only in training: dropouts, factors of auxiliary losses
/// (`router_z_loss_coef`), noise of routers (`router_jitter_noise`), initial weights.
const TRAINING: [&str; 4] = ["drop", "initializer", "jitter", "loss"];

/// Substrings of field names that may affect the computation.
const ARITHMETIC: &[&str] = &[
    "act",
    "adapter",
    "alibi",
    "attention",
    "attn",
    "audio",
    "bias",
    "bidirectional",
    "cap",
    "causal",
    "clip",
    "compress",
    "_conv",
    "conv_",
    "cross",
    "dim",
    "embed",
    "encoder",
    "_eps",
    "expert",
    "factor",
    "gate",
    "hadamard",
    "head",
    "hidden",
    "interleave",
    "kv",
    "layer",
    "logit",
    "lora",
    "mamba",
    "mlp",
    "moe",
    "multiplier",
    "norm",
    "parallel",
    "position",
    "quant",
    "residual",
    "rope",
    "rotary",
    "rotation",
    "router",
    "scal",
    "sink",
    "size",
    "sliding",
    "sparse",
    "ssm",
    "swiglu",
    "theta",
    "vision",
    "window",
];

/// A JSON object, with the set of fields that were read.
pub(crate) struct Fields<'a> {
    json: &'a Map<String, Value>,
    read: RefCell<BTreeSet<&'static str>>,
}

impl<'a> Fields<'a> {
    pub fn new(json: &'a Map<String, Value>) -> Self {
        Self {
            json,
            read: RefCell::new(BTreeSet::new()),
        }
    }

    /// Returns true if the field exists, even if it is `null`.
    pub fn has(&self, field: &'static str) -> bool {
        self.take(field).is_some()
    }

    /// Returns the raw value of the field.
    pub fn take(&self, field: &'static str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(field);
        self.json.get(field)
    }

    /// Returns the field, unless it is absent or `null`.
    fn value(&self, field: &'static str) -> Option<&'a Value> {
        self.take(field).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        field: &'static str,
        expected: &str,
        of: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        let typed =
            of(value).with_context(|| format!("`{field}` is {value}, but must be {expected}"));
        typed.map(Some)
    }

    pub fn optional_string(&self, field: &'static str) -> Result<Option<&'a str>> {
        self.typed(field, "a string", Value::as_str)
    }

    pub fn string(&self, field: &'static str) -> Result<&'a str> {
        required(field, self.optional_string(field)?)
    }

    pub fn optional_bool(&self, field: &'static str) -> Result<Option<bool>> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub fn bool_or(&self, field: &'static str, default: bool) -> Result<bool> {
        Ok(self.optional_bool(field)?.unwrap_or(default))
    }

    /// Returns the field, and false if it is null, as in Python, where null counts as false.
    pub fn truth_or(&self, field: &'static str, default: bool) -> Result<bool> {
        self.bool_or(field, default && !self.has(field))
    }

    pub fn optional_number(&self, field: &'static str) -> Result<Option<f64>> {
        self.typed(field, "a number", Value::as_f64)
    }

    pub fn number_or(&self, field: &'static str, default: f64) -> Result<f64> {
        Ok(self.optional_number(field)?.unwrap_or(default))
    }

    /// Returns a count from 1 to 2³¹ - 1, so that the product of two fits a `usize`.
    pub fn optional_positive(&self, field: &'static str) -> Result<Option<usize>> {
        self.typed(field, "a number from 1 to 2147483647", |value| {
            let count = usize::try_from(value.as_u64()?).ok()?;
            (1..=i32::MAX as usize).contains(&count).then_some(count)
        })
    }

    /// Returns a count from 0 to 2³¹ - 1.
    pub fn optional_count(&self, field: &'static str) -> Result<Option<usize>> {
        self.typed(field, "a whole number from 0 to 2147483647", |value| {
            let count = usize::try_from(value.as_u64()?).ok()?;
            (count <= i32::MAX as usize).then_some(count)
        })
    }

    pub fn positive(&self, field: &'static str) -> Result<usize> {
        required(field, self.optional_positive(field)?)
    }

    pub fn positive_or(&self, field: &'static str, default: usize) -> Result<usize> {
        Ok(self.optional_positive(field)?.unwrap_or(default))
    }

    /// Returns the ID of a token.
    pub fn token(&self, field: &'static str) -> Result<Option<u32>> {
        // Some files write -1 for an absent token.
        if self.value(field).and_then(Value::as_i64) == Some(-1) {
            return Ok(None);
        }
        self.typed(field, "the id of a token", token)
    }

    /// Returns the IDs of tokens; a single one may be written without a list.
    pub fn tokens(&self, field: &'static str) -> Result<Vec<u32>> {
        let tokens = self.typed(
            field,
            "the id of a token, or a list of them",
            |value| match value.as_array() {
                Some(tokens) => tokens.iter().map(token).collect(),
                None => Some(vec![token(value)?]),
            },
        );
        Ok(tokens?.unwrap_or_default())
    }

    /// Returns a list of numbers below `count`.
    pub fn indices(&self, field: &'static str, count: usize) -> Result<Vec<usize>> {
        let expected = format!("a list of numbers below {count}");
        let indices = self.typed(field, &expected, |value| {
            let index = |value: &Value| value.as_u64().map(|i| i as usize).filter(|i| *i < count);
            value.as_array()?.iter().map(index).collect()
        });
        Ok(indices?.unwrap_or_default())
    }

    /// Returns an error if a field that was not read may affect the computation.
    pub fn refuse_unknown(&self) -> Result<()> {
        let unknown: Vec<String> = self
            .unread()
            .filter(|(name, value)| {
                !HARMLESS.contains(&name.as_str())
                    && !name.starts_with('_')
                    && !TRAINING.iter().any(|part| name.contains(part))
                    && ARITHMETIC.iter().any(|part| name.contains(part))
                    && !is_neutral(name, value)
            })
            .map(|(name, value)| format!("`{name}` ({value})"))
            .collect();
        ensure!(
            unknown.is_empty(),
            "fields that may change what the model computes, and that are not supported: {}",
            unknown.join(", ")
        );
        Ok(())
    }

    /// Returns the fields that were not read.
    pub fn unread(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        let read = self.read.borrow().clone();
        let all = self.json.iter();
        all.filter(move |(name, _)| !read.contains(name.as_str()))
    }

    /// Returns an error if there is a field that was not read, unless its value is neutral.
    pub fn refuse_all_unknown(&self, whole: &str) -> Result<()> {
        let mut unknown = self
            .unread()
            .filter(|(name, value)| !is_neutral(name, value));
        match unknown.next() {
            None => Ok(()),
            Some((name, value)) => {
                anyhow::bail!("`{whole}` has a field `{name}` ({value}), which is not known")
            }
        }
    }
}

/// Returns true if this value means that the field's feature is absent.
pub(crate) fn is_neutral(name: &str, value: &Value) -> bool {
    let is_factor = ["multiplier", "scal", "factor"]
        .iter()
        .any(|part| name.contains(part));
    let neutral = if is_factor { 1.0 } else { 0.0 };
    match value {
        Value::Null => true,
        // Attention is causal by default.
        Value::Bool(value) => *value == name.contains("causal"),
        Value::Number(number) => number.as_f64() == Some(neutral),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
    }
}

fn token(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn required<T>(field: &str, value: Option<T>) -> Result<T> {
    value.with_context(|| format!("`{field}` is absent"))
}
