//! Tests of all commands together: options have one vocabulary, and `--help` lists their values.

use std::collections::{BTreeMap, BTreeSet};

use clap::{Arg, CommandFactory};

use crate::command::Command;

/// Value names of options that take one of a few values.
const LISTED: [&str; 16] = [
    "BOOL",
    "CHECK",
    "DEVICE",
    "DIALECT",
    "FORM",
    "HOW",
    "KIND",
    "METHOD",
    "OPTIMIZER",
    "PRESET",
    "RECIPE",
    "SCHEME",
    "SHAPE",
    "SHELL",
    "SMOOTHING",
    "TYPE",
];

/// Value names of options that take numbers, texts and paths.
const FREE: [&str; 32] = [
    "A", "ADAPTER", "BATCHES", "BITS", "BYTES", "COMMAND", "DECAY", "DIR", "FACTOR", "FILE", "I",
    "K", "LAYERS", "M", "MODEL", "N", "NORM", "P", "PATH", "PHASES", "R", "RANK", "RANKS", "RATE",
    "REGEX", "SECONDS", "SEED", "SHARE", "STEP", "STEPS", "T", "TEXT",
];

/// Options with a second meaning: name, its phrase, and the reason.
const EXCEPTIONS: [(&str, &str, &str); 5] = [
    (
        "out",
        "Write the output to this file",
        "the command writes one file instead of a folder",
    ),
    (
        "data",
        "Report the perplexity of the texts in these files and folders",
        "`eval` reads texts to evaluate",
    ),
    (
        "resume",
        "Resume an interrupted run into the same folder",
        "--out of `quantize` names the folder",
    ),
    (
        "export",
        "Write the model quantized to NVFP4, in this dialect, instead of in high precision",
        "`merge` writes one folder",
    ),
    (
        "top-k",
        "Sample from the K most probable tokens",
        "routers have a top k as samplers have",
    ),
];

/// Returns the arguments of all commands, each with its command.
fn arguments() -> Vec<(String, Arg)> {
    fn walk(command: &clap::Command, parent: &str, found: &mut Vec<(String, Arg)>) {
        let path = format!("{parent} {}", command.get_name());
        let own = command.get_arguments().cloned();
        found.extend(own.map(|argument| (path.clone(), argument)));
        for subcommand in command.get_subcommands() {
            walk(subcommand, &path, found);
        }
    }
    let mut found = Vec::new();
    walk(&Command::command(), "", &mut found);
    assert!(found.len() > 100, "{}", found.len());
    found
}

/// Returns the name of the values of `argument`; none for a flag.
fn value_name(argument: &Arg) -> Option<String> {
    let names = argument.get_value_names().unwrap_or_default();
    let takes_value = argument.get_action().takes_values();
    takes_value.then(|| names.first().map_or(String::new(), ToString::to_string))
}

/// Returns the help of `argument` up to its details.
fn phrase(argument: &Arg) -> String {
    let help = argument.get_help().map(ToString::to_string);
    let help = help.unwrap_or_default();
    let ends = [" [", "; ", ": "];
    let end = ends.iter().filter_map(|end| help.find(end)).min();
    help[..end.unwrap_or(help.len())].to_owned()
}

#[test]
fn the_command_line_is_consistent() {
    Command::command().debug_assert();
}

#[test]
fn help_lists_the_values_of_options() {
    for (command, argument) in arguments() {
        let Some(name) = value_name(&argument) else {
            continue;
        };
        let what = format!("{command}: {} {name}", argument.get_id());
        let kind = name
            .split(|c: char| !c.is_ascii_uppercase())
            .next()
            .unwrap();
        let is_listed =
            !argument.is_hide_possible_values_set() && !argument.get_possible_values().is_empty();
        let is_kind = LISTED.contains(&kind);
        assert!(
            is_kind || FREE.contains(&kind),
            "{what}: add the value name to LISTED or FREE"
        );
        let has_kernels = cfg!(any(feature = "cpu", feature = "cuda"));
        if kind != "CHECK" || has_kernels {
            assert_eq!(is_listed, is_kind, "{what}: values listed, values expected");
        }
    }
    let mut eval = Command::command();
    let eval = eval.find_subcommand_mut("eval").unwrap();
    let help = eval.render_help().to_string();
    for values in ["[possible values: flex, cpu, cuda:N]", "w4a16, w4a4"] {
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(values), "{values}: {help}");
    }
}

#[test]
fn options_of_one_name_have_one_meaning() {
    let mut meanings: BTreeMap<String, BTreeMap<(String, String), Vec<String>>> = BTreeMap::new();
    let mut met = BTreeSet::new();
    for (command, argument) in arguments() {
        let Some(long) = argument.get_long() else {
            continue;
        };
        let phrase = phrase(&argument);
        assert!(!phrase.is_empty(), "{command}: --{long} has no help");
        let exception = EXCEPTIONS
            .iter()
            .position(|(name, second, _)| *name == long && *second == phrase);
        if let Some(index) = exception {
            met.insert(index);
            continue;
        }
        let value = value_name(&argument).unwrap_or_default();
        let commands = meanings.entry(long.to_owned()).or_default();
        commands.entry((value, phrase)).or_default().push(command);
    }
    for (long, meanings) in meanings {
        assert_eq!(meanings.len(), 1, "--{long}: {meanings:#?}");
    }
    for (index, (long, phrase, _)) in EXCEPTIONS.iter().enumerate() {
        assert!(met.contains(&index), "no --{long} is {phrase:?}");
    }
}
