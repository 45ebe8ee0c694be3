//! Wraps text.

/// Breaks `text` into lines of at most `width` columns, between words, or inside a word that is
/// longer.
pub(crate) fn wrapped(text: &str, width: usize) -> impl Iterator<Item = String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => {
                let letters: Vec<char> = word.chars().collect();
                lines.extend(letters.chunks(width).map(String::from_iter));
            }
        }
    }
    lines.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_no_longer_than_they_may_be() {
        let lines: Vec<String> = wrapped("one two  three seventeenth", 9).collect();
        assert_eq!(lines, ["one two", "three", "seventeen", "th"]);
    }
}
