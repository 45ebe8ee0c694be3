//! What ran where in a decorated model: the counters of its layers, and the account of them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_core::module::Module;
use nvfp4_kernels::Nvfp4Error;
use serde::{Deserialize, Serialize};

use super::call::count;
use super::failure_message;
use super::mark::collect;
use crate::ops::OperandSpec;

/// The formats of the two operands of a product that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProductFormat {
    /// Both in NVFP4.
    Nvfp4,
    /// One in NVFP4, the other in the type of the activations: the forward of `weight_only_qat`.
    Nvfp4Mixed,
    /// Both in MXFP8.
    Mxfp8,
    /// Both in the type of the activations: by a recipe of bf16, or by a [`LayerMode`].
    ///
    /// [`LayerMode`]: crate::LayerMode
    HighPrecision,
}

impl ProductFormat {
    /// All formats, in the order of the variants.
    pub const ALL: [Self; 4] = [
        Self::Nvfp4,
        Self::Nvfp4Mixed,
        Self::Mxfp8,
        Self::HighPrecision,
    ];

    /// The format of a product of what the two specs make.
    pub(super) fn of(operands: [OperandSpec; 2]) -> Self {
        match operands.map(|operand| operand.is_nvfp4()) {
            [true, true] => Self::Nvfp4,
            [true, false] | [false, true] => Self::Nvfp4Mixed,
            [false, false] if operands.contains(&OperandSpec::Mxfp8) => Self::Mxfp8,
            [false, false] => Self::HighPrecision,
        }
    }
}

impl fmt::Display for ProductFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvfp4 => "NVFP4",
            Self::Nvfp4Mixed => "NVFP4 x high precision",
            Self::Mxfp8 => "MXFP8",
            Self::HighPrecision => "high precision",
        })
    }
}

/// How often the product of one role ran in one layer.
#[derive(Debug, Default)]
pub(super) struct RoleCounters {
    ran: [AtomicU64; ProductFormat::ALL.len()],
    missed: AtomicU64,
}

impl RoleCounters {
    /// A product of what `operands` make was taken.
    pub fn taken(&self, operands: [OperandSpec; 2]) {
        count(&self.ran[ProductFormat::of(operands) as usize]);
    }

    /// A product was not taken.
    pub fn missed(&self) {
        count(&self.missed);
    }

    fn report(&self) -> RoleReport {
        let ran = |format: ProductFormat| self.ran[format as usize].load(Ordering::Relaxed);
        RoleReport {
            nvfp4: ran(ProductFormat::Nvfp4),
            nvfp4_mixed: ran(ProductFormat::Nvfp4Mixed),
            mxfp8: ran(ProductFormat::Mxfp8),
            high_precision: ran(ProductFormat::HighPrecision),
            missed: self.missed.load(Ordering::Relaxed),
        }
    }
}

/// How often each thing happened in one layer.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub forward: RoleCounters,
    pub dgrad: RoleCounters,
    pub wgrad: RoleCounters,
    pub wgrad_wasted: AtomicU64,
    pub bias_after: AtomicU64,
}

impl Counters {
    fn report(&self, high_precision: bool) -> LayerReport {
        LayerReport {
            high_precision,
            forward: self.forward.report(),
            dgrad: self.dgrad.report(),
            wgrad: self.wgrad.report(),
            wgrad_wasted: self.wgrad_wasted.load(Ordering::Relaxed),
            bias_after: self.bias_after.load(Ordering::Relaxed),
        }
    }
}

/// The products of one layer in one role, by the formats that their operands had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleReport {
    /// [`ProductFormat::Nvfp4`].
    pub nvfp4: u64,
    /// [`ProductFormat::Nvfp4Mixed`].
    pub nvfp4_mixed: u64,
    /// [`ProductFormat::Mxfp8`].
    pub mxfp8: u64,
    /// [`ProductFormat::HighPrecision`]: what the recipe or the mode of the layer asks for.
    pub high_precision: u64,
    /// Products that were not taken: Burn computed them, in the type of their operands, whatever the
    /// recipe says.
    pub missed: u64,
}

impl RoleReport {
    /// Products that were taken with operands in `format`.
    pub fn of(&self, format: ProductFormat) -> u64 {
        match format {
            ProductFormat::Nvfp4 => self.nvfp4,
            ProductFormat::Nvfp4Mixed => self.nvfp4_mixed,
            ProductFormat::Mxfp8 => self.mxfp8,
            ProductFormat::HighPrecision => self.high_precision,
        }
    }

    /// Products that were taken, in whatever format.
    pub fn taken(&self) -> u64 {
        ProductFormat::ALL
            .map(|format| self.of(format))
            .iter()
            .sum()
    }
}

/// `12 NVFP4 + 3 high precision, 1 missed`.
impl fmt::Display for RoleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = ProductFormat::ALL
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

/// Where the products of one layer ran and in which formats, since the model was decorated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Whether the recipe keeps the layer in high precision. It is Burn's own then, and nothing is
    /// counted. (Layers that a mode has put into high precision are counted.)
    pub high_precision: bool,
    /// The forward products.
    pub forward: RoleReport,
    /// The products for the gradient of the input.
    pub dgrad: RoleReport,
    /// The products for the gradient of the weight.
    pub wgrad: RoleReport,
    /// High-precision weight gradients that Burn computed besides and that were thrown away. They
    /// cost time and change nothing.
    pub wgrad_wasted: u64,
    /// Biases that were added after the product had been rounded, and not before as
    /// [`Nvfp4Linear`](crate::Nvfp4Linear) does.
    pub bias_after: u64,
}

impl LayerReport {
    /// Forward, input gradient and weight gradient.
    pub fn roles(&self) -> [RoleReport; 3] {
        [self.forward, self.dgrad, self.wgrad]
    }
}

/// Wait for the devices of `model`, and say what ran where in its decorated layers.
///
/// # Errors
/// When an operation failed, or when the model has no decorated layer. A broken guarantee is no
/// error here; see [`Nvfp4Report::check`].
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
            let report = mark.layer.counters.report(high_precision);
            (mark.layer.path.clone(), report)
        })
        .collect();
    Ok(Nvfp4Report {
        layers,
        left_alone: group.left_alone.clone(),
        failures: group.failures(),
    })
}

/// What ran where in a decorated model, since it was decorated.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nvfp4Report {
    /// The decorated layers, by path.
    pub layers: BTreeMap<String, LayerReport>,
    /// Paths of the linear layers that are not decorated: heads, routers, and those that were
    /// excluded. They are Burn's own, and nothing is known of them.
    pub left_alone: Vec<String>,
    /// Broken guarantees, each with the name of its layer.
    pub failures: Vec<String>,
}

impl Nvfp4Report {
    /// Products of decorated layers that were not taken.
    pub fn missed(&self) -> u64 {
        let roles = self.layers.values().flat_map(LayerReport::roles);
        roles.map(|role| role.missed).sum()
    }

    /// Whether products of decorated layers were taken, and all of them had operands in `format`.
    pub fn is_all(&self, format: ProductFormat) -> bool {
        let sum = |count: &dyn Fn(RoleReport) -> u64| -> u64 {
            let roles = self.layers.values().flat_map(LayerReport::roles);
            roles.map(count).sum()
        };
        let taken = sum(&|role| role.taken());
        taken > 0 && self.missed() == 0 && taken == sum(&|role| role.of(format))
    }

    /// Fail unless every product of every decorated layer was taken, and so had the formats that the
    /// recipe and the mode of its layer ask for.
    ///
    /// Those formats need not be NVFP4: [`layers`](Self::layers) says which they were, and
    /// [`is_all`](Self::is_all) asks for one.
    ///
    /// # Errors
    /// With the layers where one was not, or where another guarantee was broken.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        let found = failure_message(&self.failures)
            .or_else(|| (self.missed() > 0).then(|| format!("products missed:\n{self}")));
        match found {
            Some(found) => Err(Nvfp4Error::value(
                "model",
                found,
                "every product of a decorated layer taken, in the formats of its recipe",
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
        assert!(!report.is_all(ProductFormat::Nvfp4));
        let up = report.layers.get_mut("up").unwrap();
        (up.forward, up.dgrad) = (role(3, 0, 0), role(3, 0, 0));
        report.check().unwrap();
        assert!(report.is_all(ProductFormat::Nvfp4));
        assert!(!report.is_all(ProductFormat::Mxfp8));
    }
}
