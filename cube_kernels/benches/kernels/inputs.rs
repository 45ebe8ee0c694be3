//! Inputs of kernels: buffers of equal size that rotate and together exceed the L2 cache.

use std::{
    cell::{LazyCell, OnceCell},
    ops::Index,
};

use crate::{
    common::device::is_run_once,
    quantize::{self, AmaxRequest, Amaxes, TargetSpec},
};
use cubecl::{prelude::*, server::Handle};
use nvfp4_formats::{AmaxGranularity, Hadamard, QuantParams, RandomStream, Rounding};
use nvfp4_kernels::{
    moe::GroupOffsets,
    tensor::{FloatKind, Groups, Matrix},
};

/// Bytes of codes and scales per NVFP4 element.
pub const PACKED: f64 = 0.5 + 1.0 / 16.0;
/// Bytes of codes and scales per MXFP8 element.
pub const MX: f64 = 1.0 + 1.0 / 32.0;
/// Bytes of codes and scales per MXFP4 element.
pub const MXFP4: f64 = 0.5 + 1.0 / 32.0;

pub const NEAREST: Rounding = Rounding::Nearest;

pub fn stochastic() -> Rounding {
    Rounding::Stochastic(RandomStream::new(1, 2, 3))
}

pub fn rht() -> Option<Hadamard> {
    Some(Hadamard::default())
}

/// Buffers that together exceed the L2 cache several times, created on first use, so that
/// filtered-out benchmarks cost nothing. Indices wrap around.
pub struct Rotated<'a, T>(LazyCell<Vec<T>, Box<dyn FnOnce() -> Vec<T> + 'a>>);

impl<'a, T> Rotated<'a, T> {
    /// Returns the buffers of `make(i)`, with `bytes` bytes each.
    pub fn new(bytes: f64, make: impl Fn(usize) -> T + 'a) -> Self {
        let count = match is_run_once() {
            true => 2,
            false => (300e6 / bytes).ceil().max(2.0) as usize,
        };
        Self(LazyCell::new(Box::new(move || {
            (0..count).map(make).collect()
        })))
    }
}

impl<T> Index<usize> for Rotated<'_, T> {
    type Output = T;

    fn index(&self, i: usize) -> &T {
        &self.0[i % self.0.len()]
    }
}

#[cube(launch_unchecked)]
fn fill_kernel(out: &mut [u32], len: usize, mask: u32, base: u32) {
    if ABSOLUTE_POS < len {
        let hash = u32::cast_from(ABSOLUTE_POS) * 0x9E37_79B9u32;
        out[ABSOLUTE_POS] = (hash & mask) + base;
    }
}

/// Returns memory of `bytes` bytes, a multiple of 4, filled with words `(hash & mask) + base`.
pub fn filled(client: &Client, bytes: usize, mask: u32, base: u32) -> Handle {
    let (out, words) = (client.empty(bytes), bytes / 4);
    // SAFETY: the buffer holds `words` words.
    unsafe {
        fill_kernel::launch_unchecked(
            client,
            CubeCount::Static(words.div_ceil(256) as u32, 1, 1),
            CubeDim::new_1d(256),
            BufferArg::from_raw_parts(out.clone(), words),
            words,
            mask,
            base,
        );
    }
    out
}

/// Returns rotating buffers of arbitrary bytes.
pub fn bytes(client: &Client, bytes: usize) -> Rotated<'_, Handle> {
    Rotated::new(bytes as f64, move |_| filled(client, bytes, u32::MAX, 0))
}

/// Copies words to device memory.
pub fn words(client: &Client, words: impl Iterator<Item = u32>) -> Handle {
    client.create_from_slice(bytemuck::cast_slice(&words.collect::<Vec<u32>>()))
}

/// Returns `rows` rows in `count` groups of about equal size.
pub fn equal_groups(client: &Client, rows: usize, count: usize) -> GroupOffsets {
    let offsets = (0..=count).map(|group| (group * rows / count) as u32);
    GroupOffsets::new(words(client, offsets), count).unwrap()
}

/// Returns the groups in the form that kernels with a quantized tensor per group take.
pub fn groups_of(offsets: &GroupOffsets) -> Groups {
    Groups::Offsets {
        offsets: offsets.offsets.clone(),
        count: offsets.count,
    }
}

/// Requests the amax values of both quantized tensors of training: of the values, and of the
/// transformed columns.
pub fn plain_and_transformed() -> AmaxRequest {
    AmaxRequest {
        rows: Some(AmaxGranularity::PerTensor),
        cols: Some((AmaxGranularity::PerTensor, rht())),
    }
}

/// Requests a quantized tensor with one amax per group.
pub fn with_amax(amax: &Handle, copy: TargetSpec) -> TargetSpec {
    copy.amax(amax)
}

/// Returns default parameters with the given rounding and transform.
pub fn copy_of(rounding: Rounding, hadamard: Option<Hadamard>) -> TargetSpec {
    TargetSpec::new(QuantParams {
        hadamard,
        ..QuantParams::nvfp4(rounding)
    })
}

/// Matrices of equal shape.
pub struct Inputs {
    client: Client,
    sets: Rotated<'static, Matrix>,
    maxima: OnceCell<[Handle; 2]>,
    pub rows: usize,
    pub cols: usize,
    pub dtype: FloatKind,
}

impl Inputs {
    pub fn new(client: &Client, rows: usize, cols: usize, dtype: FloatKind) -> Self {
        // Finite values of mixed magnitude; the contents do not matter to a memory-bound kernel.
        let (mask, base) = match dtype {
            FloatKind::Bf16 | FloatKind::F16 => (0x83FF_83FF, 0x3C00_3C00),
            FloatKind::F32 => (0x83FF_FFFF, 0x3C00_0000),
        };
        let bytes = rows * cols * dtype.size();
        let made_by = client.clone();
        Self {
            client: client.clone(),
            sets: Rotated::new(bytes as f64, move |_| {
                let handle = filled(&made_by, bytes, mask, base);
                Matrix::new(handle, rows, cols, dtype).unwrap()
            }),
            maxima: OnceCell::new(),
            rows,
            cols,
            dtype,
        }
    }

    pub fn bf16(client: &Client, rows: usize, cols: usize) -> Self {
        Self::new(client, rows, cols, FloatKind::Bf16)
    }

    pub fn get(&self, i: usize) -> &Matrix {
        &self.sets[i]
    }

    pub fn elements(&self) -> f64 {
        (self.rows * self.cols) as f64
    }

    /// Returns the bytes of the input plus `copies` packed tensors.
    pub fn bytes(&self, copies: f64) -> f64 {
        self.elements() * (self.dtype.size() as f64 + copies * PACKED)
    }

    /// Returns the amax of the values, and that of the columns after the RHT.
    fn maxima(&self) -> &[Handle; 2] {
        self.maxima.get_or_init(|| {
            let x = self.get(0);
            let request = plain_and_transformed();
            let found = quantize::amaxes(&self.client, x, &Groups::One, &request).unwrap();
            let Amaxes { rows, cols } = found;
            [rows.unwrap(), cols.unwrap()]
        })
    }

    pub fn amax(&self) -> &Handle {
        &self.maxima()[0]
    }

    /// Requests `copy` with the amax that it requires.
    pub fn with(&self, copy: TargetSpec) -> TargetSpec {
        // Transforms larger than 16 have amax values of about the same size.
        let transformed = usize::from(copy.params.hadamard.is_some());
        with_amax(&self.maxima()[transformed], copy)
    }

    pub fn request(&self, rounding: Rounding, hadamard: Option<Hadamard>) -> TargetSpec {
        self.with(copy_of(rounding, hadamard))
    }
}
