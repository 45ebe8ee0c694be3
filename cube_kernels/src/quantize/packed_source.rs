//! NVFP4 operands as seen by kernels: rows of blocks, along either axis of the matrix.

use cubecl::{prelude::*, server::Handle};

use super::tile::Grouping;
use crate::launch::buffer;
use crate::moe::{groups::GroupOffsets, segments::broadcast_group_values};
use crate::{
    Format, Nvfp4Error, StoredForm, Usage,
    cube::{codec::BlockFactors, scale::swizzled_at},
    tensor::{AmaxGranularity, DeviceQuantized, Groups},
};

/// Comptime configuration of a packed source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SourcePlan {
    /// True if each stored row has its own amax.
    pub per_row: bool,
    /// True if scales are in 128x4 tiles.
    pub swizzled: bool,
    /// Representation of the groups of stored rows.
    pub grouping: Grouping,
}

/// A packed matrix as `rows` stored rows of `cols` elements, in groups of stored rows.
///
/// Equally sized matrices that are packed along their rows are stored as stacked transposes, which
/// makes them groups of stored rows, too.
pub(crate) struct PackedSource<'a> {
    packed: &'a DeviceQuantized,
    /// Stored rows of all groups.
    pub rows: usize,
    /// Elements per stored row, without padding.
    pub cols: usize,
    /// Blocks per stored row, with padding.
    pub blocks: usize,
    /// Groups of stored rows.
    pub groups: Groups,
    /// Comptime configuration.
    pub plan: SourcePlan,
}

impl<'a> PackedSource<'a> {
    /// Checks `packed`, which errors name `argument`. Returns `None` if groups of different sizes
    /// are packed along their rows, since these have stored rows of different lengths.
    pub fn new(
        argument: &'static str,
        packed: &'a DeviceQuantized,
    ) -> Result<Option<Self>, Nvfp4Error> {
        packed.check_codes(argument, Format::Nvfp4)?;
        packed.check(argument)?;
        packed.groups.check(packed.rows())?;
        let (outer, inner) = (packed.outer(), packed.inner());
        let (rows, cols, blocks, groups) = match (&packed.groups, packed.usage()) {
            (Groups::Offsets { .. }, Usage::Columnwise) => return Ok(None),
            (&Groups::Batch(count), Usage::Columnwise) => (
                outer * count,
                inner / count,
                packed.blocks() / count,
                Groups::Batch(count),
            ),
            (groups, _) => (outer, inner, packed.blocks(), groups.clone()),
        };
        let plan = SourcePlan {
            per_row: packed.layout.amax == AmaxGranularity::PerRow,
            swizzled: packed.layout.form == StoredForm::Tiles,
            grouping: Grouping::of(&groups),
        };
        Ok(Some(Self {
            packed,
            rows,
            cols,
            blocks,
            groups,
            plan,
        }))
    }

    /// [`Self::new`] for kernels that need stored rows of equal length.
    pub fn even(argument: &'static str, packed: &'a DeviceQuantized) -> Result<Self, Nvfp4Error> {
        Self::new(argument, packed)?.ok_or_else(|| {
            Nvfp4Error::value(
                argument,
                "groups with offsets, packed along Usage::Columnwise",
                "such groups packed along Usage::Rowwise, or Groups::Batch",
            )
        })
    }

    /// Returns the argument of kernels that read whole blocks.
    pub fn arg(&self) -> PackedRowsLaunch {
        self.arg_with(self.amax())
    }

    /// [`Self::arg`] with other amax values.
    pub fn arg_with(&self, amax: BufferArg) -> PackedRowsLaunch {
        PackedRowsLaunch::new(self.codes(), self.scales(), amax, self.blocks, self.range())
    }

    /// Returns the codes, one block per item.
    pub fn codes(&self) -> BufferArg {
        // SAFETY: checked in `new`.
        unsafe { buffer(&self.packed.codes, self.rows * self.blocks) }
    }

    /// Returns the scale bytes.
    pub fn scales(&self) -> BufferArg {
        // SAFETY: checked in `new`.
        unsafe { buffer(&self.packed.scales, self.packed.scale_bytes()) }
    }

    /// Returns the amax values as stored.
    pub fn amax(&self) -> BufferArg {
        // SAFETY: checked in `new`.
        unsafe { buffer(&self.packed.amax, self.packed.amax_len()) }
    }

    /// Returns a valid buffer as a placeholder for arguments that are not read.
    pub fn unread(&self) -> &Handle {
        &self.packed.amax
    }

    /// Returns the divisor of an amax.
    pub fn range(&self) -> f32 {
        self.packed.layout.scaling.range()
    }

    /// Returns the amax values for kernels that handle rows but not groups.
    pub fn row_maxima(&self, client: &Client) -> Result<RowMaxima, Nvfp4Error> {
        let packed = self.packed;
        let own = |rows| RowMaxima {
            amax: packed.amax.clone(),
            len: packed.amax_len(),
            rows,
        };
        Ok(match (packed.layout.amax, &self.groups) {
            (AmaxGranularity::PerRow, _) => own(Some(1)),
            (AmaxGranularity::PerTensor, Groups::One) => own(None),
            (AmaxGranularity::PerTensor, Groups::Batch(count)) => {
                own(Some((self.rows / count).max(1)))
            }
            (AmaxGranularity::PerTensor, Groups::Offsets { offsets, count }) => {
                let groups = GroupOffsets::new(offsets.clone(), *count)?;
                RowMaxima {
                    amax: broadcast_group_values(client, &packed.amax, &groups, self.rows)?,
                    len: self.rows,
                    rows: Some(1),
                }
            }
        })
    }
}

/// Amax values in device memory, with the number of rows per amax; `None` if one applies to all
/// rows.
pub(crate) struct RowMaxima {
    amax: Handle,
    len: usize,
    pub rows: Option<usize>,
}

impl RowMaxima {
    pub fn arg(&self) -> BufferArg {
        // SAFETY: as many as were checked, or allocated.
        unsafe { buffer(&self.amax, self.len) }
    }

    /// Returns the number of items per amax, for rows of `per_row` items.
    pub fn items(&self, per_row: usize) -> usize {
        (self.rows.unwrap_or(1) * per_row).max(1)
    }
}

/// Returns the index of the scale byte of block `block` of stored row `row`; each row has `blocks`
/// blocks. `tiled` is the row's index if every group is padded to 128 rows.
#[cube]
pub fn scale_at(
    row: usize,
    tiled: usize,
    block: usize,
    blocks: usize,
    #[comptime] swizzled: bool,
) -> usize {
    if comptime!(swizzled) {
        swizzled_at(tiled, block, blocks.div_ceil(4))
    } else {
        row * blocks + block
    }
}

/// Stored rows of an NVFP4 matrix in a kernel that reads whole blocks.
#[derive(CubeType, CubeLaunch)]
pub struct PackedRows {
    /// Codes, one block per item.
    pub codes: Box<[Vector<u32, Const<2>>]>,
    /// Scale bytes.
    pub scales: Box<[u8]>,
    /// Amax values.
    pub amax: Box<[f32]>,
    /// Blocks per stored row, with padding.
    pub blocks: usize,
    /// Divisor of an amax.
    pub range: f32,
}

/// Codes of a block with their factors.
#[derive(CubeType)]
pub struct PackedBlock {
    /// Codes, eight per word.
    pub words: Vector<u32, Const<2>>,
    /// Factors of the block and of the tensor.
    pub factors: BlockFactors,
}

#[cube]
impl PackedRows {
    /// Returns the factor of the first amax, which applies to all rows if there is only one.
    pub fn factor(&self) -> f32 {
        self.amax[0] / self.range
    }

    /// Returns the factor of the rows of group `group`: `all` if there is only one, or if each row
    /// has its own.
    pub fn factor_of(&self, group: usize, all: f32, #[comptime] plan: SourcePlan) -> f32 {
        if comptime!(plan.grouping == Grouping::One || plan.per_row) {
            all
        } else {
            self.amax[group] / self.range
        }
    }

    /// Loads block `block` of stored row `row`, whose index is `tiled` if every group is padded to
    /// 128 rows; zeros if `inside` is false. `own` is the factor of its group.
    pub fn load(
        &self,
        row: usize,
        tiled: usize,
        block: usize,
        own: f32,
        inside: bool,
        #[comptime] plan: SourcePlan,
    ) -> PackedBlock {
        let mut words = Vector::<u32, Const<2>>::new(0u32);
        let mut scale = 0u32;
        let mut factor = own;
        if inside {
            words = self.codes[row * self.blocks + block];
            let byte = scale_at(row, tiled, block, self.blocks, plan.swizzled);
            scale = u32::cast_from(self.scales[byte]);
            if comptime!(plan.per_row) {
                factor = self.amax[row] / self.range;
            }
        } else {
            // Zero for missing elements, even if the factor is NaN or infinite.
            factor = 0.0f32;
        }
        PackedBlock {
            words,
            factors: BlockFactors::new(scale, factor),
        }
    }
}
