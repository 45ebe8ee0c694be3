//! Renders Markdown tables.
//!
//! A dagger marks rows whose code changed after their measurement. If this applies to all rows, it
//! marks the heading. [`unmarked`] removes the marks, because pages are compared without them.

use std::fmt::Write;

const MARK: &str = " †";
const FOOTNOTE: &str = "† The measured code has changed since.";

/// A table with a heading; the first column holds names.
pub struct Table {
    heads: Vec<String>,
    rows: Vec<(Vec<String>, bool)>,
}

impl Table {
    /// Creates an empty table.
    pub fn new(heads: Vec<String>) -> Self {
        let rows = Vec::new();
        Self { heads, rows }
    }

    /// Adds a row. `stale` is true if its code changed after the measurement.
    pub fn push(&mut self, cells: Vec<String>, stale: bool) {
        self.rows.push((cells, stale));
    }

    /// Renders the table, an empty line and, if a row is marked, the footnote as the first item of
    /// a list.
    pub fn render(&self) -> String {
        let any = self.rows.iter().any(|(_, stale)| *stale);
        let all = self.rows.iter().all(|(_, stale)| *stale);
        let mut out = String::new();
        line(&mut out, &self.heads, any && all);
        let rule = (0..self.heads.len()).map(|at| if at == 0 { "---" } else { "---:" });
        line(&mut out, &rule.collect::<Vec<_>>(), false);
        for (cells, stale) in &self.rows {
            line(&mut out, cells, *stale && !all);
        }
        out.push('\n');
        if any {
            item(&mut out, FOOTNOTE);
        }
        out
    }
}

/// Removes daggers and footnotes from `page`.
pub fn unmarked(page: &str) -> String {
    let footnote = format!("- {FOOTNOTE}");
    let lines = page.lines().filter(|line| *line != footnote);
    lines.fold(String::new(), |mut out, line| {
        out += &line.replace(MARK, "");
        out.push('\n');
        out
    })
}

fn line(out: &mut String, cells: &[impl AsRef<str>], marked: bool) {
    out.push('|');
    for (at, cell) in cells.iter().enumerate() {
        let mark = if marked && at == 0 { MARK } else { "" };
        let _ = match cell.as_ref() {
            "" => write!(out, "{mark} |"),
            cell => write!(out, " {cell}{mark} |"),
        };
    }
    out.push('\n');
}

/// Adds a list item, wrapped to 100 columns.
pub fn item(out: &mut String, text: &str) {
    let indent = "  ";
    let mut column = 0;
    for word in format!("- {text}").split(' ') {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > 100 {
            out.push('\n');
            out.push_str(indent);
            column = indent.len();
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += width;
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(head: &str, stale: [bool; 2]) -> String {
        let mut table = Table::new(vec![head.into(), "us".into()]);
        table.push(vec!["a".into(), "1".into()], stale[0]);
        table.push(vec!["b".into(), String::new()], stale[1]);
        table.render()
    }

    #[test]
    fn stale_rows_are_marked() {
        let plain = "| kernel | us |\n| --- | ---: |\n| a | 1 |\n| b | |\n\n";
        let footnote = format!("- {FOOTNOTE}\n");
        assert_eq!(render("kernel", [false; 2]), plain);
        let one = plain.replace("| b |", "| b † |") + &footnote;
        assert_eq!(render("kernel", [false, true]), one);
        let all = plain.replace("kernel |", "kernel † |") + &footnote;
        assert_eq!(render("kernel", [true; 2]), all);
        for stale in [[false, true], [true, true]] {
            for head in ["kernel", ""] {
                let marked = render(head, stale);
                assert!(marked.contains('†'));
                assert_eq!(unmarked(&marked), render(head, [false; 2]));
            }
        }
    }

    #[test]
    fn items_are_wrapped() {
        let mut out = String::new();
        item(
            &mut out,
            &"word ".repeat(40).trim_end().replace("word", "words"),
        );
        assert!(out.lines().all(|line| line.len() <= 100));
        assert!(out.lines().skip(1).all(|line| line.starts_with("  ")));
    }
}
