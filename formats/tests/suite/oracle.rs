//! Compares the oracle with the literal specification, in every combination of axis, amax,
//! rounding, transform, scaling and layout, and checks the properties that it guarantees.

use crate::support::inputs::{ALL_KINDS, Kind, TestElement, convert, values};
use crate::support::literal;
use half::{bf16, f16};
use nvfp4_formats::{
    Amax, BlockScaling, BlockShape, ErrorNorm, Hadamard, HadamardSize, Nvfp4Error, QuantParams,
    QuantizedTensor, RandomStream, Rounding, StoredForm, Usage, format::e2m1, reference,
};

const SCALINGS: [BlockScaling; 4] = [
    BlockScaling::Standard,
    BlockScaling::Headroom,
    BlockScaling::FourOverSix(ErrorNorm::Mae),
    BlockScaling::FourOverSix(ErrorNorm::Mse),
];
const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];
const SHAPES: [(usize, usize); 10] = [
    (0, 16),
    (0, 48),
    (1, 16),
    (1, 48),
    (3, 16),
    (3, 48),
    (17, 16),
    (17, 48),
    (33, 16),
    (33, 48),
];

fn stochastic(offset: u64) -> Rounding {
    Rounding::Stochastic(RandomStream::new(0x0123_4567_89ab_cdef, 5, offset))
}

fn transforms() -> impl Iterator<Item = Option<Hadamard>> {
    let of = |size| Some(Hadamard::seeded_with_size(size, 11));
    [None, Some(Hadamard::default())]
        .into_iter()
        .chain(HadamardSize::ALL.map(of))
}

/// Returns every policy that the oracle supports, with compact scales.
fn policies() -> Vec<QuantParams> {
    let mut policies = Vec::new();
    for hadamard in transforms() {
        for scaling in SCALINGS {
            for rounding in [Rounding::Nearest, stochastic(u64::MAX - 3)] {
                let refused = matches!(scaling, BlockScaling::FourOverSix(_))
                    && rounding != Rounding::Nearest;
                if !refused {
                    policies.push(QuantParams {
                        hadamard,
                        scaling,
                        ..QuantParams::nvfp4(rounding)
                    });
                }
            }
        }
    }
    policies
}

/// Returns the amax values of stored rows, by the literal definition.
fn maxima(stored: &[Vec<f32>], per_row: bool) -> Amax {
    let all = |rows: &[Vec<f32>]| reference::amax(&rows.concat());
    if per_row {
        Amax::PerRow(
            stored
                .iter()
                .map(|row| all(std::slice::from_ref(row)))
                .collect(),
        )
    } else {
        Amax::Tensor(all(stored))
    }
}

fn codes(packed: &QuantizedTensor) -> Vec<u8> {
    let halves = packed.codes().iter().map(|byte| [byte & 15, byte >> 4]);
    halves.flatten().collect()
}

fn assert_is(found: &QuantizedTensor, expected: &literal::Copy, what: &str) {
    let found = found.clone().in_form(StoredForm::Rows);
    assert_eq!(found.scales(), expected.scales, "{what}: scales");
    assert_eq!(codes(&found), expected.codes, "{what}: codes");
}

fn transpose<T: Copy>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    let mut out = Vec::with_capacity(x.len());
    for col in 0..cols {
        out.extend((0..rows).map(|row| x[row * cols + col]));
    }
    out
}

fn every_combination<T: TestElement>(kinds: &[Kind]) {
    for (seed, &(rows, cols)) in SHAPES.iter().enumerate() {
        for &kind in kinds {
            let x: Vec<T> = convert(&values(kind, rows * cols, seed as u32));
            let exact: Vec<f32> = x.iter().map(|value| value.to_f32()).collect();
            for usage in USAGES {
                for policy in policies() {
                    let hadamard = policy.hadamard.as_ref();
                    let stored = literal::stored_rows(&exact, (rows, cols), usage, hadamard);
                    for per_row in [false, true] {
                        let what = format!(
                            "{} {kind:?} {rows}x{cols} {usage:?} per_row={per_row} {policy:?}",
                            std::any::type_name::<T>()
                        );
                        let amax = maxima(&stored, per_row);
                        let first = (1 << 32) - 2;
                        let expected = literal::quantize(&stored, &amax, &policy, first);
                        let found =
                            reference::quantize(&x, rows, cols, usage, &amax, &policy, first)
                                .unwrap();
                        assert_is(&found, &expected, &what);
                        assert_eq!(found.layout().scaling, policy.scaling);
                        assert_eq!(found.layout().hadamard, policy.hadamard);
                        assert_eq!(found.range(), policy.scaling.range());
                        assert_eq!(found.origin().block, BlockShape::Block1d);
                        let group = hadamard.map_or(16, |h| h.size().elements());
                        let inner = usage.stored_shape(rows, cols).1;
                        assert_eq!(found.blocks() * 16, inner.next_multiple_of(group));

                        let swizzled = found.in_form(StoredForm::Tiles);
                        assert_eq!(swizzled.layout().form, StoredForm::Tiles);
                        assert!(swizzled.scales().len().is_multiple_of(512), "{what}");
                        assert_is(&swizzled, &expected, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn every_combination_f32() {
    every_combination::<f32>(&ALL_KINDS);
}

#[test]
fn every_combination_bf16() {
    every_combination::<bf16>(&[Kind::Heavy, Kind::Infinity]);
}

#[test]
fn every_combination_f16() {
    every_combination::<f16>(&[Kind::Normal, Kind::Tiny]);
}

/// Enough blocks, rows and columns for several tasks, none of which is full.
#[test]
fn matrices_of_several_tasks() {
    for (rows, cols) in [(150, 400), (1100, 32), (20, 1040)] {
        let x = values(Kind::Heavy, rows * cols, 21);
        for usage in USAGES {
            for hadamard in [None, Some(Hadamard::seeded_with_size(HadamardSize::H64, 2))] {
                let policy = QuantParams {
                    hadamard,
                    ..QuantParams::nvfp4(stochastic(4))
                };
                let stored = literal::stored_rows(&x, (rows, cols), usage, hadamard.as_ref());
                for per_row in [false, true] {
                    let amax = maxima(&stored, per_row);
                    let expected = literal::quantize(&stored, &amax, &policy, 3);
                    let found =
                        reference::quantize(&x, rows, cols, usage, &amax, &policy, 3).unwrap();
                    assert_is(
                        &found,
                        &expected,
                        &format!("{rows}x{cols} {usage:?} {per_row}"),
                    );
                }
            }
        }
    }
}

#[test]
fn transformed_maxima_are_those_of_what_is_stored() {
    for (rows, cols) in SHAPES {
        let x = values(Kind::Heavy, rows * cols, 3);
        for hadamard in transforms().flatten() {
            let usage = Usage::Columnwise;
            let stored = literal::stored_rows(&x, (rows, cols), usage, Some(&hadamard));
            assert_eq!(
                Amax::Tensor(reference::amax_rht(&x, rows, cols, &hadamard)),
                maxima(&stored, false)
            );
            assert_eq!(
                Amax::PerRow(reference::amax_rht_cols(&x, rows, cols, &hadamard)),
                maxima(&stored, true)
            );
        }
    }
}

/// Includes the random bits, which depend on the stored block alone.
#[test]
fn the_column_copy_is_the_row_copy_of_the_transpose() {
    for (rows, cols) in [(17, 48), (33, 16), (130, 7)] {
        let x = values(Kind::Normal, rows * cols, 2);
        for policy in policies() {
            let group = policy.hadamard.map_or(16, |h| h.size().elements());
            let padded = rows.next_multiple_of(group);
            let mut tall = x.clone();
            tall.resize(padded * cols, 0.0);
            let wide = transpose(&tall, padded, cols);
            let stored = literal::stored_rows(
                &x,
                (rows, cols),
                Usage::Columnwise,
                policy.hadamard.as_ref(),
            );
            for per_row in [false, true] {
                let amax = maxima(&stored, per_row);
                let copy = |x: &[f32], rows, cols, usage| {
                    reference::quantize(x, rows, cols, usage, &amax, &policy, 77).unwrap()
                };
                let col = copy(&x, rows, cols, Usage::Columnwise);
                let row = copy(&wide, cols, padded, Usage::Rowwise);
                assert_eq!(col.codes(), row.codes(), "{rows}x{cols} {policy:?}");
                assert_eq!(col.scales(), row.scales(), "{rows}x{cols} {policy:?}");
            }
        }
    }
}

#[test]
fn groups_of_a_buffer_draw_the_bits_of_the_whole() {
    let (rows, cols, split) = (40, 48, 23);
    let x = values(Kind::Normal, rows * cols, 4);
    let amax = Amax::Tensor(reference::amax(&x));
    let policy = QuantParams::nvfp4(stochastic(9));
    let copy = |x: &[f32], first| {
        let rows = x.len() / cols;
        reference::quantize(x, rows, cols, Usage::Rowwise, &amax, &policy, first).unwrap()
    };
    let whole = copy(&x, 0);
    let (head, tail) = x.split_at(split * cols);
    let first = (split * cols / 16) as u64;
    let parts = [copy(head, 0), copy(tail, first)].map(|part| part.codes().to_vec());
    assert_eq!(whole.codes(), parts.concat());
    assert_ne!(
        copy(tail, 0).codes(),
        parts[1],
        "the index must reach the bits"
    );
}

#[test]
fn tiles_are_literal_and_their_copies_transposes() {
    for (rows, cols) in SHAPES.into_iter().chain([(150, 400)]) {
        for kind in ALL_KINDS {
            let x = values(kind, rows * cols, 6);
            let stored = literal::stored_rows(&x, (rows, cols), Usage::Rowwise, None);
            let amax = reference::amax(&x);
            for scaling in SCALINGS {
                let what = format!("{kind:?} {rows}x{cols} {scaling:?}");
                let amax_of_tensor = Amax::Tensor(amax);
                let (row, col) =
                    reference::quantize_tile(&x, rows, cols, &amax_of_tensor, scaling).unwrap();
                for copy in [&row, &col] {
                    assert_eq!(copy.origin().block, BlockShape::Block2d);
                    assert_eq!(copy.layout().scaling, scaling);
                }
                assert_is(
                    &row,
                    &literal::quantize_tiles(&stored, amax, scaling),
                    &what,
                );
                let (row_codes, col_codes) = (codes(&row), codes(&col));
                let (row_width, col_width) = (row.blocks(), col.blocks());
                for r in 0..rows {
                    for c in 0..cols {
                        assert_eq!(
                            row_codes[r * row_width * 16 + c],
                            col_codes[c * col_width * 16 + r],
                            "{what}: code of ({r}, {c})"
                        );
                        assert_eq!(
                            row.scales()[r * row_width + c / 16],
                            col.scales()[c * col_width + r / 16],
                            "{what}: scale of ({r}, {c})"
                        );
                    }
                }
            }
        }
    }
}

/// Returns the largest scaled magnitude of each block whose scale byte is a normal number.
fn largest_scaled(x: &[f32], scaling: BlockScaling) -> f32 {
    let amax = reference::amax(x);
    let policy = QuantParams {
        scaling,
        ..QuantParams::nvfp4(Rounding::Nearest)
    };
    let (rows, usage) = (x.len() / 16, Usage::Rowwise);
    let packed = reference::quantize(x, rows, 16, usage, &Amax::Tensor(amax), &policy, 0).unwrap();
    let global = reference::GlobalScale::from_amax(amax);
    let mut largest = 0f32;
    for (block, &byte) in x.chunks(16).zip(packed.scales()) {
        if byte >= 8 {
            let multiplier = reference::encode_multiplier(byte, &global);
            largest = largest.max(reference::amax(block) * multiplier);
        }
    }
    largest
}

/// Rounding lowers a normal scale byte by at most a seventeenth, which the headroom compensates;
/// the remaining error is that of five roundings.
#[test]
fn headroom_never_clips() {
    let ulps = 6.0 * 5.0 * f32::EPSILON;
    for seed in 0..20 {
        // Block amax values on a fine grid over the whole range of scales, and one block with the
        // largest.
        let x: Vec<f32> = (0..4096)
            .flat_map(|i| {
                let largest = ((seed * 4096 + i) as f32 * 1.1e-4 - 8.9).exp();
                (0..16).map(move |j| largest / (1 + j) as f32)
            })
            .chain([3.0; 16])
            .collect();
        let with = largest_scaled(&x, BlockScaling::Headroom);
        assert!(with <= 6.0 + ulps, "headroom clips {with}");
        let without = largest_scaled(&x, BlockScaling::Standard);
        assert!(without > 6.1, "the data must be able to clip: {without}");
    }
}

/// Subnormal scale bytes round by more than a seventeenth; headroom does not cover them.
#[test]
fn headroom_ends_at_subnormal_scales() {
    // 2.35 · 17/16 units of 2^-9 round to 2 units.
    let x = [2.35 * 6.0 / 512.0; 16];
    let amax = Amax::Tensor(2688.0);
    let policy = QuantParams {
        scaling: BlockScaling::Headroom,
        ..QuantParams::nvfp4(Rounding::Nearest)
    };
    let packed = reference::quantize(&x, 1, 16, Usage::Rowwise, &amax, &policy, 0).unwrap();
    assert_eq!(packed.scales(), [2]);
    assert!(x[0] * 512.0 / 2.0 > 6.5);
}

/// A block whose scale byte rounds down by a seventeenth: its amax scales to 6.375 without
/// headroom, and clips.
#[test]
fn headroom_makes_stochastic_rounding_unbiased() {
    // 1.0625 is the midpoint between two scale bytes, and the even one is below it.
    let block: Vec<f32> = (0..16)
        .map(|i| 6.375 * [1.0, 0.9, -0.41, 0.3][i % 4])
        .collect();
    let (draws, usage) = (8192usize, Usage::Rowwise);
    // 2688 makes S = 1.
    let amax = Amax::Tensor(2688.0);
    let x = block.repeat(draws);
    let bias = |scaling: BlockScaling| -> Vec<f32> {
        let policy = QuantParams {
            scaling,
            ..QuantParams::nvfp4(stochastic(1))
        };
        let packed = reference::quantize(&x, draws, 16, usage, &amax, &policy, 0).unwrap();
        let decoded = reference::dequantize(&packed);
        (0..16)
            .map(|i| {
                let sum: f64 = decoded.iter().skip(i).step_by(16).map(|&v| v as f64).sum();
                (sum / draws as f64) as f32 - block[i]
            })
            .collect()
    };
    let global = reference::GlobalScale::from_amax(2688.0);
    let byte = |scaled: f32| reference::block_scale(scaled, &global);
    for (i, bias) in bias(BlockScaling::Headroom).into_iter().enumerate() {
        let scale = reference::encode_multiplier(byte(6.375 * 1.0625), &global).recip();
        let y = (block[i] / scale).abs();
        let step = literal_step(y);
        // The law itself: the mean over all 256 bytes is the value to 1/256 of a step.
        let sum: f32 = (0..=255)
            .map(|r| e2m1::decode(reference::round_stochastic(y, r)))
            .sum();
        assert!((sum / 256.0 - y).abs() <= step / 256.0, "element {i}");
        // The draws follow it, within five standard errors.
        let noise = 5.0 * 0.5 * step / (draws as f32).sqrt();
        let bound = scale * (step / 256.0 + noise);
        assert!(bias.abs() <= bound, "element {i}: bias {bias}, not {bound}");
    }
    let plain = bias(BlockScaling::Standard);
    for i in [0, 4, 8, 12] {
        assert_eq!(plain[i], -0.375, "without headroom the maximum clips");
    }
}

fn literal_step(magnitude: f32) -> f32 {
    match magnitude {
        m if m >= 4.0 => 2.0,
        m if m >= 2.0 => 1.0,
        _ => 0.5,
    }
}

#[test]
fn four_over_six_is_never_worse_than_six() {
    let (rows, cols) = (64, 64);
    // Huge values are excluded: above 2^128 / 1536 the decoded value overflows in the specified
    // order of operations, and six is chosen.
    for kind in [Kind::Normal, Kind::Heavy, Kind::Thresholds] {
        let x = values(kind, rows * cols, 8);
        for norm in [ErrorNorm::Mae, ErrorNorm::Mse] {
            let scaling = BlockScaling::FourOverSix(norm);
            let policy = QuantParams {
                scaling,
                ..QuantParams::nvfp4(Rounding::Nearest)
            };
            let amax = reference::amax(&x);
            let usage = Usage::Rowwise;
            let packed =
                reference::quantize(&x, rows, cols, usage, &Amax::Tensor(amax), &policy, 0)
                    .unwrap();
            let (mut fours, mut better) = (0, 0);
            for (block, &byte) in x.chunks(16).zip(packed.scales()) {
                let block = [block.to_vec()];
                // Six with a bound of 256, as if there were no choice.
                let global = reference::GlobalScale::with_range(amax, 1536.0);
                let six = nvfp4_formats::format::e4m3::encode(
                    reference::amax(&block[0]) / 6.0 * global.encode,
                );
                let chosen = literal::error(&block, amax, norm, byte);
                let plain = literal::error(&block, amax, norm, six);
                assert!(chosen <= plain, "{kind:?} {norm:?}: {chosen} > {plain}");
                fours += (byte != six) as usize;
                better += (chosen < plain) as usize;
            }
            assert_eq!(fours, better, "four only where it is strictly better");
            assert!(
                fours > 10 && fours < rows * cols / 16 - 10,
                "{kind:?}: {fours}"
            );
        }
    }
}

/// 2688 or 1536, depending on the scaling; the wrong one is off by 7/4.
#[test]
fn dequantization_divides_by_the_range_of_the_scaling() {
    let (rows, cols) = (33, 48);
    let x = values(Kind::Normal, rows * cols, 12);
    for scaling in SCALINGS {
        for per_row in [false, true] {
            for usage in USAGES {
                let stored = literal::stored_rows(&x, (rows, cols), usage, None);
                let amax = maxima(&stored, per_row);
                let policy = QuantParams {
                    scaling,
                    ..QuantParams::nvfp4(Rounding::Nearest)
                };
                let packed = reference::quantize(&x, rows, cols, usage, &amax, &policy, 0).unwrap();
                let decoded = reference::dequantize(&packed);
                let error: f32 = x.iter().zip(&decoded).map(|(a, b)| (a - b).powi(2)).sum();
                let power: f32 = x.iter().map(|a| a * a).sum();
                let relative = (error / power).sqrt();
                assert!(relative < 0.11, "{usage:?} {policy:?}: {relative}");
            }
        }
    }
}

/// Both operands transformed, with a K that is not a multiple of anything, and each scaling: the
/// GEMM equals that of the sources, up to quantization.
#[test]
fn products_survive_transforms_and_scalings() {
    let (tokens, m, n) = (150, 24, 20);
    let (a, b) = (
        values(Kind::Normal, tokens * m, 13),
        values(Kind::Normal, tokens * n, 14),
    );
    let mut exact = vec![0f64; m * n];
    for t in 0..tokens {
        for i in 0..m {
            for j in 0..n {
                exact[i * n + j] += a[t * m + i] as f64 * b[t * n + j] as f64;
            }
        }
    }
    let norm = |x: &[f64]| x.iter().map(|v| v * v).sum::<f64>().sqrt();
    for hadamard in transforms() {
        for scaling in SCALINGS {
            for per_row in [false, true] {
                let policy = QuantParams {
                    hadamard,
                    scaling,
                    ..QuantParams::nvfp4(Rounding::Nearest)
                };
                let pack = |x: &[f32], cols| {
                    let usage = Usage::Columnwise;
                    let stored =
                        literal::stored_rows(x, (tokens, cols), usage, policy.hadamard.as_ref());
                    let amax = maxima(&stored, per_row);
                    reference::quantize(x, tokens, cols, usage, &amax, &policy, 0).unwrap()
                };
                let (a, b) = (pack(&a, m), pack(&b, n));
                let found = reference::gemm_f64(&a, &b, None).unwrap();
                let difference: Vec<f64> = found.iter().zip(&exact).map(|(x, y)| x - y).collect();
                let relative = norm(&difference) / norm(&exact);
                assert!(relative < 0.16, "{policy:?}: {relative}");
                let single = reference::gemm_f32(&a, &b, None).unwrap();
                for (single, double) in single.iter().zip(&found) {
                    assert!((*single as f64 - double).abs() < 1e-4, "{single} {double}");
                }
            }
        }
    }
    let pack = |hadamard| {
        let amax = Amax::Tensor(reference::amax(&a));
        let nearest = Rounding::Nearest;
        reference::quantize_col(&a, tokens, m, &amax, &nearest, hadamard).unwrap()
    };
    let large = Hadamard::seeded_with_size(HadamardSize::H128, 1);
    let error = reference::gemm_f32(&pack(None), &pack(Some(&large)), None).unwrap_err();
    assert!(matches!(error, Nvfp4Error::Value { argument: "b", .. }));
    let (packed, bias) = (pack(None), vec![0.5; m]);
    let product = |bias: Option<&[f32]>| reference::gemm_f32(&packed, &packed, bias);
    let error = product(Some(&bias[1..])).unwrap_err();
    assert!(matches!(
        error,
        Nvfp4Error::Shape {
            argument: "bias",
            ..
        }
    ));
    let [plain, biased] = [None, Some(&bias[..])].map(|bias| product(bias).unwrap());
    let pairs = plain.iter().zip(biased);
    assert!(
        pairs
            .into_iter()
            .all(|(plain, biased)| plain + 0.5 == biased)
    );
}

#[test]
fn arguments_that_cannot_be_are_refused() {
    let x = vec![1f32; 32 * 48];
    let tensor = Amax::Tensor(1.0);
    let nearest = QuantParams::nvfp4(Rounding::Nearest);
    let refused = |rows, cols, usage, amax: &Amax, policy: &QuantParams| match reference::quantize(
        &x, rows, cols, usage, amax, policy, 0,
    )
    .unwrap_err()
    {
        Nvfp4Error::Shape { argument, .. } | Nvfp4Error::Value { argument, .. } => argument,
        other => panic!("{other}"),
    };
    let [by_cols, by_rows] = USAGES;
    assert_eq!(refused(32, 47, by_cols, &tensor, &nearest), "x");
    assert_eq!(refused(usize::MAX, 2, by_cols, &tensor, &nearest), "x");
    assert_eq!(refused(64, 24, by_cols, &tensor, &nearest), "cols");
    for (usage, len) in [(by_cols, 48), (by_rows, 32)] {
        let amax = Amax::PerRow(vec![1.0; len]);
        assert_eq!(refused(32, 48, usage, &amax, &nearest), "amax");
    }
    let policy = QuantParams {
        scaling: BlockScaling::FourOverSix(ErrorNorm::Mae),
        ..QuantParams::nvfp4(stochastic(0))
    };
    let tiles = QuantParams::nvfp4_2d(BlockScaling::Standard);
    for params in [policy, tiles, QuantParams::mxfp8()] {
        assert_eq!(refused(32, 48, by_rows, &tensor, &params), "params");
    }
    let rows = Amax::PerRow(vec![1.0; 32]);
    for scaling in SCALINGS {
        assert!(reference::quantize_tile(&x, 32, 48, &rows, scaling).is_err());
        assert!(reference::quantize_tile(&x, 64, 24, &tensor, scaling).is_err());
    }
}
