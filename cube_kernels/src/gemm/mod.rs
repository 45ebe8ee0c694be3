//! Dense and grouped GEMMs of NVFP4, MXFP8 and bf16 operands.
//!
//! A [`Gemm`] request is complete when it is built. [`gemm()`] validates it, chooses a kernel,
//! materializes the operands and launches the kernel, once each and in this order.
//!
//! Modules, bottom up:
//!
//! - `tiles`, `epilogue`, `scheduler`, `stream_k`, `operand` and `output`: the building blocks of
//!   requests and kernels.
//! - `materialize`: converts operands to the form that a kernel reads.
//! - `problem`: the inputs of the kernel choice. `plan`: the traits that every kernel implements.
//! - `heuristics`: measured timings.
//! - `choices`: the choices that were made, by device and problem.
//! - `kernels`: the kernels, in a folder per architecture. `dispatch` asks them in order.
//! - `run`: a request from its validation to the launch.
//! - `fused`: linear layers for small M with a fused RMSNorm prologue and SwiGLU epilogue.
//! - `cublaslt`: NVIDIA's library, for FP4 tensor cores.
//! - `exact`: small GEMMs with exact sums, by which `self_check` and [`bring_up`](crate::bring_up) check the
//!   `tcgen05` kernel on hardware.

use std::borrow::Cow;

use cubecl::{client::Client, server::Handle};

// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
pub(crate) mod align_groups;
#[allow(missing_docs)]
pub(crate) mod arguments;
mod choices;
mod dispatch;
#[allow(missing_docs)]
mod epilogue;
pub(crate) mod exact;
mod fused;
mod heuristics;
#[cfg(feature = "proof")]
pub(crate) mod instances;
pub(crate) mod kernels;
#[allow(missing_docs)]
mod materialize;
mod operand;
mod output;
mod plan;
mod problem;
#[cfg(feature = "proof")]
pub mod proof;
mod run;
#[allow(missing_docs)]
mod scheduler;
mod self_check;
mod slow_path;
mod stream_k;
mod tiles;

#[doc(hidden)]
pub use choices::selections;
pub use dispatch::{Choice, describe, describe_typical};
pub use epilogue::{EpilogueKind, Factor, OutputAmax};
pub use fused::{FusedLinear, FusedLinearOutput, FusedNorm, fused_linear};
pub(crate) use kernels::cublaslt;
pub use operand::{Elements, Operand, OperandLayout, Scale};
pub use output::Target;
pub use plan::Plan;
pub use problem::{GemmShape, Problem, Refusal};
pub use run::{choose, gemm, may_read_tiles, packed_reads};
pub use scheduler::GroupedDim;

use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    memory::check_memory,
    moe::GroupOffsets,
    tensor::{FloatKind, Matrix},
};
use align_groups::AlignedGroups;
use exact::ExactGemm;
use operand::ScaleTiling;
use output::Output;

/// Dimension of a GEMM that is split into groups, as mixtures of experts need it. One launch
/// computes all groups. Their offsets stay in device memory; the host never reads them.
#[derive(Debug, Clone, Copy)]
pub enum Grouped<'a> {
    /// A dense GEMM.
    None,
    /// Groups of rows of `a`, each with its own `b` (forward pass and input gradient of an expert):
    /// `out[i, n] = α · Σ a[i, k] · b[g · N + n, k] + bias[g, n]` for the rows `i` of group `g`.
    ///
    /// `a` may have rows before the first offset and after the last one; these rows belong to no
    /// group, and their output is not written. `b` stacks the N rows of each group. An MN-major `b`
    /// ([bf16](Elements::Bf16MnMajor) or [packed](Elements::PackedMnMajor)) stacks the K rows of
    /// each group. The `f32` bias has a row per group. Global scales may be per tensor, per group
    /// or per row.
    M(&'a GroupOffsets),
    /// Groups along K (weight gradient of an expert): `out[g · M + m, n] = α · Σ a[m, k] · b[n, k]`
    /// over the columns `k` of group `g`. The M x N outputs are stacked.
    ///
    /// Groups begin at multiples of 16 along K, or of 32 in MXFP8. K runs along the columns of an
    /// operand, or along the rows of an [MN-major](Elements::Bf16MnMajor) one. The padding between
    /// the end of a group's data and the next group must be zero, which is what quantizing each
    /// group separately produces. An empty group yields zeros. Global scales may be per tensor, per
    /// group, or per stored row of each group: `groups x M` of `a`, `groups x N` of `b`, one group
    /// after another. There is no bias.
    K(&'a GroupOffsets),
}

impl<'a> Grouped<'a> {
    fn dim(self) -> GroupedDim {
        match self {
            Self::None => GroupedDim::None,
            Self::M(_) => GroupedDim::M,
            Self::K(_) => GroupedDim::K,
        }
    }

    fn offsets(self) -> Option<&'a GroupOffsets> {
        match self {
            Self::None => None,
            Self::M(offsets) | Self::K(offsets) => Some(offsets),
        }
    }
}

/// A GEMM request: `a · bᵀ` with the full epilogue `fl(fl(sum · fl(α_a · α_b)) + bias)`, plus the
/// previous contents of the output if it accumulates, rounded once. Operands are in stored
/// orientation, with rows along K.
///
/// Sums are in `f32`. [`GemmBackend::Scalar`] adds in ascending `k`, the order of
/// [`reference::gemm_f32`](crate::reference::gemm_f32), and matches it bit for bit; matrix
/// instructions add in their own order. A grouped GEMM is bit-identical to the dense GEMMs of its
/// groups by the same kernel and tile.
#[derive(Debug, Clone, Copy)]
pub struct Gemm<'a> {
    /// Left operand: rows of the output.
    ///
    /// Block scales of packed operands may be stored in rows or in 128x4 tiles.
    /// [`GemmBackend::CublasLt`] and [`GemmBackend::Sm100Tcgen05`] read tiles; for other backends
    /// the GEMM unswizzles them first. [`packed_reads`] returns which one a GEMM reads. With groups
    /// along M, the tiles of `a` start anew at each group of rows and those of `b` at each group's
    /// matrix. With groups along K, each group starts with a tile: at a multiple of 64 columns.
    pub a: Operand<'a>,
    /// Right operand: columns of the output.
    pub b: Operand<'a>,
    /// `f32` bias per column of the output, with a row per group. [`GemmBackend::CublasLt`] rounds
    /// once more: for a 16-bit output it first rounds the bias to the output's type.
    pub bias: Option<&'a Matrix>,
    /// Output.
    pub target: Target<'a>,
    /// Grouped dimension.
    pub grouped: Grouped<'a>,
    /// Alignment of the offsets of groups along K, including the last one. Defaults to a block of
    /// the operands. The kernel of [`GemmBackend::Sm100Tcgen05`] reads NVFP4 operands directly if
    /// the alignment is a multiple of 64, and a rearranged copy of them otherwise. It always reads
    /// MXFP8 operands, whose blocks have 32 elements, directly.
    pub k_alignment: usize,
    /// Amax to compute of the output as stored. Kernels compute it in the epilogue; after cuBLASLt
    /// a second kernel reads the output, and a tracing event reports this.
    pub amax: Option<OutputAmax>,
    /// Backend, or `None` for the one that [`choose`] returns. A requested backend is never
    /// replaced.
    pub backend: Option<GemmBackend>,
    /// Kernel and tile, for measurements and tests of backends that have several.
    #[doc(hidden)]
    pub plan: Option<Plan>,
    /// Device capabilities, overridden by tests of the kernel choice.
    #[doc(hidden)]
    pub capabilities: Option<&'a Capabilities>,
}

/// Result of a GEMM.
#[derive(Debug, Clone)]
pub struct GemmOutput {
    /// Output.
    pub matrix: Matrix,
    /// Requested amax values in device memory: one `f32`, or one per group. They equal the
    /// amax of the output, so that quantizing it needs no separate
    /// pass. NaN and infinity propagate; a group without elements yields zero.
    pub amax: Option<Handle>,
}

impl<'a> Gemm<'a> {
    /// Returns a request for `a · bᵀ` into a new bf16 matrix.
    pub fn new(a: impl Into<Operand<'a>>, b: impl Into<Operand<'a>>) -> Self {
        Self {
            a: a.into(),
            b: b.into(),
            bias: None,
            target: Target::New(FloatKind::Bf16),
            grouped: Grouped::None,
            k_alignment: BLOCK,
            amax: None,
            backend: None,
            plan: None,
            capabilities: None,
        }
    }

    /// Returns a request for a GEMM with exact sums into a new `f32` matrix.
    pub(crate) fn of_exact(case: &'a ExactGemm) -> Self {
        let grouped = match &case.groups {
            None => Grouped::None,
            Some((GroupedDim::K, offsets)) => Grouped::K(offsets),
            Some((_, offsets)) => Grouped::M(offsets),
        };
        let request = Self::new(&case.a, &case.b).out(FloatKind::F32);
        request.grouped(grouped).k_alignment(case.k_alignment)
    }

    /// Sets the output to a new matrix of this type.
    pub fn out(self, dtype: FloatKind) -> Self {
        self.target(Target::New(dtype))
    }

    /// Sets the output.
    pub fn target(self, target: Target<'a>) -> Self {
        Self { target, ..self }
    }

    /// Sets or removes the bias.
    pub fn bias(self, bias: impl Into<Option<&'a Matrix>>) -> Self {
        let bias = bias.into();
        Self { bias, ..self }
    }

    /// Sets the grouped dimension.
    pub fn grouped(self, grouped: Grouped<'a>) -> Self {
        Self { grouped, ..self }
    }

    /// Sets groups along M.
    pub fn m_grouped(self, offsets: &'a GroupOffsets) -> Self {
        self.grouped(Grouped::M(offsets))
    }

    /// Sets groups along K.
    pub fn k_grouped(self, offsets: &'a GroupOffsets) -> Self {
        self.grouped(Grouped::K(offsets))
    }

    /// Sets the alignment of groups along K, a multiple of 16.
    pub fn k_alignment(self, alignment: usize) -> Self {
        Self {
            k_alignment: alignment,
            ..self
        }
    }

    /// Requests the amax of the output.
    pub fn amax(self, amax: impl Into<Option<OutputAmax>>) -> Self {
        let amax = amax.into();
        Self { amax, ..self }
    }

    /// Requests a backend; `None` selects the one that [`choose`] returns.
    pub fn backend(self, backend: impl Into<Option<GemmBackend>>) -> Self {
        let backend = backend.into();
        Self { backend, ..self }
    }

    /// Requests a kernel and tile.
    #[doc(hidden)]
    pub fn plan(self, plan: impl Into<Option<Plan>>) -> Self {
        let plan = plan.into();
        Self { plan, ..self }
    }

    /// Overrides the capabilities of the device.
    #[doc(hidden)]
    pub fn capabilities(self, capabilities: &'a Capabilities) -> Self {
        let capabilities = Some(capabilities);
        Self {
            capabilities,
            ..self
        }
    }

    /// Returns the sizes of a checked request.
    fn shape(&self) -> GemmShape {
        let n = match self.grouped {
            Grouped::M(groups) if !self.b.layout().is_mn_major() => self.b.outer() / groups.count,
            Grouped::None | Grouped::M(_) | Grouped::K(_) => self.b.outer(),
        };
        GemmShape {
            m: self.a.outer(),
            n,
            k: self.a.stored(),
        }
    }

    /// Returns the number of matrices that `b` stacks along K.
    fn stack(&self) -> usize {
        match self.grouped {
            Grouped::M(groups) if self.b.layout().is_mn_major() => groups.count,
            Grouped::None | Grouped::M(_) | Grouped::K(_) => 1,
        }
    }

    /// Checks operands, groups and bias against each other.
    fn check(&self) -> Result<(), Nvfp4Error> {
        let Self { a, b, .. } = self;
        let groups = self.grouped.offsets();
        self.check_groups()?;
        if a.layout() == OperandLayout::PackedMnMajor {
            return Err(Nvfp4Error::value(
                "a",
                "packed and MN-major",
                "bf16, or codes in rows along K: only `b` may be packed and MN-major",
            ));
        }
        let count = groups.map(|groups| groups.count);
        let [a_tiling, b_tiling] = self.scale_tilings();
        a.check("a", count, a_tiling)?;
        b.check("b", count, b_tiling)?;
        if let Some(groups) = groups {
            groups.check("groups")?;
        }
        // An operand that is not packed does not say how much of it is padding.
        let may_be_padded = groups.is_none() && !(a.is_packed() && b.is_packed());
        let stack = self.stack();
        let is_same = stack * a.inner() == b.inner() || may_be_padded;
        if !is_same || stack * a.stored() != b.stored() {
            let each = if stack == 1 { "" } else { " for each group" };
            return Err(Nvfp4Error::shape(
                "b",
                format!("{} x {} (stored)", b.outer(), b.inner()),
                format!("a contraction of {}{each}, that of `a`", a.inner()),
            ));
        }
        Operand::check_same_transform(a, b)?;
        self.check_bias()
    }

    fn check_groups(&self) -> Result<(), Nvfp4Error> {
        let Self { a, b, .. } = self;
        match self.grouped {
            Grouped::None => Ok(()),
            Grouped::M(groups) => {
                let rows = match b.layout().is_mn_major() {
                    true => b.inner(),
                    false => b.outer(),
                };
                if groups.count == 0 || !rows.is_multiple_of(groups.count) {
                    return Err(Nvfp4Error::shape(
                        "b",
                        format!("{rows} rows for {} groups", groups.count),
                        "the same number of rows for each group, and at least one group",
                    ));
                }
                Ok(())
            }
            Grouped::K(_) if b.layout() == OperandLayout::PackedMnMajor => Err(Nvfp4Error::value(
                "b",
                "packed and MN-major, with groups along K",
                "bf16, or codes in rows along K",
            )),
            Grouped::K(groups) => {
                for (argument, operand) in [("a", a), ("b", b)] {
                    if let Scale::PerRow(amax, _) = operand.scale {
                        check_memory(argument, amax, 4 * groups.count * operand.outer())?;
                    }
                }
                Ok(())
            }
        }
    }

    fn check_bias(&self) -> Result<(), Nvfp4Error> {
        let Some(bias) = self.bias else {
            return Ok(());
        };
        bias.check("bias")?;
        let GemmShape { n, .. } = self.shape();
        let (fits, rows) = match self.grouped {
            Grouped::None => (bias.len() == n, 1),
            Grouped::M(groups) => ((bias.rows, bias.cols) == (groups.count, n), groups.count),
            Grouped::K(_) => {
                return Err(Nvfp4Error::value("bias", "one", "none with groups along K"));
            }
        };
        if !fits || bias.dtype != FloatKind::F32 {
            return Err(Nvfp4Error::shape(
                "bias",
                format!("{} x {} of {:?}", bias.rows, bias.cols, bias.dtype),
                format!("{rows} x {n} of F32"),
            ));
        }
        Ok(())
    }

    /// Returns how the 128x4 tiles of the operands' block scales start anew.
    fn scale_tilings(&self) -> [ScaleTiling<'a>; 2] {
        match self.grouped {
            Grouped::None => [ScaleTiling::Matrix; 2],
            Grouped::M(groups) => [
                ScaleTiling::RowGroups(groups),
                ScaleTiling::Batch(groups.count),
            ],
            Grouped::K(_) => [ScaleTiling::WholeTiles; 2],
        }
    }

    /// Returns the inputs of the kernel choice.
    fn problem(&self, output: &Output) -> Problem {
        let ((a, ..), (b, ..)) = (self.a.factor(), self.b.factor());
        Problem {
            grouped: self.grouped.dim(),
            groups: self.grouped.offsets().map_or(1, |groups| groups.count),
            aligned: self.a.is_aligned() && self.b.is_aligned() && output.is_aligned(),
            epilogue: EpilogueKind {
                a,
                b,
                bias: self.bias.is_some(),
                accumulate: output.accumulates(),
                out: output.dtype(),
                amax: match self.grouped {
                    Grouped::None => self.amax.map(|_| OutputAmax::Whole),
                    Grouped::M(_) | Grouped::K(_) => self.amax,
                },
            },
            backend: self.backend,
            ..Problem::new([self.a.layout(), self.b_layout()], self.shape())
        }
    }

    /// Returns the layout in which kernels may read `b`. TMA loads K in steps of the instructions;
    /// elements of a stack's next matrix that it loads are not multiplied.
    fn b_layout(&self) -> OperandLayout {
        match self.b.layout() {
            OperandLayout::MnMajor if self.stack() > 1 && !self.shape().k.is_multiple_of(16) => {
                OperandLayout::KMajor
            }
            layout => layout,
        }
    }

    /// Returns the alignment of groups along K: whole blocks, even if the request claims more.
    fn known_alignment(&self) -> usize {
        self.k_alignment.max(self.a.block()).max(self.b.block())
    }

    /// Returns groups along K with the alignment that a kernel needs, if the groups or the total
    /// number of columns are less aligned.
    fn align_groups(
        &self,
        client: &Client,
        needed: usize,
    ) -> Result<Option<AlignedGroups>, Nvfp4Error> {
        let k = self.shape().k;
        let is_aligned = self.known_alignment().is_multiple_of(needed) && k.is_multiple_of(needed);
        match self.grouped {
            Grouped::K(groups) if !is_aligned => {
                tracing::debug!(k, needed, "gemm: groups along K are moved");
                AlignedGroups::of(client, groups, k).map(Some)
            }
            Grouped::None | Grouped::M(_) | Grouped::K(_) => Ok(None),
        }
    }

    /// Returns the capabilities of the device, or the overridden ones:
    /// plans with emulated instructions run on CUDA devices that lack the instruction.
    fn capabilities_of(&self, client: &Client) -> Cow<'a, Capabilities> {
        let found = self.capabilities;
        let mut capabilities = Cow::Borrowed(found.unwrap_or_else(|| Capabilities::of(client)));
        let is_gpu = capabilities.runtime == "cuda" && capabilities.gemm != GemmBackend::Scalar;
        if let Some(backend) = self
            .plan
            .and_then(|plan| plan.object().emulated_backend())
            .filter(|_| is_gpu)
        {
            capabilities.to_mut().gemm = backend;
        }
        capabilities
    }
}
