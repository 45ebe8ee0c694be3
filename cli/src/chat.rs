//! A conversation on standard input and output.

use std::io::{BufRead, Write};

use anyhow::{Context, Result};
use nvfp4_lm::tokens::chat::Message;

use crate::terminal::warn;

/// Line that ends the conversation.
const EXIT: &str = "/exit";
/// Line that drops the messages so far.
const RESET: &str = "/reset";
/// Mark of a terminal's line of input.
const MARK: &str = "> ";

/// Reads one message of the user per line of `input`, until its end or [`EXIT`]. `answer` gets all
/// messages of the conversation, which begins with `system`, writes the answer to `out` and returns
/// it. Empty lines are skipped, and so are lines that look like a command and are none, with a
/// warning. If `has_mark`, a mark precedes every line.
///
/// # Errors
/// Returns an error if a line is not UTF-8, `out` cannot be written, or `answer` fails.
pub(crate) fn converse<W: Write>(
    mut input: impl BufRead,
    out: &mut W,
    system: Option<Message>,
    has_mark: bool,
    mut answer: impl FnMut(&[Message], &mut W) -> Result<String>,
) -> Result<()> {
    let first: Vec<Message> = system.into_iter().collect();
    let mut messages = first.clone();
    loop {
        if has_mark {
            write!(out, "{MARK}")?;
            out.flush()?;
        }
        let mut line = String::new();
        if input.read_line(&mut line).context("standard input")? == 0 {
            if has_mark {
                writeln!(out)?;
            }
            return Ok(());
        }
        match line.trim() {
            "" => {}
            EXIT => return Ok(()),
            RESET => messages.clone_from(&first),
            other if is_command(other) => warn(format!(
                "{other} is no command and was not sent: {RESET} drops the messages so far, {EXIT} \
                 ends the conversation"
            )),
            _ => {
                messages.push(Message::new("user", line.trim_end_matches(['\r', '\n'])));
                let text = answer(&messages, out)?;
                messages.push(Message::new("assistant", text));
            }
        }
    }
}

/// Returns true if `line` is a slash and one word.
fn is_command(line: &str) -> bool {
    let word = line.strip_prefix('/').unwrap_or_default();
    !word.is_empty()
        && word
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_?".contains(c))
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    /// Converses with a model that answers with the number of messages, which are recorded.
    fn conversation(input: &str, has_mark: bool) -> (String, Vec<Vec<String>>) {
        let (mut out, mut seen) = (Vec::new(), Vec::new());
        let system = Some(Message::new("system", "Be brief."));
        let answer = |messages: &[Message], out: &mut Vec<u8>| -> Result<String> {
            let texts = messages
                .iter()
                .map(|it| format!("{}: {}", it.role, it.content));
            seen.push(texts.collect::<Vec<_>>());
            let text = messages.len().to_string();
            writeln!(out, "{text}")?;
            Ok(text)
        };
        converse(input.as_bytes(), &mut out, system, has_mark, answer).unwrap();
        (String::from_utf8(out).unwrap(), seen)
    }

    #[test]
    fn a_conversation_keeps_its_messages() {
        let lines = "one\r\n\n two \n/reset\n/help\n/etc/hosts\n/rest now\n /exit\nfour\n";
        let (out, seen) = conversation(lines, false);
        assert_eq!(out, "2\n4\n2\n4\n");
        let expected = [
            &["system: Be brief.", "user: one"][..],
            &[
                "system: Be brief.",
                "user: one",
                "assistant: 2",
                "user:  two ",
            ],
            // A slash and one word is not sent; other lines that begin with a slash are.
            &["system: Be brief.", "user: /etc/hosts"],
            &[
                "system: Be brief.",
                "user: /etc/hosts",
                "assistant: 2",
                "user: /rest now",
            ],
        ];
        assert_eq!(seen, expected);
        // A terminal's last line ends with the input.
        let (out, _) = conversation("one\ntwo", true);
        assert_eq!(out, "> 2\n> 4\n> \n");
    }

    #[test]
    fn errors_end_a_conversation() {
        let mut out = Vec::new();
        let refused = |_: &[Message], _: &mut Vec<u8>| -> Result<String> { bail!("too long") };
        let error = converse("one\ntwo\n".as_bytes(), &mut out, None, false, refused);
        assert_eq!(error.unwrap_err().to_string(), "too long");
        let refused = |_: &[Message], _: &mut Vec<u8>| Ok(String::new());
        let error = converse(&b"\xff\n"[..], &mut out, None, false, refused).unwrap_err();
        assert!(error.to_string().contains("standard input"), "{error}");
    }
}
