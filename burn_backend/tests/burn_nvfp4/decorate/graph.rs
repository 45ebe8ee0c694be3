//! Steps of a decorated model by a captured graph have the bits of ordinary steps. CUDA captures;
//! CubeCL's CPU runtime runs the same steps kernel by kernel, and has no graph after them.

use burn_core as burn;
use burn_core::module::Module;
use burn_core::tensor::{DType, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::graph::{GraphSteps, TakenBy};
use burn_nvfp4::optim::{AdamW, AdamWConfig};
use burn_nvfp4::{Nvfp4Recipe, Nvfp4State, decorate};
use burn_optim::GradientsParams;

use super::models::{bits, device, tensor};
use crate::support::own_process::own_process;

/// Sizes of the layers.
const SIZES: [[usize; 2]; 2] = [[48, 64], [64, 32]];
const STEPS: usize = 7;

/// Two layers of burn-nn, and their optimizer.
#[derive(Module, Debug)]
struct Model {
    first: Linear,
    second: Linear,
}

impl Model {
    fn new() -> Self {
        let [first, second] =
            SIZES.map(|[d_in, d_out]| LinearConfig::new(d_in, d_out).init(&device().autodiff()));
        Self { first, second }
    }
}

/// Takes a step; returns the model and its output.
fn step(model: Model, optimizer: &mut AdamW, x: &Tensor<2>) -> (Model, Tensor<2>) {
    let y = model.second.forward(model.first.forward(x.clone()));
    let gradients = y.clone().square().sum().backward();
    let gradients = GradientsParams::from_grads(gradients, &model);
    let model = optimizer.try_step_begun(model, gradients).unwrap();
    (model, y.inner())
}

#[test]
fn steps_of_a_decorated_model_have_the_bits_of_ordinary_ones() {
    own_process!("decorate");
    let recipe = Nvfp4Recipe::new().with_seed(3);
    let model = Model::new();
    let twin = Model::new().load_record(model.clone().into_record());
    let [mut ordinary, captured] = [model, twin].map(|model| decorate(model, &recipe).unwrap());
    Nvfp4State::collect(&ordinary).apply(&captured).unwrap();
    let on = device().autodiff();
    let x: Tensor<2> = tensor([24, SIZES[0][0]], 1, DType::F32, &on);

    let mut optimizer = AdamWConfig::default().try_init().unwrap();
    let expected: Vec<Vec<u32>> = (0..STEPS)
        .map(|_| {
            optimizer.begin_step(1e-2, &on).unwrap();
            let (next, y) = step(ordinary.clone(), &mut optimizer, &x);
            ordinary = next;
            bits(y)
        })
        .collect();
    assert!(expected[0] != expected[1], "the weights change");

    let mut optimizer = AdamWConfig::default().try_init().unwrap();
    let mut steps = GraphSteps::begin(&captured, &device()).unwrap();
    let mut model = Some(captured);
    let mut found = None;
    let mut taken = Vec::new();
    for (index, expected) in expected.iter().enumerate() {
        optimizer.begin_step(1e-2, &on).unwrap();
        let by = steps.step(|| {
            let before = model.take().unwrap();
            let (next, y) = step(before, &mut optimizer, &x);
            (model, found) = (Some(next), Some(y));
        });
        match by {
            Ok(by) => taken.push(by),
            Err(error) => {
                let is_cuda = format!("{:?}", device()).to_lowercase().contains("cuda");
                assert!(!is_cuda && error.to_string().contains("capture"), "{error}");
                assert_eq!(index, 3, "after the ordinary steps");
                return;
            }
        }
        assert!(bits(found.clone().unwrap()) == *expected, "step {index}");
    }
    let mut expected = vec![TakenBy::Launches; 3];
    expected.push(TakenBy::Capture);
    expected.extend([TakenBy::Replay; STEPS - 4]);
    assert_eq!(taken, expected);
    drop(steps);
    let states = [model.as_ref().unwrap(), &ordinary].map(Nvfp4State::collect);
    assert_eq!(states[0], states[1]);
    decorate::report(model.as_ref().unwrap())
        .unwrap()
        .check()
        .unwrap();
}
