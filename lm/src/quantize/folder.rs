//! Quantizes a model folder, one decoder layer at a time.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Device;
use half::bf16;
use nvfp4_formats::format::e4m3;
use nvfp4_formats::ptq::{ScaleChoice, values};
use regex::Regex;
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::decoded::Decoded;
use super::engine::Engine;
use super::inputs::Inputs;
use super::journal::{Journal, MadeFrom};
use super::mxfp4::{Cast, cast};
use super::options::QuantizeOptions;
use super::plan::{Plan, layer_index, layer_of};
use super::report::{KeptLayer, LayerReport, PartReport, Quantized};
use super::rules::{amax_of, rule_of};
use super::smooth::{Smoother, Smoothing};
use super::source::{Source, check_values};
use super::stats::{Calibration, InputStats};
use super::text::{CalibrationText, LayerCalibration};
use super::weight::WeightQuantizer;
use super::weight_format::WeightFormat;
use super::{fp8, sqnr, weighted_sqnr};
use crate::checkpoint::write_json;
use crate::hf::{
    DecoderConfig, ModelPlan, StoredTensor, TensorFolder, TensorSink, TensorSpec, TensorWriter,
};
use crate::interchange::convert::{PROVENANCE, copy_companions, write_configs};
use crate::interchange::{
    Checkpoint, Dialect, Fp8Inputs, Fp8Weight, GlobalScale, LayerFormat, PackedWeight, QuantConfig,
    Scheme,
};
use crate::progress::{Unit, Work};
use crate::random::hash;

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
    engine: Engine,
    config: DecoderConfig,
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
        let Source {
            config,
            json,
            tensors,
            mut plan,
        } = Source::open(model, options)?;
        if let Some(choices) = &options.formats {
            plan.choose(choices)?;
        }
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
            engine: Engine::Host,
            config,
        })
    }

    /// Quantizes on `engine`, instead of the host. The bytes are the same.
    #[must_use]
    pub fn with_engine(self, engine: Engine) -> Self {
        Self { engine, ..self }
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
        self.write(Statistics::Given(calibration))
    }

    /// Calibrates on `tokens`, on `device` in f32, and [finishes](Self::finish). Runs and quantizes
    /// the model layer by layer, in the memory of one layer, of its statistics and of the inputs of
    /// the next layer.
    ///
    /// # Errors
    /// Returns the errors of [`finish`](Self::finish). Also returns an error if there is no token, a
    /// size of `text` is 0, or a sequence exceeds the model's maximum context.
    pub fn calibrate(
        self,
        device: &Device,
        tokens: &[u32],
        text: CalibrationText,
    ) -> Result<Quantized> {
        let read = (self.engine.clone(), tokens, text);
        let by_layer = LayerCalibration::new(&self.config, &self.tensors, device, read)?;
        self.write(Statistics::ByLayer(by_layer))
    }

    fn write(&self, mut statistics: Statistics<'_>) -> Result<Quantized> {
        let parts = self.plan.parts();
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
        let mut reports: Vec<Option<PartReport>> = kept.collect::<Result<_>>()?;
        let layers = reports
            .iter()
            .flatten()
            .map(|report| report.layers.len())
            .sum();
        let mut work = Work::begin("quantize", Unit::Layers, layers, total);
        // In the order of the names, layer 10 comes before layer 2.
        let layer = |index: &usize| layer_index(&parts[*index][0][0]);
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_by_key(layer);
        for index in order {
            if reports[index].is_some() {
                specs[index].iter().for_each(|spec| files.keep(&spec.name));
                continue;
            }
            let inputs = Inputs::new(statistics.layer(layer(&index), &work)?);
            let report = self.write_part(&parts[index], &inputs, &mut files, &mut work)?;
            self.journal.keep_part(index, &mut files, &report)?;
            reports[index] = Some(report);
        }
        let reports = reports.into_iter().flatten();
        reports.for_each(|report| done.add(report));
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
        if self.options.kv_cache_fp8 {
            self.write_kv_scales(&mut files, statistics.caches()?)?;
        }
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
        done.calibration_tokens = statistics.tokens();
        done.formats.clone_from(&self.options.formats);
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
            specs.extend(match self.plan.format(module) {
                WeightFormat::Fp8 => {
                    Fp8Weight::specs(dialect, module, shape, fp8::format_for(dialect, scheme))
                }
                _ => dialect.specs(module, shape, scheme == Scheme::W4a4),
            });
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
        caches: &BTreeMap<String, [f32; 2]>,
    ) -> Result<()> {
        for KvScale {
            attention,
            index,
            spec,
        } in self.kv_scales()?
        {
            let amax = caches.get(&attention).with_context(|| {
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
        let rule = rule_of(options.dialect);
        let kind = (rule, options.method.choice());
        let layer = layer_of(&part[0][0]);
        let mut decoded = Decoded::new(&self.tensors);
        let smooth = self.smoother.scales(layer, &mut decoded, inputs, kind)?;
        smooth.write_plain(writer)?;
        let mut quantizer = WeightQuantizer::new(self.engine.clone(), options.dialect);
        let mut done = PartReport::default();
        for group in part {
            let mut weights = Vec::new();
            for module in group {
                let (tensor, values) = decoded.take(module)?;
                weights.push((module, tensor, values));
            }
            if self.plan.fp8.contains(&group[0]) {
                self.write_fp8(&weights, inputs, writer, &mut done)?;
                work.add(group.len());
                continue;
            }
            let scaled = weights.iter();
            let scaled = scaled.map(|(module, _, values)| smooth.scaled(module, values));
            let scaled: Vec<_> = scaled.collect();
            let amax = amax_of(scaled.iter().map(|values| &values[..]));
            let input_global = match (options.scheme, options.input_scale) {
                (Scheme::W4a16, _) => None,
                (Scheme::W4a4, Some(scale)) => Some(GlobalScale::Multiply(scale)),
                (Scheme::W4a4, None) => {
                    Some(inputs.global(group, rule, |module| smooth.columns(module))?)
                }
            };
            let is_scaled = scaled.iter().any(|values| matches!(values, Cow::Owned(_)));
            let mut casts = match is_scaled {
                true => vec![].into_iter(),
                false => casts(&weights, options.dialect)?.into_iter(),
            };
            for ((module, tensor, values), scaled) in weights.iter().zip(&scaled) {
                work.part(module);
                let shape = [tensor.shape[0], tensor.shape[1]];
                let read = inputs.of(module);
                if !inputs.is_empty() && read.is_none() {
                    done.unseen.push((*module).clone());
                }
                let input = read.map(|stats| (stats, smooth.columns(module)));
                let method = options.method.with(read);
                let (weight, cast) = match casts.next() {
                    Some((weight, cast)) => (Ok(weight), Some(cast)),
                    None => {
                        let weight = quantizer.quantize(scaled, shape, amax, method, input);
                        (weight, None)
                    }
                };
                let weight = weight
                    .and_then(|weight| weight.with_input_global(input_global))
                    .with_context(|| tensor.to_string())?;
                options.dialect.write(writer, module, &weight)?;
                // Compare with the original weight: the smoothing scales are removed.
                let mut quantized = weight.dequantize(options.dialect.arithmetic());
                smooth.undo(module, &mut quantized);
                let made = (WeightFormat::Nvfp4, weight.bytes(), &quantized[..]);
                let layer = layer_report(module, (tensor, values), made, read);
                done.layers.push(LayerReport { cast, ..layer });
                work.add(1);
            }
        }
        Ok(done)
    }

    /// Quantizes the weights of a group to FP8 and adds their tensors.
    fn write_fp8(
        &self,
        weights: &[(&String, StoredTensor<'_>, Vec<f32>)],
        inputs: &Inputs<'_>,
        writer: &mut dyn TensorSink,
        done: &mut PartReport,
    ) -> Result<()> {
        let options = &self.options;
        let format = fp8::format_for(options.dialect, options.scheme);
        let amax = amax_of(weights.iter().map(|(_, _, values)| &values[..]));
        let names: Vec<String> = weights.iter().map(|(name, ..)| (*name).clone()).collect();
        let input_scale = match format.inputs {
            Fp8Inputs::Static => Some(inputs.amax(&names, |_| None)? / e4m3::MAX),
            _ => None,
        };
        for (module, tensor, values) in weights {
            let shape = [tensor.shape[0], tensor.shape[1]];
            let weight = fp8::quantize(values, shape, amax, format);
            let mut weight = weight.with_context(|| tensor.to_string())?;
            weight.input_scale = input_scale;
            weight.write(writer, options.dialect, module)?;
            let stats = inputs.of(module);
            if !inputs.is_empty() && stats.is_none() {
                done.unseen.push((*module).clone());
            }
            let made = (WeightFormat::Fp8, weight.bytes(), &weight.dequantize()[..]);
            let layer = layer_report(module, (tensor, values), made, stats);
            done.layers.push(layer);
        }
        Ok(())
    }
}

/// Statistics that a run reads, in ascending order of layers.
#[allow(clippy::large_enum_variant, reason = "there is one of them in a run")]
enum Statistics<'a> {
    /// Those of all layers.
    Given(&'a Calibration),
    /// They are made layer by layer.
    ByLayer(LayerCalibration<'a>),
}

impl Statistics<'_> {
    /// Returns the statistics of the inputs of layer `layer`, or outside of layers. Reports the
    /// calibration as a part of `work`.
    fn layer(&mut self, layer: Option<usize>, work: &Work) -> Result<&Calibration> {
        match (self, layer) {
            (Self::Given(calibration), _) => Ok(calibration),
            (Self::ByLayer(by_layer), Some(layer)) => {
                work.part(&format!("calibration, layer {layer}"));
                by_layer.layer(layer)
            }
            (Self::ByLayer(_), None) => bail!("calibration is for the layers of a decoder only"),
        }
    }

    /// Returns the amax values of the caches of all layers.
    fn caches(&mut self) -> Result<&BTreeMap<String, [f32; 2]>> {
        match self {
            Self::Given(calibration) => Ok(&calibration.caches),
            Self::ByLayer(by_layer) => by_layer.caches(),
        }
    }

    /// Returns the number of tokens read, if inputs were counted.
    fn tokens(&self) -> Option<u64> {
        match self {
            Self::Given(calibration) => calibration.tokens(),
            Self::ByLayer(by_layer) => by_layer.tokens(),
        }
    }
}

/// Reports a weight, given its original tensor and values, and what it became: format, bytes and
/// dequantized values.
fn layer_report(
    module: &str,
    (tensor, values): (&StoredTensor<'_>, &[f32]),
    (format, bytes, quantized): (WeightFormat, usize, &[f32]),
    stats: Option<&InputStats>,
) -> LayerReport {
    LayerReport {
        module: module.into(),
        format,
        shape: [tensor.shape[0], tensor.shape[1]],
        bytes_before: tensor.stored_bytes(),
        bytes,
        amax: values::amax(values),
        sqnr: sqnr(values, quantized),
        weighted_sqnr: stats.map(|stats| weighted_sqnr(values, quantized, &stats.mean_squares())),
        cast: None,
    }
}

/// Casts the weights of a group if all are stored in MXFP4; empty otherwise. The codes are then
/// those of the model, regardless of the method.
pub(super) fn casts(
    weights: &[(&String, StoredTensor<'_>, Vec<f32>)],
    dialect: Dialect,
) -> Result<Vec<(PackedWeight, Cast)>> {
    let stored = weights.iter().map(|(_, tensor, _)| tensor.mxfp4());
    let (Some(stored), Some((_, first, _))) = (stored.collect::<Option<Vec<_>>>(), weights.first())
    else {
        return Ok(vec![]);
    };
    cast(&stored, first.shape[1], dialect).with_context(|| first.to_string())
}

/// Returns the description of a copied tensor: one in FP8 becomes bf16, which needs no scales.
pub(super) fn copied_spec(tensor: &StoredTensor<'_>) -> TensorSpec {
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

fn quant_config(options: &QuantizeOptions, plan: &Plan) -> QuantConfig {
    let kept = plan.kept.keys().map(String::as_str);
    let format = |module: &String| match plan.format(module) {
        WeightFormat::Fp8 => LayerFormat::Fp8(fp8::format_for(options.dialect, options.scheme)),
        _ => LayerFormat::Nvfp4(options.scheme),
    };
    let formats = plan
        .groups
        .iter()
        .flatten()
        .map(|module| (module.clone(), format(module)));
    QuantConfig::of_layers(options.dialect, formats, kept, options.kv_cache_fp8)
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
    fp8: Vec<&'a str>,
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
        fp8: options.fp8.iter().map(Regex::as_str).collect(),
        input_scale: options.input_scale,
        kv_cache: options.kv_cache_fp8.then_some("fp8"),
        done,
    };
    write_json(&out.join(PROVENANCE), &provenance)
}
