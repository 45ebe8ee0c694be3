//! Inputs shared by the test binaries of this crate and of nvfp4-kernels.

use half::{bf16, f16};
use nvfp4_formats::reference::{Element, philox::philox4x32};

/// A deterministic generator for test data, independent of the streams under test.
pub struct Generator(u32);

impl Generator {
    pub fn new(seed: u32) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9) ^ 0x5bd1_e995)
    }

    pub fn next_u32(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(1);
        philox4x32([self.0, 0, 0, 7], [0xdead_beef, 1])[0]
    }

    /// Returns a number uniform in [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 / 16_777_216.0
    }

    /// Returns a standard normal number.
    pub fn normal(&mut self) -> f32 {
        let (u, v) = (self.uniform().max(1e-9), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
    }
}

/// Kinds of data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Standard normal.
    Normal,
    /// Normal with heavy tails.
    Heavy,
    /// Every E2M1 threshold and grid point with its neighbors, scaled by powers of two.
    Thresholds,
    /// Values near 1e-30, subnormals, zeros of both signs.
    Tiny,
    /// Near the largest finite value.
    Huge,
    /// Zeros of both signs.
    Zeros,
    /// Normal with one NaN.
    Nan,
    /// Normal with one infinity.
    Infinity,
}

pub const ALL_KINDS: [Kind; 8] = [
    Kind::Normal,
    Kind::Heavy,
    Kind::Thresholds,
    Kind::Tiny,
    Kind::Huge,
    Kind::Zeros,
    Kind::Nan,
    Kind::Infinity,
];

const POINTS: [f32; 15] = [
    0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 6.5,
];

/// Returns `len` values of `kind`.
pub fn values(kind: Kind, len: usize, seed: u32) -> Vec<f32> {
    let mut random = Generator::new(seed);
    let mut x: Vec<f32> = (0..len)
        .map(|i| match kind {
            Kind::Normal | Kind::Nan | Kind::Infinity => random.normal(),
            Kind::Heavy => random.normal() * (2.0 * random.normal()).exp(),
            Kind::Thresholds => {
                let point = POINTS[random.next_u32() as usize % POINTS.len()];
                let neighbour = (random.next_u32() % 5) as i32 - 2;
                let value = f32::from_bits((point.to_bits() as i32 + neighbour) as u32);
                let sign = if random.next_u32() & 1 == 1 {
                    -1.0
                } else {
                    1.0
                };
                // Every second block contains 6, so that its scale is exact and thresholds are hit.
                if i % 32 == 0 { 6.0 } else { sign * value }
            }
            Kind::Tiny => match random.next_u32() % 4 {
                0 => 0.0,
                1 => -0.0,
                2 => f32::from_bits(random.next_u32() >> 12),
                _ => random.normal() * 1e-30,
            },
            Kind::Huge => random.normal() * 6e37,
            Kind::Zeros => {
                if random.next_u32() & 1 == 0 {
                    0.0
                } else {
                    -0.0
                }
            }
        })
        .collect();
    if let Some(middle) = x.get_mut(len / 2) {
        match kind {
            Kind::Nan => *middle = -f32::NAN,
            Kind::Infinity => *middle = f32::NEG_INFINITY,
            _ => {}
        }
    }
    x
}

/// Element types that tests convert to.
pub trait TestElement: Element + bytemuck::Pod + std::fmt::Debug {}

impl TestElement for f32 {}

impl TestElement for bf16 {}

impl TestElement for f16 {}

pub fn convert<T: TestElement>(x: &[f32]) -> Vec<T> {
    x.iter().map(|&value| T::from_f32(value)).collect()
}
