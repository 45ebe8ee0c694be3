//! Operands of [`product`](super::super::product()) as the library takes them.

use cubecl::{prelude::*, server::Handle};

use super::{Format, Problem, Product, Side, kernels};
use crate::{
    Nvfp4Error, ScaleLayout,
    device::{FloatKind, GemmPath, Matrix, address_type, allocate},
    gemm::product::{Elements, Operand, Scale},
    ops::{self, launch::grid},
};

/// The problem that a product of these operands becomes.
///
/// Two packed operands are multiplied as they are. Of one packed and one bf16 operand, the packed one
/// is decoded before, which is exact. An `f32` output with a bias begins as the bias, so that nothing of
/// it is lost: the library would round it to bf16.
///
/// # Errors
/// A factor for each row, which the library does not have.
fn problem_of(
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    result: &Matrix,
    accumulate: bool,
) -> Result<Problem, Nvfp4Error> {
    for (argument, operand) in [("a", a), ("b", b)] {
        if matches!(operand.scale, Scale::PerRow(..) | Scale::PerGroup(..)) {
            return Err(Nvfp4Error::value(
                argument,
                "a factor for each row",
                "one factor for the tensor: cuBLASLt has no others",
            ));
        }
    }
    let format = match (a.elements, b.elements) {
        (Elements::Packed(_), Elements::Packed(_)) => Format::Nvfp4,
        _ => Format::Bf16,
    };
    let seeded = bias.is_some() && result.dtype == FloatKind::F32;
    let aligned = a.is_aligned() && b.is_aligned() && super::alignment(&result.handle) >= 16;
    let problem = Problem {
        format,
        m: a.outer(),
        n: b.outer(),
        k: a.stored(),
        out: result.dtype,
        alpha: [a, b].iter().any(|side| !matches!(side.scale, Scale::One)),
        bias: bias.is_some() && !seeded,
        accumulate: accumulate || seeded,
        // Decoded and swizzled copies are allocations of their own.
        alignment: if aligned { 16 } else { 1 },
    };
    problem.check()?;
    Ok(problem)
}

/// [`GemmPath::CublasLt`] where the library takes the product; otherwise the portable path, and a tracing
/// event that says why.
pub fn or_portable(
    client: &Client,
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    result: &Matrix,
    accumulate: bool,
) -> GemmPath {
    let problem = problem_of(a, b, bias, result, accumulate);
    match problem.and_then(|problem| super::supports(client, &problem)) {
        Ok(()) => GemmPath::CublasLt,
        Err(refusal) => {
            let (m, n, k) = (a.outer(), b.outer(), a.stored());
            tracing::warn!(m, n, k, %refusal, "gemm without cuBLASLt");
            GemmPath::MatrixInstructions
        }
    }
}

/// Queues the product of operands that [`problem_of`] took, and whatever has to run before.
pub fn launch(
    client: &Client,
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    result: &Matrix,
    accumulate: bool,
) -> Result<(), Nvfp4Error> {
    let problem = problem_of(a, b, bias, result, accumulate)?;
    // Before anything is written.
    super::supports(client, &problem)?;
    let alpha = problem
        .alpha
        .then(|| factors(client, a, b, problem.accumulate));
    let bias = match (bias, problem.bias) {
        (Some(bias), true) => {
            let rounded = Matrix::empty(client, 1, problem.n, problem.format.bias(problem.out));
            spread(client, bias, &rounded, false);
            Some(rounded)
        }
        (Some(bias), false) => {
            spread(client, bias, result, accumulate);
            None
        }
        (None, _) => None,
    };
    let (a_data, a_scale) = stored(client, a, problem.format)?;
    let (b_data, b_scale) = stored(client, b, problem.format)?;
    let side = |operand: &Operand, data, scale| Side {
        rows: operand.outer(),
        data,
        scale,
    };
    super::product(
        client,
        &Product {
            format: problem.format,
            k: problem.k,
            a: side(a, &a_data, a_scale.as_ref()),
            b: side(b, &b_data, b_scale.as_ref()),
            alpha: alpha.as_ref(),
            bias: bias.as_ref(),
            out: result,
            accumulate: problem.accumulate,
        },
    )
}

/// The elements of an operand, and its block scales in 128x4 tiles.
fn stored(
    client: &Client,
    operand: &Operand,
    format: Format,
) -> Result<(Handle, Option<Handle>), Nvfp4Error> {
    match (operand.elements, format) {
        (Elements::Packed(packed), Format::Nvfp4) => {
            let scales = match packed.layout {
                ScaleLayout::Swizzled128x4 => packed.scales.clone(),
                ScaleLayout::Compact => {
                    ops::swizzle(client, &packed.scales, packed.outer(), packed.blocks())?
                }
            };
            Ok((packed.codes.clone(), Some(scales)))
        }
        _ => Ok((operand.decoded(client).handle, None)),
    }
}

/// `alpha`, and 1 or 0 for what the output holds.
fn factors(client: &Client, a: &Operand, b: &Operand, accumulate: bool) -> Handle {
    let out = allocate(client, 8);
    let ((a_kind, a_amax, a_range), (b_kind, b_amax, b_range)) = (a.factor(), b.factor());
    // What is not read may be any memory.
    let amax = |amax: Option<Handle>| amax.unwrap_or_else(|| out.clone());
    // SAFETY: the operands were checked; one unit writes both values.
    unsafe {
        kernels::factors_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            BufferArg::from_raw_parts(amax(a_amax), 1),
            BufferArg::from_raw_parts(amax(b_amax), 1),
            BufferArg::from_raw_parts(out.clone(), 2),
            a_range,
            b_range,
            accumulate.into(),
            a_kind,
            b_kind,
        );
    }
    out
}

/// Writes the bias to each row of `out`, or adds it.
fn spread(client: &Client, bias: &Matrix, out: &Matrix, add: bool) {
    let (count, dim) = grid(client, out.len());
    // SAFETY: the kernel stays below the elements of `out` and the columns of the bias.
    unsafe {
        kernels::bias_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(out.len()),
            BufferArg::from_raw_parts(bias.handle.clone(), out.cols),
            BufferArg::from_raw_parts(out.handle.clone(), out.len()),
            out.len(),
            out.cols,
            add,
            out.dtype,
            out.dtype.storage_type(),
        );
    }
}
