//! Guarantees of stochastic rounding, tested on whole matrices of the oracle (and so of every
//! kernel, which draws the same bytes).

use crate::support::inputs::{Kind, values};
use nvfp4_formats::{Amax, RandomStream, Rounding, format::e2m1, reference};

const ROWS: usize = 64;
const COLS: usize = 128;

fn draw(x: &[f32], stream: RandomStream) -> nvfp4_formats::QuantizedTensor {
    let amax = Amax::Tensor(reference::amax(x));
    reference::quantize_row(x, ROWS, COLS, &amax, &Rounding::Stochastic(stream)).unwrap()
}

fn codes(packed: &nvfp4_formats::QuantizedTensor) -> Vec<u8> {
    packed
        .codes()
        .iter()
        .flat_map(|byte| [byte & 15, byte >> 4])
        .collect()
}

/// The mean of `n` draws differs from the value by no more than the truncation of eight bits (1/256
/// of a step, downward in magnitude) and six standard errors, unless the value clips. The same
/// holds for the mean over all elements, whose standard error is a hundredth of one element's.
#[test]
fn unbiased_within_its_law() {
    let x = values(Kind::Normal, ROWS * COLS, 1);
    let amax = reference::amax(&x);
    let global = reference::GlobalScale::from_amax(amax);
    let n = 256;
    let draws: Vec<Vec<u8>> = (0..n)
        .map(|offset| codes(&draw(&x, RandomStream::new(5, 0, offset))))
        .collect();
    let scales = draw(&x, RandomStream::new(5, 0, 0));
    let mut checked = 0;
    // Deviations of means from their values, in steps: away from zero, or upward.
    let (mut outward, mut upward) = (0f64, 0f64);
    for i in 0..x.len() {
        let multiplier = reference::encode_multiplier(scales.scales()[i / 16], &global);
        let y = x[i] * multiplier;
        if y.abs() > 6.0 {
            continue;
        }
        checked += 1;
        let step = if y.abs() >= 4.0 {
            2.0
        } else if y.abs() >= 2.0 {
            1.0
        } else {
            0.5f32
        };
        let mean: f32 = draws
            .iter()
            .map(|codes| e2m1::decode(codes[i]))
            .sum::<f32>()
            / n as f32;
        let standard_error = 0.5 * step / (n as f32).sqrt();
        assert!(
            (mean - y).abs() <= step / 256.0 + 6.0 * standard_error,
            "element {i}: {y} became {mean}"
        );
        let off = ((mean - y) / step) as f64;
        upward += off;
        outward += off * y.signum() as f64;
        for codes in &draws {
            assert!((e2m1::decode(codes[i]) - y).abs() < step + 1e-6);
        }
    }
    assert!(checked > x.len() * 9 / 10);
    let (outward, upward) = (outward / checked as f64, upward / checked as f64);
    let noise = 6.0 * 0.5 / ((n as usize * checked) as f64).sqrt();
    assert!(
        (-1.0 / 256.0 - noise..noise).contains(&outward),
        "{outward}, noise {noise}"
    );
    assert!(upward.abs() < noise, "{upward}, noise {noise}");
}

#[test]
fn mean_of_fifty_draws_beats_nearest() {
    let x = values(Kind::Normal, ROWS * COLS, 2);
    let amax = Amax::Tensor(reference::amax(&x));
    let nearest = reference::quantize_row(&x, ROWS, COLS, &amax, &Rounding::Nearest).unwrap();
    let mut mean = vec![0f32; x.len()];
    for offset in 0..50 {
        let values = reference::dequantize(&draw(&x, RandomStream::new(1, 2, offset)));
        mean.iter_mut()
            .zip(values)
            .for_each(|(mean, value)| *mean += value / 50.0);
    }
    let error = |y: &[f32]| -> f64 {
        x.iter()
            .zip(y)
            .map(|(x, y)| ((x - y) as f64).powi(2))
            .sum::<f64>()
            .sqrt()
    };
    let (stochastic, nearest) = (error(&mean), error(&reference::dequantize(&nearest)));
    assert!(stochastic < 0.5 * nearest, "{stochastic} against {nearest}");
}

#[test]
fn same_offset_same_bytes_and_different_ones_differ() {
    let x = values(Kind::Normal, ROWS * COLS, 3);
    let stream = RandomStream::new(1, 2, 3);
    assert_eq!(draw(&x, stream), draw(&x, stream));
    for other in [
        RandomStream::new(2, 2, 3),
        RandomStream::new(1, 3, 3),
        RandomStream::new(1, 2, 4),
    ] {
        assert_ne!(
            draw(&x, stream).codes(),
            draw(&x, other).codes(),
            "{other:?}"
        );
    }
}

/// Rows of a wide matrix do not repeat one another's bits: a known bug of a peer, whose seed
/// depended on too few bits of the row index.
#[test]
fn wide_rows_do_not_collide() {
    let (rows, cols) = (8, 16384);
    // The first element of a block sets its scale; the others lie between two codes.
    let x: Vec<f32> = (0..rows * cols)
        .map(|i| if i % 16 == 0 { 1.0 } else { 0.2 })
        .collect();
    let amax = Amax::Tensor(1.0);
    let rounding = Rounding::Stochastic(RandomStream::new(1, 0, 0));
    let packed = reference::quantize_row(&x, rows, cols, &amax, &rounding).unwrap();
    let blocks: std::collections::HashSet<&[u8]> = packed.codes().chunks_exact(8).collect();
    // 15 independent, slightly biased bits per block: collisions are few.
    assert!(blocks.len() > 3000, "{} distinct blocks", blocks.len());
    let mut rows: Vec<&[u8]> = packed.codes().chunks_exact(cols / 2).collect();
    rows.dedup();
    assert_eq!(rows.len(), 8);
}

/// The rowwise and columnwise streams of one matrix are independent: chi-square of the joint
/// distribution of their rounding directions, one degree of freedom.
#[test]
fn row_and_column_streams_are_independent() {
    let side = 256;
    // Rows and columns of both kinds of block have an amax of 6 on the diagonal of each 16x16 tile;
    // the other values lie strictly between two codes.
    let value = |i: usize| {
        if i / side % 16 == i % 16 {
            6.0
        } else {
            1.25f32
        }
    };
    let x: Vec<f32> = (0..side * side).map(value).collect();
    let amax = Amax::Tensor(6.0);
    let pack = |stream, columns: bool| {
        let rounding = Rounding::Stochastic(RandomStream::new(11, stream, 0));
        if columns {
            reference::quantize_col(&x, side, side, &amax, &rounding, None).unwrap()
        } else {
            reference::quantize_row(&x, side, side, &amax, &rounding).unwrap()
        }
    };
    let (row, col) = (codes(&pack(0, false)), codes(&pack(1, true)));
    let (low, high) = (2, 3);
    assert!(
        row.iter().all(|code| [low, high, 7].contains(code)),
        "1, 1.5 and 6 only"
    );
    let mut table = [[0f64; 2]; 2];
    for r in 0..side {
        for c in (0..side).filter(|c| c % 16 != r % 16) {
            let (a, b) = (row[r * side + c] == high, col[c * side + r] == high);
            table[a as usize][b as usize] += 1.0;
        }
    }
    let total = (side * side - side * side / 16) as f64;
    let sums = |i: usize| (table[i][0] + table[i][1], table[0][i] + table[1][i]);
    let mut chi_square = 0.0;
    for (i, row) in table.iter().enumerate() {
        for (j, count) in row.iter().enumerate() {
            let expected = sums(i).0 * sums(j).1 / total;
            chi_square += (count - expected).powi(2) / expected;
        }
    }
    assert!(chi_square < 15.1, "chi-square {chi_square}: p below 1e-4");
    assert!(
        table.iter().flatten().all(|count| *count > 1000.0),
        "all four cells: {table:?}"
    );
}
