//! What is asked of a linear layer.

use burn_core::backend::{Backend, tensor::FloatTensor};
use burn_core::tensor::FloatDType;

use crate::ops::form::Forms;
use crate::ops::operands::QuantSource;
use crate::ops::{LinearContext, LinearSpec, MaybeTensor, RowGroups};

/// Which gradients are required.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequiresGrad {
    pub(crate) x: bool,
    pub(crate) w: bool,
    /// Type of the bias, if there is one and its gradient is required.
    pub(crate) bias: Option<FloatDType>,
}

/// A forward, and which gradients its backward will compute.
pub(crate) struct LinearRequest<B: Backend> {
    pub(crate) x: QuantSource<B>,
    /// `[d_in, d_out]`, or a stack of these, one for each group of rows.
    pub(crate) w: FloatTensor<B>,
    pub(crate) bias: MaybeTensor<B>,
    /// [`RowGroups::Whole`] or [`RowGroups::Offsets`].
    pub(crate) groups: RowGroups<B>,
    pub(crate) spec: LinearSpec,
    pub(crate) context: LinearContext,
    /// An operand of a gradient that is not required is not quantized.
    pub(crate) requires_grad: RequiresGrad,
}

/// The forms of the operands of a layer's GEMMs.
pub(super) struct LinearForms {
    pub(super) fprop: Forms,
    pub(super) dgrad: Forms,
    pub(super) wgrad: Forms,
}
