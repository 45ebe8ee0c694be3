//! `cargo xtask results`: the tables of the book's performance page, from `results/*.json`.
//!
//! A file holds the answer to one question: the figures of one run on one GPU. The benchmarks write
//! such files (`NVFP4_BENCH_JSON=FILE`). The page names each file where its table belongs:
//!
//! ```text
//! <!-- results: NAME -->
//! (the table of results/NAME.json)
//! <!-- end -->
//! ```
//!
//! Text outside of these markers is left as it is.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::workspace;

/// The files, from the root.
const FOLDER: &str = "results";
/// The page, from the root.
const PAGE: &str = "docs/src/performance.md";

const BEGIN: &str = "<!-- results: ";
const END: &str = "<!-- end -->";

/// Options of `cargo xtask results`.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing, and fail when the page differs from the files
    #[arg(long)]
    pub check: bool,
}

/// Rewrites the tables of the page, or compares them.
pub fn run(args: &Args) -> Result<()> {
    let root = workspace::root();
    let tables = read(&root.join(FOLDER))?;
    let path = root.join(PAGE);
    let page = fs::read_to_string(&path).with_context(|| PAGE.to_string())?;
    let fresh = rewrite(&page, &tables).with_context(|| PAGE.to_string())?;
    if fresh == page {
        println!("{PAGE}: {} tables, up to date", tables.len());
    } else if args.check {
        bail!("{PAGE} is stale: run `cargo xtask results`");
    } else {
        fs::write(&path, fresh)?;
        println!("{PAGE}: {} tables, written", tables.len());
    }
    Ok(())
}

/// One question, and the figures that answer it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Results {
    /// The heading of the table: a whole question.
    question: String,
    /// Whether the figures are those of a model, and nothing was measured.
    #[serde(default)]
    modelled: bool,
    /// The GPU, or the processor, as its driver or system names it.
    gpu: String,
    /// The version of the GPU's driver; of a processor, nothing.
    #[serde(default)]
    driver: Option<String>,
    /// The version of CUDA.
    #[serde(default)]
    cuda: Option<String>,
    /// The day of the measurement: YYYY-MM-DD.
    date: String,
    /// The commit that was measured or, of older figures, the one that recorded them.
    commit: String,
    /// What was run.
    command: String,
    /// How times were taken.
    #[serde(default)]
    method: Option<String>,
    /// What a reader must know beside the figures, a sentence each.
    #[serde(default)]
    notes: Vec<String>,
    /// What a row is: the heading of the first column.
    row: String,
    /// What is measured, in the order of each row's values.
    units: Vec<Unit>,
    rows: Vec<Row>,
    /// What of it the page shows; all, where this is missing.
    #[serde(default)]
    show: Show,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unit {
    name: String,
    /// Digits behind the point.
    #[serde(default)]
    digits: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    /// The shape or setting, where rows of one name were measured at several: each is a group of
    /// columns.
    #[serde(default)]
    at: Option<String>,
    /// One for each unit; null where nothing was measured.
    values: Vec<Option<f64>>,
}

/// Names of rows, shapes and units to show, in this order; an empty list shows all.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Show {
    rows: Vec<String>,
    at: Vec<String>,
    units: Vec<String>,
}

/// The tables by the names of their files.
fn read(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut tables = BTreeMap::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let table = fs::read_to_string(&path)
            .map_err(anyhow::Error::from)
            .and_then(|text| table(&name, &text))
            .with_context(|| path.display().to_string())?;
        tables.insert(name.into_owned(), table);
    }
    Ok(tables)
}

/// Heading, table and source of one file.
fn table(name: &str, text: &str) -> Result<String> {
    let results: Results = serde_json::from_str(text)?;
    results.check()?;
    let mut out = format!("### {}\n\n", results.question);
    let units = results.units(&results.show.units)?;
    let all_at = distinct(results.rows.iter().filter_map(|row| row.at.as_deref()));
    let at = chosen(all_at, &results.show.at, "at")?;
    let names = distinct(results.rows.iter().map(|row| row.name.as_str()));
    let names = chosen(names, &results.show.rows, "rows")?;

    // A group of columns for each shape, or one group without a name.
    let groups: Vec<Option<&str>> = match at.is_empty() {
        true => vec![None],
        false => at.into_iter().map(Some).collect(),
    };
    let mut heads = vec![results.row.clone()];
    for group in &groups {
        for unit in &units {
            let name = &results.units[*unit].name;
            heads.push(group.map_or(name.clone(), |group| match units.len() {
                1 => group.to_string(),
                _ => format!("{group}, {name}"),
            }));
        }
    }
    line(&mut out, &heads);
    let rule = (0..heads.len()).map(|at| if at == 0 { "---" } else { "---:" });
    line(&mut out, &rule.collect::<Vec<_>>());
    for name in names {
        let mut cells = vec![name.to_string()];
        for group in &groups {
            let row = results.find(name, *group);
            cells.extend(units.iter().map(|&unit| {
                let value = row.and_then(|row| row.values[unit]);
                value.map_or(String::new(), |value| {
                    format!("{value:.*}", results.units[unit].digits)
                })
            }));
        }
        line(&mut out, &cells);
    }
    out.push('\n');
    for note in &results.notes {
        wrapped(&mut out, &format!("- {note}"), "  ");
    }
    wrapped(&mut out, &results.source(name), "  ");
    Ok(out)
}

impl Results {
    /// Fails unless the file is complete.
    fn check(&self) -> Result<()> {
        let texts = [
            ("question", &self.question),
            ("gpu", &self.gpu),
            ("date", &self.date),
            ("commit", &self.commit),
            ("command", &self.command),
        ];
        for (name, text) in texts {
            ensure!(!text.trim().is_empty(), "`{name}` is empty");
        }
        ensure!(self.question.ends_with('?'), "`question` does not ask");
        let date = self.date.as_bytes();
        let is_date = date.len() == 10
            && date.iter().enumerate().all(|(at, byte)| match at {
                4 | 7 => *byte == b'-',
                _ => byte.is_ascii_digit(),
            });
        ensure!(is_date, "`date` is {}, not YYYY-MM-DD", self.date);
        ensure!(
            self.cuda.is_none() || self.driver.is_some(),
            "`cuda` without `driver`"
        );
        ensure!(!self.rows.is_empty(), "`rows` is empty");
        let has_at = self.rows[0].at.is_some();
        for (index, row) in self.rows.iter().enumerate() {
            let Row { name, at, values } = row;
            ensure!(
                values.len() == self.units.len(),
                "row {name}: {} values for {} units",
                values.len(),
                self.units.len()
            );
            ensure!(at.is_some() == has_at, "row {name}: `at` in some rows only");
            let twin = |other: &Row| other.name == *name && other.at == *at;
            ensure!(
                !self.rows[..index].iter().any(twin),
                "row {name} is there twice"
            );
        }
        Ok(())
    }

    /// The places of the units to show.
    fn units(&self, names: &[String]) -> Result<Vec<usize>> {
        let all = self.units.iter().map(|unit| unit.name.as_str()).collect();
        let names = chosen(all, names, "units")?;
        let place = |name: &str| self.units.iter().position(|unit| unit.name == name);
        Ok(names.into_iter().filter_map(place).collect())
    }

    fn find(&self, name: &str, at: Option<&str>) -> Option<&Row> {
        let is_it = |row: &&Row| row.name == name && row.at.as_deref() == at;
        self.rows.iter().find(is_it)
    }

    /// Where the figures come from, in one item of a list.
    fn source(&self, name: &str) -> String {
        let mut text = match self.modelled {
            true => format!("- **Modelled, not measured**, for {}", self.gpu),
            false => format!("- Measured on {}", self.gpu),
        };
        if let Some(driver) = &self.driver {
            let _ = write!(text, ", driver {driver}");
        }
        if let Some(cuda) = &self.cuda {
            let _ = write!(text, ", CUDA {cuda}");
        }
        let _ = write!(
            text,
            ", on {}, commit `{}`, by `{}`",
            self.date, self.commit, self.command
        );
        if let Some(method) = &self.method {
            let _ = write!(text, " ({method})");
        }
        let _ = write!(text, "; `{FOLDER}/{name}.json`.");
        text
    }
}

/// `items`, each once, in the order of their first appearance.
fn distinct<'a>(items: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    for item in items {
        if !seen.contains(&item) {
            seen.push(item);
        }
    }
    seen
}

/// Those of `all` that `names` asks for, in its order; all, if it asks for none.
fn chosen<'a>(all: Vec<&'a str>, names: &[String], field: &str) -> Result<Vec<&'a str>> {
    if names.is_empty() {
        return Ok(all);
    }
    let find = |name: &String| all.iter().find(|item| *item == name).copied();
    let found = names.iter().map(|name| {
        find(name).with_context(|| format!("`show.{field}` names {name}, which no row has"))
    });
    found.collect()
}

fn line(out: &mut String, cells: &[impl AsRef<str>]) {
    out.push('|');
    for cell in cells {
        let _ = match cell.as_ref() {
            "" => write!(out, " |"),
            cell => write!(out, " {cell} |"),
        };
    }
    out.push('\n');
}

/// `text` in lines of at most 100 columns, all but the first behind `indent`.
fn wrapped(out: &mut String, text: &str, indent: &str) {
    let mut column = 0;
    for word in text.split(' ') {
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

/// `page` with every table between its markers; all tables must have a place, all places a table.
fn rewrite(page: &str, tables: &BTreeMap<String, String>) -> Result<String> {
    let mut out = String::new();
    let mut placed = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        out.push_str(line);
        out.push('\n');
        let Some(name) = line.strip_prefix(BEGIN) else {
            ensure!(line != END, "`{END}` without a beginning");
            continue;
        };
        let name = name.trim_end_matches("-->").trim();
        let table = tables
            .get(name)
            .with_context(|| format!("there is no {FOLDER}/{name}.json"))?;
        ensure!(!placed.contains(&name), "{name} has two places");
        placed.push(name);
        let _ = write!(out, "\n{table}\n{END}\n");
        let end = lines.find(|line| *line == END || line.starts_with(BEGIN));
        ensure!(end == Some(END), "{name}: `{END}` is missing");
    }
    for name in tables.keys() {
        ensure!(
            placed.contains(&name.as_str()),
            "{FOLDER}/{name}.json has no place: add `{BEGIN}{name} -->` and `{END}`"
        );
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{
        "question": "How fast?", "gpu": "NVIDIA H100", "driver": "580", "cuda": "13.0",
        "date": "2026-11-21", "commit": "abc1234", "command": "cargo bench", "row": "kernel",
        "units": [{"name": "us", "digits": 1}, {"name": "% of copy"}],
        "rows": [
            {"name": "copy", "at": "small", "values": [2, 100]},
            {"name": "amax", "at": "small", "values": [2.53, null]},
            {"name": "copy", "at": "large", "values": [20, 100]}
        ]
    }"#;

    fn failure(result: Result<String>) -> String {
        format!("{:#}", result.unwrap_err())
    }

    #[test]
    fn shapes_are_groups_of_columns() {
        let table = table("fast", FILE).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "### How fast?");
        assert_eq!(
            lines[2..6],
            [
                "| kernel | small, us | small, % of copy | large, us | large, % of copy |",
                "| --- | ---: | ---: | ---: | ---: |",
                "| copy | 2.0 | 100 | 20.0 | 100 |",
                "| amax | 2.5 | | | |",
            ]
        );
        assert!(table.contains("commit `abc1234`"), "{table}");
        assert!(table.contains("`results/fast.json`"), "{table}");
        assert!(lines.iter().all(|line| line.len() <= 100), "{table}");
    }

    #[test]
    fn a_file_may_show_a_part() {
        let part = r#""row": "kernel", "show": {"at": ["large"], "units": ["us"]}"#;
        let table = table("fast", &FILE.replace(r#""row": "kernel""#, part)).unwrap();
        assert!(table.contains("| kernel | large |"), "{table}");
        let wrong = r#""row": "kernel", "show": {"rows": ["none"]}"#;
        let error = failure(super::table("", &FILE.replace(r#""row": "kernel""#, wrong)));
        assert!(error.contains("none"), "{error}");
    }

    #[test]
    fn incomplete_files_are_refused() {
        for (from, to, expected) in [
            ("\"580\"", "null", "`cuda` without `driver`"),
            ("2026-11-21", "today", "YYYY-MM-DD"),
            ("abc1234", "", "`commit` is empty"),
            ("[20, 100]", "[20]", "1 values for 2 units"),
            (r#""at": "large""#, r#""at": "small""#, "twice"),
            (r#"How fast?"#, "Speed", "does not ask"),
            (r#""question""#, r#""querstion""#, "querstion"),
        ] {
            let error = failure(table("fast", &FILE.replace(from, to)));
            assert!(error.contains(expected), "{from}: {error}");
        }
    }

    #[test]
    fn tables_and_places_belong_together() {
        let tables = BTreeMap::from([("fast".to_string(), "new\n".to_string())]);
        let page = "before\n<!-- results: fast -->\nold\n<!-- end -->\nbehind\n";
        let fresh = rewrite(page, &tables).unwrap();
        assert_eq!(
            fresh,
            "before\n<!-- results: fast -->\n\nnew\n\n<!-- end -->\nbehind\n"
        );
        assert_eq!(rewrite(&fresh, &tables).unwrap(), fresh);
        for (page, expected) in [
            ("no place\n", "has no place"),
            ("<!-- results: slow -->\n<!-- end -->\n", "slow.json"),
            ("<!-- results: fast -->\n", "missing"),
            ("<!-- end -->\n", "without a beginning"),
        ] {
            let error = failure(rewrite(page, &tables));
            assert!(error.contains(expected), "{page}: {error}");
        }
    }

    /// The page of the repository is what its files make.
    #[test]
    fn the_page_is_up_to_date() {
        run(&Args { check: true }).unwrap();
    }
}
