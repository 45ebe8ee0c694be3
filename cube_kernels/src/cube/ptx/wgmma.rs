//! What `wgmma` reads from shared memory: matrix descriptors (sm_90a). The instructions themselves
//! stand in the mainloops, [`sm90_mainloop`](super::sm90_mainloop) and
//! [`sm90_mainloop_w4a16`](super::sm90_mainloop_w4a16).

use cubecl::prelude::*;

/// Which dimension of an operand is contiguous, as `wgmma` is told by its last two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Major {
    /// The contraction: rows of 128 bytes are along it.
    K,
    /// M or N: rows of 128 bytes are 64 rows or columns of the output at one place of the
    /// contraction. The instruction transposes them as it reads.
    Mn,
}

impl Major {
    /// The operand of the instruction, `imm-trans`.
    pub(super) const fn transposes(self) -> u32 {
        match self {
            Self::K => 0,
            Self::Mn => 1,
        }
    }

    /// The leading distance of a [`wgmma_descriptor()`], in units of 16 bytes.
    const fn leading_distance(self) -> u64 {
        match self {
            Self::K => 1,
            Self::Mn => 512,
        }
    }

    /// How far the 16 columns of the contraction that one instruction takes are from the next 16,
    /// in units of 16 bytes: 32 bytes along a row, or 16 rows of 128 bytes.
    pub(super) const fn advance(self) -> u64 {
        match self {
            Self::K => 2,
            Self::Mn => 128,
        }
    }
}

/// The descriptor of a tile in shared memory with the 128-byte swizzle: the address in bits 0-13
/// and the distance between groups of eight rows (1024 bytes) in bits 32-45, both in units of 16
/// bytes; swizzle mode 1 (128 bytes) in bits 62-63. The tile is aligned to 1024 bytes.
///
/// Rows are 128 bytes either way. Of a K-major tile they are along the contraction, and bits 16-29,
/// the leading distance, are not used. Of an MN-major one they are across it: 64 rows or columns of
/// the output at one place of the contraction. The next 64 of these lie a leading distance further,
/// behind the 64 rows (8192 bytes) that a stage of the
/// [mainloops](crate::cube::ptx::sm90_mainloop) has of the first.
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
