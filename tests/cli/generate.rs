//! Tests of text generation from checkpoints of `nvfp4 train`.

use crate::support::*;

#[test]
fn checkpoints_continue_the_prompt() {
    let path = finished().to_str().unwrap();
    let run = |more: &[&str]| {
        let arguments = "generate --device flex --tokens 40 --prompt";
        nvfp4(arguments, &[&["let x", path], more].concat())
    };
    let words = |more: &str| -> Vec<String> { more.split(' ').map(str::to_owned).collect() };
    let sample = |more: &str| {
        let words = words(&format!("--temperature 0.8 {more}"));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        succeeds(run(&words))
    };
    let first = sample("--seed 1");
    assert!(
        first.starts_with("let x") && first.len() > "let x\n".len(),
        "{first:?}"
    );
    assert_eq!(first, sample("--seed 1"));
    // Generation is greedy by default, and when sampling from a single byte.
    let greedy = succeeds(run(&[]));
    assert_eq!(greedy, succeeds(run(&["--seed", "2"])));
    assert_eq!(greedy, sample("--top-k 1 --seed 1"));
    assert_eq!(greedy, sample("--top-p 0.000001 --seed 1"));
    assert_ne!(greedy, succeeds(run(&["--repetition-penalty", "8"])));
    // The text ends before a stop string.
    let stop: String = first["let x".len()..].chars().skip(3).take(2).collect();
    let ended = sample_until(path, &stop);
    let end = first["let x".len()..].find(&stop).unwrap() + "let x".len();
    assert_eq!(ended, format!("{}\n", &first[..end]));
    let seeds: std::collections::HashSet<String> = (2..6)
        .map(|seed| sample(&format!("--seed {seed}")))
        .collect();
    assert!(seeds.len() > 1);
    // The folders of a recipe and of a checkpoint refer to the same model.
    let recipe = finished().join("nvfp4");
    for folder in [checkpoint(&recipe), recipe] {
        let folder = folder.to_str().unwrap();
        let arguments = "generate --device flex --tokens 40 --temperature 0.8 --seed 1 --prompt";
        assert_eq!(succeeds(nvfp4(arguments, &["let x", folder])), first);
    }
    for (more, name) in [
        (["--scheme", "w4a4"], "scheme is given"),
        (["--kv", "fp8"], "kv is given"),
        (["--head", "fp8"], "head is given"),
        (["--dtype", "f32"], "dtype is given"),
    ] {
        fails(run(&more), &[name, "a model of `train`"]);
    }
    fails(run(&["--no-graph"]), &["no-graph is given"]);
    let empty = folder("no-checkpoint");
    let empty = [empty.to_str().unwrap(), "--prompt", "a", "--device", "flex"];
    fails(
        nvfp4("generate", &empty),
        &["no checkpoint", "no-checkpoint"],
    );
}

/// Generates the text of seed 1, up to `stop`.
fn sample_until(path: &str, stop: &str) -> String {
    let arguments = "generate --device flex --tokens 40 --temperature 0.8 --seed 1";
    let more = [path, "--prompt", "let x", "--stop", stop];
    succeeds(nvfp4(arguments, &more))
}

/// CubeCL's CPU runtime lacks bf16, so the text of a bf16 run would be noise there.
#[cfg(feature = "cpu")]
#[test]
fn a_device_without_bf16_samples_none() {
    let out = folder("bf16");
    succeeds(train(&out, "--steps 1 --no-compare --recipe bf16"));
    let sample = [out.to_str().unwrap(), "--prompt", "let"];
    fails(
        nvfp4("generate --tokens 2 --device cpu", &sample),
        &["BF16 on device cpu", "flex or cuda:N"],
    );
    succeeds(nvfp4("generate --tokens 2 --device flex", &sample));
}
