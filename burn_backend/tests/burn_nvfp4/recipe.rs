//! The recipe: its options, its file, and the layers that it leaves in high precision.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::{Module, ParamGroup};
use burn_core::tensor::{DType, Device};
use burn_nvfp4::recipe::{
    BackwardSource, BlockScaling, ErrorNorm, Healing, LayerPolicy, QuantSpec, RoundingMode,
};
use burn_nvfp4::state::assign_layer_ids;
use burn_nvfp4::{
    LayerMode, Nvfp4Error, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe, Nvfp4State, set_mode,
};

use crate::support::{Matrix, device, flex_only, values};

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
    let (one, tile) = (QuantSpec::NVFP4, QuantSpec::NVFP4_2D);
    assert_eq!((recipe.fprop.x, recipe.fprop.w), (one, tile));
    assert_eq!((recipe.dgrad.dy, recipe.dgrad.w), (one.stochastic(), tile));
    let transformed = one.rht(16);
    assert_eq!(recipe.wgrad.x, transformed);
    assert_eq!(recipe.wgrad.dy, transformed.stochastic());
    assert_eq!(recipe.source, BackwardSource::Original);
    assert_eq!((recipe.seed, recipe.rht_signs), (0, 0xD7E8));
    assert!(recipe.high_precision.is_none() && recipe.healing.is_none());
    assert_eq!(recipe.layers, LayerPolicy::None);
    assert_eq!(recipe, Nvfp4Recipe::nvidia());
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
    assert_eq!(layer.state.rng_state().offset, 0, "nothing to draw");
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

#[test]
fn presets_are_valid_and_survive_json() {
    flex_only!();
    let names: Vec<&str> = Nvfp4Recipe::preset_names().collect();
    for name in &names {
        let recipe = Nvfp4Recipe::preset(name).unwrap();
        recipe.check().unwrap();
        let json = serde_json::to_string_pretty(&recipe).unwrap();
        let loaded = Nvfp4Recipe::load_binary(json.as_bytes()).unwrap();
        assert_eq!(loaded, recipe, "{json}");
        assert_eq!(recipe.is_quantized(), *name != "bf16");
        let same = names
            .iter()
            .filter(|other| Nvfp4Recipe::preset(other).unwrap() == recipe);
        assert_eq!(same.count(), 1, "{name} is a recipe of its own");
    }
    match Nvfp4Recipe::preset("nvidea") {
        Err(Nvfp4Error::Value {
            argument: "recipe",
            found,
            expected,
        }) => {
            assert_eq!(found, "nvidea");
            assert!(expected.contains("nvidia, nvidia_4over6"), "{expected}");
        }
        other => panic!("{other:?}"),
    }
    // A file contains only changed settings; an operand's fields have defaults.
    let mut json: serde_json::Value = serde_json::to_value(Nvfp4Recipe::new()).unwrap();
    json["fprop"]["x"] = serde_json::json!({"format": "nvfp4", "scale": "four_over_six_mae"});
    let loaded = Nvfp4Recipe::load_binary(json.to_string().as_bytes()).unwrap();
    let expected = QuantSpec::NVFP4.scale(BlockScaling::FourOverSix(ErrorNorm::Mae));
    assert_eq!(loaded.fprop.x, expected);
    json["fprop"]["x"] = serde_json::json!({"format": "nvfp4", "global": "per_token"});
    let loaded = Nvfp4Recipe::load_binary(json.to_string().as_bytes()).unwrap();
    assert_eq!(
        loaded.fprop.x,
        QuantSpec::NVFP4.per_row(),
        "names of before"
    );
    json["fprop"]["x"]["scal"] = "standard".into();
    let misspelt = Nvfp4Recipe::load_binary(json.to_string().as_bytes());
    assert!(misspelt.is_err(), "an unknown field is refused");
}

#[test]
fn illegal_combinations_say_why() {
    flex_only!();
    type Spoil = fn(&mut Nvfp4Recipe);
    let one = QuantSpec::NVFP4;
    let cases: [(&str, &str, &str, Spoil); 13] = [
        ("fprop", "x in 16x16 tiles", "weights", |r| {
            r.fprop.x = QuantSpec::NVFP4_2D
        }),
        ("fprop", "w in 16x16 tiles, rounded", "transposes", |r| {
            r.fprop.w = QuantSpec::NVFP4_2D.stochastic()
        }),
        ("fprop", "w in 16x16 tiles with a global", "16 rows", |r| {
            r.fprop.w = QuantSpec::NVFP4_2D.per_row()
        }),
        ("dgrad", "w in 16x16 tiles with headroom", "standard", |r| {
            r.dgrad.w = QuantSpec::NVFP4_2D.scale(BlockScaling::Headroom)
        }),
        ("dgrad", "dy by four over six", "nearest", |r| {
            r.dgrad.dy = r.dgrad.dy.scale(BlockScaling::FourOverSix(ErrorNorm::Mse))
        }),
        ("dgrad", "dy after a transform", "wgrad only", |r| {
            r.dgrad.dy = r.dgrad.dy.rht(16)
        }),
        ("wgrad", "x after a transform of another", "16, 32", |r| {
            r.wgrad.x = r.wgrad.x.rht(24)
        }),
        (
            "wgrad",
            "x after a transform of 32",
            "does not cancel",
            |r| r.wgrad.x = r.wgrad.x.rht(32),
        ),
        ("wgrad", "x by four over six after", "no published", |r| {
            r.wgrad.x = r.wgrad.x.scale(BlockScaling::FourOverSix(ErrorNorm::Mae))
        }),
        ("fprop", "x by MS-EDEN", "dgrad and wgrad", |r| {
            r.fprop.x = QuantSpec::MS_EDEN;
            r.fprop.w = QuantSpec::MS_EDEN
        }),
        (
            "dgrad",
            "dy and the other operand",
            "both by MS-EDEN",
            |r| r.dgrad.dy = QuantSpec::MS_EDEN,
        ),
        ("wgrad", "x and the other operand", "padded", |r| {
            r.wgrad.x = QuantSpec::HIGH_PRECISION
        }),
        ("healing", "1.5", "0 to 1", |r| {
            r.healing = Some(Healing {
                at_fraction: 1.5,
                forward_only: false,
            })
        }),
    ];
    for (argument, found, expected, spoil) in cases {
        let mut recipe = Nvfp4Recipe::new();
        spoil(&mut recipe);
        let error = recipe.check().expect_err(found).to_string();
        for text in [argument, found, expected] {
            assert!(error.contains(text), "{error}: no {text:?}");
        }
        let layer = Nvfp4LinearConfig::new(16, 16).with_recipe(recipe);
        assert!(layer.try_init(&device()).is_err());
    }
    // Unusual but supported: only weights, and everything rounded to nearest.
    let mut recipe = Nvfp4Recipe::new();
    recipe.fprop.x = QuantSpec::HIGH_PRECISION;
    recipe.wgrad.dy = one.rht(16).map(|f| f.rounding = RoundingMode::Nearest);
    recipe.check().unwrap();
}

#[test]
fn switches_change_both_operands_of_a_product() {
    flex_only!();
    let recipe = Nvfp4Recipe::new()
        .with_rht(false)
        .with_stochastic_rounding(false)
        .with_weight_2d(false);
    let one = QuantSpec::NVFP4;
    assert_eq!([recipe.fprop.x, recipe.fprop.w], [one; 2]);
    assert_eq!([recipe.dgrad.dy, recipe.dgrad.w], [one; 2]);
    assert_eq!([recipe.wgrad.x, recipe.wgrad.dy], [one; 2]);
    let back = recipe
        .with_rht(true)
        .with_stochastic_rounding(true)
        .with_weight_2d(true);
    assert_eq!(back, Nvfp4Recipe::new());
}

#[test]
fn layer_policies_place_high_precision() {
    flex_only!();
    let model = net(&device());
    let policy = LayerPolicy::FirstLast { first: 0, last: 1 };
    let recipe = Nvfp4Recipe::new().with_layers(policy);
    assert_eq!(recipe.apply(&model).unwrap(), 1);
    assert!(model.blocks[1].state.is_high_precision());
    // A policy and a group together: either is enough.
    let group = ParamGroup::from_path("up.weight");
    let recipe = recipe.with_high_precision(Some(group));
    assert_eq!(recipe.apply(&model).unwrap(), 2);
    assert!(!model.blocks[0].state.is_high_precision());
}

#[test]
fn healing_changes_the_forward_the_backward_or_both() {
    flex_only!();
    let device = device().autodiff();
    let healing = |forward_only| Healing {
        at_fraction: 0.75,
        forward_only,
    };
    let healed = |forward_only| {
        let recipe = Nvfp4Recipe::new().with_healing(Some(healing(forward_only)));
        recipe.schedule("nvidia").unwrap()
    };
    let schedule = healed(false);
    let modes: Vec<LayerMode> = (0..4)
        .map(|step| schedule.recipe_at(step, 4).mode)
        .collect();
    let (recipe, high) = (LayerMode::Recipe, LayerMode::HighPrecision);
    assert_eq!(modes, [recipe, recipe, recipe, high]);
    assert_eq!(
        healed(true).recipe_at(3, 4).mode,
        LayerMode::HighPrecisionForward
    );

    let model = net(&device);
    let layer = &model.up;
    let x = Matrix::gaussian(48, 32, DType::F32, 7).tensor(&device);
    let step = || {
        let x = x.clone().require_grad();
        let y = layer.forward(x.clone());
        let grads = y.clone().square().sum().backward();
        let dw = layer.weight.grad(&grads).unwrap();
        (
            values(y.inner()),
            values(x.grad(&grads).unwrap()),
            values(dw),
        )
    };
    let plain = layer.clone().into_linear();
    let exact = values(plain.forward(x.clone()).inner());
    let quantized = step();
    assert_ne!(quantized.0, exact);

    set_mode(&model, LayerMode::HighPrecisionForward);
    let offset = layer.state.rng_state().offset;
    let (y, _, dw) = step();
    assert_eq!(y, exact);
    assert_eq!(layer.state.rng_state().offset, offset + 1, "dy is drawn");
    let state = Nvfp4State::collect(&model);
    assert_eq!(state.modes.len(), 3);

    set_mode(&model, LayerMode::HighPrecision);
    let (y, _, exact_dw) = step();
    assert_eq!(y, exact);
    assert_ne!(dw, exact_dw, "the backward was quantized before");
    assert_eq!(
        layer.state.rng_state().offset,
        offset + 1,
        "nothing is drawn"
    );
    let grads = plain.forward(x.clone()).square().sum().backward();
    assert_eq!(exact_dw, values(plain.weight.grad(&grads).unwrap()));

    set_mode(&model, LayerMode::HighPrecisionBackward);
    let (y, _, dw) = step();
    assert_eq!(y, quantized.0, "the forward follows the recipe");
    let qat = Nvfp4Linear::from_linear(plain.clone(), &Nvfp4Recipe::fwd_nvfp4_bwd_bf16()).unwrap();
    let grads = qat.forward(x.clone()).square().sum().backward();
    assert_eq!(dw, values(qat.weight.grad(&grads).unwrap()));

    // A checkpoint restores the mode.
    let json = serde_json::to_string(&state).unwrap();
    assign_layer_ids(&model);
    Nvfp4State::load_binary(json.as_bytes())
        .unwrap()
        .apply(&model)
        .unwrap();
    assert_eq!(layer.state.mode(), LayerMode::HighPrecisionForward);
    set_mode(&model, LayerMode::Recipe);
    assert_ne!(step().0, exact);
    assert!(Nvfp4State::collect(&model).modes.is_empty());
}

/// An unknown value of a field is an error that lists the known values.
#[test]
fn unknown_values_are_refused_with_the_known_ones() {
    for (field, value, known) in [
        (
            "format",
            "nvfp8",
            &["high_precision", "nvfp4", "ms_eden", "mxfp8", "mxfp4"][..],
        ),
        ("rounding", "up", &["nearest", "stochastic"]),
        ("block", "1x32", &["1x16", "16x16"]),
        ("amax", "per_block", &["per_tensor", "per_row"]),
        (
            "scale",
            "four_over_six",
            &[
                "standard",
                "headroom",
                "four_over_six_mae",
                "four_over_six_mse",
            ],
        ),
    ] {
        let mut spec = serde_json::json!({"format": "nvfp4"});
        spec[field] = value.into();
        let error = serde_json::from_value::<QuantSpec>(spec)
            .unwrap_err()
            .to_string();
        for name in known.iter().chain([&value]) {
            assert!(error.contains(name), "{field}: {error}");
        }
    }
}
