//! The plan of runs (`ladder/plan.json`), and which of them comes next.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The plan that the workspace has.
pub const PLAN: &str = include_str!("../../ladder/plan.json");

/// Shapes, recipes, and the runs in their order.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// For readers of the file.
    #[serde(rename = "about")]
    _about: String,
    vocabulary: u64,
    /// Tokens of a row.
    context: u64,
    weight_decay: f64,
    grad_clip: f64,
    /// Share of the steps over which the learning rate rises.
    warmup: f64,
    /// Steps between two losses of training.
    pub log_every: u64,
    eval_every: u64,
    eval_rows: u64,
    checkpoint_every: u64,
    shapes: BTreeMap<String, Shape>,
    /// Recipes that are no presets: the fields of a recipe's file.
    recipes: BTreeMap<String, Value>,
    runs: Vec<Group>,
}

/// A Llama, and how it is trained.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shape {
    layers: u64,
    width: u64,
    heads: u64,
    feed_forward: u64,
    lr: f64,
    /// Tokens of a run.
    tokens: u64,
    /// Shards of the corpus that its runs train on, the first ones.
    shards: usize,
    /// Rows of a forward.
    batch: u64,
    /// Forwards of a step.
    accumulate: u64,
    /// Expected until a run has been measured.
    tokens_per_s: f64,
}

/// Runs of one shape: each recipe with each seed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    shape: String,
    recipes: Vec<String>,
    seeds: Vec<u64>,
    /// Other than those of the shape.
    #[serde(default)]
    tokens: Option<u64>,
}

/// A run of the plan, as `ladder/run.py` reads it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// Shape, recipe and seed, and the tokens where they are not those of the shape.
    pub name: String,
    /// The name of its shape.
    pub shape: String,
    /// The name of its recipe.
    pub recipe: String,
    /// The fields of the recipe; none of a preset.
    pub fields: Option<Value>,
    /// Of the weights, the order of rows, and the recipe.
    pub seed: u64,
    /// Tokens that it trains on, whole steps.
    pub tokens: u64,
    /// The model's config.json.
    pub config: Value,
    /// Options of `nvfp4 pretrain`.
    pub options: Vec<String>,
    /// Number of shards that it trains on.
    #[serde(skip)]
    pub shards: usize,
    /// Tokens per second that the plan expects.
    #[serde(skip)]
    pub tokens_per_s: f64,
}

impl Run {
    /// The value of an option of `nvfp4 pretrain`.
    pub fn option(&self, name: &str) -> Option<&str> {
        let at = self.options.iter().position(|option| option == name)?;
        self.options.get(at + 1).map(String::as_str)
    }
}

impl Plan {
    /// Reads a plan.
    ///
    /// # Errors
    /// Returns an error if it is malformed, names an unknown shape, or has a run twice.
    pub fn parse(text: &str) -> Result<Self> {
        let plan: Self = serde_json::from_str(text).context("the plan of the ladder")?;
        let mut names: Vec<String> = plan.runs()?.into_iter().map(|run| run.name).collect();
        names.sort();
        for pair in names.windows(2) {
            ensure!(pair[0] != pair[1], "the plan has run {} twice", pair[0]);
        }
        Ok(plan)
    }

    /// All runs in their order.
    ///
    /// # Errors
    /// Returns an error if a group names an unknown shape.
    pub fn runs(&self) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        for group in &self.runs {
            for &seed in &group.seeds {
                for recipe in &group.recipes {
                    runs.push(self.run(group, recipe, seed)?);
                }
            }
        }
        Ok(runs)
    }

    fn run(&self, group: &Group, recipe: &str, seed: u64) -> Result<Run> {
        let names: Vec<&String> = self.shapes.keys().collect();
        let shape = self.shapes.get(&group.shape).with_context(|| {
            let found = &group.shape;
            format!("the plan has runs of shape {found}, but its shapes are {names:?}")
        })?;
        let of_step = shape.batch * shape.accumulate * self.context;
        let steps = (group.tokens.unwrap_or(shape.tokens) as f64 / of_step as f64).round() as u64;
        ensure!(
            steps > 0,
            "the plan has runs of shape {} without a step",
            group.shape
        );
        let mut name = format!("{}-{recipe}-s{seed}", group.shape);
        if let Some(tokens) = group.tokens.filter(|tokens| *tokens != shape.tokens) {
            name += &format!("-{}m", tokens / 1_000_000);
        }
        Ok(Run {
            name,
            shape: group.shape.clone(),
            recipe: recipe.to_owned(),
            fields: self.recipes.get(recipe).cloned(),
            seed,
            tokens: steps * of_step,
            config: self.config(shape),
            options: self.options(shape, steps, seed),
            shards: shape.shards,
            tokens_per_s: shape.tokens_per_s,
        })
    }

    fn config(&self, shape: &Shape) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": shape.width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "intermediate_size": shape.feed_forward,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "tie_word_embeddings": false,
            "initializer_range": 0.02,
            "bos_token_id": null,
            "eos_token_id": 0,
            "pad_token_id": null,
        })
    }

    fn options(&self, shape: &Shape, steps: u64, seed: u64) -> Vec<String> {
        // As in the published ladder, at least a step where a run is short.
        let warmup = ((steps as f64 * self.warmup).round() as u64).min(steps - 1);
        let given = [
            ("--steps", steps.to_string()),
            ("--batch", shape.batch.to_string()),
            ("--accumulate", shape.accumulate.to_string()),
            ("--context", self.context.to_string()),
            ("--lr", shape.lr.to_string()),
            ("--warmup", warmup.to_string()),
            ("--weight-decay", self.weight_decay.to_string()),
            ("--grad-clip", self.grad_clip.to_string()),
            ("--seed", seed.to_string()),
            ("--log-every", self.log_every.to_string()),
            ("--eval-every", self.eval_every.to_string()),
            ("--eval-rows", self.eval_rows.to_string()),
            ("--checkpoint-every", self.checkpoint_every.to_string()),
        ];
        let pairs = given
            .into_iter()
            .flat_map(|(name, value)| [name.to_owned(), value]);
        pairs.collect()
    }
}
