//! Steps of a graph have the same bits as ordinary ones.

use std::sync::{Mutex, PoisonError};

use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::Device;
use burn_nvfp4::Nvfp4Recipe;

use super::tests::{config, data, open};
use super::*;
use crate::decoder::lora::DEFAULT_TARGETS;
use crate::decoder::{FrozenForm, LoraConfig};
use crate::train::Outcome;
use nvfp4_test_support::{Scratch, golden};

/// Returns the device with graphs (the GPU if the environment names it, otherwise CubeCL's CPU
/// runtime), true on a GPU, and the number of steps. The CPU runtime runs one of the three steps
/// before the capture: a thread for each unit of a cube makes it slow.
fn device() -> Option<(Device, bool, u64)> {
    match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
        #[cfg(feature = "cuda")]
        Ok("cuda") => Some((Device::cuda(0), true, 24)),
        #[cfg(feature = "cpu")]
        _ => Some((nvfp4_test_support::cpu_runtime(Device::cpu), false, 1)),
        #[cfg(not(feature = "cpu"))]
        _ => {
            let test = nvfp4_test_support::test_name();
            nvfp4_test_support::Skip::NoGpu.print(&test, "");
            None
        }
    }
}

/// True if this run omits tests that take minutes on the CPU runtime.
fn is_brief() -> bool {
    let on_gpu = std::env::var("NVFP4_TEST_DEVICE").as_deref() == Ok("cuda");
    !on_gpu && !nvfp4_test_support::is_full()
}

/// Returns the losses of all steps and the parameters, as bits.
fn trained(config: &FinetuneConfig, device: &Device, folder: &Scratch) -> (Vec<u64>, Vec<u8>) {
    let data = data(config);
    let out = folder.join(if config.no_graph { "ordinary" } else { "graph" });
    let mut run = open(config, &data, device, &out).unwrap();
    assert_eq!(run.train(None, &mut ()).unwrap(), Outcome::Finished);
    let rows = run.rows().iter();
    let losses = rows.flat_map(|row| [row.train_loss, row.valid_loss]);
    let losses: Vec<u64> = losses.flatten().map(f64::to_bits).collect();
    assert_eq!(losses.len() as u64, config.steps + 2);
    let record: ModuleRecord = run.model().clone().into_record();
    (losses, record.into_bytes().unwrap().to_vec())
}

/// A device runs the steps of one graph at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn compare(test: &str, change: impl Fn(&mut FinetuneConfig)) {
    let model = golden("llama3-tiny");
    let Some((device, is_gpu, steps)) = device() else {
        return;
    };
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Scratch::new(&format!("finetune-graph-{test}"));
    let mut config = config(&model, &folder, "nvidia");
    (
        config.steps,
        config.warmup,
        config.log_every,
        config.eval_every,
    ) = (steps, steps.min(2) - 1, 1, steps);
    let context = if is_gpu { 32 } else { 16 };
    (config.context, config.batch, config.eval_rows) = (context, 1, 1);
    // The configuration decides on graphs by the name of the device.
    config.device = "cuda:0".into();
    config.no_graph = true;
    change(&mut config);
    let ordinary = trained(&config, &device, &folder);
    config.no_graph = false;
    let captured = trained(&config, &device, &folder);
    assert_eq!(captured.0, ordinary.0, "losses");
    assert!(captured.1 == ordinary.1, "parameters");
}

#[test]
fn steps_of_a_graph_are_ordinary_ones() {
    if is_brief() {
        nvfp4_test_support::skip!(OnlyFull);
    }
    compare("steps_of_a_graph_are_ordinary_ones", |config| {
        config.accumulate = 2;
    });
}

#[test]
fn steps_of_a_graph_distill_into_adapters() {
    if is_brief() {
        nvfp4_test_support::skip!(OnlyFull);
    }
    compare("steps_of_a_graph_distill_into_adapters", |config| {
        config.objective = Objective::Distillation {
            teacher: config.model.clone(),
            form: FrozenForm::High,
            temperature: 2.0,
        };
        config.lora = Some(LoraConfig {
            rank: 4,
            alpha: 8.0,
            targets: DEFAULT_TARGETS.into(),
        });
    });
}

#[test]
fn steps_of_a_graph_read_packed_weights() {
    compare("steps_of_a_graph_read_packed_weights", |config| {
        config.frozen = FrozenForm::W4a16;
        config.recipe = Nvfp4Recipe::bf16();
        config.lora = Some(LoraConfig {
            rank: 4,
            alpha: 8.0,
            targets: DEFAULT_TARGETS.into(),
        });
    });
}
