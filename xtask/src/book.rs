//! `cargo xtask book`: builds the book, checks the links of all documents, and checks the file
//! paths and the examples in README and book.
//!
//! lychee is not used, because it does not check file paths in code, nor is mdbook-linkcheck, which
//! does not work with mdBook 0.5.
//!
//! The examples are compiled elsewhere: `src/lib.rs` includes the chapters with examples as
//! documentation, so that `cargo test` compiles and runs them.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{tools, workspace};

/// Pages added by mdBook: all chapters on one page, the table of contents, and the 404 page, whose
/// links start at the root of a server.
const NOT_CHAPTERS: [&str; 3] = ["print.html", "toc.html", "404.html"];

/// Builds `docs/` into the target folder.
///
/// # Errors
///
/// Returns an error if a link is broken, if a page names a file that does not exist, or if an example
/// has hidden lines.
pub fn run() -> Result<()> {
    let root = workspace::root();
    let built = workspace::target_folder()?.join("book");
    let mut command = Command::new(tools::mdbook()?);
    command
        .arg("build")
        .arg(root.join("docs"))
        .arg("--dest-dir")
        .arg(&built);
    workspace::spawn(&mut command)?;

    let mut pages = Pages::default();
    let mut problems = Vec::new();
    let mut count = 0;
    for path in files(&built, "html")? {
        if NOT_CHAPTERS.iter().any(|name| path.ends_with(name)) {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        for link in attributes(&text, &["href", "src"]) {
            count += 1;
            if let Err(why) = pages.resolve(&path, &link) {
                problems.push(format!("{}: {link}: {why}", shown(&path, &built)));
            }
        }
    }
    for path in files(&root, "md")? {
        let text = fs::read_to_string(&path)?;
        for link in markdown_links(&text) {
            count += 1;
            let file = link.split('#').next().unwrap_or_default();
            let folder = path.parent().context("a file without a folder")?;
            if !is_external(link) && !file.is_empty() && !folder.join(file).exists() {
                problems.push(format!("{}: {link}: no such file", shown(&path, &root)));
            }
        }
    }
    let paths = check_paths(&root, &mut problems)?;
    for page in pages_of(&root)? {
        let text = fs::read_to_string(&page)?;
        let hidden = hidden_lines(&text).into_iter();
        problems.extend(hidden.map(|(number, line)| {
            let page = shown(&page, &root);
            format!("{page}:{number}: `{line}` is hidden in the book only, and GitHub shows it")
        }));
    }
    ensure!(
        problems.is_empty(),
        "links or paths that lead nowhere, or hidden lines:\n  {}",
        problems.join("\n  ")
    );
    println!(
        "{count} links, {paths} paths; the book is {}",
        built.join("index.html").display()
    );
    Ok(())
}

/// Adds a problem for each path in the code of README and book that does not exist in the
/// repository. Returns the number of paths checked.
fn check_paths(root: &Path, problems: &mut Vec<String>) -> Result<usize> {
    let repository = Repository::read(root)?;
    let mut count = 0;
    for page in pages_of(root)? {
        let text = fs::read_to_string(&page)?;
        for path in code_words(&text).filter(|word| repository.is_path(word)) {
            count += 1;
            for path in alternatives(path) {
                if !repository.has(&path) {
                    let page = shown(&page, root);
                    problems.push(format!("{page}: `{path}`: no such file or folder"));
                }
            }
        }
    }
    Ok(count)
}

/// Returns the pages of the book, and README.
fn pages_of(root: &Path) -> Result<Vec<PathBuf>> {
    let mut pages = files(&root.join("docs"), "md")?;
    pages.push(root.join("README.md"));
    Ok(pages)
}

/// Returns the lines of the Rust examples in `text` that mdBook and rustdoc hide, with their numbers.
fn hidden_lines(text: &str) -> Vec<(usize, &str)> {
    let (mut found, mut is_rust) = (Vec::new(), false);
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if let Some(language) = line.strip_prefix("```") {
            is_rust = !is_rust && language.starts_with("rust");
        } else if is_rust && (line == "#" || line.starts_with("# ")) {
            found.push((number, line));
        }
    }
    found
}

/// Files and folders of the repository that git does not ignore.
struct Repository {
    /// Paths from the root, each with a leading and a trailing `/`.
    paths: HashSet<String>,
    /// Names of the folders at the root.
    folders: HashSet<String>,
}

impl Repository {
    fn read(root: &Path) -> Result<Self> {
        let (mut paths, mut folders) = (HashSet::new(), HashSet::new());
        for entry in ignore::Walk::new(root) {
            let entry = entry?;
            let path = entry.path().strip_prefix(root)?;
            let path = path.to_string_lossy().replace('\\', "/");
            if entry.depth() == 1 && entry.path().is_dir() {
                folders.insert(path.clone());
            }
            paths.insert(format!("/{path}/"));
        }
        Ok(Self { paths, folders })
    }

    /// Returns true for a word that looks like a path of the repository: a Rust or Python file, a
    /// nested folder with a trailing `/`, or anything below a folder at the root.
    fn is_path(&self, word: &str) -> bool {
        let is_name = |char: char| char.is_ascii_alphanumeric() || "_-./{},".contains(char);
        let is_placeholder = |part: &str| part.chars().all(|char| char.is_ascii_uppercase());
        let mut parts = word.trim_matches('/').split(['/', '.']);
        let first = word.split_once('/').map(|(first, _)| first);
        word.chars().all(is_name)
            && !word.starts_with(['/', '.'])
            && !parts.any(is_placeholder)
            && (word.ends_with(".rs")
                || word.ends_with(".py")
                || word.ends_with('/') && word.matches('/').count() > 1
                || first.is_some_and(|first| self.folders.contains(first)))
    }

    /// Returns true if a path of the repository ends with `path`.
    fn has(&self, path: &str) -> bool {
        let end = format!("/{}/", path.trim_end_matches('/'));
        self.paths.iter().any(|path| path.ends_with(&end))
    }
}

/// Returns the words of the code in a page, in backquotes and in blocks.
fn code_words(text: &str) -> impl Iterator<Item = &str> {
    let mut block = false;
    let code = text.lines().flat_map(move |line| {
        let fence = line.trim_start().starts_with("```");
        block ^= fence;
        // Outside of a block, every second part of a line is in backquotes.
        let (first, step) = if block { (0, 1) } else { (1, 2) };
        let parts = line.split('`').skip(first).step_by(step);
        parts.take(if fence { 0 } else { usize::MAX })
    });
    code.flat_map(|part| part.split_whitespace())
        .map(|word| word.trim_matches([',', ';', ':', '(', ')', '"', '\'']))
}

/// Expands braces such as `a/{b,c}.rs` to paths.
fn alternatives(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else {
        return vec![path.to_owned()];
    };
    let Some((names, after)) = rest.split_once('}') else {
        return vec![path.to_owned()];
    };
    let names = names.split(',');
    names.map(|name| format!("{before}{name}{after}")).collect()
}

fn shown(path: &Path, root: &Path) -> String {
    path.strip_prefix(root)
        .unwrap_or(path)
        .display()
        .to_string()
}

/// Lists the files under a folder that git does not ignore, by the suffix of their names.
pub fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in ignore::Walk::new(folder) {
        let path = entry?.into_path();
        if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns true for an external link, which is not followed.
fn is_external(link: &str) -> bool {
    ["http:", "https:", "mailto:", "data:", "javascript:"]
        .iter()
        .any(|scheme| link.starts_with(scheme))
}

/// The linked pages, with their anchors.
#[derive(Default)]
struct Pages {
    names: HashMap<PathBuf, HashSet<String>>,
}

impl Pages {
    /// Returns an error if a link of a page has no destination.
    fn resolve(&mut self, page: &Path, link: &str) -> Result<()> {
        if is_external(link) {
            return Ok(());
        }
        let (file, name) = link.split_once('#').unwrap_or((link, ""));
        let folder = page.parent().context("a page without a folder")?;
        let mut path = if file.is_empty() {
            page.to_owned()
        } else {
            folder.join(file)
        };
        if path.is_dir() {
            path.push("index.html");
        }
        ensure!(path.exists(), "no such file");
        if name.is_empty() {
            return Ok(());
        }
        if !self.names.contains_key(&path) {
            let text = fs::read_to_string(&path)?;
            let names = attributes(&text, &["id", "name"]).into_iter().collect();
            self.names.insert(path.clone(), names);
        }
        ensure!(self.names[&path].contains(name), "the page has no `{name}`");
        Ok(())
    }
}

/// Returns the values of these attributes in HTML as mdBook writes it (double quotes).
fn attributes(html: &str, attributes: &[&str]) -> Vec<String> {
    let mut values = Vec::new();
    for attribute in attributes {
        for rest in html.split(&format!(" {attribute}=\"")).skip(1) {
            if let Some(value) = rest.split('"').next() {
                values.push(value.replace("&amp;", "&"));
            }
        }
    }
    values
}

/// Returns the destinations of `[text](destination)` outside of code.
fn markdown_links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    let mut code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        } else if !code {
            // Every second part of a line is in backquotes.
            for part in line.split('`').step_by(2) {
                let ends = part
                    .split("](")
                    .skip(1)
                    .filter_map(|rest| rest.split(')').next());
                links.extend(ends.filter_map(|link| link.split_whitespace().next()));
            }
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_markdown() {
        let text = "See [a](a.md#b), `[no](code)` and [`c`](c.md \"title\").\n```\n[no](d)\n```\n";
        assert_eq!(markdown_links(text), ["a.md#b", "c.md"]);
    }

    #[test]
    fn hidden_lines_of_examples() {
        let text = "# A\n```rust,no_run\n# use a;\n#[test]\n  # }\n```\n# B\n```sh\n# c\n```\n";
        assert_eq!(hidden_lines(text), [(3, "# use a;"), (5, "# }")]);
        for page in pages_of(&workspace::root()).unwrap() {
            let text = fs::read_to_string(&page).unwrap();
            assert_eq!(hidden_lines(&text), [], "{}", page.display());
        }
    }

    #[test]
    fn paths_in_code() {
        let text =
            "See `src/a.rs`, src/b.rs and `cargo test src/c.rs`.\n```sh\npython d.py, e\n```\n";
        let words: Vec<&str> = code_words(text).collect();
        assert_eq!(
            words,
            [
                "src/a.rs", "cargo", "test", "src/c.rs", "python", "d.py", "e"
            ]
        );
        assert_eq!(alternatives("a/{b,c}.rs"), ["a/b.rs", "a/c.rs"]);
        assert_eq!(alternatives("a/b.rs"), ["a/b.rs"]);
    }

    #[test]
    fn paths_that_do_not_exist() {
        let repository = Repository::read(&workspace::root()).unwrap();
        for good in [
            "xtask/src/book.rs",
            "book.rs",
            "src/setup/",
            "xtask/src/setup",
        ] {
            assert!(repository.is_path(good), "{good}");
            assert!(repository.has(good), "{good}");
        }
        for bad in [
            "xtask/src/books.rs",
            "ook.rs",
            "setup/nowhere/",
            "xtask/nowhere",
        ] {
            assert!(repository.is_path(bad), "{bad}");
            assert!(!repository.has(bad), "{bad}");
        }
        for other in [
            "a/b",
            "--out",
            "results/NAME.json",
            "Tensor::from_data",
            "../x.rs",
            "NAME/",
            "adapter/",
        ] {
            assert!(!repository.is_path(other), "{other}");
        }
    }

    #[test]
    fn links_that_lead_nowhere() {
        let folder = std::env::temp_dir().join(format!("xtask-book-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let page = folder.join("page.html");
        let html = "<h1 id=\"top\">T</h1><a href=\"other.html#there\">x</a>";
        fs::write(&page, html).unwrap();
        fs::write(folder.join("other.html"), "<p id=\"there\">").unwrap();
        let mut pages = Pages::default();
        assert_eq!(attributes(html, &["href"]), ["other.html#there"]);
        for good in [
            "#top",
            "other.html#there",
            "other.html",
            "https://example.org",
        ] {
            assert!(pages.resolve(&page, good).is_ok(), "{good}");
        }
        for bad in ["#bottom", "other.html#here", "absent.html"] {
            assert!(pages.resolve(&page, bad).is_err(), "{bad}");
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
