//! LoRA adapters of commands that read a model.

use std::fs;
use std::path::Path;

use anyhow::Result;
use nvfp4_lm::decoder::{AdapterFolder, Decoder};

use crate::terminal::note;

/// Applies the adapters of the folder `adapter`, if there is one, to `model`, which was loaded from
/// the folder `base`.
///
/// # Errors
/// Returns an error if the folder cannot be read, or if the adapters do not fit the model.
pub(crate) fn applied(model: Decoder, base: &Path, adapter: Option<&Path>) -> Result<Decoder> {
    match adapter {
        Some(folder) => model.with_adapter(&read(folder, base)?),
        None => Ok(model),
    }
}

/// Reads the adapters in `folder`, and says so if they were trained beside another model than that
/// in the folder `base`.
///
/// # Errors
/// Returns an error if the folder cannot be read.
pub(crate) fn read(folder: &Path, base: &Path) -> Result<AdapterFolder> {
    let adapter = AdapterFolder::read(folder)?;
    if let Some(own) = adapter.base() {
        let names = [Path::new(own), base].map(|it| it.file_name().map(ToOwned::to_owned));
        let is_same = match fs::canonicalize(own) {
            Ok(own) => Some(own) == fs::canonicalize(base).ok(),
            // The name of a repository: its folder is usually called like its end.
            Err(_) => names[0] == names[1],
        };
        if !is_same {
            let (folder, base) = (folder.display(), base.display());
            note!("note: adapter {folder} was trained beside {own}, not {base}");
        }
    }
    Ok(adapter)
}
