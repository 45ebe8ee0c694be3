//! SPDX licence expressions: can one be satisfied by a list of allowed licences?

use anyhow::{Result, bail, ensure};

/// True when `expression` can be met with licences for which `allowed` is true.
///
/// Grammar: `AND` binds tighter than `OR`; `WITH` belongs to the licence before it, and
/// `Apache-2.0 WITH LLVM-exception` is asked for as a whole; `/` is the old way to write `OR`.
pub fn satisfiable(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser {
        tokens: &tokens,
        allowed,
    };
    let outcome = parser.any_of()?;
    ensure!(
        parser.tokens.is_empty(),
        "`{}` is left over",
        parser.tokens.join(" ")
    );
    Ok(outcome)
}

struct Parser<'a> {
    tokens: &'a [&'a str],
    allowed: &'a dyn Fn(&str) -> bool,
}

impl<'a> Parser<'a> {
    fn next(&mut self) -> Option<&'a str> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(first)
    }

    fn take(&mut self, word: &str) -> bool {
        let found = self.tokens.first() == Some(&word);
        if found {
            self.tokens = &self.tokens[1..];
        }
        found
    }

    fn any_of(&mut self) -> Result<bool> {
        let mut outcome = self.all_of()?;
        while self.take("OR") {
            // Both sides are always read; `||` alone would skip the right one.
            outcome |= self.all_of()?;
        }
        Ok(outcome)
    }

    fn all_of(&mut self) -> Result<bool> {
        let mut outcome = self.licence()?;
        while self.take("AND") {
            outcome &= self.licence()?;
        }
        Ok(outcome)
    }

    fn licence(&mut self) -> Result<bool> {
        match self.next() {
            Some("(") => {
                let outcome = self.any_of()?;
                ensure!(self.take(")"), "a `)` is missing");
                Ok(outcome)
            }
            Some(word @ (")" | "AND" | "OR" | "WITH")) => {
                bail!("found `{word}` where a licence must be")
            }
            Some(name) if self.take("WITH") => match self.next() {
                Some(exception) => Ok((self.allowed)(&format!("{name} WITH {exception}"))),
                None => bail!("nothing after `WITH`"),
            },
            Some(name) => Ok((self.allowed)(name)),
            None => bail!("the expression ends where a licence must be"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::satisfiable;

    fn check(expression: &str) -> bool {
        let allowed = ["MIT", "Apache-2.0", "ISC", "Apache-2.0 WITH LLVM-exception"];
        satisfiable(expression, &|name| allowed.contains(&name)).unwrap()
    }

    #[test]
    fn expressions() {
        for good in [
            "MIT",
            "GPL-3.0 OR MIT",
            "MIT/Unlicense",
            "Unlicense / MIT",
            "(MIT OR GPL-3.0) AND ISC",
            "Apache-2.0 WITH LLVM-exception",
            "GPL-3.0 AND Zlib OR MIT",
        ] {
            assert!(check(good), "{good}");
        }
        for bad in [
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "(MIT OR ISC) AND GPL-3.0",
            "MIT WITH LLVM-exception",
            "MIT AND (GPL-3.0 OR Zlib)",
        ] {
            assert!(!check(bad), "{bad}");
        }
    }

    #[test]
    fn malformed_expressions_are_errors() {
        for text in [
            "", "MIT OR", "(MIT", "MIT)", "MIT ISC", "OR MIT", "MIT WITH",
        ] {
            assert!(satisfiable(text, &|_| true).is_err(), "{text:?}");
        }
    }
}
