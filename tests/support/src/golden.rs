//! Golden checkpoints of `tests/data/hf`, whose README describes their origin.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Folders without a tokenizer, and the folder that has the same one.
const TOKENIZERS: [(&str, &str); 11] = [
    ("deepseek3-tiny", "llama3-tiny"),
    ("deepseek3-tiny-fp8", "llama3-tiny"),
    ("gemma2-tiny", "llama3-tiny"),
    ("gemma3-tiny", "llama3-tiny"),
    ("gptoss-tiny", "qwen3-tiny"),
    ("gptoss-tiny-mxfp4", "qwen3-tiny"),
    ("llama3-tiny-ct-mixed", "llama3-tiny"),
    ("llama3-tiny-modelopt-mixed", "llama3-tiny"),
    ("mixtral-tiny", "llama3-tiny"),
    ("qwen2-tiny", "qwen3-tiny"),
    ("qwen3moe-tiny", "qwen3-tiny"),
];

/// Returns the path of `name` in the folder of golden checkpoints.
///
/// # Panics
/// If there is no such file or folder: every checkout has all of them.
pub fn golden(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .with_file_name("data/hf")
        .join(name);
    assert!(path.exists(), "no golden checkpoint {}", path.display());
    path
}

/// Returns a copy of the golden checkpoint `name` with its tokenizer. The repository stores each
/// tokenizer once, so some checkpoints lack theirs.
///
/// # Panics
/// If there is no such checkpoint, it has no tokenizer, or it cannot be copied.
pub fn golden_with_tokenizer(name: &str) -> Scratch {
    let copy = Scratch::new(name);
    let copied = |from: &str, chosen: fn(&str) -> bool| {
        for entry in fs::read_dir(golden(from)).unwrap() {
            let entry = entry.unwrap();
            let file = entry.file_name();
            if chosen(file.to_str().unwrap()) {
                fs::copy(entry.path(), copy.join(file)).unwrap();
            }
        }
    };
    copied(name, |_| true);
    if let Some((_, other)) = TOKENIZERS.iter().find(|(model, _)| *model == name) {
        copied(other, |file| file.starts_with("tokenizer"));
    }
    assert!(copy.join("tokenizer.json").exists(), "{name}");
    copy
}

/// Empty folder for one test, removed when dropped.
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes a folder whose name has `test` in it.
    ///
    /// # Panics
    /// If the folder cannot be made.
    pub fn new(test: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("nvfp4-{test}-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl std::ops::Deref for Scratch {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
