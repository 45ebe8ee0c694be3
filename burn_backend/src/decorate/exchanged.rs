//! Exchange of a marked parameter with other ranks.
//!
//! Burn attaches at most one reparameterization to a parameter. The exchange of a marked parameter
//! is therefore a part of its mark, which applies it before it marks the value.

use burn_core::module::{ModuleVisitor, Reparameterization};
use burn_core::tensor::Tensor;

use crate::ops::WeightIdentity;
use crate::parallel::{Averaged, Sharded};

/// Exchange of a marked parameter with other ranks.
#[derive(Clone, Debug)]
pub(crate) enum Exchanged {
    /// Replicated: the gradient is averaged.
    Averaged(Averaged),
    /// Sharded: the value is gathered, and the gradient reduced to that of the shard.
    Sharded(Sharded),
}

impl From<Averaged> for Exchanged {
    fn from(averaged: Averaged) -> Self {
        Self::Averaged(averaged)
    }
}

impl From<Sharded> for Exchanged {
    fn from(sharded: Sharded) -> Self {
        Self::Sharded(sharded)
    }
}

impl Exchanged {
    /// Returns the whole value of the parameter that holds `base`.
    pub(super) fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Averaged(averaged) => averaged.apply(base),
            Self::Sharded(sharded) => sharded.apply(base),
        }
    }

    /// Returns the identity of the whole weight whose parameter holds `base`, the key of its cached
    /// operands. A gathered weight has none: no later forward gathers the same tensor, so the cache
    /// would only keep its operands alive.
    pub(super) fn identity<const D: usize>(&self, base: &Tensor<D>) -> Option<WeightIdentity> {
        match self {
            Self::Averaged(_) => WeightIdentity::of([base]),
            Self::Sharded(_) => None,
        }
    }

    /// Shows the exchange to `visitor` as the reparameterization that it is without a mark.
    pub(super) fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let name = match self {
            Self::Averaged(_) => Averaged::NAME,
            Self::Sharded(_) => Sharded::NAME,
        };
        visitor.enter_module(name, "Reparameterization");
        visitor.exit_module(name, "Reparameterization");
    }
}
