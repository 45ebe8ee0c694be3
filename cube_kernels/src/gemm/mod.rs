//! GEMMs of packed operands (NVFP4, MXFP8) and bf16 ones, dense and grouped.
//!
//! A request, [`Gemm`], is complete when it is made. [`gemm()`] takes it through validation, the
//! choice of a kernel, the materialization of its operands and the launch, once each and in this
//! order.
//!
//! From the bottom up: `tiles`, `epilogue`, `scheduler`, `stream_k`, `operand` and `output` are
//! what requests and kernels are made of, `materialize` brings operands into the form that a kernel
//! reads, `problem` is what the choice depends on and what every kernel answers, `heuristics` has
//! the measurements, the kernels are in `kernels`, one a file, and `dispatch` asks them in order.
//! `fused` has linear layers of few tokens with a norm in front and SwiGLU behind, in one kernel.
//! [`cublaslt`] is NVIDIA's library, for FP4 tensor cores. `exact` has small GEMMs with exact sums,
//! by which `self_check` and [`bring_up`] check the kernel for `tcgen05` on its hardware.

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

/// What of a GEMM is in groups, as mixtures of experts need it: one launch for all groups, with
/// their offsets in device memory, which no host ever reads.
#[derive(Debug, Clone, Copy)]
pub enum Grouped<'a> {
    /// Nothing.
    None,
    /// Rows of `a`, each group with its own `b` (an expert's forward pass and its input gradient):
    /// `out[i, n] = α · Σ a[i, k] · b[g · N + n, k] + bias[g, n]` for the rows `i` of group `g`.
    ///
    /// `a` has any rows, of which those between the first and the last offset are in groups; rows
    /// outside all groups are not written. `b` stacks the groups' N rows each, or of an MN-major
    /// one ([bf16](Elements::Bf16MnMajor) or [packed](Elements::PackedMnMajor)) the groups' K rows
    /// each, and the `f32` bias has a row for each group. Global scales may be one for the tensor,
    /// for each group or for each of the rows.
    M(&'a GroupOffsets),
    /// The contraction (an expert's weight gradient): `out[g · M + m, n] = α · Σ a[m, k] · b[n, k]`
    /// over the columns `k` of group `g`, one M x N output after another.
    ///
    /// Groups begin at multiples of 16 along K, or of 32 in MXFP8 (columns of an operand, rows of
    /// an [MN-major](Elements::Bf16MnMajor) one), and what lies between the end of a group's data
    /// and the next group is zero: what quantizing each group by itself leaves. An empty group
    /// gives zeros. Global scales may be one for the tensor, for each group, or for each stored row
    /// of each group: `groups x M` of `a`, `groups x N` of `b`, one group after another. There is
    /// no bias.
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

/// `a · bᵀ` with the whole epilogue: `fl(fl(sum · fl(α_a · α_b)) + bias)`, plus what the output
/// held, rounded once. Operands are in stored orientation, rows along K.
///
/// The sum is in `f32`. On [`GemmBackend::Scalar`] `k` ascends, which is the order of
/// [`reference::gemm_f32`](crate::reference::gemm_f32), bit for bit; matrix instructions add in
/// their own order. A grouped GEMM has the bits of the dense GEMMs of its groups by the same kernel
/// and tile.
#[derive(Debug, Clone, Copy)]
pub struct Gemm<'a> {
    /// The left operand: rows of the output. Packed operands may have their block scales in rows
    /// or in 128x4 tiles, which [`GemmBackend::CublasLt`] and [`GemmBackend::Sm100Tcgen05`] read
    /// and other backends turn into rows before; [`packed_reads`] says which. With groups along M
    /// tiles of `a` begin anew at each group of rows, tiles of `b` at each group's matrix. With
    /// groups along K, each begins with a tile: at a multiple of 64 columns.
    pub a: Operand<'a>,
    /// The right operand: columns of the output.
    pub b: Operand<'a>,
    /// An `f32` for each column of the output, a row for each group. On [`GemmBackend::CublasLt`]
    /// the library rounds once more: a bias of an output of 16 bits is rounded to the output's type
    /// first.
    pub bias: Option<&'a Matrix>,
    /// What is written.
    pub target: Target<'a>,
    /// What is in groups.
    pub grouped: Grouped<'a>,
    /// What the offsets of groups along K are multiples of, the last one too: a block of the
    /// operands unless the caller knows better. The kernel of [`GemmBackend::Sm100Tcgen05`] reads
    /// NVFP4 operands with multiples of 64 as they are, and a rearranged copy of others; MXFP8
    /// operands, whose blocks are 32, always as they are.
    pub k_alignment: usize,
    /// Find the largest magnitude of the output as it is stored too. Kernels find it while they
    /// write; after cuBLASLt a second kernel reads the output, which a tracing event says.
    pub amax: Option<OutputAmax>,
    /// The backend, or that which [`choose`] says. One that was asked for is never replaced.
    pub backend: Option<GemmBackend>,
    /// The kernel and its tile, for measurements and tests, where the backend has several.
    #[doc(hidden)]
    pub plan: Option<Plan>,
    /// What the device can do, for tests of the choice.
    #[doc(hidden)]
    pub capabilities: Option<&'a Capabilities>,
}

/// What a GEMM made.
#[derive(Debug, Clone)]
pub struct GemmOutput {
    /// The output.
    pub matrix: Matrix,
    /// The amax values that were asked for, in device memory: one `f32`, or one for each group.
    /// They are what [`amax`](crate::quantize::amax()) of the output would find, so that
    /// quantizing it next needs no pass over it. NaN and infinity survive; a group without elements
    /// has a zero.
    pub amax: Option<Handle>,
}

impl<'a> Gemm<'a> {
    /// `a · bᵀ` into a new bf16 matrix.
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

    /// A GEMM whose sums are exact, into a new `f32` matrix.
    fn of_exact(case: &'a ExactGemm) -> Self {
        let grouped = match &case.groups {
            None => Grouped::None,
            Some((GroupedDim::K, offsets)) => Grouped::K(offsets),
            Some((_, offsets)) => Grouped::M(offsets),
        };
        let request = Self::new(&case.a, &case.b).out(FloatKind::F32);
        request.grouped(grouped).k_alignment(case.k_alignment)
    }

    /// Into a new matrix of this type.
    pub fn out(self, dtype: FloatKind) -> Self {
        self.target(Target::New(dtype))
    }

    /// Into this target.
    pub fn target(self, target: Target<'a>) -> Self {
        Self { target, ..self }
    }

    /// With a bias, or without.
    pub fn bias(self, bias: impl Into<Option<&'a Matrix>>) -> Self {
        let bias = bias.into();
        Self { bias, ..self }
    }

    /// With groups.
    pub fn grouped(self, grouped: Grouped<'a>) -> Self {
        Self { grouped, ..self }
    }

    /// With groups along M.
    pub fn m_grouped(self, offsets: &'a GroupOffsets) -> Self {
        self.grouped(Grouped::M(offsets))
    }

    /// With groups along K.
    pub fn k_grouped(self, offsets: &'a GroupOffsets) -> Self {
        self.grouped(Grouped::K(offsets))
    }

    /// With groups along K that begin at multiples of `alignment`, itself a multiple of 16.
    pub fn k_alignment(self, alignment: usize) -> Self {
        Self {
            k_alignment: alignment,
            ..self
        }
    }

    /// With the amax of the output.
    pub fn amax(self, amax: impl Into<Option<OutputAmax>>) -> Self {
        let amax = amax.into();
        Self { amax, ..self }
    }

    /// On a backend, or on that which [`choose`] says.
    pub fn backend(self, backend: impl Into<Option<GemmBackend>>) -> Self {
        let backend = backend.into();
        Self { backend, ..self }
    }

    /// With a given kernel and tile.
    #[doc(hidden)]
    pub fn plan(self, plan: impl Into<Option<Plan>>) -> Self {
        let plan = plan.into();
        Self { plan, ..self }
    }

    /// As on a device that can do something else.
    #[doc(hidden)]
    pub fn capabilities(self, capabilities: &'a Capabilities) -> Self {
        let capabilities = Some(capabilities);
        Self {
            capabilities,
            ..self
        }
    }

    /// The sizes, of a request that was checked.
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

    /// The matrices that `b` has one below the other along K.
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
        // What is not packed does not say how much of it is padding.
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

    /// Where tiles of the operands' block scales begin anew.
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

    /// What the choice depends on.
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

    /// How kernels may read `b`. TMA brings K in steps of the instructions: what it would bring of
    /// the next matrix of a stack is not multiplied.
    fn b_layout(&self) -> OperandLayout {
        match self.b.layout() {
            OperandLayout::MnMajor if self.stack() > 1 && !self.shape().k.is_multiple_of(16) => {
                OperandLayout::KMajor
            }
            layout => layout,
        }
    }

    /// What groups along K begin at multiples of: whole blocks, whatever the request says.
    fn known_alignment(&self) -> usize {
        self.k_alignment.max(self.a.block()).max(self.b.block())
    }

    /// Groups along K with the alignment that a kernel needs, where they, or all columns, have
    /// less.
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

    /// What the device can do, or what it is taken for: [emulated](Plan::is_emulated) plans run on
    /// CUDA devices that lack their instruction.
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

/// Computes a GEMM. A tracing event says which kernel it takes. Where that dequantizes operands
/// which the device's tensor cores multiply as they are, another event says why: a warning for the
/// first such GEMM of a process and each reason, a debug event for the others.
///
/// # Errors
/// When a shape, element type or buffer does not fit, or when the backend that was asked for does
/// not take the operands on this device.
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

    // What the epilogue does not read may be any memory.
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
            Some(quantize::amax(client, output.matrix(), None)?)
        }
        amax => amax,
    };
    let matrix = output.into_matrix();
    Ok(GemmOutput { matrix, amax })
}

/// A GEMM of the self-check, by the kernel that it checks.
fn multiply_exact(
    client: &Client,
    case: &ExactGemm,
    tile: Sm100Tile,
) -> Result<Matrix, Nvfp4Error> {
    let request = Gemm::of_exact(case).backend(GemmBackend::Sm100Tcgen05);
    let request = request.plan(Plan::Tcgen05(tile));
    gemm(client, &request).map(|output| output.matrix)
}

/// Says which kernel a GEMM takes, and why not one that multiplies codes.
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
