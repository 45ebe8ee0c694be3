//! Device memory of a step of `nvfp4 train`.

use super::{ACCUMULATE, Advice, MemoryBudget, RECOMPUTE, StepSizes};
use crate::config::{ExpertDispatchName, RecipeName, RunConfig, VOCABULARY};

/// Returns the memory budget of the run `config` with `recipe`. It depends on the type of the
/// activations, which all phases of a schedule share, and not on the formats of the operands: it
/// holds for every phase.
pub fn budget(config: &RunConfig, recipe: &RecipeName) -> MemoryBudget {
    let sizes = sizes(config, recipe);
    let is_gpu = config.device.starts_with("cuda");
    let options = [
        Some(ACCUMULATE),
        (config.decorate.is_none() && sizes.can_recompute()).then_some(RECOMPUTE),
        is_gpu.then_some("or more GPUs (nvfp4 launch), which share each batch"),
    ];
    MemoryBudget {
        device: config.device.clone(),
        need: sizes.need(),
        batch: config.batch,
        context: config.model.context,
        ranks: config.ranks_together(),
        advice: Advice {
            elements: "bytes",
            smaller_model: "a smaller model (--preset, --width, --layers, --hidden)",
            options: options.into_iter().flatten().collect(),
            narrower: (*recipe == RecipeName::f32()).then_some("--recipe bf16"),
        },
    }
}

/// Returns the sizes of a step of the run `config` with `recipe`.
fn sizes(config: &RunConfig, recipe: &RecipeName) -> StepSizes {
    let model = &config.model;
    let element = config.activation_of(recipe).bytes();
    let is_encoder = config.decorate.is_some();
    // With an all-gather, a rank may receive the tokens of all ranks that share its experts.
    let shared = match config.expert_dispatch() {
        ExpertDispatchName::AllGather => config.ep,
        ExpertDispatchName::AllToAll => 1,
    };
    let experts = model.experts.map_or(1, |_| model.top_k * shared);
    // Inputs of both norms, queries, keys and values; inputs of the feed-forward's activation.
    let inner = match is_encoder {
        true => model.hidden,
        false => 2 * model.hidden * experts,
    };
    let parameters = config.parameters_of_rank() as u64;
    let ranks = config.ranks_together() as u64;
    let (of_ep, of_tp) = (config.ep as u64, config.tp as u64);
    let experts = model.expert_parameters() as u64 / of_ep;
    // Experts are sharded over the ranks that hold the same ones; all other parameters over all
    // ranks of the batch.
    let sharded = (parameters - experts) / ranks + experts / (ranks * of_tp / of_ep).max(1);
    let [trained, optimized] = [config.fsdp, config.fsdp || config.zero1]
        .map(|is_sharded| if is_sharded { sharded } else { parameters });
    StepSizes {
        trained,
        optimized,
        // Burn's layers have parameters in the type of the activations; ours are f32 master
        // weights.
        parameter: if is_encoder { element as u64 } else { 4 },
        frozen: 0,
        tokens: (config.batch * model.context) as u64,
        // The ranks of a tensor group split the heads, the hidden features, or the tokens.
        ranks: ranks * of_tp,
        activation: element as u64,
        layers: vec![[5 * model.width, inner]; model.layers],
        recompute: config.recompute,
        // One-hot bytes, as inputs and as targets, and their probabilities in f32.
        others: (VOCABULARY * (element + 4 + 4)) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Activation, Preset};

    #[test]
    fn the_need_is_counted() {
        let mut config = RunConfig::preset(Preset::Tiny, "cuda:0");
        let need = sizes(&config, &config.recipe).need();
        let parameters = config.parameters() as u64;
        assert_eq!(
            (need.weights, need.optimizer),
            (4 * parameters, 8 * parameters)
        );
        let block = 2 * (5 * 128 + 2 * 352);
        assert_eq!(need.activations, 8 * 128 * (4 * block + 256 * 10));
        // Recomputed inputs are not saved.
        config.recompute = 3;
        let fewer = sizes(&config, &config.recipe).need();
        let saved = need.activations - fewer.activations;
        assert_eq!(saved, 8 * 128 * 3 * 2 * 2 * 352);
        config.recompute = 0;
        // In f32 each activation is twice as large; with two GPUs each takes half of the batch.
        config.activation = Activation::F32;
        let wide = sizes(&config, &config.recipe).need();
        assert_eq!(wide.activations, 8 * 128 * (4 * 2 * block + 256 * 12));
        config.dp = Some(2);
        let half = sizes(&config, &config.recipe).need();
        assert_eq!(2 * half.activations, wide.activations);
        // A tensor group splits all of it; experts are on some ranks of the batch.
        (config.dp, config.tp) = (None, 2);
        let half = sizes(&config, &config.recipe).need();
        assert_eq!(2 * half.activations, wide.activations);
        assert_eq!(half.weights, 4 * parameters / 2);
        // Each expert is whole on one rank; the ranks have different tokens.
        (config.tp, config.ep, config.model.experts) = (2, 2, Some(4));
        let both = sizes(&config, &config.recipe).need();
        assert_eq!(both.weights, 4 * config.parameters() as u64 / 2);
        (config.tp, config.ep) = (1, 1);
        let experts = config.model.expert_parameters() as u64;
        let all = sizes(&config, &config.recipe).need();
        config.ep = 2;
        let own = sizes(&config, &config.recipe).need();
        assert_eq!(all.weights - own.weights, 4 * experts / 2);
        // Gate and up activations for the tokens of both ranks: an all-gather sends the tokens to
        // both.
        config.ep_dispatch = Some(ExpertDispatchName::AllToAll);
        let sent = sizes(&config, &config.recipe).need();
        assert_eq!(sent.activations, all.activations);
        let gate_up = 8 * 128 * (4 * 2 * 2 * 352 * 2 * 2);
        assert_eq!(own.activations - sent.activations, gate_up);
        // When sharded, each of four ranks holds a quarter of both.
        (config.dp, config.fsdp) = (Some(4), true);
        let shard = sizes(&config, &config.recipe).need();
        assert_eq!(4 * shard.weights, all.weights);
    }
}
