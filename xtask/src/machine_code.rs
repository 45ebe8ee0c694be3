//! `cargo xtask machine-code`: registers, spills and instructions of the kernels, without a GPU.
//!
//! The tests `*_source` compile the kernels with NVRTC. Where `NVFP4_DUMP` names a folder, they
//! leave the machine code there. To judge a change of a kernel, compare two tables of this command:
//!
//! ```text
//! cargo xtask machine-code --json before.json         # in the tree before the change
//! cargo xtask machine-code --before before.json       # in the tree after it
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::workspace::FEATURES;
use crate::{setup, workspace};

/// Options of `cargo xtask machine-code`.
#[derive(clap::Args)]
pub struct Args {
    /// Read the machine code in this folder (files `KERNEL-ARCH.cubin`) instead of running the
    /// source tests
    #[arg(long, value_name = "FOLDER")]
    cubins: Option<PathBuf>,
    /// Take only these targets, separated by commas
    #[arg(
        long,
        value_name = "ARCHS",
        value_delimiter = ',',
        default_value = "sm_90a,sm_100a"
    )]
    arch: Vec<String>,
    /// Take only kernels whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Write the table to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Compare with the table in this file; fail when a kernel takes more registers or stack, or
    /// has over 1 % more instructions
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// Read NEW for OLD in the names of `--before`; may be given several times
    #[arg(long, value_name = "OLD=NEW", requires = "before")]
    rename: Vec<String>,
}

/// What the machine code of a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Cost {
    /// Registers of a thread.
    registers: u32,
    /// Bytes of stack of a thread: spilled registers and arrays with indices of the run time.
    stack: u32,
    /// Loads and stores of that stack.
    local: u32,
    /// All instructions.
    instructions: u32,
}

/// Kernel and target to cost.
type Table = BTreeMap<String, Cost>;

/// Measures, prints, writes, compares.
pub fn run(args: &Args) -> Result<ExitCode> {
    let tools = setup::cuda_tools::folder()?;
    let cubins = match &args.cubins {
        Some(folder) => folder.clone(),
        None => compile_kernels(&args.only)?,
    };
    let table = measure(&tools, &cubins, args)?;
    ensure!(
        !table.is_empty(),
        "no machine code of these targets in {}",
        cubins.display()
    );
    if let Some(file) = &args.json {
        fs::write(file, serde_json::to_string_pretty(&table)? + "\n")
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    let Some(file) = &args.before else {
        println!(
            "{:<64} {:>9} {:>6} {:>6} {:>12}",
            "kernel", "registers", "stack", "local", "instructions"
        );
        for (name, cost) in &table {
            println!(
                "{name:<64} {:>9} {:>6} {:>6} {:>12}",
                cost.registers, cost.stack, cost.local, cost.instructions
            );
        }
        return Ok(ExitCode::SUCCESS);
    };
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let before = renamed(serde_json::from_str(&text)?, &args.rename)?;
    Ok(compare(&before, &table))
}

/// Runs the tests that compile kernels; the folder of their machine code.
fn compile_kernels(only: &str) -> Result<PathBuf> {
    setup::run(&setup::Args::default())?;
    let folder = workspace::root().join("target/machine-code");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    let mut command = workspace::cargo();
    command.args(["test", "--package", "nvfp4-kernels", "--features", FEATURES]);
    command
        .args(["--tests", "--", "source"])
        .env("NVFP4_TEST_FULL", "1")
        .env("NVFP4_DUMP", &folder);
    if !only.is_empty() {
        command.env("NVFP4_ONLY", only);
    }
    println!("$ {}", workspace::shown(&command));
    let status = command.status().context("cannot start cargo")?;
    ensure!(status.success(), "the source tests ended with {status}");
    Ok(folder)
}

/// The costs of the machine code in `folder`, several files at a time.
fn measure(tools: &Path, folder: &Path, args: &Args) -> Result<Table> {
    let mut files = Vec::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
        let file = entry?.path();
        let name = file
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let is_asked_for = args
            .arch
            .iter()
            .any(|arch| name.ends_with(&format!("-{arch}")));
        if file
            .extension()
            .is_some_and(|extension| extension == "cubin")
            && is_asked_for
            && name.contains(&args.only)
        {
            files.push((name, file));
        }
    }
    let next = AtomicUsize::new(0);
    let table = Mutex::new(Ok(Table::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((name, file)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let cost = cost_of(tools, file);
                    let mut table = table
                        .lock()
                        .unwrap_or_else(|poisoned| poisoned.into_inner());
                    match (&mut *table, cost) {
                        (Ok(table), Ok(cost)) => {
                            table.insert(name.clone(), cost);
                        }
                        (Ok(_), Err(error)) => *table = Err(error),
                        (Err(_), _) => {}
                    }
                }
            });
        }
    });
    table
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The cost of the one kernel in `file`.
fn cost_of(tools: &Path, file: &Path) -> Result<Cost> {
    let output = |program: &str, arguments: &[&str]| -> Result<String> {
        let output = Command::new(tools.join("bin").join(program))
            .args(arguments)
            .arg(file)
            // cuobjdump calls nvdisasm.
            .env("PATH", tools.join("bin"))
            .output()
            .with_context(|| format!("cannot start {program}"))?;
        ensure!(
            output.status.success(),
            "{program} {}: {}",
            file.display(),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let usage = output("cuobjdump", &["--dump-resource-usage"])?;
    let field = |name: &str| -> Result<u32> {
        let place = usage
            .find(name)
            .with_context(|| format!("{}: no {name} in {usage}", file.display()))?;
        let digits = usage[place + name.len()..].split(|c: char| !c.is_ascii_digit());
        Ok(digits.take(1).collect::<String>().parse()?)
    };
    let sass = output("nvdisasm", &["-c", "-ndf"])?;
    let instructions: Vec<&str> = sass.lines().filter_map(instruction).collect();
    let is_local = |text: &&&str| {
        let mut words = text.split_whitespace();
        words.any(|word| word.starts_with("LDL") || word.starts_with("STL"))
    };
    Ok(Cost {
        registers: field("REG:")?,
        stack: field("STACK:")?,
        local: instructions.iter().filter(is_local).count() as u32,
        // The code is padded, and ends in a branch to itself.
        instructions: instructions
            .iter()
            .filter(|text| !text.starts_with("NOP"))
            .count() as u32,
    })
}

/// The instruction of a line of disassembly, `/*0040*/ IADD3 R1, ... ;`.
fn instruction(line: &str) -> Option<&str> {
    let (address, text) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let is_address = !address.is_empty() && address.bytes().all(|byte| byte.is_ascii_hexdigit());
    let text = text.trim();
    (is_address && text.contains(';')).then_some(text)
}

/// `table` with parts of its names replaced.
fn renamed(table: Table, pairs: &[String]) -> Result<Table> {
    let mut pairs_read = Vec::new();
    for pair in pairs {
        pairs_read.push(
            pair.split_once('=')
                .with_context(|| format!("{pair}: no `=`"))?,
        );
    }
    let rename = |name: String| {
        pairs_read
            .iter()
            .fold(name, |name, (old, new)| name.replace(old, new))
    };
    Ok(table
        .into_iter()
        .map(|(name, cost)| (rename(name), cost))
        .collect())
}

/// Prints what differs; whether nothing got worse.
fn compare(before: &Table, after: &Table) -> ExitCode {
    let (mut equal, mut worse) = (0, 0);
    println!(
        "{:<64} {:>12} {:>10} {:>10} {:>16}",
        "kernel", "registers", "stack", "local", "instructions"
    );
    for (name, new) in after {
        let Some(old) = before.get(name) else {
            println!("{name:<64} not in the table before");
            continue;
        };
        if old == new {
            equal += 1;
            continue;
        }
        let is_worse = new.registers > old.registers
            || new.stack > old.stack
            || new.local > old.local
            || 100 * new.instructions > 101 * old.instructions;
        worse += u32::from(is_worse);
        let change = |old: u32, new: u32| format!("{old} -> {new}");
        println!(
            "{name:<64} {:>12} {:>10} {:>10} {:>16}{}",
            change(old.registers, new.registers),
            change(old.stack, new.stack),
            change(old.local, new.local),
            change(old.instructions, new.instructions),
            if is_worse { "  worse" } else { "" }
        );
    }
    for name in before.keys().filter(|name| !after.contains_key(*name)) {
        println!("{name:<64} only in the table before");
    }
    let sum = |table: &Table| -> u64 {
        table
            .values()
            .map(|cost| u64::from(cost.instructions))
            .sum()
    };
    println!(
        "{} kernels before ({} instructions), {} after ({}): {equal} equal, {worse} worse",
        before.len(),
        sum(before),
        after.len(),
        sum(after)
    );
    if worse == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_a_disassembly() {
        let lines = [
            "        /*0000*/                   LDC R1, c[0x0][0x28] ;",
            "        /*0010*/              @!P0 STL [R1], R4 ;",
            ".L_x_1:",
            "\t.section\t.text.kernel,\"ax\",@progbits",
            "        /* 0x0000000000007918 */",
        ];
        let found: Vec<&str> = lines.iter().filter_map(|line| instruction(line)).collect();
        assert_eq!(found, ["LDC R1, c[0x0][0x28] ;", "@!P0 STL [R1], R4 ;"]);
    }

    #[test]
    fn names_before_are_read_as_names_after() {
        let cost = Cost {
            registers: 1,
            stack: 0,
            local: 0,
            instructions: 8,
        };
        let table = Table::from([("sm90-Dense-sm_90a".to_owned(), cost)]);
        let table = renamed(table, &["Dense=None".to_owned()]).unwrap();
        assert_eq!(table.keys().collect::<Vec<_>>(), ["sm90-None-sm_90a"]);
    }
}
