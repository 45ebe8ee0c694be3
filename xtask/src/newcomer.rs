//! `cargo xtask newcomer`: runs the commands of README and book as a reader would type them.
//!
//! Each page gets an empty folder with [`MODELS`] and [`texts`] in place of what the page downloads.
//! Its blocks of shell commands run there in order, with the command built from this checkout first
//! on PATH and with [`SHORTER`] runs. A comment before a block changes what happens with it:
//!
//! ```text
//! <!-- newcomer: needs a GPU -->              the block does not run; see `REASONS`
//! <!-- newcomer: needs the network: hf; needs a GPU: vllm, nvfp4 launch -->
//!                                             its commands that begin so do not run
//! <!-- newcomer: output -->                   the block before it prints these lines; numbers differ
//! <!-- newcomer: exact output -->             the block before it prints these lines
//! <!-- newcomer: file mine.json -->           the block is written to this file
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{env, process};

use anyhow::{Context, Result, bail, ensure};

use crate::book;
use crate::workspace::{self, FEATURES};

/// Folders of downloaded models on the pages, and the golden checkpoint that replaces each.
const MODELS: [(&str, &str); 3] = [
    ("Qwen3-0.6B", "qwen3-tiny"),
    ("Llama-3.2-1B", "llama3-tiny"),
    ("Llama-3.2-1B-NVFP4", "llama3-tiny-ct-nvfp4a16"),
];

/// Chat template of the first model.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
                        {{ message.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Folders of texts on the pages.
const TEXT_FOLDERS: [&str; 2] = ["texts", "books"];
/// Pages that are these texts.
const TEXTS: [&str; 3] = ["introduction.md", "quick-start.md", "command.md"];

/// File with the standard input of all commands, which only a chat reads.
const INPUT: &str = "input.txt";

/// Options that shorten a run, by subcommand. An option that the page gives itself is not added.
const SHORTER: [(&str, &[&str]); 4] = [
    (
        "train",
        &[
            "--device flex",
            "--steps 2",
            "--batch 2",
            "--eval-batches 1",
        ],
    ),
    (
        "finetune",
        &["--steps 2", "--batch 2", "--context 64", "--eval-rows 2"],
    ),
    (
        "pretrain",
        &["--steps 2", "--batch 2", "--context 64", "--eval-rows 2"],
    ),
    ("generate", &["--tokens 8"]),
];

/// Reasons for which a block or a command does not run.
const REASONS: [&str; 4] = [
    "needs a GPU",
    "needs the network",
    // Commands of cargo that build this project or install its tools.
    "needs a checkout",
    // Capital letters in place of a path.
    "needs a folder of the reader",
];

/// Start of a mark.
const MARK: &str = "<!-- newcomer: ";
/// Command in a checkout that is the installed command elsewhere.
const CARGO_RUN: &str = "cargo run --release -- ";

/// Options of `cargo xtask newcomer`.
#[derive(clap::Args)]
pub struct Args {
    /// Run only pages whose path contains one of these words
    #[arg(value_name = "PAGE")]
    pages: Vec<String>,
    /// Run the command `nvfp4` in this folder, instead of building it
    #[arg(long, value_name = "DIR")]
    programs: Option<PathBuf>,
}

/// Runs the commands of the pages; prints the time of each block.
///
/// # Errors
/// Returns an error if a mark is wrong, a command fails, or a page shows output that its command
/// does not print.
pub fn run(args: &Args) -> Result<()> {
    let programs = match &args.programs {
        Some(folder) => folder.clone(),
        None => build()?,
    };
    let programs = fs::canonicalize(&programs)
        .with_context(|| format!("programs {} cannot be opened", programs.display()))?;
    let folder = env::temp_dir().join(format!("nvfp4-newcomer-{}", process::id()));
    let mut problems = Vec::new();
    for page in pages()? {
        let chosen = args.pages.iter().any(|word| page.contains(word.as_str()));
        if chosen || args.pages.is_empty() {
            problems.extend(run_page(&page, &folder, &programs)?);
        }
    }
    ensure!(
        problems.is_empty(),
        "{} problems:\n{}",
        problems.len(),
        problems.join("\n")
    );
    Ok(())
}

/// Builds the tests, which have the command: a build of its own would have other features. Returns
/// the folder of the command.
fn build() -> Result<PathBuf> {
    let mut cargo = workspace::cargo();
    cargo.args(["test", "--no-run", "--workspace"]);
    workspace::spawn(cargo.args(["--features", FEATURES]))?;
    Ok(workspace::target_folder()?.join("debug"))
}

/// Returns the paths of README and the pages of the book, from the root.
fn pages() -> Result<Vec<String>> {
    let root = workspace::root();
    let mut pages = vec!["README.md".to_owned()];
    for page in book::files(&root.join("docs/src"), "md")? {
        pages.push(page.strip_prefix(&root)?.display().to_string());
    }
    Ok(pages)
}

/// Runs the blocks of a page in a new `folder`, which it removes, and returns the problems.
fn run_page(page: &str, folder: &Path, programs: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(workspace::root().join(page))?;
    let actions = actions(page, &text)?;
    let mut problems = Vec::new();
    if !actions
        .iter()
        .any(|(_, action)| matches!(action, Action::Run(_)))
    {
        return Ok(problems);
    }
    prepare(folder)?;
    let mut output = String::new();
    for (line, action) in actions {
        match action {
            Action::File(name, content) => fs::write(folder.join(name), content)?,
            Action::Output(lines, exact) => {
                for missing in missing(&lines, &output, exact) {
                    problems.push(format!("{page}:{line}: not printed: {missing}"));
                }
            }
            Action::Run(commands) => {
                let start = Instant::now();
                output.clear();
                for command in &commands {
                    match shell(command, folder, programs)? {
                        Ok(printed) => output += &printed,
                        Err(error) => problems.push(format!("{page}:{line}: {command}: {error}")),
                    }
                }
                let (took, count) = (start.elapsed().as_secs_f64(), commands.len());
                println!("{took:>6.1} s  {count} commands  {page}:{line}");
            }
        }
    }
    fs::remove_dir_all(folder)?;
    Ok(problems)
}

/// Makes an empty `folder` with the files that the pages take as given.
fn prepare(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    for (name, golden) in MODELS {
        copy(&nvfp4_test_support::golden(golden), &folder.join(name))?;
    }
    fs::write(
        folder.join(MODELS[0].0).join("chat_template.jinja"),
        TEMPLATE,
    )?;
    // The repository stores a tokenizer once.
    let [_, (base, _), (quantized, _)] = MODELS;
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(
            folder.join(base).join(file),
            folder.join(quantized).join(file),
        )?;
    }
    let root = workspace::root();
    for name in TEXT_FOLDERS {
        fs::create_dir_all(folder.join(name))?;
        for page in TEXTS {
            fs::copy(
                root.join("docs/src").join(page),
                folder.join(name).join(page),
            )?;
        }
    }
    for name in ["text.txt", "book.txt", "test.txt"] {
        fs::copy(root.join("README.md"), folder.join(name))?;
    }
    fs::copy(
        nvfp4_test_support::golden(MODELS[0].1).join("config.json"),
        folder.join("config.json"),
    )?;
    for (name, content) in texts() {
        fs::write(folder.join(name), content)?;
    }
    Ok(())
}

/// Copies the files of a folder, without subfolders.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if let Some(name) = path.file_name().filter(|_| path.is_file()) {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// Names and contents of the data files of the pages.
fn texts() -> [(&'static str, String); 3] {
    let example = |i| {
        format!(
            "{{\"prompt\": \"{i} and {i} are\", \"completion\": \" {}.\"}}\n",
            2 * i
        )
    };
    let question = r#"{"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}"#;
    [
        ("examples.jsonl", (0..60).map(example).collect()),
        ("questions.jsonl", format!("{question}\n{question}\n")),
        (INPUT, "Hello\n/exit\n".into()),
    ]
}

/// Runs a command; returns its output, or why it failed.
fn shell(command: &str, folder: &Path, programs: &Path) -> Result<Result<String, String>> {
    let before = env::var_os("PATH").unwrap_or_default();
    let paths = [PathBuf::from(programs)].into_iter();
    let paths = env::join_paths(paths.chain(env::split_paths(&before)))?;
    let mut process = Command::new("sh");
    process.args(["-c", command]).current_dir(folder);
    process.env("PATH", paths);
    process.stdin(fs::File::open(folder.join(INPUT))?);
    let output = process.output().context("cannot start sh")?;
    let error = String::from_utf8_lossy(&output.stderr);
    Ok(match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{}\n{}", output.status, error.trim_end())),
    })
}

/// Returns the lines of `expected` that are not in `output`, in order. Blanks are not compared, and
/// numbers only if `exact`.
fn missing<'a>(expected: &'a str, output: &str, exact: bool) -> Vec<&'a str> {
    let printed: Vec<String> = output.lines().map(|line| comparable(line, exact)).collect();
    let mut rest = &printed[..];
    let mut missing = Vec::new();
    for line in expected.lines().filter(|line| !line.trim().is_empty()) {
        match rest
            .iter()
            .position(|found| *found == comparable(line, exact))
        {
            Some(at) => rest = &rest[at + 1..],
            None => missing.push(line),
        }
    }
    missing
}

/// Returns `line` with single blanks and, unless `exact`, with `#` for each number and its sign.
fn comparable(line: &str, exact: bool) -> String {
    let words = line.split_whitespace().map(|word| match exact {
        true => word.to_owned(),
        false => masked(word),
    });
    words.collect::<Vec<_>>().join(" ")
}

fn masked(word: &str) -> String {
    let mut out = String::new();
    let mut chars = word.trim_start_matches(['+', '-']).chars().peekable();
    while let Some(char) = chars.next() {
        if !char.is_ascii_digit() {
            out.push(char);
            continue;
        }
        out.push('#');
        while chars
            .next_if(|char| char.is_ascii_digit() || *char == '.')
            .is_some()
        {}
    }
    out
}

/// What a block stands for.
#[derive(Debug, PartialEq)]
enum Action {
    /// Commands to run.
    Run(Vec<String>),
    /// Lines that the commands before print; true to compare numbers.
    Output(String, bool),
    /// Name and content of a file.
    File(String, String),
}

/// A block of code.
struct Block<'a> {
    /// Line of its fence, from 1.
    line: usize,
    is_shell: bool,
    mark: Option<&'a str>,
    text: String,
}

/// Returns the actions of a page and their lines.
///
/// # Errors
/// Returns an error if a mark is unknown or precedes no block, or if a block without a mark has a
/// command that cannot run.
fn actions(page: &str, text: &str) -> Result<Vec<(usize, Action)>> {
    let mut actions = Vec::new();
    for block in blocks(page, text)? {
        let at = || format!("{page}:{}", block.line);
        if let Some(action) = action(&block).with_context(at)? {
            actions.push((block.line, action));
        }
    }
    Ok(actions)
}

fn action(block: &Block) -> Result<Option<Action>> {
    let text = || block.text.clone();
    Ok(match (block.mark, block.is_shell) {
        (Some("output"), false) => Some(Action::Output(text(), false)),
        (Some("exact output"), false) => Some(Action::Output(text(), true)),
        (Some(mark), false) => match mark.strip_prefix("file ") {
            Some(name) => Some(Action::File(name.to_owned(), text())),
            None => bail!("mark `{mark}` of a block that has no shell commands"),
        },
        (None, false) => None,
        (mark, true) => {
            let commands = runnable(commands(&block.text), mark)?;
            (!commands.is_empty()).then_some(Action::Run(commands))
        }
    })
}

/// Returns the blocks of a page with their marks.
fn blocks<'a>(page: &str, text: &'a str) -> Result<Vec<Block<'a>>> {
    let mut blocks = Vec::new();
    let mut mark = None;
    let mut lines = (1..).zip(text.lines());
    while let Some((line, full)) = lines.next() {
        let trimmed = full.trim();
        if let Some(rest) = trimmed.strip_prefix(MARK) {
            let found = rest.strip_suffix("-->").map(str::trim);
            mark = Some(found.with_context(|| format!("{page}:{line}: a mark of several lines"))?);
            continue;
        }
        let Some(language) = trimmed.strip_prefix("```") else {
            ensure!(
                mark.is_none() || trimmed.is_empty(),
                "{page}:{line}: a mark is not followed by a block"
            );
            continue;
        };
        let inside = lines.by_ref().map(|(_, line)| line);
        let inside = inside.take_while(|line| line.trim() != "```");
        let indent = full.len() - full.trim_start().len();
        let inside = inside.map(|line| line.get(indent..).unwrap_or_default().to_owned() + "\n");
        blocks.push(Block {
            line,
            is_shell: ["sh", "bash", "console"].contains(&language),
            mark: mark.take(),
            text: inside.collect(),
        });
    }
    ensure!(mark.is_none(), "{page}: a mark at the end of the page");
    Ok(blocks)
}

/// Returns the commands of a block without comments, with continued lines joined.
fn commands(block: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut open = String::new();
    for line in block.lines() {
        let line = without_comment(line).trim();
        match line.strip_suffix('\\') {
            Some(start) => open += start,
            None => {
                open += line;
                commands.push(std::mem::take(&mut open));
            }
        }
    }
    commands.retain(|command| !command.is_empty());
    commands
}

/// Cuts a shell comment: from a `#` after a blank, outside of quotes.
fn without_comment(line: &str) -> &str {
    let (mut quote, mut before) = (None, ' ');
    for (at, char) in line.char_indices() {
        match quote {
            Some(open) if open == char => quote = None,
            None if char == '\'' || char == '"' => quote = Some(char),
            None if char == '#' && before.is_whitespace() => return &line[..at],
            _ => {}
        }
        before = char;
    }
    line
}

/// Returns the commands that run, as they run.
///
/// # Errors
/// Returns an error if the mark has an unknown reason or a beginning that no command has, or if a
/// command without a mark is not one of `nvfp4`.
fn runnable(mut commands: Vec<String>, mark: Option<&str>) -> Result<Vec<String>> {
    for part in mark.into_iter().flat_map(|mark| mark.split(';')) {
        let (reason, starts) = match part.split_once(':') {
            Some((reason, starts)) => (reason.trim(), starts.split(',').map(str::trim).collect()),
            None => (part.trim(), vec![""]),
        };
        ensure!(
            REASONS.contains(&reason),
            "mark `{reason}` of a block with shell commands: it may be {}",
            REASONS.join(", ")
        );
        for start in starts {
            let before = commands.len();
            commands.retain(|command| !command.starts_with(start));
            ensure!(commands.len() < before, "no command begins with `{start}`");
        }
    }
    commands.iter().map(|command| shortened(command)).collect()
}

/// Returns the command as it runs here.
fn shortened(command: &str) -> Result<String> {
    let installed = command
        .strip_prefix(CARGO_RUN)
        .map(|rest| format!("nvfp4 {rest}"));
    let mut command = installed.unwrap_or_else(|| command.to_owned());
    let mut words = command.split_whitespace();
    let (program, task) = (words.next(), words.next().unwrap_or_default());
    ensure!(
        program == Some("nvfp4"),
        "`{command}` is not a command of nvfp4: mark it as one that {}",
        REASONS.join(", ")
    );
    let shorter = SHORTER.iter().find(|(name, _)| *name == task);
    for option in shorter.into_iter().flat_map(|(_, options)| *options) {
        let flag = option.split(' ').next().unwrap_or_default();
        let has = |flag| command.split_whitespace().any(|word| word == flag);
        let is_given = has(flag) || (flag == "--steps" && has("--epochs"));
        if !is_given {
            command = format!("{command} {option}");
        }
    }
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_a_block() {
        let block = "# all\nnvfp4 a \\\n    --b 'c # d'  # comment\n\nnvfp4 e#f\n";
        assert_eq!(commands(block), ["nvfp4 a --b 'c # d'", "nvfp4 e#f"]);
    }

    #[test]
    fn blocks_become_actions() {
        let page = "text\n\n<!-- newcomer: file a.json -->\n\n```json\n{}\n```\n\n\
                    - item\n\n  <!-- newcomer: needs the network: hf -->\n  ```sh\n  hf download\n  \
                    nvfp4 inspect A\n  ```\n<!-- newcomer: exact output -->\n```text\n1 tensor\n```\n\
                    ```rust\nnvfp4 b\n```\n<!-- newcomer: needs a GPU -->\n```sh\nvllm c\n```\n";
        let expected = [
            (5, Action::File("a.json".into(), "{}\n".into())),
            (12, Action::Run(vec!["nvfp4 inspect A".into()])),
            (17, Action::Output("1 tensor\n".into(), true)),
        ];
        assert_eq!(actions("page", page).unwrap(), expected);
    }

    #[test]
    fn wrong_marks_are_errors() {
        let shell = "```sh\nnvfp4 a\n```\n";
        for (page, expected) in [
            (format!("{MARK}needs time -->\n{shell}"), "needs time"),
            (
                format!("{MARK}needs a GPU: hf -->\n{shell}"),
                "no command begins with `hf`",
            ),
            (format!("{MARK}output -->\n{shell}"), "mark `output`"),
            (
                format!("{MARK}needs a GPU -->\ntext\n{shell}"),
                "not followed by a block",
            ),
            (format!("{shell}{MARK}output -->\n"), "end of the page"),
            ("```sh\nhf download\n```\n".into(), "not a command of nvfp4"),
            (
                format!("{MARK}needs a GPU -->\n```text\na\n```\n"),
                "no shell commands",
            ),
        ] {
            let error = actions("page", &page).unwrap_err();
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        }
    }

    #[test]
    fn runs_are_short() {
        let command = "cargo run --release -- generate A --prompt 'a b'";
        let expected = "nvfp4 generate A --prompt 'a b' --tokens 8";
        assert_eq!(shortened(command).unwrap(), expected);
        for own in [
            "nvfp4 generate A --tokens 3",
            "nvfp4 finetune --epochs 1 --batch 2 --context 8 --eval-rows 2",
        ] {
            assert_eq!(shortened(own).unwrap(), own);
        }
        assert!(shortened("cargo run --release --features cuda -- doctor").is_err());
    }

    #[test]
    fn lines_that_are_not_printed() {
        let output = "loss   2.25  nvfp4\ngap: -0.5 %\nwrote a\n";
        let page = "loss 3.1 nvfp4\n\ngap: +12.75 %\nwrote a\n";
        assert!(missing(page, output, false).is_empty());
        let exact = missing(page, output, true);
        assert_eq!(exact, ["loss 3.1 nvfp4", "gap: +12.75 %"]);
        // In order, and no line is printed twice.
        assert_eq!(missing("wrote a\nwrote a\n", output, false), ["wrote a"]);
        assert_eq!(missing("wrote a\ngap: 1 %\n", output, false), ["gap: 1 %"]);
        assert_eq!(missing("wrote b\n", output, false), ["wrote b"]);
    }

    /// `cargo xtask newcomer` itself is not part of CI.
    #[test]
    fn the_pages_have_valid_marks() {
        let mut runs = 0;
        for page in pages().unwrap() {
            let text = fs::read_to_string(workspace::root().join(&page)).unwrap();
            let actions = actions(&page, &text).unwrap();
            runs += actions
                .iter()
                .filter(|(_, action)| matches!(action, Action::Run(_)))
                .count();
        }
        assert!(runs >= 10, "{runs} blocks run");
    }
}
