//! Four over six: each block chooses between scales that map its maximum to 6 or to 4, by the
//! smaller error (Cook et al., "Four Over Six", as in TransformerEngine).

use rayon::prelude::*;

use super::{
    Element,
    block::{magnitude_bits, pack_codes},
    quantize::{check_amax, check_matrix, check_packed_cols},
    round_nearest,
    scaling::GlobalScale,
};
use crate::{
    Amax, BLOCK, ErrorNorm, Nvfp4Error, Origin, PackedAxis, PackedTensor, Rounding, ScaleLayout,
    format::{e2m1, e4m3, packed::BlockShape},
};

/// 6 · 256: the global scale leaves room for a block scale half as large again.
const SCALE_RANGE: f32 = 1536.0;

/// The row-wise copy with the choice made for each 1x16 block ([`BlockShape::OneBy16`]) or once for
/// each 16x16 tile.
///
/// # Errors
/// When `x` does not hold `rows * cols` elements, `cols` is no multiple of 16, or a per-row `amax`
/// does not have `rows` values; 16x16 tiles take one `amax` for the tensor.
pub fn quantize_row<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
    norm: ErrorNorm,
    shape: BlockShape,
) -> Result<PackedTensor, Nvfp4Error> {
    check_matrix(x.len(), rows, cols)?;
    check_packed_cols(cols)?;
    check_amax(amax, rows)?;
    if shape == BlockShape::Tile16x16 && matches!(amax, Amax::PerOuter(_)) {
        return Err(Nvfp4Error::value(
            "amax",
            "one for each row",
            "one for the tensor",
        ));
    }
    let blocks = cols / BLOCK;
    let height = match shape {
        BlockShape::OneBy16 => 1,
        BlockShape::Tile16x16 => BLOCK,
    };
    let (mut codes, mut scales) = (vec![0u8; rows * blocks * 8], vec![0u8; rows * blocks]);
    codes
        .par_chunks_mut((height * blocks * 8).max(1))
        .zip(scales.par_chunks_mut((height * blocks).max(1)))
        .enumerate()
        .for_each(|(chunk, (codes, scales))| {
            let row0 = chunk * height;
            let amax = amax.of(row0);
            let global = GlobalScale::with_range(amax, SCALE_RANGE);
            for index in 0..blocks {
                let mut group = [[0f32; BLOCK]; BLOCK];
                let present = height.min(rows - row0);
                for (r, block) in group.iter_mut().take(present).enumerate() {
                    let source = &x[(row0 + r) * cols + index * BLOCK..][..BLOCK];
                    *block = std::array::from_fn(|i| source[i].to_f32());
                }
                let (scale, packed) = choose(&group, height, amax, &global, norm);
                for r in 0..present {
                    scales[r * blocks + index] = scale;
                    codes[(r * blocks + index) * 8..][..8].copy_from_slice(&packed[r]);
                }
            }
        });
    PackedTensor::from_parts(
        (rows, cols),
        PackedAxis::Cols,
        codes,
        (ScaleLayout::Compact, scales),
        amax.clone(),
        Origin {
            block: shape,
            scale_bound: 256,
            ..Origin::one_by_16(Rounding::Nearest, None)
        },
    )
}

/// Scale byte and codes of the better candidate; `height` rows of `group` count.
fn choose(
    group: &[[f32; BLOCK]; BLOCK],
    height: usize,
    amax: f32,
    global: &GlobalScale,
    norm: ErrorNorm,
) -> (u8, [[u8; 8]; BLOCK]) {
    let bits = group.iter().map(magnitude_bits).max().unwrap_or(0);
    let base = f32::from_bits(bits) / 6.0 * global.encode;
    let clamp = |scale: f32| e4m3::encode(if scale > e4m3::MAX { e4m3::MAX } else { scale });
    let candidate = |scale: u8| {
        let multiplier = super::encode_multiplier(scale, global);
        let mut errors = [0f32; BLOCK];
        let mut packed = [[0u8; 8]; BLOCK];
        for r in 0..height {
            let codes = group[r].map(|value| round_nearest(value * multiplier));
            for (value, &code) in group[r].iter().zip(&codes) {
                let decoded = e2m1::decode(code) * e4m3::decode(scale) * amax / SCALE_RANGE;
                let difference = (decoded - value).abs();
                errors[r] += match norm {
                    ErrorNorm::Mae => difference,
                    ErrorNorm::Mse => difference * difference,
                };
            }
            packed[r] = pack_codes(&codes);
        }
        // Row sums combine by a tree; with one row the others are zero and change nothing.
        for width in [8, 4, 2, 1] {
            for r in 0..width {
                errors[r] += errors[r + width];
            }
        }
        (errors[0], packed)
    };
    let (six, four) = (clamp(base), clamp(base * 1.5));
    let (error_six, packed_six) = candidate(six);
    let (error_four, packed_four) = candidate(four);
    if error_four < error_six {
        (four, packed_four)
    } else {
        (six, packed_six)
    }
}
