//! Words of a shell, for commands that a user pastes.

/// How this program was called, as the first word of a command to paste into a shell.
pub(crate) fn program() -> String {
    let name = std::env::args_os().next();
    quoted(&name.map_or_else(
        || "nvfp4".into(),
        |name| name.to_string_lossy().into_owned(),
    ))
}

/// `text` as one word of a shell.
pub(crate) fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/\\._-:+=,@".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_of_a_shell_are_quoted_where_they_must_be() {
        for (text, expected) in [
            ("target/release/nvfp4", "target/release/nvfp4"),
            ("my runs/tiny-1", "'my runs/tiny-1'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(text), expected);
        }
    }
}
