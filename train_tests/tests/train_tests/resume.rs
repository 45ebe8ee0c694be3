//! Tests training that resumes from burn-train's checkpoints, in a process whose default device is
//! Flex.
//!
//! Burn's optimizers first put a loaded state on Burn's default device, and later move it to the
//! device of the gradients. In a build with CUDA the default is a GPU, which may not exist.

use std::path::Path;

use burn::tensor::Device;
use burn_optim::AdamWConfig;
use burn_train::checkpoint::KeepLastNCheckpoints;
use burn_train::metric::LossMetric;
use burn_train::{ExecutionStrategy, Learner, SupervisedTraining};
use nvfp4::checkpoint::Nvfp4Checkpoints;
use nvfp4::{LayerMode, Nvfp4State, set_mode};

use crate::common::{Net, RATE};
use crate::process::ran_in_own_process;
use crate::train::{STEPS, loader, one_at_a_time};

/// Trains in `directory` up to the end of epoch `epochs`, and resumes with burn-train if there is a
/// checkpoint.
fn with_checkpoints(
    directory: &Path,
    net: Net,
    device: &Device,
    epochs: usize,
    resume: Option<usize>,
    checkpoints: Option<&Nvfp4Checkpoints>,
) -> Net {
    let _guard = one_at_a_time();
    let training =
        SupervisedTraining::new(directory, loader(device), loader(&device.clone().inner()))
            .metrics((LossMetric::new(),))
            .with_application_logger(None)
            .with_training_strategy(ExecutionStrategy::single(device.clone()).into())
            .num_epochs(epochs);
    let training = match checkpoints {
        Some(checkpoints) => checkpoints.register(training, KeepLastNCheckpoints::new(1)),
        None => training.with_default_checkpointers(),
    };
    let training = match resume {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    };
    let result = training.launch(Learner::new(net, AdamWConfig::new().init(), RATE));
    assert!(result.error.is_none(), "{:?}", result.error);
    result.model
}

/// A run that stopped after its first epoch and resumed in another process, from burn-train's
/// checkpoints, ends like the uninterrupted one: weights, offsets and modes. Burn-train's default
/// checkpointers do not achieve this, but ours do.
#[test]
fn burn_trains_checkpoints_resume_to_the_bit() {
    let test = "burn_trains_checkpoints_resume_to_the_bit";
    if ran_in_own_process("resume", test, &[("BURN_DEVICE", "flex")]) {
        return;
    }
    let device = Device::flex().autodiff();
    let net = Net::new(&device);
    let root = std::env::temp_dir().join(format!("nvfp4-{}-resume", std::process::id()));
    let folder = |name: &str| root.join(name);
    let run = |name: &str, net: &Net, epochs, resume, ours: bool| {
        let directory = folder(name);
        let checkpoints = Nvfp4Checkpoints::new(net, directory.join("checkpoint"));
        let checkpoints = ours.then_some(&checkpoints);
        with_checkpoints(
            &directory,
            net.clone(),
            &device,
            epochs,
            resume,
            checkpoints,
        )
    };
    // The mode is also part of the state.
    let start = || {
        let net = net.copy(&device);
        set_mode(&net.down, LayerMode::HighPrecisionForward);
        net
    };
    let whole = run("whole", &start(), 2, None, true);
    let state = Nvfp4State::collect(&whole);
    assert_eq!(state.layers["up"].offset, 2 * STEPS as u64);

    let first = run("parts", &start(), 1, None, true);
    assert_ne!(first.bits(), whole.bits());
    // A new process has other weights, offsets 0, and no modes.
    let other = Net::new(&device);
    let resumed = run("parts", &other, 2, Some(1), true);
    assert_eq!(resumed.bits(), whole.bits());
    assert_eq!(Nvfp4State::collect(&resumed), state);
    // The strategy keeps only the last checkpoint.
    let exists = |epoch| {
        folder("parts")
            .join(format!("checkpoint/nvfp4-{epoch}.json"))
            .exists()
    };
    assert_eq!([1, 2].map(exists), [false, true]);

    run("default", &start(), 1, None, false);
    let other = Net::new(&device);
    let forgetful = run("default", &other, 2, Some(1), false);
    assert_ne!(forgetful.bits(), whole.bits());
    let _ = std::fs::remove_dir_all(root);
}
