//! `cargo xtask machine-code`: writes the lock files of the kernels' machine code, without a GPU.
//!
//! `cube_kernels/tests/machine_code/TARGET.tsv` records for each kernel instance the hash of its
//! CUDA source, and the registers, stack bytes and instructions of NVRTC's machine code. The source
//! tests (`registry_source`) fail if a source differs from its lock file. This command compiles the
//! changed instances, checks their machine code, writes the files, and prints the differences.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};

use crate::workspace::FEATURES;
use crate::{setup, workspace};

/// Options of `cargo xtask machine-code`.
#[derive(clap::Args)]
pub struct Args {
    /// Process only kernels whose name contains this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Compile every instance, even if its source did not change
    #[arg(long)]
    all: bool,
    /// Write source (.cu) and machine code (.cubin) of the compiled instances to this folder
    #[arg(long, value_name = "FOLDER")]
    dump: Option<PathBuf>,
}

/// Registers, stack bytes and instructions of an instance.
type Cost = [u32; 3];

/// Costs by target and instance.
type Table = BTreeMap<String, Cost>;

/// Writes the lock files and prints the changes. Fails if a check of the machine code fails, or if
/// an instance takes more registers or stack, or over 1 % more instructions.
pub fn run(args: &Args) -> Result<ExitCode> {
    setup::run(&setup::Args::default())?;
    let folder = workspace::root().join("cube_kernels/tests/machine_code");
    let before = read(&folder)?;
    let mut command = workspace::cargo();
    command
        .args(["test", "--package", "nvfp4-kernels", "--features", FEATURES])
        .args(["--test", "suite", "--", "registry_source::sm_"])
        .args(["--test-threads", "1"])
        .env("NVFP4_LOCK", "1");
    if args.all {
        command.env("NVFP4_TEST_FULL", "1");
    }
    if let Some(only) = &args.only {
        command.env("NVFP4_ONLY", only);
    }
    if let Some(dump) = &args.dump {
        fs::create_dir_all(dump).with_context(|| format!("cannot make {}", dump.display()))?;
        command.env("NVFP4_DUMP", dump.canonicalize()?);
    }
    workspace::spawn(&mut command)?;
    let after = read(&folder)?;
    ensure!(!after.is_empty(), "no lock file in {}", folder.display());
    let worse = compare(&before, &after);
    Ok(if worse == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Reads the costs in all lock files.
fn read(folder: &Path) -> Result<Table> {
    let mut table = Table::new();
    if !folder.exists() {
        return Ok(table);
    }
    for entry in fs::read_dir(folder)? {
        let file = entry?.path();
        let target = file.file_stem().unwrap_or_default().to_string_lossy();
        let text = fs::read_to_string(&file)?;
        for line in text.lines().skip(1) {
            let (name, cost) = cost(line).with_context(|| format!("{}: {line}", file.display()))?;
            table.insert(format!("{name} {target}"), cost);
        }
    }
    Ok(table)
}

/// Parses name and cost of a line in a lock file: name, hash, registers, stack, instructions.
fn cost(line: &str) -> Result<(&str, Cost)> {
    let fields: Vec<&str> = line.split('\t').collect();
    ensure!(fields.len() == 5, "not five columns");
    let mut cost = [0; 3];
    for (number, field) in cost.iter_mut().zip(&fields[2..]) {
        *number = field.parse()?;
    }
    Ok((fields[0], cost))
}

/// Prints the instances that differ; returns the number of those that got worse.
fn compare(before: &Table, after: &Table) -> usize {
    println!(
        "{:<80} {:>12} {:>10} {:>16}",
        "kernel", "registers", "stack", "instructions"
    );
    let (mut equal, mut worse) = (0, 0);
    for (name, new) in after {
        let Some(old) = before.get(name) else {
            let [registers, stack, instructions] = new;
            println!("{name:<80} {registers:>12} {stack:>10} {instructions:>16}  new");
            continue;
        };
        if old == new {
            equal += 1;
            continue;
        }
        let is_worse = is_worse(*old, *new);
        worse += usize::from(is_worse);
        let [registers, stack, instructions] =
            [0, 1, 2].map(|i| format!("{} -> {}", old[i], new[i]));
        println!(
            "{name:<80} {registers:>12} {stack:>10} {instructions:>16}{}",
            if is_worse { "  worse" } else { "" }
        );
    }
    for name in before.keys().filter(|name| !after.contains_key(*name)) {
        println!("{name:<80} gone");
    }
    println!(
        "{} instances before, {} after: {equal} equal, {worse} worse",
        before.len(),
        after.len()
    );
    worse
}

/// Returns true if the machine code takes more registers or stack, or over 1 % more instructions.
fn is_worse(old: Cost, new: Cost) -> bool {
    new[0] > old[0] || new[1] > old[1] || 100 * new[2] > 101 * old[2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_lock_file() {
        let line = "a_kernel-Bf16-[K, Mn]\t00ff00ff00ff00ff\t32\t16\t1024";
        assert_eq!(
            cost(line).unwrap(),
            ("a_kernel-Bf16-[K, Mn]", [32, 16, 1024])
        );
        assert!(cost("a_kernel\t32\t16\t1024").is_err());
        assert!(cost("a_kernel\tff\tx\t16\t1024").is_err());
    }

    #[test]
    fn more_of_anything_is_worse() {
        let old = [32, 0, 1000];
        for (new, expected) in [
            ([32, 0, 1000], false),
            ([31, 0, 1010], false),
            ([33, 0, 900], true),
            ([32, 8, 1000], true),
            ([32, 0, 1011], true),
        ] {
            assert_eq!(is_worse(old, new), expected, "{new:?}");
        }
    }
}
