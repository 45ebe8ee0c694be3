//! A results file: the values of one measurement, and its table.

use std::fmt::{self, Write};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::table::{self, Table};

/// Folder of the results files, relative to the root.
pub const FOLDER: &str = "results";

/// Values of one measurement on one GPU.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// Heading of the table.
    title: String,
    /// True if the values come from a model and not from a measurement.
    #[serde(default)]
    modelled: bool,
    /// Name of the GPU or processor, as reported by its driver or system.
    gpu: String,
    /// Version of the GPU driver.
    #[serde(default)]
    driver: Option<String>,
    /// Version of CUDA.
    #[serde(default)]
    cuda: Option<String>,
    /// Date of the measurement: YYYY-MM-DD.
    date: String,
    /// Measured commit or, for older values, the commit that recorded them.
    commit: String,
    /// Command of the measurement.
    command: String,
    /// Timing method.
    #[serde(default)]
    method: Option<String>,
    /// Remarks for the reader, one sentence each.
    #[serde(default)]
    notes: Vec<String>,
    /// Folders and files of the measured code, relative to the root of the repository.
    #[serde(default)]
    about: Vec<String>,
    /// Heading of the first column.
    row: String,
    /// Name and digits of each value of a row.
    units: Vec<Unit>,
    rows: Vec<Row>,
    /// Part of the table to print; everything if missing.
    #[serde(default)]
    show: Show,
}

/// Names of rows, shapes and units to print, in this order; an empty list prints all.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Show {
    rows: Vec<String>,
    at: Vec<String>,
    units: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unit {
    name: String,
    /// Digits after the decimal point.
    #[serde(default)]
    digits: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    /// Shape or setting, if rows with the same name were measured at several. Each becomes a group
    /// of columns.
    #[serde(default)]
    at: Option<String>,
    /// The GPU, if it differs from the file's.
    #[serde(default)]
    gpu: Option<String>,
    /// The date, if it differs from the file's.
    #[serde(default)]
    date: Option<String>,
    /// The measured commit, if it differs from the file's.
    #[serde(default)]
    commit: Option<String>,
    /// The measured code, if it differs from the file's.
    #[serde(default)]
    about: Vec<String>,
    /// One value per unit; null if not measured.
    values: Vec<Option<f64>>,
}

/// Origin of a row.
#[derive(Clone, Copy, PartialEq)]
pub struct Origin<'a> {
    gpu: &'a str,
    date: &'a str,
    /// Measured commit.
    pub commit: &'a str,
    modelled: bool,
}

impl fmt::Display for Origin<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            gpu,
            date,
            commit,
            modelled,
        } = self;
        let prefix = if *modelled { "modelled for " } else { "" };
        write!(formatter, "{prefix}{gpu}, {date}, commit `{commit}`")
    }
}

/// One value of a results file.
pub struct Figure {
    /// Index of the row.
    pub row: usize,
    /// Value; `None` if not measured.
    pub value: Option<f64>,
    /// Digits after the decimal point.
    pub digits: usize,
}

impl Figure {
    /// Formats the value; empty if not measured.
    pub fn shown(&self) -> String {
        let digits = self.digits;
        self.value
            .map_or(String::new(), |value| format!("{value:.digits$}"))
    }
}

impl Results {
    /// Parses a results file.
    ///
    /// # Errors
    ///
    /// Returns an error if a field is missing, unknown or malformed.
    pub fn parse(text: &str) -> Result<Self> {
        let results: Self = serde_json::from_str(text)?;
        results.check()?;
        Ok(results)
    }

    fn check(&self) -> Result<()> {
        let texts = [
            ("title", &self.title),
            ("gpu", &self.gpu),
            ("date", &self.date),
            ("commit", &self.commit),
            ("command", &self.command),
        ];
        for (name, text) in texts {
            ensure!(!text.trim().is_empty(), "`{name}` is empty");
        }
        let row_dates = self.rows.iter().filter_map(|row| row.date.as_ref());
        for date in row_dates.chain([&self.date]) {
            ensure!(is_date(date), "`date` is {date}, not YYYY-MM-DD");
        }
        ensure!(
            self.cuda.is_none() || self.driver.is_some(),
            "`cuda` without `driver`"
        );
        ensure!(
            self.modelled || !self.about.is_empty(),
            "`about` is empty: name the folders of the measured code"
        );
        for (index, Unit { name, .. }) in self.units.iter().enumerate() {
            let twin = self.units[..index].iter().any(|other| other.name == *name);
            ensure!(!twin, "unit {name} is there twice");
        }
        ensure!(!self.rows.is_empty(), "`rows` is empty");
        let has_at = self.rows[0].at.is_some();
        for (index, row) in self.rows.iter().enumerate() {
            let Row {
                name, at, values, ..
            } = row;
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

    /// Returns the origin of the file's rows, unless a row names another.
    fn origin(&self) -> Origin<'_> {
        Origin {
            gpu: &self.gpu,
            date: &self.date,
            commit: &self.commit,
            modelled: self.modelled,
        }
    }

    /// Returns the origin of the row at an index.
    pub fn row_origin(&self, index: usize) -> Origin<'_> {
        let row = &self.rows[index];
        Origin {
            gpu: row.gpu.as_ref().unwrap_or(&self.gpu),
            date: row.date.as_ref().unwrap_or(&self.date),
            commit: row.commit.as_ref().unwrap_or(&self.commit),
            modelled: self.modelled,
        }
    }

    /// Returns commit and measured code of each row.
    pub fn measured(&self) -> impl Iterator<Item = (&str, &[String])> {
        self.rows.iter().enumerate().map(|(index, row)| {
            let about = if row.about.is_empty() {
                &self.about
            } else {
                &row.about
            };
            (self.row_origin(index).commit, about.as_slice())
        })
    }

    /// Returns all commits that the file names, in its fields and in its prose.
    pub fn commits(&self) -> Vec<&str> {
        let mut commits: Vec<&str> = self.measured().map(|(commit, _)| commit).collect();
        commits.push(&self.commit);
        let prose = self.notes.iter().chain(&self.method);
        commits.extend(prose.flat_map(|text| named_commits(text)));
        commits.sort_unstable();
        commits.dedup();
        commits
    }

    /// Finds a value by the names of its row, its group of columns and its unit.
    pub fn figure(&self, row: &str, at: Option<&str>, unit: &str) -> Result<Figure> {
        let is_row = |found: &Row| found.name == row && found.at.as_deref() == at;
        let index = self.rows.iter().position(is_row).with_context(|| {
            let at = at.map(|at| format!(" at {at}")).unwrap_or_default();
            format!("there is no row {row}{at}")
        })?;
        let is_unit = |found: &Unit| found.name == unit;
        let unit_index = self.units.iter().position(is_unit);
        let unit_index = unit_index.with_context(|| format!("there is no unit {unit}"))?;
        Ok(Figure {
            row: index,
            value: self.rows[index].values[unit_index],
            digits: self.units[unit_index].digits,
        })
    }

    /// Renders anchor, heading, table and source. `stale` has one entry per row.
    ///
    /// # Errors
    ///
    /// Returns an error if `show` has a name that no row has.
    pub fn render(&self, name: &str, stale: &[bool]) -> Result<String> {
        let at = distinct(self.rows.iter().filter_map(|row| row.at.as_deref()));
        let at = chosen(at, &self.show.at, "at")?;
        let names = distinct(self.rows.iter().map(|row| row.name.as_str()));
        let names = chosen(names, &self.show.rows, "rows")?;
        let units = distinct(self.units.iter().map(|unit| unit.name.as_str()));
        let units = chosen(units, &self.show.units, "units")?;
        // One group of columns per shape, or one group without a name.
        let groups: Vec<Option<&str>> = if at.is_empty() {
            vec![None]
        } else {
            at.into_iter().map(Some).collect()
        };

        let mut heads = vec![self.row.clone()];
        for group in &groups {
            for unit in &units {
                heads.push(match (group, units.len()) {
                    (None, _) => (*unit).to_string(),
                    (Some(group), 1) => (*group).to_string(),
                    (Some(group), _) => format!("{group}, {unit}"),
                });
            }
        }
        let mut table = Table::new(heads);
        for name in names {
            let mut cells = vec![name.to_string()];
            let mut changed = false;
            for group in &groups {
                for unit in &units {
                    let figure = self.figure(name, *group, unit).ok();
                    changed |= figure.as_ref().is_some_and(|figure| stale[figure.row]);
                    cells.push(figure.map_or(String::new(), |figure| figure.shown()));
                }
            }
            table.push(cells, changed);
        }

        let mut out = format!("<a id=\"{name}\"></a>\n\n### {}\n\n", self.title);
        out += &table.render();
        for note in &self.notes {
            table::item(&mut out, note);
        }
        table::item(&mut out, &self.source(name));
        Ok(out)
    }

    /// Describes the origin of the values in one sentence.
    fn source(&self, name: &str) -> String {
        let mut text = if self.modelled {
            format!("**Modelled, not measured**, for {}", self.gpu)
        } else {
            format!("Measured on {}", self.gpu)
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
        let _ = write!(text, "; `{}/{name}.json`.", FOLDER);
        let mut seen = vec![self.origin()];
        for origin in (0..self.rows.len()).map(|index| self.row_origin(index)) {
            if seen.contains(&origin) {
                continue;
            }
            seen.push(origin);
            let rows = self.rows.iter().enumerate();
            let rows = rows.filter(|(index, _)| self.row_origin(*index) == origin);
            let rows = distinct(rows.map(|(_, row)| row.at.as_deref().unwrap_or(&row.name)));
            let _ = write!(text, " On {origin}: {}.", rows.join("; "));
        }
        text
    }
}

/// Returns true for YYYY-MM-DD.
fn is_date(text: &str) -> bool {
    let mut bytes = text.bytes().enumerate();
    text.len() == 10
        && bytes.all(|(at, byte)| match at {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        })
}

/// Returns the hashes that follow the word "commit" in a text.
fn named_commits(text: &str) -> impl Iterator<Item = &str> {
    text.split("commit ").skip(1).filter_map(|rest| {
        let word = rest.trim_start_matches('`');
        let end = word
            .find(|char: char| !char.is_ascii_alphanumeric())
            .unwrap_or(word.len());
        let word = &word[..end];
        let is_hash = (7..=40).contains(&word.len())
            && word.bytes().all(|byte| byte.is_ascii_hexdigit())
            && word.bytes().any(|byte| byte.is_ascii_digit());
        is_hash.then_some(word)
    })
}

/// Returns the distinct `items` in order of first appearance.
pub fn distinct<'a>(items: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    for item in items {
        if !seen.contains(&item) {
            seen.push(item);
        }
    }
    seen
}

/// Selects the entries of `all` that are in `names`, in that order; all if `names` is empty.
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

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{
        "title": "Speed", "gpu": "NVIDIA H100", "driver": "580", "cuda": "13.0",
        "date": "2026-11-21", "commit": "abc1234", "command": "cargo bench", "row": "kernel",
        "about": ["src"], "notes": ["Slower at commit `0123abc`, and at commit time."],
        "units": [{"name": "us", "digits": 1}, {"name": "% of copy"}],
        "rows": [
            {"name": "copy", "at": "small", "values": [2, 100]},
            {"name": "amax", "at": "small", "values": [2.53, null]},
            {"name": "copy", "at": "large", "about": ["lib"], "commit": "def5678",
                "values": [20, 100]}
        ]
    }"#;

    fn failure(text: &str) -> String {
        let error = Results::parse(text).err().expect("an error");
        format!("{error:#}")
    }

    #[test]
    fn shapes_are_groups_of_columns() {
        let results = Results::parse(FILE).unwrap();
        let table = results.render("fast", &[false; 3]).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "<a id=\"fast\"></a>");
        assert_eq!(lines[2], "### Speed");
        assert_eq!(
            lines[4..8],
            [
                "| kernel | small, us | small, % of copy | large, us | large, % of copy |",
                "| --- | ---: | ---: | ---: | ---: |",
                "| copy | 2.0 | 100 | 20.0 | 100 |",
                "| amax | 2.5 | | | |",
            ]
        );
        assert!(table.contains("commit `abc1234`"), "{table}");
        assert!(table.contains("commit `def5678`: large."), "{table}");
        assert!(table.contains("`results/fast.json`"), "{table}");
        assert!(lines.iter().all(|line| line.len() <= 100), "{table}");
    }

    #[test]
    fn a_file_may_show_a_part() {
        let render = |show: &str| {
            let with_show = format!(r#""row": "kernel", "show": {show}"#);
            let file = FILE.replace(r#""row": "kernel""#, &with_show);
            Results::parse(&file)?.render("fast", &[false, false, true])
        };
        let table = render(r#"{"rows": ["copy"], "at": ["large"], "units": ["us"]}"#).unwrap();
        assert!(table.contains("| kernel † | large |"), "{table}");
        let error = render(r#"{"rows": ["none"]}"#).unwrap_err();
        assert!(error.to_string().contains("none"), "{error}");
    }

    #[test]
    fn rows_may_differ_in_origin() {
        let results = Results::parse(FILE).unwrap();
        let origins: Vec<_> = results.measured().collect();
        assert_eq!(origins[0], ("abc1234", &["src".to_string()][..]));
        assert_eq!(origins[2], ("def5678", &["lib".to_string()][..]));
        assert_eq!(results.commits(), ["0123abc", "abc1234", "def5678"]);
    }

    #[test]
    fn figures_are_found_by_name() {
        let results = Results::parse(FILE).unwrap();
        let figure = results.figure("copy", Some("large"), "us").unwrap();
        assert_eq!(
            (figure.row, figure.value, figure.digits),
            (2, Some(20.0), 1)
        );
        for (row, at, unit) in [
            ("none", Some("large"), "us"),
            ("amax", Some("large"), "us"),
            ("copy", None, "us"),
            ("copy", Some("large"), "ms"),
        ] {
            assert!(results.figure(row, at, unit).is_err(), "{row} {unit}");
        }
    }

    #[test]
    fn incomplete_files_are_refused() {
        for (from, to, expected) in [
            ("\"580\"", "null", "`cuda` without `driver`"),
            ("2026-11-21", "today", "YYYY-MM-DD"),
            ("abc1234", "", "`commit` is empty"),
            ("[20, 100]", "[20]", "1 values for 2 units"),
            (
                r#""at": "large""#,
                r#""at": "small""#,
                "row copy is there twice",
            ),
            ("% of copy", "us", "unit us is there twice"),
            (r#"["src"]"#, "[]", "`about` is empty"),
            (r#""title""#, r#""tittle""#, "tittle"),
        ] {
            let error = failure(&FILE.replace(from, to));
            assert!(error.contains(expected), "{from}: {error}");
        }
    }
}
