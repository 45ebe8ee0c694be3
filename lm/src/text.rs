//! Text that comes in pieces: characters of bytes, and where it stops.

use anyhow::{Result, ensure};

/// Holds back what may be the start of a stop string, and gives nothing from the first of them on.
#[derive(Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    is_stopped: bool,
}

impl StopStrings {
    /// # Errors
    /// When one of `stops` is empty.
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

    /// Whether a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Takes the next piece of the text, and gives what is certain now; often there is nothing.
    pub fn push(&mut self, new: &str) -> String {
        self.release(new, false)
    }

    /// The same of the last piece.
    pub fn finish(mut self, new: &str) -> String {
        self.release(new, true)
    }

    /// What of the held text and `new` can be given out: all before a stop string, and not what may
    /// be the start of one, unless it is the end.
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

/// Gives bytes out as soon as they complete a character. What is not UTF-8 becomes U+FFFD.
#[derive(Debug, Default)]
pub struct Characters {
    pending: Vec<u8>,
}

impl Characters {
    /// Takes the next bytes, and gives the characters that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = &self.pending[..];
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, tail) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            rest = tail;
            let Some(length) = error.error_len() else {
                // The beginning of a character.
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

    /// What is left of a character that was not completed.
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
