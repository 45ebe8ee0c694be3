//! Incremental text: assembles characters from bytes, and detects stop strings.

use anyhow::{Result, ensure};

/// Withholds text that may be the start of a stop string, and emits nothing from the first stop
/// string on.
#[derive(Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    is_stopped: bool,
}

impl StopStrings {
    /// # Errors
    /// Returns an error if one of `stops` is empty.
    pub fn new(stops: &[String]) -> Result<Self> {
        ensure!(
            stops.iter().all(|stop| !stop.is_empty()),
            "a stop string is empty, but must have at least one character"
        );
        Ok(Self {
            stops: stops.to_vec(),
            held: String::new(),
            is_stopped: false,
        })
    }

    /// Returns true if a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Takes the next piece of text and returns the text that is safe to emit, often none.
    pub fn push(&mut self, new: &str) -> String {
        self.release(new, false)
    }

    /// Takes the last piece of text and returns the rest that is safe to emit.
    pub fn finish(mut self, new: &str) -> String {
        self.release(new, true)
    }

    /// Returns the part of the withheld text and `new` that can be emitted: all text before a stop
    /// string. Withholds a possible start of a stop string unless `is_end`.
    fn release(&mut self, new: &str, is_end: bool) -> String {
        if self.is_stopped {
            return String::new();
        }
        self.held.push_str(new);
        let found = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()))
            .min();
        if let Some(end) = found {
            self.is_stopped = true;
            self.held.truncate(end);
            return std::mem::take(&mut self.held);
        }
        let starts = |at: &usize| {
            self.stops
                .iter()
                .any(|stop| stop.starts_with(&self.held[*at..]))
        };
        let mut places = self.held.char_indices().map(|(at, _)| at);
        let certain = if is_end { None } else { places.find(starts) };
        let rest = self.held.split_off(certain.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }
}

/// Emits bytes as soon as they complete a character. Invalid UTF-8 becomes U+FFFD.
#[derive(Debug, Default)]
pub struct Characters {
    pending: Vec<u8>,
}

impl Characters {
    /// Takes the next bytes and returns the characters that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = &self.pending[..];
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, tail) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            rest = tail;
            let Some(length) = error.error_len() else {
                // An incomplete character.
                self.pending = rest.to_vec();
                return text;
            };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[length..];
        }
        text.push_str(&String::from_utf8_lossy(rest));
        self.pending.clear();
        text
    }

    /// Returns the rest: an incomplete character, if any.
    pub fn finish(self) -> String {
        match self.pending.is_empty() {
            true => String::new(),
            false => char::REPLACEMENT_CHARACTER.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_characters() {
        let mut characters = Characters::default();
        let mut text = String::new();
        for byte in b"a\xc3\xa4\xff\xe2\x82b\xe2\x82\xac\xe2" {
            text += &characters.push(&[*byte]);
        }
        text += &characters.finish();
        assert_eq!(text, "a\u{e4}\u{fffd}\u{fffd}b\u{20ac}\u{fffd}");
        let mut all = Characters::default();
        assert_eq!(all.push(b"a\xff\xc3\xa4\xc3"), "a\u{fffd}\u{e4}");
        assert_eq!(all.push(b"\xa4"), "\u{e4}");
        assert_eq!(all.finish(), "");
    }

    #[test]
    fn nothing_comes_behind_a_stop_string() {
        let mut stops = StopStrings::new(&["end".into()]).unwrap();
        assert_eq!(stops.push("the e"), "the ");
        assert_eq!(stops.push("ne"), "en");
        assert_eq!(stops.push("nd"), "");
        assert!(stops.is_stopped());
        assert_eq!(stops.push("more"), "");
        assert!(StopStrings::new(&[String::new()]).is_err());
    }
}
