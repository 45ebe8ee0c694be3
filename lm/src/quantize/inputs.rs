//! What quantization takes from a calibration.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::rules::Rule;
use super::stats::{Calibration, InputStats};
use crate::interchange::GlobalScale;
use crate::interchange::names::expert_projection;

/// The calibration, and what experts that no token reached take from their layer's others.
pub(super) struct Inputs<'a> {
    calibration: &'a Calibration,
    /// The largest magnitude of each input feature of each projection over all experts of its
    /// layer.
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

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.calibration.is_empty()
    }

    /// What is known of the input of `module`, if a token came to it.
    pub fn of(&self, module: &str) -> Option<&'a InputStats> {
        let stats = self.calibration.inputs.get(module)?;
        (stats.tokens() > 0).then_some(stats.as_ref())
    }

    /// The static global scale, by `rule`, of the input of `group`, of whose members one scale is
    /// written: the largest of theirs, or, where no token came to any, of all experts of the layer.
    /// `columns` says by what the input of a member is divided, feature by feature.
    ///
    /// # Errors
    /// When there is no input that is not zero, or one is not finite.
    pub fn global<'s>(
        &self,
        group: &[String],
        rule: Rule,
        columns: impl Fn(&str) -> Option<&'s [f32]>,
    ) -> Result<GlobalScale> {
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
        Ok(rule.global(amax))
    }
}
