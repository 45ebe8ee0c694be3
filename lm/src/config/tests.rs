use super::*;
use clap::ValueEnum;

#[test]
fn presets_are_valid_and_as_large_as_they_say() {
    for (preset, low, high) in [
        (Preset::Tiny, 0.8e6, 1.0e6),
        (Preset::Small, 6e6, 8e6),
        (Preset::M10, 9.5e6, 10.5e6),
        (Preset::Moe10M, 9.5e6, 10.5e6),
        (Preset::M30, 28e6, 32e6),
        (Preset::M125, 115e6, 130e6),
    ] {
        for device in ["flex", "cuda:0"] {
            let config = RunConfig::preset(preset, device);
            config.check().unwrap();
            let parameters = config.model.parameters() as f64;
            assert!((low..high).contains(&parameters), "{preset}: {parameters}");
        }
        assert_eq!(Preset::from_str(&preset.to_string(), false), Ok(preset));
    }
}

#[test]
fn experts_are_checked_and_counted() {
    let moe = RunConfig::preset(Preset::Moe10M, "flex").model;
    assert_eq!((moe.experts, moe.top_k), (Some(8), 2));
    assert_eq!(moe.active_weights(), 3_211_264, "what its description says");
    let dense = RunConfig::preset(Preset::Tiny, "flex").model;
    let experts = |experts, top_k| ModelConfig {
        experts: Some(experts),
        top_k,
        ..dense.clone()
    };
    let ModelConfig {
        width,
        hidden,
        layers,
        ..
    } = dense;
    let more = 7 * 3 * width * hidden + 8 * width;
    let found = experts(8, 2);
    found.check().unwrap();
    assert_eq!(found.parameters(), dense.parameters() + layers * more);
    for (name, config) in [
        ("experts", experts(0, 1)),
        ("experts", experts(1000, 1)),
        ("top-k", experts(4, 5)),
        ("top-k", experts(4, 0)),
    ] {
        let error = config.check().unwrap_err().to_string();
        assert!(error.starts_with(name), "{name}: {error}");
    }
}

#[test]
fn errors_name_the_value() {
    let good = RunConfig::preset(Preset::Tiny, "flex");
    type Spoil = fn(&mut RunConfig);
    let cases: [(&str, Spoil); 22] = [
        ("width", |c| c.model.width = 100),
        ("hidden", |c| c.model.hidden = 0),
        ("heads", |c| c.model.heads = 3),
        ("batch", |c| c.batch = 0),
        ("accumulate", |c| c.accumulate = 0),
        ("warmup", |c| c.warmup = c.steps),
        ("lr", |c| c.lr = f64::NAN),
        ("balance-loss", |c| c.balance_loss = Some(0.1)),
        ("balance-loss", |c| {
            c.model.experts = Some(4);
            c.balance_loss = Some(-0.1);
        }),
        ("activation", |c| {
            c.device = "cpu".into();
            c.activation = Activation::Bf16;
        }),
        ("recipe", |c| {
            c.device = "cpu".into();
            c.compare = Vec::new();
            c.recipe = RecipeName::bf16();
        }),
        ("recipe", |c| c.recipe = "fp8".parse().unwrap()),
        ("compare", |c| c.recipe = RecipeName::f32()),
        ("rht", |c| {
            c.recipe = "quartet2".parse().unwrap();
            c.compare = vec![RecipeName::f32()];
            c.rht = false;
        }),
        ("rht", |c| {
            c.recipe = RecipeName::f32();
            c.compare = Vec::new();
            c.rht = false;
        }),
        ("healing", |c| {
            c.recipe = RecipeName::f32();
            c.compare = Vec::new();
            c.healing = Some("0.5".parse().unwrap());
        }),
        ("top-k", |c| c.model.top_k = 3),
        ("weight-2d", |c| {
            c.compare = vec!["quartet2".parse().unwrap()];
            c.weight_2d = false;
        }),
        ("recompute", |c| c.recompute = c.model.layers + 1),
        ("decorate", |c| c.decorate = Some(Decoration::Strict)),
        ("decorate", |c| {
            c.device = "cpu".into();
            c.decorate = Some(Decoration::Lenient);
            c.model.experts = Some(8);
        }),
        ("high-precision", |c| c.high_precision = vec!["(".into()]),
    ];
    for (name, spoil) in cases {
        let mut config = good.clone();
        spoil(&mut config);
        let error = config.check().unwrap_err().to_string();
        assert!(error.starts_with(name), "{name}: {error}");
    }
}

/// Steps run as a CUDA graph on a GPU, except where a graph would repeat or miss something.
#[test]
fn steps_are_captured_where_they_can_be() {
    use ExpertDispatchName::{AllGather, AllToAll};
    let uncaptured = |device: &str, change: &dyn Fn(&mut RunConfig)| {
        let mut config = RunConfig::preset(Preset::Tiny, device);
        change(&mut config);
        config.check().unwrap();
        config.uncaptured()
    };
    assert_eq!(uncaptured("cuda:0", &|_| ()), None);
    let quartet2 = |config: &mut RunConfig| config.recipe = "quartet2".parse().unwrap();
    assert_eq!(uncaptured("cuda:1", &quartet2), None);
    let decorated = |config: &mut RunConfig| config.decorate = Some(Decoration::Strict);
    assert_eq!(uncaptured("cuda:0", &decorated), None);
    fn dispatch(config: &mut RunConfig, how: Option<ExpertDispatchName>) {
        (config.ep, config.model.experts, config.ep_dispatch) = (2, Some(4), how);
    }
    for how in [None, Some(AllGather)] {
        assert_eq!(uncaptured("cuda:0", &|config| dispatch(config, how)), None);
    }
    type Change = dyn Fn(&mut RunConfig);
    let cases: [(&str, &Change, Uncaptured); 5] = [
        ("flex", &|_| (), Uncaptured::NoGpu),
        ("cuda:0", &|c| c.no_graph = true, Uncaptured::NoGraph),
        (
            "cuda:0",
            &|c| c.optimizer = OptimizerName::Muon,
            Uncaptured::Muon,
        ),
        ("cuda:0", &|c| c.zero1 = true, Uncaptured::Zero1),
        (
            "cuda:0",
            &|c| dispatch(c, Some(AllToAll)),
            Uncaptured::AllToAll,
        ),
    ];
    for (device, change, expected) in cases {
        assert_eq!(uncaptured(device, change), Some(expected));
        let by_choice = matches!(expected, Uncaptured::NoGpu | Uncaptured::NoGraph);
        assert_eq!(expected.is_notable(), !by_choice, "{expected}");
    }
}

/// Options that conflict with a split over ranks are refused by name.
#[test]
fn what_ranks_cannot_split_is_said() {
    type Spoil = fn(&mut RunConfig);
    let cases: [(&[&str], Spoil); 13] = [
        (&["tp is 0"], |c| c.tp = 0),
        (&["ep is 0"], |c| c.ep = 0),
        (&["tp is 2", "Muon"], |c| c.optimizer = OptimizerName::Muon),
        (&["tp is 2", "ep is 1", "such as 2"], |c| {
            c.model.experts = Some(4);
        }),
        (&["tp is 2", "ep is 3", "multiple of tp"], |c| {
            (c.ep, c.model.experts) = (3, Some(6));
        }),
        (&["tp is 2", "heads is 3", "multiple of 2"], |c| {
            (c.model.width, c.model.heads) = (96, 3);
        }),
        (&["tp is 2", "512 wide", "256"], |c| {
            (c.model.width, c.model.heads) = (1024, 2);
        }),
        (&["tp is 4", "width is 96", "64"], |c| {
            (c.tp, c.model.width, c.model.heads) = (4, 96, 4);
        }),
        (&["tp is 2", "hidden is 48", "32"], |c| c.model.hidden = 48),
        (&["tp is 3", "vocabulary"], |c| {
            (c.tp, c.model.width, c.model.heads, c.model.hidden) = (3, 96, 3, 96);
        }),
        (&["ep is 2", "no experts", "moe"], |c| (c.tp, c.ep) = (1, 2)),
        (&["ep is 2", "experts is 3"], |c| {
            (c.tp, c.ep, c.model.experts) = (1, 2, Some(3));
        }),
        (&["fsdp and zero1 are true"], |c| {
            (c.fsdp, c.zero1) = (true, true);
        }),
    ];
    for (names, spoil) in cases {
        let mut config = RunConfig::preset(Preset::Tiny, "flex");
        config.tp = 2;
        config.check().unwrap();
        spoil(&mut config);
        let error = config.check().unwrap_err().to_string();
        for name in names {
            assert!(error.contains(name), "no {name}: {error}");
        }
    }
}

/// The default is an all-gather if it sends no more than an all-to-all, and with a graph.
#[test]
fn tokens_travel_as_the_layout_says() {
    use ExpertDispatchName::{AllGather, AllToAll};
    let mut config = RunConfig::preset(Preset::Tiny, "cuda:0");
    (config.model.experts, config.model.top_k) = (Some(8), 2);
    for (ep, graph, expected) in [
        (2, false, AllGather),
        (2, true, AllGather),
        (4, false, AllToAll),
        (4, true, AllGather),
    ] {
        (config.ep, config.no_graph) = (ep, !graph);
        config.check().unwrap();
        assert_eq!(config.expert_dispatch(), expected, "ep {ep}, graph {graph}");
        config.ep_dispatch = Some(AllGather);
        assert_eq!(config.expert_dispatch(), AllGather);
        config.check().unwrap();
        config.ep_dispatch = Some(AllToAll);
        assert_eq!(config.expert_dispatch(), AllToAll);
        config.check().unwrap();
        config.ep_dispatch = None;
    }
}

/// Data-parallel ranks are the ranks divided by the tensor-group size; experts are on some of them.
#[test]
fn ranks_fit_the_groups() {
    let mut config = RunConfig::preset(Preset::Tiny, "flex");
    config.batch = 12;
    let refused = |config: &RunConfig, ranks: usize, names: &[&str]| {
        let error = config.check_ranks(ranks).unwrap_err().to_string();
        for name in names {
            assert!(error.contains(name), "no {name}: {error}");
        }
    };
    config.tp = 2;
    config.check_ranks(2).unwrap();
    config.check_ranks(4).unwrap();
    assert_eq!((config.data_ranks(2), config.data_ranks(4)), (1, 2));
    refused(&config, 1, &["tp is 2", "1 ranks"]);
    refused(&config, 3, &["tp is 2", "3 ranks"]);
    refused(&config, 10, &["batch is 12", "(5)"]);
    config.dp = Some(4);
    refused(&config, 4, &["dp is 4", "4 ranks", "tensor groups of 2"]);
    config.dp = None;
    config.model.context = 20;
    refused(&config, 24, &["tp is 2", "20 tokens", "32"]);
    (config.tp, config.ep) = (1, 2);
    config.check_ranks(4).unwrap();
    refused(&config, 3, &["ep is 2", "3 ranks"]);
    // Experts are distributed over whole tensor groups.
    (config.tp, config.ep, config.model.context) = (2, 4, 32);
    config.check_ranks(4).unwrap();
    refused(&config, 6, &["ep is 4", "6 ranks"]);
}
