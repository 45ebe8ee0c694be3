//! Inputs of the kernel choice, and the reasons for refusals.

use std::fmt;

use cubecl::client::Client;

use super::{
    cublaslt::CublasLtProblem,
    epilogue::{EpilogueKind, Factor},
    kernels::sm100::tile::Sm100Tile,
    operand::OperandLayout,
    scheduler::GroupedDim,
};
use crate::{
    Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    cube::ptx::BlockScaled,
    tensor::FloatKind,
};

/// Sizes of a GEMM. With groups along M, `n` is per group; with groups along K, `m` and `n` are per
/// group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmShape {
    /// Rows of the output.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Length of the K dimension as stored.
    pub k: usize,
}

impl From<(usize, usize, usize)> for GemmShape {
    fn from((m, n, k): (usize, usize, usize)) -> Self {
        Self { m, n, k }
    }
}

/// A GEMM without its memory: all inputs of the kernel choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Sizes.
    pub shape: GemmShape,
    /// Layout of `a`.
    pub a: OperandLayout,
    /// Layout of `b`.
    pub b: OperandLayout,
    /// Grouped dimension.
    pub grouped: GroupedDim,
    /// Number of groups.
    pub groups: usize,
    /// True if the memory of operands and target begins at multiples of 16 bytes.
    pub aligned: bool,
    /// Epilogue.
    pub epilogue: EpilogueKind,
    /// Backend requested by the caller.
    pub backend: Option<GemmBackend>,
}

impl Problem {
    /// A dense GEMM of aligned operands into a bf16 matrix, with the global scales of packed
    /// operands. MN-major operands that no kernel reads count as K-major, since they are transposed
    /// first.
    pub fn new([a, b]: [OperandLayout; 2], shape: impl Into<GemmShape>) -> Self {
        let shape = shape.into();
        let factor = |operand| match operand {
            OperandLayout::Packed | OperandLayout::PackedMnMajor => Factor::Tensor,
            OperandLayout::Mxfp8 | OperandLayout::KMajor | OperandLayout::MnMajor => Factor::One,
        };
        Self {
            shape,
            a: a.as_read(shape.m),
            b: b.as_read(shape.n),
            grouped: GroupedDim::None,
            groups: 1,
            aligned: true,
            epilogue: EpilogueKind {
                a: factor(a),
                b: factor(b),
                bias: false,
                accumulate: false,
                out: FloatKind::Bf16,
                amax: None,
            },
            backend: None,
        }
    }

    /// Sets `groups` groups along `grouped`.
    pub const fn grouped(self, grouped: GroupedDim, groups: usize) -> Self {
        Self {
            grouped,
            groups,
            ..self
        }
    }

    pub(crate) fn is_packed(&self) -> [bool; 2] {
        [self.a, self.b].map(|operand| operand == OperandLayout::Packed)
    }

    /// Refuses a packed MN-major `b`, for kernels that would have to dequantize it as a whole.
    ///
    /// # Errors
    /// Returns an error if `b` is packed and MN-major.
    pub(crate) fn refuse_packed_mn_major(&self) -> Result<(), Refusal> {
        match self.b {
            OperandLayout::PackedMnMajor => Err(Refusal::Operands("`b` is packed and MN-major")),
            _ => Ok(()),
        }
    }

    /// Returns the format of block-scaled instructions for this problem, if both operands have the
    /// same one.
    pub(crate) fn block_scaled(&self) -> Option<BlockScaled> {
        block_scaled([self.a, self.b])
    }

    /// Returns the problem for kernels that do not read MXFP8: such operands are dequantized to
    /// bf16 for them.
    pub(crate) fn without_mxfp8(&self) -> Self {
        let bf16 = |operand| match operand {
            OperandLayout::Mxfp8 => OperandLayout::KMajor,
            other => other,
        };
        Self {
            a: bf16(self.a),
            b: bf16(self.b),
            ..*self
        }
    }
}

/// Returns the common block-scaled format of two operands, if any.
pub(crate) fn block_scaled(operands: [OperandLayout; 2]) -> Option<BlockScaled> {
    match operands {
        [OperandLayout::Packed, OperandLayout::Packed] => Some(BlockScaled::Nvfp4),
        [OperandLayout::Mxfp8, OperandLayout::Mxfp8] => Some(BlockScaled::Mxfp8),
        _ => None,
    }
}

/// Inputs of the kernel choice that depend on the device.
#[derive(Clone, Copy)]
pub struct Device<'a> {
    /// Capabilities.
    pub capabilities: &'a Capabilities,
    /// Number of SMs.
    pub sms: usize,
    /// Support query to cuBLASLt on this device.
    pub cublaslt: &'a dyn Fn(&CublasLtProblem) -> Result<(), Nvfp4Error>,
    /// Self-check result of the `tcgen05` kernel on this device, by format and form.
    pub tcgen05: &'a dyn Fn(Sm100Tile) -> Result<(), String>,
}

/// Returns the number of SMs of the device of `client`.
pub(crate) fn sms(client: &Client) -> usize {
    let sms = client.properties().hardware.num_streaming_multiprocessors;
    sms.unwrap_or(132) as usize
}

/// Reason why a kernel does not compute a GEMM.
#[derive(Debug, Clone, PartialEq)]
pub enum Refusal {
    /// The device lacks a feature that the kernel needs.
    Device(&'static str),
    /// The kernel does not support these operands.
    Operands(&'static str),
    /// Another kernel is estimated to take less time.
    Slower {
        /// Estimate for this kernel, in the units of the heuristics.
        estimate: f64,
        /// Estimate for the fastest kernel.
        best: f64,
    },
    /// The answer of cuBLASLt.
    Library(Nvfp4Error),
    /// The kernel failed its self-check on this device, or is disabled.
    SelfCheck(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(why) | Self::Operands(why) => f.write_str(why),
            Self::Slower { estimate, best } => {
                write!(f, "estimated at {estimate:.0}, the best at {best:.0}")
            }
            Self::Library(error) => error.fmt(f),
            Self::SelfCheck(what) => f.write_str(what),
        }
    }
}

/// Refusal of a kernel that reads 16 bytes at a time.
pub(crate) const UNALIGNED: &str = "memory begins at no multiple of 16 bytes";
