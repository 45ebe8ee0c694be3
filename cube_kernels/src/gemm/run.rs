//! Runs a [`Gemm`] request: validates it, chooses a kernel, materializes the operands and launches
//! the kernel.

use std::sync::Arc;

use cubecl::client::Client;

use super::{
    Gemm, GemmOutput, Grouped, choices, cublaslt, dispatch,
    dispatch::Choice,
    epilogue::{EpilogueArgs, OutputAmax},
    exact::ExactGemm,
    kernels::sm100::{Tcgen05, tile::Sm100Tile},
    materialize::materialize,
    output::Output,
    plan::{Launch, Plan},
    problem::{Device, GemmShape, Problem, sms},
    scheduler::{GroupArgs, GroupedDim},
    self_check, slow_path,
};
use crate::{
    Nvfp4Error, StoredForm,
    capabilities::{Capabilities, GemmBackend},
    environment::Environment,
    quantize::amax::amax_of_matrix,
    tensor::Matrix,
    zeroed::zeros_of_step,
};

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
    let choice = match (gemm.plan, gemm.capabilities) {
        (None, None) => choose(client, &problem)?,
        (plan, _) => on_device(client, &capabilities, |device| {
            let choice = dispatch::plan(device, &problem)?;
            match plan {
                Some(plan) => dispatch::with_plan(device, &problem, choice, plan),
                None => Ok(choice),
            }
        })?
        .into(),
    };
    trace(&capabilities, &problem, &choice);

    let plan = choice.plan.object();
    let has_tiles = plan.reads().has_tiles();
    let [a_tiling, b_tiling] = gemm.scale_tilings();
    let needed = plan.k_alignment();
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
            materialize(
                client,
                &gemm.a,
                1,
                plan.layout_read(problem.a),
                (has_tiles, a_tiling),
                ends,
            )?,
            materialize(
                client,
                &gemm.b,
                gemm.stack(),
                plan.layout_read(problem.b),
                (has_tiles, b_tiling),
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
    plan.launch(&launch)?;
    let amax = match amax {
        Some(_) if !plan.finds_amax() => {
            let GemmShape { m, n, k } = shape;
            tracing::debug!(
                m,
                n,
                k,
                "gemm: a second kernel finds the amax of the output"
            );
            Some(amax_of_matrix(client, output.matrix())?)
        }
        amax => amax,
    };
    let matrix = output.into_matrix();
    Ok(GemmOutput { matrix, amax })
}

/// Returns the choice of [`gemm()`] for `problem` on the device of `client`. It is made once per
/// device and problem; later calls return the same.
///
/// The first choice that needs the self-check of a kernel runs it, and waits for the device.
///
/// # Errors
/// Returns an error if the requested backend does not support the problem.
pub fn choose(client: &Client, problem: &Problem) -> Result<Arc<Choice>, Nvfp4Error> {
    if let Some(known) = choices::known(client, problem) {
        return Ok(known);
    }
    let GemmShape { m, n, k } = problem.shape;
    let (grouped, aligned) = (problem.grouped, problem.aligned);
    tracing::debug!(m, n, k, ?grouped, aligned, "gemm: a kernel is selected");
    let choice = on_device(client, Capabilities::of(client), |device| {
        dispatch::plan(device, problem)
    })?;
    Ok(choices::keep(client, problem, choice))
}

/// Returns the form in which the GEMM `problem` reads packed operands on the device of `client`.
/// This is the single source for the form in which they should be written. Operands in another form
/// are converted by a separate pass, with bit-identical results.
///
/// - [`StoredForm::Bf16Unscaled`]: an operand that nothing else reads may as well be in this form.
/// - [`StoredForm::Tiles`]: block scales in 128x4 tiles. If K is the token dimension, which may
///   have any length, K of NVFP4 operands must be padded to whole tiles
///   ([`StoredForm::WholeTiles`](crate::StoredForm::WholeTiles)), and so must the `k` of
///   `problem`. MXFP8 needs no padding, because an instruction multiplies one of its blocks.
///
/// A GEMM of this problem then runs the kernel that was chosen here, without choosing again. If the
/// problem differs, for example because memory is not aligned, the GEMM chooses anew, and a tracing
/// event reports it.
///
/// `NVFP4_SCALES=tiles` in the environment requests tiles on every device. Kernels that read rows
/// then get them unswizzled first, with bit-identical results.
pub fn packed_reads(client: &Client, problem: &Problem) -> StoredForm {
    if Environment::get().scale_tiles {
        return StoredForm::Tiles;
    }
    match choose(client, problem) {
        Ok(choice) => choice.packed_reads(problem),
        // The GEMM reports problems that cannot be computed.
        Err(_) => StoredForm::Rows,
    }
}

/// Returns true if GEMMs on the device of `client` may read block scales in 128x4 tiles. Padding K
/// to whole tiles is useless on other devices.
pub fn may_read_tiles(client: &Client) -> bool {
    let backend = Capabilities::of(client).gemm;
    Environment::get().scale_tiles
        || matches!(backend, GemmBackend::CublasLt | GemmBackend::Sm100Tcgen05)
}

/// Calls `ask` with the device of `client`, assuming these capabilities.
fn on_device<T>(client: &Client, capabilities: &Capabilities, ask: impl FnOnce(&Device) -> T) -> T {
    ask(&Device {
        capabilities,
        sms: sms(client),
        cublaslt: &|problem| cublaslt::supports(client, problem),
        tcgen05: &|tile| self_check::once(client, tile, |case| multiply_exact(client, case, tile)),
    })
}

/// Computes a GEMM of the self-check with the kernel under test.
fn multiply_exact(
    client: &Client,
    case: &ExactGemm,
    tile: Sm100Tile,
) -> Result<Matrix, Nvfp4Error> {
    let request = Gemm::of_exact(case).backend(GemmBackend::Sm100Tcgen05);
    let request = request.plan(Plan::from(Tcgen05(tile)));
    gemm(client, &request).map(|output| output.matrix)
}

/// Reports the kernel of a GEMM, and why no kernel that multiplies codes was chosen.
fn trace(capabilities: &Capabilities, problem: &Problem, choice: &Choice) {
    let GemmShape { m, n, k } = problem.shape;
    slow_path::report(capabilities, problem, choice);
    let (backend, kernel) = (choice.backend, &choice.plan);
    match problem.grouped {
        GroupedDim::None => tracing::debug!(m, n, k, ?backend, %kernel, "gemm"),
        grouped => {
            let groups = problem.groups;
            tracing::debug!(m, n, k, groups, ?grouped, ?backend, %kernel, "grouped gemm");
        }
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::{
        gemm::{choices::selections, operand::OperandLayout},
        tensor::FloatKind,
    };

    /// A planned GEMM runs the kernel that was chosen for the plan. One that differs from the plan
    /// chooses again.
    #[test]
    fn planned_gemms_choose_no_kernel() {
        let client = crate::cpu_client();
        // A shape that no other test has.
        let (m, n, k) = (23, 29, 31);
        let matrix = |rows, cols, dtype: FloatKind| {
            let handle = client.create_from_slice(&vec![0; rows * cols * dtype.size()]);
            Matrix::new(handle, rows, cols, dtype).unwrap()
        };
        let (a, b) = (matrix(m, k, FloatKind::Bf16), matrix(n, k, FloatKind::Bf16));
        let problem = Problem::new([OperandLayout::KMajor; 2], (m, n, k));
        let planned = choose(&client, &problem).unwrap();
        assert_eq!(selections((m, n, k)), 1);
        for _ in 0..2 {
            gemm(&client, &Gemm::new(&a, &b)).unwrap();
        }
        assert!(Arc::ptr_eq(&planned, &choose(&client, &problem).unwrap()));
        assert_eq!(selections((m, n, k)), 1);
        let bias = matrix(1, n, FloatKind::F32);
        for _ in 0..2 {
            gemm(&client, &Gemm::new(&a, &b).bias(&bias)).unwrap();
        }
        assert_eq!(selections((m, n, k)), 2);
    }
}
