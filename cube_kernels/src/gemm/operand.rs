//! The operands of a GEMM as a caller describes them: elements, and the global scale beside them.

use cubecl::server::Handle;

use super::epilogue::Factor;
use crate::{
    BLOCK, Format, Nvfp4Error, ScaleLayout, Storage, Usage,
    format::swizzle::{TILE_INNER, padded_len, row_group_tiles},
    memory::{check_memory, is_aligned},
    moe::GroupOffsets,
    tensor::{AmaxGranularity, DeviceQuantized, FloatKind, Groups, Matrix},
};

/// The elements of an operand: `outer` rows along K.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// Codes and block scales, in NVFP4 or MXFP8. The kernel of
    /// [`Sm100Tcgen05`](crate::capabilities::GemmBackend::Sm100Tcgen05) reads two MXFP8 operands;
    /// for every other one an MXFP8 operand is dequantized to bf16 before, exactly.
    Packed(&'a DeviceQuantized),
    /// Code times block scale in bf16, stored in their place. The GEMM has the bits of that of
    /// codes and scales.
    Bf16Unscaled(&'a DeviceQuantized),
    /// A K-major bf16 matrix: its columns are K, as long as that of the other operand is in memory.
    /// Where a packed one pads K with zeros, its columns there may hold anything finite.
    Bf16(&'a Matrix),
    /// An MN-major bf16 matrix, whose *rows* are K: the transpose of what [`Self::Bf16`] takes,
    /// with the same result, bit for bit. The kernel of sm_90 reads it as it is, if it has a
    /// multiple of 8 columns. Elsewhere a transposed copy is made first, which a tracing event
    /// says. As `b` of a GEMM with groups along M it is the groups' K x N matrices, one below the
    /// other.
    Bf16MnMajor(&'a Matrix),
    /// A packed NVFP4 matrix that is MN-major: its stored *rows* are K, and its block scales are
    /// over 16 elements along N. As `b` alone: the weight of a linear layer as its forward reads
    /// it, in the GEMM of the gradient by the input (dgrad). No kernel dequantizes it as a whole.
    /// With groups along M it is the groups' K x N matrices, one below the other.
    PackedMnMajor(&'a DeviceQuantized),
}

/// Where 128x4 tiles of block scales begin anew.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ScaleTiling<'a> {
    /// Nowhere: one matrix.
    Matrix,
    /// The same, with groups along the contraction, each of which begins with a tile in NVFP4.
    WholeTiles,
    /// At each of so many matrices of equal size.
    Batch(usize),
    /// At each group of rows.
    RowGroups(&'a GroupOffsets),
}

impl ScaleTiling<'_> {
    /// Bytes of the tiles of `outer` x `blocks` scales.
    fn bytes(self, outer: usize, blocks: usize) -> usize {
        match self {
            Self::Matrix | Self::WholeTiles => padded_len(outer, blocks),
            Self::Batch(count) => count * padded_len(outer / count, blocks),
            Self::RowGroups(groups) => {
                row_group_tiles(outer, groups.count) * padded_len(128, blocks)
            }
        }
    }

    /// Fails unless the tiles of `packed` begin where these do.
    fn check(self, argument: &'static str, packed: &DeviceQuantized) -> Result<(), Nvfp4Error> {
        let own = match (&packed.groups, self) {
            (Groups::One, _) => true,
            (Groups::Offsets { count, .. }, Self::RowGroups(groups)) => *count == groups.count,
            (Groups::Batch(count), Self::Batch(own)) => {
                packed.usage() == Usage::Rowwise && *count == own
            }
            _ => false,
        };
        if !own {
            return Err(Nvfp4Error::value(
                argument,
                format!("tiles of scales of {} groups", packed.groups.count()),
                format!("those of the GEMM, {self:?}"),
            ));
        }
        let (outer, blocks) = (packed.outer(), packed.blocks());
        let columns = blocks * packed.layout.format.block();
        // A group of MXFP8 may begin within a tile: at a block, which an instruction multiplies.
        let is_whole = packed.layout.format == Format::Mxfp8 || columns.is_multiple_of(TILE_INNER);
        if matches!(self, Self::WholeTiles) && !is_whole {
            return Err(Nvfp4Error::value(
                argument,
                format!("{columns} columns in groups, with scales in 128x4 tiles"),
                format!("a multiple of {TILE_INNER}, whole tiles for each group"),
            ));
        }
        check_memory(argument, &packed.scales, self.bytes(outer, blocks))
    }
}

/// How the elements of an operand are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperandLayout {
    /// NVFP4 codes and block scales, in rows along K.
    Packed,
    /// MXFP8 codes and block scales, in rows along K.
    Mxfp8,
    /// bf16, in rows along K.
    KMajor,
    /// bf16, columns along K.
    MnMajor,
    /// NVFP4 codes and block scales, columns along K.
    PackedMnMajor,
}

impl OperandLayout {
    /// Of an operand of `outer` rows as kernels may read it. TMA reads stored rows of whole 16
    /// bytes, so that other MN-major operands are transposed before any kernel reads them.
    pub const fn as_read(self, outer: usize) -> Self {
        match self {
            Self::MnMajor if !outer.is_multiple_of(8) => Self::KMajor,
            layout => layout,
        }
    }

    /// Whether stored rows are K.
    pub const fn is_mn_major(self) -> bool {
        matches!(self, Self::MnMajor | Self::PackedMnMajor)
    }
}

/// The global scale `amax / range` of an operand, which the epilogue multiplies sums by.
#[derive(Debug, Clone, Copy)]
pub enum Scale<'a> {
    /// One.
    One,
    /// One amax, an `f32` on the device, for the operand, and the range that it stands for: 2688,
    /// or 1536 where scales were bounded by 256 (four-over-six).
    Tensor(&'a Handle, f32),
    /// One amax for each stored row.
    PerRow(&'a Handle, f32),
    /// One amax for each group of a grouped GEMM.
    PerGroup(&'a Handle, f32),
}

/// One operand of a GEMM.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// Its elements.
    pub elements: Elements<'a>,
    /// Their global scale.
    pub scale: Scale<'a>,
}

impl<'a> From<&Operand<'a>> for Operand<'a> {
    fn from(operand: &Operand<'a>) -> Self {
        *operand
    }
}

impl<'a> From<&'a DeviceQuantized> for Operand<'a> {
    /// A quantized tensor in either storage with its own amax values, one or one for each stored
    /// row, and its own range; in MXFP8, which has none, with a factor of one.
    fn from(packed: &'a DeviceQuantized) -> Self {
        let range = packed.layout.scaling.range();
        Self {
            elements: match packed.layout.storage {
                Storage::Packed => Elements::Packed(packed),
                Storage::Bf16Unscaled => Elements::Bf16Unscaled(packed),
            },
            scale: match packed.layout.amax {
                _ if !packed.layout.format.has_global_scale() => Scale::One,
                AmaxGranularity::PerTensor => Scale::Tensor(&packed.amax, range),
                AmaxGranularity::PerRow => Scale::PerRow(&packed.amax, range),
            },
        }
    }
}

impl<'a> From<&'a Matrix> for Operand<'a> {
    /// A K-major bf16 matrix as it is.
    fn from(matrix: &'a Matrix) -> Self {
        Self {
            elements: Elements::Bf16(matrix),
            scale: Scale::One,
        }
    }
}

impl<'a> Operand<'a> {
    /// An MN-major bf16 matrix as it is.
    pub fn mn_major(matrix: &'a Matrix) -> Self {
        Self {
            elements: Elements::Bf16MnMajor(matrix),
            scale: Scale::One,
        }
    }

    /// A packed matrix, or a stack of them, whose stored rows are K, with its own amax value and
    /// range: [`Elements::PackedMnMajor`].
    pub fn packed_mn_major(packed: &'a DeviceQuantized) -> Self {
        Self {
            elements: Elements::PackedMnMajor(packed),
            ..Self::from(packed)
        }
    }

    /// The codes and block scales of a packed one.
    ///
    /// # Errors
    /// When it is not packed.
    pub(crate) fn packed(&self, argument: &'static str) -> Result<&'a DeviceQuantized, Nvfp4Error> {
        match self.elements {
            Elements::Packed(packed) => Ok(packed),
            Elements::Bf16Unscaled(_)
            | Elements::Bf16(_)
            | Elements::Bf16MnMajor(_)
            | Elements::PackedMnMajor(_) => Err(Nvfp4Error::value(
                argument,
                format!("{:?}", self.layout()),
                "codes and block scales in rows along K",
            )),
        }
    }

    /// Rows, which become rows or columns of the output.
    pub fn outer(&self) -> usize {
        match self.elements {
            Elements::Packed(packed) | Elements::Bf16Unscaled(packed) => packed.outer(),
            Elements::Bf16(matrix) => matrix.rows,
            Elements::Bf16MnMajor(matrix) => matrix.cols,
            Elements::PackedMnMajor(packed) => packed.inner(),
        }
    }

    /// Length of K, without padding.
    pub fn inner(&self) -> usize {
        match self.elements {
            Elements::Packed(packed) => packed.inner(),
            Elements::Bf16Unscaled(packed) => packed.blocks() * BLOCK,
            Elements::Bf16(matrix) => matrix.cols,
            Elements::Bf16MnMajor(matrix) => matrix.rows,
            Elements::PackedMnMajor(packed) => packed.outer(),
        }
    }

    /// Length of K in memory: packed operands are padded to whole blocks along their rows, with
    /// zeros.
    pub(crate) fn stored(&self) -> usize {
        match self.elements {
            Elements::Packed(packed) | Elements::Bf16Unscaled(packed) => {
                packed.blocks() * packed.layout.format.block()
            }
            Elements::Bf16(_) | Elements::Bf16MnMajor(_) | Elements::PackedMnMajor(_) => {
                self.inner()
            }
        }
    }

    /// How its elements are stored.
    pub fn layout(&self) -> OperandLayout {
        match self.elements {
            Elements::Packed(packed) => match packed.layout.format {
                Format::Mxfp8 => OperandLayout::Mxfp8,
                // Another format is refused before this is asked.
                Format::Nvfp4 | Format::Mxfp4 => OperandLayout::Packed,
            },
            Elements::Bf16Unscaled(_) | Elements::Bf16(_) => OperandLayout::KMajor,
            Elements::Bf16MnMajor(_) => OperandLayout::MnMajor,
            Elements::PackedMnMajor(_) => OperandLayout::PackedMnMajor,
        }
    }

    /// Whether it is stored as codes and block scales, whose layout says how much of K is padding.
    pub(crate) fn is_packed(&self) -> bool {
        matches!(
            self.elements,
            Elements::Packed(_) | Elements::PackedMnMajor(_)
        )
    }

    /// The columns that a block has: what groups along K begin at multiples of in any case.
    pub(crate) fn block(&self) -> usize {
        match self.elements {
            Elements::Packed(packed) => packed.layout.format.block(),
            Elements::Bf16Unscaled(_)
            | Elements::Bf16(_)
            | Elements::Bf16MnMajor(_)
            | Elements::PackedMnMajor(_) => BLOCK,
        }
    }

    /// Whether its memory begins at a multiple of 16 bytes. Every allocation does; a view into one
    /// may not.
    pub(crate) fn is_aligned(&self) -> bool {
        match self.elements {
            Elements::Packed(packed) | Elements::PackedMnMajor(packed) => {
                is_aligned(&packed.codes) && is_aligned(&packed.scales)
            }
            Elements::Bf16Unscaled(packed) => is_aligned(&packed.codes),
            Elements::Bf16(matrix) | Elements::Bf16MnMajor(matrix) => is_aligned(&matrix.handle),
        }
    }

    /// Some memory of it.
    pub(crate) fn memory(&self) -> &'a Handle {
        match self.elements {
            Elements::Packed(packed)
            | Elements::Bf16Unscaled(packed)
            | Elements::PackedMnMajor(packed) => &packed.codes,
            Elements::Bf16(matrix) | Elements::Bf16MnMajor(matrix) => &matrix.handle,
        }
    }

    /// The global scale as the epilogue takes it: where it comes from, the amax and its range.
    pub(crate) fn factor(&self) -> (Factor, Option<Handle>, f32) {
        match self.scale {
            Scale::One => (Factor::One, None, 1.0),
            Scale::Tensor(amax, range) => (Factor::Tensor, Some(amax.clone()), range),
            Scale::PerRow(amax, range) => (Factor::PerRow, Some(amax.clone()), range),
            Scale::PerGroup(amax, range) => (Factor::PerGroup, Some(amax.clone()), range),
        }
    }

    /// Fails where `a` and `b` were quantized after different transforms: those do not cancel. What
    /// is not packed does not say how it was made.
    pub(crate) fn check_same_transform(a: &Self, b: &Self) -> Result<(), Nvfp4Error> {
        match (a.elements, b.elements) {
            (Elements::Packed(a), Elements::Packed(b))
                if a.layout.hadamard != b.layout.hadamard =>
            {
                Err(Nvfp4Error::value(
                    "b",
                    format!("{:?}", b.layout.hadamard),
                    format!("the transform of `a`, {:?}", a.layout.hadamard),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Checks elements and global scale against the shape, for a GEMM of `groups` groups, or none,
    /// in which block scales in 128x4 tiles begin anew as `tiling` says.
    pub(crate) fn check(
        &self,
        argument: &'static str,
        groups: Option<usize>,
        tiling: ScaleTiling,
    ) -> Result<(), Nvfp4Error> {
        match self.elements {
            Elements::Packed(packed) => {
                let format = match packed.layout.format {
                    Format::Mxfp8 => Format::Mxfp8,
                    Format::Nvfp4 | Format::Mxfp4 => Format::Nvfp4,
                };
                check_packed(argument, packed, format, tiling)?;
            }
            Elements::PackedMnMajor(packed) => {
                check_packed(argument, packed, Format::Nvfp4, tiling)?;
                // What was rotated along N, a GEMM along K does not rotate back.
                if let Some(hadamard) = packed.layout.hadamard {
                    return Err(Nvfp4Error::value(
                        argument,
                        format!("MN-major, quantized after {hadamard:?}"),
                        "no transform: it would be along N",
                    ));
                }
                if matches!(self.scale, Scale::PerRow(..)) {
                    return Err(Nvfp4Error::value(
                        argument,
                        "MN-major, with a global scale for each stored row",
                        "one for the tensor or for each group: stored rows are the contraction",
                    ));
                }
            }
            Elements::Bf16Unscaled(packed) => {
                packed.check(argument)?;
                packed.check_no_groups(argument)?;
            }
            Elements::Bf16(matrix) | Elements::Bf16MnMajor(matrix) => {
                matrix.check(argument)?;
                if matrix.dtype != FloatKind::Bf16 {
                    return Err(Nvfp4Error::DType {
                        argument,
                        found: format!("{:?}", matrix.dtype),
                        expected: "Bf16".into(),
                    });
                }
            }
        }
        let (amax, needed) = match self.scale {
            Scale::One => return Ok(()),
            Scale::Tensor(amax, _) => (amax, 4),
            Scale::PerRow(amax, _) => (amax, 4 * self.outer()),
            Scale::PerGroup(amax, _) => match groups {
                Some(groups) => (amax, 4 * groups),
                None => {
                    return Err(Nvfp4Error::value(
                        argument,
                        "a global scale for each group",
                        "one for the tensor or for each row: the GEMM has no groups",
                    ));
                }
            },
        };
        let found = amax.size_in_used() as usize;
        if found < needed {
            return Err(Nvfp4Error::shape(
                argument,
                format!("{found} bytes of amax values"),
                format!("at least {needed}"),
            ));
        }
        Ok(())
    }
}

/// Checks codes and block scales of `format`, those in 128x4 tiles against `tiling`. Where a kernel
/// wants rows of scales, the GEMM unswizzles.
fn check_packed(
    argument: &'static str,
    packed: &DeviceQuantized,
    format: Format,
    tiling: ScaleTiling,
) -> Result<(), Nvfp4Error> {
    packed.check_codes(argument, format)?;
    packed.check(argument)?;
    match packed.layout.scale_layout {
        ScaleLayout::Compact => packed.check_compact(argument),
        ScaleLayout::Swizzled128x4 => tiling.check(argument, packed),
    }
}
