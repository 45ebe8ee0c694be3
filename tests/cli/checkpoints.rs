//! Tests of Hugging Face folders: inspect, convert, quantize, generate.

use std::fs;
use std::path::{Path, PathBuf};

use nvfp4_test_support::golden_with_tokenizer;

use crate::support::*;

/// Returns a path in this test's folder that does not exist yet.
fn absent(test: &str) -> PathBuf {
    folder(test).join("out")
}

#[test]
fn inspect_lists_layers_exclusions_and_problems() {
    let model = golden("llama3-tiny-ct-nvfp4-kvfp8");
    let text = succeeds(nvfp4("inspect", &[&model]));
    for line in [
        "compressed-tensors, w4a4, KV cache FP8",
        "tensor ",
        "model.layers.0.self_attn: FP8 scales of keys",
        "14 quantized layers of ",
        "excluded: lm_head",
    ] {
        let found = text.lines().any(|found| found.starts_with(line));
        assert!(found, "no line starts with {line:?}:\n{text}");
    }
    let layer = text
        .lines()
        .find(|line| line.contains("layers.1.mlp.down_proj"));
    let fields: Vec<&str> = layer.unwrap().split_whitespace().collect();
    // 96 x 80 bytes of codes, 96 x 10 of scales, two global scales.
    let expected = [
        "model.layers.1.mlp.down_proj",
        "nvfp4",
        "96",
        "x",
        "160",
        "8648",
    ];
    assert_eq!(fields[..6], expected);
    assert!(!text.contains("problem"), "{text}");

    // Without its exclusion, the head is reported as a problem.
    let broken = folder("inspect-broken");
    fs::copy(
        Path::new(&model).join("model.safetensors"),
        broken.join("model.safetensors"),
    )
    .unwrap();
    let mut config = json(&Path::new(&model).join("config.json"));
    config["quantization_config"]["ignore"] = serde_json::json!([]);
    fs::write(broken.join("config.json"), config.to_string()).unwrap();
    let broken = broken.to_str().unwrap();
    let output = nvfp4("inspect", &[broken]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.contains("problem: lm_head: is not quantized, but no exclusion"),
        "{text}"
    );
    fails(output, &["1 problem(s)"]);
    let out = absent("convert-broken");
    let out = out.to_str().unwrap();
    fails(
        nvfp4("convert --dialect modelopt", &[broken, "--out", out]),
        &["lm_head", "no exclusion"],
    );
    fails(nvfp4("inspect", &["no-such-folder"]), &["no-such-folder"]);
}

/// The amax of each layer is the same in both dialects, whose global scales are reciprocal.
#[test]
fn inspect_prints_json_with_one_amax() {
    let model = golden("llama3-tiny-modelopt-nvfp4");
    let out = absent("inspect-json");
    let out = out.to_str().unwrap();
    succeeds(nvfp4(
        "convert --dialect compressed-tensors",
        &[&model, "--out", out],
    ));
    let [before, after] = [model.as_str(), out].map(|folder| -> serde_json::Value {
        let said = succeeds(nvfp4("inspect --json", &[folder]));
        serde_json::from_str(&said).unwrap()
    });
    assert_eq!(before["quantization"]["dialect"], "modelopt");
    assert_eq!(after["quantization"]["dialect"], "compressed-tensors");
    assert_eq!(before["problems"], serde_json::json!([]));
    let layers = |report: &serde_json::Value| report["layers"].as_array().unwrap().clone();
    let (before, after) = (layers(&before), layers(&after));
    assert_eq!((before.len(), after.len()), (14, 14));
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before["module"], after["module"]);
        assert_eq!(before["shape"], after["shape"]);
        for key in ["amax", "input_amax"] {
            let [before, after] = [before, after].map(|layer| layer[key].as_f64().unwrap());
            assert!(before > 0.0 && (after / before - 1.0).abs() < 1e-6, "{key}");
            // Neither the stored scale, amax / 2688, nor its reciprocal.
            assert!((0.1..100.0).contains(&before), "{key}: {before}");
        }
    }
    let text = succeeds(nvfp4("inspect", &[&model]));
    let head = text.lines().find(|line| line.starts_with("tensor "));
    assert!(head.unwrap().ends_with("amax  input amax"), "{text}");
}

#[test]
fn convert_says_how_many_global_scales_moved() {
    let model = golden("llama3-tiny-modelopt-nvfp4");
    let out = absent("convert");
    let out = out.to_str().unwrap();
    let convert = |to: &str, from: &str, out: &str| {
        nvfp4(&format!("convert --dialect {to}"), &[from, "--out", out])
    };
    let text = succeeds(convert("compressed-tensors", &model, out));
    assert!(text.contains("14 quantized layers"), "{text}");
    assert!(text.contains("of 28 global scales"), "{text}");
    assert!(text.contains("one unit in the last place"), "{text}");
    let text = succeeds(nvfp4("inspect", &[out]));
    assert!(text.starts_with("compressed-tensors, w4a4"), "{text}");
    fails(convert("modelopt", &model, out), &["must be empty"]);
    fails(convert("gguf", &model, out), &["gguf", "modelopt"]);

    // In the same dialect, the tensor file is identical.
    let same = absent("convert-same");
    let same_name = same.to_str().unwrap();
    let text = succeeds(convert("modelopt", &model, same_name));
    assert!(text.contains("dequantize by the same factor"), "{text}");
    let bytes = |path: &Path| fs::read(path.join("model.safetensors")).unwrap();
    assert!(bytes(&same) == bytes(Path::new(&model)));
    assert!(same.join("hf_quant_config.json").exists());
}

#[test]
fn quantize_writes_a_folder_that_inspect_finds_valid() {
    let copy = golden_with_tokenizer("qwen3moe-tiny");
    let model = copy.to_str().unwrap();
    let out = absent("quantize");
    let path = out.to_str().unwrap();
    let output = nvfp4(
        "quantize --dialect modelopt --exclude layers\\.1\\.self_attn\\.q_proj",
        &[model, "--out", path],
    );
    let warning = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(warning.contains("E[x²] = 1"), "{warning}");
    let text = succeeds(output);
    for part in [
        "29 layers quantized",
        "6 layers left",
        "SQNR dB",
        "modelopt w4a16 by search",
    ] {
        assert!(text.contains(part), "no {part:?}:\n{text}");
    }
    let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
    assert!(line("model.layers.0.mlp.gate ").contains("router"));
    assert!(line("lm_head").contains("head"));
    assert!(line("model.layers.1.self_attn.k_proj").contains("excluded"));
    let text = succeeds(nvfp4("inspect", &[path]));
    assert!(
        text.starts_with("modelopt, w4a16, KV cache not quantized"),
        "{text}"
    );
    assert!(text.contains("29 quantized layers"), "{text}");
    assert!(out.join("tokenizer.json").exists() && out.join("hf_quant_config.json").exists());

    let again = absent("quantize-again");
    let again = again.to_str().unwrap();
    let quantize =
        |more: &str, from: &str| nvfp4(&format!("quantize {more}"), &[from, "--out", again]);
    fails(quantize("", path), &["quantized already"]);
    fails(
        quantize("--exclude (", model),
        &["exclude", "regular expression"],
    );
    fails(quantize("--method gptq", model), &["gptq", "calibrat"]);
    fails(quantize("--scheme w4a4", model), &["w4a4", "calibrat"]);
    fails(
        quantize("--input-scale 1", model),
        &["input-scale", "w4a16"],
    );
    fails(
        quantize("--scheme w4a4 --input-scale 0", model),
        &["input-scale is 0"],
    );
    succeeds(quantize(
        "--scheme w4a4 --input-scale 1 --method rtn",
        model,
    ));
    let text = succeeds(nvfp4("inspect", &[again]));
    assert!(text.starts_with("compressed-tensors, w4a4"), "{text}");
}

#[test]
fn quantize_calibrates_on_a_text() {
    let model = golden("llama3-tiny");
    let file = folder("quantize-calibration").join("text.txt");
    fs::write(
        &file,
        "The quick brown fox jumps over the lazy dog. ".repeat(20),
    )
    .unwrap();
    let out = absent("quantize-calibrated");
    let out = out.to_str().unwrap();
    let quantize = |more: &str, out: &str| {
        let fixed = [
            &model,
            "--out",
            out,
            "--calibration",
            file.to_str().unwrap(),
        ];
        nvfp4(
            &format!("quantize --device flex --calibration-length 32 {more}"),
            &fixed,
        )
    };
    let text = succeeds(quantize("--scheme w4a4 --method gptq", out));
    assert!(text.contains("compressed-tensors w4a4 by gptq"), "{text}");
    assert!(!text.contains("E[x²] = 1"), "{text}");
    let text = succeeds(nvfp4("inspect", &[out]));
    assert!(text.starts_with("compressed-tensors, w4a4"), "{text}");
    assert!(!Path::new(out).join(".nvfp4_quantize").exists());
    let provenance = json(&Path::new(out).join("nvfp4_quantize.json"));
    let tokens = provenance["calibration_tokens"].as_u64().unwrap();
    assert!(tokens >= 32 && tokens.is_multiple_of(32), "{provenance}");

    let smooth = absent("quantize-smooth");
    let smooth = smooth.to_str().unwrap();
    let text = succeeds(quantize("--smooth awq --method rtn", smooth));
    for part in ["by E[x²]", "w4a16 by rtn, smoothed, written to"] {
        assert!(text.contains(part), "no {part:?}:\n{text}");
    }
    succeeds(nvfp4("inspect", &[smooth]));
    let provenance = json(&Path::new(smooth).join("nvfp4_quantize.json"));
    assert_eq!(provenance["smooth"], "awq");

    let cached = absent("quantize-cached");
    let cached = cached.to_str().unwrap();
    let eval = format!(
        "--eval {} --eval-length 32 --eval-stride 31 --method rtn",
        file.to_str().unwrap()
    );
    let text = succeeds(quantize(&eval, cached));
    for line in ["before: perplexity ", "after:  perplexity "] {
        assert!(text.lines().any(|found| found.starts_with(line)), "{text}");
    }
    fs::remove_dir_all(cached).unwrap();
    succeeds(quantize("--kv fp8 --method rtn", cached));
    let text = succeeds(nvfp4("inspect", &[cached]));
    assert!(
        text.starts_with("compressed-tensors, w4a16, KV cache FP8"),
        "{text}"
    );
    assert!(text.contains("self_attn: FP8 scales of keys "), "{text}");

    let other = absent("quantize-calibrated-badly");
    let other = other.to_str().unwrap();
    fails(
        quantize("--calibration-sequences 0", other),
        &["calibration-sequences is 0"],
    );
    assert!(!Path::new(other).exists());
    fails(quantize("--resume", other), &["nothing to resume"]);
    fails(
        quantize("--resume", out),
        &["nothing to resume", "is finished"],
    );
    fails(
        quantize("--eval x --eval-stride 2048", other),
        &["stride is 2048"],
    );
    let other = absent("quantize-uncalibrated");
    let other = other.to_str().unwrap();
    fails(
        nvfp4("quantize --kv fp8", &[&model, "--out", other]),
        &["kv is fp8", "calibrate"],
    );
    fails(
        nvfp4("quantize --smooth awq", &[&model, "--out", other]),
        &["smooth is awq", "calibrate"],
    );
    fails(
        nvfp4("quantize --scheme w4a4", &[&model, "--out", other]),
        &["w4a4", "calibrate"],
    );
}

#[test]
fn generate_continues_a_prompt() {
    let model = golden("llama3-tiny");
    let options = [
        "--prompt",
        "The quick",
        "--device",
        "flex",
        "--tokens",
        "12",
    ];
    let said = |more: &[&str]| {
        let arguments = [&[model.as_str()], &options[..], more].concat();
        succeeds(nvfp4("generate", &arguments))
    };
    let greedy = said(&[]);
    assert!(greedy.starts_with("The quick"), "{greedy}");
    assert!(greedy.trim_end().len() > "The quick".len(), "{greedy}");
    assert_eq!(greedy, said(&["--temperature", "0"]));
    let drawn = said(&["--temperature", "2", "--seed", "5"]);
    assert_ne!(greedy, drawn);
    assert_eq!(drawn, said(&["--temperature", "2", "--seed", "5"]));
    let sampled = ["--temperature", "1", "--top-p", "3"];
    let arguments = [&[model.as_str()], &options[..], &sampled].concat();
    fails(nvfp4("generate", &arguments), &["--top-p is 3"]);
    // Uses packed weights, with high-precision and with quantized activations.
    let out = absent("generate-quantized");
    let out = out.to_str().unwrap();
    succeeds(nvfp4("quantize", &[&model, "--out", out]));
    let quantized = |scheme| {
        let arguments = [&[out], &options[..], &["--scheme", scheme]].concat();
        succeeds(nvfp4("generate", &arguments))
    };
    for text in ["w4a16", "w4a4"].map(quantized) {
        assert!(text.starts_with("The quick"), "{text}");
        assert!(text.trim_end().len() > "The quick".len(), "{text}");
    }
    let arguments = [&[out], &options[..], &["--scheme", "w8a8"]].concat();
    fails(nvfp4("generate", &arguments), &["w8a8", "w4a16"]);
}

/// Reports the perplexity of the tokenizer's examples before and after quantization, and the
/// accuracy on questions.
#[test]
fn eval_reads_texts_and_questions() {
    let model = golden("llama3-tiny");
    let files = folder("eval");
    let (text, questions) = (files.join("text.txt"), files.join("questions.jsonl"));
    fs::write(&text, "The quick brown fox jumps. ".repeat(8)).unwrap();
    let question = r#"{"context": "The quick", "choices": [" brown", " fox"], "answer": 1}"#;
    fs::write(&questions, question).unwrap();
    let (text, questions) = (text.to_str().unwrap(), questions.to_str().unwrap());
    let eval = |model: &str, more: &[&str]| nvfp4("eval --device flex", &[&[model], more].concat());
    let perplexity = |model: &str, more: &[&str]| -> f64 {
        let text = succeeds(eval(model, &[&["--data", text], more].concat()));
        let figure = text.strip_prefix("perplexity ");
        let figure = figure
            .and_then(|text| text.split([' ', ';']).next())
            .expect(&text);
        figure.parse().unwrap()
    };
    let windows = ["--length", "16", "--stride", "8"];
    let before = perplexity(&model, &windows);
    assert_ne!(before, perplexity(&model, &[]));
    let out = absent("eval-quantized");
    let out = out.to_str().unwrap();
    succeeds(nvfp4("quantize", &[&model, "--out", out]));
    let after = perplexity(out, &windows);
    // The model is random, so weights that differ by a tenth give similar results.
    assert!(
        before != after && (after / before).ln().abs() < 0.2,
        "{before}, {after}"
    );

    let quantized_inputs = perplexity(out, &[&windows[..], &["--scheme", "w4a4"]].concat());
    assert!(
        quantized_inputs != after && (quantized_inputs / after).ln().abs() < 0.2,
        "{after}, {quantized_inputs}"
    );

    let answers = succeeds(eval(&model, &["--choices", questions]));
    assert!(answers.contains("1 questions"), "{answers}");
    fails(eval(&model, &[]), &["data", "choices"]);
    fails(
        eval(&model, &["--choices", questions, "--stride", "8"]),
        &["--data"],
    );
    for option in ["--calibration-length", "--eval-length"] {
        let given = option.trim_end_matches("-length");
        let arguments = [&model, "--out", "none", option, "8"];
        fails(nvfp4("quantize", &arguments), &[&format!("{given} <PATH>")]);
    }
    fails(
        eval(&model, &["--data", text, "--length", "8", "--stride", "8"]),
        &["stride is 8"],
    );
    fails(eval(&model, &["--data", "no-such-file"]), &["no-such-file"]);
}
