//! Matrix descriptors of `wgmma` for operands in shared memory (sm_90a). The instructions
//! themselves are in the mainloops, [`sm90_mainloop`](super::sm90_mainloop) and
//! [`sm90_mainloop_w4a16`](super::sm90_mainloop_w4a16).

use cubecl::prelude::*;

/// Contiguous dimension of an operand, passed to `wgmma` by its last two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Major {
    /// K: rows of 128 bytes are along K.
    K,
    /// M or N: rows of 128 bytes are 64 rows or columns of the output at one K index. The
    /// instruction transposes them as it reads.
    Mn,
}

impl Major {
    /// Returns the operand `imm-trans` of the instruction.
    pub(super) const fn transposes(self) -> u32 {
        match self {
            Self::K => 0,
            Self::Mn => 1,
        }
    }

    /// Returns the leading distance of a [`wgmma_descriptor()`], in units of 16 bytes.
    const fn leading_distance(self) -> u64 {
        match self {
            Self::K => 1,
            Self::Mn => 512,
        }
    }

    /// Returns the distance from the 16 columns along K that one instruction takes to the next 16,
    /// in units of 16 bytes: 32 bytes along a row, or 16 rows of 128 bytes.
    pub(super) const fn advance(self) -> u64 {
        match self {
            Self::K => 2,
            Self::Mn => 128,
        }
    }
}

/// Returns the descriptor of a tile in shared memory with the 128-byte swizzle: the address in bits
/// 0-13 and the distance between groups of eight rows (1024 bytes) in bits 32-45, both in units of
/// 16 bytes; swizzle mode 1 (128 bytes) in bits 62-63. The tile is aligned to 1024 bytes.
///
/// Rows are 128 bytes in both cases. In a K-major tile they are along K, and the leading distance,
/// bits 16-29, is unused. In an MN-major tile they are across K: 64 rows or columns of the output
/// at one K index. The next 64 are a leading distance further, after the 64 rows (8192 bytes) of
/// the first 64 in a stage of the [mainloops](crate::cube::ptx::sm90_mainloop).
///
/// PTX ISA "Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format"; PTX 8.0,
/// sm_90a.
#[cube]
pub fn wgmma_descriptor(address: u32, #[comptime] major: Major) -> u64 {
    u64::cast_from((address & 0x3_ffffu32) >> 4u32)
        | (comptime!(major.leading_distance()) << 16u64)
        | (64u64 << 32u64)
        | (1u64 << 62u64)
}
