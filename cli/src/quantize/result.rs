//! Result of `nvfp4 quantize`, as text and as JSON.

use std::path::{Path, PathBuf};

use indicatif::HumanBytes;
use nvfp4_lm::eval::Estimate;
use nvfp4_lm::quantize::{Choices, Quantized, WeightFormat};
use nvfp4_lm::tokens::Texts;
use serde::Serialize;

use crate::perplexity::{Difference, TextsPerplexity};
use crate::table::table;

/// Result of the command.
#[derive(Serialize)]
pub(super) struct QuantizeResult<'a> {
    pub(super) model: &'a Path,
    pub(super) out: &'a Path,
    pub(super) dialect: &'static str,
    pub(super) scheme: &'static str,
    pub(super) method: &'static str,
    pub(super) smooth: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) calibration: Option<CalibrationData>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) evaluation: Option<Evaluation>,
    #[serde(flatten)]
    pub(super) quantized: &'a Quantized,
    pub(super) warnings: Vec<String>,
}

/// Texts that the model was calibrated on.
#[derive(Serialize)]
pub(super) struct CalibrationData {
    /// Number of tokens read.
    used_tokens: u64,
    /// Number of tokens of all files.
    tokens: usize,
    /// Tokens per sequence.
    length: usize,
    files: Vec<CalibrationFile>,
    /// Files and documents that are not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<String>,
}

#[derive(Serialize)]
struct CalibrationFile {
    path: PathBuf,
    documents: usize,
    tokens: usize,
}

/// Perplexities of the model and of the quantized model.
#[derive(Serialize)]
pub(super) struct Evaluation {
    before: TextsPerplexity,
    after: TextsPerplexity,
    /// Loss after minus loss before.
    difference: Difference,
}

impl CalibrationData {
    /// Describes a calibration on `used` tokens of `texts`, in sequences of `length`.
    pub(super) fn new(texts: &Texts, used: u64, length: usize) -> Self {
        let files = texts.files.iter().map(|file| CalibrationFile {
            path: file.path.clone(),
            documents: file.documents.len(),
            tokens: file.tokens(),
        });
        Self {
            used_tokens: used,
            tokens: texts.tokens(),
            length,
            files: files.collect(),
            left_out: texts.left_out(),
        }
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "calibrated on {} of {} tokens of {} file(s), in sequences of {}",
            self.used_tokens,
            self.tokens,
            self.files.len(),
            self.length
        )];
        lines.extend(self.left_out.clone());
        lines
    }
}

impl Evaluation {
    pub(super) fn new(before: TextsPerplexity, after: TextsPerplexity) -> Self {
        let difference = Estimate::difference(after.losses(), before.losses()).into();
        Self {
            before,
            after,
            difference,
        }
    }

    fn lines(&self) -> [String; 3] {
        [
            format!("before: {}", self.before.line()),
            format!("after:  {}", self.after.line()),
            format!("difference {}", self.difference.text(true)),
        ]
    }
}

impl QuantizeResult<'_> {
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = self
            .quantized
            .formats
            .iter()
            .flat_map(choices)
            .collect::<Vec<_>>();
        lines.extend(layers(self.quantized));
        lines.extend(casts(self.quantized));
        lines.extend(self.evaluation.iter().flat_map(Evaluation::lines));
        lines.extend(self.calibration.iter().flat_map(CalibrationData::lines));
        lines.push(format!(
            "{} {} by {}{} written to {}",
            self.dialect,
            self.scheme,
            self.method,
            match self.smooth {
                "none" => "",
                _ => ", smoothed,",
            },
            self.out.display()
        ));
        lines
    }
}

/// Says how exactly weights in MXFP4 were cast, if there are any.
fn casts(done: &Quantized) -> Option<String> {
    let casts: Vec<_> = done.layers.iter().filter_map(|layer| layer.cast).collect();
    let blocks: usize = casts.iter().map(|cast| cast.blocks).sum();
    let inexact: usize = casts.iter().map(|cast| cast.inexact_blocks).sum();
    let error = casts
        .iter()
        .fold(0f32, |most, cast| most.max(cast.largest_error));
    let exactness = match inexact {
        0 => "all exactly".to_owned(),
        _ => format!(
            "{} exactly, {inexact} with errors of at most {error:.1e} of the weight's amax",
            blocks - inexact
        ),
    };
    (!casts.is_empty()).then(|| {
        format!(
            "{} weights cast from MXFP4: {blocks} blocks of 16, {exactness}",
            casts.len()
        )
    })
}

/// Lists the groups of layers with the cost of each format, and the choice.
fn choices(chosen: &Choices) -> Vec<String> {
    let head = ["group", "bits", "KL nvfp4", "KL fp8", "format", "why"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for group in &chosen.groups {
        let name = match &group.modules[..] {
            [module] => module.clone(),
            [first, ..] => format!("{first} and {} more", group.modules.len() - 1),
            [] => String::new(),
        };
        let kl = |format: WeightFormat| {
            let cost = group.formats.iter().find(|cost| cost.format == format);
            cost.map_or("-".into(), |cost| format!("{:.3e}", cost.kl))
        };
        rows.push(vec![
            name,
            format!("{:.3}", group.bits),
            kl(WeightFormat::Nvfp4),
            kl(WeightFormat::Fp8),
            group.format.name().into(),
            group.why.clone(),
        ]);
    }
    let mut lines = table("lrrrll", &rows);
    lines.push(format!(
        "{:.4} bits per weight of at most {}; KL divergences in nats per token, over {} tokens",
        chosen.bits, chosen.budget, chosen.tokens
    ));
    lines
}

/// Lists the quantized and the skipped modules.
fn layers(done: &Quantized) -> Vec<String> {
    let head = [
        "layer",
        "format",
        "shape",
        "before",
        "after",
        "SQNR dB",
        "by E[x²]",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    let human = |bytes: usize| HumanBytes(bytes as u64).to_string();
    let (mut before, mut after) = (0, 0);
    for layer in &done.layers {
        before += layer.bytes_before;
        after += layer.bytes;
        rows.push(vec![
            layer.module.clone(),
            layer.format.name().into(),
            format!("{} x {}", layer.shape[0], layer.shape[1]),
            human(layer.bytes_before),
            human(layer.bytes),
            format!("{:.2}", layer.sqnr),
            layer
                .weighted_sqnr
                .map_or("-".into(), |sqnr| format!("{sqnr:.2}")),
        ]);
    }
    let mut left = 0;
    for layer in &done.kept {
        left += layer.bytes;
        let bytes = human(layer.bytes);
        rows.push(vec![
            layer.module.clone(),
            "high".into(),
            layer.reason.reason().to_owned(),
            bytes.clone(),
            bytes,
            "-".into(),
            "-".into(),
        ]);
    }
    let mut lines = table("lllrrrr", &rows);
    lines.push(format!(
        "{} layers quantized, {} to {}; {} layers left, {}; other tensors {}",
        done.layers.len(),
        human(before),
        human(after),
        done.kept.len(),
        human(left),
        human(done.other_bytes)
    ));
    if !done.unseen.is_empty() {
        lines.push(format!(
            "no token of the calibration reached {}: {}",
            done.unseen.len(),
            done.unseen.join(", ")
        ));
    }
    lines
}
