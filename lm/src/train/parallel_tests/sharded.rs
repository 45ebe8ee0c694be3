//! Tests sharding of parameters or optimizer state over ranks that hold the same part of the model.

use super::*;

/// Returns layouts of four ranks in which pairs share a part of the model.
fn layouts(steps: u64) -> [RunConfig; 3] {
    [
        tensor_parallel(steps, 2),
        experts(steps, 2),
        tensor_and_experts(steps, 2, 2),
    ]
}

/// Disables clipping, because sharding changes the summation order of the global gradient norm.
fn without_clipping(config: RunConfig) -> RunConfig {
    RunConfig {
        grad_clip: 1e9,
        ..config
    }
}

/// Returns a layout with one expert per rank; ranks with the same expert do not shard it.
fn lone_experts(steps: u64) -> RunConfig {
    let mut config = experts(steps, 2);
    config.model.experts = Some(2);
    config
}

/// Returns the losses, and the final parameters and moments.
fn trained(config: &RunConfig, corpus: &Corpus) -> (Vec<f64>, Checkpoint) {
    let folder = Folder::new();
    let losses = losses(config, corpus, &folder, 4);
    (losses, folder.checkpoint())
}

/// The results match bit by bit: in high precision, where each rank gathers unquantized weights,
/// and in NVFP4.
#[test]
fn parts_that_are_sharded_train_as_whole_ones() {
    let corpus = corpus();
    // The last step starts from moments and weights that the shards have updated twice.
    let steps = 3;
    let quantized = layouts(steps).into_iter().chain([lone_experts(steps)]);
    for config in layouts(steps).into_iter().chain(quantized.map(nvfp4)) {
        let config = without_clipping(config);
        let (expected, at_end) = trained(&config, &corpus);
        for sharded in [fsdp(config.clone()), zero1(config.clone())] {
            let (found, checkpoint) = trained(&sharded, &corpus);
            let (tp, ep) = (config.tp, config.ep);
            assert_eq!(found, expected, "tp {tp}, ep {ep}, fsdp {}", sharded.fsdp);
            assert_same(&checkpoint, &at_end);
        }
    }
}

/// Each parameter counts once in the norm: after one step, clipped to a small norm, the moments
/// match those of ranks without sharding.
#[test]
fn gradients_are_clipped_to_the_same_norm() {
    let corpus = corpus();
    for config in layouts(1).into_iter().chain([lone_experts(1)]) {
        let clipped = RunConfig {
            grad_clip: 0.01,
            ..config
        };
        let (_, expected) = trained(&clipped, &corpus);
        let (_, free) = trained(&without_clipping(clipped.clone()), &corpus);
        assert!(distance(&free.optimizer, &expected.optimizer) > 0.1);
        for sharded in [fsdp(clipped.clone()), zero1(clipped.clone())] {
            let (_, found) = trained(&sharded, &corpus);
            let found = distance(&found.optimizer, &expected.optimizer);
            assert!(found < 2e-6, "moments differ by {found:e}");
        }
    }
}

/// A rank has a quarter of each matrix and of each stack of experts; gains and routers are
/// replicated over the ranks of a tensor group.
#[test]
fn a_rank_has_its_share_of_the_state() {
    let corpus = corpus();
    // Gains of both blocks and of the norm before the head.
    let (gains, router) = (5 * 64, 2 * 64 * 4);
    for config in layouts(1).into_iter().chain([lone_experts(1)]) {
        let (all, experts) = (config.parameters(), config.model.expert_parameters());
        // Elements per rank without sharding, and with it.
        let [split, shard] = match (config.tp, config.model.experts) {
            (2, Some(_)) => {
                let matrices = all - router - gains;
                let whole = router + gains;
                [matrices / 2 + whole, matrices / 4 + whole / 2]
            }
            (1, Some(2)) => [all - experts / 2, (all - experts) / 4 + experts / 2],
            (1, _) => [all - experts / 2, all / 4],
            _ => {
                let matrices = all - gains;
                [matrices / 2 + gains, matrices / 4 + gains / 2]
            }
        };
        let elements = |config: &RunConfig| {
            on_ranks(config, &corpus, &Folder::new(), 4, |run| {
                run.train_to(None);
                run.elements()
            })
        };
        assert_eq!(elements(&config), [split, split]);
        assert_eq!(elements(&fsdp(config.clone())), [shard, shard]);
        assert_eq!(elements(&zero1(config.clone())), [split, shard]);
    }
}

/// In NVFP4, with separate random bits on each rank, a resumed run produces the same bytes.
#[test]
fn a_stopped_run_of_sharded_parts_reaches_the_same_bytes() {
    let corpus = corpus();
    for config in layouts(2) {
        for config in [fsdp(nvfp4(config.clone())), zero1(nvfp4(config.clone()))] {
            let (_, whole) = trained(&config, &corpus);
            let stopped = Folder::new();
            on_ranks(&config, &corpus, &stopped, 4, |run| run.train_to(Some(1)));
            losses(&config, &corpus, &stopped, 4);
            assert_same(&stopped.checkpoint(), &whole);
        }
    }
}

/// Ranks with shards of shards read a checkpoint of a single rank and write it back unchanged, and
/// ranks of other layouts do so with their checkpoints.
#[test]
fn checkpoints_of_parts_of_parts_are_those_of_one_rank() {
    let corpus = corpus();
    let save = |run: &mut dyn OnRank| run.save_again();
    for config in layouts(2) {
        let one = RunConfig {
            tp: 1,
            ep: 1,
            ..nvfp4(config.clone())
        };
        let folder = Folder::new();
        losses(&one, &corpus, &folder, 1);
        let expected = folder.checkpoint();
        let config = nvfp4(config);
        let layouts = [
            (fsdp(config.clone()), 4, 4),
            (zero1(config.clone()), 4, 2),
            (fsdp(one.clone()), 2, 2),
            (fsdp(config.clone()), 4, 4),
            (config.clone(), 4, 2),
            (zero1(config.clone()), 4, 2),
            (one.clone(), 1, 0),
        ];
        for (layout, ranks, of_model) in layouts {
            on_ranks(&layout, &corpus, &folder, ranks, save);
            let latest = checkpoint::latest(&folder.0).unwrap().unwrap();
            let files = (0..8).filter(|rank| latest.join(format!("model-{rank}.bpk")).exists());
            assert_eq!(files.count(), of_model);
            assert_same(&folder.checkpoint(), &expected);
        }
    }
}
