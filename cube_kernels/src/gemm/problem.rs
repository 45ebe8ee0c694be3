//! Inputs of the kernel choice, and the trait that every kernel implements.

use std::fmt;

use cubecl::client::Client;

use super::{
    cublaslt::{CublasLtFormat, CublasLtProblem},
    epilogue::{EpilogueArgs, EpilogueKind, Factor},
    materialize::{Materialized, Reads},
    operand::OperandLayout,
    output::Output,
    scheduler::{GroupArgs, GroupedDim},
    tiles::{
        Multiply, SM90_TILE_M, SM120_TILE_N, Sm90Tile, Sm100Form, Sm100Tile, Sm120Tile, TensorCore,
        W4A16_MN_TILE_N, W4a16MnTile, W4a16Tile,
    },
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
fn block_scaled(operands: [OperandLayout; 2]) -> Option<BlockScaled> {
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

/// A kernel and its configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// cuBLASLt with operands in this format.
    CublasLt(CublasLtFormat),
    /// Up to 16 rows; `b` is dequantized in registers by a kernel without TMA.
    SmallM,
    /// `b` dequantized in registers, with the height of a band of tiles.
    W4a16(W4a16Tile, usize),
    /// MN-major `b` dequantized in registers, with the height of a band.
    W4a16MnMajor(W4a16MnTile, usize),
    /// Packed operands dequantized to bf16 before the GEMM, with the height of a band.
    DequantThenBf16(Sm90Tile, usize),
    /// As `DequantThenBf16`, with the tiles of the last wave split along K (stream-K).
    StreamK(Sm90Tile, usize),
    /// Block-scaled matrix instructions on codes and scales.
    BlockScaled(Sm120Tile),
    /// Tensor cores of data-center Blackwell on codes and scales.
    Tcgen05(Sm100Tile),
    /// Tiles dequantized in shared memory, 16x16x16 matrix instructions.
    Cmma,
    /// One unit per output element.
    Scalar,
}

impl Plan {
    /// Returns the backend whose instructions are emulated by plain arithmetic, so that other
    /// devices can run the rest of the kernel.
    pub(crate) fn emulated_backend(self) -> Option<GemmBackend> {
        match self {
            Self::BlockScaled(tile) if tile.multiply == Multiply::Software => {
                Some(GemmBackend::Sm120BlockScaled)
            }
            Self::Tcgen05(tile) if tile.core != TensorCore::Instruction => {
                Some(GemmBackend::Sm100Tcgen05)
            }
            _ => None,
        }
    }
}

/// Returns a suffix for the kernel name that names the format; empty for NVFP4.
fn name_of(format: BlockScaled) -> &'static str {
    match format {
        BlockScaled::Nvfp4 => "",
        BlockScaled::Mxfp8 => " on MXFP8",
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CublasLt(CublasLtFormat::Nvfp4) => {
                f.write_str("cuBLASLt on NVFP4, block scales in 128x4 tiles")
            }
            Self::CublasLt(_) => f.write_str("cuBLASLt on bf16, packed operands dequantized"),
            Self::SmallM => f.write_str("mma.sync for small M, `b` dequantized in registers"),
            Self::W4a16(tile, _) => {
                let (m, n) = (tile.rows_a, tile.rows_b());
                write!(f, "wgmma, `b` dequantized in registers, {m} x {n} tiles")
            }
            Self::W4a16MnMajor(tile, _) => {
                let m = tile.rows_a();
                write!(
                    f,
                    "wgmma, MN-major `b` dequantized in registers, {m} x {W4A16_MN_TILE_N} tiles"
                )
            }
            Self::DequantThenBf16(tile, _) => {
                let n = tile.n();
                write!(f, "wgmma on dequantized bf16, {SM90_TILE_M} x {n} tiles")
            }
            Self::StreamK(tile, _) => {
                let n = tile.n();
                write!(
                    f,
                    "wgmma on dequantized bf16, {SM90_TILE_M} x {n} tiles, stream-K"
                )
            }
            Self::BlockScaled(tile) => {
                let (m, n) = (tile.tile_m(), SM120_TILE_N);
                let by = match tile.multiply {
                    Multiply::Instruction => "block-scaled mma.sync",
                    Multiply::Software => "block-scaled mma.sync in software",
                };
                let format = name_of(tile.format);
                write!(f, "{by}{format}, {m} x {n} tiles")
            }
            Self::Tcgen05(tile) => {
                let by = match tile.core {
                    TensorCore::Instruction => "tcgen05.mma",
                    TensorCore::Software(_) => "tcgen05.mma in software",
                };
                let format = name_of(tile.format);
                let ctas = match tile.form {
                    Sm100Form::TwoCta => " of two CTAs",
                    Sm100Form::OneCta | Sm100Form::SwapAb => "",
                };
                let (m, n) = (tile.tile_m(), tile.tile_n());
                write!(f, "{by}{format}, {m} x {n} tiles{ctas}")
            }
            Self::Cmma => f.write_str("cmma 16x16x16, tiles dequantized in shared memory"),
            Self::Scalar => f.write_str("one thread for each output element"),
        }
    }
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

/// A plan with its estimated time, if several kernels are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate {
    pub plan: Plan,
    pub estimate: Option<f64>,
}

impl From<Plan> for Candidate {
    fn from(plan: Plan) -> Self {
        Self {
            plan,
            estimate: None,
        }
    }
}

/// A GEMM that is ready to run, with all buffers that the kernel reads.
pub(crate) struct Launch<'a> {
    pub client: &'a Client,
    pub capabilities: &'a Capabilities,
    pub shape: GemmShape,
    pub a: &'a Materialized,
    pub b: &'a Materialized,
    pub groups: &'a GroupArgs,
    /// Alignment of groups along K, and of the end of their columns.
    pub k_alignment: usize,
    /// True if all memory begins at multiples of 16 bytes; see [`Problem::aligned`].
    pub aligned: bool,
    pub epilogue: &'a EpilogueArgs,
    pub output: &'a Output<'a>,
}

impl Launch<'_> {
    /// Returns the format of block-scaled instructions, if both operands have the same one.
    pub fn block_scaled(&self) -> Option<BlockScaled> {
        block_scaled([self.a.layout, self.b.layout])
    }
}

/// Interface of every kernel: the single source for which kernel runs, and why others do not.
pub(crate) trait Kernel: Sync {
    /// Returns the name that `nvfp4 doctor` shows.
    fn name(&self) -> &'static str;

    /// Returns the backend that the kernel belongs to on this device and for this problem.
    fn backend(&self, device: &Device, problem: &Problem) -> GemmBackend;

    /// Checks whether the kernel supports the problem on this device.
    ///
    /// # Errors
    /// Returns the reason if it does not.
    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal>;

    /// Returns the configuration for a problem that the kernel supports.
    fn plan(&self, device: &Device, problem: &Problem) -> Candidate;

    /// Returns the forms of packed and MN-major operands that the kernel reads.
    fn reads(&self, plan: Plan) -> Reads {
        let _ = plan;
        Reads::COMPACT
    }

    /// Returns true if the kernel reads MXFP8. For other kernels MXFP8 operands are dequantized to
    /// bf16, exactly, and they are queried with [`Problem::without_mxfp8`].
    fn takes_mxfp8(&self) -> bool {
        false
    }

    /// Returns the required alignment of groups along K of packed operands, and of the end of all
    /// their columns; 1 if any is supported.
    fn k_alignment(&self, plan: Plan) -> usize {
        let _ = plan;
        1
    }

    /// Returns true if the kernel computes the output amax in its epilogue.
    fn finds_amax(&self) -> bool {
        true
    }

    /// Queues the kernel after the work that it depends on.
    ///
    /// # Errors
    /// Returns an error if a requested plan does not fit the operands, or if a library fails.
    fn launch(&self, launch: &Launch, plan: Plan) -> Result<(), Nvfp4Error>;
}

/// Returns the error of a plan that does not fit the operands.
pub(crate) fn misfit(plan: Plan, launch: &Launch) -> Nvfp4Error {
    let GemmShape { m, n, k } = launch.shape;
    let layouts = [launch.a.layout, launch.b.layout];
    let grouped = launch.groups.grouping;
    Nvfp4Error::value(
        "plan",
        format!("{plan} for {m} x {n} x {k}, {grouped:?}, operands {layouts:?}"),
        "one that takes the operands",
    )
}
