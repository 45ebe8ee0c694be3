//! Tests of models with layers in NVFP4, FP8 and bf16.

use std::fs;
use std::path::Path;

use nvfp4_test_support::golden_with_tokenizer;

use crate::support::*;

/// Returns a path in this test's folder that does not exist yet, as text.
fn absent(test: &str) -> String {
    folder(test).join("out").to_str().unwrap().to_owned()
}

/// Writes a text and returns its path.
fn text_file(test: &str) -> String {
    let path = folder(test).join("text.txt");
    let text = "The quick brown fox jumps over the lazy dog. ";
    fs::write(&path, text.repeat(20)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn mixed_models_are_inspected_evaluated_and_converted() {
    let data = text_file("mixed-text");
    for (name, first, format) in [
        (
            "llama3-tiny-modelopt-mixed",
            "modelopt, nvfp4 w4a4; fp8 per tensor, inputs static, KV cache FP8",
            "fp8 per tensor, inputs static",
        ),
        (
            "llama3-tiny-ct-mixed",
            "compressed-tensors, nvfp4 w4a16; fp8 per channel, inputs per token; ",
            "fp8 per channel, inputs per token",
        ),
    ] {
        let copy = golden_with_tokenizer(name);
        let model = copy.to_str().unwrap();
        let text = succeeds(nvfp4("inspect", &[model]));
        assert!(text.contains(first), "{text}");
        assert!(text.contains("13 quantized layers"), "{text}");
        let line = |module: &str| {
            let mut lines = text.lines();
            lines
                .find(|line| line.starts_with(module))
                .unwrap()
                .to_owned()
        };
        let found = line("model.layers.0.self_attn.q_proj");
        assert!(found.contains(format), "{found}");
        let found = line("model.layers.0.mlp.up_proj");
        assert!(found.contains("nvfp4"), "{found}");
        let layer = if name.contains("modelopt") { 1 } else { 0 };
        let found = line(&format!("model.layers.{layer}.self_attn.o_proj"));
        assert!(found.contains("bf16"), "{found}");

        // Inputs of layers in FP8 are rounded, unless the scheme is w4a16.
        let eval = |scheme: &str| {
            let options = format!("eval --device flex --length 32{scheme}");
            let output = nvfp4(&options, &[model, "--data", &data]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!said.contains("warning"), "{said}");
            succeeds(output)
        };
        let [as_stored, high] = ["", " --scheme w4a16"].map(eval);
        assert!(as_stored.contains("perplexity") && high.contains("perplexity"));
        assert_ne!(as_stored, high);
        succeeds(nvfp4(
            "generate --device flex --tokens 4 --prompt The",
            &[model],
        ));
        let out = absent(&format!("mixed-converted-{name}"));
        let (own, other) = match name.contains("modelopt") {
            true => ("modelopt", "compressed-tensors"),
            false => ("compressed-tensors", "modelopt"),
        };
        let convert =
            |to: &str, out: &str| nvfp4(&format!("convert --dialect {to}"), &[model, "--out", out]);
        succeeds(convert(own, &out));
        assert_eq!(succeeds(nvfp4("inspect", &[&out])), text);
        let out = absent(&format!("mixed-converted-to-{other}"));
        match name.contains("modelopt") {
            true => {
                succeeds(convert(other, &out));
                succeeds(nvfp4("inspect", &[&out]));
            }
            false => {
                fails(
                    convert(other, &out),
                    &["down_proj", "fp8 per block", "modelopt"],
                );
            }
        }
    }
}

#[test]
fn quantize_chooses_formats_by_pattern_and_by_bits() {
    let model = golden("llama3-tiny");
    let data = text_file("mixed-bits-text");
    let quantize = |options: &str, out: &str| {
        let calibration = ["--calibration", &data];
        let options = format!("quantize --device flex --calibration-length 32 {options}");
        nvfp4(
            &options,
            &[&[&model, "--out", out][..], &calibration].concat(),
        )
    };
    let out = absent("mixed-pattern");
    let text = succeeds(quantize("--method rtn --fp8 down_proj$", &out));
    let line = text
        .lines()
        .find(|line| line.starts_with("model.layers.1.mlp.down_proj"));
    assert!(line.unwrap().contains("fp8"), "{text}");
    let text = succeeds(nvfp4("inspect", &[&out]));
    assert!(text.contains("nvfp4 w4a16; fp8 per channel"), "{text}");

    let out = absent("mixed-bits");
    let text = succeeds(quantize(
        "--method rtn --bits 7 --dialect modelopt --scheme w4a4",
        &out,
    ));
    for part in [
        "KL nvfp4",
        "KL fp8",
        "why",
        "bits per weight of at most 7",
        "nats per token",
    ] {
        assert!(text.contains(part), "no {part:?}:\n{text}");
    }
    let record = json(&Path::new(&out).join("nvfp4_quantize.json"));
    let groups = record["formats"]["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 8);
    assert!(record["formats"]["bits"].as_f64().unwrap() <= 7.0);
    let mixed = json(&Path::new(&out).join("hf_quant_config.json"));
    assert_eq!(mixed["quantization"]["quant_algo"], "MIXED_PRECISION");
    succeeds(nvfp4("inspect", &[&out]));

    let out = absent("mixed-bits-refused");
    for bits in ["3", "16", "NaN"] {
        let said = quantize(&format!("--bits {bits}"), &out);
        fails(said, &["bits is", "at least 4.5", "less than 16.0000"]);
        assert!(!Path::new(&out).join("config.json").exists());
    }
    fails(
        nvfp4("quantize --bits 6", &[&model, "--out", &out]),
        &["--calibration"],
    );
    fails(
        quantize("--bits 6 --fp8 down_proj", &out),
        &["--bits", "--fp8"],
    );
    fails(quantize("--bits 6 --smooth awq", &out), &["smooth is awq"]);
    fails(
        quantize("--fp8 w7_proj", &out),
        &["fp8", "matches no linear layer"],
    );
    fails(quantize("--fp8 (", &out), &["fp8", "regular expression"]);
}
