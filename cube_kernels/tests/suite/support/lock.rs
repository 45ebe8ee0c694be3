//! Lock files of machine code. For each instance of the registry and each architecture they contain
//! the hash of its CUDA source and the registers, stack bytes and instructions of its machine code.
//!
//! A run compiles only the instances whose source changed. It generates the sources only if one of
//! their [`inputs`] changed, otherwise a sample. `tests/machine_code/` has one file per target;
//! `cargo xtask machine-code` writes them.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{self, Write},
    fs,
    hash::Hasher,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use fnv::FnvHasher;

/// Environment variable that makes the source tests write the lock files.
const WRITE: &str = "NVFP4_LOCK";

/// One of this many instances is generated and compiled even if no input changed, to detect a lock
/// file of another compiler, and an input that [`inputs`] does not know.
pub const SAMPLE: u64 = 64;

/// Files and folders that decide the sources and their checks, in the workspace.
const INPUTS: [&str; 7] = [
    "Cargo.lock",
    "cube_kernels/Cargo.toml",
    "cube_kernels/src",
    "cube_kernels/tests/suite/gemm_source.rs",
    "cube_kernels/tests/suite/registry_source.rs",
    "cube_kernels/tests/suite/support",
    "formats/src",
];

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
    /// [`inputs`] of the run that wrote it.
    inputs: Option<u64>,
    /// Entries by the name of the instance.
    pub entries: BTreeMap<String, Locked>,
}

impl Lock {
    /// Reads the file of `target`; returns an empty one if it does not exist.
    pub fn read(target: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/machine_code");
        let path = folder.join(format!("{target}.tsv"));
        let text = fs::read_to_string(&path).unwrap_or_default();
        let (_, inputs) = text
            .lines()
            .next()
            .unwrap_or_default()
            .rsplit_once('\t')
            .unzip();
        let entries = text.lines().skip(1).map(|line| {
            entry(line).unwrap_or_else(|| panic!("{}: not an entry: {line}", path.display()))
        });
        Self {
            inputs: inputs.and_then(|inputs| u64::from_str_radix(inputs, 16).ok()),
            entries: entries.collect(),
            path,
        }
    }

    /// True if no input changed since the file was written.
    pub fn is_of_these_inputs(&self) -> bool {
        self.inputs == Some(inputs())
    }

    /// Writes the file.
    pub fn write(&self) {
        let mut text = format!(
            "instance\tsource\tregisters\tstack\tinstructions\t{:016x}\n",
            inputs()
        );
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
    let mut hash = FnvHasher::default();
    hash.write(normalized(source).as_bytes());
    hash.finish()
}

/// Returns the FNV-1a hash of the names and contents of all files in [`INPUTS`].
pub fn inputs() -> u64 {
    static HASH: LazyLock<u64> = LazyLock::new(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut hash = FnvHasher::default();
        for path in INPUTS {
            tree(&mut hash, root, Path::new(path));
        }
        hash.finish()
    });
    *HASH
}

/// Continues `hash` over the file `path` in `root`, or over all files of a folder.
fn tree(hash: &mut FnvHasher, root: &Path, path: &Path) {
    let full = root.join(path);
    if full.is_dir() {
        let entries = fs::read_dir(&full).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        for name in names {
            tree(hash, root, &path.join(name));
        }
        return;
    }
    let contents = fs::read(&full).unwrap_or_else(|error| panic!("{}: {error}", full.display()));
    hash.write(path.to_str().unwrap().as_bytes());
    hash.write(&contents);
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

#[test]
fn inputs_are_names_and_contents() {
    let root = nvfp4_test_support::Scratch::new("lock-inputs");
    let of = |files: [(&str, &str); 2]| {
        let _ = fs::remove_dir_all(root.join("src"));
        fs::create_dir_all(root.join("src/deep")).unwrap();
        for (name, text) in files {
            fs::write(root.join(name), text).unwrap();
        }
        let mut hash = FnvHasher::default();
        tree(&mut hash, &root, Path::new("src"));
        hash.finish()
    };
    let one = of([("src/a.rs", "a"), ("src/deep/b.rs", "b")]);
    assert_eq!(one, of([("src/deep/b.rs", "b"), ("src/a.rs", "a")]));
    assert_ne!(one, of([("src/a.rs", "a"), ("src/deep/b.rs", "c")]));
    assert_ne!(one, of([("src/a.rs", "a"), ("src/deep/c.rs", "b")]));
}
