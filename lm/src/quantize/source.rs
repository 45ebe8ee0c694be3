//! Opens an unquantized model, and plans its quantization.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};

use super::options::QuantizeOptions;
use super::plan::Plan;
use crate::checkpoint::read_json;
use crate::decoder::fused::open_tensors;
use crate::decoder::load::check_tensors;
use crate::decoder::names::is_extra;
use crate::hf::config::{CONFIG_FILE, refuse_packed};
use crate::hf::folder::check_folder;
use crate::hf::tensors::check_each;
use crate::hf::{DecoderConfig, StoredTensor, TensorFolder};
use crate::interchange::checkpoint::HF_QUANT_CONFIG;

/// An unquantized model, with the plan of its quantization.
pub(super) struct Source {
    pub config: DecoderConfig,
    /// Contents of the model's config.json.
    pub json: Map<String, Value>,
    pub tensors: TensorFolder,
    pub plan: Plan,
}

impl Source {
    /// Opens the model in the folder `model`.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, the architecture is unknown, tensors are missing,
    /// unknown or of another shape than the configuration states, or if an expression of the options
    /// matches nothing.
    pub fn open(model: &Path, options: &QuantizeOptions) -> Result<Self> {
        check_folder(model)?;
        let mut json = read_config(model)?;
        let path = || model.display().to_string();
        let config = DecoderConfig::from_json(&json);
        let config = config.with_context(|| model.join(CONFIG_FILE).display().to_string())?;
        let tensors = open_tensors(model, &config)?.with_fp8_scales(&json);
        let mut tensors = tensors.with_context(path)?;
        if config.extra_layers > 0 {
            // No reader of the quantized model uses these layers without their own quantization.
            tensors.retain(|name| !is_extra(&config, name));
            json.insert("num_nextn_predict_layers".into(), 0.into());
        }
        let plan = Plan::new(&tensors, &options.exclude, &options.fp8)?;
        check_tensors(&config, &tensors).with_context(path)?;
        Ok(Self {
            config,
            json,
            tensors,
            plan,
        })
    }
}

/// Reads config.json of an unquantized model.
fn read_config(model: &Path) -> Result<Map<String, Value>> {
    let path = model.join(CONFIG_FILE);
    let json = read_json(&path)?;
    refuse_packed(&json).with_context(|| path.display().to_string())?;
    let other = model.join(HF_QUANT_CONFIG);
    ensure!(
        !other.exists(),
        "{}: the model is quantized already",
        other.display()
    );
    Ok(json)
}

/// Returns an error unless all values are finite, including copied ones.
pub(super) fn check_values(tensors: &TensorFolder) -> Result<()> {
    let tensors: Vec<StoredTensor<'_>> = tensors.iter().collect();
    // Reports the first error by name, regardless of the order of discovery.
    check_each(&tensors).into_iter().collect()
}
