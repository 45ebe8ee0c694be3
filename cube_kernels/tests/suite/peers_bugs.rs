//! Bugs found in other implementations of NVFP4, each as a test that a kernel with the bug fails,
//! on CubeCL's CPU runtime or on a GPU. (Tiles of swizzled scales that continue across groups:
//! `swizzle_tiling_restarts_at_groups` in `quantize`, and `layouts`.)

use std::collections::HashSet;

use crate::support::device::{read_bytes, read_f32, upload};
use crate::support::inputs::{Kind, values};
use crate::support::quantize::{self, AmaxRequest, TargetSpec};
use cubecl::prelude::*;
use half::bf16;
use nvfp4_formats::{
    Amax, AmaxGranularity, QuantParams, RandomStream, Rounding, StoredForm, Usage,
    format::{e2m1, e4m3},
    reference::{self, GlobalScale, swizzle},
};
use nvfp4_kernels::tensor::Groups;

fn codes(bytes: &[u8]) -> Vec<u8> {
    bytes
        .iter()
        .flat_map(|byte| [byte & 15, byte >> 4])
        .collect()
}

/// Returns the codes of the rowwise and the columnwise tensor of `x`, each rounded by a separate
/// stream.
fn both(client: &Client, x: &[f32], rows: usize, cols: usize, amax: f32) -> [Vec<u8>; 2] {
    let handle = client.create_from_slice(&amax.to_le_bytes());
    let request = |stream| {
        quantize::target(
            &handle,
            AmaxGranularity::PerTensor,
            TargetSpec::new(Rounding::Stochastic(RandomStream::new(11, stream, 0))),
        )
    };
    let x = upload(client, x, rows, cols);
    let (row, col) =
        quantize::quantize_both(client, &x, &Groups::One, &request(0), &request(1)).unwrap();
    let len = rows * cols / 2;
    [row, col].map(|copy| codes(&read_bytes(client, &copy.codes, len)))
}

/// Seeds that depend on too few bits of the row or block index repeat the bits of other rows. Here
/// 8192 blocks of a wide matrix round 15 elements each.
#[test]
fn seeds_of_wide_rows_do_not_collide() {
    let client = client!("seeds_of_wide_rows_do_not_collide");
    let (rows, cols) = (8, 16384);
    // The first element of a block sets its scale; the others lie between two codes.
    let first = |i: usize| i.is_multiple_of(16);
    let x: Vec<f32> = (0..rows * cols)
        .map(|i| if first(i) { 1.0 } else { 0.2 })
        .collect();
    let amax = client.create_from_slice(&1.0f32.to_le_bytes());
    let stream = Rounding::Stochastic(RandomStream::new(1, 0, 0));
    let packed = quantize::quantize_row(&client, &upload(&client, &x, rows, cols), &amax, stream);
    let bytes = read_bytes(&client, &packed.unwrap().codes, rows * cols / 2);
    let blocks: HashSet<&[u8]> = bytes.chunks_exact(8).collect();
    assert!(blocks.len() > 3000, "{} distinct blocks", blocks.len());
    let rows: HashSet<&[u8]> = bytes.chunks_exact(cols / 2).collect();
    assert_eq!(rows.len(), 8);
}

/// Tensors that share their random bits round an element in the same direction. Bits of different
/// streams agree in half of the cases: of 61,440 elements, six standard deviations are 743.
#[test]
fn row_and_column_copies_share_no_bits() {
    let client = client!("row_and_column_copies_share_no_bits");
    let side = 256;
    // 6 on the diagonal of each 16x16 tile sets all scales; 1.25 lies between 1 and 1.5.
    let peak = |i: usize| i / side % 16 == i % 16;
    let x: Vec<f32> = (0..side * side)
        .map(|i| if peak(i) { 6.0 } else { 1.25 })
        .collect();
    let [row, col] = both(&client, &x, side, side, 6.0);
    let coins = (0..side * side).filter(|&i| !peak(i));
    let same = coins.filter(|&i| row[i] == col[i % side * side + i / side]);
    let same = same.count() as i64;
    assert!((same - 30_720).abs() < 743, "{same} of 61440 agree");
}

/// Missing software forms of the stochastic conversion, on devices without the instruction,
/// produced only zeros: the mean of the codes must be that of the values.
#[test]
fn stochastic_codes_are_not_all_zero() {
    let client = client!("stochastic_codes_are_not_all_zero");
    let (rows, cols) = (64, 256);
    let x = values(Kind::Normal, rows * cols, 3);
    let amax = reference::amax(&x);
    for copy in both(&client, &x, rows, cols, amax) {
        let zeros = copy.iter().filter(|&&code| code & 7 == 0).count();
        assert!(zeros < copy.len() / 3, "{zeros} of {} are zero", copy.len());
        let sum: f32 = copy.iter().map(|&code| e2m1::decode(code).abs()).sum();
        assert!(sum / copy.len() as f32 > 1.0);
    }
}

/// Computing `amax / 6 · S` in another order than the specification's changes the byte of one block
/// of bf16 values in a thousand. All blocks here are such.
#[test]
fn scale_bytes_come_from_the_specifications_order() {
    let client = client!("scale_bytes_come_from_the_specifications_order");
    let other = |a: f32, tensor: f32| e4m3::encode((a / 6.0 * (2688.0 / tensor)).min(448.0));
    let of = |a: f32, tensor: f32| reference::block_scale(a, &GlobalScale::from_amax(tensor));
    let bf16s = |from: u16, to: u16| (from..to).map(|bits| bf16::from_bits(bits).to_f32());
    let told_apart = |tensor: f32| -> Vec<f32> {
        let smaller = bf16s(0x3C00, 0x4300).take_while(|&a| a < tensor);
        smaller
            .filter(|&a| of(a, tensor) != other(a, tensor))
            .collect()
    };
    // Block amax values from 1 to 8.
    let found = bf16s(0x3F80, 0x4100).map(|tensor| (tensor, told_apart(tensor)));
    let (tensor, maxima) = found
        .max_by_key(|(_, maxima)| maxima.len())
        .expect("there are bf16 values between 1 and 8");
    assert!(
        maxima.len() >= 4,
        "only {} blocks tell the orders apart",
        maxima.len()
    );
    let x: Vec<f32> = maxima
        .iter()
        .flat_map(|&a| (0..16).map(move |i| if i == 0 { a } else { 0.0 }))
        .collect();
    let amax = client.create_from_slice(&tensor.to_le_bytes());
    let matrix = upload(&client, &x, maxima.len(), 16);
    let packed = quantize::quantize_row(&client, &matrix, &amax, Rounding::Nearest).unwrap();
    let found = read_bytes(&client, &packed.scales, maxima.len());
    for (&a, &byte) in maxima.iter().zip(&found) {
        assert_eq!(byte, of(a, tensor), "{a} of {tensor}");
        assert_ne!(byte, other(a, tensor), "{a} of {tensor}");
    }
}

/// `S / s8`, the fast form of a peer, instead of `1 / (s8 · (1 / S))` differs in the last bit of
/// the multiplier for three blocks in ten, and in codes if a threshold lies between the two
/// products.
#[test]
fn multipliers_are_not_the_fast_ones() {
    let client = client!("multipliers_are_not_the_fast_ones");
    let tensor = 5.3f32;
    let global = GlobalScale::from_amax(tensor);
    let encode = 2688.0 / tensor;
    // A block's largest element sets its scale byte; for the second one, the products with the two
    // multipliers are on different sides of the threshold 0.25, above which the code is not 0.
    let mut blocks = Vec::new();
    for byte in 8..=0x7Eu8 {
        let a = e4m3::decode(byte) * 6.0 / encode;
        let multiplier = reference::encode_multiplier(byte, &global);
        let fast = encode / e4m3::decode(byte);
        if reference::block_scale(a, &global) != byte || multiplier == fast {
            continue;
        }
        let near = 0.25 / multiplier;
        let candidates = (-4..=4i32).map(|i| f32::from_bits(near.to_bits().wrapping_add_signed(i)));
        let code = |x: f32, m: f32| e2m1::decode(reference::round_nearest(x * m));
        blocks.extend(
            candidates
                .filter(|&x| code(x, multiplier) != code(x, fast))
                .map(|x| (a, x, code(x, multiplier))),
        );
    }
    assert!(
        blocks.len() >= 5,
        "only {} blocks tell the forms apart",
        blocks.len()
    );
    let x: Vec<f32> = blocks
        .iter()
        .flat_map(|&(a, x, _)| (0..16).map(move |i| [a, x].get(i).copied().unwrap_or(0.0)))
        .collect();
    let amax = client.create_from_slice(&tensor.to_le_bytes());
    let matrix = upload(&client, &x, blocks.len(), 16);
    let packed = quantize::quantize_row(&client, &matrix, &amax, Rounding::Nearest).unwrap();
    let found = codes(&read_bytes(&client, &packed.codes, blocks.len() * 8));
    for (row, &(a, x, expected)) in found.chunks_exact(16).zip(&blocks) {
        assert_eq!(e2m1::decode(row[1]), expected, "{x} beside {a}");
    }
}

/// An amax by comparisons that are false for NaN loses NaN. It must be preserved at any position,
/// in the amax of whole matrices, rows, columns and transformed columns.
#[test]
fn nan_survives_every_maximum() {
    let client = client!("nan_survives_every_maximum");
    let (rows, cols) = (130, 144);
    for place in [0, 77, cols, 64 * cols + 31, rows * cols - 1] {
        for special in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x: Vec<bf16> = values(Kind::Normal, rows * cols, 5)
                .into_iter()
                .map(bf16::from_f32)
                .collect();
            x[place] = bf16::from_f32(special);
            let matrix = upload(&client, &x, rows, cols);
            let request = AmaxRequest {
                rows: Some(AmaxGranularity::PerTensor),
                cols: Some((AmaxGranularity::PerTensor, Some(Default::default()))),
            };
            let found = quantize::amaxes(&client, &matrix, &Groups::One, &request).unwrap();
            let whole = read_f32(&client, &quantize::amax(&client, &matrix, None).unwrap());
            let plain = read_f32(&client, &found.rows.unwrap());
            let transformed = read_f32(&client, &found.cols.unwrap());
            for found in [whole, plain] {
                if special.is_nan() {
                    assert!(found.is_nan(), "{found} at {place}");
                } else {
                    assert_eq!(found, f32::INFINITY, "at {place}");
                }
            }
            assert!(!transformed.is_finite(), "{transformed} at {place}");
        }
    }
}

/// Padding of swizzled scales that is not written keeps the previous contents of the memory. Here
/// the memory was filled with 0xFF, and the padding must be zero.
#[test]
fn padding_of_scales_is_written() {
    let client = client!("padding_of_scales_is_written");
    for (rows, cols) in [(1, 16), (130, 80), (33, 144)] {
        let x = values(Kind::Normal, rows * cols, 7);
        let matrix = upload(&client, &x, rows, cols);
        let amax = client.create_from_slice(&reference::amax(&x).to_le_bytes());
        let request = quantize::target(
            &amax,
            AmaxGranularity::PerTensor,
            TargetSpec::new(Rounding::Nearest).form(StoredForm::Tiles),
        );
        for usage in [Usage::Rowwise, Usage::Columnwise] {
            let (outer, blocks) = match usage {
                Usage::Rowwise => (rows, cols / 16),
                Usage::Columnwise => (cols, rows.div_ceil(16)),
            };
            let len = swizzle::padded_len(outer, blocks);
            // The pool returns memory that was used here before.
            for size in [len, 512 * 4, 512 * 64] {
                drop(client.create_from_slice(&vec![0xFFu8; size]));
            }
            let packed =
                quantize::quantize(&client, &matrix, &Groups::One, usage, &request).unwrap();
            let found = read_bytes(&client, &packed.scales, len);
            let params = QuantParams::nvfp4(Rounding::Nearest);
            let amax = Amax::Tensor(reference::amax(&x));
            let expected = reference::quantize(&x, rows, cols, usage, &amax, &params, 0).unwrap();
            let expected = expected.in_form(StoredForm::Tiles);
            assert_eq!(found, expected.scales(), "{rows}x{cols} {usage:?}");
            assert!(found.len() > outer * blocks, "nothing is padded here");
        }
    }
}
