//! A second implementation of the numerics, sections 2 to 8: one element at a time, by search
//! instead of bit tricks. It shares only Philox (which has known answers) with the oracle.

use nvfp4_formats::{
    Amax, BlockScaling, ErrorNorm, Hadamard, QuantParams, QuantRounding, RandomStream, Rounding,
    Usage, reference::philox,
};

const GRID: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// A quantized tensor before packing: codes `[outer, blocks * 16]`, scales `[outer, blocks]`.
#[derive(Debug, PartialEq)]
pub struct Copy {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
}

/// Section 2.
pub fn nearest(y: f32) -> u8 {
    if y.is_nan() {
        return 7;
    }
    let magnitude = (y.abs() as f64).min(100.0);
    let distance = |code: u8| (GRID[code as usize] as f64 - magnitude).abs();
    let best = (0..8u8)
        .min_by(|&a, &b| {
            let even = (a % 2).cmp(&(b % 2));
            distance(a).partial_cmp(&distance(b)).unwrap().then(even)
        })
        .unwrap();
    best | if y.is_sign_negative() { 8 } else { 0 }
}

/// Section 2.
pub fn stochastic(y: f32, random: u8) -> u8 {
    if y.is_nan() {
        return 7;
    }
    let step = |z: f32| match z {
        z if z >= 4.0 => 2.0f32,
        z if z >= 2.0 => 1.0,
        _ => 0.5,
    };
    let (u, a) = (random as f32 / 256.0, y.abs());
    let t = u.mul_add(step(a), a);
    let q = ((t / step(t)).floor() * step(t)).min(6.0);
    let code = GRID.iter().position(|&point| point == q).unwrap() as u8;
    code | if y.is_sign_negative() { 8 } else { 0 }
}

/// Returns the value of a scale byte.
pub fn e4m3_value(byte: u8) -> f32 {
    let (exponent, mantissa) = ((byte >> 3) as i32, (byte & 7) as f32);
    match (exponent, byte) {
        (_, 0x7F) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    }
}

fn e4m3(value: f32) -> u8 {
    if value.is_nan() {
        return 0x7F;
    }
    let value = (value as f64).min(448.0);
    let distance = |byte: u8| (e4m3_value(byte) as f64 - value).abs();
    (0..0x7Fu8)
        .min_by(|&a, &b| {
            let even = (a % 2).cmp(&(b % 2));
            distance(a).partial_cmp(&distance(b)).unwrap().then(even)
        })
        .unwrap()
}

/// Computes `min`, but preserves NaN.
fn at_most(value: f32, bound: f32) -> f32 {
    if value > bound { bound } else { value }
}

/// Section 4: `S`.
fn global_scale(amax: f32, range: f32) -> f32 {
    let scale = (range / amax).min(f32::MAX);
    if amax == 0.0 || scale == 0.0 || amax.is_nan() {
        1.0
    } else {
        scale
    }
}

/// Returns the factor of a block's elements.
pub fn multiplier(amax: f32, scaling: BlockScaling, byte: u8) -> f32 {
    let decode = 1.0 / global_scale(amax, scaling.range());
    at_most(1.0 / (e4m3_value(byte) * decode), f32::MAX)
}

/// Returns the candidate scale bytes of a group of blocks, the preferred one first: one, or two
/// with four over six.
fn candidates(rows: &[Vec<f32>], amax: f32, scaling: BlockScaling) -> Vec<u8> {
    let largest = rows.iter().flatten().fold(0f32, |max, value| {
        if value.is_nan() || max.is_nan() {
            f32::NAN
        } else {
            max.max(value.abs())
        }
    });
    let global = global_scale(amax, scaling.range());
    match scaling {
        BlockScaling::FourOverSix(_) => {
            let base = largest / 6.0 * global;
            vec![e4m3(at_most(base, 448.0)), e4m3(at_most(base * 1.5, 448.0))]
        }
        BlockScaling::Standard | BlockScaling::Headroom | BlockScaling::Static => {
            let largest = match scaling {
                BlockScaling::Headroom => largest * 1.0625,
                _ => largest,
            };
            let m = global * (1.0f32 / 6.0);
            vec![e4m3(at_most(largest * m, f32::MAX))]
        }
    }
}

/// Section 7: returns the error of rounding `rows` to nearest with a scale byte.
pub fn error(rows: &[Vec<f32>], amax: f32, norm: ErrorNorm, byte: u8) -> f32 {
    let e = multiplier(amax, BlockScaling::FourOverSix(norm), byte);
    let mut sums = [0f32; 16];
    for (sum, row) in sums.iter_mut().zip(rows) {
        for &x in row {
            let code = nearest(x * e);
            let q = GRID[(code & 7) as usize] * if code >= 8 { -1.0 } else { 1.0 };
            let v = q * e4m3_value(byte) * amax / 1536.0;
            let d = v - x;
            *sum += match norm {
                ErrorNorm::Mae => d.abs(),
                ErrorNorm::Mse => d * d,
            };
        }
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0]
}

/// Returns the scale byte of a block, or of a tile of 16 rows.
pub fn scale_byte(rows: &[Vec<f32>], amax: f32, scaling: BlockScaling) -> u8 {
    let candidates = candidates(rows, amax, scaling);
    match (scaling, &candidates[..]) {
        (BlockScaling::FourOverSix(norm), &[six, four]) => {
            if error(rows, amax, norm, four) < error(rows, amax, norm, six) {
                four
            } else {
                six
            }
        }
        _ => candidates[0],
    }
}

/// Section 6, with results in bf16.
fn transform(group: &mut [f32], hadamard: &Hadamard) {
    for (i, value) in group.iter_mut().enumerate() {
        if hadamard.negates(i) {
            *value = -*value;
        }
    }
    let mut distance = 1;
    while distance < group.len() {
        for i in 0..group.len() {
            if i & distance == 0 {
                let (a, b) = (group[i], group[i | distance]);
                group[i] = a + b;
                group[i | distance] = a - b;
            }
        }
        distance *= 2;
    }
    let factor = (1.0 / (group.len() as f64).sqrt()) as f32;
    for value in group {
        *value = half::bf16::from_f32(*value * factor).to_f32();
    }
}

/// Returns the stored rows of a tensor before quantization: oriented, padded and transformed.
pub fn stored_rows(
    x: &[f32],
    (rows, cols): (usize, usize),
    usage: Usage,
    hadamard: Option<&Hadamard>,
) -> Vec<Vec<f32>> {
    let (outer, inner) = usage.stored_shape(rows, cols);
    let group = hadamard.map_or(16, |hadamard| hadamard.size().elements());
    (0..outer)
        .map(|o| {
            let mut row: Vec<f32> = (0..inner)
                .map(|i| match usage {
                    Usage::Rowwise => x[o * cols + i],
                    Usage::Columnwise => x[i * cols + o],
                })
                .collect();
            row.resize(inner.div_ceil(group) * group, 0.0);
            if let Some(hadamard) = hadamard {
                for group in row.chunks_mut(group) {
                    transform(group, hadamard);
                }
            }
            row
        })
        .collect()
}

/// Section 3: returns the byte of element `i` of block `index`.
fn random_byte(stream: &RandomStream, index: u64, i: usize) -> u8 {
    let (offset, mask) = (stream.offset, u32::MAX as u64);
    let counter = [index & mask, index >> 32, offset & mask, offset >> 32];
    let words = philox::philox4x32(counter.map(|word| word as u32), stream.key());
    (words[i / 4] >> (8 * (i % 4))) as u8
}

/// Quantizes to 1x16 blocks.
pub fn quantize(stored: &[Vec<f32>], amax: &Amax, policy: &QuantParams, first_block: u64) -> Copy {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    let mut index = first_block;
    for (o, row) in stored.iter().enumerate() {
        for block in row.chunks_exact(16) {
            let byte = scale_byte(&[block.to_vec()], amax.of(o), policy.scaling);
            let e = multiplier(amax.of(o), policy.scaling, byte);
            scales.push(byte);
            codes.extend(
                block
                    .iter()
                    .enumerate()
                    .map(|(i, x)| match &policy.rounding {
                        QuantRounding::Elements(Rounding::Nearest) => nearest(x * e),
                        QuantRounding::Elements(Rounding::Stochastic(stream)) => {
                            stochastic(x * e, random_byte(stream, index, i))
                        }
                        QuantRounding::MsEden(_) => unreachable!("another reference quantizes so"),
                    }),
            );
            index = index.wrapping_add(1);
        }
    }
    Copy { codes, scales }
}

/// Quantizes to a rowwise tensor in 16x16 tiles.
pub fn quantize_tiles(stored: &[Vec<f32>], amax: f32, scaling: BlockScaling) -> Copy {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for (r, row) in stored.iter().enumerate() {
        for (b, block) in row.chunks_exact(16).enumerate() {
            let tile: Vec<Vec<f32>> = (0..16)
                .map(|i| match stored.get(r / 16 * 16 + i) {
                    Some(row) => row[b * 16..][..16].to_vec(),
                    None => vec![0.0; 16],
                })
                .collect();
            let byte = scale_byte(&tile, amax, scaling);
            let e = multiplier(amax, scaling, byte);
            scales.push(byte);
            codes.extend(block.iter().map(|x| nearest(x * e)));
        }
    }
    Copy { codes, scales }
}
