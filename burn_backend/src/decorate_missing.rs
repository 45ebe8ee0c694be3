//! The decorator of a build without the features `cpu` and `cuda`: each call returns an error that
//! names them. With one of them, [`decorate`] routes the linear layers of unmodified Burn models
//! through NVFP4.

use std::fmt;

use burn_core::module::{Module, ParamGroup, Reparameterizer};
use nvfp4_formats::Nvfp4Error;

use crate::recipe::Nvfp4Recipe;

fn missing<T>() -> Result<T, Nvfp4Error> {
    Err(Nvfp4Error::value(
        "features",
        "a build without `cpu` and `cuda`",
        "one with `cuda` or `cpu` of this crate: the decorator uses Burn's fusion over CubeCL",
    ))
}

/// Routes the linear layers of a model through NVFP4, in builds with the feature `cpu` or `cuda`.
///
/// # Errors
/// Always returns an error, which names the features.
pub fn decorate<M: Module>(model: M, recipe: &Nvfp4Recipe) -> Result<M, Nvfp4Error> {
    Decorator::new(recipe).decorate(model)
}

/// [`decorate`] with options.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Decorator {}

impl Decorator {
    /// Creates a decorator.
    pub fn new(_recipe: &Nvfp4Recipe) -> Self {
        Self {}
    }

    /// Counts missed GEMMs instead of failing.
    pub fn lenient(self) -> Self {
        self
    }

    /// Also decorates the weights in `group`.
    pub fn include(self, _group: ParamGroup) -> Self {
        self
    }

    /// Excludes the layers whose weight is in `group`.
    pub fn exclude(self, _group: ParamGroup) -> Self {
        self
    }

    /// Decorates a model.
    ///
    /// # Errors
    /// Always returns an error, which names the features.
    pub fn decorate<M: Module>(&self, _model: M) -> Result<M, Nvfp4Error> {
        missing()
    }
}

/// Prepares the process for decorated models.
///
/// # Errors
/// Always returns an error, which names the features.
pub fn install() -> Result<(), Nvfp4Error> {
    missing()
}

/// Removes the decoration of the model, and all other reparameterizations.
pub fn undecorate<M: Module>(model: M) -> M {
    model.materialize()
}

/// Returns `model`, which is not decorated, with the exchanges between ranks.
pub(crate) fn reparameterize<M: Module, R: Reparameterizer>(model: M, exchanges: R) -> M {
    model.apply_reparameterization(exchanges)
}

/// Returns `model`, which is not decorated, with gathered parameters.
pub(crate) fn gathered<M: Module>(model: M) -> M {
    model.materialize()
}

/// Report of a decorated model, of which this build has none.
#[derive(Debug)]
pub enum Nvfp4Report {}

impl Nvfp4Report {
    /// Returns an error if a GEMM was missed.
    ///
    /// # Errors
    /// None in this build.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        match *self {}
    }
}

impl fmt::Display for Nvfp4Report {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

/// Returns the report of a decorated model.
///
/// # Errors
/// Always returns an error, which names the features.
pub fn report<M: Module>(_model: &M) -> Result<Nvfp4Report, Nvfp4Error> {
    missing()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_core::tensor::Device;
    use burn_nn::LinearConfig;

    use super::*;

    #[test]
    fn errors_name_the_features() {
        let linear = LinearConfig::new(32, 16).init(&Device::flex());
        let errors = [
            install().unwrap_err(),
            report(&linear).unwrap_err(),
            decorate(linear, &Nvfp4Recipe::new()).unwrap_err(),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(text.contains("`cuda`") && text.contains("`cpu`"), "{text}");
        }
    }
}
