//! A view: a table with values from several results files.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::file::{FOLDER, Results};
use super::table::{self, Table};

/// Rows and columns that refer to values of results files.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct View {
    /// Heading of the first column.
    row: String,
    columns: Vec<Column>,
    rows: Vec<Row>,
    /// Remarks for the reader, one sentence each.
    #[serde(default)]
    notes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Column {
    name: String,
    /// Common part of the references in this column.
    #[serde(default)]
    of: Reference,
    /// Digits after the decimal point; those of the unit if missing.
    #[serde(default)]
    digits: Option<usize>,
    /// Text after each value.
    #[serde(default)]
    suffix: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    /// Common part of the references in this row; takes precedence over the column's.
    #[serde(default)]
    of: Reference,
    /// One reference per column, which takes precedence over row and column; null leaves a cell
    /// empty.
    #[serde(default)]
    cells: Option<Vec<Option<Reference>>>,
}

/// Complete or partial reference to a value.
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Reference {
    file: Option<String>,
    row: Option<String>,
    /// Empty for rows without `at`.
    at: Option<String>,
    unit: Option<String>,
}

impl Reference {
    /// Returns `self`, completed by the fields of `other`.
    fn or(&self, other: &Self) -> Self {
        let either = |a: &Option<String>, b: &Option<String>| a.clone().or_else(|| b.clone());
        Self {
            file: either(&self.file, &other.file),
            row: either(&self.row, &other.row),
            at: either(&self.at, &other.at),
            unit: either(&self.unit, &other.unit),
        }
    }
}

/// Files that a view may refer to, with the staleness of each row.
pub type Files = BTreeMap<String, (Results, Vec<bool>)>;

impl View {
    /// Parses a view.
    ///
    /// # Errors
    ///
    /// Returns an error if a field is missing or unknown, or if the number of cells in a row
    /// differs from that of the columns.
    pub fn parse(text: &str) -> Result<Self> {
        let view: Self = serde_json::from_str(text)?;
        ensure!(!view.rows.is_empty(), "`rows` is empty");
        for Row { name, cells, .. } in &view.rows {
            let count = cells.as_ref().map_or(view.columns.len(), Vec::len);
            ensure!(
                count == view.columns.len(),
                "row {name}: {count} cells for {} columns",
                view.columns.len()
            );
        }
        Ok(view)
    }

    /// Renders table, notes and sources. `link` returns the destination of a link to a results
    /// file.
    ///
    /// # Errors
    ///
    /// Returns an error if a cell refers to no value.
    pub fn render(&self, files: &Files, link: impl Fn(&str) -> String) -> Result<String> {
        let heads = self.columns.iter().map(|column| column.name.clone());
        let mut table = Table::new([self.row.clone()].into_iter().chain(heads).collect());
        let mut sources: Vec<(String, Vec<String>)> = Vec::new();
        let mut rows = Vec::new();
        for row in &self.rows {
            let mut cells = vec![row.name.clone()];
            // None for a row without figures.
            let mut changed = None;
            for (at, column) in self.columns.iter().enumerate() {
                let own = match &row.cells {
                    None => Some(Reference::default()),
                    Some(cells) => cells[at].clone(),
                };
                let Some(own) = own else {
                    cells.push(String::new());
                    continue;
                };
                let reference = own.or(&row.of).or(&column.of);
                let cell = cell(&reference, column, files)
                    .with_context(|| format!("row {}, column {}", row.name, column.name))?;
                changed = Some(changed.unwrap_or(false) || cell.stale);
                cells.push(cell.text);
                let at = match sources.iter().position(|(file, _)| file == cell.file) {
                    Some(at) => at,
                    None => {
                        sources.push((cell.file.to_owned(), Vec::new()));
                        sources.len() - 1
                    }
                };
                if !sources[at].1.contains(&cell.origin) {
                    sources[at].1.push(cell.origin);
                }
            }
            rows.push((cells, changed));
        }
        let all = rows.iter().all(|(_, changed)| changed.unwrap_or(true));
        for (cells, changed) in rows {
            table.push(cells, changed.unwrap_or(all));
        }
        let mut out = table.render();
        for note in &self.notes {
            table::item(&mut out, note);
        }
        let sources = sources
            .iter()
            .map(|(name, origins)| format!("[`{name}`]({}) ({})", link(name), origins.join("; ")));
        let sources: Vec<String> = sources.collect();
        table::item(&mut out, &format!("Sources: {}.", sources.join("; ")));
        Ok(out)
    }
}

/// A cell and the source of its value.
struct Cell<'a> {
    text: String,
    stale: bool,
    file: &'a str,
    origin: String,
}

fn cell<'a>(reference: &'a Reference, column: &Column, files: &Files) -> Result<Cell<'a>> {
    let Reference {
        file,
        row,
        at,
        unit,
    } = reference;
    let file = file.as_ref().context("no `file`")?;
    let row = row.as_ref().context("no `row`")?;
    let unit = unit.as_ref().context("no `unit`")?;
    let (results, stale) = files
        .get(file)
        .with_context(|| format!("there is no {}/{file}.json", FOLDER))?;
    let mut figure = results
        .figure(row, at.as_deref().filter(|at| !at.is_empty()), unit)
        .with_context(|| format!("{file}.json"))?;
    figure.digits = column.digits.unwrap_or(figure.digits);
    let mut text = figure.shown();
    if !text.is_empty() {
        text += &column.suffix;
    }
    Ok(Cell {
        text,
        stale: stale[figure.row],
        file,
        origin: results.row_origin(figure.row).to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const VIEW: &str = r#"{
        "row": "step",
        "columns": [
            {"name": "time", "of": {"unit": "%"}, "suffix": " %"},
            {"name": "memory", "of": {"unit": "GB", "at": "768"}, "digits": 0}
        ],
        "rows": [
            {"name": "small", "of": {"file": "steps", "row": "nvidia", "at": "768"}},
            {"name": "prefill", "cells": [null, {"file": "decode", "row": "NVFP4", "at": ""}]},
            {"name": "decoding", "cells": [{"file": "decode", "row": "NVFP4"}, null]}
        ],
        "notes": ["A note."]
    }"#;

    fn files() -> Files {
        let head = r#"{"title": "T", "gpu": "H100", "date": "2026-11-28", "commit": "abc1234",
            "command": "c", "about": ["src"], "row": "recipe",
            "units": [{"name": "%"}, {"name": "GB", "digits": 2}], "rows": "#;
        let steps = r#"[{"name": "nvidia", "at": "768", "values": [115, 10.25]}]}"#;
        let decode = r#"[{"name": "NVFP4", "values": [36, null]}]}"#;
        let parse = |rows| Results::parse(&format!("{head}{rows}")).unwrap();
        BTreeMap::from([
            ("steps".into(), (parse(steps), vec![false])),
            ("decode".into(), (parse(decode), vec![true])),
        ])
    }

    #[test]
    fn figures_of_several_files() {
        let view = View::parse(VIEW).unwrap();
        let text = view
            .render(&files(), |name| format!("page#{name}"))
            .unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "| step | time | memory |");
        assert_eq!(lines[2], "| small | 115 % | 10 |");
        assert_eq!(lines[3], "| prefill † | | |");
        assert_eq!(lines[4], "| decoding † | 36 % | |");
        assert_eq!(lines[7], "- A note.");
        assert!(
            text.contains("[`steps`](page#steps) (H100, 2026-11-28,"),
            "{text}"
        );
    }

    #[test]
    fn rows_without_figures_have_no_mark() {
        let small = r#""of": {"file": "steps", "row": "nvidia", "at": "768"}"#;
        let view = VIEW.replace(small, r#""cells": [null, null]"#);
        let text = View::parse(&view).unwrap();
        let text = text.render(&files(), str::to_owned).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        // All figures are stale.
        assert_eq!(lines[0], "| step † | time | memory |");
        assert_eq!(lines[2], "| small | | |");
        assert_eq!(lines[3], "| prefill | | |");
    }

    #[test]
    fn names_without_a_figure_are_errors() {
        for (from, to, expected) in [
            ("steps", "stops", "there is no results/stops.json"),
            (
                "\"at\": \"768\"}}",
                "\"at\": \"769\"}}",
                "there is no row nvidia at 769",
            ),
            ("\"GB\"", "\"MB\"", "there is no unit MB"),
            (r#""row": "NVFP4""#, r#""unit": "%""#, "no `row`"),
        ] {
            let view = View::parse(&VIEW.replace(from, to)).unwrap();
            let error = view.render(&files(), str::to_owned).unwrap_err();
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        }
        let error = View::parse(&VIEW.replace(", null]", "]")).err().unwrap();
        assert!(error.to_string().contains("1 cells for 2 columns"));
    }
}
