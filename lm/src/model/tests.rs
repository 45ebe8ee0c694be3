//! Tests of the language model.

use super::*;
use crate::config::{Preset, RecipeName, RunConfig};

const SIZES: ModelConfig = ModelConfig {
    width: 32,
    layers: 2,
    heads: 2,
    hidden: 48,
    context: 24,
    experts: None,
    top_k: 2,
};

const EXPERTS: ModelConfig = ModelConfig {
    experts: Some(4),
    ..SIZES
};

fn model(recipe: RecipeName, device: &Device) -> Transformer {
    sized(&SIZES, recipe, device)
}

fn sized(sizes: &ModelConfig, recipe: RecipeName, device: &Device) -> Transformer {
    let config = RunConfig::preset(Preset::Tiny, "flex");
    let nvfp4 = config.nvfp4_recipe(&recipe).unwrap();
    Transformer::new(sizes, Activation::F32, &nvfp4, 7, device).unwrap()
}

fn tokens(bytes: &[i64], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(bytes.to_vec(), [1, bytes.len()]), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

#[test]
fn later_bytes_do_not_change_earlier_logits() {
    let device = Device::flex();
    let model = model(RecipeName::f32(), &device);
    let text: Vec<i64> = (0..24).map(|i| (i * 37 + 5) % 256).collect();
    let whole = values(model.forward(tokens(&text, &device)));
    for changed in [1, 11, 23] {
        let mut other = text.clone();
        other[changed] = (other[changed] + 1) % 256;
        let logits = values(model.forward(tokens(&other, &device)));
        let same = changed * VOCABULARY;
        assert_eq!(whole[..same], logits[..same], "byte {changed} reached back");
        assert_ne!(
            whole[same..same + VOCABULARY],
            logits[same..same + VOCABULARY]
        );
    }
    // A prefix alone gives the same values, up to the order of sums.
    let prefix = values(model.forward(tokens(&text[..9], &device)));
    let difference = prefix
        .iter()
        .zip(&whole)
        .map(|(a, b)| (a - b).abs())
        .fold(0f32, f32::max);
    assert!(difference < 1e-4, "prefix differs by {difference}");
}

#[test]
fn weights_depend_on_the_seed_alone() {
    let device = Device::flex();
    let weight = |model: &Transformer, block: usize| {
        let feed_forward = model.blocks[block].feed_forward.as_ref().unwrap();
        values(feed_forward.gate_up.weight.val())
    };
    let (nvfp4, f32) = (
        model(RecipeName::nvidia(), &device),
        model(RecipeName::f32(), &device),
    );
    assert_eq!(weight(&nvfp4, 1), weight(&f32, 1));
    assert_eq!(nvfp4.head.id, f32.head.id);
    assert_ne!(weight(&nvfp4, 1), weight(&nvfp4, 0));
    assert_eq!(nvfp4.num_params(), SIZES.parameters());
    let experts = sized(&EXPERTS, RecipeName::nvidia(), &device);
    assert_eq!(experts.num_params(), EXPERTS.parameters());
}

/// Checks the names under which checkpoints hold the parameters of a block.
#[test]
fn parameters_keep_their_paths() {
    struct Paths(Vec<String>, Vec<String>);
    impl burn::module::ModuleVisitor for Paths {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.0.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
            self.1.push(self.0.join("."));
        }
    }
    let mut paths = Paths(Vec::new(), Vec::new());
    model(RecipeName::f32(), &Device::flex()).visit(&mut paths);
    let block = |index: usize| {
        [
            "attention_norm.gamma",
            "attention.qkv.weight",
            "attention.out.weight",
            "feed_forward_norm.gamma",
            "feed_forward.gate_up.weight",
            "feed_forward.down.weight",
        ]
        .map(|name| format!("blocks.{index}.{name}"))
    };
    let others = ["embedding", "norm.gamma", "head"].map(String::from);
    let expected = [&others[..1], &block(0), &block(1), &others[1..]].concat();
    assert_eq!(paths.1, expected);
}

/// Experts that all hold the weights of the dense model compute its feed-forward, regardless of
/// the router.
#[test]
fn equal_experts_are_the_dense_model() {
    let device = Device::flex();
    let dense = model(RecipeName::f32(), &device);
    let mut experts = sized(&EXPERTS, RecipeName::f32(), &device);
    experts.embedding = dense.embedding.clone();
    experts.head = dense.head.clone();
    for (own, block) in experts.blocks.iter_mut().zip(&dense.blocks) {
        own.attention = block.attention.clone();
        let (moe, feed_forward) = (
            own.moe.as_mut().unwrap(),
            block.feed_forward.as_ref().unwrap(),
        );
        let copies =
            |weight: &Param<Tensor<2>>| Param::from_tensor(Tensor::stack(vec![weight.val(); 4], 0));
        moe.gate_up.weight = copies(&feed_forward.gate_up.weight);
        moe.down.weight = copies(&feed_forward.down.weight);
    }
    let text: Vec<i64> = (0..24).map(|i| (i * 37 + 5) % 256).collect();
    let expected = values(dense.forward(tokens(&text, &device)));
    let found = values(experts.forward(tokens(&text, &device)));
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-4, "{found}, not {expected}");
    }
}

#[test]
fn every_parameter_gets_a_gradient() {
    struct Check<'a>(&'a burn::optim::GradientsParams, usize);
    impl burn::module::ModuleVisitor for Check<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = self.0.get::<D>(param.id).expect("a gradient");
            assert_eq!(gradient.dtype(), DType::F32);
            assert!(values(gradient).iter().any(|v| *v != 0.0));
            self.1 += 1;
        }
    }
    let device = Device::flex().autodiff();
    for (sizes, recipe, parameters) in [
        (&SIZES, RecipeName::nvidia(), 2 * 6 + 3),
        (&SIZES, RecipeName::f32(), 2 * 6 + 3),
        (&EXPERTS, RecipeName::nvidia(), 2 * 7 + 3),
        (&EXPERTS, RecipeName::f32(), 2 * 7 + 3),
    ] {
        let model = sized(sizes, recipe.clone(), &device);
        let text: Vec<i64> = (0..20).map(|i| (i * 31) % 256).collect();
        let loss = model.training_loss(tokens(&text, &device), tokens(&text, &device));
        let uniform = (VOCABULARY as f32).ln();
        let value = loss.clone().into_scalar::<f32>();
        assert!(
            (value - uniform).abs() < 0.3,
            "{recipe} starts at {value}, not {uniform}"
        );
        let gradients = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
        let mut check = Check(&gradients, 0);
        model.visit(&mut check);
        assert_eq!(check.1, parameters);
    }
}
