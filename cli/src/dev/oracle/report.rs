//! Report about a device, in one file that users can send back.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use nvfp4_lm::tokens::chat::strftime;
use serde::Serialize;
use serde_json::Value;

/// Description of the device.
#[derive(Serialize)]
pub(super) struct AboutDevice {
    /// Name on the command line.
    pub device: String,
    /// Name of the hardware.
    pub hardware: String,
    /// CubeCL runtime.
    pub runtime: String,
    /// Compute capability; 100 for 10.0.
    pub compute_capability: Option<u32>,
    /// Output of `nvidia-smi` for a GPU: name, driver, VBIOS, clocks and memory.
    pub nvidia_smi: Option<String>,
}

impl AboutDevice {
    /// Returns true if the device is a GPU.
    pub fn is_gpu(&self) -> bool {
        self.runtime == "cuda"
    }
}

/// A check and its result.
#[derive(Serialize)]
struct Entry {
    name: String,
    /// Outcome with the keys `result`, `detail`, `on` and `notes`.
    #[serde(flatten)]
    outcome: Value,
    seconds: f64,
}

/// The report. It is rewritten after each check, so that earlier results survive a machine crash.
#[derive(Serialize)]
pub(super) struct Report {
    program: &'static str,
    version: &'static str,
    date: String,
    #[serde(flatten)]
    about: AboutDevice,
    passed: usize,
    failed: usize,
    left_out: usize,
    checks: Vec<Entry>,
    #[serde(skip)]
    file: PathBuf,
}

impl Report {
    /// Creates a report without checks, in `file`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn new(file: &Path, about: AboutDevice) -> Result<Self> {
        let report = Self {
            program: "nvfp4 dev oracle",
            version: env!("CARGO_PKG_VERSION"),
            date: date()?,
            about,
            passed: 0,
            failed: 0,
            left_out: 0,
            checks: Vec::new(),
            file: file.to_owned(),
        };
        report.write()?;
        Ok(report)
    }

    /// Adds the JSON outcome of check `name` to the file, and prints it.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn add(&mut self, name: &str, outcome: Value, took: Duration) -> Result<()> {
        let text = |key: &str| outcome[key].as_str().unwrap_or_default().to_owned();
        let (result, detail, on) = (text("result"), text("detail"), text("on"));
        match &*result {
            "passed" => self.passed += 1,
            "left-out" => self.left_out += 1,
            _ => self.failed += 1,
        }
        let result = result.replace('-', " ");
        match detail.is_empty() {
            true => println!("{name:<24} {result:<9} {on}"),
            false => println!("{name:<24} {result:<9} {detail}"),
        }
        self.checks.push(Entry {
            name: name.to_owned(),
            outcome,
            seconds: (took.as_secs_f64() * 10.0).round() / 10.0,
        });
        self.write()
    }

    /// Returns the description of the device.
    pub fn about(&self) -> &AboutDevice {
        &self.about
    }

    /// Returns the number of failed checks.
    pub fn failed(&self) -> usize {
        self.failed
    }

    /// Returns the counts of results and the path of the report.
    pub fn summary(&self) -> String {
        format!(
            "{} passed, {} failed, {} left out; the report is in {}",
            self.passed,
            self.failed,
            self.left_out,
            self.file.display()
        )
    }

    fn write(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(self).context("a report in JSON")?;
        fs::write(&self.file, text + "\n")
            .with_context(|| format!("the report {} cannot be written", self.file.display()))
    }
}

/// Returns the output of `nvidia-smi` for GPU `index`, if available.
pub(super) fn nvidia_smi(index: usize) -> Option<String> {
    let fields = "name,driver_version,vbios_version,clocks.max.sm,power.limit,memory.total";
    let output = Command::new("nvidia-smi")
        .arg(format!("--query-gpu={fields}"))
        .args(["--format=csv,noheader", "--id"])
        .arg(index.to_string())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let text = text.trim();
    (output.status.success() && !text.is_empty()).then(|| text.to_owned())
}

/// Returns the time in UTC, as YYYY-MM-DD HH:MM.
fn date() -> Result<String> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seconds = now.map_or(0, |now| now.as_secs());
    strftime("%F %H:%M", seconds).map_err(anyhow::Error::msg)
}
