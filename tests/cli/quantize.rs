//! Tests of `quantize` and `eval`: their texts, their JSON, and interrupted runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use nvfp4_test_support::golden_with_tokenizer;
use serde_json::Value;

use crate::support::*;

/// Returns a path in this test's folder that does not exist yet.
fn absent(test: &str) -> PathBuf {
    folder(test).join("out")
}

/// Returns the files of a folder, by name.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .map(|path| (path.file_name().unwrap().into(), fs::read(&path).unwrap()))
        .collect()
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Writes a folder of texts: plain text, Markdown, and JSON lines with a conversation.
fn texts(test: &str) -> PathBuf {
    let path = folder(test);
    let fox = "The quick brown fox jumps over the lazy dog. ";
    fs::write(path.join("b.txt"), fox.repeat(8)).unwrap();
    fs::write(path.join("a.md"), fox.repeat(2)).unwrap();
    fs::write(path.join("ignored.rs"), "fn main() {}").unwrap();
    let lines = [
        r#"{"text": "The lazy dog jumps over the quick brown fox."}"#,
        r#"{"messages": [{"role": "user", "content": "The quick"},
            {"role": "assistant", "content": "brown fox"}]}"#,
    ];
    let lines = lines.map(|line| line.replace('\n', ""));
    fs::write(path.join("c.jsonl"), lines.join("\n")).unwrap();
    path
}

#[test]
fn quantize_calibrates_on_a_folder_and_prints_json() {
    let copy = golden_with_tokenizer("qwen3-tiny");
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
                    {% endfor %}";
    fs::write(copy.join("chat_template.jinja"), template).unwrap();
    let model = copy.to_str().unwrap();
    let texts = texts("quantize-texts");
    let out = absent("quantize-json");
    let paths = [
        model,
        "--out",
        out.to_str().unwrap(),
        "--calibration",
        texts.to_str().unwrap(),
        "--eval",
        texts.to_str().unwrap(),
    ];
    let options = "quantize --device flex --scheme w4a4 --method rtn --calibration-length 16 \
                   --eval-length 32 --json";
    let output = nvfp4(options, &paths);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    for part in ["warning: calibration reads ", "65,536", "more text"] {
        assert!(said.contains(part), "no {part:?}: {said}");
    }
    let json = parsed(&succeeds(output));
    let layers = json["layers"].as_array().unwrap();
    assert_eq!((layers.len(), json["scheme"].as_str()), (14, Some("w4a4")));
    let record = parsed(&fs::read_to_string(out.join("nvfp4_quantize.json")).unwrap());
    for field in ["layers", "kept", "calibration_tokens", "method"] {
        assert_eq!(json[field], record[field], "{field}");
    }
    let calibration = &json["calibration"];
    let read = calibration["files"].as_array().unwrap();
    let names: Vec<&str> = read
        .iter()
        .map(|file| file["path"].as_str().unwrap().rsplit('/').next().unwrap())
        .collect();
    assert_eq!(names, ["a.md", "b.txt", "c.jsonl"]);
    assert_eq!(read[2]["documents"], 2);
    let sum: u64 = read.iter().map(|it| it["tokens"].as_u64().unwrap()).sum();
    assert_eq!(calibration["tokens"], sum);
    // Sequences do not end with a file.
    assert_eq!(calibration["used_tokens"], sum / 16 * 16);
    let left_out = calibration["left_out"].as_str().unwrap();
    assert!(left_out.contains("1 files in folders"), "{left_out}");
    assert!(json["warnings"][0].as_str().unwrap().contains("65,536"));

    let evaluation = &json["evaluation"];
    let mean = |when: &str| evaluation[when]["nats_per_token"].as_f64().unwrap();
    let difference = evaluation["difference"]["nats_per_token"].as_f64().unwrap();
    assert!((mean("after") - mean("before") - difference).abs() < 1e-9);
    assert_eq!(evaluation["before"]["files"].as_array().unwrap().len(), 3);

    // Few sequences of much text: the advice is another one.
    let few = absent("quantize-few-sequences");
    let paths = [&paths[..2], &[few.to_str().unwrap()], &paths[3..5]].concat();
    let options = "quantize --device flex --method rtn --calibration-length 16 \
                   --calibration-sequences 2";
    let output = nvfp4(options, &paths);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("--calibration-sequences 4096"), "{said}");
    let text = succeeds(output);
    let expected = format!("calibrated on 32 of {sum} tokens of 3 file(s), in sequences of 16");
    assert!(text.contains(&expected), "no {expected:?}: {text}");
}

#[test]
fn eval_compares_with_a_baseline() {
    let model = golden("llama3-tiny");
    let texts = texts("eval-texts");
    fs::remove_file(texts.join("c.jsonl")).unwrap();
    let texts = texts.to_str().unwrap();
    let eval = |model: &str, more: &[&str]| {
        let windows = "eval --device flex --length 16 --stride 8";
        nvfp4(windows, &[&[model, "--data", texts], more].concat())
    };
    let json =
        |model: &str, more: &[&str]| parsed(&succeeds(eval(model, &[&["--json"], more].concat())));
    let quantized = absent("eval-baseline");
    let quantized = quantized.to_str().unwrap();
    succeeds(nvfp4(
        "quantize --method rtn",
        &[&model, "--out", quantized],
    ));

    let same = json(&model, &["--baseline", &model]);
    for field in ["difference", "kl_divergence"] {
        let found = &same["baseline"][field];
        assert_eq!(found["nats_per_token"], 0.0, "{same}");
        assert_eq!(found["error"], 0.0, "{same}");
    }
    let alone = |model: &str| {
        let found = json(model, &[]);
        assert_eq!(found["baseline"], Value::Null);
        found["perplexity"]["nats_per_token"].as_f64().unwrap()
    };
    let found = json(quantized, &["--baseline", &model]);
    let difference = found["baseline"]["difference"]["nats_per_token"].as_f64();
    let expected = alone(quantized) - alone(&model);
    assert!((difference.unwrap() - expected).abs() < 1e-9, "{found}");
    let divergence = found["baseline"]["kl_divergence"]["nats_per_token"].as_f64();
    assert!(divergence.unwrap() > 0.0, "{found}");

    let text = succeeds(eval(quantized, &["--baseline", &model]));
    let lines: Vec<&str> = text.lines().collect();
    let begins = [
        "perplexity ",
        "file ",
        "",
        "",
        "1 files in folders",
        "baseline ",
        "difference ",
    ];
    assert_eq!(lines.len(), begins.len(), "{text}");
    for (line, begin) in lines.iter().zip(begins) {
        assert!(
            line.starts_with(begin),
            "{line:?} does not begin with {begin:?}"
        );
    }
    assert!(
        lines[2].contains("a.md") && lines[3].contains("b.txt"),
        "{text}"
    );
    assert!(
        lines[6].contains(" ± ") && lines[6].contains("KL divergence"),
        "{text}"
    );

    let other = golden("qwen3-tiny");
    fails(
        eval(&model, &["--baseline", &other]),
        &["baseline", "another tokenizer"],
    );
    let empty = folder("eval-no-texts");
    let arguments = [&*model, "--data", empty.to_str().unwrap()];
    fails(
        nvfp4("eval --device flex", &arguments),
        &["data", "has no text", ".jsonl"],
    );
}

/// Interrupts a run as soon as a part of its journal exists. A run that is faster than the signal
/// is not interrupted.
#[cfg(unix)]
#[test]
fn ctrl_c_leaves_a_quantization_that_resumes() {
    use std::process::{Command, Stdio};

    let model = golden("llama3-tiny");
    let text = folder("quantize-ctrl-c").join("text.txt");
    fs::write(
        &text,
        "The quick brown fox jumps over the lazy dog. ".repeat(300),
    )
    .unwrap();
    let arguments = |out: &Path| -> Vec<String> {
        let options = "quantize --device flex --scheme w4a4 --method gptq --calibration-length 32";
        let options = options.split(' ').map(String::from);
        let paths = [
            &model,
            "--out",
            out.to_str().unwrap(),
            "--calibration",
            text.to_str().unwrap(),
        ];
        options.chain(paths.map(String::from)).collect()
    };
    let whole = absent("quantize-uninterrupted");
    let run = |out: &Path, more: &[&str]| {
        let arguments = arguments(out);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        succeeds(nvfp4("", &[&arguments, more].concat()));
    };
    run(&whole, &[]);
    let mut interrupted = 0;
    for stage in ["", "calibration", "part-00000.json"] {
        let out = absent(&format!("quantize-interrupted-{stage}"));
        let mut child = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
            .args(arguments(&out))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let reached = out.join(".nvfp4_quantize").join(stage);
        while !reached.exists() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let kill = Command::new("kill")
            .args(["-INT", &child.id().to_string()])
            .stderr(Stdio::null())
            .status();
        kill.unwrap();
        let output = child.wait_with_output().unwrap();
        let status = output.status;
        if !status.success() {
            interrupted += 1;
            // Before the command watches for the signal, it has no code.
            assert!(status.code().is_none_or(|code| code == 130), "{status}");
            if status.code().is_some() {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(said.contains("stopped; to resume: "), "{said}");
                assert!(said.trim_end().ends_with("--resume"), "{said}");
            }
            if out.join(".nvfp4_quantize").exists() {
                run(&out, &["--resume"]);
            }
        }
        assert!(files(&out) == files(&whole), "{stage:?}: other bytes");
    }
    assert!(interrupted > 0, "no run was interrupted");
}
