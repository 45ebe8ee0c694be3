//! Request to a linear layer, and the operands that its forward saves for the backward.

use burn_core::backend::{Backend, tensor::FloatTensor};
use burn_core::tensor::FloatDType;
use nvfp4_formats::{StoredForm, Usage};

use crate::ops::operands::requantize;
use crate::ops::{
    LinearContext, LinearSpec, MaybeTensor, Nvfp4KernelOps, Operand, OperandSpec, QuantizeSource,
    RowGroups,
};

/// Gradients that are required.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequiresGrad {
    pub(crate) x: bool,
    pub(crate) w: bool,
    /// Dtype of the bias, if its gradient is required.
    pub(crate) bias: Option<FloatDType>,
}

impl RequiresGrad {
    /// No gradient.
    pub(crate) const NONE: Self = Self {
        x: false,
        w: false,
        bias: None,
    };
}

/// Forward request, with the gradients that its backward will compute.
pub(crate) struct LinearRequest<B: Backend> {
    pub(crate) x: QuantizeSource<B>,
    /// Weight, `[d_in, d_out]`, or a stack of weights, one per group of rows.
    pub(crate) w: FloatTensor<B>,
    pub(crate) bias: MaybeTensor<B>,
    /// [`RowGroups::Whole`] or [`RowGroups::Offsets`].
    pub(crate) groups: RowGroups<B>,
    pub(crate) spec: LinearSpec,
    pub(crate) context: LinearContext,
    /// Required gradients: operands of others are not quantized.
    pub(crate) requires_grad: RequiresGrad,
}

/// Operand of dgrad or wgrad that the forward saves.
#[derive(Clone, Debug)]
pub(crate) enum SavedOperand<B: Backend> {
    /// The operand itself.
    Made(Operand<B>),
    /// Packed operand of fprop, from which the backward derives its operand in the form that its
    /// GEMM reads, which the forward could not keep if it is not packed. Random bits are those that
    /// the forward would have drawn.
    Forward(Operand<B>),
}

impl<B: Nvfp4KernelOps> SavedOperand<B> {
    /// Saves `forward`, the operand of fprop, if it is quantized: otherwise it takes more memory
    /// than the operand derived from it.
    pub fn of_forward(forward: &Operand<B>) -> Option<Self> {
        let is_packed = matches!(forward, Operand::Quantized(_));
        is_packed.then(|| Self::Forward(forward.clone()))
    }

    /// Returns the operand by `spec` along `usage`; in this form, if it is derived now. `groups`
    /// are those of its matrix.
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

    use super::*;
    use crate::ops::context::tests::{device, spec};

    fn form(operand: &Operand<Dispatch>) -> StoredForm {
        match operand {
            Operand::Quantized(quantized) => quantized.layout.form,
            other => panic!("{other:?} is not quantized"),
        }
    }

    /// If the GEMM multiplies values, `x` is quantized to values for it, and saved as codes for a
    /// backward that derives its operand from them. A GEMM that runs again keeps the codes.
    #[test]
    fn what_is_kept_is_packed() {
        let (device, dtype, _) = device();
        let ones = |rows, cols| Tensor::<2>::ones([rows, cols], (&device, DType::F32)).cast(dtype);
        let request = |requires_w| LinearRequest::<Dispatch> {
            x: QuantizeSource::Matrix(ones(40, 48).into_dispatch()),
            w: ones(48, 32).into_dispatch(),
            bias: MaybeTensor::Absent,
            groups: RowGroups::Whole,
            spec: spec("quartet2"),
            context: LinearContext {
                reads: Some(StoredForm::Bf16Unscaled),
                ..LinearContext::default()
            },
            requires_grad: RequiresGrad {
                x: true,
                w: requires_w,
                bias: None,
            },
        };
        for (kept, expected) in [(false, StoredForm::Bf16Unscaled), (true, StoredForm::Rows)] {
            let (fprop, saved) = request(true).quantize(kept);
            assert_eq!(form(&fprop.x), expected, "kept: {kept}");
            let Some(SavedOperand::Forward(x)) = saved.x else {
                panic!("{:?}", saved.x);
            };
            assert_eq!(form(&x), StoredForm::Rows, "kept: {kept}");
            let (fprop, saved) = request(false).quantize(kept);
            assert_eq!(form(&fprop.x), expected, "kept: {kept}, a frozen weight");
            assert!(saved.x.is_none());
        }
    }
}
