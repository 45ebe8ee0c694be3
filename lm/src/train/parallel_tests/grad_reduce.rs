//! Tests gradient exchange in `bf16`.

use super::*;
use crate::config::GradReduce;

/// In high precision, the losses of 2 steps equal those with `f32` gradients up to `bf16` rounding
/// in each layout, but not exactly.
#[test]
fn losses_are_those_of_f32_to_rounding() {
    let corpus = corpus();
    let layouts: [(RunConfig, usize); 9] = [
        (config(2), 2),
        (config(2), 4),
        (fsdp(config(2)), 2),
        (zero1(config(2)), 4),
        (tensor_parallel(2, 2), 2),
        (fsdp(tensor_parallel(2, 2)), 4),
        (experts_by(ExpertDispatchName::AllGather, 2, 2), 2),
        (experts_by(ExpertDispatchName::AllToAll, 2, 2), 4),
        (zero1(experts(2, 2)), 4),
    ];
    for (config, ranks) in layouts {
        let expected = losses(&config, &corpus, &Folder::new(), ranks);
        let found = losses(&in_bf16(config.clone()), &corpus, &Folder::new(), ranks);
        // The first loss precedes any gradient.
        assert_eq!(found[0], expected[0]);
        let error = largest_difference(&found, &expected);
        let what = format!(
            "{ranks} ranks, tp {}, ep {}, fsdp {}, zero1 {}",
            config.tp, config.ep, config.fsdp, config.zero1
        );
        eprintln!("{what}: {error:e}");
        assert!(error > 0.0 && error < 2e-3, "{what}: {error:e}");
    }
}

/// Sharded state gives the same bits as replicated state, as in `f32`: the same numbers are rounded
/// and added in the same order.
#[test]
fn parts_that_are_sharded_train_as_whole_ones() {
    let corpus = corpus();
    let mixture = experts_by(ExpertDispatchName::AllGather, 3, 2);
    for (config, ranks) in [(config(3), 2), (config(3), 4), (mixture, 4)] {
        // Sharding changes the summation order of the global gradient norm.
        let config = RunConfig {
            grad_clip: 1e9,
            ..in_bf16(nvfp4(config))
        };
        let trained = |config: RunConfig| {
            let folder = Folder::new();
            (
                losses(&config, &corpus, &folder, ranks),
                folder.checkpoint(),
            )
        };
        let (expected, at_end) = trained(config.clone());
        for sharded in [fsdp(config.clone()), zero1(config.clone())] {
            let (found, checkpoint) = trained(sharded);
            assert_eq!(found, expected, "{ranks} ranks, ep {}", config.ep);
            assert_same(&checkpoint, &at_end);
        }
    }
}

/// The type belongs to the run: a checkpoint stores it, a resumed run produces the same bytes, and
/// a run with another type refuses the checkpoint.
#[test]
fn checkpoints_have_the_type() {
    let corpus = corpus();
    let config = in_bf16(nvfp4(config(6)));
    let [whole, stopped] = [Folder::new(), Folder::new()];
    losses(&config, &corpus, &whole, 2);
    on_ranks(&config, &corpus, &stopped, 2, |run| run.train_to(Some(3)));
    let checkpoint = stopped.checkpoint();
    assert_eq!(checkpoint.state.run.config.grad_reduce, GradReduce::Bf16);
    let other = RunConfig {
        grad_reduce: GradReduce::F32,
        ..config.clone()
    };
    let resume = |config: &RunConfig| {
        let mut task = ByteTask::<Transformer>::new(config, config.recipe.clone(), &corpus);
        task.resume(checkpoint.state.run.clone())
    };
    assert!(resume(&config).is_ok());
    let refused = resume(&other).unwrap_err();
    assert!(
        refused.to_string().contains("another configuration"),
        "{refused}"
    );
    losses(&config, &corpus, &stopped, 2);
    assert_same(&stopped.checkpoint(), &whole.checkpoint());
}
