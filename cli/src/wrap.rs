//! Text in lines.

/// `text` in lines of at most `width` columns, broken between words.
pub(crate) fn wrapped(text: &str, width: usize) -> impl Iterator<Item = String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stay_whole() {
        let lines: Vec<String> = wrapped("one two  three seventeen", 9).collect();
        assert_eq!(lines, ["one two", "three", "seventeen"]);
    }
}
