//! The checks of `nvfp4 dev oracle tcgen05`, each in a separate process.

use std::{env, process::Command, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use nvfp4::kernels::{
    bring_up::{Check, Outcome, match_random_bits},
    capabilities::Capabilities,
};
use serde_json::Value;

use super::{
    arguments::{CheckOptions, OneCheck, Tcgen05},
    device::TestedDevice,
    report::{AboutDevice, Report, nvidia_smi},
    subprocess::{self, Ended},
};
use crate::dev::name::NAME;
use crate::device::DeviceName;

impl CheckOptions {
    /// Runs the checks, each in a separate process.
    pub(super) fn run(&self) -> Result<Report> {
        let chosen = self.chosen()?;
        let device = TestedDevice::open(self.device.device)?;
        let capabilities = Capabilities::of(&device.client);
        let about = AboutDevice {
            device: device.name.to_string(),
            hardware: device.hardware,
            runtime: capabilities.runtime.to_owned(),
            compute_capability: capabilities.compute_capability,
            nvidia_smi: match device.name {
                DeviceName::Cuda(index) => nvidia_smi(index),
                DeviceName::Cpu | DeviceName::Flex => None,
            },
        };
        println!("device {}: {}", about.device, about.hardware);
        let name = about.device.clone();
        let mut report = Report::new(&self.out, about)?;
        let program = env::current_exe().context("the path of this program")?;
        let limit = Duration::from_secs(self.timeout);
        for check in chosen {
            let mut command = Command::new(&program);
            command.args([NAME, "oracle", "check", check.name(), "--device", &name]);
            let ended = subprocess::run(&mut command, limit)?;
            report.add(check.name(), outcome_of(&ended, limit), ended.took)?;
        }
        Ok(report)
    }

    /// Returns the requested checks, in their fixed order.
    fn chosen(&self) -> Result<Vec<Check>> {
        let known = Check::ALL.map(Check::name);
        for name in &self.only {
            ensure!(
                Check::of(name).is_some(),
                "no check is called {name}; there are {}",
                known.join(", ")
            );
        }
        let is_asked = |check: &Check| self.only.iter().any(|name| name == check.name());
        let all = Check::ALL.into_iter();
        Ok(match self.only.is_empty() {
            true => all.collect(),
            false => all.filter(is_asked).collect(),
        })
    }
}

/// Returns the outcome that a check reported, or describes how its process ended without one.
fn outcome_of(ended: &Ended, limit: Duration) -> Value {
    let said = ended.output.lines().next_back();
    let said = said.and_then(|line| serde_json::from_str::<Outcome>(line).ok());
    let outcome = match (said, ended.status) {
        (Some(outcome), _) => outcome,
        (None, Some(status)) => {
            let notes = ended.tail(20);
            Outcome::new("a process that failed", Err(format!("ended with {status}"))).notes(notes)
        }
        (None, None) => {
            let error = format!("did not end within {} seconds", limit.as_secs());
            Outcome::new("a process that hung", Err(error)).notes(ended.tail(20))
        }
    };
    serde_json::to_value(outcome).unwrap_or_default()
}

impl Tcgen05 {
    pub(super) fn run(self) -> Result<()> {
        self.options.run().and_then(|report| finish(&report))
    }
}

/// Prints a summary of the report. Returns an error if a check failed.
pub(super) fn finish(report: &Report) -> Result<()> {
    println!("{}", report.summary());
    ensure!(report.failed() == 0, "{} checks failed", report.failed());
    Ok(())
}

impl OneCheck {
    pub(super) fn run(self) -> Result<()> {
        let check =
            Check::of(&self.name).ok_or_else(|| anyhow!("no check is called {}", self.name))?;
        let device = TestedDevice::open(self.device.device)?;
        if check != Check::CvtRs {
            match_random_bits(&device.client).context(
                "no order of random bits explains the device's stochastic rounding, so that it \
                 cannot be compared with the oracle: see `nvfp4 dev oracle cvt-rs`",
            )?;
        }
        let outcome = check.run(&device.client);
        println!("{}", serde_json::to_string(&outcome)?);
        Ok(())
    }
}
