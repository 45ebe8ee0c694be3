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
//! - `problem`: the inputs of the kernel choice, and the trait that every kernel implements.
//! - `heuristics`: measured timings.
//! - `kernels`: the kernels, one per file. `dispatch` asks them in order.
//! - `fused`: linear layers for small M with a fused RMSNorm prologue and SwiGLU epilogue.
//! - [`cublaslt`]: NVIDIA's library, for FP4 tensor cores.
//! - `exact`: small GEMMs with exact sums, by which `self_check` and [`bring_up`] check the
//!   `tcgen05` kernel on hardware.

use std::borrow::Cow;

use cubecl::{client::Client, server::Handle};

// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
pub(crate) mod align_groups;
#[allow(missing_docs)]
pub(crate) mod arguments;
pub mod bring_up;
pub mod cublaslt;
mod dispatch;
#[allow(missing_docs)]
mod epilogue;
mod exact;
mod fused;
mod heuristics;
pub(crate) mod instances;
#[doc(hidden)]
pub mod kernels;
#[allow(missing_docs)]
mod materialize;
mod operand;
mod output;
mod problem;
#[allow(missing_docs)]
mod scheduler;
mod self_check;
mod slow_path;
pub(crate) mod specialization;
mod stream_k;
mod tiles;

pub use dispatch::{Choice, backend_of, choose, describe, describe_typical, packed_reads, plan};
pub use epilogue::{EpilogueKind, Factor, OutputAmax};
pub use fused::{FusedLinear, FusedLinearOutput, FusedNorm, fused_linear};
pub use operand::{Elements, Operand, OperandLayout, Scale};
pub use output::Target;
pub use problem::{Device, GemmShape, Plan, Problem, Refusal};
pub use scheduler::GroupedDim;
#[doc(hidden)]
pub use specialization::GemmInstance;

use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    memory::check_memory,
    moe::GroupOffsets,
    quantize,
    tensor::{FloatKind, Matrix},
    zeroed::zeros_of_step,
};
use align_groups::AlignedGroups;
use epilogue::EpilogueArgs;
use exact::ExactGemm;
use materialize::materialize;
use operand::ScaleTiling;
use output::Output;
use problem::{Launch, sms};
use scheduler::GroupArgs;
use tiles::Sm100Tile;

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
    /// [amax](crate::quantize::ComputeAmax) of the output, so that quantizing it needs no separate
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
    fn of_exact(case: &'a ExactGemm) -> Self {
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
    /// [emulated](Plan::is_emulated) plans run on CUDA devices that lack the instruction.
    fn capabilities_of(&self, client: &Client) -> Cow<'a, Capabilities> {
        let found = self.capabilities;
        let mut capabilities = Cow::Borrowed(found.unwrap_or_else(|| Capabilities::of(client)));
        let is_gpu = capabilities.runtime == "cuda" && capabilities.gemm != GemmBackend::Scalar;
        if let Some(backend) = self
            .plan
            .and_then(Plan::emulated_backend)
            .filter(|_| is_gpu)
        {
            capabilities.to_mut().gemm = backend;
        }
        capabilities
    }
}

/// Computes a GEMM.
///
/// A tracing event names the kernel. If the kernel dequantizes operands that the tensor cores of
/// the device could multiply directly, another event gives the reason: a warning for the first such
/// GEMM of the process per reason, a debug event for the others.
///
/// # Errors
/// Returns an error if a shape, element type or buffer does not fit, or if the requested backend
/// does not support the operands on this device.
pub fn gemm(client: &Client, gemm: &Gemm) -> Result<GemmOutput, Nvfp4Error> {
    gemm.check()?;
    let shape = gemm.shape();
    let groups = gemm.grouped.offsets().map_or(1, |groups| groups.count);
    let rows = match gemm.grouped {
        Grouped::K(_) => groups * shape.m,
        Grouped::None | Grouped::M(_) => shape.m,
    };
    let output = Output::new(client, gemm.target, rows, shape.n)?;
    let problem = gemm.problem(&output);
    let amax = problem.epilogue.amax.map(|amax| match amax {
        OutputAmax::Whole => zeros_of_step(client, 1),
        OutputAmax::PerGroup => zeros_of_step(client, groups),
    });
    if output.is_empty() {
        let matrix = output.into_matrix();
        return Ok(GemmOutput { matrix, amax });
    }

    let capabilities = gemm.capabilities_of(client);
    let device = Device {
        capabilities: &capabilities,
        sms: sms(client),
        cublaslt: &|problem| cublaslt::supports(client, problem),
        tcgen05: &|tile| self_check::once(client, tile, |case| multiply_exact(client, case, tile)),
    };
    let mut choice = dispatch::plan(&device, &problem)?;
    if let Some(plan) = gemm.plan {
        choice = dispatch::with_plan(&device, &problem, choice, plan)?;
    }
    trace(&device, &problem, &choice);

    let kernel = dispatch::kernel_of(choice.plan);
    let reads = kernel.reads(choice.plan);
    let [a_tiling, b_tiling] = gemm.scale_tilings();
    let needed = kernel.k_alignment(choice.plan);
    let ends = match gemm.grouped {
        Grouped::K(groups) => Some(groups),
        Grouped::None | Grouped::M(_) => None,
    };
    let aligned = gemm.align_groups(client, needed)?;
    let (a, b) = match (&aligned, gemm.grouped.offsets()) {
        (Some(aligned), Some(groups)) => (
            aligned.arrange(client, gemm.a.packed("a")?, groups)?,
            aligned.arrange(client, gemm.b.packed("b")?, groups)?,
        ),
        _ => (
            materialize(client, &gemm.a, 1, problem.a, (reads, a_tiling), ends)?,
            materialize(
                client,
                &gemm.b,
                gemm.stack(),
                problem.b,
                (reads, b_tiling),
                ends,
            )?,
        ),
    };
    let offsets = match &aligned {
        Some(aligned) => Some(&aligned.offsets),
        None => gemm.grouped.offsets(),
    };
    let k = aligned.as_ref().map_or(shape.k, |aligned| aligned.k);

    // Placeholder for the buffers that the epilogue does not read.
    let unread = gemm.a.memory();
    let ((_, a_amax, a_range), (_, b_amax, b_range)) = (gemm.a.factor(), gemm.b.factor());
    let launch = Launch {
        client,
        capabilities: &capabilities,
        shape: GemmShape { k, ..shape },
        a: &a,
        b: &b,
        groups: &GroupArgs {
            grouping: problem.grouped,
            offsets: offsets.map_or(unread, |it| &it.offsets).clone(),
            groups,
        },
        k_alignment: match &aligned {
            Some(_) => needed,
            None => gemm.known_alignment(),
        },
        aligned: problem.aligned,
        epilogue: &EpilogueArgs {
            kind: problem.epilogue,
            a_amax: a_amax.unwrap_or_else(|| unread.clone()),
            b_amax: b_amax.unwrap_or_else(|| unread.clone()),
            ranges: [a_range, b_range],
            bias: gemm.bias.map_or(unread, |bias| &bias.handle).clone(),
            amax: amax.as_ref().unwrap_or(unread).clone(),
        },
        output: &output,
    };
    kernel.launch(&launch, choice.plan)?;
    let amax = match amax {
        Some(_) if !kernel.finds_amax() => {
            let GemmShape { m, n, k } = shape;
            tracing::debug!(
                m,
                n,
                k,
                "gemm: a second kernel finds the amax of the output"
            );
            let request = quantize::ComputeAmax::of_matrix(output.matrix());
            request.launch(client)?.amax.rows
        }
        amax => amax,
    };
    let matrix = output.into_matrix();
    Ok(GemmOutput { matrix, amax })
}

/// Computes a GEMM of the self-check with the kernel under test.
fn multiply_exact(
    client: &Client,
    case: &ExactGemm,
    tile: Sm100Tile,
) -> Result<Matrix, Nvfp4Error> {
    let request = Gemm::of_exact(case).backend(GemmBackend::Sm100Tcgen05);
    let request = request.plan(Plan::Tcgen05(tile));
    gemm(client, &request).map(|output| output.matrix)
}

/// Reports the kernel of a GEMM, and why no kernel that multiplies codes was chosen.
fn trace(device: &Device, problem: &Problem, choice: &Choice) {
    let GemmShape { m, n, k } = problem.shape;
    slow_path::report(device, problem, choice);
    let (backend, kernel) = (choice.backend, &choice.plan);
    match problem.grouped {
        GroupedDim::None => tracing::debug!(m, n, k, ?backend, %kernel, "gemm"),
        grouped => {
            let groups = problem.groups;
            tracing::debug!(m, n, k, groups, ?grouped, ?backend, %kernel, "grouped gemm");
        }
    }
}
