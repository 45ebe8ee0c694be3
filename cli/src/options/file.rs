//! Files of options (`--config`).
//!
//! The values of a file become arguments of the command line, so that all rules of its parser apply
//! to them. `train` lays those that are not in [`OF_SESSION`] over the values of a preset instead.

use std::any::TypeId;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use serde_json::{Map, Value};

/// Values by key: the name of a flag with `_` instead of `-`.
pub(crate) type Fields = Map<String, Value>;

/// Keys of a file of `train` that become arguments: a preset has no values for them.
pub(crate) const OF_SESSION: [&str; 3] = ["out", "stop_at", "tensorboard"];
/// Commands with files, and the keys of their files that become arguments; `None` if all do.
const COMMANDS: [(&str, Option<&[&str]>); 3] = [
    ("finetune", None),
    ("pretrain", None),
    ("train", Some(&OF_SESSION)),
];
/// Arguments that a file cannot have: they select or print it, name another run, or are of all
/// commands.
const NO_KEYS: [&str; 6] = [
    "config",
    "print_config",
    "resume",
    "quiet",
    "help",
    "version",
];

/// The options in a JSON file.
pub(crate) struct OptionsFile {
    path: PathBuf,
    text: String,
    /// Values that are not `null`.
    pub(crate) fields: Fields,
}

impl OptionsFile {
    /// Reads the file `path` of `--config`.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be read or is no JSON object.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("config {} cannot be read", path.display()))?;
        let fields: serde_json::Result<Fields> = serde_json::from_str(&text);
        let mut fields =
            fields.with_context(|| format!("config {} is not valid", path.display()))?;
        fields.retain(|_, value| !value.is_null());
        Ok(Self {
            path: path.into(),
            text,
            fields,
        })
    }

    /// Adds the file and the line of `key` to the error of `checked`.
    ///
    /// # Errors
    /// Returns the error of `checked`.
    pub(crate) fn at<T>(&self, key: &str, checked: Result<T>) -> Result<T> {
        let before = self.text.split(&format!("{key:?}")).next();
        let line = before.unwrap_or_default().matches('\n').count() + 1;
        checked
            .with_context(|| format!("line {line}"))
            .with_context(|| format!("config {} is not valid", self.path.display()))
    }
}

/// Returns the error for a key that is none of the options `names`.
pub(crate) fn unknown_option<'a>(key: &str, names: impl Iterator<Item = &'a str>) -> anyhow::Error {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names.dedup();
    anyhow::anyhow!(
        "{key} is not an option; the options are {}",
        names.join(", ")
    )
}

/// Returns the command that runs, its arguments and the keys of its file that become arguments, if
/// it is one of [`COMMANDS`].
pub(super) fn of_command<'a>(
    command: &'a Command,
    matches: &'a ArgMatches,
) -> Option<(&'a Command, &'a ArgMatches, Option<&'static [&'static str]>)> {
    let (name, matches) = matches.subcommand()?;
    let (_, passed) = COMMANDS.into_iter().find(|(command, _)| *command == name)?;
    Some((command.find_subcommand(name)?, matches, passed))
}

/// Inserts the values of a `--config` file into `arguments`, except those that `arguments` override
/// or contradict.
pub(super) fn with_file(command: &Command, arguments: Vec<OsString>) -> Result<Vec<OsString>> {
    // Required arguments may be in the file.
    let lenient = command.clone().ignore_errors(true);
    let Ok(matches) = lenient.try_get_matches_from(&arguments) else {
        return Ok(arguments);
    };
    let Some((options, given, passed)) = of_command(command, &matches) else {
        return Ok(arguments);
    };
    let Some(path) = given.get_one::<PathBuf>("config") else {
        return Ok(arguments);
    };
    let is_given = |arg: &Arg| {
        let id = arg.get_id().as_str();
        given.value_source(id) == Some(ValueSource::CommandLine)
    };
    let conflict = |left: &Arg, right: &Arg| {
        options.get_arg_conflicts_with(left).contains(&right)
            || options.get_arg_conflicts_with(right).contains(&left)
    };
    let mut file = OptionsFile::read(path)?;
    if let Some(passed) = passed {
        file.fields.retain(|key, _| passed.contains(&&**key));
    }
    let (mut before, mut flags) = (Vec::new(), Vec::new());
    for (key, value) in &file.fields {
        let arg = keys(options).find(|arg| arg.get_id() == key);
        let names = || keys(options).map(|arg| arg.get_id().as_str());
        let arg = file.at(key, arg.ok_or_else(|| unknown_option(key, names())))?;
        let own = file.at(key, of_value(arg, value))?;
        let alone = [&arguments[..1], &[options.get_name().into()], &own].concat();
        let refused = command.clone().try_get_matches_from(alone).err();
        // Other errors are about what is absent here.
        let kinds = [
            ErrorKind::InvalidValue,
            ErrorKind::ValueValidation,
            ErrorKind::ArgumentConflict,
        ];
        if let Some(error) = refused.filter(|error| kinds.contains(&error.kind())) {
            let text = error.to_string();
            let first = text.split("\n\n").next().unwrap_or_default();
            let first = first.trim_start_matches("error: ").to_owned();
            file.at(key, Err(anyhow::anyhow!("{key} is {value}, but: {first}")))?;
        }
        let is_overridden =
            is_given(arg) || keys(options).any(|other| is_given(other) && conflict(arg, other));
        if !is_overridden {
            let into = if arg.is_positional() {
                &mut before
            } else {
                &mut flags
            };
            into.extend(own);
        }
    }
    let mut all = arguments;
    let at = all.iter().position(|word| word == options.get_name());
    let at = at.context("the command has a name")? + 1;
    all.splice(at..at, before.into_iter().chain(flags));
    Ok(all)
}

/// Returns the arguments of `options` that a file can have.
fn keys(options: &Command) -> impl Iterator<Item = &Arg> {
    let all = options.get_arguments();
    all.filter(|arg| !NO_KEYS.contains(&arg.get_id().as_str()))
}

/// Returns `arg` with `value` on the command line.
fn of_value(arg: &Arg, value: &Value) -> Result<Vec<OsString>> {
    let key = arg.get_id();
    let text = match (value, arg.get_action().takes_values()) {
        (Value::Bool(on), false) => {
            let flag = format!("--{}", arg.get_long().unwrap_or_default());
            return Ok(on.then(|| flag.into()).into_iter().collect());
        }
        (_, false) => bail!("{key} is {value}, but must be true or false"),
        (Value::Array(items), true) => {
            let items = items.iter().map(|item| of_value(arg, item));
            return Ok(items.collect::<Result<Vec<_>>>()?.concat());
        }
        (Value::String(text), true) => text.clone(),
        (Value::Number(number), true) => number.to_string(),
        _ => bail!("{key} is {value}, but must be a text or a number, or a list of them"),
    };
    Ok(vec![match arg.get_long() {
        Some(long) => format!("--{long}={text}").into(),
        None => text.into(),
    }])
}

/// Returns the given and the default values of `options`, as a file has them. Paths are absolute.
pub(super) fn printed(options: &Command, matches: &ArgMatches) -> Result<Fields> {
    let mut fields = Fields::new();
    for arg in keys(options) {
        let id = arg.get_id().as_str();
        let is_path = arg.get_value_parser().type_id() == TypeId::of::<PathBuf>();
        let value = |raw: &std::ffi::OsStr| -> Result<Value> {
            let text = match is_path {
                true => std::path::absolute(raw)?.to_string_lossy().into_owned(),
                false => raw.to_string_lossy().into_owned(),
            };
            Ok(match serde_json::from_str(&text) {
                Ok(plain @ (Value::Number(_) | Value::Bool(_))) if !is_path => plain,
                _ => text.into(),
            })
        };
        let Some(raw) = matches.get_raw(id) else {
            continue;
        };
        let mut values = raw.map(value).collect::<Result<Vec<_>>>()?;
        let is_list = matches!(arg.get_action(), clap::ArgAction::Append);
        let value = match is_list {
            true => Value::Array(values),
            false => values.pop().unwrap_or_default(),
        };
        fields.insert(id.into(), value);
    }
    Ok(fields)
}

#[cfg(test)]
mod tests {
    use nvfp4_test_support::Scratch;

    use super::*;

    /// Returns the arguments of `command` with a file that contains `text`.
    fn merged(text: &str, command: &[&str]) -> Result<Vec<String>> {
        let folder = Scratch::new("options-file");
        let path = folder.join("own.json");
        std::fs::write(&path, text).unwrap();
        let config = format!("--config={}", path.display());
        let words = [&["nvfp4"], command, &[&*config]].concat();
        let words = words.into_iter().map(OsString::from).collect();
        let all = with_file(
            &<crate::command::Command as clap::CommandFactory>::command(),
            words,
        )?;
        let all = all.into_iter().map(|word| word.into_string().unwrap());
        Ok(all.filter(|word| *word != config).collect())
    }

    #[test]
    fn values_become_arguments() {
        let text = r#"{"model": "M", "data": ["a", "b"], "lr": 2e-5, "no_graph": true, "fsdp": false,
            "seed": null, "recipe": "nvidia", "export": "modelopt"}"#;
        let expected = [
            "nvfp4",
            "-q",
            "finetune",
            "M",
            "--data=a",
            "--data=b",
            "--export=modelopt",
            "--lr=0.00002",
            "--no-graph",
            "--recipe=nvidia",
            "--out",
            "out",
        ];
        let found = merged(text, &["-q", "finetune", "--out", "out"]).unwrap();
        assert_eq!(found, expected);
        // Flags override and contradict: each of these leaves out a value of the file.
        let flags = ["finetune", "N", "--data", "c", "--lr", "1", "--qat", "w4a4"];
        let expected = [
            "nvfp4",
            "finetune",
            "--export=modelopt",
            "--no-graph",
            "N",
            "--data",
            "c",
            "--lr",
            "1",
            "--qat",
            "w4a4",
        ];
        assert_eq!(merged(text, &flags).unwrap(), expected);
        let epochs = merged(r#"{"epochs": 2}"#, &["pretrain", "--steps", "5"]).unwrap();
        assert_eq!(epochs, ["nvfp4", "pretrain", "--steps", "5"]);
        // `train` reads its file itself, but for the keys of its session.
        let text = r#"{"width": 64, "stop_at": 5, "out": "a"}"#;
        let train = merged(text, &["train"]).unwrap();
        assert_eq!(train, ["nvfp4", "train", "--out=a", "--stop-at=5"]);
        let train = merged(text, &["train", "--out", "b"]).unwrap();
        assert_eq!(train, ["nvfp4", "train", "--stop-at=5", "--out", "b"]);
    }

    #[test]
    fn wrong_values_are_errors_of_their_line() {
        for (text, parts) in [
            (
                "{\n\"stepz\": 1}",
                ["line 2: stepz is not an option", ", steps, "],
            ),
            (
                "{\"resume\": \"a\"}",
                ["line 1: resume is not", ", valid_share, "],
            ),
            (
                "{\"steps\": \"many\"}",
                ["line 1: steps is \"many\"", "--steps"],
            ),
            ("{\"qat\": \"w8a8\"}", ["qat is \"w8a8\"", "w4a16, w4a4"]),
            ("{\"no_graph\": 1}", ["no_graph is 1", "true or false"]),
            ("{\"lr\": {}}", ["lr is {}", "a text or a number"]),
            ("{\"lr\": [1, 2]}", ["lr is [1,2]", "multiple times"]),
            ("[1]", ["own.json is not valid", "map"]),
        ] {
            let error = format!("{:#}", merged(text, &["finetune"]).unwrap_err());
            assert!(error.contains("own.json"), "{error}");
            assert!(
                parts.iter().all(|part| error.contains(part)),
                "{text}: {error}"
            );
        }
    }
}
