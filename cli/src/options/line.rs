//! The command line: its parser, and the names of its options in errors.

use std::ffi::OsString;

use anyhow::Result;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory, Parser};

use super::file::{of_command, printed, with_file};

/// Parses the command line `arguments`, the program first, with the options of a `--config` file.
/// Prints the options and ends the process if this is what the command line asks for.
///
/// # Errors
/// Returns a [`clap::Error`] if the command line is refused, and another error if the file is.
pub(crate) fn parsed<C: Parser>(arguments: Vec<OsString>) -> Result<C> {
    let command = with_negative_numbers(C::command());
    let arguments = with_file(&command, arguments)?;
    let matches = command.clone().try_get_matches_from(&arguments);
    let mut matches = matches.map_err(|error| with_tip(error, &command, &arguments))?;
    if let Some((options, given, None)) = of_command(&command, &matches)
        && given.get_flag("print_config")
    {
        let printed = printed(options, given)?;
        println!("{}", serde_json::to_string_pretty(&printed)?);
        std::process::exit(0);
    }
    let parsed = C::from_arg_matches_mut(&mut matches);
    Ok(parsed.map_err(|error| error.format(&mut C::command()))?)
}

/// Lets all options of `command` and its commands take negative numbers: an error of the command
/// then names the option and its range, where the parser would report an unknown option.
fn with_negative_numbers(command: Command) -> Command {
    let command = command.mut_args(|arg| match is_valued_option(&arg) {
        true => arg.allow_negative_numbers(true),
        false => arg,
    });
    command.mut_subcommands(with_negative_numbers)
}

fn is_valued_option(arg: &Arg) -> bool {
    arg.get_long().is_some() && arg.get_action().takes_values()
}

/// Returns the innermost command that `arguments` run, with what was found of its arguments.
fn running(command: &Command, arguments: &[OsString]) -> Option<(Command, ArgMatches)> {
    let lenient = command.clone().ignore_errors(true);
    let mut command = command.clone();
    let mut matches = lenient.try_get_matches_from(arguments).ok()?;
    while let Some((name, of_subcommand)) = matches.remove_subcommand() {
        command = command.find_subcommand(&name)?.clone();
        matches = of_subcommand;
    }
    Some((command, matches))
}

/// Adds a tip to `error` if a positional argument is missing after an option that takes all words
/// up to the next one.
fn with_tip(mut error: clap::Error, command: &Command, arguments: &[OsString]) -> clap::Error {
    let missing = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(names))) => {
            let mut names = names.iter();
            names.find(|name| name.starts_with('<')).cloned()
        }
        _ => None,
    };
    let (Some(missing), Some((command, matches))) = (missing, running(command, arguments)) else {
        return error;
    };
    let takes_all = |arg: &&Arg| {
        let values = arg.get_num_args();
        is_valued_option(arg)
            && values.is_some_and(|values| values.max_values() > 1)
            && matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
    };
    let tips = command.get_arguments().filter(takes_all).map(|arg| {
        let long = arg.get_long().unwrap_or_default();
        format!("--{long} takes all words up to the next option: write {missing} before it").into()
    });
    let tips: Vec<_> = tips.collect();
    if !tips.is_empty() {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    error
}

/// Returns `error`, of the command that `arguments` run, with dashes before the options that it is
/// about. The library names them as files of options do, as in `bits is 4, but ..`.
pub(crate) fn dashed<C: CommandFactory>(error: &str, arguments: &[OsString]) -> String {
    match running(&C::command(), arguments) {
        Some((command, matches)) => with_dashes(error, &command, &matches),
        None => error.into(),
    }
}

/// Puts dashes before the first word of `error`, and before the subject after a `but` or an `and`,
/// if the first word is an option of `command`. A word in backticks may be a field of a file, too:
/// it is an option if `matches` has its value.
fn with_dashes(error: &str, command: &Command, matches: &ArgMatches) -> String {
    let option = |word: &str| {
        let name = word.trim_matches('`');
        let long = name.replace('_', "-");
        let mut all = command.get_arguments();
        let arg = all.find(|arg| arg.get_long() == Some(&*long))?;
        let source = matches.value_source(arg.get_id().as_str());
        let is_option = name == word || source == Some(ValueSource::CommandLine);
        is_option.then(|| format!("--{long}"))
    };
    let words: Vec<&str> = error.split(' ').collect();
    // A device is out of memory.
    let is_plain = words.get(1).is_none_or(|word| *word == "of");
    if is_plain || option(words[0]).is_none() {
        return error.into();
    }
    let is_subject = |at: usize| {
        at == 0 || (["but", "and"].contains(&words[at - 1]) && words.get(at + 1) == Some(&"is"))
    };
    let names = words.iter().enumerate().map(|(at, word)| {
        let name = option(word).filter(|_| is_subject(at));
        name.unwrap_or_else(|| (*word).to_owned())
    });
    names.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Command as Nvfp4;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn refused(line: &str) -> String {
        let error = parsed::<Nvfp4>(words(line)).err();
        error.expect(line).to_string()
    }

    #[test]
    fn options_take_negative_numbers() {
        fn walk(command: &Command) {
            for arg in command.get_arguments().filter(|arg| is_valued_option(arg)) {
                let (name, id) = (command.get_name(), arg.get_id());
                assert!(arg.is_allow_negative_numbers_set(), "{name}: {id}");
            }
            command.get_subcommands().for_each(walk);
        }
        walk(&with_negative_numbers(Nvfp4::command()));
        assert!(parsed::<Nvfp4>(words("nvfp4 quantize M --out O --input-scale -1")).is_ok());
        // Whole numbers have no sign; the parser itself names the option.
        let error = refused("nvfp4 finetune M --data D --out O --steps -1");
        assert!(error.contains("'-1' for '--steps <STEPS>'"), "{error}");
    }

    #[test]
    fn a_missing_argument_may_be_taken_by_an_option() {
        for (line, option) in [
            (
                "nvfp4 quantize --out O --calibration texts M",
                "--calibration",
            ),
            ("nvfp4 eval --data texts M", "--data"),
            ("nvfp4 tokenize --out O --data texts M", "--data"),
            ("nvfp4 finetune --out O --data a b M", "--data"),
        ] {
            let error = refused(line);
            let tip = format!("tip: {option} takes all words up to the next option: write <MODEL>");
            assert!(error.contains(&tip), "{line}: {error}");
        }
        for line in [
            "nvfp4 quantize --out O",
            "nvfp4 quantize M --calibration texts",
        ] {
            let error = refused(line);
            assert!(!error.contains("tip"), "{line}: {error}");
        }
    }

    #[test]
    fn errors_name_options_with_dashes() {
        let quantize = "nvfp4 -q quantize M --out O";
        let finetune = "nvfp4 finetune M --data D --out O";
        for (line, error, expected) in [
            (
                quantize,
                "bits is given, which chooses the layers in FP8, but fp8 is given too",
                "--bits is given, which chooses the layers in FP8, but --fp8 is given too",
            ),
            (
                quantize,
                "out O must be empty, but it is not",
                "--out O must be empty, but it is not",
            ),
            (
                "nvfp4 train",
                "tp is 2 and heads is 3, but each rank has as many heads",
                "--tp is 2 and --heads is 3, but each rank has as many heads",
            ),
            (
                "nvfp4 train --high-precision x",
                "high_precision is \"x\", but",
                "--high-precision is \"x\", but",
            ),
            (
                "nvfp4 dev oracle cvt-rs --device flex",
                "device is flex, but",
                "--device is flex, but",
            ),
            (
                "nvfp4 generate M --prompt a --top-p 3",
                "`top_p` is 3, but must be",
                "--top-p is 3, but must be",
            ),
            (
                "nvfp4 generate M --prompt a",
                "`top_p` is 3, but must be",
                "`top_p` is 3, but must be",
            ),
            // Neither an option, nor one of this command, nor its subject.
            (
                finetune,
                "out of device memory on cpu",
                "out of device memory on cpu",
            ),
            (finetune, "bits is 4", "bits is 4"),
            (finetune, "/a/b: steps is 0", "/a/b: steps is 0"),
            (finetune, "steps", "steps"),
        ] {
            assert_eq!(dashed::<Nvfp4>(error, &words(line)), expected);
        }
    }
}
