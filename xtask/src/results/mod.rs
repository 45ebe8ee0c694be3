//! `cargo xtask results`: writes the tables of README and book from `results/`.
//!
//! `results/NAME.json` holds the values of one measurement. `results/views/NAME.json` combines
//! values of such files in one table. A page marks the position of a table:
//!
//! ```text
//! <!-- results: NAME -->       or       <!-- view: NAME -->       or       <!-- ladder: SHAPE -->
//! (the table)
//! <!-- end -->
//! ```
//!
//! The table of a shape has its recorded runs, `results/ladder/RUN.json`. Views refer to them as
//! the file `ladder-SHAPE`, with a row per recipe at `seed SEED` and the unit `gap, %`.
//!
//! Text outside of these markers is not changed. A commit that a file names must be in the history.
//! A dagger marks values whose code changed after the measurement.

mod file;
mod history;
mod table;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use self::file::{FOLDER, Results};
use self::history::History;
use self::table::Table;
use self::view::{Files, View};
use crate::ladder::record::{self, Record};
use crate::{book, ladder, workspace};

const RESULTS: &str = "<!-- results: ";
const VIEW: &str = "<!-- view: ";
const LADDER: &str = "<!-- ladder: ";
const END: &str = "<!-- end -->";

/// Options of `cargo xtask results`.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing, and fail if a page differs from the files; daggers may differ
    #[arg(long)]
    pub check: bool,
}

/// Writes the tables of all pages, or compares them.
pub fn run(args: &Args) -> Result<()> {
    let root = workspace::root();
    let results = read(&root.join(FOLDER), Results::parse)?;
    let views = read(&root.join(FOLDER).join("views"), View::parse)?;
    let history = History::read(&root)?;
    let runs = record::read(&root.join(ladder::FOLDER))?;
    let unknown = check_commits(&results, &runs, history.as_ref())?;
    if let Some(why) = &unknown {
        ensure!(args.check, "{why}; no table was written");
        println!("{why}; nothing is said about code that changed since");
    }
    let mut files = with_marks(results, &root, history.as_ref())?;
    files.extend(ladder_files(&runs)?);

    let pages = pages(&root)?;
    let tables = Tables::new(files, views, runs, &pages)?;
    let mut stale_pages = Vec::new();
    for Page { path, text } in &pages {
        let fresh = tables.rewrite(path, text).with_context(|| path.clone())?;
        if table::unmarked(&fresh) == table::unmarked(text) && (args.check || fresh == *text) {
            continue;
        }
        if !args.check {
            fs::write(root.join(path), fresh)?;
        }
        stale_pages.push(path.as_str());
    }
    ensure!(
        !args.check || stale_pages.is_empty(),
        "stale: {}: run `cargo xtask results`",
        stale_pages.join(", ")
    );
    println!("{} tables", tables.files.len() + tables.views.len());
    if unknown.is_none() {
        println!("{}", tables.stale());
    }
    if !stale_pages.is_empty() {
        println!("written: {}", stale_pages.join(", "));
    }
    Ok(())
}

/// Reads all JSON files of a folder, by name.
fn read<T>(folder: &Path, parse: impl Fn(&str) -> Result<T>) -> Result<BTreeMap<String, T>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let value = fs::read_to_string(&path)
            .map_err(anyhow::Error::from)
            .and_then(|text| parse(&text))
            .with_context(|| path.display().to_string())?;
        found.insert(name.into_owned(), value);
    }
    Ok(found)
}

/// Checks that the history has all commits that files name. Returns the reason if this cannot be
/// checked.
///
/// # Errors
///
/// Returns an error if a commit is not in a complete history.
fn check_commits(
    files: &BTreeMap<String, Results>,
    runs: &[Record],
    history: Option<&History>,
) -> Result<Option<String>> {
    let Some(history) = history else {
        return Ok(Some("no git repository: commits are not checked".into()));
    };
    let mut absent = Vec::new();
    for (name, results) in files {
        let commits = results.commits().into_iter();
        let commits = commits.filter(|commit| !history.has(commit));
        absent.extend(commits.map(|commit| format!("{commit} ({FOLDER}/{name}.json)")));
    }
    for run in runs.iter().filter(|run| !history.has(&run.commit)) {
        absent.push(format!(
            "{} ({}/{}.json)",
            run.commit,
            ladder::FOLDER,
            run.name
        ));
    }
    match absent.is_empty() {
        true => Ok(None),
        false if history.complete => bail!("not in the history: {}", absent.join(", ")),
        false => Ok(Some(format!(
            "this clone is shallow and lacks {} commits that results files name (`git fetch \
             --unshallow` gets them)",
            absent.len()
        ))),
    }
}

/// Marks the rows of each file that were measured with other code than today's. A row whose commit
/// is missing in the history counts as up to date.
fn with_marks(
    results: BTreeMap<String, Results>,
    root: &Path,
    history: Option<&History>,
) -> Result<Files> {
    let mut pairs = BTreeSet::new();
    for (name, results) in &results {
        for (commit, about) in results.measured() {
            for path in about {
                let exists = root.join(path).exists();
                ensure!(
                    exists,
                    "{FOLDER}/{name}.json: `about` has {path}, which is no path"
                );
                if history.is_some_and(|history| history.has(commit)) {
                    pairs.insert((commit.to_owned(), path.clone()));
                }
            }
        }
    }
    let changed = match history {
        Some(history) => history.changed(pairs)?,
        None => BTreeSet::new(),
    };
    let is_stale = |(commit, about): (&str, &[String])| {
        let mut pairs = about.iter().map(|path| (commit.to_owned(), path.clone()));
        pairs.any(|pair| changed.contains(&pair))
    };
    let files = results.into_iter().map(|(name, results)| {
        let stale = results.measured().map(is_stale).collect();
        (name, (results, stale))
    });
    Ok(files.collect())
}

/// A document of the repository.
struct Page {
    /// Path relative to the root, with `/`.
    path: String,
    text: String,
}

/// Reads README and all pages of the book.
fn pages(root: &Path) -> Result<Vec<Page>> {
    let mut paths = vec![PathBuf::from("README.md")];
    for path in book::files(&root.join("docs/src"), "md")? {
        paths.push(path.strip_prefix(root)?.to_owned());
    }
    let page = |path: PathBuf| {
        let text = fs::read_to_string(root.join(&path));
        Ok(Page {
            text: text.with_context(|| path.display().to_string())?,
            path: path.to_string_lossy().replace('\\', "/"),
        })
    };
    paths.into_iter().map(page).collect()
}

/// All tables, and the page of each results file.
struct Tables {
    files: Files,
    views: BTreeMap<String, View>,
    /// Recorded runs of the ladder.
    runs: Vec<Record>,
    /// Page of each results file.
    homes: BTreeMap<String, String>,
}

impl Tables {
    /// Finds the position of each table.
    ///
    /// # Errors
    ///
    /// Returns an error if a table has no position or several, or if a position has no table.
    fn new(
        files: Files,
        views: BTreeMap<String, View>,
        runs: Vec<Record>,
        pages: &[Page],
    ) -> Result<Self> {
        let mut homes = BTreeMap::new();
        let mut view_homes = BTreeMap::new();
        let mut ladder_homes = BTreeMap::new();
        for Page { path, text } in pages {
            for line in text.lines() {
                let (name, exists, homes) = if let Some(name) = marker(line, RESULTS) {
                    (name, files.contains_key(name), &mut homes)
                } else if let Some(name) = marker(line, VIEW) {
                    (name, views.contains_key(name), &mut view_homes)
                } else if let Some(shape) = marker(line, LADDER) {
                    let exists = runs.iter().any(|run| run.shape == shape);
                    homes.insert(ladder_file(shape), path.clone());
                    (shape, exists, &mut ladder_homes)
                } else {
                    continue;
                };
                ensure!(exists, "{path}: there is no file for `{line}`");
                let twin = homes.insert(name.to_owned(), path.clone());
                ensure!(twin.is_none(), "{path}: `{line}` has two places");
            }
        }
        for name in files.keys() {
            let placed = homes.contains_key(name);
            ensure!(placed, "no page has `{RESULTS}{name} -->` and `{END}`");
        }
        for name in views.keys() {
            let placed = view_homes.contains_key(name);
            ensure!(placed, "no page has `{VIEW}{name} -->` and `{END}`");
        }
        for Record { shape, .. } in &runs {
            let placed = ladder_homes.contains_key(shape);
            ensure!(placed, "no page has `{LADDER}{shape} -->` and `{END}`");
        }
        Ok(Self {
            files,
            views,
            runs,
            homes,
        })
    }

    /// Returns `text` of the page `path` with every table between its markers.
    fn rewrite(&self, path: &str, text: &str) -> Result<String> {
        let mut out = String::new();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            out.push_str(line);
            out.push('\n');
            let table = if let Some(name) = marker(line, RESULTS) {
                let (results, stale) = &self.files[name];
                let table = results.render(name, stale);
                table.with_context(|| format!("{FOLDER}/{name}.json"))?
            } else if let Some(name) = marker(line, VIEW) {
                let link = |file: &str| format!("{}#{file}", relative(path, &self.homes[file]));
                let table = self.views[name].render(&self.files, link);
                table.with_context(|| format!("{FOLDER}/views/{name}.json"))?
            } else if let Some(shape) = marker(line, LADDER) {
                ladder_table(&self.runs, shape)
            } else {
                ensure!(line != END, "`{END}` without a beginning");
                continue;
            };
            let _ = write!(out, "\n{table}\n{END}\n");
            let end = lines.find(|line| *line == END || line.starts_with("<!-- "));
            ensure!(end == Some(END), "`{line}`: `{END}` is missing");
        }
        Ok(out)
    }

    /// Reports the number of files with values of code that has changed since.
    fn stale(&self) -> String {
        let stale = |(_, stale): &&(Results, Vec<bool>)| stale.contains(&true);
        let count = self.files.values().filter(stale).count();
        let all = self.files.len();
        format!("{count} of {all} results files have figures of code that has changed since")
    }
}

/// Returns the name by which views refer to the runs of `shape`.
fn ladder_file(shape: &str) -> String {
    format!("ladder-{shape}")
}

/// Returns the gaps of the recorded runs as results files, one per shape, for views.
fn ladder_files(runs: &[Record]) -> Result<Files> {
    let mut shapes: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for run in runs {
        shapes.entry(&run.shape).or_default().push(json!({
            "name": run.recipe,
            "at": format!("seed {}", run.seed),
            "gpu": run.gpu.as_ref().unwrap_or(&run.device),
            "date": run.date,
            "commit": run.commit,
            "values": [ladder::gap(run, runs)],
        }));
    }
    let files = shapes.into_iter().map(|(shape, rows)| {
        let stale = vec![false; rows.len()];
        let file = json!({
            "title": format!("Runs of {shape}"),
            "gpu": rows[0]["gpu"],
            "date": rows[0]["date"],
            "commit": rows[0]["commit"],
            "command": "cargo xtask ladder next",
            "about": [ladder::FOLDER],
            "row": "recipe",
            "units": [{"name": "gap, %", "digits": 2}],
            "rows": rows,
        });
        let results = Results::parse(&file.to_string());
        let results = results.with_context(|| format!("runs of {shape}"))?;
        Ok((ladder_file(shape), (results, stale)))
    });
    files.collect()
}

/// Returns the table of the recorded runs of `shape`: loss, gap to bf16 with the same seed, speed.
fn ladder_table(runs: &[Record], shape: &str) -> String {
    let heads = ["run", "loss", "gap, %", "tokens/s", "GPU", "date", "commit"];
    let mut table = Table::new(heads.map(str::to_owned).into());
    for run in runs.iter().filter(|run| run.shape == shape) {
        let loss = run.loss().map(|loss| format!("{loss:.4}"));
        let gap = ladder::gap(run, runs).map(|gap| format!("{gap:+.2}"));
        let speed = run
            .tokens_per_s
            .map(|speed| format!("{:.0} k", speed / 1e3));
        let cells = [
            format!("`{}`, seed {}", run.recipe, run.seed),
            loss.unwrap_or_else(|| "diverged".into()),
            gap.unwrap_or_default(),
            speed.unwrap_or_default(),
            run.gpu.clone().unwrap_or_default(),
            run.date.clone(),
            format!("`{}`", run.commit),
        ];
        table.push(cells.into(), false);
    }
    let anchor = ladder_file(shape);
    format!("<a id=\"{anchor}\"></a>\n\n{}\n", table.render().trim_end())
}

/// Returns the name in a line that begins a table.
fn marker<'a>(line: &'a str, begin: &str) -> Option<&'a str> {
    let name = line.strip_prefix(begin)?;
    Some(name.trim_end_matches("-->").trim())
}

/// Returns the path of `to` relative to the folder of `from`; both are relative to the root.
fn relative(from: &str, to: &str) -> String {
    let folders: Vec<&str> = from.split('/').collect();
    let folders = &folders[..folders.len() - 1];
    let parts: Vec<&str> = to.split('/').collect();
    let shared = folders.iter().zip(&parts).take_while(|(a, b)| a == b);
    let shared = shared.count();
    "../".repeat(folders.len() - shared) + &parts[shared..].join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(pages: &[(&str, &str)]) -> Result<(Tables, Vec<Page>)> {
        let file = r#"{"title": "Speed", "gpu": "H100", "date": "2026-11-28", "commit": "abc1234",
            "command": "c", "about": ["src"], "row": "kernel", "units": [{"name": "us"}],
            "rows": [{"name": "copy", "values": [2]}]}"#;
        let view = r#"{"row": "", "columns": [{"name": "us", "of": {"unit": "us"}}],
            "rows": [{"name": "copy", "of": {"file": "fast", "row": "copy"}}]}"#;
        let files = Files::from([("fast".into(), (Results::parse(file)?, vec![true]))]);
        let views = BTreeMap::from([("short".into(), View::parse(view)?)]);
        let page = |(path, text): &(&str, &str)| Page {
            path: (*path).into(),
            text: (*text).into(),
        };
        let pages: Vec<Page> = pages.iter().map(page).collect();
        Ok((Tables::new(files, views, Vec::new(), &pages)?, pages))
    }

    #[test]
    fn tables_come_between_their_markers() {
        let short = "a\n<!-- view: short -->\nold\n<!-- end -->\nb\n";
        let full = "<!-- results: fast -->\n<!-- end -->\n";
        let (tables, pages) = tables(&[("README.md", short), ("docs/src/all.md", full)]).unwrap();
        let fresh = tables.rewrite(&pages[0].path, short).unwrap();
        assert!(
            fresh.starts_with("a\n<!-- view: short -->\n\n| † | us |\n"),
            "{fresh}"
        );
        assert!(fresh.contains("](docs/src/all.md#fast)"), "{fresh}");
        assert!(fresh.ends_with("\n\n<!-- end -->\nb\n"), "{fresh}");
        assert_eq!(tables.rewrite(&pages[0].path, &fresh).unwrap(), fresh);
        let fresh = tables.rewrite(&pages[1].path, full).unwrap();
        assert!(fresh.contains("| kernel † | us |"), "{fresh}");
    }

    #[test]
    fn tables_and_places_belong_together() {
        let view = "<!-- view: short -->\n<!-- end -->\n";
        let full = "<!-- results: fast -->\n<!-- end -->\n";
        for (page, expected) in [
            (view.to_string(), "no page has `<!-- results: fast"),
            (full.to_string(), "no page has `<!-- view: short"),
            (full.repeat(2) + view, "two places"),
            (full.replace("fast", "slow") + view, "there is no file"),
        ] {
            let error = tables(&[("page.md", &page)]).err().expect(expected);
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        }
        for (page, expected) in [
            (format!("{view}<!-- results: fast -->\n"), "missing"),
            (format!("<!-- results: fast -->\n{view}"), "missing"),
            (format!("{full}{view}<!-- end -->\n"), "without a beginning"),
        ] {
            let (tables, pages) = tables(&[("page.md", &page)]).unwrap();
            let error = tables.rewrite("page.md", &pages[0].text).unwrap_err();
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        }
    }

    #[test]
    fn links_between_pages() {
        for (from, to, expected) in [
            ("README.md", "docs/src/a.md", "docs/src/a.md"),
            ("docs/src/a.md", "docs/src/b/c.md", "b/c.md"),
            ("docs/src/b/c.md", "docs/src/a.md", "../a.md"),
            ("docs/src/a.md", "docs/src/a.md", "a.md"),
        ] {
            assert_eq!(relative(from, to), expected);
        }
    }

    /// The pages of the repository match the results files.
    #[test]
    fn the_pages_are_up_to_date() {
        run(&Args { check: true }).unwrap();
    }
}
