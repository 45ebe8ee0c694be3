//! Values of the presets.

use std::collections::BTreeMap;

use super::choices::{Activation, GradReduce, ModelKind, OptimizerName, Preset, RecipeName};
use super::model::ModelConfig;
use super::run::RunConfig;

/// Returns a dense model with these sizes: width, layers, heads, hidden, context.
fn model([width, layers, heads, hidden, context]: [usize; 5]) -> ModelConfig {
    ModelConfig {
        width,
        layers,
        heads,
        hidden,
        context,
        experts: None,
        top_k: ModelConfig::TOP_K,
    }
}

impl RunConfig {
    /// Returns the values of a preset, in NVFP4, on `device`.
    pub fn preset(preset: Preset, device: &str) -> Self {
        let gpu = device.starts_with("cuda");
        let tiny = Self {
            preset,
            recipe: RecipeName::nvidia(),
            compare: match preset {
                Preset::Tiny if gpu => vec![RecipeName::bf16()],
                Preset::Tiny => vec![RecipeName::f32()],
                _ => Vec::new(),
            },
            recipes: BTreeMap::new(),
            healing: None,
            schedule: None,
            decorate: None,
            device: device.into(),
            activation: match gpu {
                true => Activation::Bf16,
                false => Activation::F32,
            },
            data: Vec::new(),
            data_bytes: 32 << 20,
            model: model([128, 4, 4, 352, 128]),
            balance_loss: None,
            steps: 300,
            batch: 8,
            accumulate: 1,
            optimizer: OptimizerName::default(),
            lr: 4e-3,
            warmup: 40,
            weight_decay: 0.1,
            grad_clip: 1.0,
            seed: 0,
            eval_every: 50,
            eval_batches: 8,
            log_every: 10,
            checkpoint_every: 100,
            telemetry_every: 0,
            recompute: 0,
            no_graph: false,
            dp: None,
            tp: 1,
            ep: 1,
            ep_dispatch: None,
            fsdp: false,
            zero1: false,
            grad_reduce: GradReduce::F32,
            rht: true,
            stochastic_rounding: true,
            weight_2d: true,
            rht_signs: None,
            high_precision: Vec::new(),
        };
        // Presets for GPUs.
        let large = Self {
            data_bytes: 512 << 20,
            batch: 64,
            warmup: 200,
            eval_every: 250,
            checkpoint_every: 500,
            ..tiny.clone()
        };
        let ten = Self {
            model: model([448, 4, 4, 1216, 256]),
            batch: 328,
            steps: 3_000,
            lr: 2e-3,
            warmup: 300,
            eval_batches: 16,
            ..large.clone()
        };
        match preset {
            Preset::Tiny => tiny,
            Preset::Small => Self {
                data_bytes: 128 << 20,
                model: model([256, 8, 4, 704, 256]),
                steps: 2000,
                batch: 32,
                lr: 2e-3,
                warmup: 100,
                eval_every: 100,
                ..tiny
            },
            Preset::M10 => ten,
            Preset::Moe10M => Self {
                model: ModelConfig {
                    experts: ModelKind::Moe.experts(),
                    ..model([256, 4, 4, 352, 256])
                },
                ..ten
            },
            Preset::M30 => Self {
                model: model([512, 9, 8, 1408, 512]),
                steps: 4000,
                lr: 1e-3,
                ..large
            },
            Preset::M125 => Self {
                model: model([768, 17, 12, 2048, 512]),
                steps: 10_000,
                lr: 6e-4,
                ..large
            },
        }
    }
}
