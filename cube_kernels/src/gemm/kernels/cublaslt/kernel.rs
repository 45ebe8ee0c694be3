//! The GEMM of compute capability 10.0 and 10.3: cuBLASLt, with small auxiliary kernels for global
//! scale factors and for additions that the library rounds differently.

use std::fmt;

use cubecl::{prelude::*, server::Handle};

use super::super::small_m::SmallM;
use super::{CublasLtFormat, CublasLtGemm, CublasLtOperand, CublasLtProblem, gemm};
use crate::{
    Nvfp4Error, StoredForm,
    capabilities::GemmBackend,
    cube::codec::{load, store},
    gemm::{
        epilogue::{EpilogueArgs, Factor, factor},
        materialize::Materialized,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal},
        scheduler::GroupedDim,
    },
    launch::grid,
    memory::{address_type, allocate},
    tensor::{FloatKind, Matrix},
};

/// The cuBLASLt GEMM.
pub(crate) struct CublasLt;

impl GemmKernel for CublasLt {
    fn name(&self) -> &'static str {
        "cublaslt"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::CublasLt
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        let GemmShape { n, k, .. } = problem.shape;
        let asked = problem.backend == Some(GemmBackend::CublasLt);
        let is_here = matches!(
            device.capabilities.gemm,
            GemmBackend::CublasLt | GemmBackend::Sm100Tcgen05
        );
        if !asked && !is_here {
            return Err(Refusal::Device(
                "the device is not of compute capability 10.0 or 10.3",
            ));
        }
        problem.refuse_packed_mn_major()?;
        if problem.grouped != GroupedDim::None {
            return Err(Refusal::Operands(
                "the library's grouped GEMMs are not used: see docs/src/gemm.md",
            ));
        }
        // FP4 rows of 16 bytes; the library is not asked about other sizes.
        if !(asked || n.is_multiple_of(8) && k.is_multiple_of(32)) {
            return Err(Refusal::Operands("n is no multiple of 8, or k of 32"));
        }
        // cuBLASLt would require the whole weight to be dequantized for a small M.
        if !asked && !problem.is_packed()[0] && SmallM.supports(device, problem).is_ok() {
            return Err(Refusal::Operands("small_m reads a packed weight once"));
        }
        let answer =
            Assembly::new(problem).and_then(|assembly| (device.cublaslt)(&assembly.problem));
        answer.map_err(Refusal::Library)
    }

    fn plan(&self, _device: &Device, problem: &Problem) -> Candidate {
        CublasLtPlan(format_of(problem.is_packed())).into()
    }

    fn multiplies_codes_on(&self, compute_capability: Option<u32>) -> bool {
        compute_capability < Some(120)
    }
}

/// Plan: operands in this format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CublasLtPlan(pub CublasLtFormat);

impl fmt::Display for CublasLtPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            CublasLtFormat::Nvfp4 => "cuBLASLt on NVFP4, block scales in 128x4 tiles",
            _ => "cuBLASLt on bf16, packed operands dequantized",
        })
    }
}

impl GemmPlan for CublasLtPlan {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &CublasLt
    }

    fn reads(&self) -> StoredForm {
        match self.0 {
            CublasLtFormat::Nvfp4 => StoredForm::Tiles,
            _ => StoredForm::Bf16Unscaled,
        }
    }

    fn finds_amax(&self) -> bool {
        false
    }

    fn reads_codes_directly(&self) -> bool {
        self.0 == CublasLtFormat::Nvfp4
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        if self.0 != format_of([launch.a.is_packed(), launch.b.is_packed()]) {
            return Err(launch.misfit(self));
        }
        queue(launch)
    }
}

/// Returns the library's format. Two packed operands are multiplied directly. With one packed and
/// one bf16 operand, the packed one is first dequantized, which is exact.
fn format_of(is_packed: [bool; 2]) -> CublasLtFormat {
    match is_packed {
        [true, true] => CublasLtFormat::Nvfp4,
        _ => CublasLtFormat::Bf16,
    }
}

/// Decomposition of a GEMM with this epilogue.
///
/// The library rounds a 16-bit output before it adds the previous contents, and again afterwards.
/// To accumulate into a 16-bit output, the sum therefore goes to a separate `f32` matrix, and a
/// kernel adds and rounds once. For an `f32` output with a bias, the output is initialized to the
/// bias, of which the library would keep only bf16 precision.
struct Assembly {
    /// True if the sum goes to a separate matrix.
    staged: bool,
    /// True if the library's output is initialized to the bias.
    seeded: bool,
    problem: CublasLtProblem,
}

impl Assembly {
    /// Decomposes a GEMM.
    ///
    /// # Errors
    /// Returns an error for a global scale per row, which the library does not support, and the
    /// errors of [`CublasLtProblem::check`].
    fn new(problem: &Problem) -> Result<Self, Nvfp4Error> {
        let kind = problem.epilogue;
        for (argument, factor) in [("a", kind.a), ("b", kind.b)] {
            if matches!(factor, Factor::PerRow | Factor::PerGroup) {
                return Err(Nvfp4Error::value(
                    argument,
                    "a global scale for each row",
                    "one for the tensor: cuBLASLt has no others",
                ));
            }
        }
        let staged = kind.accumulate && kind.out != FloatKind::F32;
        let out = if staged { FloatKind::F32 } else { kind.out };
        let seeded = kind.bias && out == FloatKind::F32;
        let GemmShape { m, n, k } = problem.shape;
        let problem = CublasLtProblem {
            format: format_of(problem.is_packed()),
            m,
            n,
            k,
            out,
            alpha: [kind.a, kind.b] != [Factor::One; 2],
            bias: kind.bias && !seeded,
            accumulate: seeded || (kind.accumulate && !staged),
            // Dequantized, swizzled and staged matrices are separate allocations.
            alignment: if problem.aligned { 16 } else { 1 },
        };
        problem.check()?;
        Ok(Self {
            staged,
            seeded,
            problem,
        })
    }
}

/// Queues the GEMM and the kernels that run before and after it.
///
/// # Errors
/// Returns an error if the library refuses the problem after all.
fn queue(launch: &Launch) -> Result<(), Nvfp4Error> {
    let Launch {
        client,
        shape,
        a,
        b,
        epilogue,
        output,
        ..
    } = *launch;
    let kind = epilogue.kind;
    // The original form of the operands no longer matters.
    let Assembly {
        staged,
        seeded,
        problem,
    } = Assembly::new(&Problem {
        epilogue: kind,
        aligned: launch.aligned,
        ..Problem::new([a.layout, b.layout], shape)
    })?;
    let result = output.matrix();
    let stage = staged.then(|| Matrix::empty(client, problem.m, problem.n, problem.out));
    let out = stage.as_ref().unwrap_or(result);
    let alpha = problem
        .alpha
        .then(|| factors(client, epilogue, problem.accumulate));
    let rounded = if kind.bias {
        let bias = Matrix {
            handle: epilogue.bias.clone(),
            rows: 1,
            cols: problem.n,
            dtype: FloatKind::F32,
        };
        if seeded {
            add_rows(client, &bias, out, kind.accumulate && !staged);
            None
        } else {
            let rounded = Matrix::empty(client, 1, problem.n, problem.format.bias(problem.out));
            add_rows(client, &bias, &rounded, false);
            Some(rounded)
        }
    } else {
        None
    };
    gemm(
        client,
        &CublasLtGemm {
            format: problem.format,
            k: problem.k,
            a: library_operand(a),
            b: library_operand(b),
            alpha: alpha.as_ref(),
            bias: rounded.as_ref(),
            out,
            accumulate: problem.accumulate,
        },
    )?;
    if let Some(stage) = &stage {
        add_rows(client, stage, result, true);
    }
    Ok(())
}

/// Converts an operand to the library's form.
fn library_operand(operand: &Materialized) -> CublasLtOperand<'_> {
    CublasLtOperand {
        rows: operand.rows,
        data: &operand.elements,
        scale: operand.is_packed().then_some(&operand.scales),
    }
}

/// Returns `alpha` and `beta` (1 to keep the previous contents of the output, else 0).
fn factors(client: &Client, epilogue: &EpilogueArgs, accumulate: bool) -> Handle {
    let out = allocate(client, 8);
    // SAFETY: the operands were checked; one unit writes both values.
    unsafe {
        factors_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            BufferArg::from_raw_parts(epilogue.a_amax.clone(), 1),
            BufferArg::from_raw_parts(epilogue.b_amax.clone(), 1),
            BufferArg::from_raw_parts(out.clone(), 2),
            epilogue.ranges[0],
            epilogue.ranges[1],
            accumulate.into(),
            epilogue.kind.a,
            epilogue.kind.b,
        );
    }
    out
}

/// Writes or adds the `f32` matrix `rows` to `out`, repeated along its rows and rounded to its
/// type.
fn add_rows(client: &Client, rows: &Matrix, out: &Matrix, add: bool) {
    let (count, dim) = grid(client, out.len());
    // SAFETY: the kernel stays below the elements of either matrix.
    unsafe {
        add_rows_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(out.len()),
            BufferArg::from_raw_parts(rows.handle.clone(), rows.len()),
            BufferArg::from_raw_parts(out.handle.clone(), out.len()),
            out.len(),
            rows.len(),
            add,
            out.dtype,
            out.dtype.storage_type(),
        );
    }
}

/// Writes `fl(fl(amax_a / range_a) · fl(amax_b / range_b))`, followed by `before`.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn factors_kernel(
    a_amax: &[f32],
    b_amax: &[f32],
    out: &mut [f32],
    a_range: f32,
    b_range: f32,
    before: f32,
    #[comptime] a: Factor,
    #[comptime] b: Factor,
) {
    if ABSOLUTE_POS == 0usize {
        let left = factor(a_amax, 0u32, 0u32, a_range, a);
        let right = factor(b_amax, 0u32, 0u32, b_range, b);
        out[0] = left * right;
        out[1] = before;
    }
}

/// Writes element `i` modulo `period` of `rows` to element `i` of `out`, or adds it, rounded once
/// to `kind`: a bias in each row, or the sum of two matrices.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn add_rows_kernel<F: Numeric>(
    rows: &[f32],
    out: &mut [F],
    elements: usize,
    period: usize,
    #[comptime] add: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let mut item = ABSOLUTE_POS;
    while item < elements {
        let mut value = rows[item % period];
        if comptime!(add) {
            value += load::<F>(out[item], kind);
        }
        out[item] = store::<F>(value, kind);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
