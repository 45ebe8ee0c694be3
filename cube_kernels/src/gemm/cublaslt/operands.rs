//! Operands of [`product`](super::super::product()) as the library takes them.

use cubecl::{prelude::*, server::Handle};

use super::{Format, Problem, Product, Side, kernels};
use crate::{
    Nvfp4Error, ScaleLayout,
    capabilities::GemmBackend,
    gemm::product::{Elements, Operand, Scale},
    launch::grid,
    memory::{address_type, allocate},
    quantize,
    tensor::{FloatKind, Matrix},
};

/// How a product with this epilogue is put together.
///
/// The library rounds a 16-bit output before it adds what the output held, and once more behind that.
/// Where a 16-bit output is added to, the sum goes to an `f32` matrix of its own instead, and a kernel adds
/// and rounds once. An `f32` output with a bias begins as the bias, of which the library would keep no more
/// than bf16.
struct Assembly {
    /// The sum goes to a matrix of its own.
    staged: bool,
    /// The matrix that the library writes begins as the bias.
    seeded: bool,
    problem: Problem,
}

/// Puts a product together.
///
/// Two packed operands are multiplied as they are. Of one packed and one bf16 operand, the packed one
/// is decoded before, which is exact.
///
/// # Errors
/// A factor for each row, which the library does not have, and as [`Problem::check`].
fn assemble(
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    result: &Matrix,
    accumulate: bool,
) -> Result<Assembly, Nvfp4Error> {
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
    let staged = accumulate && result.dtype != FloatKind::F32;
    let out = if staged { FloatKind::F32 } else { result.dtype };
    let seeded = bias.is_some() && out == FloatKind::F32;
    let aligned = a.is_aligned() && b.is_aligned() && super::alignment(&result.handle) >= 16;
    let problem = Problem {
        format,
        m: a.outer(),
        n: b.outer(),
        k: a.stored(),
        out,
        alpha: [a, b].iter().any(|side| !matches!(side.scale, Scale::One)),
        bias: bias.is_some() && !seeded,
        accumulate: seeded || (accumulate && !staged),
        // Decoded, swizzled and staged matrices are allocations of their own.
        alignment: if aligned { 16 } else { 1 },
    };
    problem.check()?;
    Ok(Assembly {
        staged,
        seeded,
        problem,
    })
}

/// [`GemmBackend::CublasLt`] where the library takes the product; otherwise the portable path, and a tracing
/// event that says why.
pub fn or_portable(
    client: &Client,
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    result: &Matrix,
    accumulate: bool,
) -> GemmBackend {
    let assembly = assemble(a, b, bias, result, accumulate);
    match assembly.and_then(|assembly| super::supports(client, &assembly.problem)) {
        Ok(()) => GemmBackend::CublasLt,
        Err(refusal) => {
            let (m, n, k) = (a.outer(), b.outer(), a.stored());
            tracing::warn!(m, n, k, %refusal, "gemm without cuBLASLt");
            GemmBackend::Cmma
        }
    }
}

/// Queues the product, and whatever has to run before and behind it.
///
/// # Errors
/// Where [`or_portable`] would not take the library.
pub fn launch(
    client: &Client,
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    result: &Matrix,
    accumulate: bool,
) -> Result<(), Nvfp4Error> {
    let Assembly {
        staged,
        seeded,
        problem,
    } = assemble(a, b, bias, result, accumulate)?;
    // Before anything is written.
    super::supports(client, &problem)?;
    let stage = staged.then(|| Matrix::empty(client, problem.m, problem.n, problem.out));
    let out = stage.as_ref().unwrap_or(result);
    let alpha = problem
        .alpha
        .then(|| factors(client, a, b, problem.accumulate));
    let rounded = match bias {
        Some(bias) if seeded => {
            add_rows(client, bias, out, accumulate && !staged);
            None
        }
        Some(bias) => {
            let rounded = Matrix::empty(client, 1, problem.n, problem.format.bias(problem.out));
            add_rows(client, bias, &rounded, false);
            Some(rounded)
        }
        None => None,
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

/// The elements of an operand, and its block scales in 128x4 tiles.
fn stored(
    client: &Client,
    operand: &Operand,
    format: Format,
) -> Result<(Handle, Option<Handle>), Nvfp4Error> {
    match (operand.elements, format) {
        (Elements::Packed(packed), Format::Nvfp4) => {
            let scales = match packed.layout.scale_layout {
                ScaleLayout::Swizzled128x4 => packed.scales.clone(),
                ScaleLayout::Compact => {
                    quantize::swizzle(client, &packed.scales, packed.outer(), packed.blocks())?
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

/// Writes `rows`, an `f32` matrix, to each as many rows of `out`, rounded to its type, or adds them.
fn add_rows(client: &Client, rows: &Matrix, out: &Matrix, add: bool) {
    let (count, dim) = grid(client, out.len());
    // SAFETY: the kernel stays below the elements of either matrix.
    unsafe {
        kernels::add_rows_kernel::launch_unchecked(
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
