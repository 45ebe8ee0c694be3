//! Request to a linear layer.

use burn_core::backend::{Backend, tensor::FloatTensor};
use burn_core::tensor::FloatDType;

use crate::ops::{LinearContext, LinearSpec, MaybeTensor, QuantizeSource, RowGroups};

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
