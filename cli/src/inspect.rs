//! `nvfp4 inspect`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use indicatif::HumanBytes;
use nvfp4_lm::interchange::{Checkpoint, GlobalScale};

use crate::table::table;

#[derive(Args)]
pub(crate) struct Inspect {
    /// Inspect the model in this folder
    #[arg(value_name = "DIR")]
    model: PathBuf,
}

impl Inspect {
    pub(crate) fn run(self) -> Result<()> {
        let checkpoint = Checkpoint::scan(&self.model)?;
        for line in describe(&checkpoint) {
            println!("{line}");
        }
        let problems = checkpoint.problems().len();
        ensure!(
            problems == 0,
            "{}: {problems} problem(s), for which readers refuse the model or mis-scale it",
            self.model.display()
        );
        Ok(())
    }
}

/// Describes the contents of the folder, one line per item.
fn describe(checkpoint: &Checkpoint) -> Vec<String> {
    let mut lines = Vec::new();
    match checkpoint.config() {
        Some(config) => {
            let cache = if config.kv_cache_fp8 {
                "FP8"
            } else {
                "not quantized"
            };
            lines.push(format!(
                "{}, {}, KV cache {cache}",
                config.dialect.name(),
                config.scheme.name()
            ));
        }
        None => lines.push("not quantized".into()),
    }
    let head = ["tensor", "scheme", "shape", "bytes", "global", "input"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let mut quantized = 0;
    let scale = |scale: Option<GlobalScale>| match scale {
        Some(scale) => format!("{:e}", scale.value()),
        None => "-".into(),
    };
    for (module, layer) in checkpoint.layers() {
        quantized += layer.bytes;
        rows.push(vec![
            module.clone(),
            "nvfp4".into(),
            format!("{} x {}", layer.n, layer.k),
            layer.bytes.to_string(),
            scale(Some(layer.global)),
            scale(layer.input_global),
        ]);
    }
    let mut plain = 0;
    for tensor in checkpoint.tensors().iter() {
        let is_plain = checkpoint
            .plain()
            .binary_search_by(|name| name.as_str().cmp(tensor.name));
        if is_plain.is_err() {
            continue;
        }
        plain += tensor.bytes.len();
        let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
        rows.push(vec![
            tensor.name.to_owned(),
            format!("{:?}", tensor.dtype).to_lowercase(),
            shape.join(" x "),
            tensor.bytes.len().to_string(),
            "-".into(),
            "-".into(),
        ]);
    }
    lines.extend(table("lllrrr", &rows));
    for (attention, [keys, values]) in checkpoint.kv_scales() {
        let scale = |scale: &Option<f32>| scale.map_or("none".into(), |scale| format!("{scale:e}"));
        let (keys, values) = (scale(keys), scale(values));
        lines.push(format!(
            "{attention}: FP8 scales of keys {keys}, of values {values}"
        ));
    }
    for (name, reason) in checkpoint.unused() {
        lines.push(format!("not used: {name}: {reason}"));
    }
    if !checkpoint.is_known() {
        let kind = &checkpoint.json()["model_type"];
        lines.push(format!(
            "model_type is {kind}, which is not known here: the tensors were not held against \
             config.json, and every matrix is taken for a linear layer"
        ));
    }
    let scaled = checkpoint.layers().values().filter(|layer| layer.pre_quant);
    match scaled.count() {
        0 => {}
        count => lines.push(format!(
            "{count} layers multiply their input by a scale for each feature (pre_quant_scale)"
        )),
    }
    let human = |bytes: usize| HumanBytes(bytes as u64);
    lines.push(format!(
        "{} quantized layers of {}, {} other tensors of {}",
        checkpoint.layers().len(),
        human(quantized),
        checkpoint.plain().len(),
        human(plain)
    ));
    if let Some(config) = checkpoint.config() {
        lines.push(format!("excluded: {}", config.exclude.join(", ")));
    }
    for problem in checkpoint.problems() {
        lines.push(format!("problem: {}: {}", problem.name, problem.what));
    }
    lines
}
