//! Schedules of recipes: their text, their checks, and layers that follow them.

use burn_core as burn;

use burn_core::module::{Module, Param, ParamGroup};
use burn_core::tensor::{DType, Device};
use burn_nvfp4::recipe::{LayerPolicy, NamedSchedule, RecipePhase, RecipeSchedule};
use burn_nvfp4::state::assign_layer_ids;
use burn_nvfp4::{LayerMode, Nvfp4Linear, Nvfp4Recipe, Nvfp4State};

use crate::support::{Matrix, device, flex_only, values};

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Nvfp4Linear>,
}

/// Returns two equal layers in blocks.
fn net(recipe: &Nvfp4Recipe, device: &Device) -> Net {
    let layer = || {
        let weight = Matrix::gaussian(64, 64, DType::F32, 3).tensor(device);
        let layer = burn_nn::Linear {
            weight: Param::from_tensor(weight),
            bias: None,
        };
        Nvfp4Linear::from_linear(layer, recipe).unwrap()
    };
    let net = Net {
        blocks: vec![layer(), layer()],
    };
    assign_layer_ids(&net);
    net
}

/// Returns the output and the gradients of one step of the first layer.
fn step(net: &Net, device: &Device) -> [Vec<f32>; 3] {
    let layer = &net.blocks[0];
    let x = Matrix::gaussian(64, 64, DType::F32, 7).tensor(device);
    let x = x.require_grad();
    let y = layer.forward(x.clone());
    let grads = y.clone().square().sum().backward();
    let dw = layer.weight.grad(&grads).unwrap();
    [
        values(y.inner()),
        values(x.grad(&grads).unwrap()),
        values(dw),
    ]
}

fn phase(begins: f64, recipe: Nvfp4Recipe) -> RecipePhase {
    RecipePhase {
        begins,
        name: "own".into(),
        recipe,
        mode: LayerMode::Recipe,
    }
}

#[test]
fn schedules_survive_text_and_json() {
    flex_only!();
    let text = "nvidia,0.5=fwd_nvfp4_bwd_mxfp8,0.85=nvidia:fwd_bf16";
    let named: NamedSchedule = text.parse().unwrap();
    assert_eq!(named.to_string(), text);
    let schedule: RecipeSchedule = text.parse().unwrap();
    assert_eq!(schedule.to_string(), text);
    assert_eq!(
        schedule.phases()[2].mode,
        LayerMode::HighPrecisionForward,
        "{schedule:?}"
    );
    let json = serde_json::to_string(&schedule).unwrap();
    assert_eq!(
        serde_json::from_str::<RecipeSchedule>(&json).unwrap(),
        schedule
    );
    let json = serde_json::to_string(&named).unwrap();
    assert_eq!(json, format!("{text:?}"));
    assert_eq!(serde_json::from_str::<NamedSchedule>(&json).unwrap(), named);
    // The share of the first phase may be written.
    let explicit: RecipeSchedule = "0=nvidia, 0.5 = mxfp8:bwd_bf16".parse().unwrap();
    assert_eq!(explicit.to_string(), "nvidia,0.5=mxfp8:bwd_bf16");
}

#[test]
fn invalid_schedules_are_refused() {
    flex_only!();
    for (text, parts) in [
        ("", &["no phase", "at least one"][..]),
        (
            "nvidia,1.0=bf16",
            &["phase 2 (`1=bf16`)", "at 1", "less than 1"],
        ),
        ("nvidia,-0.5=bf16", &["phase 2", "-0.5", "0 or more"]),
        ("nvidia,NaN=bf16", &["phase 2", "NaN", "0 or more"]),
        ("0.5=nvidia", &["phase 1 (`0.5=nvidia`)", "the first phase"]),
        ("nvidia,bf16", &["phase 2", "more than 0", "phase 1"]),
        (
            "nvidia,0.5=bf16,0.5=mxfp8",
            &["phase 3", "more than 0.5", "phase 2"],
        ),
        ("nvidia,0.5=bf16,0.25=mxfp8", &["phase 3", "more than 0.5"]),
        (
            "nvidia,half=bf16",
            &["the phase `half=bf16`", "RECIPE[:MODE]"],
        ),
        ("nvidia,0.5=", &["the phase `0.5=`", "RECIPE[:MODE]"]),
        (
            "nvidia,0.5=mxfp8:fast",
            &["mxfp8:fast", "fwd_bf16, bwd_bf16, bf16"],
        ),
        (
            "nvidia,0.5=fp8",
            &["phase 2 (`0.5=fp8`)", "nvidia_4over6", "mxfp8"],
        ),
    ] {
        let error = text.parse::<RecipeSchedule>().expect_err(text).to_string();
        for part in parts {
            assert!(error.contains(part), "{text}: no {part:?} in {error}");
        }
    }
    let own = Nvfp4Recipe::new;
    let healing = burn_nvfp4::recipe::Healing {
        at_fraction: 0.5,
        forward_only: true,
    };
    let broken = own().with_layers(LayerPolicy::KeepLast { fraction: 2.0 });
    for (second, parts) in [
        (
            own().with_healing(Some(healing)),
            ["with healing", "later phases"],
        ),
        (
            own().with_seed(3),
            ["with seed 3", "0, the seed of phase 1"],
        ),
        (broken, ["passes its checks", "keep_last of 2"]),
    ] {
        let phases = vec![phase(0.0, own()), phase(0.5, second)];
        let error = RecipeSchedule::new(phases.clone()).unwrap_err().to_string();
        assert!(error.contains("phase 2 (`own`)"), "{error}");
        for part in parts {
            assert!(error.contains(part), "no {part:?} in {error}");
        }
        let json = serde_json::to_string(&phases).unwrap();
        let read = serde_json::from_str::<RecipeSchedule>(&json).unwrap_err();
        assert!(read.to_string().contains(&error), "{read}");
    }
    assert!(serde_json::from_str::<RecipeSchedule>("[]").is_err());
}

#[test]
fn a_phase_begins_with_the_step_at_its_share() {
    flex_only!();
    let schedule: RecipeSchedule = "nvidia,0.5=mxfp8,0.85=bf16".parse().unwrap();
    let at = |step, steps| schedule.index_at(step, steps);
    assert_eq!(
        [0, 49, 50, 84, 85, 99].map(|s| at(s, 100)),
        [0, 0, 1, 1, 2, 2]
    );
    assert_eq!(at(100, 100), 2, "after the last step");
    // 2.5 and 4.25 of 5 steps; 0.5 and 0.85 of one.
    assert_eq!([0, 1, 2, 3, 4].map(|s| at(s, 5)), [0, 0, 0, 1, 1]);
    assert_eq!(at(0, 1), 0);
    assert_eq!(schedule.recipe_at(50, 100).name, "mxfp8");
    for steps in [1, 5, 7, 100] {
        for index in 0..3 {
            let own: Vec<u64> = (0..steps)
                .filter(|step| at(*step, steps) == index)
                .collect();
            let of_phase: Vec<u64> = schedule.steps_of(index, steps).collect();
            assert_eq!(of_phase, own, "phase {index} of {steps} steps");
        }
    }
}

/// Layers have the bits of layers that were built with the recipe of the phase.
#[test]
fn layers_follow_the_phases() {
    flex_only!();
    let device = device().autodiff();
    let other = Nvfp4Recipe::quartet2().with_rht_signs(0x1234);
    let mut phases = vec![phase(0.0, Nvfp4Recipe::nvidia())];
    phases.push(phase(0.25, other.clone()));
    phases.push(RecipePhase {
        mode: LayerMode::HighPrecisionForward,
        ..phase(0.5, Nvfp4Recipe::mxfp8())
    });
    phases.push(phase(0.75, Nvfp4Recipe::nvidia()));
    let schedule = RecipeSchedule::new(phases).unwrap();
    assert!(!schedule.is_constant());
    let model = net(&Nvfp4Recipe::nvidia(), &device);
    schedule.check_model(&model).unwrap();
    for at in 0..4 {
        assert_eq!(schedule.apply(&model, at, 4).unwrap(), at as usize);
        let phase = &schedule.phases()[at as usize];
        let built = net(&phase.recipe, &device);
        // Seed and offset are those of the run.
        let rng_state = burn_nvfp4::state::RngState {
            rht_signs: phase.recipe.rht_signs,
            ..model.blocks[0].state.rng_state()
        };
        assert_eq!(rng_state.offset, at);
        built.blocks[0].state.set_rng_state(rng_state).unwrap();
        burn_nvfp4::set_mode(&built, phase.mode);
        assert!(step(&model, &device) == step(&built, &device), "phase {at}");
    }
}

/// Phases that keep different layers select them anew; those that quantize nothing do not.
#[test]
fn phases_select_their_layers() {
    flex_only!();
    let device = device().autodiff();
    let keep_last = Nvfp4Recipe::new().with_layers(LayerPolicy::FirstLast { first: 0, last: 1 });
    let schedule = RecipeSchedule::new(vec![
        phase(0.0, Nvfp4Recipe::nvidia()),
        phase(0.5, keep_last.clone()),
        phase(0.75, Nvfp4Recipe::bf16()),
    ])
    .unwrap();
    let model = net(&Nvfp4Recipe::nvidia(), &device);
    let kept = [0, 2, 3, 0].map(|step| {
        schedule.apply(&model, step, 4).unwrap();
        model.blocks[1].state.is_high_precision()
    });
    assert_eq!(kept, [false, true, true, false]);

    let group = ParamGroup::from_regex("missing").unwrap();
    let schedule = RecipeSchedule::new(vec![
        phase(0.0, Nvfp4Recipe::nvidia()),
        phase(0.5, keep_last.with_high_precision(Some(group))),
    ])
    .unwrap();
    let error = schedule.check_model(&model).unwrap_err().to_string();
    assert!(
        error.contains("phase 2 (`own`)") && error.contains("missing"),
        "{error}"
    );
}

#[test]
fn models_without_layers_to_quantize_are_refused() {
    flex_only!();
    let model = burn_nn::LinearConfig::new(16, 16).init(&device());
    let schedule = |recipe| RecipeSchedule::new(vec![phase(0.0, recipe)]).unwrap();
    let error = schedule(Nvfp4Recipe::nvidia()).check_model(&model);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("no NVFP4 layer"), "{error}");
    schedule(Nvfp4Recipe::bf16()).check_model(&model).unwrap();
}

/// Healing is a schedule of two phases.
#[test]
fn healing_is_a_schedule() {
    flex_only!();
    let healed = |at_fraction, forward_only| {
        let healing = burn_nvfp4::recipe::Healing {
            at_fraction,
            forward_only,
        };
        let recipe = Nvfp4Recipe::nvidia().with_healing(Some(healing));
        recipe.schedule("nvidia").unwrap()
    };
    let parsed = |text: &str| text.parse::<RecipeSchedule>().unwrap();
    assert_eq!(healed(0.85, true), parsed("nvidia,0.85=nvidia:fwd_bf16"));
    assert_eq!(healed(0.85, false), parsed("nvidia,0.85=nvidia:bf16"));
    assert_eq!(healed(0.0, false), parsed("nvidia:bf16"));
    assert_eq!(healed(1.0, false), parsed("nvidia"));
    assert!(parsed("nvidia").is_constant() && !parsed("nvidia:bf16").is_constant());
    // A checkpoint has the modes of the layers.
    let model = net(&Nvfp4Recipe::nvidia(), &device());
    parsed("nvidia,0.85=nvidia:fwd_bf16")
        .apply(&model, 9, 10)
        .unwrap();
    assert_eq!(Nvfp4State::collect(&model).modes.len(), 2);
}
