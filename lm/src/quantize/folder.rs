//! Quantizes a model folder, one decoder layer at a time.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use half::bf16;
use nvfp4_formats::format::e4m3;
use regex::Regex;
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::block::ScaleChoice;
use super::decoded::Decoded;
use super::inputs::Inputs;
use super::journal::{Journal, MadeFrom};
use super::mxfp4::{Cast, cast};
use super::plan::{Plan, layer_of};
use super::report::{KeptLayer, LayerReport, PartReport, Quantized};
use super::rules::{Rule, block_amax};
use super::smooth::{Smoother, Smoothing};
use super::stats::Calibration;
use super::{Method, quantize_weight, sqnr, weighted_sqnr};
use crate::checkpoint::{read_json, write_json};
use crate::decoder::fused::open_tensors;
use crate::decoder::load::check_tensors;
use crate::decoder::names::is_extra;
use crate::hf::config::{CONFIG_FILE, refuse_packed};
use crate::hf::folder::check_folder;
use crate::hf::tensors::check_each;
use crate::hf::{
    DecoderConfig, ModelPlan, StoredTensor, TensorFolder, TensorSink, TensorSpec, TensorWriter,
};
use crate::interchange::checkpoint::HF_QUANT_CONFIG;
use crate::interchange::convert::{PROVENANCE, copy_companions, exclusions, write_configs};
use crate::interchange::exclude::LINEAR;
use crate::interchange::{Checkpoint, Dialect, GlobalScale, PackedWeight, QuantConfig, Scheme};
use crate::progress::{Unit, Work};
use crate::random::hash;

/// Options of quantization.
#[derive(Debug, Clone)]
pub struct QuantizeOptions {
    /// Dialect of the output.
    pub dialect: Dialect,
    /// Quantized operands.
    pub scheme: Scheme,
    /// Quantization method of weights.
    pub method: Method,
    /// Modules to skip, in addition to routers and the head.
    pub exclude: Vec<Regex>,
    /// Dequantization factor of every quantized input, instead of amax / 2688 from the calibration.
    pub input_scale: Option<f32>,
    /// True to write scales for an FP8 key-value cache.
    pub kv_cache_fp8: bool,
    /// Smoothing of inputs before quantization.
    pub smooth: Smoothing,
}

/// Quantizes the model in the folder `model` to the folder `out`, with the input statistics of
/// `calibration`. Memory holds the weights of one fused group; with smoothing, those of one decoder
/// layer.
///
/// # Errors
/// Returns the errors of [`Quantization::start`] and [`Quantization::finish`].
pub fn quantize_folder(
    model: &Path,
    out: &Path,
    options: &QuantizeOptions,
    calibration: &Calibration,
) -> Result<Quantized> {
    let mut reads = MadeFrom::new();
    if !calibration.is_empty() {
        reads.insert("calibration".into(), json!("given"));
    }
    let run = Quantization::start(model, out, options, reads)?;
    run.finish(calibration)
}

/// Quantization of a model to a folder. An interrupted run can be continued by
/// [`resume`](Self::resume), and writes the same bytes as an uninterrupted one.
pub struct Quantization {
    model: PathBuf,
    out: PathBuf,
    options: QuantizeOptions,
    tensors: TensorFolder,
    /// Contents of the model's config.json.
    json: Map<String, Value>,
    plan: Plan,
    smoother: Smoother,
    journal: Journal,
}

impl Quantization {
    /// Starts quantizing the model in the folder `model` to the folder `out`. `calibration`
    /// describes the calibration data, by option name; if empty, there is no calibration.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, `out` is not empty, the architecture is unknown,
    /// tensors are missing, unknown or of another shape than the configuration states, a value is
    /// not finite, an exclusion matches nothing, or nothing is left to quantize. Returns an error
    /// if activations are to be quantized without calibration or input scale, or if GPTQ or FP8
    /// cache scales are requested without calibration.
    pub fn start(
        model: &Path,
        out: &Path,
        options: &QuantizeOptions,
        calibration: MadeFrom,
    ) -> Result<Self> {
        Self::begin(model, out, options, calibration, Journal::start)
    }

    /// Resumes an interrupted run from its complete parts.
    ///
    /// # Errors
    /// Returns an error if `out` has no such run. Returns an error that names the difference if the
    /// model, an option or the version differs. Also returns the errors of [`start`](Self::start).
    pub fn resume(
        model: &Path,
        out: &Path,
        options: &QuantizeOptions,
        calibration: MadeFrom,
    ) -> Result<Self> {
        Self::begin(model, out, options, calibration, Journal::resume)
    }

    fn begin(
        model: &Path,
        out: &Path,
        options: &QuantizeOptions,
        calibration: MadeFrom,
        open: impl FnOnce(&Path, &MadeFrom) -> Result<Journal>,
    ) -> Result<Self> {
        options.check(!calibration.is_empty())?;
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
        let plan = Plan::new(&tensors, &options.exclude)?;
        check_tensors(&config, &tensors).with_context(path)?;
        check_values(&tensors)?;
        ensure!(
            !options.kv_cache_fp8 || config.block.latent.is_none(),
            "kv is fp8, but the scales of latent attention are not supported: readers cache \
             compressed keys and values, and calibration sees complete ones"
        );
        let smoother = match options.smooth {
            Smoothing::None => Smoother::default(),
            Smoothing::Awq => Smoother::new(&config, &tensors, &plan, options.kv_cache_fp8),
        };
        let mut made_from = calibration;
        made_from.extend(options.made_from());
        for (name, found) in [
            ("model", tensors.hash()),
            (
                "model configuration",
                hash(serde_json::to_string(&json)?.as_bytes()),
            ),
        ] {
            made_from.insert(name.into(), Value::String(format!("{found:016x}")));
        }
        let journal = open(out, &made_from)?;
        Ok(Self {
            model: model.to_owned(),
            out: out.to_owned(),
            options: options.clone(),
            tensors,
            json,
            plan,
            smoother,
            journal,
        })
    }

    /// Returns the calibration of the resumed run, if it was complete.
    ///
    /// # Errors
    /// Returns an error if it cannot be read.
    pub fn calibration(&self) -> Result<Option<Calibration>> {
        self.journal.calibration()
    }

    /// Stores `calibration`, so that a resumed run need not calibrate again.
    ///
    /// # Errors
    /// Returns an error if it cannot be written.
    pub fn keep_calibration(&self, calibration: &Calibration) -> Result<()> {
        self.journal.keep_calibration(calibration)
    }

    /// Quantizes the remaining layers with the statistics of `calibration`, and writes the model.
    /// Every tensor is written once, to its place in the planned files.
    ///
    /// # Errors
    /// Returns an error if an input is unknown, a value is not finite, or writing fails. Checks the
    /// written folder like [`Checkpoint::open`].
    pub fn finish(self, calibration: &Calibration) -> Result<Quantized> {
        let parts = self.plan.parts();
        let inputs = Inputs::new(calibration);
        let total = self.plan.groups.iter().map(Vec::len).sum();
        let specs = parts.iter().map(|part| self.part_specs(part));
        let specs: Vec<Vec<TensorSpec>> = specs.collect::<Result<_>>()?;
        let copied = self.copied_specs()?;
        let all = copied.iter().chain(specs.iter().flatten()).cloned();
        let all = all.chain(self.kv_scales()?.into_iter().map(|scale| scale.spec));
        let plan = ModelPlan::new(all.collect(), TensorWriter::SHARD_BYTES)?;
        let mut files = self.journal.files(plan)?;
        let mut done = Quantized::default();
        let kept = (0..parts.len()).map(|index| self.journal.part(index));
        let kept: Vec<Option<PartReport>> = kept.collect::<Result<_>>()?;
        let layers = kept
            .iter()
            .flatten()
            .map(|report| report.layers.len())
            .sum();
        let mut work = Work::begin("quantize", Unit::Layers, layers, total);
        for (index, (part, kept)) in parts.iter().zip(kept).enumerate() {
            if let Some(kept) = kept {
                specs[index].iter().for_each(|spec| files.keep(&spec.name));
                done.add(kept);
                continue;
            }
            let report = self.write_part(part, &inputs, &mut files, &mut work)?;
            self.journal.keep_part(index, &mut files, &report)?;
            done.add(report);
        }
        drop(work);
        let tensors = copied.iter().map(|spec| self.tensors.get(&spec.name));
        let tensors: Vec<StoredTensor<'_>> = tensors.collect::<Result<_>>()?;
        let bytes = tensors.iter().map(StoredTensor::stored_bytes).sum();
        let mut work = Work::begin("write", Unit::Bytes, 0, bytes);
        for tensor in &tensors {
            copy(&mut files, tensor)?;
            work.add(tensor.stored_bytes());
        }
        drop(work);
        self.write_kv_scales(&mut files, calibration)?;
        files.finish(&self.out)?;
        for name in &self.plan.copied {
            let tensor = self.tensors.get(name)?;
            let module = name.strip_suffix(".weight").unwrap_or(name);
            match self.plan.kept.get(module) {
                Some(&reason) => done.kept.push(KeptLayer {
                    module: module.into(),
                    reason,
                    bytes: tensor.stored_bytes(),
                }),
                None => done.other_bytes += tensor.stored_bytes(),
            }
        }
        done.calibration_tokens = calibration.tokens();
        self.write_other_files(&done)?;
        // Apply the rules of the readers: anything that they would reject is an error here.
        Checkpoint::open(&self.out).context("the folder that was written is not valid")?;
        self.journal.finish()?;
        Ok(done)
    }

    /// Writes the files of the model other than its tensors.
    fn write_other_files(&self, done: &Quantized) -> Result<()> {
        let config = quant_config(&self.options, &self.plan);
        let mut json = self.json.clone();
        json.insert("quantization_config".into(), config.inline());
        copy_companions(&self.model, &self.out, &[])?;
        write_provenance(&self.out, &self.options, done)?;
        write_configs(&self.out, &json, &config)
    }

    /// Returns the tensors that are copied.
    fn copied_specs(&self) -> Result<Vec<TensorSpec>> {
        let names = self.plan.copied.iter();
        let copied = names.filter(|name| !self.smoother.rewrites(name));
        copied
            .map(|name| Ok(copied_spec(&self.tensors.get(name)?)))
            .collect()
    }

    /// Returns the tensors of a decoder layer, whose quantized groups are `part`, sorted by name.
    fn part_specs(&self, part: &[Vec<String>]) -> Result<Vec<TensorSpec>> {
        let QuantizeOptions {
            dialect, scheme, ..
        } = self.options;
        let mut specs = Vec::new();
        for name in self.smoother.rewritten(layer_of(&part[0][0])) {
            specs.push(self.tensors.get(name)?.spec());
        }
        for module in part.iter().flatten() {
            let tensor = self.tensors.get(&format!("{module}.weight"))?;
            let shape = [tensor.shape[0], tensor.shape[1]];
            specs.extend(dialect.specs(module, shape, scheme == Scheme::W4a4));
        }
        specs.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(specs)
    }

    /// Returns the FP8 scales of the keys and values of each attention's cache; none without such a
    /// cache. For compressed-tensors they are BF16 if the model is BF16, as in both tools.
    fn kv_scales(&self) -> Result<Vec<KvScale>> {
        let dialect = self.options.dialect;
        let mut scales = Vec::new();
        for name in self.tensors.names().filter(|_| self.options.kv_cache_fp8) {
            let Some(attention) = name.strip_suffix(".k_proj.weight") else {
                continue;
            };
            let is_bf16 = self.tensors.get(name)?.dtype == Dtype::BF16;
            let dtype = match is_bf16 && dialect == Dialect::CompressedTensors {
                true => Dtype::BF16,
                false => Dtype::F32,
            };
            for (index, which) in ['k', 'v'].into_iter().enumerate() {
                let name = dialect.kv_scale(attention, which);
                scales.push(KvScale {
                    attention: attention.to_owned(),
                    index,
                    spec: TensorSpec::new(name, dtype, dialect.scalar_shape()),
                });
            }
        }
        Ok(scales)
    }

    /// Adds the FP8 scales of the caches to `writer`: amax / 448, as in both tools.
    fn write_kv_scales(
        &self,
        writer: &mut dyn TensorSink,
        calibration: &Calibration,
    ) -> Result<()> {
        for KvScale {
            attention,
            index,
            spec,
        } in self.kv_scales()?
        {
            let amax = calibration.caches.get(&attention).with_context(|| {
                format!("{attention}: calibration knows nothing of its keys and values")
            })?;
            let scale = amax[index] / e4m3::MAX;
            ensure!(
                scale > 0.0,
                "{}: the largest magnitude that calibration saw is {}, from which no scale follows",
                spec.name,
                amax[index]
            );
            let bytes = match spec.dtype {
                Dtype::BF16 => bf16::from_f32(scale).to_le_bytes().to_vec(),
                _ => scale.to_le_bytes().to_vec(),
            };
            writer.add(&spec.name, spec.dtype, &spec.shape, &bytes)?;
        }
        Ok(())
    }

    /// Quantizes the groups of `part` and adds their tensors.
    fn write_part(
        &self,
        part: &[Vec<String>],
        inputs: &Inputs<'_>,
        writer: &mut dyn TensorSink,
        work: &mut Work,
    ) -> Result<PartReport> {
        let options = &self.options;
        let rule = Rule::of(options.dialect);
        let kind = (rule, options.method.choice());
        let layer = layer_of(&part[0][0]);
        let mut decoded = Decoded::new(&self.tensors);
        let smooth = self.smoother.scales(layer, &mut decoded, inputs, kind)?;
        smooth.write_plain(writer)?;
        let mut done = PartReport::default();
        for group in part {
            let mut weights = Vec::new();
            for module in group {
                let (tensor, values) = decoded.take(module)?;
                weights.push((module, tensor, values));
            }
            let scaled = weights.iter();
            let scaled = scaled.map(|(module, _, values)| smooth.scaled(module, values));
            let scaled: Vec<_> = scaled.collect();
            let amax = (scaled.iter()).fold(0.0f32, |amax, values| amax.max(block_amax(values)));
            let input_global = match (options.scheme, options.input_scale) {
                (Scheme::W4a16, _) => None,
                (Scheme::W4a4, Some(scale)) => Some(GlobalScale::Multiply(scale)),
                (Scheme::W4a4, None) => {
                    Some(inputs.global(group, rule, |module| smooth.columns(module))?)
                }
            };
            let mut casts = self.casts(&weights, &scaled)?.into_iter();
            for ((module, tensor, values), scaled) in weights.iter().zip(&scaled) {
                work.part(module);
                let shape = [tensor.shape[0], tensor.shape[1]];
                let read = inputs.of(module);
                let divided = read.zip(smooth.columns(module));
                let divided = divided.map(|(stats, columns)| stats.divided(columns));
                let stats = divided.as_ref().or(read);
                if !inputs.is_empty() && stats.is_none() {
                    done.unseen.push((*module).clone());
                }
                // A layer that no token reached has no second moments, so it uses the search.
                let method = match (options.method, stats) {
                    (Method::Gptq, None) => Method::Search,
                    (method, _) => method,
                };
                let kind = (options.dialect, method);
                let (weight, cast) = match casts.next() {
                    Some((weight, cast)) => (Ok(weight), Some(cast)),
                    None => (quantize_weight(scaled, shape, amax, kind, stats), None),
                };
                let weight = weight
                    .and_then(|weight| weight.with_input_global(input_global))
                    .with_context(|| tensor.to_string())?;
                options.dialect.write(writer, module, &weight)?;
                // Compare with the original weight: the smoothing scales are removed.
                let mut quantized = weight.dequantize(options.dialect.arithmetic());
                smooth.undo(module, &mut quantized);
                done.layers.push(LayerReport {
                    module: (*module).clone(),
                    shape,
                    bytes_before: tensor.stored_bytes(),
                    bytes: weight.bytes(),
                    amax: block_amax(values),
                    sqnr: sqnr(values, &quantized),
                    weighted_sqnr: read
                        .map(|stats| weighted_sqnr(values, &quantized, &stats.mean_squares())),
                    cast,
                });
                work.add(1);
            }
        }
        Ok(done)
    }

    /// Casts the weights of a group if all are stored in MXFP4 and no smoothing scales them; empty
    /// otherwise. The codes are then those of the model, regardless of the method.
    fn casts(
        &self,
        weights: &[(&String, StoredTensor<'_>, Vec<f32>)],
        scaled: &[Cow<'_, [f32]>],
    ) -> Result<Vec<(PackedWeight, Cast)>> {
        if scaled.iter().any(|values| matches!(values, Cow::Owned(_))) {
            return Ok(vec![]);
        }
        let stored = weights.iter().map(|(_, tensor, _)| tensor.mxfp4());
        let (Some(stored), Some((_, first, _))) =
            (stored.collect::<Option<Vec<_>>>(), weights.first())
        else {
            return Ok(vec![]);
        };
        cast(&stored, first.shape[1], self.options.dialect).with_context(|| first.to_string())
    }
}

/// Returns the description of a copied tensor: one in FP8 becomes bf16, which needs no scales.
fn copied_spec(tensor: &StoredTensor<'_>) -> TensorSpec {
    let dtype = match tensor.scales {
        None => tensor.dtype,
        Some(_) => Dtype::BF16,
    };
    TensorSpec::new(tensor.name, dtype, tensor.shape)
}

/// Adds a copied tensor; see [`copied_spec`].
fn copy(writer: &mut dyn TensorSink, tensor: &StoredTensor<'_>) -> Result<()> {
    if tensor.scales.is_none() {
        return writer.add(tensor.name, tensor.dtype, tensor.shape, &tensor.bytes());
    }
    let values = tensor.to_f32()?.into_iter();
    let bytes = values.flat_map(|value| bf16::from_f32(value).to_le_bytes());
    let bytes: Vec<u8> = bytes.collect();
    writer.add(tensor.name, Dtype::BF16, tensor.shape, &bytes)
}

impl QuantizeOptions {
    /// Checks that options that need calibration have it.
    fn check(&self, calibrated: bool) -> Result<()> {
        ensure!(
            self.scheme == Scheme::W4a16 || self.input_scale.is_some() || calibrated,
            "scheme is w4a4, which needs the largest magnitude of every layer's input: calibrate \
             on text, or give an input scale"
        );
        ensure!(
            self.method != Method::Gptq || calibrated,
            "method is gptq, which needs the second moments of every layer's input: calibrate on \
             text, or choose rtn, 4over6 or search"
        );
        ensure!(
            self.smooth == Smoothing::None || calibrated,
            "smooth is {}, which needs the size of every layer's input features: calibrate on text",
            self.smooth.name()
        );
        ensure!(
            !self.kv_cache_fp8 || calibrated,
            "kv is fp8, which needs the largest keys and values of every layer: calibrate on text"
        );
        Ok(())
    }

    /// Returns the options by their names on the command line.
    fn made_from(&self) -> MadeFrom {
        let exclude: Vec<&str> = self.exclude.iter().map(Regex::as_str).collect();
        let options = [
            ("version", json!(env!("CARGO_PKG_VERSION"))),
            ("dialect", json!(self.dialect.name())),
            ("scheme", json!(self.scheme.name())),
            ("method", json!(self.method.name())),
            ("exclude", json!(exclude)),
            (
                "input-scale",
                json!(self.input_scale.map(|scale| scale.to_string())),
            ),
            ("kv", json!(if self.kv_cache_fp8 { "fp8" } else { "bf16" })),
            ("smooth", json!(self.smooth.name())),
        ];
        options.map(|(name, value)| (name.to_owned(), value)).into()
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
fn check_values(tensors: &TensorFolder) -> Result<()> {
    let tensors: Vec<StoredTensor<'_>> = tensors.iter().collect();
    // Reports the first error by name, regardless of the order of discovery.
    check_each(&tensors).into_iter().collect()
}

fn quant_config(options: &QuantizeOptions, plan: &Plan) -> QuantConfig {
    let kept = plan.kept.keys().map(String::as_str);
    QuantConfig {
        dialect: options.dialect,
        scheme: options.scheme,
        kv_cache_fp8: options.kv_cache_fp8,
        pre_quant: false,
        targets: vec![LINEAR.into()],
        exclude: exclusions(kept, options.dialect),
    }
}

/// FP8 scale of a cache.
struct KvScale {
    /// Module of the attention.
    attention: String,
    /// 0 for the keys, 1 for the values.
    index: usize,
    /// Tensor of the scale.
    spec: TensorSpec,
}

/// Contents of [`PROVENANCE`].
#[derive(Serialize)]
struct Provenance<'a> {
    producer: Value,
    dialect: &'static str,
    scheme: &'static str,
    method: &'static str,
    block_scales: &'static str,
    smooth: &'static str,
    exclude: Vec<&'a str>,
    input_scale: Option<f32>,
    kv_cache: Option<&'static str>,
    #[serde(flatten)]
    done: &'a Quantized,
}

fn write_provenance(out: &Path, options: &QuantizeOptions, done: &Quantized) -> Result<()> {
    let provenance = Provenance {
        producer: json!({"name": "nvfp4", "version": env!("CARGO_PKG_VERSION")}),
        dialect: options.dialect.name(),
        scheme: options.scheme.name(),
        method: options.method.name(),
        block_scales: match options.method.choice() {
            ScaleChoice::Max => "max",
            ScaleChoice::FourOverSix => "4over6",
            ScaleChoice::Search => "search",
        },
        smooth: options.smooth.name(),
        exclude: options.exclude.iter().map(Regex::as_str).collect(),
        input_scale: options.input_scale,
        kv_cache: options.kv_cache_fp8.then_some("fp8"),
        done,
    };
    write_json(&out.join(PROVENANCE), &provenance)
}
