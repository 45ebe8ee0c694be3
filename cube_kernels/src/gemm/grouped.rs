//! Products in groups, as mixtures of experts need them: one launch for all groups, with their sizes
//! in device memory, which no host ever reads.
//!
//! On Hopper, on consumer Blackwell and wherever there are matrix instructions the groups share one
//! persistent grid; elsewhere one unit computes each output element. Either way an element's sum is that of the plain product of its group by the same kernel and tile, bit
//! for bit.

use cubecl::{client::Client, server::Handle};

use super::{
    epilogue::{EpilogueArgs, EpilogueKind, OutputAmax},
    kernels::{cmma, scalar},
    product::{Operand, Output, Scale, Target, bring, launch_plan, missing, possible_path},
    scheduler::{GroupArgs, GroupedDim},
    select::{self, Plan},
};
use crate::{
    Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    memory::check_memory,
    moe::GroupOffsets,
    quantize::amax::zeros,
    tensor::{FloatKind, Matrix},
};

/// Rows of `a` in groups, each with its own `b` (an expert's forward pass and its input gradient):
/// `out[i, n] = α · Σ a[i, k] · b[g · N + n, k] + bias[g, n]` for the rows `i` of group `g`.
///
/// `a` has any rows, of which those between the first and the last offset are in groups; rows outside
/// all groups are not written. `b` stacks the groups' N rows each, and the `f32` bias has a row for
/// each group. Factors may be one for the tensor, for each group or for each of the rows.
///
/// # Errors
/// When a shape, buffer or element type does not fit, or when the device lacks the path: the portable
/// ones take packed and bf16 operands in any combination.
pub fn gemm_grouped_rows(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    groups: &GroupOffsets,
    bias: Option<&Matrix>,
    target: Target,
) -> Result<Matrix, Nvfp4Error> {
    let found = rows_in_groups(client, path, a, b, groups, bias, target, None, None);
    found.map(|(result, _)| result)
}

/// [`gemm_grouped_rows`], and the largest magnitude of what it writes as it is stored, of all groups or of each
/// (`f32` in device memory: one, or one for each group), which the kernels find while they write: quantizing the
/// result next needs no pass over it. NaN and infinity survive; a group without rows has a zero.
///
/// # Errors
/// As [`gemm_grouped_rows`].
pub fn gemm_grouped_rows_amax(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    groups: &GroupOffsets,
    bias: Option<&Matrix>,
    target: Target,
    of: OutputAmax,
) -> Result<(Matrix, Handle), Nvfp4Error> {
    rows_in_groups(client, path, a, b, groups, bias, target, Some(of), None)
}

/// [`gemm_grouped_rows`] with a given kernel and tile, for measurements and tests.
///
/// # Errors
/// As [`gemm_grouped_rows`], and when the plan does not fit the operands.
#[doc(hidden)]
pub fn grouped_rows_with(
    client: &Client,
    a: &Operand,
    b: &Operand,
    groups: &GroupOffsets,
    target: Target,
    plan: Plan,
) -> Result<Matrix, Nvfp4Error> {
    let (path, plan) = (Some(plan.path()), Some(plan));
    let found = rows_in_groups(client, path, a, b, groups, None, target, None, plan);
    found.map(|(result, _)| result)
}

fn rows_in_groups(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    groups: &GroupOffsets,
    bias: Option<&Matrix>,
    target: Target,
    amax: Option<OutputAmax>,
    plan: Option<Plan>,
) -> Result<(Matrix, Handle), Nvfp4Error> {
    if groups.count == 0 || !b.outer().is_multiple_of(groups.count) {
        return Err(Nvfp4Error::shape(
            "b",
            format!("{} rows for {} groups", b.outer(), groups.count),
            "the same number of rows for each group, and at least one group",
        ));
    }
    let shape = (a.outer(), b.outer() / groups.count);
    grouped(
        client,
        path,
        GroupedDim::M,
        a,
        b,
        groups,
        shape,
        bias,
        target,
        amax,
        plan,
    )
}

/// The contraction in groups (an expert's weight gradient): `out[g · M + m, n] = α · Σ a[m, k] ·
/// b[n, k]` over the columns `k` of group `g`, one M x N output after another.
///
/// Groups begin at multiples of 16 along the contraction (columns of an operand, rows of a bf16 one
/// [in columns](super::Elements::Bf16MnMajor)), and what lies between the end of a group's data and the
/// next group is zero: what quantizing each group by itself leaves. An empty group gives zeros. Factors may
/// be one for the tensor, for each group, or for each stored row of each group: `groups x M` of `a`,
/// `groups x N` of `b`, one group after another.
///
/// # Errors
/// As [`gemm_grouped_rows`].
pub fn gemm_grouped_depth(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    groups: &GroupOffsets,
    target: Target,
) -> Result<Matrix, Nvfp4Error> {
    depth_in_groups(client, path, a, b, groups, target, None).map(|(result, _)| result)
}

/// [`gemm_grouped_depth`], and the largest magnitude of what it writes, as [`gemm_grouped_rows_amax`] has it.
///
/// # Errors
/// As [`gemm_grouped_rows`].
pub fn gemm_grouped_depth_amax(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    groups: &GroupOffsets,
    target: Target,
    of: OutputAmax,
) -> Result<(Matrix, Handle), Nvfp4Error> {
    depth_in_groups(client, path, a, b, groups, target, Some(of))
}

fn depth_in_groups(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    groups: &GroupOffsets,
    target: Target,
    amax: Option<OutputAmax>,
) -> Result<(Matrix, Handle), Nvfp4Error> {
    for (argument, operand) in [("a", a), ("b", b)] {
        if let Scale::PerRow(amax, _) = operand.scale {
            let needed = 4 * groups.count * operand.outer();
            check_memory(argument, amax, needed)?;
        }
    }
    let shape = (a.outer(), b.outer());
    grouped(
        client,
        path,
        GroupedDim::K,
        a,
        b,
        groups,
        shape,
        None,
        target,
        amax,
        None,
    )
}

/// The product in groups, and the maxima that `amax` asks for, or any memory where it asks for none.
fn grouped(
    client: &Client,
    path: Option<GemmBackend>,
    grouping: GroupedDim,
    a: &Operand,
    b: &Operand,
    groups: &GroupOffsets,
    (m, n): (usize, usize),
    bias: Option<&Matrix>,
    target: Target,
    amax: Option<OutputAmax>,
    plan: Option<Plan>,
) -> Result<(Matrix, Handle), Nvfp4Error> {
    a.check("a", Some(groups.count))?;
    b.check("b", Some(groups.count))?;
    groups.check("groups")?;
    if a.inner() != b.inner() || a.stored() != b.stored() {
        return Err(Nvfp4Error::shape(
            "b",
            format!("{} x {} (stored)", b.outer(), b.inner()),
            format!("a contraction of {}, that of `a`", a.inner()),
        ));
    }
    Operand::check_same_transform(a, b)?;
    let k = a.stored();
    if let Some(bias) = bias {
        bias.check("bias")?;
        if (bias.rows, bias.cols, bias.dtype) != (groups.count, n, FloatKind::F32) {
            return Err(Nvfp4Error::shape(
                "bias",
                format!("{} x {} of {:?}", bias.rows, bias.cols, bias.dtype),
                format!("{} x {n} of F32", groups.count),
            ));
        }
    }
    let rows = match grouping {
        GroupedDim::K => groups.count * m,
        GroupedDim::None | GroupedDim::M => m,
    };
    let result = Output::new(client, target, rows, n)?;
    // What the epilogue does not read may be any memory.
    let unread = a.memory();
    let maxima = match amax {
        Some(OutputAmax::Whole) => zeros(client, 1),
        Some(OutputAmax::PerGroup) => zeros(client, groups.count),
        None => unread.clone(),
    };
    if result.is_empty() {
        return Ok((result.into_matrix(), maxima));
    }
    let ((a_kind, a_amax, a_range), (b_kind, b_amax, b_range)) = (a.factor(), b.factor());
    let epilogue = EpilogueArgs {
        kind: EpilogueKind {
            a: a_kind,
            b: b_kind,
            bias: bias.is_some(),
            accumulate: result.accumulates(),
            out: result.dtype(),
            amax,
        },
        a_amax: a_amax.unwrap_or_else(|| unread.clone()),
        b_amax: b_amax.unwrap_or_else(|| unread.clone()),
        ranges: [a_range, b_range],
        bias: bias.map_or(unread, |bias| &bias.handle).clone(),
        amax: maxima.clone(),
    };
    let capabilities = Capabilities::of(client);
    let count = groups.count;
    let trace = |path: GemmBackend, kernel: &str| {
        tracing::debug!(
            m,
            n,
            k,
            groups = count,
            ?grouping,
            ?path,
            kernel,
            "grouped gemm"
        );
    };
    let shape = (m, n, k);
    let possible = possible_path(&capabilities, plan, a, b, &result, shape, grouping);
    let path = path.unwrap_or(possible);
    let args = GroupArgs {
        grouping,
        offsets: groups.offsets.clone(),
        groups: groups.count,
    };
    let [a_brought, b_brought] = [a, b].map(|operand| bring(client, operand, path, false));
    let (a_brought, b_brought) = (a_brought?, b_brought?);
    let (a, b) = (&a.with_elements(&a_brought), &b.with_elements(&b_brought));
    match path {
        path @ (GemmBackend::Sm90Wgmma | GemmBackend::Sm120BlockScaled) if path == possible => {
            let plan = match plan {
                Some(plan) => plan,
                None => select::plan_on(client, path, a, b, shape, grouping, groups.count)?,
            };
            trace(path, &plan.to_string());
            let device = &capabilities;
            launch_plan(client, device, plan, a, b, shape, &args, &epilogue, &result)?;
        }
        GemmBackend::Cmma if capabilities.gemm != GemmBackend::Scalar => {
            trace(GemmBackend::Cmma, select::TILES);
            cmma::launch(
                client,
                &capabilities,
                a,
                b,
                shape,
                &args,
                &epilogue,
                result.matrix(),
            );
        }
        GemmBackend::Scalar => {
            trace(GemmBackend::Scalar, "one unit for each output element");
            scalar::launch_grouped(
                client,
                &capabilities,
                grouping,
                a,
                b,
                Some(groups),
                (m, n, k),
                &epilogue,
                result.matrix(),
            );
        }
        path => return Err(missing(path, &capabilities, shape)),
    }
    Ok((result.into_matrix(), maxima))
}
