//! Distributes the files for a GPU machine to folders that are small enough for one upload each.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::programs::recreate;
use crate::workspace;

/// Script that runs on the GPU machine.
const SCRIPT: &str = include_str!("../../ladder/run.py");
/// File name of the script.
pub const SCRIPT_FILE: &str = "run.py";
/// Folder with only the script and the queue, for the commands after the last upload.
pub const QUEUE_FOLDER: &str = "queue";
/// Space reserved for the script and the queue in each folder.
const RESERVE: u64 = 1 << 20;

/// Distributes `files` in order to folders 1, 2, .. of `out` with at most `limit` bytes each, and
/// adds the script and `queue` to each. Another folder has only these two. Returns the folders.
///
/// # Errors
/// Returns an error if a file exceeds the limit of a folder, or writing fails.
pub fn folders(files: &[PathBuf], queue: &[Value], limit: u64, out: &Path) -> Result<Vec<PathBuf>> {
    let mut parts: Vec<(u64, Vec<&PathBuf>)> = Vec::new();
    for file in files {
        let size = fs::metadata(file)
            .with_context(|| file.display().to_string())?
            .len();
        ensure!(
            size + RESERVE <= limit,
            "{} has {size} bytes, but a folder may have {limit}: raise --limit",
            file.display()
        );
        match parts.last_mut() {
            Some((used, part)) if *used + size + RESERVE <= limit => {
                *used += size;
                part.push(file);
            }
            _ => parts.push((size, vec![file])),
        }
    }
    for old in 1.. {
        let old = out.join(old.to_string());
        if !old.exists() {
            break;
        }
        fs::remove_dir_all(&old)?;
    }
    let mut made = Vec::new();
    for (index, (_, part)) in parts.iter().enumerate() {
        made.push(folder(&out.join((index + 1).to_string()), part, queue)?);
    }
    made.push(folder(&out.join(QUEUE_FOLDER), &[], queue)?);
    Ok(made)
}

fn folder(path: &Path, files: &[&PathBuf], queue: &[Value]) -> Result<PathBuf> {
    recreate(path)?;
    let mut hashes = BTreeMap::new();
    for file in files {
        let name = file.file_name().context("a file has a name")?;
        let copy = path.join(name);
        fs::copy(file, &copy).with_context(|| copy.display().to_string())?;
        hashes.insert(name.to_string_lossy().into_owned(), sha256(&copy)?);
    }
    fs::write(path.join(SCRIPT_FILE), SCRIPT)?;
    write_json(&path.join("queue.json"), &json!(queue))?;
    write_json(&path.join("part.json"), &json!({"files": hashes}))?;
    Ok(path.to_owned())
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    fs::write(path, text).with_context(|| path.display().to_string())
}

fn sha256(path: &Path) -> Result<String> {
    let output = workspace::output(Command::new("sha256sum").arg(path))?;
    let text = String::from_utf8(output)?;
    let hash = text.split_whitespace().next().unwrap_or_default();
    ensure!(hash.len() == 64, "sha256sum printed {text:?}");
    Ok(hash.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_filled_in_order() {
        let out = std::env::temp_dir().join(format!("nvfp4-ladder-pack-{}", std::process::id()));
        recreate(&out).unwrap();
        let file = |name: &str, bytes: usize| {
            let path = out.join(name);
            fs::write(&path, vec![7; bytes]).unwrap();
            path
        };
        let mib = 1 << 20;
        let files = [
            file("a", mib),
            file("b", mib),
            file("c", 2 * mib),
            file("d", 10),
        ];
        let queue = [json!({"name": "x"})];
        let made = folders(&files, &queue, 3 << 20, &out).unwrap();
        let names = |at: usize| {
            let part: Value =
                serde_json::from_slice(&fs::read(made[at].join("part.json")).unwrap()).unwrap();
            let files = part["files"].as_object().unwrap().clone();
            files.keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(made.len(), 4);
        assert_eq!(names(0), ["a", "b"]);
        assert_eq!(names(1), ["c"]);
        assert_eq!(names(2), ["d"]);
        assert!(names(3).is_empty());
        assert!(made[3].join(SCRIPT_FILE).exists() && made[3].join("queue.json").exists());
        // A second packing leaves no folder of the first.
        let fewer = folders(&files[..1], &queue, 3 << 20, &out).unwrap();
        assert_eq!(fewer.len(), 2);
        assert!(!out.join("2").exists() && !out.join("3").exists());
        let error = folders(&files, &queue, 2 << 20, &out)
            .unwrap_err()
            .to_string();
        assert!(error.contains("--limit"), "{error}");
        fs::remove_dir_all(&out).unwrap();
    }
}
