//! Training steps of a model.

use burn_core::module::Module;
use burn_core::tensor::{FloatDType, Tensor};
use burn_nvfp4::graph::GraphSteps;
use burn_nvfp4::optim::{AdamW, AdamWConfig};
use burn_optim::GradientsParams;

use crate::harness::Bench;

/// Times steps of `model` as `name` in `setting`: the sum of the squared `features`, its backward,
/// and AdamW; with `is_graph` as a CUDA graph.
pub fn time<M: Module>(
    bench: &mut Bench,
    [setting, name]: [&str; 2],
    model: M,
    is_graph: bool,
    features: impl Fn(&M) -> Tensor<3>,
) {
    if is_graph && !bench.is_cube() {
        return;
    }
    bench.release();
    let device = bench.device.clone();
    let mut graph = None;
    let mut optimizer = AdamWConfig::default().try_init().expect("valid defaults");
    let mut model = Some(model);
    bench.time(setting, name, || {
        if is_graph && graph.is_none() {
            let model = model.as_ref().expect("each step puts it back");
            graph = Some(GraphSteps::begin(model, &device).expect("a free device"));
        }
        optimizer.begin_step(1e-4, &device).expect("a device");
        let mut step = || {
            let before = model.take().expect("each step puts it back");
            model = Some(train_step(before, &mut optimizer, &features));
        };
        match &mut graph {
            Some(graph) => drop(graph.step(step).expect("a step that can be captured")),
            None => step(),
        }
    });
}

fn train_step<M: Module>(model: M, optimizer: &mut AdamW, features: impl Fn(&M) -> Tensor<3>) -> M {
    let features = features(&model).cast(FloatDType::F32);
    // Rows first: Burn sums all elements in one cube.
    let loss = features.square().sum_dim(2).sum();
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    optimizer
        .try_step_begun(model, gradients)
        .expect("gradients of the model")
}
