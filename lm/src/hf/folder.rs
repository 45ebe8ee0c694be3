//! Checks that a folder of a model exists.

use std::path::{Component, Path};

use anyhow::{Result, bail, ensure};

use super::CONFIG_FILE;

/// File of the run in the folder of a finetuning.
pub(crate) const FINETUNING: &str = "finetune.json";
/// Subfolder of an unfinished quantization.
pub(crate) const UNFINISHED: &str = ".nvfp4_quantize";

/// Checks that a folder of a model exists, and is not that of a finetuning, whose models are in its
/// subfolders, or of a quantization that is not finished.
///
/// # Errors
/// Returns an error if it is not so. A path such as `Qwen/Qwen3-0.6B` may be the name of a
/// repository, so the error then names the command that downloads it.
pub(crate) fn check_folder(folder: &Path) -> Result<()> {
    let shown = folder.display();
    if folder.is_dir() {
        ensure!(
            folder.join(CONFIG_FILE).exists() || !folder.join(FINETUNING).exists(),
            "{shown} is the folder of a finetuning, {}",
            written(folder)
        );
        ensure!(
            folder.join(CONFIG_FILE).exists() || !folder.join(UNFINISHED).exists(),
            "{shown} holds a quantization that is not finished: `nvfp4 quantize` with --resume \
             continues it"
        );
        return Ok(());
    }
    let parts: Vec<_> = folder.components().collect();
    if let [Component::Normal(_), Component::Normal(name)] = parts[..] {
        bail!(
            "there is no folder {shown}; a model of this name on Hugging Face is downloaded by \
             `hf download {shown} --local-dir {}`",
            name.display()
        );
    }
    bail!("there is no folder {shown}")
}

/// Says which models the finetuning in `folder` has written.
fn written(folder: &Path) -> String {
    let existing = |name: &str| Some(folder.join(name)).filter(|path| path.exists());
    match (existing("model").or(existing("nvfp4")), existing("adapter")) {
        (Some(model), _) => format!("which has written {}: give this folder", model.display()),
        (None, Some(adapter)) => format!(
            "which has written adapters: give the model that they were trained beside, and \
             --adapter {}",
            adapter.display()
        ),
        (None, None) => "which has written no model yet".into(),
    }
}
