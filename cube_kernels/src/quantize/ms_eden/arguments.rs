//! Arguments of the MS-EDEN kernels, and per-unit state derived from them.

use cubecl::prelude::*;

use super::{
    super::{packed_source::PackedRows, tile::Shape},
    position::{EdenPolicy, Position, TILE_OF_SCALES, swizzled_word},
};
use crate::{
    cube::{
        codec::canonical,
        eden::EdenScale,
        hadamard::{Signs, seeded_signs},
        philox::{Position as BlockNumbers, Random},
    },
    policy::Hadamard,
};

/// A source in memory: the elements of a matrix, or the codes and scales of an NVFP4 tensor, for
/// which `F` and `N` are unused.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "its launch arguments make it")]
pub enum EdenStored<F: Numeric, N: Size> {
    /// A matrix.
    Matrix(Box<[Vector<F, N>]>),
    /// An NVFP4 tensor.
    Packed(PackedRows),
}

#[cube]
impl<F: Numeric, N: Size> EdenStored<F, N> {
    /// Returns the factor of a packed source with one amax.
    pub(super) fn factor(&self) -> f32 {
        #[comptime]
        match self {
            EdenStored::Matrix(_) => 1.0f32.runtime(),
            EdenStored::Packed(rows) => rows.factor(),
        }
    }
}

/// Inputs from which the scales derive.
#[derive(CubeType, CubeLaunch)]
pub struct EdenInputs {
    /// Amax values of the transformed source.
    pub amax: Box<[f32]>,
    /// Factor from an amax of the source to the amax with which the result is decoded.
    pub amax_factor: f32,
    /// Factor of block scales.
    pub block_factor: f32,
}

#[cube]
impl EdenInputs {
    pub(super) fn scale(&self, group: usize) -> EdenScale {
        EdenScale::from_amax(self.amax[group], self.amax_factor, self.block_factor)
    }
}

/// Scale bytes in units of a rotation group: eight.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "its launch arguments make it")]
pub enum EdenScales {
    /// Contiguous: one item per rotation group.
    Compact(Box<[Vector<u32, Const<2>>]>),
    /// In 128x4 tiles: two words, [`TILE_OF_SCALES`] apart.
    Swizzled(Box<[u32]>),
}

/// Elements of the result.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "its launch arguments make it")]
pub enum EdenValues {
    /// Codes and scale bytes.
    Packed(EdenPacked),
    /// Codes times block scales in bf16, eight per item, in the order that the policy selects.
    Bf16Unscaled(Box<[Vector<u32, Const<4>>]>),
}

/// Codes, one item per block, and scale bytes.
#[derive(CubeType, CubeLaunch)]
pub struct EdenPacked {
    /// Codes.
    pub codes: Box<[Vector<u32, Const<2>>]>,
    /// Scale bytes.
    pub scales: EdenScales,
}

/// Output buffers.
#[derive(CubeType, CubeLaunch)]
pub struct EdenOut {
    /// Elements.
    pub values: EdenValues,
    /// Amax values with which the result is decoded.
    pub amax: Box<[f32]>,
}

#[cube]
impl EdenScales {
    /// Stores the eight scale bytes of a tile's rotation group on line `line`.
    pub(super) fn store(
        &mut self,
        bytes: Vector<u32, Const<2>>,
        at: &Position,
        line: usize,
        #[comptime] policy: EdenPolicy,
    ) {
        #[comptime]
        match self {
            EdenScales::Compact(scales) => scales[line * at.pitch + at.first] = bytes,
            EdenScales::Swizzled(scales) => {
                let word = swizzled_word(at, line, policy);
                scales[word] = bytes.extract(0usize);
                scales[word + TILE_OF_SCALES] = bytes.extract(1usize);
            }
        }
    }
}

/// Inputs of random draws.
#[derive(CubeType, CubeLaunch)]
pub struct EdenDraw {
    /// Additional random offset, if the policy has one: two words, low word first.
    pub offset: Box<[u32]>,
    /// Source of random bits.
    pub random: Random,
    /// Position of the tensor's rotation groups, counted in rotation groups.
    pub position: BlockNumbers,
    /// Units of the groups of rows before those of the tensor, one word, if the policy has them.
    pub earlier: Box<[u32]>,
    /// Signs of the transform.
    pub signs: EdenSigns,
}

/// Signs of the transform as launch arguments.
#[derive(CubeType, CubeLaunch)]
pub struct EdenSigns {
    /// The signs or, if the policy redraws them, their seed in the first two words.
    pub words: Signs,
    /// Offset by which the seed is advanced if signs are redrawn: two words, low word first.
    pub offset: Box<[u32]>,
}

#[cube]
impl EdenSigns {
    /// Returns the signs.
    pub(super) fn resolve(&self, #[comptime] redrawn: bool) -> Signs {
        let mut signs = Signs {
            word0: self.words.word0,
            word1: self.words.word1,
            word2: self.words.word2,
            word3: self.words.word3,
        };
        if comptime!(redrawn) {
            let seed = word64(self.words.word0, self.words.word1);
            let offset = word64(self.offset[0], self.offset[1]);
            let drawn = seeded_signs(seed + offset * comptime!(Hadamard::SEED_STEP));
            signs.word0 = drawn.word0;
            signs.word1 = drawn.word1;
            signs.word2 = drawn.word2;
            signs.word3 = drawn.word3;
        }
        signs
    }
}

#[cube]
fn word64(low: u32, high: u32) -> u64 {
    u64::cast_from(low) | (u64::cast_from(high) << 32u64)
}

#[cube]
impl EdenDraw {
    /// Returns the stream with the offset in device memory added.
    pub(super) fn resolve(&self, #[comptime] device_offset: bool) -> Random {
        let mut low = self.random.offset_low;
        let mut high = self.random.offset_high;
        if comptime!(device_offset) {
            low += self.offset[0];
            // The unsigned addition wrapped if and only if the sum is below a summand.
            high += self.offset[1] + u32::cast_from(low < self.random.offset_low);
        }
        Random {
            key_low: self.random.key_low,
            key_high: self.random.key_high,
            offset_low: low,
            offset_high: high,
        }
    }
}

/// Writes the amax values with which the result is decoded: a single one, or one per group. Returns
/// the scale of the first group, or of all.
#[cube]
pub(super) fn write_amax(
    from: &EdenInputs,
    shape: &Shape,
    out: &mut EdenOut,
    #[comptime] policy: EdenPolicy,
) -> KeptScale {
    let first = from.scale(0usize);
    if comptime!(policy.plain()) {
        if ABSOLUTE_POS == 0usize {
            out.amax[0] = first.amax;
        }
    } else {
        let mut group = ABSOLUTE_POS;
        while group < shape.groups {
            out.amax[group] = from.scale(group).amax;
            group += CUBE_COUNT * CUBE_DIM as usize;
        }
    }
    KeptScale {
        scale: first,
        part: 0usize,
    }
}

/// Raises entry `index` of `out` to `bits`, compared as integers: the order of arrival does not
/// matter. On CUDA this takes one atomic per plane, and only if the entry is smaller, since atomics
/// on one address serialize.
#[cube]
pub(super) fn atomic_amax(
    out: &mut [Atomic<u32>],
    index: usize,
    bits: u32,
    #[comptime] policy: EdenPolicy,
) {
    let bits = canonical(bits);
    if comptime!(policy.conversion.has_ptx()) {
        let plane = plane_max(bits);
        if UNIT_POS_PLANE == 0u32 && plane > out[index].load() {
            out[index].fetch_max(plane);
        }
    } else {
        out[index].fetch_max(bits);
    }
}

/// Amax bits of the group of the cube's last tile. A cube's tiles follow each other through the
/// groups, so one atomic per group that it leaves is enough.
#[derive(CubeType)]
pub(super) struct KeptAmax {
    pub bits: u32,
    pub part: usize,
}

#[cube]
impl KeptAmax {
    /// Includes the amax of a tile of group `part`. When the group changes, first writes the amax
    /// of the previous group to `out`.
    pub fn include(
        &mut self,
        bits: u32,
        part: usize,
        out: &mut [Atomic<u32>],
        #[comptime] policy: EdenPolicy,
    ) {
        if comptime!(!policy.plain()) {
            let next = part;
            if next != self.part {
                atomic_amax(out, self.part, self.bits, policy);
                self.bits = 0u32;
                self.part = next;
            }
        }
        self.bits = max(self.bits, bits);
    }
}

/// Scale of the group of the cube's last tile, cached because its computation takes divisions.
#[derive(CubeType)]
pub(super) struct KeptScale {
    pub scale: EdenScale,
    pub part: usize,
}

#[cube]
impl KeptScale {
    /// Updates the scale to that of group `part`.
    pub fn turn_to(&mut self, part: usize, from: &EdenInputs, #[comptime] policy: EdenPolicy) {
        if comptime!(!policy.plain()) {
            let next = part;
            if next != self.part {
                let found = from.scale(next);
                self.scale.amax = found.amax;
                self.scale.block = found.block;
                self.scale.decode = found.decode;
                self.part = next;
            }
        }
    }
}
