//! Square `f64` matrices: a diagonal one, and the reversal of rows and columns.

use cubecl::{prelude::*, server::Handle};

use crate::{
    launch::{buffer, grid},
    memory::address_type,
};

/// Writes `value` to the diagonal of a `[k, k]` matrix, and zeros elsewhere.
pub(super) fn fill_diagonal(client: &Client, matrix: &Handle, k: usize, value: f32) {
    let (count, dim) = grid(client, k * k);
    // SAFETY: the matrix has k x k elements.
    unsafe {
        fill_diagonal_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(k * k),
            buffer(matrix, k * k),
            k,
            value,
        );
    }
}

/// Writes P `from` P to `to`, with P the reversal of the order.
pub(super) fn reverse(client: &Client, from: &Handle, to: &Handle, k: usize) {
    let (count, dim) = grid(client, k * k);
    // SAFETY: both have k x k elements.
    unsafe {
        reverse_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(k * k),
            buffer(from, k * k),
            buffer(to, k * k),
            k * k,
        );
    }
}

/// Writes the diagonal matrix.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn fill_diagonal_kernel(out: &mut [f64], k: usize, value: f32) {
    let mut item = ABSOLUTE_POS;
    while item < k * k {
        let on_diagonal = item / k == item % k;
        out[item] = f64::cast_from(select(on_diagonal, value, 0.0f32));
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Writes the elements in reversed order.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn reverse_kernel(from: &[f64], to: &mut [f64], len: usize) {
    let mut item = ABSOLUTE_POS;
    while item < len {
        to[item] = from[len - 1usize - item];
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
