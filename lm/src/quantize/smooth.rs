//! AWQ-style smoothing: input features with large values get larger weights before quantization.
//!
//! The output of a layer does not change if column j of its weight is multiplied by s(j) and input
//! feature j is divided by s(j). For an important column j, s(j) > 1 makes its rounding error
//! smaller relative to its weights (Lin et al., arXiv 2306.00978). The division costs nothing at
//! run time, because it is folded into the producer of the input:
//!
//! | reader | producer of its input | divided tensor |
//! |---|---|---|
//! | q/k/v | `input_layernorm` | the gain |
//! | gate/up, router | the norm before the feed-forward | the gain |
//! | down | up, whose output is multiplied by that of the activation | its rows and bias |
//! | o | v; attention outputs weighted means of it | its rows and bias |
//!
//! All query heads that read one value head share its s. The input of down is not smoothed if the
//! activation clamps up and adds 1 to it, as that of gpt-oss.
//!
//! Before quantization, the smoothed model computes the same up to `f32` rounding. A gain g is
//! stored as g' = g / s, rounded to its type, and the columns are multiplied by g / g' instead of
//! s. If norms multiply by 1 + weight, the gain is this sum. A matrix that stays in high precision (router, excluded layer, bias) is multiplied only by
//! powers of two, which do not round its elements.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use half::{bf16, f16};
use nvfp4_formats::BLOCK;
use nvfp4_formats::ptq::{BlockQuantizer, Rule, ScaleChoice};
use rayon::prelude::*;
use safetensors::Dtype;

use super::decoded::Decoded;
use super::inputs::Inputs;
use super::plan::Plan;
use crate::decoder::names::{self, Site};
use crate::hf::{DecoderConfig, FeedForwardConfig, GateActivation, TensorFolder, TensorSink};

/// Largest exponent tried: s = rms(x)^(i / 10), for i from 0 to this value.
const EXPONENTS: u32 = 10;
/// Number of rows of each weight, evenly spaced, whose errors are compared.
const SAMPLED_ROWS: usize = 256;
/// Lower bound on a feature's size, as a share of the largest; smaller features are raised to it.
const FLOOR: f64 = 1.0 / 1024.0;

/// Smoothing of inputs before quantization.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Smoothing {
    /// No smoothing
    #[default]
    None,
    /// Scale by rms(x)^α per input feature, with the α from 0 to 1 that gives the smallest error
    Awq,
}

impl Smoothing {
    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Awq => "awq",
        }
    }
}

/// Producer of an input, into which the division by s is folded.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Maker {
    /// A norm; name of its gain tensor.
    Norm(String),
    /// A linear layer, whose rows are divided; name of the module.
    Linear(String),
}

/// An input that is smoothed.
#[derive(Debug, Clone)]
struct Fold {
    maker: Maker,
    /// Index of the producer's output for each input feature of the readers.
    output_of: Vec<usize>,
    /// Number of the producer's outputs.
    outputs: usize,
    /// Quantized layers that read the input, grouped by shared global scale.
    readers: Vec<Vec<String>>,
    /// High-precision weights that read the input.
    plain_readers: Vec<String>,
    /// High-precision tensors, other than the gain, whose rows are divided.
    plain_rows: Vec<String>,
}

/// The smoothed inputs of a model, by decoder layer (`model.layers.0`).
#[derive(Debug, Default)]
pub(super) struct Smoother {
    folds: BTreeMap<String, Vec<Fold>>,
    /// High-precision tensors that are rewritten, by decoder layer.
    rewritten: BTreeMap<String, BTreeSet<String>>,
    /// Number that norms add to their weight.
    gain_offset: f32,
}

impl Smoother {
    /// Plans the smoothing of a model of `config`. With `keeps_values` the outputs of v are not
    /// scaled, because the scales of an FP8 cache come from the calibration.
    pub fn new(
        config: &DecoderConfig,
        tensors: &TensorFolder,
        plan: &Plan,
        keeps_values: bool,
    ) -> Self {
        let mut smoother = Self {
            gain_offset: f32::from(u8::from(config.block.norm_plus_one)),
            ..Self::default()
        };
        for index in 0..config.layers.len() {
            let folds = Folds {
                config,
                tensors,
                plan,
            }
            .of_layer(index, keeps_values);
            let layer = names::layer(index).trim_end_matches('.').to_owned();
            let plain = folds.iter().flat_map(Fold::plain).cloned().collect();
            smoother.rewritten.insert(layer.clone(), plain);
            smoother.folds.insert(layer, folds);
        }
        smoother
    }

    /// Returns true if a layer's [`write_plain`](LayerScales::write_plain) writes the
    /// high-precision tensor `name`.
    pub fn rewrites(&self, name: &str) -> bool {
        self.rewritten.values().any(|names| names.contains(name))
    }

    /// Returns the high-precision tensors that [`write_plain`](LayerScales::write_plain) writes for
    /// the decoder layer `layer`.
    pub fn rewritten(&self, layer: &str) -> impl Iterator<Item = &String> {
        self.rewritten.get(layer).into_iter().flatten()
    }

    /// Computes the scales of the decoder layer `layer`, for weights that are quantized by the rule
    /// and the choice of block scales of `kind`. The weights that it reads stay in `decoded`.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or its type is not a float.
    pub fn scales(
        &self,
        layer: &str,
        decoded: &mut Decoded<'_>,
        inputs: &Inputs<'_>,
        kind: (Rule, ScaleChoice),
    ) -> Result<LayerScales> {
        let mut scales = LayerScales::default();
        for fold in self.folds.get(layer).map_or(&[][..], Vec::as_slice) {
            let gain = match &fold.maker {
                Maker::Norm(gain) => Some(gain),
                Maker::Linear(_) => None,
            };
            for name in fold.plain() {
                if !scales.plain.contains_key(name) {
                    let offset = match gain == Some(name) {
                        true => self.gain_offset,
                        false => 0.0,
                    };
                    let tensor = Plain::read(decoded.tensors(), name, offset)?;
                    scales.plain.insert(name.clone(), tensor);
                }
            }
            if let Some(s) = fold.search(decoded, inputs, &scales.plain, kind)? {
                fold.apply(&s, &mut scales)?;
            }
        }
        Ok(scales)
    }
}

/// Builds the folds of a layer.
struct Folds<'a> {
    config: &'a DecoderConfig,
    tensors: &'a TensorFolder,
    plan: &'a Plan,
}

impl Folds<'_> {
    fn of_layer(&self, index: usize, keeps_values: bool) -> Vec<Fold> {
        let config = self.config;
        let path = names::layer(index);
        let norms = names::norms(config);
        let norm = |name: &str| Maker::Norm(format!("{path}{name}.weight"));
        let same = |width: usize| (0..width).collect::<Vec<_>>();
        let module = |site: Site, expert| site.module(config, index, expert);
        let modules = |site: Site| -> Vec<String> {
            let leaves = site.leaves(config).iter();
            leaves.map(|leaf| format!("{path}{leaf}")).collect()
        };
        let qkv = modules(Site::Qkv);
        let mut folds = Vec::new();
        if let Some(latent) = &config.block.latent {
            let ranks = [latent.q_rank, Some(latent.kv_rank)];
            let sites = [Site::LatentQuery, Site::LatentKv];
            for ((name, rank), site) in names::LATENT_NORMS.into_iter().zip(ranks).zip(sites) {
                if let Some(rank) = rank {
                    folds.push(self.fold(norm(name), modules(site), same(rank)));
                }
            }
        } else if !keeps_values {
            let (head, group) = (config.head, config.heads / config.kv_heads);
            let output_of = (0..config.heads * head)
                .map(|feature| feature / head / group * head + feature % head)
                .collect();
            let out = vec![module(Site::Out, None)];
            folds.push(self.fold(Maker::Linear(qkv[2].clone()), out, output_of));
        }
        folds.push(self.fold(norm(norms.attention), qkv, same(config.d_model)));
        let [_, up_leaf, _] = names::gate_up_down(config.family);
        let up_of = |gate: &str, leaf: &str| match gate.rsplit_once('.') {
            Some((parent, _)) => format!("{parent}.{leaf}"),
            None => leaf.to_owned(),
        };
        let (mut gate_up, experts, hidden) = match config.layers[index].feed_forward {
            FeedForwardConfig::Dense { hidden } => (Vec::new(), vec![None], hidden),
            FeedForwardConfig::Moe {
                experts,
                hidden,
                shared,
                ..
            } => {
                let [moe, router] = [names::moe(config.family), names::router(config.family)];
                let router = format!("{path}{moe}.{router}");
                let mut readers = vec![router];
                if let Some(hidden) = shared {
                    let gate_up = modules(Site::SharedGateUp);
                    let (up, down) = (gate_up[1].clone(), modules(Site::SharedDown));
                    folds.push(self.fold(Maker::Linear(up), down, same(hidden)));
                    readers.extend(gate_up);
                }
                (readers, (0..experts).map(Some).collect(), hidden)
            }
        };
        for expert in experts {
            let leaf = if expert.is_some() { up_leaf } else { "up_proj" };
            let gate = module(Site::GateUp, expert);
            let up = up_of(&gate, leaf);
            // A clamped SwiGLU is not proportional to up.
            if !matches!(
                config.block.activation,
                GateActivation::ClampedSwiGlu { .. }
            ) {
                let down = vec![module(Site::Down, expert)];
                folds.push(self.fold(Maker::Linear(up.clone()), down, same(hidden)));
            }
            gate_up.extend([gate, up]);
        }
        let maker = norm(norms.feed_forward);
        folds.push(self.fold(maker, gate_up, same(config.d_model)));
        folds.retain(|fold| !fold.readers.is_empty());
        folds
    }

    /// Returns the fold for the input of `modules`, produced by `maker`. Without quantized readers,
    /// nothing is smoothed.
    fn fold(&self, maker: Maker, modules: Vec<String>, output_of: Vec<usize>) -> Fold {
        let groups = self.plan.groups.iter();
        let readers = groups.filter(|group| group.iter().all(|module| modules.contains(module)));
        let plain = modules
            .iter()
            .filter(|module| self.plan.kept.contains_key(*module));
        let plain_readers = plain.map(|module| format!("{module}.weight")).collect();
        let mut plain_rows = Vec::new();
        if let Maker::Linear(module) = &maker {
            let [weight, bias] = ["weight", "bias"].map(|leaf| format!("{module}.{leaf}"));
            if self.plan.kept.contains_key(module) {
                plain_rows.push(weight);
            }
            if self.tensors.contains(&bias) {
                plain_rows.push(bias);
            }
        }
        Fold {
            maker,
            outputs: output_of.iter().max().map_or(0, |last| last + 1),
            output_of,
            readers: readers.cloned().collect(),
            plain_readers,
            plain_rows,
        }
    }
}

/// Rows of a weight that are used to compare exponents.
struct Sample {
    rows: Vec<f32>,
    /// Amax of each column over all rows of the weight.
    column_amax: Vec<f32>,
    /// `E[x²]` of the weight's input.
    weights: Vec<f32>,
}

impl Fold {
    /// Returns the names of all high-precision tensors that are rewritten.
    fn plain(&self) -> impl Iterator<Item = &String> {
        let gain = match &self.maker {
            Maker::Norm(gain) => Some(gain),
            Maker::Linear(_) => None,
        };
        let plain = self.plain_readers.iter().chain(&self.plain_rows);
        plain.chain(gain)
    }

    /// Searches the s of each output of the producer; `None` if the input is unknown.
    fn search(
        &self,
        decoded: &mut Decoded<'_>,
        inputs: &Inputs<'_>,
        plain: &BTreeMap<String, Plain>,
        (rule, choice): (Rule, ScaleChoice),
    ) -> Result<Option<Vec<f32>>> {
        let Some(mean) = self.mean_squares(inputs)? else {
            return Ok(None);
        };
        let Some(logs) = self.logarithms(&mean) else {
            return Ok(None);
        };
        let mut groups = Vec::new();
        for group in &self.readers {
            let sample = |module: &String| self.sample(decoded, inputs, module, &mean);
            groups.push(group.iter().map(sample).collect::<Result<Vec<_>>>()?);
        }
        let mut best: Option<(f64, Vec<f32>)> = None;
        for exponent in 0..=EXPONENTS {
            let exponent = f64::from(exponent) / f64::from(EXPONENTS);
            let s: Vec<f32> = (logs.iter())
                .map(|log| (exponent * log).exp() as f32)
                .collect();
            let s = self.exact(s, plain)?;
            let columns = self.columns(&s);
            let error: f64 = groups
                .iter()
                .map(|group| error_of(group, &columns, (rule, choice)))
                .sum();
            if best.as_ref().is_none_or(|(least, _)| error < *least) {
                best = Some((error, s));
            }
        }
        Ok(best.map(|(_, s)| s))
    }

    /// Returns `E[x²]` of each input feature over the tokens of all readers.
    fn mean_squares(&self, inputs: &Inputs<'_>) -> Result<Option<Vec<f64>>> {
        let k = self.output_of.len();
        let (mut squares, mut tokens) = (vec![0.0; k], 0.0);
        for module in self.readers.iter().flatten() {
            let Some(stats) = inputs.of(module) else {
                continue;
            };
            ensure!(
                stats.k() == k,
                "{module}: calibration saw inputs of {} features, but it has {k}",
                stats.k()
            );
            tokens += stats.tokens() as f64;
            let sums = squares.iter_mut().zip(&stats.squares);
            sums.for_each(|(sum, square)| *sum += square);
        }
        squares.iter_mut().for_each(|sum| *sum /= tokens);
        Ok((tokens > 0.0).then_some(squares))
    }

    /// Returns ln rms(x) of each output of the producer, centered so that the largest and the
    /// smallest are equally far from 0.
    fn logarithms(&self, mean: &[f64]) -> Option<Vec<f64>> {
        let (mut sums, mut counts) = (vec![0.0; self.outputs], vec![0.0f64; self.outputs]);
        for (&output, mean) in self.output_of.iter().zip(mean) {
            sums[output] += mean;
            counts[output] += 1.0;
        }
        let rms: Vec<f64> = (sums.iter().zip(&counts))
            .map(|(sum, count)| (sum / count.max(1.0)).sqrt())
            .collect();
        let largest = rms.iter().copied().fold(0.0, f64::max);
        if largest == 0.0 || !largest.is_finite() {
            return None;
        }
        let logs: Vec<f64> = (rms.iter())
            .map(|rms| rms.max(FLOOR * largest).ln())
            .collect();
        let least = logs.iter().copied().fold(f64::INFINITY, f64::min);
        let middle = (largest.ln() + least) / 2.0;
        Some(logs.iter().map(|log| log - middle).collect())
    }

    fn sample(
        &self,
        decoded: &mut Decoded<'_>,
        inputs: &Inputs<'_>,
        module: &str,
        mean: &[f64],
    ) -> Result<Sample> {
        let k = self.output_of.len();
        let (tensor, values) = decoded.get(module)?;
        ensure!(
            tensor.shape.len() == 2 && tensor.shape[1] == k,
            "{tensor} is {:?}, but its input has {k} features",
            tensor.shape
        );
        let mut column_amax = vec![0.0f32; k];
        for row in values.chunks_exact(k) {
            let columns = column_amax.iter_mut().zip(row);
            columns.for_each(|(amax, value)| *amax = amax.max(value.abs()));
        }
        let n = tensor.shape[0];
        let count = n.min(SAMPLED_ROWS);
        let row = |i: usize| &values[i * n / count * k..][..k];
        let rows = (0..count).flat_map(|i| row(i).iter().copied()).collect();
        let weights = match inputs.of(module) {
            Some(stats) => stats.mean_squares(),
            None => mean.iter().map(|mean| *mean as f32).collect(),
        };
        Ok(Sample {
            rows,
            column_amax,
            weights,
        })
    }

    /// Rounds `s` to values that the high-precision tensors can absorb exactly.
    fn exact(&self, s: Vec<f32>, plain: &BTreeMap<String, Plain>) -> Result<Vec<f32>> {
        let get = |name: &String| plain.get(name).with_context(|| format!("no tensor {name}"));
        let gain = match &self.maker {
            Maker::Norm(gain) => Some(get(gain)?),
            Maker::Linear(_) => None,
        };
        if self.plain_readers.is_empty() && self.plain_rows.is_empty() {
            let Some(gain) = gain else { return Ok(s) };
            let effective = s.iter().zip(&gain.values).map(|(s, gain_before)| {
                let s = gain_before / gain.rounded(gain_before / s);
                match s.is_normal() && s > 0.0 {
                    true => s,
                    false => 1.0,
                }
            });
            return Ok(effective.collect());
        }
        let mut s: Vec<f32> = s.iter().map(|s| s.log2().round().exp2()).collect();
        let divided = self
            .plain_rows
            .iter()
            .map(get)
            .collect::<Result<Vec<_>>>()?;
        for tensor in divided.into_iter().chain(gain) {
            let width = tensor.values.len() / self.outputs;
            for (s, row) in s.iter_mut().zip(tensor.values.chunks_exact(width)) {
                if !row.iter().all(|value| tensor.holds(value / *s)) {
                    *s = 1.0;
                }
            }
        }
        for name in &self.plain_readers {
            let tensor = get(name)?;
            for row in tensor.values.chunks_exact(self.output_of.len()) {
                for (value, &output) in row.iter().zip(&self.output_of) {
                    if !tensor.holds(value * s[output]) {
                        s[output] = 1.0;
                    }
                }
            }
        }
        Ok(s)
    }

    /// Returns the s of each input feature.
    fn columns(&self, s: &[f32]) -> Vec<f32> {
        self.output_of.iter().map(|&output| s[output]).collect()
    }

    fn apply(&self, s: &[f32], scales: &mut LayerScales) -> Result<()> {
        let columns = self.columns(s);
        for module in self.readers.iter().flatten() {
            scales.columns.insert(module.clone(), columns.clone());
        }
        let mut divided = self.plain_rows.clone();
        match &self.maker {
            Maker::Norm(gain) => divided.push(gain.clone()),
            Maker::Linear(module) => {
                scales.rows.insert(module.clone(), s.to_vec());
            }
        }
        let plain = &mut scales.plain;
        for name in &divided {
            let tensor = plain
                .get_mut(name)
                .with_context(|| format!("no tensor {name}"))?;
            divide_rows(&mut tensor.values, s);
        }
        for name in &self.plain_readers {
            let tensor = plain
                .get_mut(name)
                .with_context(|| format!("no tensor {name}"))?;
            multiply_columns(&mut tensor.values, &columns);
        }
        Ok(())
    }
}

/// Returns the output error of the weights `group`, which share their global scale, if their
/// columns are multiplied by `columns` before quantization: Σ `E[x²]` (w − ŵ / s)² over the rows.
fn error_of(group: &[Sample], columns: &[f32], (rule, choice): (Rule, ScaleChoice)) -> f64 {
    let amax = group
        .iter()
        .flat_map(|sample| sample.column_amax.iter().zip(columns))
        .fold(0.0f32, |amax, (value, s)| amax.max(value * s));
    let quantizer = BlockQuantizer::new(rule, choice, amax);
    if quantizer.global.check().is_err() {
        return f64::INFINITY;
    }
    let of_sample = |sample: &Sample| -> f64 {
        let weights = sample.weights.iter().zip(columns);
        let weights: Vec<f32> = weights.map(|(weight, s)| weight / (s * s)).collect();
        let of_row = |row: &[f32]| -> f64 {
            let scaled = row.iter().zip(columns).map(|(value, s)| value * s);
            let scaled: Vec<f32> = scaled.collect();
            let blocks = scaled.as_chunks::<BLOCK>().0.iter();
            blocks
                .zip(weights.as_chunks().0)
                .map(|(block, weights)| quantizer.least_error(block, weights))
                .sum()
        };
        // Summed in row order, so that the result is the same on every machine.
        let rows: Vec<f64> = sample.rows.par_chunks(columns.len()).map(of_row).collect();
        rows.iter().sum()
    };
    group.iter().map(of_sample).sum()
}

/// A high-precision tensor.
#[derive(Debug)]
struct Plain {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Values that the model computes with: the stored ones plus `offset`.
    values: Vec<f32>,
    offset: f32,
}

impl Plain {
    fn read(tensors: &TensorFolder, name: &str, offset: f32) -> Result<Self> {
        let tensor = tensors.get(name)?;
        ensure!(
            matches!(tensor.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16),
            "{tensor} is {:?}, but smoothing scales tensors of F32, BF16 or F16",
            tensor.dtype
        );
        let mut values = tensor.to_f32()?;
        // Without an offset, negative zeros stay.
        if offset != 0.0 {
            values.iter_mut().for_each(|value| *value += offset);
        }
        Ok(Self {
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            values,
            offset,
        })
    }

    /// Returns true if the tensor's type represents `value` without rounding. A result that is
    /// subnormal in `f32` may already have been rounded.
    fn holds(&self, value: f32) -> bool {
        (value == 0.0 || value.is_normal()) && self.rounded(value) == value
    }

    /// Returns the value that the model computes with if `value` is stored.
    fn rounded(&self, value: f32) -> f32 {
        round(value - self.offset, self.dtype) + self.offset
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        let values = self.values.iter().map(|value| value - self.offset);
        Ok(match self.dtype {
            Dtype::F32 => values.flat_map(|value| value.to_le_bytes()).collect(),
            Dtype::BF16 => values
                .flat_map(|value| bf16::from_f32(value).to_le_bytes())
                .collect(),
            Dtype::F16 => values
                .flat_map(|value| f16::from_f32(value).to_le_bytes())
                .collect(),
            other => bail!("{other:?} is no type of smoothed tensors"),
        })
    }
}

/// Rounds `value` to the type `dtype`.
fn round(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::BF16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

fn multiply_columns(values: &mut [f32], columns: &[f32]) {
    for row in values.chunks_exact_mut(columns.len()) {
        row.iter_mut()
            .zip(columns)
            .for_each(|(value, s)| *value *= s);
    }
}

fn divide_columns(values: &mut [f32], columns: &[f32]) {
    for row in values.chunks_exact_mut(columns.len()) {
        row.iter_mut()
            .zip(columns)
            .for_each(|(value, s)| *value /= s);
    }
}

/// Divides row i of `values`, which has as many rows as `rows` has elements, by `rows[i]`.
fn divide_rows(values: &mut [f32], rows: &[f32]) {
    let width = values.len() / rows.len();
    for (row, s) in values.chunks_exact_mut(width).zip(rows) {
        row.iter_mut().for_each(|value| *value /= s);
    }
}

/// Scales of one decoder layer.
#[derive(Debug, Default)]
pub(super) struct LayerScales {
    /// Factors of the columns of a quantized module, which divide its input.
    columns: BTreeMap<String, Vec<f32>>,
    /// Divisors of the rows of a module.
    rows: BTreeMap<String, Vec<f32>>,
    /// High-precision tensors with the scales applied.
    plain: BTreeMap<String, Plain>,
}

impl LayerScales {
    /// Returns the divisors of the input features of `module`.
    pub fn columns(&self, module: &str) -> Option<&[f32]> {
        self.columns.get(module).map(Vec::as_slice)
    }

    /// Returns the scaled weight of the quantized `module`, given its `values`.
    pub fn scaled<'a>(&self, module: &str, values: &'a [f32]) -> Cow<'a, [f32]> {
        let mut values = Cow::Borrowed(values);
        if let Some(columns) = self.columns.get(module) {
            multiply_columns(values.to_mut(), columns);
        }
        if let Some(rows) = self.rows.get(module) {
            divide_rows(values.to_mut(), rows);
        }
        values
    }

    /// Reverts [`scaled`](Self::scaled), up to rounding.
    pub fn undo(&self, module: &str, values: &mut [f32]) {
        if let Some(rows) = self.rows.get(module) {
            let inverse: Vec<f32> = rows.iter().map(|s| 1.0 / s).collect();
            divide_rows(values, &inverse);
        }
        if let Some(columns) = self.columns.get(module) {
            divide_columns(values, columns);
        }
    }

    /// Adds the high-precision tensors to `writer`.
    ///
    /// # Errors
    /// Returns the errors of [`TensorSink::add`].
    pub fn write_plain(&self, writer: &mut dyn TensorSink) -> Result<()> {
        for (name, tensor) in &self.plain {
            writer.add(name, tensor.dtype, &tensor.shape, &tensor.bytes()?)?;
        }
        Ok(())
    }
}
