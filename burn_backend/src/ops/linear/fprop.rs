//! The GEMM of a forward, which the backward may run again.

use burn_core::backend::{Backend, tensor::FloatTensor};
use burn_core::tensor::FloatDType;

use super::weight::SavedPart;
use crate::ops::sharding::LinearSharding;
use crate::ops::{GemmGroups, MaybeTensor, Nvfp4KernelOps, Operand, OperandSpec};

/// The weight of the GEMM.
#[derive(Clone, Debug)]
pub(super) enum FpropWeight<B: Backend> {
    /// Its operand.
    Made(Operand<B>),
    /// The operand, which is gathered again from this rank's part, by this spec, where it is not
    /// there.
    Gathered {
        made: Option<Operand<B>>,
        again: Box<(SavedPart<B>, OperandSpec)>,
    },
}

/// The GEMM: whenever it runs, its bits are the same.
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
    /// The same GEMM, to be kept until it runs again: without a weight that can be gathered again.
    pub(in crate::ops) fn kept(&self) -> Self {
        let mut kept = self.clone();
        if let FpropWeight::Gathered { made, .. } = &mut kept.w {
            *made = None;
        }
        kept
    }

    /// The output.
    pub(in crate::ops) fn run(self) -> FloatTensor<B> {
        let w = self.w.operand(self.dtype);
        match self.sharding {
            Some(sharding) => sharding.fprop(self.x, w, self.bias, self.dtype),
            None => B::nvfp4_gemm(self.x, w, self.bias, self.groups, self.dtype),
        }
    }

    /// The same GEMM with its weight, and the operand of that, if it was gathered again.
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
