//! What GEMM kernels are specialized for.

use cubecl::prelude::AddressType;

use crate::cube::ptx::BlockScaled;

use super::kernels::{
    CmmaPlan, EpilogueKind, ScalarPlan, Sm90Plan, Sm100Plan, Sm120Plan, SmallMShape, StreamKPlan,
    W4a16MnMajorPlan, W4a16Plan,
};

/// What a GEMM kernel, or one that prepares its operands, was specialized for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmInstance {
    /// The bf16 kernel of Hopper.
    Sm90Bf16(Sm90Plan, EpilogueKind),
    /// The bf16 kernel of Hopper that shares tiles out along the contraction.
    Sm90StreamK(StreamKPlan),
    /// The W4A16 kernel of Hopper.
    Sm90W4a16(W4a16Plan),
    /// The W4A16 kernel of Hopper for an MN-major weight.
    Sm90W4a16MnMajor(W4a16MnMajorPlan),
    /// The block-scaled kernel of data-center Blackwell.
    Sm100BlockScaled(Sm100Plan),
    /// A probe of data-center Blackwell: tensor memory, or the copies of scales, or a
    /// multiplication too.
    Sm100Probe {
        /// Copies of scales.
        copies: usize,
        /// In which format it multiplies, once, if it does.
        multiplies: Option<BlockScaled>,
    },
    /// The block-scaled kernel of consumer Blackwell.
    Sm120BlockScaled(Sm120Plan),
    /// The kernel of small M.
    SmallM(SmallMShape),
    /// The kernel with portable matrix instructions.
    Cmma(CmmaPlan, AddressType),
    /// The kernel with a thread for each output element.
    Scalar(ScalarPlan),
    /// `a` in the order of the W4A16 kernel, rows in groups or not.
    Arrange {
        /// Whether they are.
        grouped: bool,
    },
    /// Packed elements to bf16.
    Dequantize,
    /// The transposition of bf16.
    Transpose {
        /// Elements that are read and written at a time.
        vector: usize,
    },
}
