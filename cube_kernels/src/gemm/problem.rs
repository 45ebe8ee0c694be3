//! What decides which kernel computes a GEMM, and what every kernel answers.

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

/// The sizes of a GEMM. With groups along M, `n` is that of one group; with groups along K, `m` and
/// `n` are those of one group's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmShape {
    /// Rows of the output.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Length of the contraction, as stored.
    pub k: usize,
}

impl From<(usize, usize, usize)> for GemmShape {
    fn from((m, n, k): (usize, usize, usize)) -> Self {
        Self { m, n, k }
    }
}

/// A GEMM without its memory: all that the choice of a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Its sizes.
    pub shape: GemmShape,
    /// How `a` is stored.
    pub a: OperandLayout,
    /// How `b` is stored.
    pub b: OperandLayout,
    /// What is in groups.
    pub grouped: GroupedDim,
    /// How many groups.
    pub groups: usize,
    /// Whether the memory of operands and target begins at multiples of 16 bytes.
    pub aligned: bool,
    /// What happens to a sum before it is written.
    pub epilogue: EpilogueKind,
    /// The backend that the caller asked for.
    pub backend: Option<GemmBackend>,
}

impl Problem {
    /// A dense GEMM of aligned operands into a bf16 matrix, with the global scales of packed
    /// operands. MN-major operands that no kernel reads count as K-major: they are transposed
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

    /// The same with `groups` groups along `grouped`.
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
    /// Where `b` is one.
    pub(crate) fn refuse_packed_mn_major(&self) -> Result<(), Refusal> {
        match self.b {
            OperandLayout::PackedMnMajor => Err(Refusal::Operands("`b` is packed and MN-major")),
            _ => Ok(()),
        }
    }

    /// What block-scaled instructions multiply: both operands in one format.
    pub(crate) fn block_scaled(&self) -> Option<BlockScaled> {
        block_scaled([self.a, self.b])
    }

    /// As kernels see it that do not read MXFP8: such operands are dequantized to bf16 for them.
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

/// The format of operands that block-scaled instructions multiply.
fn block_scaled(operands: [OperandLayout; 2]) -> Option<BlockScaled> {
    match operands {
        [OperandLayout::Packed, OperandLayout::Packed] => Some(BlockScaled::Nvfp4),
        [OperandLayout::Mxfp8, OperandLayout::Mxfp8] => Some(BlockScaled::Mxfp8),
        _ => None,
    }
}

/// What a choice depends on beside the problem.
#[derive(Clone, Copy)]
pub struct Device<'a> {
    /// What the device can do.
    pub capabilities: &'a Capabilities,
    /// Its SMs.
    pub sms: usize,
    /// What cuBLASLt answers on it.
    pub cublaslt: &'a dyn Fn(&CublasLtProblem) -> Result<(), Nvfp4Error>,
    /// What the self-check of the kernel for `tcgen05` found on it, for a format and a form.
    pub tcgen05: &'a dyn Fn(Sm100Tile) -> Result<(), String>,
}

/// The SMs of the device behind `client`.
pub(crate) fn sms(client: &Client) -> usize {
    let sms = client.properties().hardware.num_streaming_multiprocessors;
    sms.unwrap_or(132) as usize
}

/// A kernel, and how it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// cuBLASLt, on operands in this format.
    CublasLt(CublasLtFormat),
    /// Up to 16 rows, `b` dequantized in registers by a kernel without TMA.
    SmallM,
    /// `b` dequantized in registers; with the height of a band of tiles.
    W4a16(W4a16Tile, usize),
    /// `b`, which is MN-major, dequantized in registers; with the height of a band.
    W4a16MnMajor(W4a16MnTile, usize),
    /// Packed operands dequantized to bf16 before the GEMM; with the height of a band.
    DequantThenBf16(Sm90Tile, usize),
    /// The same, with the tiles of the last wave shared out along the contraction.
    StreamK(Sm90Tile, usize),
    /// Codes and scales go to block-scaled matrix instructions.
    BlockScaled(Sm120Tile),
    /// Codes and scales go to the tensor cores of data-center Blackwell.
    Tcgen05(Sm100Tile),
    /// Tiles dequantized in shared memory, 16x16x16 matrix instructions.
    Cmma,
    /// One unit for each output element.
    Scalar,
}

impl Plan {
    /// The backend whose instruction plain arithmetic stands in for, so that other devices can run
    /// the rest.
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

/// A format other than NVFP4, behind what multiplies it.
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

/// Why a kernel does not compute a GEMM.
#[derive(Debug, Clone, PartialEq)]
pub enum Refusal {
    /// The device lacks what the kernel is made of.
    Device(&'static str),
    /// The kernel does not take such operands.
    Operands(&'static str),
    /// Another kernel is estimated to take less time.
    Slower {
        /// What this one takes, in the units of the heuristics.
        estimate: f64,
        /// What the other one takes.
        best: f64,
    },
    /// What cuBLASLt answers.
    Library(Nvfp4Error),
    /// The kernel failed its check when it was first wanted on this device, or is not wanted.
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

/// Why a kernel that reads 16 bytes at a time refuses.
pub(crate) const UNALIGNED: &str = "memory begins at no multiple of 16 bytes";

/// A plan and, where there are several kernels to compare, the time that it is estimated to take.
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

/// A GEMM that is ready to run: a kernel finds all that it reads.
pub(crate) struct Launch<'a> {
    pub client: &'a Client,
    pub capabilities: &'a Capabilities,
    pub shape: GemmShape,
    pub a: &'a Materialized,
    pub b: &'a Materialized,
    pub groups: &'a GroupArgs,
    /// What groups along K begin at multiples of, and their columns end at.
    pub k_alignment: usize,
    /// Whether all memory begins at multiples of 16 bytes, as [`Problem::aligned`] says.
    pub aligned: bool,
    pub epilogue: &'a EpilogueArgs,
    pub output: &'a Output<'a>,
}

impl Launch<'_> {
    /// What block-scaled instructions multiply: both operands in one format.
    pub fn block_scaled(&self) -> Option<BlockScaled> {
        block_scaled([self.a.layout, self.b.layout])
    }
}

/// What every kernel answers. The one source of "which kernel, and why not the others".
pub(crate) trait Kernel: Sync {
    /// What it is called, in `nvfp4 doctor`.
    fn name(&self) -> &'static str;

    /// The backend that it is part of on this device and for this problem.
    fn backend(&self, device: &Device, problem: &Problem) -> GemmBackend;

    /// Whether it takes the problem on this device.
    ///
    /// # Errors
    /// Why not.
    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal>;

    /// How it would run a problem that it takes.
    fn plan(&self, device: &Device, problem: &Problem) -> Candidate;

    /// What it reads of packed and of MN-major operands.
    fn reads(&self, plan: Plan) -> Reads {
        let _ = plan;
        Reads::COMPACT
    }

    /// Whether it reads MXFP8. For other kernels such operands are dequantized to bf16, exactly,
    /// and [`Problem::without_mxfp8`] is what they are asked about.
    fn takes_mxfp8(&self) -> bool {
        false
    }

    /// What groups along K of packed operands must begin, and all of their columns end, at
    /// multiples of; 1 where it takes what there is.
    fn k_alignment(&self, plan: Plan) -> usize {
        let _ = plan;
        1
    }

    /// Whether it finds the amax of the output while it writes.
    fn finds_amax(&self) -> bool {
        true
    }

    /// Queues it, behind whatever has to run before.
    ///
    /// # Errors
    /// When a plan that was given does not fit the operands, or a library fails.
    fn launch(&self, launch: &Launch, plan: Plan) -> Result<(), Nvfp4Error>;
}

/// The error of a plan that does not fit the operands.
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
