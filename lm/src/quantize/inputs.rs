//! Input statistics that quantization takes from a calibration.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use nvfp4_formats::ptq::{GlobalScale, Rule};

use super::stats::{Calibration, InputStats};
use crate::interchange::names::expert_projection;

/// The calibration, with fallback statistics for experts that no token reached.
pub(super) struct Inputs<'a> {
    calibration: &'a Calibration,
    /// Amax of each input feature, for each projection, over all experts of its layer.
    experts: BTreeMap<String, Vec<f32>>,
}

impl<'a> Inputs<'a> {
    pub fn new(calibration: &'a Calibration) -> Self {
        let mut experts: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for (module, stats) in &calibration.inputs {
            if let Some(projection) = expert_projection(module) {
                let largest = experts.entry(projection);
                let largest = largest.or_insert_with(|| vec![0.0; stats.k()]);
                for (largest, amax) in largest.iter_mut().zip(&stats.amax) {
                    *largest = largest.max(*amax);
                }
            }
        }
        Self {
            calibration,
            experts,
        }
    }

    /// Returns true if there are no statistics.
    pub fn is_empty(&self) -> bool {
        self.calibration.is_empty()
    }

    /// Returns the input statistics of `module`, if a token reached it.
    pub fn of(&self, module: &str) -> Option<&'a InputStats> {
        let stats = self.calibration.inputs.get(module)?;
        (stats.tokens() > 0).then_some(stats.as_ref())
    }

    /// Returns the static global scale, by `rule`, of the input of `group`. Its members share one
    /// scale: from the largest of their amax values or, if no token reached any of them, from that
    /// of all experts of the layer. `columns` returns the divisors of a member's input features.
    ///
    /// # Errors
    /// Returns an error if all inputs are zero or unknown, or if one is not finite.
    pub fn global<'s>(
        &self,
        group: &[String],
        rule: Rule,
        columns: impl Fn(&str) -> Option<&'s [f32]>,
    ) -> Result<GlobalScale> {
        Ok(rule.global(self.amax(group, columns)?))
    }

    /// Returns the largest input of `group`; see [`global`](Self::global).
    pub fn amax<'s>(
        &self,
        group: &[String],
        columns: impl Fn(&str) -> Option<&'s [f32]>,
    ) -> Result<f32> {
        let largest = |module: &str, features: &[f32]| match columns(module) {
            None => features.iter().fold(0.0f32, |amax, x| amax.max(*x)),
            Some(columns) => features
                .iter()
                .zip(columns)
                .fold(0.0f32, |amax, (x, s)| amax.max(x / s)),
        };
        let own = group
            .iter()
            .filter_map(|module| Some(largest(module, &self.of(module)?.amax)));
        let mut amax = own.fold(0.0, f32::max);
        if amax == 0.0 {
            let of_experts = |module: &String| {
                let features = self.experts.get(&expert_projection(module)?)?;
                Some(largest(module, features))
            };
            amax = group.iter().filter_map(of_experts).fold(0.0, f32::max);
        }
        ensure!(
            amax > 0.0 && amax.is_finite(),
            "{}: the largest input that calibration saw is {amax}, from which no scale follows",
            group[0]
        );
        Ok(amax)
    }
}
