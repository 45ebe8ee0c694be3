//! Tests of the measurement of training steps.

use std::path::Path;

use nvfp4::Nvfp4Recipe;

use crate::support::*;

/// The model of Burn's layers, high precision and every preset are measured, dense and with
/// experts.
#[test]
fn the_cost_of_every_recipe_is_measured() {
    let path = folder("cost").with_extension("json");
    let file = path.to_str().unwrap();
    let run = format!("dev cost {SMALL} --rounds 2 --round-steps 1 --warm 1");
    for (more, first) in [("", "burn"), ("--model moe --experts 4", "f32")] {
        let more: Vec<&str> = more.split_whitespace().collect();
        let said = succeeds(nvfp4(&run, &[&more[..], &["--out", file]].concat()));
        let figures = json(&path);
        let results = figures["results"].as_array().unwrap();
        let names: Vec<&str> = results
            .iter()
            .map(|result| result["recipe"].as_str().unwrap())
            .collect();
        assert_eq!(names[0], first);
        for name in Nvfp4Recipe::preset_names().filter(|name| *name != "bf16") {
            assert!(names.contains(&name), "{name}: {names:?}");
        }
        for (name, result) in names.iter().zip(results) {
            assert!(said.contains(name), "{name}: {said}");
            let seconds = result["seconds"].as_array().unwrap();
            assert_eq!(seconds.len(), 2, "{name}: a figure for each round");
            assert!(seconds.iter().all(|each| each.as_f64().unwrap() > 0.0));
            // Flex reports neither memory pools nor launches.
            assert!(result["memory"].is_null());
        }
    }
    for (more, names) in [
        ("--recipe nvidia", ["--recipes", "recipe"]),
        ("--recipes fp8", ["fp8", "nvidia_4over6"]),
        ("--rounds 0 --recipes f32", ["rounds", "at least 1"]),
        ("--recipes f32 --lock no/such", ["lock", "no/such"]),
    ] {
        let more: Vec<&str> = more.split_whitespace().collect();
        fails(nvfp4(&format!("dev cost {SMALL}"), &more), &names);
    }
}

/// Measures a step that telemetry samples, an ordinary step, and the overhead of sampling one step
/// in five.
#[test]
fn the_cost_of_telemetry_is_measured() {
    let path = folder("cost-of-telemetry").with_extension("json");
    let run = "--rounds 2 --round-steps 1 --warm 1 --recipes f32,nvidia --telemetry-every 5 --out";
    let run = format!("dev cost {SMALL} {run}");
    let said = succeeds(nvfp4(&run, &[path.to_str().unwrap()]));
    let header = said.lines().next().unwrap();
    for column in ["sampled ms", "1 in 5"] {
        assert!(header.contains(column), "{column}: {said}");
    }
    let figures = json(&path);
    for result in figures["results"].as_array().unwrap() {
        let median = |key: &str| {
            let rounds = result[key].as_array().unwrap().iter();
            let rounds: Vec<f64> = rounds.map(|each| each.as_f64().unwrap()).collect();
            assert_eq!(rounds.len(), 2, "{key}: a figure for each round");
            rounds[0].max(rounds[1])
        };
        let (plain, sampled) = (median("seconds"), median("sampled"));
        let share = 100.0 * (sampled / plain - 1.0) / 5.0;
        let name = result["recipe"].as_str().unwrap();
        let line = said.lines().find(|line| line.starts_with(name)).unwrap();
        let printed = line.trim_end_matches(" %").rsplit(' ').next().unwrap();
        let printed: f64 = printed.parse().unwrap();
        assert!((printed - share).abs() < 0.006, "{line}, {share}");
        let operands = result["sampled_operands"].as_u64().unwrap();
        assert_eq!(operands, if name == "f32" { 0 } else { 5 * 8 }, "{name}");
    }
    let said = succeeds(nvfp4(
        &format!("dev cost {SMALL} --rounds 1 --round-steps 1 --warm 1 --recipes f32"),
        &[],
    ));
    assert!(!said.contains("sampled"), "{said}");
}

/// Commands that share a lock measure one at a time.
#[test]
fn measurements_take_turns() {
    let path = folder("cost").with_extension("lock");
    let lock = std::fs::File::create(&path).unwrap();
    lock.lock().unwrap();
    let waiting = std::thread::spawn(move || {
        let run = format!("dev cost {SMALL} --rounds 1 --round-steps 1 --warm 1 --recipes f32");
        succeeds(nvfp4(&run, &["--lock", path.to_str().unwrap()]))
    });
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert!(!waiting.is_finished());
    lock.unlock().unwrap();
    assert!(waiting.join().unwrap().contains("f32"));
}

/// A step of finetuning is measured from `config.json` alone, with and without adapters.
#[test]
fn the_cost_of_finetuning_needs_only_the_configuration() {
    let model = folder("finetune-cost");
    std::fs::create_dir_all(&model).unwrap();
    let config = Path::new(&golden("llama3-tiny")).join("config.json");
    std::fs::copy(config, model.join("config.json")).unwrap();
    let out = model.join("cost.json");
    let [model, file] = [&model, &out].map(|path| path.to_str().unwrap());
    let run = "dev finetune-cost --device flex --batch 2 --context 16 --rounds 2 --round-steps 1 \
               --warm 1";
    for (options, says) in [
        (
            "--recipes bf16,nvidia",
            "nvidia, all parameters, 2 x 16 tokens",
        ),
        ("--lora 4", "bf16, adapters of rank 4 beside high weights"),
        ("--lora 4 --frozen w4a16", "beside w4a16 weights"),
        ("--lora 4 --frozen w4a4", "beside w4a4 weights"),
    ] {
        let said = succeeds(nvfp4(&format!("{run} {options}"), &[model, "--out", file]));
        assert!(said.contains(says), "{options}: {said}");
        let figures = json(&out);
        for result in figures["results"].as_array().unwrap() {
            assert_eq!(result["tokens"], 32);
            assert_eq!(result["seconds"].as_array().unwrap().len(), 2);
        }
    }
    let refused = |options: &str, says: &[&str]| {
        fails(nvfp4(&format!("{run} {options}"), &[model]), says);
    };
    refused("--frozen w4a16", &["--lora"]);
    refused("--lora 0", &["lora is 0", "at least 1"]);
    fails(
        nvfp4("dev finetune-cost --device flex --context 100000", &[model]),
        &["context", "100000"],
    );
    refused(
        "--lora 4 --frozen w4a16 --recipes nvidia",
        &["frozen is w4a16"],
    );
}

/// The file reports the bytes of each head precision.
#[test]
fn the_cost_of_decoding_is_measured_with_each_head() {
    let path = folder("decode-cost").with_extension("json");
    let file = path.to_str().unwrap();
    let run = "dev decode-cost tiny --device flex --prompt-length 8 --round-tokens 2 --rounds 1";
    let layers = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128) * 9 / 16 + 2 * 4 * 4;
    for (head, bytes) in [
        ("stored", 0),
        ("fp8", 288 * 64 + 288 * 4),
        ("nvfp4", 288 * 64 * 9 / 16 + 4),
    ] {
        let said = succeeds(nvfp4(run, &["--head", head, "--out", file]));
        assert!(said.contains("tiny") && said.contains("a step"), "{said}");
        let figures = json(&path);
        let result = &figures["results"][0];
        assert_eq!(result["head"], head);
        assert_eq!(result["packed_bytes"], layers + bytes, "{head}");
    }
    fails(
        nvfp4(run, &["--head", "int8"]),
        &["int8", "stored, fp8, nvfp4"],
    );
}
