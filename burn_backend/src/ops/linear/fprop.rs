//! Forward GEMM, which the backward may run again.

use burn_core::backend::{Backend, tensor::FloatTensor};
use burn_core::tensor::FloatDType;

use super::weight::SavedPart;
use crate::ops::sharding::LinearSharding;
use crate::ops::{GemmGroups, MaybeTensor, Nvfp4KernelOps, Operand, OperandSpec};

/// Weight of the GEMM.
#[derive(Clone, Debug)]
pub(super) enum FpropWeight<B: Backend> {
    /// Operand of the weight.
    Made(Operand<B>),
    /// Operand of the weight, or if it is missing, this rank's shard and the spec to gather it
    /// again.
    Gathered {
        made: Option<Operand<B>>,
        again: Box<(SavedPart<B>, OperandSpec)>,
    },
}

/// Forward GEMM: every run gives the same bits.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Fprop<B: Backend> {
    pub(super) x: Operand<B>,
    pub(super) w: FpropWeight<B>,
    pub(super) bias: MaybeTensor<B>,
    pub(super) groups: GemmGroups<B>,
    pub(super) dtype: FloatDType,
    pub(super) sharding: Option<LinearSharding>,
}

impl<B: Nvfp4KernelOps> Fprop<B> {
    /// Returns the GEMM to keep for another run: drops a weight that can be gathered again.
    pub(in crate::ops) fn kept(&self) -> Self {
        let mut kept = self.clone();
        if let FpropWeight::Gathered { made, .. } = &mut kept.w {
            *made = None;
        }
        kept
    }

    /// Computes the output.
    pub(in crate::ops) fn run(self) -> FloatTensor<B> {
        let w = self.w.operand(self.dtype);
        match self.sharding {
            Some(sharding) => sharding.fprop(self.x, w, self.bias, self.dtype),
            None => B::nvfp4_gemm(self.x, w, self.bias, self.groups, self.dtype),
        }
    }

    /// Adds the output to `added`. The layer must have neither bias, groups nor shards.
    pub(super) fn add_to(self, added: FloatTensor<B>) -> FloatTensor<B> {
        let w = self.w.operand(self.dtype);
        B::nvfp4_add_gemm(added, self.x, w)
    }

    /// Gathers the weight if it is missing. Also returns its operand if the weight can be gathered
    /// again.
    pub(super) fn gathered(mut self) -> (Self, Option<Operand<B>>) {
        let FpropWeight::Gathered { .. } = &self.w else {
            return (self, None);
        };
        let w = self.w.operand(self.dtype);
        self.w = FpropWeight::Made(w.clone());
        (self, Some(w))
    }
}

impl<B: Nvfp4KernelOps> FpropWeight<B> {
    fn operand(self, dtype: FloatDType) -> Operand<B> {
        match self {
            Self::Made(w) | Self::Gathered { made: Some(w), .. } => w,
            Self::Gathered { made: None, again } => {
                let (part, spec) = *again;
                part.fprop_operand(&spec, dtype)
            }
        }
    }
}
