//! Copies a quantized folder in the same dialect, or converts it to the other one.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;
use serde::Serialize;

use super::checkpoint::HF_QUANT_CONFIG;
use super::fp8::INPUT;
use super::names::canonical;
use super::{Checkpoint, Dialect, LayerFormat, QuantConfig};
use crate::checkpoint::write_json;
use crate::hf::config::CONFIG_FILE;
use crate::hf::{INDEX_FILE, NewFolder, TensorWriter, copy_file};

/// File in which `nvfp4 quantize` records how a folder was quantized. No reader of checkpoints uses
/// it.
pub const PROVENANCE: &str = "nvfp4_quantize.json";
/// Files that only describe how a folder was quantized; that of llm-compressor first.
pub const QUANTIZATION_RECORDS: [&str; 2] = ["recipe.yaml", PROVENANCE];

/// Summary of a conversion.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Conversion {
    /// Number of quantized layers.
    pub layers: usize,
    /// Number of global scales of weights and inputs.
    pub globals: usize,
    /// Number of global scales whose dequantization factor changed by one unit in the last place.
    pub moved: usize,
    /// Number of renamed layers (experts of Mixtral).
    pub renamed: usize,
}

/// Writes `from` to the folder `out` in the dialect `to`. `progress` receives the number of layers
/// written so far and the total.
///
/// Codes and block scales keep their bytes. In the same dialect everything else does too, including
/// names. In the other dialect, experts of Mixtral get their transformers names, and exclusions are
/// written as the names that they match. Companion files (tokenizer, chat template) are copied.
///
/// # Errors
/// Returns an error if `out` is not empty, or if a file cannot be written. When converting
/// ModelOpt's `NVFP4_AWQ` to the other dialect, returns an error that names a layer with a
/// `pre_quant_scale`.
pub fn convert(from: &Checkpoint, to: Dialect, out: &Path) -> Result<Conversion> {
    let config = from.config();
    let config = config.context("there is no quantization to convert")?;
    let same = config.dialect == to;
    if !same && let Some(module) = first_pre_quant(from) {
        bail!(
            "{module} multiplies its input by a scale for each feature (pre_quant_scale of \
             NVFP4_AWQ), which {} does not have, and which no other tensor can take over without \
             rounding its codes again: quantize the model for {0} with --smooth awq",
            to.name()
        );
    }
    for (module, layer) in from.fp8_layers() {
        let format = LayerFormat::Fp8(layer.format);
        ensure!(
            same || format.is_in(to),
            "{module} is {format}, for which {} has no name: it has FP8 per tensor with static \
             inputs (FP8), per channel with inputs per token (FP8_PER_CHANNEL_PER_TOKEN), and per \
             block of 128 x 128 without quantized inputs (fp8_pb_wo)",
            to.name()
        );
    }
    let new = NewFolder::create(out)?;
    let bytes = from
        .tensors()
        .iter()
        .map(|tensor| tensor.stored_bytes())
        .sum();
    let writer = TensorWriter::create(new.path(), TensorWriter::SHARD_BYTES)?;
    let mut writer = writer.with_progress(bytes);
    let is_converted = |name: &str| {
        let module = name.strip_suffix(".weight");
        !same && module.is_some_and(|module| from.fp8_layers().contains_key(module))
    };
    let copied = from.plain().iter().filter(|name| !is_converted(name));
    for name in copied {
        copy(from, name, &mut writer)?;
    }
    for (attention, scales) in from.kv_scales() {
        for (which, scale) in ['k', 'v'].into_iter().zip(scales) {
            let name = to.kv_scale(attention, which);
            match scale {
                // The same dialect keeps the type of the file: BF16 or F32.
                Some(_) if same => copy(from, &name, &mut writer)?,
                Some(scale) => {
                    let bytes = scale.to_le_bytes();
                    writer.add(&name, Dtype::F32, to.scalar_shape(), &bytes)?;
                }
                None => {}
            }
        }
    }
    let mut done = Conversion::default();
    for module in from.layers().keys() {
        let weight = from.weight(module)?;
        let name = if same {
            module.clone()
        } else {
            canonical(module)
        };
        done.moved += to.write(&mut writer, &name, &weight)? as usize;
        done.globals += 1 + usize::from(weight.input_global().is_some());
        done.renamed += usize::from(name != *module);
        done.layers += 1;
    }
    for (module, layer) in from.fp8_layers() {
        done.layers += 1;
        if same {
            if layer.input_scale.is_some() {
                copy(from, &format!("{module}.{INPUT}"), &mut writer)?;
            }
            continue;
        }
        let name = canonical(module);
        done.renamed += usize::from(name != *module);
        from.fp8_weight(module)?.write(&mut writer, to, &name)?;
    }
    writer.finish()?;
    let written = match same {
        true => config.clone(),
        false => {
            let formats = from.quantized().filter_map(|module| {
                let format = from.format(module)?;
                Some((canonical(module), format))
            });
            // A converted NVFP4_AWQ checkpoint has no such scale left.
            QuantConfig::of_layers(to, formats, from.unquantized(), config.kv_cache_fp8)
        }
    };
    let mut json = from.json().clone();
    // The tool's original description is kept, because it may have more fields than are parsed
    // here.
    if !same || json.get("quantization_config").is_none() {
        json["quantization_config"] = written.inline();
    }
    write_configs(new.path(), &json, &written)?;
    let described = from.folder().join(HF_QUANT_CONFIG);
    if same && described.exists() {
        copy_file(&described, &new.path().join(HF_QUANT_CONFIG))?;
    }
    copy_companions(from.folder(), new.path(), &[])?;
    new.finish()?;
    Ok(done)
}

/// Copies the tensor `name` and, if it is a weight in FP8, its scales.
fn copy(from: &Checkpoint, name: &str, writer: &mut TensorWriter) -> Result<()> {
    let tensor = from.tensors().get(name)?;
    let scales = from.tensors().scales_of(name);
    for tensor in [Some(tensor), scales].into_iter().flatten() {
        writer.add(tensor.name, tensor.dtype, tensor.shape, &tensor.bytes())?;
    }
    Ok(())
}

/// Returns a layer with input feature scales, if any.
fn first_pre_quant(from: &Checkpoint) -> Option<&str> {
    let mut layers = from.layers().iter();
    let (module, _) = layers.find(|(_, layer)| layer.pre_quant)?;
    Some(module)
}

/// Creates the folder `out`, or accepts an empty one.
///
/// # Errors
/// Returns an error if it is not empty.
pub fn create_empty(out: &Path) -> Result<()> {
    let name = || out.display().to_string();
    fs::create_dir_all(out).with_context(name)?;
    let is_empty = fs::read_dir(out).with_context(name)?.next().is_none();
    ensure!(
        is_empty,
        "out {} must be empty, but it is not: give a folder that is empty or absent",
        out.display()
    );
    Ok(())
}

/// Writes config.json with `json`, and the other file that `config` requires, if any.
///
/// # Errors
/// Returns an error if a file cannot be written.
pub fn write_configs(out: &Path, json: &impl Serialize, config: &QuantConfig) -> Result<()> {
    if let Some(file) = config.hf_quant_config() {
        write_json(&out.join(HF_QUANT_CONFIG), &file)?;
    }
    write_json(&out.join(CONFIG_FILE), json)
}

/// Endings of files with tensors, or with their names: of the old weights.
const TENSORS: [&str; 10] = [
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
    ".index.json",
];

/// Copies the files of `from` that are neither tensors nor rewritten: tokenizer, chat template,
/// generation_config.json, licence. Leaves out the files `without`.
///
/// # Errors
/// Returns an error if a file cannot be copied.
pub fn copy_companions(from: &Path, out: &Path, without: &[&str]) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let is_tensors = TENSORS.iter().any(|ending| name.ends_with(ending));
        let is_ours = [CONFIG_FILE, HF_QUANT_CONFIG, INDEX_FILE].contains(&name);
        let is_copied = !is_tensors && !is_ours && !without.contains(&name);
        if path.is_file() && is_copied && !name.starts_with('.') {
            copy_file(&path, &out.join(name))?;
        }
    }
    Ok(())
}
