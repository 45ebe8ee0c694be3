//! Quotes words for shell commands that a user pastes.

/// Returns the name by which this program was called, quoted for a shell.
pub(crate) fn program() -> String {
    let name = std::env::args_os().next();
    quoted(&name.map_or_else(
        || "nvfp4".into(),
        |name| name.to_string_lossy().into_owned(),
    ))
}

/// Returns `text` as one shell word.
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
