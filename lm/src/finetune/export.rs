//! Writes a trained or merged model: as a folder, as adapters, and quantized.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use regex::Regex;

use super::Finetune;
use crate::decoder::feed_forward::FeedForward;
use crate::decoder::names::Site;
use crate::decoder::projection::{Experts, Projection};
use crate::decoder::{Decoder, DecoderLayer, FrozenForm};
use crate::hf::Dtype;
use crate::interchange::{Dialect, Scheme};
use crate::quantize::journal::JOURNAL;
use crate::quantize::text::{CalibrationText, calibrate};
use crate::quantize::{
    Calibration, Method, QuantizeOptions, Quantized, Smoothing, quantize_folder,
};
use crate::ranks::{on_first, on_first_at_length};

impl Finetune<'_> {
    /// Calls `write` with the whole model, without autodiff, on rank 0; other ranks return none.
    /// All ranks call this function.
    ///
    /// # Errors
    /// Returns the errors of `write`, on all ranks.
    fn with_model<T>(&self, write: impl FnOnce(Decoder) -> Result<T>) -> Result<Option<T>> {
        let model = self.gathered_model().gathered_experts();
        on_first(self.world(), || write(model))
    }

    /// Writes the model to the new folder `out`, with tensors of type `dtype` and adapters merged.
    /// All ranks call this function.
    ///
    /// # Errors
    /// Returns an error if the folder has files or a file cannot be written.
    pub fn save_model(&self, out: &Path, dtype: Dtype) -> Result<()> {
        let from = &self.task().config().model;
        let save = |model: Decoder| model.save(out, dtype, Some(from));
        self.with_model(save).map(drop)
    }

    /// Writes the adapters to the new folder `out`, in PEFT's format. All ranks call this function.
    ///
    /// # Errors
    /// Returns an error if there are no adapters, the folder has files, or a file cannot be
    /// written.
    pub fn save_adapter(&self, out: &Path) -> Result<()> {
        let config = self.task().config();
        let lora = config.lora.as_ref();
        let lora = lora.context("the run trains all parameters: there is no adapter")?;
        let save = |model: Decoder| model.save_adapter(out, lora, &config.model);
        self.with_model(save).map(drop)
    }

    /// Writes the model, quantized to NVFP4 by rounding to nearest, to the new folder `out` in
    /// `dialect`. Layers that the recipe keeps in high precision are not quantized, nor are the
    /// unpacked layers of a packed model; tensors that are not quantized are `f32`. The global
    /// scales of activations, which [`Scheme::W4a4`] needs, are calibrated on the rows of an
    /// evaluation. Replaces the folder of an interrupted export. All ranks call this function; rank
    /// 0 returns a summary of the output.
    ///
    /// # Errors
    /// Returns an error if the folder has files or a file cannot be written.
    pub fn export(
        &self,
        out: &Path,
        dialect: Dialect,
        scheme: Scheme,
    ) -> Result<Option<Quantized>> {
        let from = &self.task().config().model;
        let saved = self.with_model(|model| {
            remove_unfinished(out)?;
            let made = self.quantization(&model, dialect, scheme)?;
            save_masters(&model, from, out)?;
            Ok(made)
        })?;
        // Runs on the CPU, which may take long.
        on_first_at_length(self.world(), || {
            let (options, calibration) = saved.expect("rank 0 has saved it");
            quantize_masters(out, &options, &calibration)
        })
    }

    /// Returns the quantization options for `model`.
    fn quantization(
        &self,
        model: &Decoder,
        dialect: Dialect,
        scheme: Scheme,
    ) -> Result<(QuantizeOptions, Calibration)> {
        let calibration = match scheme {
            Scheme::W4a16 => Calibration::new(),
            Scheme::W4a4 => self.calibration(model)?,
        };
        let is_packed = self.task().config().frozen != FrozenForm::High;
        let kept = kept_modules(model, is_packed);
        Ok((rounding(dialect, scheme, kept)?, calibration))
    }

    fn calibration(&self, model: &Decoder) -> Result<Calibration> {
        let config = self.task().config();
        let tokens = self.task().data().valid.inputs(config.eval_rows)?;
        let text = CalibrationText {
            length: config.context,
            sequences: config.eval_rows,
            products: false,
        };
        calibrate(model, &tokens, text)
    }
}

/// Writes `model`, whose adapters are merged, to the new folder `out`: its weights quantized to
/// NVFP4 (W4A16) by rounding to nearest, in `dialect`. The model was loaded in `f32` from the folder
/// `from` in the form [`FrozenForm::of`] it; the unpacked layers of a packed model stay unpacked.
///
/// # Errors
/// Returns an error if the folder has files or a file cannot be written.
pub fn export_merged(
    model: Decoder,
    from: &Path,
    out: &Path,
    dialect: Dialect,
) -> Result<Quantized> {
    let kept = match FrozenForm::of(from)? {
        FrozenForm::High => vec![],
        FrozenForm::W4a16 | FrozenForm::W4a4 => kept_modules(&model, true),
    };
    let options = rounding(dialect, Scheme::W4a16, kept)?;
    save_masters(&model, from, out)?;
    drop(model);
    quantize_masters(out, &options, &Calibration::new())
}

/// Returns the path of the `f32` weights from which `out` is quantized. These are rounded, not a
/// bf16 copy of them.
fn masters(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".f32");
    out.with_file_name(name)
}

/// Removes what an interrupted export to `out` left.
///
/// # Errors
/// Returns an error if a folder cannot be removed.
pub fn remove_unfinished(out: &Path) -> Result<()> {
    let masters = masters(out);
    let unfinished = [
        (&*masters, masters.exists()),
        (out, out.join(JOURNAL).exists()),
    ];
    for (folder, _) in unfinished.into_iter().filter(|(_, is_left)| *is_left) {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    Ok(())
}

/// Saves the weights for [`quantize_masters`].
fn save_masters(model: &Decoder, from: &Path, out: &Path) -> Result<()> {
    model.save(&masters(out), Dtype::F32, Some(from))
}

/// Quantizes the weights from [`save_masters`], and removes them.
fn quantize_masters(
    out: &Path,
    options: &QuantizeOptions,
    calibration: &Calibration,
) -> Result<Quantized> {
    let masters = masters(out);
    let done = quantize_folder(&masters, out, options, calibration);
    fs::remove_dir_all(&masters).with_context(|| masters.display().to_string())?;
    done
}

/// Returns the options of rounding to nearest, without the modules `kept`.
fn rounding(dialect: Dialect, scheme: Scheme, kept: Vec<String>) -> Result<QuantizeOptions> {
    let exclude = kept
        .into_iter()
        .map(|name| Ok(Regex::new(&format!("^{}$", regex::escape(&name)))?));
    Ok(QuantizeOptions {
        dialect,
        scheme,
        method: Method::Rtn,
        exclude: exclude.collect::<Result<_>>()?,
        fp8: vec![],
        formats: None,
        input_scale: None,
        kv_cache_fp8: false,
        smooth: Smoothing::None,
    })
}

/// Returns the names of the linear layers that compute in high precision, one per fused group; in a
/// model of packed weights, the layers that are not packed.
fn kept_modules(model: &Decoder, is_packed: bool) -> Vec<String> {
    let is_high = |projection: &Projection| match projection {
        _ if is_packed => !projection.is_packed(),
        Projection::Nvfp4(linear) => linear.state.is_high_precision(),
        // Its width is not a multiple of 16.
        Projection::Dense(_) => true,
        _ => false,
    };
    let config = model.config();
    let layers = model.layers.iter().enumerate();
    let of = |(index, layer): (usize, &DecoderLayer)| {
        let mut kept = Vec::new();
        for (site, projection) in layer.projections() {
            if is_high(projection) {
                kept.push(site.module(config, index, None));
            }
        }
        if let FeedForward::Moe(moe) = &layer.feed_forward {
            for (experts, site) in [(&moe.gate_up, Site::GateUp), (&moe.down, Site::Down)] {
                if let Experts::Grouped(layer) = experts
                    && (is_packed || layer.state.is_high_precision())
                {
                    let count = layer.weight.dims()[0];
                    kept.extend((0..count).map(|it| site.module(config, index, Some(it))));
                }
            }
        }
        kept
    };
    layers.flat_map(of).collect()
}
