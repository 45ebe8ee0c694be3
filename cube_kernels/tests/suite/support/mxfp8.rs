//! MXFP8 operands of GEMMs.

use super::inputs::Generator;
use cubecl::prelude::*;
use nvfp4_formats::{Amax, Format, Layout, Origin, QuantizedTensor, Usage, reference};
use nvfp4_kernels::tensor::DeviceQuantized;

/// An operand of random codes and scales, on host and device.
pub struct Mxfp8 {
    pub rows: usize,
    /// Blocks of 32 per row.
    pub blocks: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
}

impl Mxfp8 {
    /// Returns arbitrary codes except NaN, with scales from 2^-8 to 2^7.
    pub fn random(rows: usize, k: usize, seed: u32) -> Self {
        let blocks = k / 32;
        let mut random = Generator::new(seed);
        let mut bytes = |len: usize| -> Vec<u8> {
            let words = (0..len.div_ceil(4)).map(|_| random.next_u32());
            words.flat_map(u32::to_le_bytes).take(len).collect()
        };
        let number = |byte: u8| if byte & 0x7f == 0x7f { byte ^ 1 } else { byte };
        Self {
            rows,
            blocks,
            codes: bytes(rows * k).into_iter().map(number).collect(),
            scales: bytes(rows * blocks)
                .into_iter()
                .map(|byte| 119 + byte % 16)
                .collect(),
        }
    }

    pub fn host(&self) -> QuantizedTensor {
        let layout = Layout::new(Format::Mxfp8, (self.rows, 32 * self.blocks), Usage::Rowwise);
        let (codes, scales) = (self.codes.clone(), self.scales.clone());
        QuantizedTensor::from_parts(layout, codes, scales, Amax::Absent, Origin::default()).unwrap()
    }

    pub fn device(&self, client: &Client) -> DeviceQuantized {
        DeviceQuantized::from_host(client, &self.host())
    }

    /// Returns the elements, exact in bf16.
    pub fn decoded(&self) -> Vec<f32> {
        reference::mx_dequantize(&self.host())
    }
}
