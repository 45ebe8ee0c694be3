//! Source of a quantization, or of its amax values.

use crate::{
    Nvfp4Error,
    activation::check_activation,
    reference::Activation,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Values to quantize, or to compute the amax of.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// A matrix.
    Matrix(&'a Matrix),
    /// An activation of the rows of `x`, in the type of `x`. A kernel computes its amax values in
    /// the pass that writes it, if it can.
    Activation {
        /// Activation.
        kind: Activation,
        /// Input of the activation.
        x: &'a Matrix,
        /// Gradient of the output: the source is then the gradient with respect to `x`.
        grad: Option<&'a Matrix>,
    },
    /// An NVFP4 tensor, which is quantized from its codes by MS-EDEN or to an MX format, without
    /// the dequantized values in memory.
    Quantized {
        /// Tensor.
        tensor: &'a DeviceQuantized,
        /// Type to which dequantized values are rounded before they are quantized to an MX format:
        /// usually that of the training. MS-EDEN does not round them.
        via: FloatKind,
    },
}

impl<'a> From<&'a Matrix> for Source<'a> {
    fn from(matrix: &'a Matrix) -> Self {
        Self::Matrix(matrix)
    }
}

impl Source<'_> {
    /// Returns the rows and columns of the values.
    pub fn shape(&self) -> (usize, usize) {
        match self {
            Self::Matrix(x) => (x.rows, x.cols),
            Self::Activation { kind, x, grad } => match grad {
                None => (x.rows, x.cols / kind.inputs()),
                Some(_) => (x.rows, x.cols),
            },
            Self::Quantized { tensor, .. } => (tensor.rows(), tensor.cols()),
        }
    }

    /// Checks a source whose rows are in `groups`. Kernels that read a quantized tensor check it
    /// themselves.
    pub(super) fn check(&self, groups: &Groups) -> Result<(), Nvfp4Error> {
        match *self {
            Self::Matrix(x) => {
                x.check("x")?;
                groups.check(x.rows)
            }
            Self::Activation { kind, x, grad } => {
                check_activation(kind, x, grad)?;
                groups.check(x.rows)
            }
            Self::Quantized { .. } => Ok(()),
        }
    }
}
