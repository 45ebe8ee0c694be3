//! Figures of a part of the benchmarks.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Figures of one part, as `bench/run.py` writes them.
pub struct Part {
    pub value: Value,
}

impl Part {
    /// Returns the figures of a job that did not fail.
    pub fn job(&self, name: &str) -> Result<&Value> {
        let jobs = self.value["jobs"].as_array().context("no jobs")?;
        let job = jobs.iter().find(|job| job["name"] == name);
        let job = job.with_context(|| format!("no job {name}"))?;
        match &job["status"] {
            status if *status == json!(0) => Ok(&job["figures"]),
            status => bail!("{name} failed: {status}"),
        }
    }

    /// Returns the fields of a results file that say where and when it was measured.
    ///
    /// # Errors
    /// Returns an error if one is missing.
    pub fn origin(&self) -> Result<Value> {
        let text = |name: &str| {
            let value = self.value[name].as_str();
            value.with_context(|| format!("{name} is not a text"))
        };
        Ok(json!({
            "title": "",
            "gpu": text("gpu")?,
            "driver": text("driver")?,
            "date": text("date")?,
            "commit": text("commit")?,
            "command": format!("cargo xtask bench gpu, part {}", text("part")?),
        }))
    }
}

/// Rounds to three decimal places.
pub fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Returns the number `name` of `value`.
pub fn number(value: &Value, name: &str) -> Result<f64> {
    let found = value[name].as_f64();
    found.with_context(|| format!("{name} is not a number in {value}"))
}

/// Returns the list `name` of `figures`.
pub fn rows<'a>(figures: &'a Value, name: &str) -> Result<&'a Vec<Value>> {
    figures[name]
        .as_array()
        .with_context(|| format!("no {name}"))
}
