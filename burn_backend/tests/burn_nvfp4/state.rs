//! Random state: saved next to the record, restored with the same bits.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::{Module, ModuleMapper, Param};
use burn_core::store::ModuleRecord;
use burn_core::tensor::{DType, Device, Tensor};
use burn_nvfp4::state::assign_layer_ids;
use burn_nvfp4::{Nvfp4Error, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe, Nvfp4State, RngState};

use crate::support::{Matrix, device, flex_only, skip_where_small_only, values};

#[derive(Module, Debug)]
struct Net {
    up: Nvfp4Linear,
    blocks: Vec<Nvfp4Linear>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let recipe = Nvfp4Recipe::new().with_seed(99).with_rht_signs(0x1234);
        let layer = || {
            Nvfp4LinearConfig::new(32, 32)
                .with_recipe(recipe.clone())
                .init(device)
        };
        let net = Self {
            up: layer(),
            blocks: vec![layer(), layer()],
        };
        assign_layer_ids(&net);
        net
    }

    /// Returns the gradients of one training forward, of all three weights.
    fn gradients(&self, batch: u64, device: &Device) -> Vec<Vec<f32>> {
        let x = Matrix::gaussian(48, 32, DType::BF16, batch).tensor(device);
        let mut y = self.up.forward(x);
        for block in &self.blocks {
            y = block.forward(y);
        }
        let grads = y.cast(DType::F32).powi_scalar(2).sum().backward();
        [&self.up, &self.blocks[0], &self.blocks[1]]
            .map(|layer| values(layer.weight.grad(&grads).unwrap()))
            .to_vec()
    }
}

#[test]
fn a_restored_model_draws_the_bits_of_the_uninterrupted_one() {
    skip_where_small_only!();
    let device = device().autodiff();
    let net = Net::new(&device);
    net.gradients(1, &device);
    net.gradients(2, &device);

    let state = serde_json::to_string(&Nvfp4State::collect(&net)).unwrap();
    let record = net.clone().into_record().into_bytes().unwrap();
    let uninterrupted = net.gradients(3, &device);
    assert_ne!(
        net.gradients(3, &device),
        uninterrupted,
        "each forward draws fresh bits"
    );

    // Another process would have built its layers with other numbers, counters and signs.
    let other = Nvfp4LinearConfig::new(32, 32);
    let resumed = Net {
        up: other.init(&device),
        blocks: vec![other.init(&device), other.init(&device)],
    };
    let resumed = resumed.load_record(ModuleRecord::from_bytes(record).unwrap());
    let without_state = resumed.gradients(3, &device);
    assert_ne!(without_state, uninterrupted);
    let state = Nvfp4State::load_binary(state.as_bytes()).unwrap();
    state.apply(&resumed).unwrap();
    assert_eq!(resumed.gradients(3, &device), uninterrupted);
}

#[test]
fn the_state_names_every_layer() {
    flex_only!();
    let net = Net::new(&device());
    let state = Nvfp4State::collect(&net);
    let expected = |layer| RngState {
        seed: 99,
        layer,
        offset: 0,
        rht_signs: 0x1234,
    };
    let layers: Vec<(&str, RngState)> = state
        .layers
        .iter()
        .map(|(path, layer)| (path.as_str(), *layer))
        .collect();
    assert_eq!(
        layers,
        [
            ("blocks.0", expected(1)),
            ("blocks.1", expected(2)),
            ("up", expected(0))
        ]
    );
    let layer = Nvfp4LinearConfig::new(16, 16)
        .with_layer(Some(5))
        .init(&device());
    let state = Nvfp4State::collect(&layer);
    assert_eq!(state.layers[""].layer, 5, "a model that is itself a layer");
    assert!(
        Nvfp4State::collect(&burn_nn::LinearConfig::new(4, 4).init(&device()))
            .layers
            .is_empty()
    );
}

#[test]
fn a_state_of_another_model_is_refused_whole() {
    flex_only!();
    let net = Net::new(&device());
    let before = Nvfp4State::collect(&net);
    let mut state = before.clone();
    let moved = state.layers.remove("blocks.1").unwrap();
    state.layers.insert("blocks.2".into(), moved);
    state.layers.get_mut("up").unwrap().offset = 17;
    match state.apply(&net) {
        Err(Nvfp4Error::Value {
            argument: "state",
            found,
            ..
        }) => {
            assert!(
                found.contains("blocks.1") && found.contains("blocks.2"),
                "{found}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(Nvfp4State::collect(&net), before, "nothing was changed");
    let mut state = before.clone();
    state.layers.get_mut("blocks.1").unwrap().layer = u64::MAX;
    state.layers.get_mut("up").unwrap().offset = 17;
    assert!(matches!(
        state.apply(&net),
        Err(Nvfp4Error::Value {
            argument: "layer",
            ..
        })
    ));
    assert_eq!(Nvfp4State::collect(&net), before, "nothing was changed");
}

/// The result of an optimizer step, a fork or a device move is the same layer: its counter
/// continues.
#[test]
fn the_counter_survives_what_burn_does_to_modules() {
    flex_only!();
    struct Scale;
    impl ModuleMapper for Scale {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.mul_scalar(0.5).detach().require_grad())
        }
    }
    let device = device().autodiff();
    let net = Net::new(&device);
    net.gradients(1, &device);
    let stepped = net.clone().map(&mut Scale);
    stepped.gradients(1, &device);
    let forked = stepped.clone().fork(&device);
    forked.gradients(1, &device);
    let moved = forked.to_device(&device);
    let expected = Nvfp4State::collect(&moved);
    assert!(
        expected.layers.values().all(|layer| layer.offset == 3),
        "{expected:?}"
    );
    assert_eq!(Nvfp4State::collect(&net), expected);
    assert_eq!(
        Nvfp4State::collect(&stepped.no_grad().valid().train()),
        expected
    );
}

#[test]
fn layers_of_a_process_do_not_share_a_number() {
    flex_only!();
    let layer = || {
        Nvfp4LinearConfig::new(16, 16)
            .init(&device())
            .state
            .rng_state()
            .layer
    };
    assert_ne!(layer(), layer());
}
