//! An operand of the backward, between forward and backward.

use burn_core::backend::Backend;
use burn_core::tensor::FloatDType;
use nvfp4_kernels::Usage;

use crate::ops::operands::requantize;
use crate::ops::stored::StoredForm;
use crate::ops::{Nvfp4KernelOps, Operand, OperandSpec, RowGroups};

/// An operand of dgrad or wgrad that the forward leaves.
#[derive(Clone, Debug)]
pub(crate) enum SavedOperand<B: Backend> {
    /// It is there.
    Made(Operand<B>),
    /// The packed operand of fprop, from which the backward makes it: as its GEMM reads it, which
    /// the forward could not keep where that is not packed. Random bits are those that the forward
    /// would have drawn.
    Forward(Operand<B>),
}

impl<B: Nvfp4KernelOps> SavedOperand<B> {
    /// `forward`, the operand of fprop, for the backward to make its own from, if it is quantized:
    /// else it takes more memory than what is made from it.
    pub fn of_forward(forward: &Operand<B>) -> Option<Self> {
        let is_packed = matches!(forward, Operand::Quantized(_));
        is_packed.then(|| Self::Forward(forward.clone()))
    }

    /// The operand by `spec` along `usage`; in this form, if it is made now. `groups` are those of
    /// its matrix.
    pub fn operand(
        self,
        groups: &RowGroups<B>,
        (spec, form): (&OperandSpec, StoredForm),
        usage: Usage,
        dtype: FloatDType,
    ) -> Operand<B> {
        match self {
            Self::Made(operand) => operand,
            Self::Forward(forward) => requantize::<B>(forward, groups, spec, usage, dtype, form),
        }
    }
}
