//! Matches the modules that a checkpoint excludes from quantization, by the rules of its readers.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use regex::Regex;

use super::Dialect;

/// Target that matches all linear layers.
pub const LINEAR: &str = "Linear";

/// Returns the exclusions of a folder whose unquantized linear layers are `unquantized`: their
/// names, which all readers interpret alike. Always includes the head, even if tied to the
/// embedding; for ModelOpt, also the embedding.
pub(crate) fn exclusions<'a>(
    unquantized: impl IntoIterator<Item = &'a str>,
    dialect: Dialect,
) -> Vec<String> {
    let embeddings = (dialect == Dialect::ModelOpt).then_some("model.embed_tokens");
    let names = unquantized.into_iter().chain(["lm_head"]).chain(embeddings);
    let names: BTreeSet<&str> = names.collect();
    names.into_iter().map(String::from).collect()
}

/// One entry of `exclude_modules` or `ignore`.
#[derive(Debug, Clone)]
pub struct Exclusion {
    text: String,
    rule: Rule,
}

#[derive(Debug, Clone)]
enum Rule {
    /// Matches the whole name.
    Exact,
    /// Matches from the start of the name, like Python's `re.match`.
    Regex(Regex),
    /// Matches the whole name, any substring, or an fnmatch pattern for the whole name (vLLM).
    ExactSubstringOrGlob(Regex),
}

impl Exclusion {
    /// Parses `text` like consumers of `dialect`. compressed-tensors: an exact name, or `re:` and a
    /// regular expression that is matched from the start. ModelOpt: an exact name, a substring, or
    /// a pattern with `*`, `?` and `[]`.
    ///
    /// # Errors
    /// Returns an error if the regular expression is invalid, or uses look-around, which the
    /// `regex` crate lacks.
    pub fn new(dialect: Dialect, text: &str) -> Result<Self> {
        let compile = |pattern: &str| {
            Regex::new(pattern).with_context(|| format!("the exclusion {text:?} cannot be read"))
        };
        let rule = match (dialect, text.strip_prefix("re:")) {
            (Dialect::CompressedTensors, Some(regex)) => {
                Rule::Regex(compile(&format!("^(?:{regex})"))?)
            }
            (Dialect::CompressedTensors, None) => Rule::Exact,
            (Dialect::ModelOpt, _) => Rule::ExactSubstringOrGlob(compile(&fnmatch(text))?),
        };
        let text = text.to_owned();
        Ok(Self { text, rule })
    }

    /// Returns the entry as written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns true if a consumer treats `module` as excluded.
    pub fn matches(&self, module: &str) -> bool {
        match &self.rule {
            Rule::Exact => self.text == module,
            Rule::Regex(regex) => regex.is_match(module),
            Rule::ExactSubstringOrGlob(glob) => {
                !self.text.is_empty() && (module.contains(&self.text) || glob.is_match(module))
            }
        }
    }
}

/// Converts a pattern of Python's `fnmatch` to a regular expression.
fn fnmatch(pattern: &str) -> String {
    let mut regex = String::from("^");
    let mut rest = pattern;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '*' => regex.push_str(".*"),
            '?' => regex.push('.'),
            '[' => {
                let (negation, inside) = match rest.strip_prefix('!') {
                    Some(inside) => ("^", inside),
                    None => ("", rest),
                };
                // An unclosed bracket is literal; a closing one comes after at least one character.
                match inside.char_indices().skip(1).find(|&(_, c)| c == ']') {
                    Some((end, _)) => {
                        regex.push_str(&character_class(negation, &inside[..end]));
                        rest = &inside[end + 1..];
                    }
                    None => regex.push_str(r"\["),
                }
            }
            c => regex.push_str(&regex::escape(&c.to_string())),
        }
    }
    regex.push('$');
    regex
}

/// Converts the characters and ranges of `set` to a character class. A range whose end precedes its
/// start is empty.
fn character_class(negation: &str, set: &str) -> String {
    let set: Vec<char> = set.chars().collect();
    let code = |c: char| format!(r"\x{{{:x}}}", u32::from(c));
    let mut class = String::new();
    let mut at = 0;
    while at < set.len() {
        match set[at..] {
            [first, '-', last, ..] => {
                if first <= last {
                    class += &format!("{}-{}", code(first), code(last));
                }
                at += 3;
            }
            _ => {
                class += &code(set[at]);
                at += 1;
            }
        }
    }
    match (class.is_empty(), negation) {
        (false, _) => format!("[{negation}{class}]"),
        (true, "") => r"[^\s\S]".into(),
        (true, _) => ".".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(dialect: Dialect, text: &str, module: &str) -> bool {
        Exclusion::new(dialect, text).unwrap().matches(module)
    }

    #[test]
    fn compressed_tensors_takes_exact_names_and_expressions_from_the_start() {
        let ct = Dialect::CompressedTensors;
        assert!(matches(ct, "lm_head", "lm_head"));
        assert!(!matches(ct, "lm_head", "model.lm_head"));
        assert!(matches(ct, "re:.*mlp.gate$", "model.layers.0.mlp.gate"));
        assert!(!matches(
            ct,
            "re:.*mlp.gate$",
            "model.layers.0.mlp.gate_proj"
        ));
        assert!(!matches(ct, "re:mlp.gate$", "model.layers.0.mlp.gate"));
        assert!(matches(ct, "re:model.layers.1", "model.layers.10.mlp"));
        assert!(matches(ct, "re:a|b", "bc"), "the start binds all branches");
        assert!(!matches(ct, "re:a|b", "cb"));
        let error = Exclusion::new(ct, "re:(?!a)").unwrap_err().to_string();
        assert!(error.contains("re:(?!a)"), "{error}");
    }

    #[test]
    fn modelopt_takes_exact_names_parts_and_patterns() {
        let mo = Dialect::ModelOpt;
        assert!(matches(mo, "lm_head", "lm_head"));
        assert!(
            matches(mo, "model.layers.1", "model.layers.10.self_attn.q_proj"),
            "a part of the name, as vLLM reads it"
        );
        assert!(matches(mo, "*.gate", "model.layers.0.mlp.gate"));
        assert!(!matches(mo, "*.gate", "model.layers.0.mlp.gate_proj"));
        assert!(matches(
            mo,
            "model.layers.[!1].mlp*",
            "model.layers.2.mlp.gate"
        ));
        assert!(!matches(
            mo,
            "model.layers.[!1].mlp*",
            "model.layers.1.mlp.gate"
        ));
        assert!(matches(mo, "model.layers.?.mlp", "model.layers.0.mlp"));
        assert!(!matches(mo, "model.layers.?.mlp", "model.layers.00.mlp"));
        assert!(!matches(mo, "", "model.layers.0"));
        assert!(Exclusion::new(mo, "a[").is_ok());
    }

    /// Sets are interpreted like Python's `fnmatch`: set operators of the `regex` crate are literal
    /// characters, and every pattern is valid.
    #[test]
    fn sets_are_those_of_python() {
        let mo = Dialect::ModelOpt;
        assert!(matches(mo, "x[]]", "x]"));
        assert!(matches(mo, "x[!]a]", "xb") && !matches(mo, "x[!]a]", "x]"));
        assert!(!matches(mo, "x[!]a]", "xa"));
        assert!(matches(mo, "x[!]", "x[!]"), "nothing closes it");
        assert!(!matches(mo, "x[z-a]", "xz"), "an empty range");
        assert!(matches(mo, "x[!z-a]", "xz"));
        assert!(matches(mo, "x[a&&b]", "xa") && matches(mo, "x[a&&b]", "x&"));
        assert!(matches(mo, "x[b-d]", "xc") && !matches(mo, "x[b-d]", "xe"));
        assert!(matches(mo, "x[b-]", "x-") && matches(mo, "x[-b]", "x-"));
        assert!(matches(mo, r"x[\d]", r"x\") && !matches(mo, r"x[\d]", "x1"));
    }
}
