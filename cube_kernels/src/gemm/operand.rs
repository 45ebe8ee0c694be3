//! Operands of a GEMM as the caller describes them: elements and global scale.

use cubecl::server::Handle;

use super::epilogue::Factor;
use crate::{
    BLOCK, Format, Nvfp4Error, Usage,
    format::swizzle::{TILE_INNER, padded_len, row_group_tiles},
    memory::{check_memory, is_aligned},
    moe::GroupOffsets,
    tensor::{AmaxGranularity, DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Elements of an operand: `outer` rows along K.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// NVFP4, MXFP8 or MXFP4 codes and block scales, or code times block scale in bf16, with which
    /// the GEMM is bit-identical. Kernels that take MXFP8 read two MXFP8 operands; for every other
    /// kernel an MXFP8 operand is first dequantized to bf16, exactly. An MXFP4 operand is
    /// dequantized for every kernel.
    Quantized(&'a DeviceQuantized),
    /// A K-major bf16 matrix: its columns are K, with the other operand's stored length. Columns at
    /// which a packed operand pads K with zeros may hold any finite values.
    Bf16(&'a Matrix),
    /// An MN-major bf16 matrix, whose *rows* are K: the transpose of [`Self::Bf16`], with the same
    /// result, bit for bit. The sm_90 kernel reads it directly if the number of columns is a
    /// multiple of 8. Other kernels get a transposed copy, and a tracing event reports the copy. As
    /// `b` of a GEMM with groups along M it stacks the K x N matrices of the groups.
    Bf16MnMajor(&'a Matrix),
    /// An MN-major packed NVFP4 matrix: its stored *rows* are K, and its block scales cover 16
    /// elements along N. Only valid as `b`: the weight of a linear layer as stored for its forward
    /// pass, in the dgrad GEMM. Kernels never dequantize it as a whole. With groups along M it
    /// stacks the K x N matrices of the groups.
    PackedMnMajor(&'a DeviceQuantized),
}

/// Boundaries at which 128x4 tiles of block scales start anew.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ScaleTiling<'a> {
    /// A single matrix without boundaries.
    Matrix,
    /// A single matrix with groups along K, each of which begins with a tile in NVFP4.
    WholeTiles,
    /// Each of this number of matrices of equal size.
    Batch(usize),
    /// Each group of rows.
    RowGroups(&'a GroupOffsets),
}

impl ScaleTiling<'_> {
    /// Returns the bytes of the tiles of `outer` x `blocks` scales.
    fn bytes(self, outer: usize, blocks: usize) -> usize {
        match self {
            Self::Matrix | Self::WholeTiles => padded_len(outer, blocks),
            Self::Batch(count) => count * padded_len(outer / count, blocks),
            Self::RowGroups(groups) => {
                row_group_tiles(outer, groups.count) * padded_len(128, blocks)
            }
        }
    }

    /// Returns an error unless the tiles of `packed` start anew at these boundaries.
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
        // An MXFP8 group may begin within a tile, at a block, because an instruction multiplies a
        // whole block.
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

/// Storage layout of an operand's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperandLayout {
    /// NVFP4 codes and block scales, with rows along K.
    Packed,
    /// MXFP8 codes and block scales, with rows along K.
    Mxfp8,
    /// bf16, with rows along K.
    KMajor,
    /// bf16, with columns along K.
    MnMajor,
    /// NVFP4 codes and block scales, with columns along K.
    PackedMnMajor,
}

impl OperandLayout {
    /// Returns the layout in which kernels read an operand of `outer` rows. TMA requires stored
    /// rows of a multiple of 16 bytes, so other MN-major operands are transposed before the kernel
    /// runs.
    pub const fn as_read(self, outer: usize) -> Self {
        match self {
            Self::MnMajor if !outer.is_multiple_of(8) => Self::KMajor,
            layout => layout,
        }
    }

    /// Returns true if the stored rows are K.
    pub const fn is_mn_major(self) -> bool {
        matches!(self, Self::MnMajor | Self::PackedMnMajor)
    }
}

/// Global scale `amax / range` of an operand, by which the epilogue multiplies sums.
#[derive(Debug, Clone, Copy)]
pub enum Scale<'a> {
    /// A scale of 1.
    One,
    /// One amax for the operand, an `f32` on the device, and its range: 2688, or 1536 if scales are
    /// bounded by 256 (four over six).
    Tensor(&'a Handle, f32),
    /// One amax per stored row.
    PerRow(&'a Handle, f32),
    /// One amax per group of a grouped GEMM.
    PerGroup(&'a Handle, f32),
}

/// One operand of a GEMM.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// Elements.
    pub elements: Elements<'a>,
    /// Global scale.
    pub scale: Scale<'a>,
}

impl<'a> From<&Operand<'a>> for Operand<'a> {
    fn from(operand: &Operand<'a>) -> Self {
        *operand
    }
}

impl<'a> From<&'a DeviceQuantized> for Operand<'a> {
    /// Wraps a quantized tensor in either storage with its own range and amax values, one per
    /// tensor or per stored row. MXFP8, which has no global scale, gets a factor of 1.
    fn from(packed: &'a DeviceQuantized) -> Self {
        let range = packed.layout.scaling.range();
        Self {
            elements: Elements::Quantized(packed),
            scale: match packed.layout.amax {
                _ if !packed.layout.format.has_global_scale() => Scale::One,
                AmaxGranularity::PerTensor => Scale::Tensor(&packed.amax, range),
                AmaxGranularity::PerRow => Scale::PerRow(&packed.amax, range),
            },
        }
    }
}

impl<'a> From<&'a Matrix> for Operand<'a> {
    /// Wraps a K-major bf16 matrix without a scale.
    fn from(matrix: &'a Matrix) -> Self {
        Self {
            elements: Elements::Bf16(matrix),
            scale: Scale::One,
        }
    }
}

impl<'a> Operand<'a> {
    /// Wraps an MN-major bf16 matrix without a scale.
    pub fn mn_major(matrix: &'a Matrix) -> Self {
        Self {
            elements: Elements::Bf16MnMajor(matrix),
            scale: Scale::One,
        }
    }

    /// Wraps a packed matrix whose stored rows are K, or a stack of them, with its own amax and
    /// range: [`Elements::PackedMnMajor`].
    pub fn packed_mn_major(packed: &'a DeviceQuantized) -> Self {
        Self {
            elements: Elements::PackedMnMajor(packed),
            ..Self::from(packed)
        }
    }

    /// Returns the codes and block scales.
    ///
    /// # Errors
    /// Returns an error if the operand is not packed.
    pub(crate) fn packed(&self, argument: &'static str) -> Result<&'a DeviceQuantized, Nvfp4Error> {
        match self.elements {
            Elements::Quantized(packed) if packed.is_packed() => Ok(packed),
            _ => Err(Nvfp4Error::value(
                argument,
                format!("{:?}", self.layout()),
                "codes and block scales in rows along K",
            )),
        }
    }

    /// Returns the number of rows, which become rows or columns of the output.
    pub fn outer(&self) -> usize {
        match self.elements {
            Elements::Quantized(packed) => packed.outer(),
            Elements::Bf16(matrix) => matrix.rows,
            Elements::Bf16MnMajor(matrix) => matrix.cols,
            Elements::PackedMnMajor(packed) => packed.inner(),
        }
    }

    /// Returns the length of K without padding.
    pub fn inner(&self) -> usize {
        match self.elements {
            Elements::Quantized(packed) if packed.is_packed() => packed.inner(),
            Elements::Quantized(values) => values.blocks() * BLOCK,
            Elements::Bf16(matrix) => matrix.cols,
            Elements::Bf16MnMajor(matrix) => matrix.rows,
            Elements::PackedMnMajor(packed) => packed.outer(),
        }
    }

    /// Returns the length of K in memory: rows of packed operands are padded with zeros to whole
    /// blocks.
    pub(crate) fn stored(&self) -> usize {
        match self.elements {
            Elements::Quantized(packed) => packed.blocks() * packed.layout.format.block(),
            Elements::Bf16(_) | Elements::Bf16MnMajor(_) | Elements::PackedMnMajor(_) => {
                self.inner()
            }
        }
    }

    /// Returns the storage layout.
    pub fn layout(&self) -> OperandLayout {
        match self.elements {
            Elements::Quantized(packed) => match packed.layout.format {
                _ if !packed.is_packed() => OperandLayout::KMajor,
                Format::Mxfp8 => OperandLayout::Mxfp8,
                Format::Nvfp4 => OperandLayout::Packed,
                // Dequantized for every kernel.
                Format::Mxfp4 => OperandLayout::KMajor,
            },
            Elements::Bf16(_) => OperandLayout::KMajor,
            Elements::Bf16MnMajor(_) => OperandLayout::MnMajor,
            Elements::PackedMnMajor(_) => OperandLayout::PackedMnMajor,
        }
    }

    /// Returns true if the operand is stored as codes and block scales; its layout then tells how
    /// much of K is padding.
    pub(crate) fn is_packed(&self) -> bool {
        match self.elements {
            Elements::Quantized(packed) => packed.is_packed(),
            Elements::PackedMnMajor(_) => true,
            Elements::Bf16(_) | Elements::Bf16MnMajor(_) => false,
        }
    }

    /// Returns the columns per block, the minimum alignment of groups along K.
    pub(crate) fn block(&self) -> usize {
        match self.elements {
            Elements::Quantized(packed) => packed.layout.format.block(),
            Elements::Bf16(_) | Elements::Bf16MnMajor(_) | Elements::PackedMnMajor(_) => BLOCK,
        }
    }

    /// Returns true if the memory begins at a multiple of 16 bytes. Every allocation does; a view
    /// into one may not.
    pub(crate) fn is_aligned(&self) -> bool {
        match self.elements {
            Elements::Quantized(packed) | Elements::PackedMnMajor(packed) => {
                is_aligned(&packed.codes) && (!packed.is_packed() || is_aligned(&packed.scales))
            }
            Elements::Bf16(matrix) | Elements::Bf16MnMajor(matrix) => is_aligned(&matrix.handle),
        }
    }

    /// Returns any of the operand's buffers.
    pub(crate) fn memory(&self) -> &'a Handle {
        match self.elements {
            Elements::Quantized(packed) | Elements::PackedMnMajor(packed) => &packed.codes,
            Elements::Bf16(matrix) | Elements::Bf16MnMajor(matrix) => &matrix.handle,
        }
    }

    /// Returns the global scale for the epilogue: its granularity, the amax and its range.
    pub(crate) fn factor(&self) -> (Factor, Option<Handle>, f32) {
        match self.scale {
            Scale::One => (Factor::One, None, 1.0),
            Scale::Tensor(amax, range) => (Factor::Tensor, Some(amax.clone()), range),
            Scale::PerRow(amax, range) => (Factor::PerRow, Some(amax.clone()), range),
            Scale::PerGroup(amax, range) => (Factor::PerGroup, Some(amax.clone()), range),
        }
    }

    /// Returns an error if `a` and `b` were quantized after different transforms, which would not
    /// cancel. Unquantized operands do not record their transform.
    pub(crate) fn check_same_transform(a: &Self, b: &Self) -> Result<(), Nvfp4Error> {
        match (a.elements, b.elements) {
            (Elements::Quantized(a), Elements::Quantized(b))
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

    /// Checks elements and global scale against the shape of a GEMM with `groups` groups, or none,
    /// and block scales in 128x4 tiles against the boundaries `tiling`.
    pub(crate) fn check(
        &self,
        argument: &'static str,
        groups: Option<usize>,
        tiling: ScaleTiling,
    ) -> Result<(), Nvfp4Error> {
        match self.elements {
            Elements::Quantized(values) if !values.is_packed() => {
                values.check(argument)?;
                values.check_no_groups(argument)?;
            }
            Elements::Quantized(packed) => {
                check_packed(argument, packed, packed.layout.format, tiling)?;
            }
            Elements::PackedMnMajor(packed) => {
                check_packed(argument, packed, Format::Nvfp4, tiling)?;
                // A rotation along N is not undone by a GEMM along K.
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

/// Checks codes and block scales of `format`, and scales in 128x4 tiles against `tiling`. If the
/// kernel reads rows of scales, the GEMM unswizzles the tiles.
fn check_packed(
    argument: &'static str,
    packed: &DeviceQuantized,
    format: Format,
    tiling: ScaleTiling,
) -> Result<(), Nvfp4Error> {
    packed.check_codes(argument, format)?;
    packed.check(argument)?;
    match packed.layout.form.has_tiles() {
        false => packed.check_compact(argument),
        true => tiling.check(argument, packed),
    }
}
