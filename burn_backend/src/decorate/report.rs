//! Report of a decorated model: counts of the GEMMs of its layers by format.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;

use burn_core::module::Module;
use nvfp4_formats::Nvfp4Error;
use serde::{Deserialize, Serialize};

use super::call::failure_message;
use super::counters::{Counters, GemmFormat, RoleCounters};
use super::mark::collect;

/// GEMM counts of one layer in one role, by operand formats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleReport {
    /// Number of GEMMs in [`GemmFormat::Nvfp4`].
    pub nvfp4: u64,
    /// Number of GEMMs in [`GemmFormat::Nvfp4Mixed`].
    pub nvfp4_mixed: u64,
    /// Number of GEMMs in [`GemmFormat::Mxfp8`].
    pub mxfp8: u64,
    /// Number of GEMMs in [`GemmFormat::Mxfp4`].
    #[serde(default)]
    pub mxfp4: u64,
    /// Number of GEMMs in [`GemmFormat::HighPrecision`], as requested by the recipe or the mode of
    /// the layer.
    pub high_precision: u64,
    /// Number of missed GEMMs: Burn computed them in the dtype of their operands, regardless of the
    /// recipe.
    pub missed: u64,
}

impl RoleReport {
    fn new(counters: &RoleCounters) -> Self {
        Self {
            nvfp4: counters.ran(GemmFormat::Nvfp4),
            nvfp4_mixed: counters.ran(GemmFormat::Nvfp4Mixed),
            mxfp8: counters.ran(GemmFormat::Mxfp8),
            mxfp4: counters.ran(GemmFormat::Mxfp4),
            high_precision: counters.ran(GemmFormat::HighPrecision),
            missed: counters.missed_count(),
        }
    }

    /// Number of GEMMs that ran with operands in `format`.
    pub fn of(&self, format: GemmFormat) -> u64 {
        match format {
            GemmFormat::Nvfp4 => self.nvfp4,
            GemmFormat::Nvfp4Mixed => self.nvfp4_mixed,
            GemmFormat::Mxfp8 => self.mxfp8,
            GemmFormat::Mxfp4 => self.mxfp4,
            GemmFormat::HighPrecision => self.high_precision,
        }
    }

    /// Number of GEMMs that ran by the recipe, in any format.
    pub fn routed(&self) -> u64 {
        GemmFormat::ALL.map(|format| self.of(format)).iter().sum()
    }
}

/// For example `12 NVFP4 + 3 high precision, 1 missed`.
impl fmt::Display for RoleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = GemmFormat::ALL
            .into_iter()
            .filter(|format| self.of(*format) > 0)
            .map(|format| format!("{} {format}", self.of(format)))
            .collect();
        if parts.is_empty() {
            parts.push("-".into());
        }
        let mut text = parts.join(" + ");
        if self.missed > 0 {
            text += &format!(", {} missed", self.missed);
        }
        f.pad(&text)
    }
}

/// GEMM counts of one layer by format, since the model was decorated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerReport {
    /// True if the recipe keeps the layer in high precision. Burn then runs it, and nothing is
    /// counted. (Layers that a mode has set to high precision are counted.)
    pub high_precision: bool,
    /// Forward GEMMs.
    pub forward: RoleReport,
    /// Input-gradient GEMMs.
    pub dgrad: RoleReport,
    /// Weight-gradient GEMMs.
    pub wgrad: RoleReport,
    /// Number of high-precision weight gradients that Burn computed in addition and that were
    /// discarded. They cost time and change nothing.
    pub wgrad_wasted: u64,
    /// Number of biases that were added after the GEMM's result was rounded, instead of before as
    /// in [`Nvfp4Linear`](crate::Nvfp4Linear).
    pub bias_after: u64,
}

impl LayerReport {
    fn new(counters: &Counters, high_precision: bool) -> Self {
        Self {
            high_precision,
            forward: RoleReport::new(&counters.forward),
            dgrad: RoleReport::new(&counters.dgrad),
            wgrad: RoleReport::new(&counters.wgrad),
            wgrad_wasted: counters.wgrad_wasted.load(Ordering::Relaxed),
            bias_after: counters.bias_after.load(Ordering::Relaxed),
        }
    }

    /// Returns the counts of forward, input gradient and weight gradient.
    pub fn roles(&self) -> [RoleReport; 3] {
        [self.forward, self.dgrad, self.wgrad]
    }
}

/// Waits for the devices of `model`, and returns the counts of the GEMMs of its decorated layers by
/// format.
///
/// # Errors
/// Returns an error if an operation failed, or if the model has no decorated layer. A broken
/// guarantee is not an error here; see [`Nvfp4Report::check`].
pub fn report<M: Module>(model: &M) -> Result<Nvfp4Report, Nvfp4Error> {
    for device in model.devices() {
        device
            .sync()
            .map_err(|error| Nvfp4Error::value("model", error.to_string(), "no failure"))?;
    }
    let marks = collect(model);
    let Some(first) = marks.first() else {
        return Err(Nvfp4Error::value(
            "model",
            "no decorated layer",
            "a model that `decorate` returned",
        ));
    };
    let group = &first.layer.group;
    let layers = marks
        .iter()
        .map(|mark| {
            let high_precision = mark.state.is_high_precision();
            let report = LayerReport::new(&mark.layer.counters, high_precision);
            (mark.layer.path.clone(), report)
        })
        .collect();
    Ok(Nvfp4Report {
        layers,
        left_alone: group.left_alone.clone(),
        failures: group.failures(),
    })
}

/// GEMM counts of a decorated model, since it was decorated.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nvfp4Report {
    /// Decorated layers, by path.
    pub layers: BTreeMap<String, LayerReport>,
    /// Paths of the layers that are not decorated: heads, routers, excluded linear layers,
    /// convolutions, and stacks of weights that are not included. Burn runs them in high precision,
    /// and nothing is counted.
    pub left_alone: Vec<String>,
    /// Broken guarantees, each with the name of its layer.
    pub failures: Vec<String>,
}

impl Nvfp4Report {
    /// Number of missed GEMMs of decorated layers.
    pub fn missed(&self) -> u64 {
        let roles = self.layers.values().flat_map(LayerReport::roles);
        roles.map(|role| role.missed).sum()
    }

    /// Returns true if GEMMs of decorated layers ran, none was missed, and all had operands in
    /// `format`.
    pub fn is_all(&self, format: GemmFormat) -> bool {
        let sum = |count: &dyn Fn(RoleReport) -> u64| -> u64 {
            let roles = self.layers.values().flat_map(LayerReport::roles);
            roles.map(count).sum()
        };
        let routed = sum(&|role| role.routed());
        routed > 0 && self.missed() == 0 && routed == sum(&|role| role.of(format))
    }

    /// Checks that no GEMM of a decorated layer was missed: all had the formats that the recipe and
    /// the mode of their layer request.
    ///
    /// Those formats need not be NVFP4: [`layers`](Self::layers) lists them, and
    /// [`is_all`](Self::is_all) tests for one format.
    ///
    /// # Errors
    /// Returns an error that names the layers where a GEMM was missed, or another guarantee was
    /// broken.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        let found = failure_message(&self.failures)
            .or_else(|| (self.missed() > 0).then(|| format!("GEMMs missed:\n{self}")));
        match found {
            Some(found) => Err(Nvfp4Error::value(
                "model",
                found,
                "every GEMM of a decorated layer in the formats of its recipe",
            )),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Nvfp4Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const HEADER: [&str; 6] = ["layer", "forward", "dgrad", "wgrad", "wasted", "late bias"];
        let mut rows = vec![HEADER.map(String::from)];
        for (path, layer) in &self.layers {
            let mut row = vec![path.clone()];
            if layer.high_precision {
                row.push("high precision".into());
            } else {
                row.extend(layer.roles().map(|role| role.to_string()));
                row.push(layer.wgrad_wasted.to_string());
                row.push(layer.bias_after.to_string());
            }
            row.resize(HEADER.len(), String::new());
            rows.push(row.try_into().expect("a row has the columns of the header"));
        }
        rows.extend(self.left_alone.iter().map(|path| {
            let mut row = HEADER.map(|_| String::new());
            row[0].clone_from(path);
            row[1] = "not decorated".into();
            row
        }));
        let widths: [usize; HEADER.len()] =
            std::array::from_fn(|i| rows.iter().map(|row| row[i].len()).max().unwrap_or(0));
        for row in &rows {
            let [path, others @ ..] = row;
            let mut line = format!("{path:0$}", widths[0]);
            for (cell, width) in others.iter().zip(&widths[1..]) {
                line += &format!("  {cell:>width$}");
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        for failure in &self.failures {
            writeln!(f, "{failure}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_formats_and_what_was_missed() {
        let role = |nvfp4, high_precision, missed| RoleReport {
            nvfp4,
            high_precision,
            missed,
            ..RoleReport::default()
        };
        let layer = LayerReport {
            forward: role(3, 2, 0),
            dgrad: role(0, 0, 1),
            ..LayerReport::default()
        };
        let mut report = Nvfp4Report {
            layers: BTreeMap::from([("up".into(), layer)]),
            left_alone: vec!["head".into()],
            failures: Vec::new(),
        };
        let text = report.to_string();
        for part in [
            "3 NVFP4 + 2 high precision",
            "-, 1 missed",
            "head  ",
            "not decorated",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(report.check().unwrap_err().to_string().contains("missed"));
        assert!(!report.is_all(GemmFormat::Nvfp4));
        let up = report.layers.get_mut("up").unwrap();
        (up.forward, up.dgrad) = (role(3, 0, 0), role(3, 0, 0));
        report.check().unwrap();
        assert!(report.is_all(GemmFormat::Nvfp4));
        assert!(!report.is_all(GemmFormat::Mxfp8));
    }
}
