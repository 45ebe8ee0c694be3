//! Lock files of machine code. For each instance of the registry and each architecture they contain
//! the hash of its CUDA source and the registers, stack bytes and instructions of its machine code.
//!
//! A run compiles only the instances whose source changed. `tests/machine_code/` has one file per
//! target; `cargo xtask machine-code` writes them.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{self, Write},
    fs,
    path::PathBuf,
};

/// Environment variable that makes the source tests write the lock files.
const WRITE: &str = "NVFP4_LOCK";

/// One of this many instances is compiled even if its source did not change, to detect a lock file
/// of another compiler.
pub const SAMPLE: u64 = 64;

/// Resources of the machine code of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Registers per thread.
    pub registers: usize,
    /// Stack bytes per thread: spilled registers, and arrays with run-time indices.
    pub stack: usize,
    /// Number of instructions, without padding.
    pub instructions: usize,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            registers,
            stack,
            instructions,
        } = self;
        write!(
            f,
            "{registers} registers, {stack} bytes of stack, {instructions} instructions"
        )
    }
}

/// An instance in a lock file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked {
    /// [`hash`] of its source.
    pub hash: u64,
    /// Cost of its machine code.
    pub cost: Cost,
}

/// The lock file of one target.
pub struct Lock {
    path: PathBuf,
    /// Entries by the name of the instance.
    pub entries: BTreeMap<String, Locked>,
}

impl Lock {
    /// Reads the file of `target`; returns an empty one if it does not exist.
    pub fn read(target: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/machine_code");
        let path = folder.join(format!("{target}.tsv"));
        let text = fs::read_to_string(&path).unwrap_or_default();
        let entries = text.lines().skip(1).map(|line| {
            entry(line).unwrap_or_else(|| panic!("{}: not an entry: {line}", path.display()))
        });
        Self {
            entries: entries.collect(),
            path,
        }
    }

    /// Writes the file.
    pub fn write(&self) {
        let mut text = String::from("instance\tsource\tregisters\tstack\tinstructions\n");
        for (name, Locked { hash, cost }) in &self.entries {
            let Cost {
                registers,
                stack,
                instructions,
            } = cost;
            writeln!(
                text,
                "{name}\t{hash:016x}\t{registers}\t{stack}\t{instructions}"
            )
            .unwrap();
        }
        fs::create_dir_all(self.path.parent().unwrap()).unwrap();
        fs::write(&self.path, text).unwrap();
    }
}

/// True if the run writes the lock files.
pub fn writes() -> bool {
    std::env::var_os(WRITE).is_some()
}

fn entry(line: &str) -> Option<(String, Locked)> {
    let mut fields = line.split('\t');
    let name = fields.next()?.to_owned();
    let hash = u64::from_str_radix(fields.next()?, 16).ok()?;
    let mut number = || fields.next()?.parse().ok();
    let cost = Cost {
        registers: number()?,
        stack: number()?,
        instructions: number()?,
    };
    Some((name, Locked { hash, cost }))
}

/// Returns the FNV-1a hash of a normalized source.
pub fn hash(source: &str) -> u64 {
    normalized(source)
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
}

/// Returns `source` with its variables (`v1`, `info_v2`) numbered by first appearance, and without
/// the hash at the end of the kernel's name. CubeCL numbers variables differently each time, and
/// the hash changes with types that the kernel does not use.
pub fn normalized(source: &str) -> String {
    let mut variables: HashMap<&str, usize> = HashMap::new();
    let mut out = String::with_capacity(source.len());
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let end = if is_part(first) {
            rest.find(|c| !is_part(c)).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        let (word, after) = rest.split_at(end);
        rest = after;
        let stem = word.trim_end_matches(|c: char| c.is_ascii_digit());
        let is_variable = stem.len() < word.len() && (stem == "v" || stem.ends_with("_v"));
        if is_variable {
            let next = variables.len();
            let number = *variables.entry(word).or_insert(next);
            write!(out, "{stem}{number}").unwrap();
        } else {
            out.push_str(without_hash(word));
        }
    }
    out
}

/// Returns the name of a kernel without its final eight-digit hash; other words are unchanged.
fn without_hash(word: &str) -> &str {
    match word.rsplit_once('_') {
        Some((name, hash))
            if name.contains("_kernel")
                && hash.len() == 8
                && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) =>
        {
            name
        }
        _ => word,
    }
}

/// Returns the number of instructions of a disassembly, without padding.
pub fn instructions(sass: &str) -> usize {
    let is_instruction = |line: &&str| {
        let text = line.trim_start().strip_prefix("/*");
        text.and_then(|text| text.split_once("*/"))
            .is_some_and(|(address, text)| {
                !address.is_empty()
                    && address.bytes().all(|byte| byte.is_ascii_hexdigit())
                    && text.contains(';')
                    && !text.trim_start().starts_with("NOP")
            })
    };
    sass.lines().filter(is_instruction).count()
}

#[test]
fn variables_are_numbered_by_appearance() {
    let source = "float v17 = x3[v9] + v17; a_kernel_f32_00aa11ee(e2m1_rn, u32, info_v16)";
    let other = "float v4 = x3[v11] + v4; a_kernel_f32_77bb0012(e2m1_rn, u32, info_v9)";
    assert_eq!(normalized(source), normalized(other));
    assert_eq!(hash(source), hash(other));
    for changed in [
        "float v17 = x3[v17] + v9; a_kernel_f32_00aa11ee(e2m1_rn, u32, info_v16)",
        "float v17 = x4[v9] + v17; a_kernel_f32_00aa11ee(e2m1_rn, u32, info_v16)",
        "float v17 = x3[v9] + v17; a_kernel_f64_00aa11ee(e2m1_rn, u32, info_v16)",
    ] {
        assert_ne!(hash(source), hash(changed), "{changed}");
    }
}

#[test]
fn instructions_without_padding() {
    let sass = "\
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 STL [R1], R4 ;
.L_x_1:
\t.section\t.text.kernel,\"ax\",@progbits
        /* 0x0000000000007918 */
        /*0020*/                   NOP;
";
    assert_eq!(instructions(sass), 2);
}
