//! Kernel that quantizes rows.

use cubecl::prelude::*;

use crate::{
    cube::codec::{Conversion, INFINITY, QUIET_NAN, encode_e4m3x4, load, magnitude_bits},
    tensor::FloatKind,
};

/// Comptime choices of [`fp8_quantize_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fp8QuantizePlan {
    /// Element type.
    pub kind: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
    /// Units per cube.
    pub units: usize,
}

/// Loads the four elements of a word of codes.
#[cube]
fn load_four<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    word: usize,
    #[comptime] kind: FloatKind,
) -> Array<f32> {
    let width = N::value();
    let mut values = Array::<f32>::new(4usize);
    #[unroll]
    for v in 0..comptime!(4 / width) {
        let vector = x[word * comptime!(4 / width) + v];
        #[unroll]
        for e in 0..width {
            values[comptime!(v * width + e)] = load::<F>(vector.extract(e), kind);
        }
    }
    values
}

/// Returns the largest number over all units.
#[cube]
fn largest_of_cube(own: u32, all: &mut Shared<[u32]>) -> u32 {
    // Waits until the values of the previous row have been read.
    sync_cube();
    all[UNIT_POS as usize] = own;
    let mut len = CUBE_DIM;
    while len > 1u32 {
        let half = len.div_ceil(2u32);
        sync_cube();
        if UNIT_POS + half < len {
            let at = UNIT_POS as usize;
            all[at] = max(all[at], all[(UNIT_POS + half) as usize]);
        }
        len = half;
    }
    sync_cube();
    all[0]
}

/// Computes the scale factor and the codes of each row of `x`, which has `words` words of four
/// codes. A cube processes one row at a time.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn fp8_quantize_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    codes: &mut [u32],
    scales: &mut [f32],
    rows: usize,
    words: usize,
    #[comptime] plan: Fp8QuantizePlan,
    #[define(F)] _storage: ElemType,
) {
    let mut all = Shared::<[u32]>::new_slice(plan.units);
    let mut row = CUBE_POS;
    while row < rows {
        let mut largest = 0u32;
        let mut word = UNIT_POS as usize;
        while word < words {
            let values = load_four::<F, N>(x, row * words + word, plan.kind);
            #[unroll]
            for i in 0..4usize {
                largest = max(largest, magnitude_bits(values[i]));
            }
            word += CUBE_DIM as usize;
        }
        let amax = largest_of_cube(largest, &mut all);
        let scale = f32::reinterpret(select(
            amax >= INFINITY,
            QUIET_NAN,
            u32::reinterpret(f32::reinterpret(amax) / 448.0f32),
        ));
        if UNIT_POS == 0u32 {
            scales[row] = scale;
        }
        // Magnitudes: the sign of a zero does not matter.
        let is_zero = u32::reinterpret(scale) == 0u32;
        let mut word = UNIT_POS as usize;
        while word < words {
            let values = load_four::<F, N>(x, row * words + word, plan.kind);
            let bytes = encode_e4m3x4(
                values[0] / scale,
                values[1] / scale,
                values[2] / scale,
                values[3] / scale,
                comptime!(plan.conversion.has_e4m3()),
            );
            codes[row * words + word] = select(is_zero, 0u32, bytes);
            word += CUBE_DIM as usize;
        }
        row += CUBE_COUNT;
    }
}
