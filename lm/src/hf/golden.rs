//! The golden checkpoints, which are outside of the repository.

use std::path::{Path, PathBuf};

/// The folder `name` of `shared/golden/hf`, in the closest folder around this package that has
/// one.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|folder| folder.join("shared/golden/hf").join(name))
        .find(|path| path.exists())
}

/// The folder `name` of the golden checkpoints; where it is absent, leave the test with the line
/// that `cargo xtask test` counts a skipped test by.
macro_rules! golden {
    ($name:expr) => {
        match $crate::hf::golden::find($name) {
            Some(path) => path,
            None => {
                fn here() {}
                let path = std::any::type_name_of_val(&here).trim_end_matches("::here");
                let test = path.split_once("::").map_or(path, |(_, test)| test);
                println!("SKIPPED: {test}: no folder shared/golden/hf/{}", $name);
                return;
            }
        }
    };
}
pub(crate) use golden;

/// An empty folder for one test, removed when dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub fn new(test: &str) -> Self {
        let name = format!("nvfp4-lm-{test}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
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
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
