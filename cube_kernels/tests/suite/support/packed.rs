//! Operands of GEMMs.

use super::inputs::Generator;
use cubecl::prelude::*;
use half::bf16;
use nvfp4_formats::{Amax, Layout, Origin, QuantizedTensor, Usage, reference};
use nvfp4_kernels::{
    gemm::{Elements, Operand, Scale},
    tensor::{DeviceQuantized, FloatKind, Matrix},
};
use std::ops::Range;

/// A packed operand of random codes and scales, on host and device.
pub struct Packed {
    pub rows: usize,
    pub blocks: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub amax: f32,
}

impl Packed {
    /// Returns arbitrary codes, with scales from 2^-3 to 16.
    pub fn random(rows: usize, k: usize, seed: u32) -> Self {
        let blocks = k / 16;
        // The data only has to vary, so one generator per thousand blocks would be enough.
        let mut random = Generator::new(seed);
        let mut state = random.next_u32() | 1;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        Self {
            rows,
            blocks,
            codes: (0..rows * blocks * 8)
                .map(|_| (next() >> 11) as u8)
                .collect(),
            scales: (0..rows * blocks)
                .map(|_| 0x20 + ((next() >> 9) % 0x38) as u8)
                .collect(),
            amax: 700.0 + random.uniform() * 600.0,
        }
    }

    /// Returns codes of 0, 2, 4 and 6 of either sign with scales of one: sums of their products are
    /// exact in any order.
    pub fn integers(rows: usize, k: usize, seed: u32) -> Self {
        let mut packed = Self::random(rows, k, seed);
        packed.codes.iter_mut().for_each(|byte| *byte &= 0xcc);
        packed.scales.fill(0x38);
        packed.amax = 2688.0;
        packed
    }

    pub fn host(&self, rows: &[usize]) -> QuantizedTensor {
        let pick = |bytes: &[u8], width: usize| -> Vec<u8> {
            rows.iter()
                .flat_map(|row| bytes[row * width..][..width].to_vec())
                .collect()
        };
        QuantizedTensor::from_parts(
            Layout::nvfp4(rows.len(), self.blocks * 16, Usage::Rowwise),
            pick(&self.codes, self.blocks * 8),
            pick(&self.scales, self.blocks),
            Amax::Tensor(self.amax),
            Origin::default(),
        )
        .unwrap()
    }

    pub fn device(&self, client: &Client) -> DeviceQuantized {
        let all: Vec<usize> = (0..self.rows).collect();
        DeviceQuantized::from_host(client, &self.host(&all))
    }

    /// Returns the elements without the global scale, exact in bf16.
    pub fn decoded(&self) -> Vec<f32> {
        let all: Vec<usize> = (0..self.rows).collect();
        reference::decode_blocks(&self.host(&all))
    }

    /// Returns some of the rows.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        let width = self.blocks;
        Self {
            rows: rows.len(),
            blocks: width,
            codes: self.codes[rows.start * width * 8..rows.end * width * 8].to_vec(),
            scales: self.scales[rows.start * width..rows.end * width].to_vec(),
            amax: self.amax,
        }
    }

    /// Returns some of the columns, in blocks.
    pub fn columns(&self, blocks: Range<usize>) -> Self {
        let pick = |bytes: &[u8], size: usize| -> Vec<u8> {
            bytes
                .chunks(self.blocks * size)
                .flat_map(|row| row[blocks.start * size..blocks.end * size].to_vec())
                .collect()
        };
        Self {
            rows: self.rows,
            blocks: blocks.len(),
            codes: pick(&self.codes, 8),
            scales: pick(&self.scales, 1),
            amax: self.amax,
        }
    }
}

/// Returns random bf16 values, `rows` rows along a K dimension of `k`: on the host, and on the
/// device K-major and MN-major.
pub fn both_ways(client: &Client, rows: usize, k: usize, seed: u32) -> (Vec<bf16>, Matrix, Matrix) {
    let mut random = Generator::new(seed);
    let x: Vec<bf16> = (0..rows * k)
        .map(|_| bf16::from_f32(random.normal()))
        .collect();
    let transposed: Vec<bf16> = (0..k * rows).map(|i| x[i % rows * k + i / rows]).collect();
    let upload = |x: &[bf16], rows: usize, cols: usize| {
        let handle = client.create_from_slice(bytemuck::cast_slice(x));
        Matrix::new(handle, rows, cols, FloatKind::Bf16).unwrap()
    };
    let (in_rows, in_columns) = (upload(&x, rows, k), upload(&transposed, k, rows));
    (x, in_rows, in_columns)
}

/// Returns an operand without a factor.
pub fn unscaled(elements: Elements) -> Operand {
    Operand {
        elements,
        scale: Scale::One,
    }
}

/// Returns an operand with a factor.
pub fn scaled<'a>(elements: Elements<'a>, scale: Scale<'a>) -> Operand<'a> {
    Operand { elements, scale }
}

/// Returns all indices, or the ends and some between.
fn sample(len: usize, random: &mut Generator) -> Vec<usize> {
    if len <= 48 {
        return (0..len).collect();
    }
    let mut rows: Vec<usize> = vec![0, 1, len / 2, len - 2, len - 1];
    rows.extend((0..27).map(|_| random.next_u32() as usize % len));
    rows
}

/// Shapes of TransformerEngine's GEMMs of packed operands, as `(m, n, k)`.
pub const TE_PRODUCTS: [(usize, usize, usize); 11] = [
    (128, 128, 128),
    (256, 256, 128),
    (256, 256, 256),
    (256, 256, 1024),
    (1024, 1024, 1024),
    (4096, 3072, 512),
    (112, 96, 128),
    (304, 304, 640),
    (1008, 992, 3072),
    (256, 256, 64),
    (128, 112, 128),
];

/// Asserts that `found`, the product of `a` and `b`, is within the bound of f32 accumulation in any
/// order, `2 (k + 2) eps · alpha · Σ |a b|`, at sampled rows and columns.
pub fn assert_bound(found: &[f32], a: &Packed, b: &Packed, what: &str) {
    assert_rows_bound(|row| found[row * b.rows..][..b.rows].to_vec(), a, b, what);
}

/// Checks this bound for a GEMM whose rows `found` returns.
pub fn assert_rows_bound(found: impl Fn(usize) -> Vec<f32>, a: &Packed, b: &Packed, what: &str) {
    let mut random = Generator::new(99);
    let (rows, cols) = (sample(a.rows, &mut random), sample(b.rows, &mut random));
    let (left, right) = (a.host(&rows), b.host(&cols));
    let expected = reference::gemm_f64(&left, &right, None).unwrap();
    let (left, right) = (
        reference::decode_blocks(&left),
        reference::decode_blocks(&right),
    );
    let k = a.blocks * 16;
    let alpha = reference::alpha(a.amax, b.amax) as f64;
    for (i, &row) in rows.iter().enumerate() {
        let found = found(row);
        for (j, &col) in cols.iter().enumerate() {
            let terms = left[i * k..][..k].iter().zip(&right[j * k..][..k]);
            let magnitude: f64 = terms.map(|(a, b)| (a * b).abs() as f64).sum();
            let bound = 2.0 * (k as f64 + 2.0) * f32::EPSILON as f64 * alpha * magnitude;
            let (found, expected) = (found[col], expected[i * cols.len() + j]);
            assert!(
                (found as f64 - expected).abs() <= bound,
                "{what}: ({row}, {col}): {found} instead of {expected}, bound {bound:e}"
            );
        }
    }
}
