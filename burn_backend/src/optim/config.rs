//! Settings of AdamW, and their valid ranges.

use burn_core::module::{ParamGroup, ParamId};
use burn_core::tensor::FloatDType;
use nvfp4_formats::reference::AdamWParams;
use nvfp4_formats::{Nvfp4Error, RandomStream};

/// Separates the random bits of moments from those of layers with the same seed.
const SEED: u64 = 0x41_6461_6d57;

/// Storage format of moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MomentType {
    /// `f32`.
    #[default]
    F32,
    /// `bf16`, rounded stochastically: half the memory. The bits depend only on the seed, the
    /// parameter's id, the step and the element.
    Bf16,
}

impl MomentType {
    pub(super) const fn dtype(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
        }
    }
}

/// Settings of [`AdamW`](super::AdamW).
#[derive(Debug, Clone)]
pub struct AdamWConfig {
    /// Decay of the first moment, in `[0, 1)`.
    pub beta_1: f64,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta_2: f64,
    /// Term added to the root of the second moment; above 0.
    pub epsilon: f64,
    /// Weight decay of parameters with two axes or more, multiplied by the learning rate; not
    /// negative. Vectors (gains, biases) are not decayed.
    pub weight_decay: f64,
    /// Weight decays of groups of parameters, by path or id. The last matching group takes
    /// precedence, also over [`weight_decay`](Self::weight_decay).
    pub groups: Vec<(ParamGroup, f64)>,
    /// Maximum global norm of gradients; larger ones are scaled down. Above 0.
    pub grad_clip: Option<f64>,
    /// Storage format of moments.
    pub moments: MomentType,
    /// Seed of the random bits for rounding moments.
    pub seed: u64,
    /// True to compute [the amax of each new parameter](super::AdamW::amax) in each step. The
    /// layers of this crate quantize the parameter from it in the next forward, without an amax
    /// pass.
    pub amax: bool,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            groups: Vec::new(),
            grad_clip: Some(1.0),
            moments: MomentType::F32,
            seed: 0,
            amax: false,
        }
    }
}

impl AdamWConfig {
    pub(super) fn check(&self) -> Result<(), Nvfp4Error> {
        let betas = [("beta_1", self.beta_1), ("beta_2", self.beta_2)];
        for (name, beta) in betas {
            in_range(name, beta, (0.0..1.0).contains(&beta), "in [0, 1)")?;
        }
        positive("epsilon", self.epsilon)?;
        not_negative("weight_decay", self.weight_decay)?;
        for (_, decay) in &self.groups {
            not_negative("groups", *decay)?;
        }
        self.grad_clip
            .map_or(Ok(()), |norm| positive("grad_clip", norm))
    }

    pub(super) fn params(&self) -> AdamWParams {
        AdamWParams {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
        }
    }

    /// Returns the weight decay of a parameter.
    pub(super) fn decay(&self, id: ParamId, path: &str, axes: usize) -> f64 {
        let group = self.groups.iter().rev();
        match group
            .into_iter()
            .find(|(group, _)| group.matches(&id, Some(path)))
        {
            Some((_, decay)) => *decay,
            None => self.decay_by_axes(axes),
        }
    }

    /// Returns the weight decay of a parameter that belongs to no group.
    pub(super) fn decay_by_axes(&self, axes: usize) -> f64 {
        if axes > 1 { self.weight_decay } else { 0.0 }
    }

    /// Returns the key of the random bits of a parameter's moments.
    pub(super) fn key(&self, id: ParamId) -> [u32; 2] {
        RandomStream::new(self.seed ^ SEED, id.val(), 0).key()
    }
}

/// Returns an error if `valid` is false.
pub(super) fn in_range(
    argument: &'static str,
    found: f64,
    valid: bool,
    expected: &str,
) -> Result<(), Nvfp4Error> {
    match valid {
        true => Ok(()),
        false => Err(Nvfp4Error::value(argument, format!("{found}"), expected)),
    }
}

/// Returns an error if `found` is not finite or not above 0.
pub(super) fn positive(argument: &'static str, found: f64) -> Result<(), Nvfp4Error> {
    let valid = found.is_finite() && found > 0.0;
    in_range(argument, found, valid, "a finite number above 0")
}

/// Returns an error if `found` is not finite or below 0.
pub(super) fn not_negative(argument: &'static str, found: f64) -> Result<(), Nvfp4Error> {
    let valid = found.is_finite() && found >= 0.0;
    in_range(argument, found, valid, "a finite number, 0 or more")
}

/// Returns an error if `lr` is not a valid learning rate.
pub(super) fn learning_rate(lr: f64) -> Result<(), Nvfp4Error> {
    not_negative("lr", lr)
}
