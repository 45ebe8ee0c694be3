//! Packed operands for products.
#![allow(dead_code)] // Each binary uses its own part.

use super::common::Generator;
use cubecl::prelude::*;
use nvfp4_kernels::{
    Amax, Origin, PackedAxis, PackedTensor, Rounding, ScaleLayout, device::DevicePacked, reference,
};
use std::ops::Range;

/// A packed operand from random codes and scales, on both sides.
pub struct Packed {
    pub rows: usize,
    pub blocks: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub amax: f32,
}

impl Packed {
    /// Any codes, scales from 2^-3 to 16.
    pub fn random(rows: usize, k: usize, seed: u32) -> Self {
        let blocks = k / 16;
        // One generator for each thousand blocks would be as good; the data only has to vary.
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

    pub fn host(&self, rows: &[usize]) -> PackedTensor {
        let pick = |bytes: &[u8], width: usize| -> Vec<u8> {
            rows.iter()
                .flat_map(|row| bytes[row * width..][..width].to_vec())
                .collect()
        };
        PackedTensor::from_parts(
            (rows.len(), self.blocks * 16),
            PackedAxis::Cols,
            pick(&self.codes, self.blocks * 8),
            (ScaleLayout::Compact, pick(&self.scales, self.blocks)),
            Amax::Tensor(self.amax),
            Origin::one_by_16(Rounding::Nearest, None),
        )
        .unwrap()
    }

    pub fn device(&self, client: &Client) -> DevicePacked {
        let all: Vec<usize> = (0..self.rows).collect();
        DevicePacked::from_host(client, &self.host(&all))
    }

    /// The elements without the factor of the tensor, exact in bf16.
    pub fn decoded(&self) -> Vec<f32> {
        let all: Vec<usize> = (0..self.rows).collect();
        reference::decode_blocks(&self.host(&all))
    }

    /// Some of its rows.
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

    /// Some of its columns, in blocks.
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
