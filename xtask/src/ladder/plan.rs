//! The plan of runs (`ladder/plan.json`).

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The plan of the workspace.
pub const PLAN: &str = include_str!("../../ladder/plan.json");

/// Shapes, recipes, and runs in order.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Description for readers of the file.
    #[serde(rename = "about")]
    _about: String,
    vocabulary: u64,
    /// Tokens per row.
    context: u64,
    weight_decay: f64,
    grad_clip: f64,
    /// Warm-up of the learning rate, as a share of the steps.
    warmup: f64,
    /// Steps between two logged training losses.
    pub log_every: u64,
    eval_every: u64,
    eval_rows: u64,
    checkpoint_every: u64,
    shapes: BTreeMap<String, Shape>,
    /// Recipes that are not presets, as the fields of a recipe file.
    recipes: BTreeMap<String, Value>,
    runs: Vec<Group>,
}

/// A Llama shape and its training options.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shape {
    layers: u64,
    width: u64,
    heads: u64,
    feed_forward: u64,
    lr: f64,
    /// Tokens per run.
    tokens: u64,
    /// Number of corpus shards to train on, counted from the first.
    shards: usize,
    /// Rows per forward pass.
    batch: u64,
    /// Forward passes per step.
    accumulate: u64,
    /// Expected speed until a run has been measured.
    tokens_per_s: f64,
}

/// Runs of one shape: each recipe with each seed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    shape: String,
    recipes: Vec<String>,
    seeds: Vec<u64>,
    /// Tokens per run, if different from the shape's.
    #[serde(default)]
    tokens: Option<u64>,
}

/// A run of the plan, in the format of `ladder/run.py`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// Shape, recipe and seed, and the tokens if different from the shape's.
    pub name: String,
    /// Name of the shape.
    pub shape: String,
    /// Name of the recipe.
    pub recipe: String,
    /// Fields of the recipe; none for a preset.
    pub fields: Option<Value>,
    /// Seed of the weights, the row order, and the recipe.
    pub seed: u64,
    /// Number of training tokens, in whole steps.
    pub tokens: u64,
    /// Contents of the model's config.json.
    pub config: Value,
    /// Options of `nvfp4 pretrain`.
    pub options: Vec<String>,
    /// Number of training shards.
    #[serde(skip)]
    pub shards: usize,
    /// Expected tokens per second.
    #[serde(skip)]
    pub tokens_per_s: f64,
}

impl Run {
    /// Returns the value of an option of `nvfp4 pretrain`.
    pub fn option(&self, name: &str) -> Option<&str> {
        let at = self.options.iter().position(|option| option == name)?;
        self.options.get(at + 1).map(String::as_str)
    }
}

impl Plan {
    /// Reads a plan.
    ///
    /// # Errors
    /// Returns an error if it is malformed, names an unknown shape, or repeats a run.
    pub fn parse(text: &str) -> Result<Self> {
        let plan: Self = serde_json::from_str(text).context("the plan of the ladder")?;
        let mut names: Vec<String> = plan.runs()?.into_iter().map(|run| run.name).collect();
        names.sort();
        for pair in names.windows(2) {
            ensure!(pair[0] != pair[1], "the plan has run {} twice", pair[0]);
        }
        Ok(plan)
    }

    /// Returns all runs in order.
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
        // As in the published ladder; at least one step remains after the warm-up of a short run.
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
