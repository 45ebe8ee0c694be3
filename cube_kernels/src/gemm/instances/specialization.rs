//! Specializations of the GEMM kernels.

use cubecl::prelude::AddressType;

use crate::cube::ptx::BlockScaled;

use crate::gemm::proof::{
    CmmaPlan, EpilogueKind, ScalarPlan, Sm90Plan, Sm100Plan, Sm120Plan, SmallMShape, StreamKPlan,
    W4a16MnMajorPlan, W4a16Plan,
};

/// Specialization of a GEMM kernel, or of a kernel that prepares its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmInstance {
    /// Hopper bf16 kernel.
    Sm90Bf16(Sm90Plan, EpilogueKind),
    /// Hopper bf16 kernel with stream-K.
    Sm90StreamK(StreamKPlan),
    /// Hopper W4A16 kernel.
    Sm90W4a16(W4a16Plan),
    /// Hopper W4A16 kernel for an MN-major weight.
    Sm90W4a16MnMajor(W4a16MnMajorPlan),
    /// Block-scaled kernel of data-center Blackwell.
    Sm100BlockScaled(Sm100Plan),
    /// Probe of data-center Blackwell: tensor memory, copies of scales, or a multiplication.
    Sm100Probe {
        /// Number of scale copies.
        copies: usize,
        /// Format of the single multiplication, if any.
        multiplies: Option<BlockScaled>,
    },
    /// Block-scaled kernel of consumer Blackwell.
    Sm120BlockScaled(Sm120Plan),
    /// Small-M kernel.
    SmallM(SmallMShape),
    /// Kernel with portable matrix instructions.
    Cmma(CmmaPlan, AddressType),
    /// Kernel with a unit per output element.
    Scalar(ScalarPlan),
    /// Rearranges `a` to the order of the W4A16 kernel.
    Arrange {
        /// True if the rows are in groups.
        grouped: bool,
    },
    /// Dequantizes packed elements to bf16.
    Dequantize,
    /// Transposes bf16.
    Transpose {
        /// Elements read and written at a time.
        vector: usize,
    },
}
