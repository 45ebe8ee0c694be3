//! Stacked experts' weights of a user-defined mixture compute the same as grouped layers, bit for
//! bit.

use burn_core as burn;

use burn_core::module::{Module, Param, ParamGroup};
use burn_core::tensor::{DType, Device, Int, Tensor, TensorData, activation::relu};
use burn_nvfp4::decorate::{Decorator, GemmFormat};
use burn_nvfp4::experts::ExpertOffsets;
use burn_nvfp4::state::assign_layer_ids;
use burn_nvfp4::{Nvfp4GroupedLinear, Nvfp4GroupedLinearConfig, Nvfp4Recipe, Nvfp4State, decorate};
use burn_optim::{GradientsParams, SgdConfig};

use crate::support::own_process::own_process;

use super::models::{bits, device, small_only, tensor};

const EXPERTS: usize = 3;
const TOKENS: usize = 20;
const D_IN: usize = 32;
const HIDDEN: usize = 48;

/// Weights of all experts, as in a user's module.
#[derive(Module, Debug)]
struct Stack {
    weight: Param<Tensor<3>>,
}

#[derive(Module, Debug)]
struct Mixture {
    up: Stack,
    down: Stack,
}

impl Mixture {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        relu(x.matmul(self.up.weight.val())).matmul(self.down.weight.val())
    }
}

#[derive(Module, Debug)]
struct Grouped {
    up: Nvfp4GroupedLinear,
    down: Nvfp4GroupedLinear,
}

impl Grouped {
    fn forward(&self, x: Tensor<3>, experts: &ExpertOffsets) -> Tensor<3> {
        let x = x.reshape([EXPERTS * TOKENS, D_IN]);
        let y = self
            .down
            .forward(relu(self.up.forward(x, experts)), experts);
        y.reshape([EXPERTS, TOKENS, D_IN])
    }
}

fn stacks(device: &Device) -> [Tensor<3>; 2] {
    let up = tensor([EXPERTS, D_IN, HIDDEN], 1, DType::F32, device).mul_scalar(0.3);
    let down = tensor([EXPERTS, HIDDEN, D_IN], 2, DType::F32, device).mul_scalar(0.3);
    [up, down].map(|stack| stack.detach().require_grad())
}

fn mixture(device: &Device) -> Mixture {
    let [up, down] = stacks(device).map(|stack| Stack {
        weight: Param::from_tensor(stack),
    });
    Mixture { up, down }
}

fn grouped(recipe: &Nvfp4Recipe, device: &Device) -> Grouped {
    let [up, down] = stacks(device);
    let layer = |d_in, d_out, weight: Tensor<3>| {
        let config = Nvfp4GroupedLinearConfig::new(EXPERTS, d_in, d_out);
        let mut layer = config.with_recipe(recipe.clone()).init(device);
        layer.weight = Param::from_tensor(weight);
        layer
    };
    Grouped {
        up: layer(D_IN, HIDDEN, up),
        down: layer(HIDDEN, D_IN, down),
    }
}

fn all() -> ParamGroup {
    ParamGroup::from_any_predicates(vec!["up", "down"])
}

#[test]
fn stacks_are_the_grouped_layers() {
    own_process!("decorate");
    let device = device().autodiff();
    let recipe = Nvfp4Recipe::new().with_seed(3);
    let steps = if small_only() { 2 } else { 5 };
    for tracked in [true, false] {
        let decorator = Decorator::new(&recipe).include(all());
        let mut decorated = decorator.decorate(mixture(&device)).unwrap();
        let mut explicit = grouped(&recipe, &device);
        assign_layer_ids(&explicit);
        assign_layer_ids(&decorated);
        let (mut one, mut other) = (SgdConfig::new().init(), SgdConfig::new().init());
        let counts = TensorData::from([TOKENS as i32; EXPERTS]);
        let plain = device.clone().inner();
        let counts = Tensor::<1, Int>::from_data(counts, &plain);
        let experts = ExpertOffsets::from_counts(counts, EXPERTS * TOKENS);
        for step in 0..steps {
            let what = format!("step {step}, tracked {tracked}");
            let x = tensor([EXPERTS, TOKENS, D_IN], 10 + step, DType::F32, &device);
            let leaf = || match tracked {
                true => x.clone().detach().require_grad(),
                false => x.clone().detach(),
            };
            let (x1, x2) = (leaf(), leaf());
            let y1 = decorated.forward(x1.clone());
            let y2 = explicit.forward(x2.clone(), &experts);
            assert_eq!(bits(y1.clone().inner()), bits(y2.clone().inner()), "{what}");
            let dy = tensor([EXPERTS, TOKENS, D_IN], 50 + step, DType::F32, &device);
            let g1 = (y1 * dy.clone()).sum().backward();
            let g2 = (y2 * dy).sum().backward();
            if tracked {
                let [dx1, dx2] = [x1.grad(&g1), x2.grad(&g2)].map(Option::unwrap);
                assert_eq!(bits(dx1), bits(dx2), "{what}: input");
            }
            let own = [&decorated.up, &decorated.down];
            let theirs = [&explicit.up, &explicit.down];
            for (own, theirs) in own.into_iter().zip(theirs) {
                let own = own.weight.base().grad(&g1).unwrap();
                let theirs = theirs.weight.val().grad(&g2).unwrap();
                assert_eq!(bits(own), bits(theirs), "{what}: weight");
            }
            let g1 = GradientsParams::from_grads(g1, &decorated);
            let g2 = GradientsParams::from_grads(g2, &explicit);
            decorated = one.step(0.05, decorated, g1);
            explicit = other.step(0.05, explicit, g2);
        }
        let report = decorate::report(&decorated).unwrap();
        report.check().unwrap();
        assert!(report.is_all(GemmFormat::Nvfp4), "{report}");
        for layer in ["up", "down"] {
            let ran = &report.layers[layer];
            assert_eq!(ran.forward.nvfp4, steps, "{layer}: {report}");
            assert_eq!(ran.wgrad.nvfp4, steps, "{layer}: {report}");
            assert_eq!(ran.wgrad_wasted, 0, "{layer}: {report}");
        }
        assert_eq!(
            Nvfp4State::collect(&decorated),
            Nvfp4State::collect(&explicit)
        );
    }
}

/// An input that all experts share would be quantized as one: it is refused by name.
#[test]
fn an_input_of_all_experts_is_refused() {
    own_process!("decorate");
    let device = device().autodiff();
    let decorator = Decorator::new(&Nvfp4Recipe::new()).include(all());
    let decorated = decorator.decorate(mixture(&device)).unwrap();
    let x = tensor([1, TOKENS, D_IN], 3, DType::F32, &device);
    let y: Vec<f32> = x
        .matmul(decorated.up.weight.val())
        .into_data()
        .iter()
        .collect();
    assert!(y.iter().all(|y| y.is_nan()));
    let error = decorate::report(&decorated).unwrap().check().unwrap_err();
    assert!(error.to_string().contains("layer `up`"), "{error}");
    assert!(error.to_string().contains("stacked"), "{error}");
}

#[test]
fn stacks_that_cannot_be_quantized_are_refused() {
    own_process!("decorate");
    let device = device().autodiff();
    let decorator = Decorator::new(&Nvfp4Recipe::new()).include(all());
    let mut odd = mixture(&device);
    odd.up.weight = Param::from_tensor(tensor([EXPERTS, 24, HIDDEN], 1, DType::F32, &device));
    let error = decorator.decorate(odd).unwrap_err();
    assert!(error.to_string().contains("`up`"), "{error}");
    let without = Decorator::new(&Nvfp4Recipe::new());
    assert!(without.decorate(mixture(&device)).is_err());
}
