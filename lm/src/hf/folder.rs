//! Checks that a folder of a model, or of adapters, exists.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};

use super::CONFIG_FILE;

/// File that PEFT writes. transformers adds the adapters that it describes to a model on loading.
pub(crate) const ADAPTER_FILE: &str = "adapter_config.json";
/// File of the run in the folder of a finetuning.
pub(crate) const FINETUNING: &str = "finetune.json";
/// Subfolder of an unfinished quantization.
pub(crate) const UNFINISHED: &str = ".nvfp4_quantize";

/// Checks that a folder of a model exists, and is not that of a finetuning, whose models are in its
/// subfolders, of adapters, or of a quantization that is not finished.
///
/// # Errors
/// Returns an error if it is not so; the error names the folder or the command to use instead.
pub(crate) fn check_folder(folder: &Path) -> Result<()> {
    check_exists(folder)?;
    if folder.join(CONFIG_FILE).exists() {
        return Ok(());
    }
    let shown = folder.display();
    ensure!(
        !folder.join(ADAPTER_FILE).exists(),
        "{shown} holds adapters, not a model: {}",
        use_of_adapters(folder)
    );
    ensure!(
        !folder.join(FINETUNING).exists(),
        "{shown} is the folder of a finetuning, {}",
        match (
            written(folder, &["model", "nvfp4"]),
            written(folder, &["adapter"])
        ) {
            (Some(model), _) => format!("which has written {}: give this folder", model.display()),
            (None, Some(adapter)) =>
                format!("which has written adapters: {}", use_of_adapters(&adapter)),
            (None, None) => "which has written no model yet".into(),
        }
    );
    ensure!(
        !folder.join(UNFINISHED).exists(),
        "{shown} holds a quantization that is not finished: `nvfp4 quantize` with --resume \
         continues it"
    );
    Ok(())
}

/// Checks that a folder of adapters exists, and is not that of a finetuning, whose adapters are in
/// a subfolder.
///
/// # Errors
/// Returns an error if it is not so; the error names the folder to use instead.
pub(crate) fn check_adapter_folder(folder: &Path) -> Result<()> {
    check_exists(folder)?;
    ensure!(
        folder.join(ADAPTER_FILE).exists() || !folder.join(FINETUNING).exists(),
        "{} is the folder of a finetuning, {}",
        folder.display(),
        match written(folder, &["adapter"]) {
            Some(adapter) => format!("which has written {}: give this folder", adapter.display()),
            None => "which has written no adapters".into(),
        }
    );
    Ok(())
}

/// Returns an error if there is no such folder. A path such as `Qwen/Qwen3-0.6B` may be the name of
/// a repository, so the error then names the command that downloads it.
fn check_exists(folder: &Path) -> Result<()> {
    let shown = folder.display();
    ensure!(
        folder.exists() || !is_repository(folder),
        "there is no folder {shown}; a model of this name on Hugging Face is downloaded by \
         `hf download {shown} --local-dir {}`",
        folder.file_name().unwrap_or_default().display()
    );
    if !folder.is_dir() {
        bail!("there is no folder {shown}");
    }
    Ok(())
}

/// Returns true if `path` has the form `owner/name` of a repository, and `owner` is no folder.
fn is_repository(path: &Path) -> bool {
    let is_name = |part: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && !part.starts_with('.') && part.chars().all(is_plain)
    };
    let parts = path.to_str().and_then(|path| path.split_once('/'));
    parts.is_some_and(|(owner, name)| is_name(owner) && is_name(name) && !Path::new(owner).is_dir())
}

/// Returns the first of the subfolders `names` that the finetuning in `folder` has written, if any.
fn written(folder: &Path, names: &[&str]) -> Option<PathBuf> {
    let mut paths = names.iter().map(|name| folder.join(name));
    paths.find(|path| path.exists())
}

/// Says how a command that reads a model reads the adapters in `folder`.
fn use_of_adapters(folder: &Path) -> String {
    let shown = folder.display();
    format!(
        "`nvfp4 merge MODEL {shown} --out DIR` writes their model, where MODEL is the folder that \
         they were trained beside; `nvfp4 generate MODEL` and `nvfp4 eval MODEL` take --adapter \
         {shown}"
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nvfp4_test_support::Scratch;

    use super::*;

    #[test]
    fn only_names_of_repositories_are_downloaded() {
        let of_path = |path: &str| check_folder(Path::new(path)).unwrap_err().to_string();
        assert_eq!(
            of_path("Qwen/Qwen3-0.6B"),
            "there is no folder Qwen/Qwen3-0.6B; a model of this name on Hugging Face is downloaded \
             by `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"
        );
        // `src` is a folder here: a model in it is none of a repository.
        for path in [
            "none",
            "/none",
            "/none/model",
            "./a/b",
            "../b",
            "./b",
            "~/b",
            ".a/b",
            "a/b/c",
            "a/",
            "a//b",
            "a b/c",
            "src/none",
        ] {
            assert_eq!(of_path(path), format!("there is no folder {path}"));
        }
    }

    #[test]
    fn folders_of_other_kinds_name_the_one_to_give() {
        let folder = Scratch::new("folder-kinds");
        let run = folder.join("run");
        let adapter = run.join("adapter");
        fs::create_dir_all(&run).unwrap();
        fs::write(run.join(FINETUNING), "{}").unwrap();
        let model = |folder: &Path| check_folder(folder).unwrap_err().to_string();
        let adapters = |folder: &Path| check_adapter_folder(folder).unwrap_err().to_string();
        assert!(model(&run).ends_with("no model yet"), "{}", model(&run));
        assert!(adapters(&run).ends_with("written no adapters"));

        fs::create_dir_all(&adapter).unwrap();
        fs::write(adapter.join(ADAPTER_FILE), "{}").unwrap();
        for folder in [&run, &adapter] {
            let error = model(folder);
            let merge = format!("`nvfp4 merge MODEL {} --out DIR`", adapter.display());
            assert!(error.contains(&merge), "{error}");
        }
        // Adapters are given, even if the run has written a model, too.
        fs::create_dir_all(run.join("model")).unwrap();
        let give =
            |name: &str| format!("has written {}: give this folder", run.join(name).display());
        assert!(
            adapters(&run).ends_with(&give("adapter")),
            "{}",
            adapters(&run)
        );
        assert!(model(&run).ends_with(&give("model")), "{}", model(&run));
        check_adapter_folder(&adapter).unwrap();
    }
}
