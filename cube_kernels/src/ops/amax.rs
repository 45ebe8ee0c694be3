//! The largest magnitude of a matrix, before or after the column-wise transform.

use cubecl::{prelude::*, server::Handle};

use super::launch::{grid, vector_size};
use crate::{
    BLOCK, Hadamard, Nvfp4Error,
    cube::{
        block::{block_amax, load_col_block},
        codec::{canonical, load, magnitude_bits},
        hadamard::transform,
    },
    device::{FloatKind, Matrix, address_type, allocate, is_cpu},
};

/// The largest magnitude in `x`, one `f32` in device memory; 0 for an empty matrix. With `hadamard`
/// that of the column-wise transformed matrix. Deterministic, and NaN and infinity survive: see
/// [`reference::amax`](crate::reference::amax).
///
/// # Errors
/// When the memory of `x` is smaller than its shape.
pub fn amax(client: &Client, x: &Matrix, hadamard: Option<Hadamard>) -> Result<Handle, Nvfp4Error> {
    x.check("x")?;
    let out = allocate(client, 4);
    let out_arg = || unsafe { BufferArg::from_raw_parts(out.clone(), 1) };
    // SAFETY: the buffer holds one word.
    unsafe {
        zero_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            out_arg(),
        );
    }
    if x.is_empty() {
        return Ok(out);
    }
    let planes = !is_cpu(client);
    match hadamard {
        None => {
            let width = vector_size(x.dtype, x.len());
            let vectors = x.len() / width;
            // Each unit folds several vectors before it touches the shared result.
            let (count, dim) = grid(client, vectors.div_ceil(8));
            // SAFETY: the kernel stays below the lengths of its buffers, which were checked.
            unsafe {
                amax_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address_type(x.len()),
                    width,
                    BufferArg::from_raw_parts(x.handle.clone(), vectors),
                    out_arg(),
                    vectors,
                    planes,
                    x.dtype,
                    x.dtype.storage_type(),
                );
            }
        }
        Some(hadamard) => {
            let items = x.rows.div_ceil(BLOCK) * x.cols;
            let (count, dim) = grid(client, items);
            // SAFETY: as above.
            unsafe {
                amax_cols_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address_type(x.len()),
                    BufferArg::from_raw_parts(x.handle.clone(), x.len()),
                    out_arg(),
                    x.rows,
                    x.cols,
                    hadamard.sign_words()[0],
                    planes,
                    x.dtype,
                    x.dtype.storage_type(),
                );
            }
        }
    }
    Ok(out)
}

#[cube(launch_unchecked)]
fn zero_kernel(out: &mut [u32]) {
    out[0] = 0u32;
}

/// Raises `out` to `bits`, once for each plane where there are planes. Magnitudes are compared as
/// integers, so the order in which units arrive does not matter.
#[cube]
fn raise(out: &mut [Atomic<u32>], bits: u32, #[comptime] planes: bool) {
    if comptime!(planes) {
        let plane = plane_max(bits);
        if UNIT_POS_PLANE == 0u32 {
            out[0].fetch_max(plane);
        }
    } else {
        out[0].fetch_max(bits);
    }
}

/// One unit folds every `units`-th vector.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn amax_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    out: &mut [Atomic<u32>],
    vectors: usize,
    #[comptime] planes: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let mut bits = 0u32;
    let mut i = ABSOLUTE_POS;
    while i < vectors {
        let vector = x[i];
        #[unroll]
        for j in 0..N::value() {
            bits = max(bits, magnitude_bits(load::<F>(vector.extract(j), kind)));
        }
        i += CUBE_COUNT * CUBE_DIM as usize;
    }
    raise(out, canonical(bits), planes);
}

/// One unit transforms every `units`-th block; neighbours take neighbouring columns.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn amax_cols_kernel<F: Numeric>(
    x: &[F],
    out: &mut [Atomic<u32>],
    rows: usize,
    cols: usize,
    signs: u32,
    #[comptime] planes: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let items = rows.div_ceil(16) * cols;
    let mut bits = 0u32;
    let mut i = ABSOLUTE_POS;
    while i < items {
        let mut block = load_col_block::<F>(x, (i / cols) * 16, i % cols, rows, cols, kind);
        transform(&mut block, signs);
        bits = max(bits, magnitude_bits(block_amax(&block)));
        i += CUBE_COUNT * CUBE_DIM as usize;
    }
    raise(out, canonical(bits), planes);
}
