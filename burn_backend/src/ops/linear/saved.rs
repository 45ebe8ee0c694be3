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

#[cfg(test)]
mod tests {
    use burn_core::backend::Dispatch;
    use burn_core::tensor::{DType, Tensor};
    use nvfp4_kernels::{PackedReads, Storage};

    use super::super::{LinearRequest, RequiresGrad};
    use super::*;
    use crate::ops::context::tests::{device, spec};
    use crate::ops::operands::QuantSource;
    use crate::ops::{LinearContext, MaybeTensor};

    fn storage(operand: &Operand<Dispatch>) -> Storage {
        match operand {
            Operand::Quantized(quantized) => quantized.layout.storage,
            other => panic!("{other:?} is not quantized"),
        }
    }

    /// Where the GEMM multiplies values, `x` is quantized to them and kept in codes for a backward
    /// that makes its operand from it; a GEMM that runs again has the codes.
    #[test]
    fn what_is_kept_is_packed() {
        let (device, dtype, _) = device();
        let ones = |rows, cols| Tensor::<2>::ones([rows, cols], (&device, DType::F32)).cast(dtype);
        let request = |requires_w| LinearRequest::<Dispatch> {
            x: QuantSource::Matrix(ones(40, 48).into_dispatch()),
            w: ones(48, 32).into_dispatch(),
            bias: MaybeTensor::Absent,
            groups: RowGroups::Whole,
            spec: spec("quartet2"),
            context: LinearContext {
                reads: Some(PackedReads::Bf16),
                ..LinearContext::default()
            },
            requires_grad: RequiresGrad {
                x: true,
                w: requires_w,
                bias: None,
            },
        };
        for (kept, expected) in [(false, Storage::Bf16Unscaled), (true, Storage::Packed)] {
            let (fprop, saved) = request(true).quantize(kept);
            assert_eq!(storage(&fprop.x), expected, "kept: {kept}");
            let Some(SavedOperand::Forward(x)) = saved.x else {
                panic!("{:?}", saved.x);
            };
            assert_eq!(storage(&x), Storage::Packed, "kept: {kept}");
            let (fprop, saved) = request(false).quantize(kept);
            assert_eq!(storage(&fprop.x), expected, "kept: {kept}, a frozen weight");
            assert!(saved.x.is_none());
        }
    }
}
