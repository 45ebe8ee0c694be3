//! Tests of text generation: from checkpoints of `nvfp4 train`, and of conversations.

use std::fs;

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
    let recipe = finished().join("nvidia");
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
        (["--adapter", "x"], "adapter is given"),
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

/// Lines of the standard input are a conversation, whose messages are kept until it is reset.
#[test]
fn conversations_keep_their_messages() {
    let without = golden("llama3-tiny");
    let model = folder("chat");
    for entry in fs::read_dir(&without).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\
                    {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    fs::write(model.join("chat_template.jinja"), template).unwrap();
    let model = model.to_str().unwrap();
    let chat = |input: &str, more: &[&str]| {
        let arguments = "generate --chat --device flex --tokens 4";
        nvfp4_reads(input, arguments, &[&[model], more].concat())
    };
    let answer = succeeds(chat("hi\n", &[]));
    let said = succeeds(chat("hi\n/reset\n\nhi\n/exit\nhi\n", &[]));
    assert_eq!(said, format!("{answer}{answer}"));
    let output = chat("/help\nhi\n", &[]);
    let warned = String::from_utf8_lossy(&output.stderr).into_owned();
    for part in ["warning: /help is no command", "/reset", "/exit"] {
        assert!(warned.contains(part), "no {part:?}: {warned}");
    }
    assert_eq!(succeeds(output), answer);
    // The answer is that to a prompt, and is printed alone.
    assert_eq!(succeeds(chat("", &["--prompt", "hi"])), answer);
    assert_eq!(succeeds(chat("", &[])), "");
    // The model has 256 positions, one for almost every byte.
    let long = format!("{}\n", "once upon a midnight dreary, ".repeat(4));
    fails(
        chat(&long.repeat(6), &[]),
        &["the conversation has", "256", "begin a new one"],
    );

    for (more, names) in [
        (
            &["--prompt", "hi", "--system", "a"][..],
            ["--chat", "required"],
        ),
        (&[], ["--prompt", "required"]),
        (&["--chat"], ["no chat template", "llama3-tiny"]),
    ] {
        fails(nvfp4("generate", &[&[&*without], more].concat()), &names);
    }
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
