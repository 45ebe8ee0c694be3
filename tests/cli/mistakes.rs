//! Tests of mistakes that a first use of the command makes: the error names what to write instead.

use std::fs;
use std::path::Path;

use nvfp4_test_support::golden_with_tokenizer;

use crate::support::*;

/// Chat template that renders any role.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn quantize_refuses_before_it_reads() {
    let model = golden("llama3-tiny");
    let own = folder("mistakes-quantize");
    let out = own.join("out");
    let quantize = |more: &[&str]| {
        let all = [&[&*model, "--device", "flex", "--out", path(&out)], more].concat();
        nvfp4("quantize", &all)
    };
    // Each of these is found before the texts, which do not exist.
    let calibrated = ["--calibration", "no-such-file"];
    for (more, names) in [
        (&["--bits", "4"][..], &["--bits is 4, ", "at least 4.5"][..]),
        (&["--bits", "16"], &["--bits is 16, ", "less than 16.0000"]),
        (&["--bits", "-1"], &["--bits is -1, "]),
        (
            &["--scheme", "w4a4", "--input-scale", "-1"],
            &["--input-scale is -1, but it must be positive"],
        ),
        (
            &["--calibration-sequences", "0"],
            &["--calibration-sequences is 0"],
        ),
        (&["--resume"], &["--resume is given", "does not exist"]),
        (
            &["--bits", "5"],
            &["--calibration no-such-file does not exist"],
        ),
    ] {
        let error = fails(quantize(&[more, &calibrated].concat()), names);
        assert!(error.starts_with("error: --"), "{error}");
        assert!(!out.exists(), "{more:?}");
    }
    let taken = ["--calibration", "texts", &*model];
    fails(
        nvfp4("quantize", &[&["--out", path(&out)], &taken[..]].concat()),
        &[
            "<MODEL>",
            "tip: --calibration takes all words up to the next option",
        ],
    );
    fs::create_dir(&out).unwrap();
    fs::write(out.join("notes"), "").unwrap();
    let says = format!("--out {} must be empty", path(&out));
    for more in [&[][..], &calibrated] {
        fails(quantize(more), &[&says]);
    }
    // An empty folder, as one that was interrupted before its first file.
    fs::remove_file(out.join("notes")).unwrap();
    let output = quantize(&["--resume", "--method", "rtn"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("nothing to resume, the quantization begins"),
        "{said}"
    );
    succeeds(output);
}

#[test]
fn a_model_without_a_tokenizer_is_a_warning() {
    let model = golden_with_tokenizer("qwen3-tiny");
    let own = folder("mistakes-tokenizer");
    let warns = |command: &str, arguments: &[&str]| {
        let output = nvfp4(command, arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        succeeds(output);
        said.contains("warning: ") && said.contains("has no tokenizer.json")
    };
    let [with, without, other] = ["with", "without", "other"].map(|name| own.join(name));
    let quantize = "quantize --device flex --method rtn";
    assert!(!warns(quantize, &[path(&model), "--out", path(&with)]));
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    assert!(warns(quantize, &[path(&model), "--out", path(&without)]));
    let convert = "convert --dialect modelopt";
    assert!(warns(convert, &[path(&without), "--out", path(&other)]));
    let json = succeeds(nvfp4(
        "quantize --device flex --method rtn --json",
        &[path(&model), "--out", path(&own.join("json"))],
    ));
    assert!(json.contains("has no tokenizer.json"), "{json}");
}

#[test]
fn data_in_other_formats_is_refused() {
    let model = golden_with_tokenizer("qwen3-tiny");
    fs::write(model.join("chat_template.jinja"), TEMPLATE).unwrap();
    let own = folder("mistakes-data");
    let out = own.join("out");
    let finetune = |name: &str, text: &str| {
        let data = own.join(name);
        fs::write(&data, text).unwrap();
        let paths = ["--data", path(&data), "--out", path(&out)];
        let options = "finetune --device flex --steps 1 --context 32 --batch 1";
        nvfp4(options, &[&[path(&model)], &paths[..]].concat())
    };
    let row = |role: &str, text: &str| {
        let role = format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
        format!(r#"{{"messages": [{role}, {{"role": "assistant", "content": "fox"}}]}}"#)
    };
    let rows = |last: &str| [row("user", "a"), row("user", "b"), row(last, "c")].join("\n");
    let unknown = rows("usr");
    let object = r#"{"text": "one"}"#;
    for (name, text, names) in [
        (
            "roles.jsonl",
            &*unknown,
            &[
                "line 3",
                "`messages[0]`: `role` is \"usr\"",
                "user, assistant",
            ][..],
        ),
        (
            "a.csv",
            "prompt,completion\na,b\n",
            &["is a table", ".jsonl"],
        ),
        ("a.parquet", "PAR1", &["is a table", ".jsonl"]),
        ("a.json", object, &["no list of rows", ".jsonl"]),
    ] {
        let says = format!("--data {}", path(&own.join(name)));
        fails(finetune(name, text), &[&[&*says], names].concat());
        assert!(!out.join("finetune.json").exists(), "{name}");
    }
    succeeds(finetune("roles.jsonl", &rows("user")));
    let calibrated = own.join("calibrated");
    fails(
        nvfp4(
            "quantize",
            &[
                path(&model),
                "--out",
                path(&calibrated),
                "--calibration",
                path(&own.join("a.csv")),
            ],
        ),
        &["--calibration", "a.csv is a table"],
    );
}

/// Options of numbers name themselves, whatever their sign.
#[test]
fn negative_numbers_are_values() {
    let generate = [
        finished().to_str().unwrap(),
        "--prompt",
        "let",
        "--device",
        "flex",
    ];
    for option in ["--top-p", "--repetition-penalty", "--temperature"] {
        let sampled = ["--temperature", "1", option, "-1"];
        let more = if option == "--temperature" {
            &sampled[2..]
        } else {
            &sampled[..]
        };
        let error = fails(nvfp4("generate", &[&generate[..], more].concat()), &[]);
        assert!(
            error.starts_with(&format!("error: {option} is -1, but ")),
            "{error}"
        );
    }
    let out = folder("mistakes-resume").join("absent");
    for command in ["train", "finetune", "pretrain"] {
        fails(
            nvfp4(command, &["--resume", path(&out)]),
            &[&format!(
                "--resume {} is not the folder of a run",
                path(&out)
            )],
        );
    }
}
