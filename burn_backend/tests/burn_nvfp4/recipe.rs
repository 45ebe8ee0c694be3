//! The recipe: what its switches do, its file, and which layers it leaves alone.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::{Module, ParamGroup};
use burn_core::tensor::{DType, Device};
use burn_nvfp4::{Nvfp4Error, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe};

use crate::common::{Matrix, device, flex_only, values};

#[derive(Module, Debug)]
struct Net {
    up: Nvfp4Linear,
    blocks: Vec<Nvfp4Linear>,
}

fn net(device: &Device) -> Net {
    let layer = || Nvfp4LinearConfig::new(32, 32).init(device);
    Net {
        up: layer(),
        blocks: vec![layer(), layer()],
    }
}

#[test]
fn the_defaults_are_the_published_recipe() {
    flex_only!();
    let recipe = Nvfp4Recipe::new();
    assert!(recipe.rht && recipe.stochastic_rounding && recipe.weight_2d);
    assert_eq!((recipe.seed, recipe.rht_signs), (0, 0xD7E8));
    assert!(recipe.high_precision.is_none());
    assert_eq!(recipe, Nvfp4Recipe::default());
}

#[test]
fn recipes_survive_json() {
    flex_only!();
    let recipe = Nvfp4Recipe::new()
        .with_rht(false)
        .with_seed(u64::MAX)
        .with_high_precision(Some(ParamGroup::from_regex(r"blocks\.1\..*").unwrap()));
    let json = serde_json::to_string(&recipe).unwrap();
    let loaded = Nvfp4Recipe::load_binary(json.as_bytes()).unwrap();
    assert_eq!(loaded, recipe);
    assert_ne!(loaded, recipe.clone().with_high_precision(None));
    assert_ne!(loaded, recipe.with_seed(1));
    let broken = json.replace(r"blocks\\.1\\..*", "(");
    assert_ne!(broken, json);
    assert!(
        Nvfp4Recipe::load_binary(broken.as_bytes()).is_err(),
        "an invalid pattern is refused"
    );
}

#[test]
fn high_precision_layers_multiply_as_a_plain_linear() {
    flex_only!();
    let device = device().autodiff();
    let model = net(&device);
    let recipe = Nvfp4Recipe::new()
        .with_high_precision(Some(ParamGroup::from_regex(r"^blocks\.1\.").unwrap()));
    assert_eq!(recipe.apply(&model).unwrap(), 1);
    let high: Vec<bool> = [&model.up, &model.blocks[0], &model.blocks[1]]
        .map(|layer| layer.state.is_high_precision())
        .to_vec();
    assert_eq!(high, [false, false, true]);

    let x = Matrix::gaussian(8, 32, DType::F32, 91).tensor(&device);
    let layer = &model.blocks[1];
    let plain = layer.clone().into_linear();
    assert_eq!(
        values(layer.forward(x.clone())),
        values(plain.forward(x.clone()))
    );
    assert_ne!(
        values(model.up.forward(x.clone())),
        values(model.up.clone().into_linear().forward(x.clone()))
    );
    assert_eq!(layer.state.randomness().offset, 0, "nothing to draw");
    let y = layer.forward(Matrix::gaussian(8, 32, DType::BF16, 92).tensor(&device));
    assert_eq!(y.dtype(), DType::BF16);
    let grads = y.cast(DType::F32).sum().backward();
    assert_eq!(layer.weight.grad(&grads).unwrap().dtype(), DType::F32);

    let by_id = ParamGroup::from_ids(vec![model.up.weight.id]);
    assert_eq!(
        Nvfp4Recipe::new()
            .with_high_precision(Some(by_id))
            .apply(&model)
            .unwrap(),
        1
    );
    assert!(model.up.state.is_high_precision() && !model.blocks[1].state.is_high_precision());
    assert_eq!(Nvfp4Recipe::new().apply(&model).unwrap(), 0);
    assert!(!model.up.state.is_high_precision());
}

#[test]
fn a_group_that_matches_nothing_is_an_error() {
    flex_only!();
    let model = net(&device());
    let recipe =
        Nvfp4Recipe::new().with_high_precision(Some(ParamGroup::from_path("blocks.7.weight")));
    match recipe.apply(&model) {
        Err(Nvfp4Error::Value {
            argument: "high_precision",
            found,
            expected,
        }) => {
            assert!(found.contains("blocks.7.weight"), "{found}");
            assert!(
                expected.contains("up.weight, blocks.0.weight, blocks.1.weight"),
                "{expected}"
            );
        }
        other => panic!("{other:?}"),
    }
    let plain = burn_nn::LinearConfig::new(16, 16).init(&device());
    assert!(matches!(
        Nvfp4Recipe::new().apply(&plain),
        Err(Nvfp4Error::Value {
            argument: "model",
            ..
        })
    ));
}
