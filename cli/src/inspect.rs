//! `nvfp4 inspect`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use indicatif::HumanBytes;
use nvfp4::formats::format::e4m3;
use nvfp4_lm::interchange::{Checkpoint, Fp8Format, Fp8Scales, GlobalScale, QuantConfig};
use serde::Serialize;
use serde_json::Value;

use crate::options::shared::JsonOption;
use crate::table::table;

#[derive(Args)]
pub(crate) struct Inspect {
    /// Inspect the model in this folder
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    #[command(flatten)]
    form: JsonOption,
}

impl Inspect {
    pub(crate) fn run(self) -> Result<()> {
        let checkpoint = Checkpoint::scan(&self.model)?;
        self.form.print(&Report::of(&checkpoint), Report::lines)?;
        let problems = checkpoint.problems().len();
        ensure!(
            problems == 0,
            "{}: {problems} problem(s), for which readers refuse the model or mis-scale it",
            self.model.display()
        );
        Ok(())
    }
}

/// Contents of a folder.
#[derive(Serialize)]
struct Report<'a> {
    model_type: &'a Value,
    /// True if the tensors were compared with config.json.
    model_type_is_known: bool,
    quantization: Option<Quantization<'a>>,
    /// Quantized layers.
    layers: Vec<Layer<'a>>,
    /// Other tensors.
    tensors: Vec<Plain<'a>>,
    kv_scales: Vec<KvScales<'a>>,
    unused: Vec<Remark<'a>>,
    problems: Vec<Remark<'a>>,
}

/// Quantization according to the folder's configuration.
#[derive(Serialize)]
struct Quantization<'a> {
    dialect: &'static str,
    /// Formats of the layers.
    scheme: String,
    kv_cache_fp8: bool,
    exclude: &'a [String],
}

#[derive(Serialize)]
struct Layer<'a> {
    module: &'a str,
    /// `nvfp4`, or `fp8` with the granularity of its scales and of those of its inputs.
    format: String,
    shape: [usize; 2],
    bytes: usize,
    /// Amax of the weight by its global scale; absent if there are several.
    amax: Option<f32>,
    /// Amax of the input by its global scale, if the input is quantized.
    input_amax: Option<f32>,
    /// True if the input is multiplied by a scale per feature.
    pre_quant: bool,
}

#[derive(Serialize)]
struct Plain<'a> {
    name: &'a str,
    dtype: String,
    shape: &'a [usize],
    bytes: usize,
}

/// FP8 scales of an attention module.
#[derive(Serialize)]
struct KvScales<'a> {
    module: &'a str,
    keys: Option<f32>,
    values: Option<f32>,
}

/// Remark about a tensor or module.
#[derive(Serialize)]
struct Remark<'a> {
    name: &'a str,
    reason: &'a str,
}

/// Returns true if a weight of this format has one scale.
fn one_scale(format: Fp8Format) -> bool {
    format.scales == Fp8Scales::Tensor
}

impl<'a> Report<'a> {
    fn of(checkpoint: &'a Checkpoint) -> Self {
        let quantization = |config: &'a QuantConfig| Quantization {
            dialect: config.dialect.name(),
            scheme: config.formats(),
            kv_cache_fp8: config.kv_cache_fp8,
            exclude: &config.exclude,
        };
        let layers = checkpoint.layers().iter().map(|(module, layer)| Layer {
            module,
            format: "nvfp4".into(),
            shape: [layer.n, layer.k],
            bytes: layer.bytes,
            amax: Some(layer.global.amax()),
            input_amax: layer.input_global.map(GlobalScale::amax),
            pre_quant: layer.pre_quant,
        });
        let fp8_amax = |scale: f32| e4m3::MAX * scale;
        let fp8 = checkpoint.fp8_layers().iter().map(|(module, layer)| Layer {
            module,
            format: layer.format.to_string(),
            shape: layer.shape,
            bytes: layer.bytes,
            amax: one_scale(layer.format).then(|| fp8_amax(layer.largest_scale)),
            input_amax: layer.input_scale.map(fp8_amax),
            pre_quant: false,
        });
        let is_fp8 = |name: &str| {
            let module = name.strip_suffix(".weight");
            module.is_some_and(|module| checkpoint.fp8_layers().contains_key(module))
        };
        let plain = checkpoint.plain();
        let is_plain = |name: &str| {
            plain
                .binary_search_by(|found| found.as_str().cmp(name))
                .is_ok()
        };
        let tensors = checkpoint.tensors().iter();
        let tensors = tensors.filter(|tensor| is_plain(tensor.name) && !is_fp8(tensor.name));
        let kv_scales = checkpoint.kv_scales().iter();
        let unused = checkpoint.unused().iter();
        let problems = checkpoint.problems().iter();
        Self {
            model_type: &checkpoint.json()["model_type"],
            model_type_is_known: checkpoint.is_known(),
            quantization: checkpoint.config().map(quantization),
            layers: layers.chain(fp8).collect(),
            tensors: tensors
                .map(|tensor| Plain {
                    name: tensor.name,
                    dtype: format!("{:?}", tensor.dtype).to_lowercase(),
                    shape: tensor.shape,
                    bytes: tensor.stored_bytes(),
                })
                .collect(),
            kv_scales: kv_scales
                .map(|(module, &[keys, values])| KvScales {
                    module,
                    keys,
                    values,
                })
                .collect(),
            unused: unused
                .map(|(name, reason)| Remark { name, reason })
                .collect(),
            problems: problems
                .map(|problem| Remark {
                    name: &problem.name,
                    reason: &problem.what,
                })
                .collect(),
        }
    }

    /// Describes the contents, one line per item.
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![match &self.quantization {
            Some(config) => {
                let cache = match config.kv_cache_fp8 {
                    true => "FP8",
                    false => "not quantized",
                };
                format!("{}, {}, KV cache {cache}", config.dialect, config.scheme)
            }
            None => "not quantized".into(),
        }];
        lines.extend(self.table());
        for KvScales {
            module,
            keys,
            values,
        } in &self.kv_scales
        {
            let scale =
                |scale: &Option<f32>| scale.map_or("none".into(), |scale| format!("{scale:e}"));
            let (keys, values) = (scale(keys), scale(values));
            lines.push(format!(
                "{module}: FP8 scales of keys {keys}, of values {values}"
            ));
        }
        for Remark { name, reason } in &self.unused {
            lines.push(format!("not used: {name}: {reason}"));
        }
        if !self.model_type_is_known {
            lines.push(format!(
                "model_type is {}, which is not known here: the tensors were not held against \
                 config.json, and every matrix is taken for a linear layer",
                self.model_type
            ));
        }
        match self.layers.iter().filter(|layer| layer.pre_quant).count() {
            0 => {}
            count => lines.push(format!(
                "{count} layers multiply their input by a scale for each feature (pre_quant_scale)"
            )),
        }
        let quantized: usize = self.layers.iter().map(|layer| layer.bytes).sum();
        let plain: usize = self.tensors.iter().map(|tensor| tensor.bytes).sum();
        lines.push(format!(
            "{} quantized layers of {}, {} other tensors of {}",
            self.layers.len(),
            HumanBytes(quantized as u64),
            self.tensors.len(),
            HumanBytes(plain as u64)
        ));
        if let Some(config) = &self.quantization {
            lines.push(format!("excluded: {}", config.exclude.join(", ")));
        }
        for Remark { name, reason } in &self.problems {
            lines.push(format!("problem: {name}: {reason}"));
        }
        lines
    }

    /// Returns the table of layers and tensors.
    fn table(&self) -> Vec<String> {
        let head = ["tensor", "scheme", "shape", "bytes", "amax", "input amax"];
        let mut rows = vec![head.map(String::from).to_vec()];
        let amax = |amax: Option<f32>| amax.map_or("-".into(), |amax| format!("{amax:.4e}"));
        rows.extend(self.layers.iter().map(|layer| {
            let [n, k] = layer.shape;
            vec![
                layer.module.to_owned(),
                layer.format.clone(),
                format!("{n} x {k}"),
                layer.bytes.to_string(),
                amax(layer.amax),
                amax(layer.input_amax),
            ]
        }));
        rows.extend(self.tensors.iter().map(|tensor| {
            let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
            vec![
                tensor.name.to_owned(),
                tensor.dtype.clone(),
                shape.join(" x "),
                tensor.bytes.to_string(),
                amax(None),
                amax(None),
            ]
        }));
        table("lllrrr", &rows)
    }
}
