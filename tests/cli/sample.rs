//! Text from checkpoints.

use crate::support::*;

#[test]
fn sampling_continues_the_prompt() {
    let path = finished().to_str().unwrap();
    let sample = |more: &str| {
        let arguments = format!("sample --device flex --tokens 40 {more}");
        succeeds(nvfp4(
            &arguments,
            &["--checkpoint", path, "--prompt", "let x"],
        ))
    };
    let first = sample("--seed 1");
    assert!(
        first.starts_with("let x") && first.len() > "let x\n".len(),
        "{first:?}"
    );
    assert_eq!(first, sample("--seed 1"));
    assert_eq!(
        sample("--temperature 0 --seed 1"),
        sample("--temperature 0 --seed 2")
    );
    let seeds: std::collections::HashSet<String> = (2..6)
        .map(|seed| sample(&format!("--seed {seed}")))
        .collect();
    assert!(seeds.len() > 1);
    // The folder of a recipe and of a checkpoint mean the same model.
    let recipe = finished().join("nvfp4");
    for folder in [checkpoint(&recipe), recipe] {
        let folder = folder.to_str().unwrap();
        let arguments = "sample --device flex --tokens 40 --seed 1 --prompt";
        assert_eq!(
            succeeds(nvfp4(arguments, &["let x", "--checkpoint", folder])),
            first
        );
    }
    let empty = folder("no-checkpoint");
    let sample = [
        "--prompt",
        "a",
        "--device",
        "flex",
        "--checkpoint",
        empty.to_str().unwrap(),
    ];
    fails(
        nvfp4("sample", &sample),
        &["no checkpoint", "no-checkpoint"],
    );
}

/// CubeCL's CPU runtime has no bf16: text from a bf16 run would be noise there.
#[cfg(feature = "cpu")]
#[test]
fn a_device_without_bf16_samples_none() {
    let out = folder("bf16");
    succeeds(train(&out, "--steps 1 --no-compare --recipe bf16"));
    let sample = ["--checkpoint", out.to_str().unwrap(), "--prompt", "let"];
    fails(
        nvfp4("sample --tokens 2 --device cpu", &sample),
        &["BF16 on device cpu", "flex or cuda:N"],
    );
    succeeds(nvfp4("sample --tokens 2 --device flex", &sample));
}
