use super::request::Decorate;
use super::*;
use burn::config::Config;
use burn::module::ParamGroup;
use clap::Parser;
use nvfp4::Nvfp4Recipe;
use nvfp4::recipe::{Healing, LayerPolicy};
use nvfp4_lm::config::{Decoration, HealingOption};

fn parse(json: &str) -> Options {
    serde_json::from_str(json).unwrap()
}

/// Parses the layer of a command line.
fn flags(arguments: &[&str]) -> Options {
    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: Options,
    }
    Command::try_parse_from([&["nvfp4"], arguments].concat())
        .unwrap_or_else(|error| panic!("{error}"))
        .options
}

/// Each flag sets its own key only.
#[test]
fn flags_give_what_they_say() {
    assert!(flags(&[]).is_empty());
    let given = flags(&[
        "--lr",
        "1e-3",
        "--rht",
        "false",
        "--experts",
        "4",
        "--data",
        "a",
        "b",
    ]);
    let expected = r#"{"lr": 0.001, "rht": false, "experts": 4, "data": ["a", "b"]}"#;
    assert_eq!(given, parse(expected));
    assert_eq!(flags(&["--compare"]), parse(r#"{"compare": true}"#));
    assert_eq!(
        flags(&["--compare", "--no-compare"]),
        parse(r#"{"compare": false}"#)
    );
    assert_eq!(flags(&["--decorate"]), parse(r#"{"decorate": "strict"}"#));
    assert_eq!(
        flags(&["--decorate=false"]),
        parse(r#"{"decorate": false}"#)
    );
}

#[test]
fn flags_win_over_the_file_and_the_file_over_the_preset() {
    let file = parse(r#"{"device": "flex", "width": 64, "steps": 50, "compare": true}"#);
    let flags = flags(&["--steps", "20", "--no-compare"]);
    let (config, device) = flags.over(file).resolve().unwrap();
    assert_eq!(device, DeviceName::Flex);
    assert_eq!((config.model.width, config.steps), (64, 20));
    assert!(config.compare.is_empty());
    assert_eq!(config.warmup, 2);
    assert_eq!(
        config.model.layers,
        RunConfig::preset(Preset::Tiny, "flex").model.layers
    );
}

/// Returns the configuration of `flags` (as keys of a file) over the file `file`.
fn over(flags: &str, file: &str) -> RunConfig {
    let resolved = parse(flags).over(parse(file)).resolve();
    resolved
        .unwrap_or_else(|error| panic!("{flags} over {file}: {error:#}"))
        .0
}

#[test]
fn a_flag_takes_the_other_of_its_pair_out_of_the_file() {
    let experts = r#"{"device": "flex", "experts": 4, "top_k": 1, "balance_loss": 0.05}"#;
    let of_preset = r#"{"device": "flex", "preset": "moe-10m", "experts": 8, "width": 64}"#;
    for (flags, file) in [
        (r#"{"model": "dense"}"#, experts),
        (r#"{"model": "dense", "preset": "10m"}"#, of_preset),
    ] {
        let config = over(flags, file);
        assert_eq!((config.model.experts, config.balance_loss), (None, None));
    }
    let config = over(
        r#"{"experts": 4}"#,
        r#"{"device": "flex", "model": "dense"}"#,
    );
    assert_eq!(config.model.experts, Some(4));
    assert_eq!(
        over(r#"{"balance_loss": 0.0}"#, experts).balance_loss,
        Some(0.0)
    );
}

#[test]
fn decoration_can_be_switched_off_again() {
    let decorated = r#"{"device": "cpu", "decorate": "lenient"}"#;
    assert_eq!(over("{}", decorated).decorate, Some(Decoration::Lenient));
    assert_eq!(over(r#"{"decorate": false}"#, decorated).decorate, None);
    for (text, expected) in [
        ("true", Some(Decoration::Strict)),
        ("strict", Some(Decoration::Strict)),
        ("lenient", Some(Decoration::Lenient)),
        ("false", None),
    ] {
        assert_eq!(text.parse(), Ok(Decorate(expected)));
    }
    assert!(
        "1".parse::<Decorate>()
            .unwrap_err()
            .contains("strict, lenient")
    );
}

#[test]
fn a_written_configuration_is_a_config_file() {
    let (config, _) = parse(r#"{"device": "flex", "seed": 5, "lr": 0.001}"#)
        .resolve()
        .unwrap();
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(parse(&text).resolve().unwrap().0, config);
}

#[test]
fn recipes_have_names_or_files() {
    let folder = std::env::temp_dir().join(format!("nvfp4-options-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("mine.json");
    let mine = Nvfp4Recipe::quartet2().with_cache_weights(false);
    mine.save(&path).unwrap();
    let name = path.display().to_string();
    let flags = [
        ["--device", "flex"],
        ["--recipe", &name],
        ["--compare", "f32,per_token"],
        ["--healing", "0.75:forward"],
    ];
    let flags = self::flags(flags.as_flattened());
    let (config, _) = flags.resolve().unwrap();
    let found: Vec<&str> = config.all_recipes().map(RecipeName::name).collect();
    assert_eq!(found, ["mine", "f32", "per_token"]);
    let recipe = config.nvfp4_recipe(&config.recipe).unwrap();
    let healing = config.healing_of(&config.recipe);
    assert!(healing.unwrap().forward_only);
    assert_eq!(recipe, mine.with_healing(healing));
    assert!(config.healing_of(&RecipeName::f32()).is_none());
    // The file is not needed after the configuration is resolved.
    std::fs::remove_dir_all(&folder).unwrap();
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(parse(&text).resolve().unwrap().0, config);
    for (option, text) in [
        ("recipe", "no-file.json"),
        ("recipe", "a/b"),
        ("recipe", "fp8"),
    ] {
        let flags = self::flags(&["--device", "flex", "--recipe", text]);
        let error = format!("{:#}", flags.resolve().unwrap_err());
        assert!(error.contains(option) && error.contains(text), "{error}");
    }
    for text in ["1.5", "x", "0.5:backward"] {
        assert!(text.parse::<HealingOption>().unwrap_err().contains(text));
    }
}

/// Returns the configuration of a run with a recipe file whose text is `text`, and with flags.
fn with_file(name: &str, text: &str, flags: Options) -> Result<RunConfig> {
    let folder = std::env::temp_dir().join(format!("nvfp4-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("own.json");
    std::fs::write(&path, text).unwrap();
    let name = path.display().to_string();
    let flags = flags.over(self::flags(&["--device", "flex", "--recipe", &name]));
    let resolved = flags.resolve();
    std::fs::remove_dir_all(&folder).unwrap();
    let config = resolved?.0;
    // A resumed run reads the same configuration from the file that was written.
    let written = serde_json::to_string(&config).unwrap();
    assert_eq!(parse(&written).resolve().unwrap().0, config);
    Ok(config)
}

#[test]
fn the_file_of_a_recipe_holds_unless_a_flag_is_given() {
    let own = Nvfp4Recipe::preset("nvidia_4over6")
        .unwrap()
        .with_seed(7)
        .with_rht_signs(0x1234)
        .with_rht_seeded(true)
        .with_high_precision(Some(ParamGroup::from_regex("own").unwrap()))
        .with_layers(LayerPolicy::FirstLast { first: 1, last: 0 })
        .with_healing(Some(Healing {
            at_fraction: 0.25,
            forward_only: true,
        }))
        .with_cache_weights(false);
    let text = serde_json::to_string(&own).unwrap();
    let config = with_file("holds", &text, Options::default()).unwrap();
    assert_eq!(config.seed, 7);
    assert_eq!(config.healing_of(&config.recipe), own.healing);
    assert_eq!(config.nvfp4_recipe(&config.recipe).unwrap(), own);

    let flags = [
        ["--seed", "3"],
        ["--rht-signs", "255"],
        ["--high-precision", "flag"],
        ["--healing", "0.5"],
    ];
    let flags = self::flags(flags.as_flattened());
    let config = with_file("flags", &text, flags).unwrap();
    let healing = Healing {
        at_fraction: 0.5,
        forward_only: false,
    };
    assert_eq!(config.healing_of(&config.recipe), Some(healing));
    let expected = own
        .with_seed(3)
        .with_rht_signs(0x00FF)
        .with_rht_seeded(false)
        .with_high_precision(Some(ParamGroup::from_any_regexes(vec!["flag"]).unwrap()))
        .with_healing(Some(healing));
    assert_eq!(config.nvfp4_recipe(&config.recipe).unwrap(), expected);
}

#[test]
fn what_the_file_of_a_recipe_leaves_out_is_the_default() {
    let text = r#"{"rht_signs": 5, "layers": {"keep": "keep_last", "fraction": 0.5}}"#;
    let config = with_file("left-out", text, Options::default()).unwrap();
    let expected = Nvfp4Recipe::new()
        .with_rht_signs(5)
        .with_layers(LayerPolicy::KeepLast { fraction: 0.5 });
    assert_eq!(config.nvfp4_recipe(&config.recipe).unwrap(), expected);
    assert_eq!(config.healing_of(&config.recipe), None);

    for (text, part) in [
        (r#"{"rht_sings": 5}"#, "the field rht_sings"),
        (r#"{"fprop": {}}"#, "missing field `x`"),
    ] {
        let error = with_file("wrong", text, Options::default()).unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains(part) && error.contains("own.json"),
            "{error}"
        );
    }
}

#[test]
fn wrong_keys_are_errors() {
    for (json, parts) in [
        (r#"{"widht": 64}"#, ["widht", "width"]),
        (
            r#"{"width": "wide"}"#,
            ["width is \"wide\"", "expected usize"],
        ),
        (
            r#"{"healing": "1.5"}"#,
            ["healing is \"1.5\"", "share of the steps"],
        ),
    ] {
        let error = format!("{:#}", parse(json).resolve().unwrap_err());
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn presets_have_experts_unless_others_are_asked_for() {
    let resolve = |json: &str| parse(json).resolve().map(|(config, _)| config);
    let moe = resolve(r#"{"device": "flex", "preset": "moe-10m", "balance_loss": 0.05}"#).unwrap();
    assert_eq!((moe.model.experts, moe.balance_loss), (Some(8), Some(0.05)));
    let four = resolve(r#"{"device": "flex", "preset": "moe-10m", "experts": 4}"#).unwrap();
    assert_eq!(four.model.experts, Some(4));
    for config in [moe, four] {
        let written = serde_json::to_string(&config).unwrap();
        assert_eq!(resolve(&written).unwrap(), config);
    }
    let error = resolve(r#"{"device": "flex", "preset": "moe-10m", "model": "dense"}"#);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("preset moe-10m has experts"), "{error}");
    let both = resolve(r#"{"device": "flex", "experts": 4, "model": "dense"}"#);
    let error = both.unwrap_err().to_string();
    assert!(
        error.contains("experts is 4, but model is dense"),
        "{error}"
    );
}

#[test]
fn high_precision_alone_is_not_compared() {
    let (config, _) = parse(r#"{"device": "flex", "recipe": "f32"}"#)
        .resolve()
        .unwrap();
    assert!(config.compare.is_empty());
    let both = parse(r#"{"device": "flex", "recipe": "f32", "compare": true}"#);
    assert!(
        both.resolve()
            .unwrap_err()
            .to_string()
            .contains("compare is f32, but recipe is f32")
    );
}

/// Both names are one recipe, which is not compared with itself.
#[test]
fn nvfp4_is_an_alias_of_nvidia() {
    let flags = |arguments: &[&str]| {
        let device = ["--device", "flex"];
        self::flags(&[&device, arguments].concat())
    };
    let (config, _) = flags(&["--recipe", "nvfp4"]).resolve().unwrap();
    assert_eq!(config.recipe, RecipeName::nvidia());
    let (config, _) = flags(&["--schedule", "nvfp4,0.5=nvfp4:fwd_bf16"])
        .resolve()
        .unwrap();
    let schedule = config.schedule.unwrap().to_string();
    assert_eq!(schedule, "nvidia,0.5=nvidia:fwd_bf16");
    let error = refused(&["--compare", "nvfp4"]);
    assert!(
        error.contains("compare is nvidia, but recipe is nvidia"),
        "{error}"
    );
    let help = recipes::values();
    let alias = help.iter().find(|value| value.matches("nvfp4", false));
    let said = alias.unwrap().get_help().unwrap().to_string();
    assert_eq!(said, "Another name of nvidia");
}

/// A study compares with high precision, which has no switches.
#[test]
fn runs_in_high_precision_leave_out_options_of_quantized_ones() {
    let options = flags(&["--device", "flex", "--rht", "false"]);
    let run = |recipe| options.clone().for_run(recipe, 3, None).resolve();
    let (config, _) = run("f32").unwrap();
    assert!(config.rht);
    let (config, _) = run("nvidia").unwrap();
    assert!(!config.rht);
    assert!(run("mxfp8").is_err());
}

/// Returns the error of these flags.
fn refused(arguments: &[&str]) -> String {
    let flags = flags(&[&["--device", "flex"], arguments].concat());
    format!("{:#}", flags.resolve().unwrap_err())
}

#[test]
fn a_schedule_has_recipes_by_name_or_file() {
    let folder = std::env::temp_dir().join(format!("nvfp4-schedule-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("mine.json");
    let mine = Nvfp4Recipe::quartet2().with_seed(9);
    mine.save(&path).unwrap();
    let text = format!("nvidia,0.5={}:bwd_bf16,0.75=f32", path.display());
    let flags = flags(&["--device", "flex", "--seed", "3", "--schedule", &text]);
    let (config, _) = flags.resolve().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let schedule = config.schedule.as_ref().unwrap();
    assert_eq!(schedule.to_string(), "nvidia,0.5=mine:bwd_bf16,0.75=f32");
    assert_eq!(config.recipe.name(), "nvidia");
    assert_eq!(config.compare, [RecipeName::f32()], "of the preset");
    let recipes = config.recipe_schedule(&config.recipe).unwrap();
    // A run has one seed.
    assert_eq!(recipes.phases()[1].recipe, mine.with_seed(3));
    assert!(recipes.phases()[0].recipe.is_quantized() && !recipes.phases()[2].is_quantized());
    // Compared recipes have one phase.
    assert!(
        config
            .recipe_schedule(&RecipeName::f32())
            .unwrap()
            .is_constant()
    );
    let written = serde_json::to_string(&config).unwrap();
    assert_eq!(parse(&written).resolve().unwrap().0, config);
}

#[test]
fn a_schedule_contradicts_recipe_and_healing() {
    let file = r#"{"device": "flex", "recipe": "quartet2", "healing": "0.5"}"#;
    let config = over(r#"{"schedule": "per_token,0.5=mxfp8"}"#, file);
    assert_eq!((config.recipe.name(), config.healing), ("per_token", None));
    let file = r#"{"device": "flex", "schedule": "per_token,0.5=mxfp8"}"#;
    assert_eq!(over(r#"{"healing": "0.5"}"#, file).schedule, None);
    assert_eq!(over(r#"{"recipe": "mxfp8"}"#, file).schedule, None);

    let schedule = ["--schedule", "nvidia,0.5=mxfp8"];
    for (more, parts) in [
        (
            ["--recipe", "mxfp8"],
            ["recipe is mxfp8", "nvidia,0.5=mxfp8"],
        ),
        (["--healing", "0.9"], ["healing is 0.9", "nvidia,0.5=mxfp8"]),
        (["--rht", "false"], ["rht is false", "mxfp8"]),
        (["--rht-signs", "5"], ["rht-signs is 5", "recipe mxfp8"]),
    ] {
        let error = refused(&[schedule, more].concat());
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    for (text, parts) in [
        ("nvidia,0.5=fp8", ["phase 2 (`0.5=fp8`)", "quartet2"]),
        ("nvidia,0.5=no.json", ["schedule no.json", "no recipe"]),
        ("nvidia,0.5=bf16", ["phase 0.5=bf16", "--activation is f32"]),
    ] {
        let error = refused(&["--schedule", text]);
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

/// The plan of `cargo xtask ladder` names presets, and recipes by their files.
#[test]
fn recipes_of_the_ladder_train() {
    let plan = concat!(env!("CARGO_MANIFEST_DIR"), "/../xtask/ladder/plan.json");
    let plan: Value = serde_json::from_slice(&std::fs::read(plan).unwrap()).unwrap();
    let own = plan["recipes"].as_object().unwrap();
    let folder = std::env::temp_dir().join(format!("nvfp4-ladder-recipes-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let groups = plan["runs"].as_array().unwrap().iter();
    let named = groups.flat_map(|group| group["recipes"].as_array().unwrap());
    let mut found = std::collections::BTreeMap::new();
    for name in named.map(|name| name.as_str().unwrap()) {
        let recipe = match own.get(name) {
            None => name.to_owned(),
            Some(fields) => {
                let path = folder.join(format!("{name}.json"));
                std::fs::write(&path, fields.to_string()).unwrap();
                path.to_str().unwrap().to_owned()
            }
        };
        let options = flags(&["--device", "flex", "--recipe", &recipe, "--no-compare"]);
        let (config, _) = options
            .resolve()
            .unwrap_or_else(|e| panic!("{name}: {e:#}"));
        found.insert(name, config.nvfp4_recipe(&config.recipe).unwrap());
    }
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(own.keys().all(|name| found.contains_key(&**name)));
    // The file states every difference from `nvidia`.
    let quartet2 = Nvfp4Recipe::quartet2();
    let healing = Some(Healing {
        at_fraction: 0.85,
        forward_only: true,
    });
    let healed = quartet2.clone().with_healing(healing);
    assert_eq!(found["quartet2_healed"], healed);
    assert_eq!(
        found["backward_nvidia"].operands()[2..],
        Nvfp4Recipe::nvidia().operands()[2..]
    );
    assert_eq!(
        found["backward_ms_eden"].operands()[2..],
        quartet2.operands()[2..]
    );
    assert_eq!(
        found["forward_1x16_4over6"].operands()[..2],
        quartet2.operands()[..2]
    );
    // Each `only_` recipe quantizes one operand, except `only_wgrad`, whose two operands share one
    // format.
    let high = found["bf16"].operands();
    for (name, own) in [
        ("only_fprop_x", 0..1),
        ("only_fprop_w", 1..2),
        ("only_dgrad_dy", 2..3),
        ("only_dgrad_w", 3..4),
        ("only_wgrad", 4..6),
    ] {
        let mut expected = high;
        expected[own.clone()].copy_from_slice(&Nvfp4Recipe::nvidia().operands()[own]);
        assert_eq!(found[name].operands(), expected, "{name}");
    }
}
