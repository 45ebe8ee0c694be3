//! MS-EDEN, the unbiased quantization of Quartet II's backward (numerics, section 9).
//!
//! Elements are rounded to nearest, which is biased. A correction factor per rotation group removes
//! the bias, and the block scales, not the elements, are rounded stochastically. Both operands of a
//! GEMM are rotated by the same transform, which cancels in the GEMM.
//!
//! # Order of operations
//! Everything is computed in `f32`, with one rounding per operation; `fma` rounds once. A *line* is
//! a row of the matrix for [`Usage::Rowwise`] and a column for [`Usage::Columnwise`].
//! 1. A line is split into groups of 128, the last one padded with zeros. Each group is
//!    transformed: signs, a butterfly at distances 1, 2, 4, .., 64, `fma(value, factor, +0)` with
//!    [`HadamardSize::factor`] (so that a sum of zero never has a sign), and rounding to bf16. The
//!    contraction of the result `t` is padded to a multiple of 128, and so is the packed tensor.
//! 2. `amax` is the largest magnitude over all `t` ([`ms_eden_amax`]). The global scale maps it to
//!    `T · 255.99`, whereas plain NVFP4 maps it to 6 · 448. `T = 6 / f` is the value to which the
//!    largest element of a block is scaled, with `f = (17/16) · 0.93`. So that every reader of a
//!    packed tensor can decode with `amax / 2688`, the tensor stores
//!    `amax' = fl(amax · fl(448 f / 255.99))` as its amax, clamped to `f32::MAX` if `amax` is
//!    finite.
//! 3. `S` and `D` follow from `amax'` as in section 4; `m = fl(S · fl(f / 6))`.
//! 4. For each block of 16, `a = max |t|` and `s = e4m3(min(fl(a · m), FLT_MAX))`, where the byte
//!    of zero is replaced by that of 1. `e = min(fl(1 / fl(s · D)), FLT_MAX)`, `y = fl(t · e)`, and
//!    the code is `y` rounded to nearest, with value `q`.
//! 5. For each block `xx = Σ y · y` and `xq = Σ y · q`, starting from 0, elements in order, one
//!    `fma` each. For the group `XX = Σ s² · xx` and `XQ = Σ s² · xq`, starting from 0, blocks in
//!    order, one `fma` each (`s²` is exact). These weights bring the blocks to the same unit, so
//!    that the correction below is EDEN's. Quartet II's code sums without them; the mean of its
//!    results is then off by the spread of the scales within a group.
//! 6. `c = fl(XX / XQ)`; 1 unless `XQ > 0` and `c` is finite.
//! 7. The stored scale byte of block `i` is `fl(s · c)` rounded stochastically
//!    ([`round_scale_stochastic`]) with half-word `i` (little-endian) of the group's single Philox
//!    call, whose index is `line · groups + group`.
//!
//! A zero tensor has scale bytes of 1 and codes of zero. A NaN makes all scale bytes of its group
//! NaN. An infinity spreads over its group as NaN and infinities.

use rayon::prelude::*;

use super::{
    Element, GlobalScale, encode_multiplier, philox, quantize::check_matrix, round_nearest,
};
use crate::{
    Amax, BLOCK, BlockPosition, Gap, Gaps, Hadamard, HadamardSize, Layout, Nvfp4Error, Origin,
    QuantizedTensor, RandomStream, Rounding, Usage,
    format::{e2m1, e4m3},
    policy::EDEN_GROUP,
};

/// Blocks per group.
const BLOCKS: usize = EDEN_GROUP / BLOCK;

/// `f`: 6 divided by the value to which the largest element of a block is scaled, `6 / ((17/16) ·
/// 0.93)`. The largest element saturates slightly, and the grid is used where most elements are.
/// Quartet II's choice for the backward.
const FRACTION: f64 = 17.0 / 16.0 * 0.93;

/// `fl(448 f / 255.99)`, the factor from an amax to the amax that gives plain NVFP4 the same global
/// scale.
pub const EDEN_AMAX_FACTOR: f32 = (448.0 * FRACTION / 255.99) as f32;

/// `fl(f / 6)`, the reciprocal of the value to which the largest element is scaled.
pub const EDEN_BLOCK_FACTOR: f32 = (FRACTION / 6.0) as f32;

/// Parameters of an MS-EDEN quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdenParams {
    /// Transform, which mixes 128 elements.
    pub hadamard: Hadamard,
    /// Source of the random bits of the block scales.
    pub stream: RandomStream,
}

/// Returns `amax'`, from which the scales of a tensor with transformed amax `amax` derive.
#[inline]
pub fn eden_amax(amax: f32) -> f32 {
    let scaled = amax * EDEN_AMAX_FACTOR;
    if scaled > f32::MAX && amax <= f32::MAX {
        f32::MAX
    } else {
        scaled
    }
}

/// Rounds a scale to an E4M3 byte stochastically by 16 bits: a `value` at fraction `f` of the way
/// from one byte to the next is rounded up with probability `floor(65536 f) / 65536`. Outside [2⁻⁶,
/// 448], where the steps are not those of a normal number, rounds to nearest. NaN gives NaN.
#[inline(always)]
pub fn round_scale_stochastic(value: f32, random: u16) -> u8 {
    if value >= f32::powi(2.0, -6) && value < e4m3::MAX {
        // Twenty bits are dropped; the random bits are added to the upper sixteen of them.
        (((value.to_bits() + ((random as u32) << 4)) >> 20) - (120 << 3)) as u8
    } else {
        e4m3::encode(value)
    }
}

/// Returns the amax of a `rows` x `cols` matrix after the transform of 128 along `usage`. NaN and
/// infinity are preserved. 0 for an empty matrix.
///
/// # Errors
/// Returns an error if `x` does not have `rows * cols` elements, or the transform does not mix 128.
pub fn ms_eden_amax<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    usage: Usage,
    hadamard: &Hadamard,
) -> Result<f32, Nvfp4Error> {
    check_matrix(x.len(), rows, cols)?;
    check_eden_hadamard(hadamard)?;
    let (outer, inner) = usage.stored_shape(rows, cols);
    let bits = (0..outer)
        .into_par_iter()
        .map(|line| {
            let groups = 0..inner.div_ceil(EDEN_GROUP);
            let values =
                groups.flat_map(|group| load_group(x, cols, (line, group), inner, usage, hadamard));
            values.fold(0, |max, value| max.max(value.to_bits() & 0x7FFF_FFFF))
        })
        .max()
        .unwrap_or(0);
    Ok(super::amax(&[f32::from_bits(bits)]))
}

/// Quantizes a `rows` x `cols` matrix by MS-EDEN along `usage`, given the `amax` of its transformed
/// values ([`ms_eden_amax`]). The packed tensor is that of the transformed matrix, whose
/// contraction is padded to a multiple of 128.
///
/// To re-quantize a forward operand, pass the result of [`dequantize`](super::dequantize).
///
/// # Errors
/// Returns an error if `x` does not have `rows * cols` elements, or the transform does not mix 128.
pub fn ms_eden<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    usage: Usage,
    amax: f32,
    params: &EdenParams,
) -> Result<QuantizedTensor, Nvfp4Error> {
    ms_eden_at(x, rows, cols, usage, amax, params, 0)
}

/// Computes [`ms_eden`] of one of several matrices that share a stream, with its rotation groups
/// numbered from `first_group` on. In groups of rows, numbering continues from one group to the
/// next: `rows · ceil(cols / 128)` rotation groups along [`Usage::Rowwise`],
/// `cols · ceil(rows / 128)` along [`Usage::Columnwise`].
///
/// # Errors
/// Returns the errors of [`ms_eden`].
pub fn ms_eden_at<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    usage: Usage,
    amax: f32,
    params: &EdenParams,
    first_group: u64,
) -> Result<QuantizedTensor, Nvfp4Error> {
    let EdenParams { hadamard, stream } = params;
    check_matrix(x.len(), rows, cols)?;
    check_eden_hadamard(hadamard)?;
    let (outer, inner) = usage.stored_shape(rows, cols);
    let groups = inner.div_ceil(EDEN_GROUP);
    let position = eden_position(&stream.position)?;
    let amax = eden_amax(amax);
    let global = GlobalScale::from_amax(amax);
    let block_factor = global.encode * EDEN_BLOCK_FACTOR;
    let mut codes = vec![0u8; outer * groups * BLOCKS * 8];
    let mut scales = vec![0u8; outer * groups * BLOCKS];
    codes
        .par_chunks_mut(BLOCKS * 8)
        .zip(scales.par_chunks_mut(BLOCKS))
        .enumerate()
        .for_each(|(index, (codes, scales))| {
            let at = (index / groups, index % groups);
            let values = load_group(x, cols, at, inner, usage, hadamard);
            let index = position.index(at.0 as u64, at.1 as u64, groups as u64);
            let random = philox::block_bytes(stream, first_group.wrapping_add(index));
            quantize_group(&values, &global, block_factor, random, codes, scales);
        });
    let shape = match usage {
        Usage::Rowwise => (rows, groups * EDEN_GROUP),
        Usage::Columnwise => (groups * EDEN_GROUP, cols),
    };
    let layout = Layout {
        hadamard: Some(*hadamard),
        ..Layout::nvfp4(shape.0, shape.1, usage)
    };
    let origin = Origin::block_1d(Rounding::Stochastic(*stream));
    QuantizedTensor::from_parts(layout, codes, scales, Amax::Tensor(amax), origin)
}

/// Converts a position in blocks to one in rotation groups.
///
/// # Errors
/// Returns an error if it lies within a rotation group.
pub fn eden_position(position: &BlockPosition) -> Result<BlockPosition, Nvfp4Error> {
    let blocks = BLOCKS as u32;
    let in_groups = |count: u32| count.is_multiple_of(blocks).then_some(count / blocks);
    let gap = |gap: Gap| match gap.len {
        0 => Some(Gap::default()),
        len => Some(Gap {
            at: in_groups(gap.at)?,
            len: in_groups(len)?,
        }),
    };
    let divided = || {
        let BlockPosition {
            first,
            row_blocks,
            gaps,
        } = *position;
        Some(BlockPosition {
            first: (first.is_multiple_of(blocks.into())).then_some(first / u64::from(blocks))?,
            row_blocks: match row_blocks {
                None => None,
                Some(count) => Some(in_groups(count)?),
            },
            gaps: match gaps {
                Gaps::Blocks([one, two]) => Gaps::Blocks([gap(one)?, gap(two)?]),
                gaps => gaps,
            },
        })
    };
    divided().ok_or_else(|| {
        Nvfp4Error::value(
            "position",
            format!("{position:?} in MS-EDEN"),
            "multiples of 8 blocks, which draw together",
        )
    })
}

/// Performs steps 4 to 7 of the module's documentation.
fn quantize_group(
    values: &[f32; EDEN_GROUP],
    global: &GlobalScale,
    block_factor: f32,
    random: [u8; 16],
    codes: &mut [u8],
    scales: &mut [u8],
) {
    let (mut group_xx, mut group_xq) = (0f32, 0f32);
    for (b, block) in values.chunks_exact(BLOCK).enumerate() {
        let bits = block
            .iter()
            .fold(0, |max, value| max.max(value.to_bits() & 0x7FFF_FFFF));
        scales[b] = eden_block_scale(f32::from_bits(bits), block_factor);
        let multiplier = encode_multiplier(scales[b], global);
        let (mut xx, mut xq) = (0f32, 0f32);
        for (i, value) in block.iter().enumerate() {
            let y = value * multiplier;
            let code = round_nearest(y);
            codes[b * 8 + i / 2] |= code << (4 * (i % 2));
            xx = y.mul_add(y, xx);
            xq = y.mul_add(e2m1::decode(code), xq);
        }
        let scale = e4m3::decode(scales[b]);
        let weight = scale * scale;
        group_xx = weight.mul_add(xx, group_xx);
        group_xq = weight.mul_add(xq, group_xq);
    }
    let correction = eden_correction(group_xx, group_xq);
    for (scale, random) in scales.iter_mut().zip(random.chunks_exact(2)) {
        let random = u16::from_le_bytes([random[0], random[1]]);
        *scale = round_scale_stochastic(e4m3::decode(*scale) * correction, random);
    }
}

/// Returns the scale byte of step 4.
#[inline(always)]
fn eden_block_scale(amax: f32, block_factor: f32) -> u8 {
    let scaled = amax * block_factor;
    // A NaN must reach the byte, so this is a comparison and not `f32::min`.
    match e4m3::encode(if scaled > f32::MAX { f32::MAX } else { scaled }) {
        0 => ONE,
        byte => byte,
    }
}

/// E4M3 byte of 1.
const ONE: u8 = 0x38;

/// Returns the correction factor of step 6.
#[inline(always)]
fn eden_correction(xx: f32, xq: f32) -> f32 {
    let ratio = xx / xq;
    if xq > 0.0 && ratio <= f32::MAX {
        ratio
    } else {
        1.0
    }
}

/// Loads and transforms group `at.1` of line `at.0`, with zeros beyond the line.
#[inline]
fn load_group<T: Element>(
    x: &[T],
    cols: usize,
    at: (usize, usize),
    inner: usize,
    usage: Usage,
    hadamard: &Hadamard,
) -> [f32; EDEN_GROUP] {
    let mut values: [f32; EDEN_GROUP] = std::array::from_fn(|i| {
        let position = at.1 * EDEN_GROUP + i;
        match usage {
            _ if position >= inner => 0.0,
            Usage::Rowwise => x[at.0 * cols + position].to_f32(),
            Usage::Columnwise => x[position * cols + at.0].to_f32(),
        }
    });
    transform(&mut values, hadamard);
    values
}

/// Computes `x R` with the transform of 128.
fn transform(values: &mut [f32; EDEN_GROUP], hadamard: &Hadamard) {
    for (i, value) in values.iter_mut().enumerate() {
        *value = f32::from_bits(value.to_bits() ^ ((hadamard.negates(i) as u32) << 31));
    }
    for stage in 0..7 {
        let distance = 1 << stage;
        for i in (0..EDEN_GROUP).filter(|i| i & distance == 0) {
            let (a, b) = (values[i], values[i + distance]);
            values[i] = a + b;
            values[i + distance] = a - b;
        }
    }
    for value in values {
        let scaled = value.mul_add(HadamardSize::H128.factor(), 0.0);
        *value = half::bf16::from_f32(scaled).to_f32();
    }
}

/// Returns an error if the rotation does not have 128 elements.
pub fn check_eden_hadamard(hadamard: &Hadamard) -> Result<(), Nvfp4Error> {
    if hadamard.size() == HadamardSize::H128 {
        return Ok(());
    }
    Err(Nvfp4Error::value(
        "hadamard",
        format!("{} elements", hadamard.size().elements()),
        "128 elements, the group of one correction",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{dequantize, philox::philox4x32};

    fn uniform(i: usize, salt: u32) -> f32 {
        (philox4x32([i as u32, salt, 0, 0], [1, 2])[0] >> 8) as f32 / 16_777_216.0
    }

    fn normals(len: usize, salt: u32) -> Vec<f32> {
        (0..len)
            .map(|i| {
                let (u, v) = (uniform(i, salt).max(1e-9), uniform(i, salt + 1));
                (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
            })
            .collect()
    }

    fn draw(n: usize) -> EdenParams {
        EdenParams {
            hadamard: Hadamard::seeded_with_size(HadamardSize::H128, n as u64),
            stream: RandomStream::new(5, 1, n as u64),
        }
    }

    /// Quantizes `x` with its own amax.
    fn quantize(
        x: &[f32],
        (rows, cols): (usize, usize),
        usage: Usage,
        params: &EdenParams,
    ) -> QuantizedTensor {
        let amax = ms_eden_amax(x, rows, cols, usage, &params.hadamard).unwrap();
        ms_eden(x, rows, cols, usage, amax, params).unwrap()
    }

    /// Returns the decoded tensor, rotated back.
    fn decoded(x: &[f32], n: usize) -> Vec<f32> {
        let params = draw(n);
        let shape = (x.len() / EDEN_GROUP, EDEN_GROUP);
        let mut values = dequantize(&quantize(x, shape, Usage::Rowwise, &params));
        for group in values.chunks_exact_mut(EDEN_GROUP) {
            for stage in 0..7 {
                let distance = 1 << stage;
                for i in (0..EDEN_GROUP).filter(|i| i & distance == 0) {
                    let (a, b) = (group[i], group[i + distance]);
                    (group[i], group[i + distance]) = (a + b, a - b);
                }
            }
            for (i, value) in group.iter_mut().enumerate() {
                let sign = if params.hadamard.negates(i) {
                    -1.0
                } else {
                    1.0
                };
                *value *= sign * HadamardSize::H128.factor();
            }
        }
        values
    }

    fn norm(x: impl Iterator<Item = f64>) -> f64 {
        x.map(|value| value * value).sum::<f64>().sqrt()
    }

    /// The error of the mean of `n` draws is that of one draw divided by √n, so there is no visible
    /// bias. (A Hadamard transform cannot remove one kind of bias: if three elements of a group are
    /// 20 times the others, the rotated group is far from normal, and 0.8 % of bias remain.)
    #[test]
    fn the_mean_of_many_draws_is_the_source() {
        const DRAWS: usize = 4096;
        let x = normals(4 * EDEN_GROUP, 3);
        let mut sum = vec![0f64; x.len()];
        let mut squares = 0.0;
        for n in 0..DRAWS {
            for ((sum, value), &x) in sum.iter_mut().zip(decoded(&x, n)).zip(&x) {
                let error = value as f64 - x as f64;
                *sum += error;
                squares += error * error;
            }
        }
        let error = norm(sum.iter().map(|sum| sum / DRAWS as f64));
        let expected = (squares / DRAWS as f64 / DRAWS as f64).sqrt();
        assert!(
            (0.85..1.15).contains(&(error / expected)),
            "{error} instead of {expected}"
        );
    }

    #[test]
    fn scale_bytes_follow_their_law_exactly() {
        for byte in 0x08..e4m3::MAX_BYTE {
            let (low, high) = (e4m3::decode(byte), e4m3::decode(byte + 1));
            for fraction in [0.0f32, 0.25, 0.3, 0.9999] {
                let value = low + fraction * (high - low);
                let up = (0..=u16::MAX)
                    .filter(|&random| round_scale_stochastic(value, random) == byte + 1)
                    .count();
                let exact = ((value - low) / (high - low) * 65536.0).floor();
                assert_eq!(up, exact as usize, "{value}");
                assert!([byte, byte + 1].contains(&round_scale_stochastic(value, u16::MAX)));
            }
        }
        // Outside the range: rounds to nearest, for any random bits.
        for value in [0.0, 0.001, 0.0145, 448.0, 500.0, f32::INFINITY, f32::NAN] {
            for random in [0, 0x8000, u16::MAX] {
                assert_eq!(round_scale_stochastic(value, random), e4m3::encode(value));
            }
        }
    }

    #[test]
    fn transform_equals_its_definition() {
        let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 9);
        let entry = half::bf16::from_f32(HadamardSize::H128.factor()).to_f32();
        for i in 0..EDEN_GROUP {
            let mut values = [0f32; EDEN_GROUP];
            values[i] = 1.0;
            transform(&mut values, &hadamard);
            for (j, value) in values.into_iter().enumerate() {
                let odd = ((i & j).count_ones() + hadamard.negates(i) as u32) % 2 == 1;
                assert_eq!(value, if odd { -entry } else { entry }, "R[{i}][{j}]");
            }
        }
    }

    #[test]
    fn orientations_are_transposes_and_pad_the_contraction() {
        let (rows, cols) = (150, 37);
        let x = normals(rows * cols, 8);
        let transposed: Vec<f32> = (0..rows * cols)
            .map(|i| x[i % rows * cols + i / rows])
            .collect();
        let params = draw(0);
        let by_col = quantize(&x, (rows, cols), Usage::Columnwise, &params);
        let by_row = quantize(&transposed, (cols, rows), Usage::Rowwise, &params);
        assert_eq!(
            (by_col.rows(), by_col.cols(), by_col.blocks()),
            (256, 37, 16)
        );
        assert_eq!(by_col.codes(), by_row.codes());
        assert_eq!(by_col.scales(), by_row.scales());
        assert_eq!(by_col.amax(), by_row.amax());
    }

    #[test]
    fn special_values() {
        let params = draw(3);
        let quantize = |x: &[f32]| quantize(x, (1, x.len()), Usage::Rowwise, &params);
        let zero = quantize(&[0.0; 128]);
        assert!(zero.scales().iter().all(|&scale| scale == ONE));
        assert!(dequantize(&zero).iter().all(|&value| value == 0.0));
        let mut x = normals(256, 1);
        x[5] = f32::NAN;
        let nan = quantize(&x);
        assert!(
            nan.scales()[..8]
                .iter()
                .all(|&scale| scale == e4m3::NAN_BYTE)
        );
        assert!(
            nan.scales()[8..]
                .iter()
                .all(|&scale| scale != e4m3::NAN_BYTE)
        );
        assert!(dequantize(&nan).iter().all(|value| value.is_nan()));
        x[5] = f32::INFINITY;
        let Amax::Tensor(amax) = *quantize(&x).amax() else {
            panic!("one amax")
        };
        assert!(!amax.is_finite());
        // A larger amax' does not turn the largest finite values into infinities.
        let large = quantize(&[f32::MAX / 256.0; 128]);
        assert!(dequantize(&large).iter().all(|value| value.is_finite()));
        assert_eq!(eden_amax(f32::MAX), f32::MAX);
        assert_eq!(eden_amax(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn other_transforms_are_refused() {
        let error = ms_eden_amax(&[0f32; 16], 1, 16, Usage::Rowwise, &Hadamard::default());
        assert!(error.unwrap_err().to_string().contains("hadamard"));
    }
}
