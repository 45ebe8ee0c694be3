//! Matrices and quantized tensors in device memory.

use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind as CubeFloat, UIntKind},
    server::Handle,
};

pub(crate) use crate::AmaxGranularity;
use crate::{
    Amax, Format, Layout, Nvfp4Error, Origin, QuantizedTensor, Usage,
    format::{check_extent, padding::padded_bound},
    memory::{allocate, check_memory, download, upload},
};

/// Element types of matrices that kernels read and write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FloatKind {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl FloatKind {
    /// Returns the size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Returns the type that kernels load and store. A bf16 is loaded as 16 bits and converted by
    /// integer arithmetic: CubeCL's CPU runtime has no
    /// conversion to bf16, and this keeps the bits of NaN identical everywhere.
    pub const fn storage_type(self) -> ElemType {
        match self {
            Self::F32 => ElemType::Float(CubeFloat::F32),
            Self::F16 => ElemType::Float(CubeFloat::F16),
            Self::Bf16 => ElemType::UInt(UIntKind::U16),
        }
    }
}

/// A dense matrix in device memory: contiguous, row-major.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Memory of `rows * cols` elements.
    pub handle: Handle,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Element type.
    pub dtype: FloatKind,
}

impl Matrix {
    /// Returns a matrix over existing memory.
    ///
    /// # Errors
    /// Returns an error if the memory is smaller than the matrix.
    pub fn new(
        handle: Handle,
        rows: usize,
        cols: usize,
        dtype: FloatKind,
    ) -> Result<Self, Nvfp4Error> {
        let matrix = Self {
            handle,
            rows,
            cols,
            dtype,
        };
        matrix.check("handle")?;
        Ok(matrix)
    }

    /// Allocates a matrix with undefined contents.
    pub fn empty(client: &Client, rows: usize, cols: usize, dtype: FloatKind) -> Self {
        Self {
            handle: allocate(client, rows * cols * dtype.size()),
            rows,
            cols,
            dtype,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn check(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        check_extent(argument, self.rows, self.cols)?;
        check_memory(argument, &self.handle, self.len() * self.dtype.size())
    }
}

/// Grouping of the rows of a matrix. The rows of a group share amax values and blocks, and the
/// groups' quantized tensors follow one another in memory.
#[derive(Debug, Clone, Default)]
pub enum Groups {
    /// One group of all rows.
    #[default]
    One,
    /// This many matrices with equal row counts, stacked vertically: 3-D weights.
    Batch(usize),
    /// Groups of any size, including 0: tokens sorted by expert.
    Offsets {
        /// `count + 1` ascending `u32` row numbers in device memory: group `g` contains the rows
        /// from entry `g` up to entry `g + 1`. Rows from the last entry on belong to no group.
        offsets: Handle,
        /// Number of groups.
        count: usize,
    },
}

impl Groups {
    /// Returns the number of groups.
    pub fn count(&self) -> usize {
        match self {
            Self::One => 1,
            Self::Batch(count) | Self::Offsets { count, .. } => *count,
        }
    }

    /// Returns the largest possible sum over groups of `ceil(rows of the group / unit)`, for `rows`
    /// rows in total: the room a buffer needs for any group sizes.
    pub(crate) fn units(&self, rows: usize, unit: usize) -> usize {
        match self {
            Self::One => rows.div_ceil(unit),
            Self::Batch(count) => count * (rows / (*count).max(1)).div_ceil(unit),
            Self::Offsets { count, .. } => padded_bound(rows, *count, unit) / unit,
        }
    }

    pub(crate) fn check(&self, rows: usize) -> Result<(), Nvfp4Error> {
        match self {
            Self::One => Ok(()),
            Self::Batch(count) => {
                if *count > 0 && rows.is_multiple_of(*count) {
                    return Ok(());
                }
                Err(Nvfp4Error::shape(
                    "groups",
                    format!("{count} matrices in {rows} rows"),
                    "a number that divides the rows",
                ))
            }
            Self::Offsets { offsets, count } => {
                if *count == 0 || *count > MAX_GROUPS {
                    return Err(Nvfp4Error::value(
                        "groups",
                        format!("{count} groups"),
                        format!("1 to {MAX_GROUPS}"),
                    ));
                }
                check_memory("groups.offsets", offsets, (count + 1) * 4)
            }
        }
    }
}

/// Largest number of groups with offsets in device memory: kernels keep the offsets in shared
/// memory.
const MAX_GROUPS: usize = 512;

/// A quantized matrix in device memory.
///
/// Without groups the buffers have the layout of [`QuantizedTensor`]: `outer` stored rows of
/// `blocks` blocks. With groups the tensors of the groups follow one another, each in that layout:
/// rowwise codes and compact scales are then those of the whole matrix, whereas a columnwise tensor
/// and the 128x4 tiling of swizzled scales start anew in every group. Buffers have the size that
/// the groups may need at most ([`Self::code_bytes`], [`Self::scale_bytes`]).
#[derive(Debug, Clone)]
pub struct DeviceQuantized {
    /// Layout of the buffers; its `rows` counts the rows of all groups.
    pub layout: Layout,
    /// Grouping of the rows of the source.
    pub groups: Groups,
    /// Codes, the first element in the lowest bits; or bf16 values.
    pub codes: Handle,
    /// Block scales, one byte each. Not read if values are stored.
    pub scales: Handle,
    /// Amax values, `f32`. Not read if the format has no global scale.
    pub amax: Handle,
}

impl DeviceQuantized {
    /// Returns a tensor over existing memory, `(codes, scales, amax)`, without groups.
    pub fn new(layout: Layout, (codes, scales, amax): (Handle, Handle, Handle)) -> Self {
        Self {
            layout,
            groups: Groups::One,
            codes,
            scales,
            amax,
        }
    }

    /// Allocates codes and scales with undefined contents for `layout` and `groups`, with the given
    /// amax.
    pub(crate) fn empty(client: &Client, layout: Layout, groups: Groups, amax: &Handle) -> Self {
        let codes = allocate(client, code_bytes(&layout, &groups));
        Self {
            scales: match layout.form.is_packed() {
                true => allocate(client, scale_bytes(&layout, &groups)),
                false => codes.clone(),
            },
            amax: amax.clone(),
            codes,
            layout,
            groups,
        }
    }

    /// Like [`Self::empty`], for a format without a global scale.
    pub(crate) fn empty_unscaled(client: &Client, layout: Layout, groups: Groups) -> Self {
        let scales = allocate(client, scale_bytes(&layout, &groups));
        Self {
            codes: allocate(client, code_bytes(&layout, &groups)),
            amax: scales.clone(),
            scales,
            layout,
            groups,
        }
    }

    /// Returns the number of rows of the source matrix, over all groups.
    pub fn rows(&self) -> usize {
        self.layout.rows
    }

    /// Returns the number of columns of the source matrix.
    pub fn cols(&self) -> usize {
        self.layout.cols
    }

    /// Returns the axis of the source along which blocks lie.
    pub fn usage(&self) -> Usage {
        self.layout.usage
    }

    /// Returns the number of stored rows; with several groups, that of one group.
    pub fn outer(&self) -> usize {
        self.layout.outer()
    }

    /// Returns the length of a stored row, without padding.
    pub fn inner(&self) -> usize {
        self.layout.inner()
    }

    /// Returns the number of elements to a multiple of which stored rows are padded.
    pub fn unit(&self) -> usize {
        self.layout.unit()
    }

    /// Returns the number of blocks per stored row. For a columnwise tensor with groups, returns
    /// the largest possible sum over the groups along the rows.
    pub fn blocks(&self) -> usize {
        blocks(&self.layout, &self.groups)
    }

    /// Returns the number of blocks that the code buffer has room for.
    pub fn code_blocks(&self) -> usize {
        self.outer() * self.blocks()
    }

    /// Returns the size in bytes of the buffer of codes or bf16 values.
    pub fn code_bytes(&self) -> usize {
        code_bytes(&self.layout, &self.groups)
    }

    /// Returns the size in bytes of the scale buffer, in its layout.
    pub fn scale_bytes(&self) -> usize {
        scale_bytes(&self.layout, &self.groups)
    }

    /// Returns the number of amax values.
    pub fn amax_len(&self) -> usize {
        amax_len(&self.layout, &self.groups)
    }

    /// True if codes and scales are stored, not their bf16 products.
    pub fn is_packed(&self) -> bool {
        self.layout.form.is_packed()
    }

    /// Returns the bf16 values in stored orientation, including padding, if they are stored in
    /// order.
    pub fn values(&self) -> Option<Matrix> {
        (!self.is_packed()).then(|| Matrix {
            handle: self.codes.clone(),
            rows: self.outer(),
            cols: self.blocks() * self.layout.format.block(),
            dtype: FloatKind::Bf16,
        })
    }

    pub(crate) fn check(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        check_extent(argument, self.rows(), self.cols())?;
        check_memory(argument, &self.codes, self.code_bytes())?;
        check_memory(argument, &self.scales, self.scale_bytes())?;
        check_memory(argument, &self.amax, self.amax_len() * 4)
    }

    /// Returns an error unless the tensor consists of codes in the format `format`.
    pub(crate) fn check_codes(
        &self,
        argument: &'static str,
        format: Format,
    ) -> Result<(), Nvfp4Error> {
        let Layout {
            format: found,
            form,
            ..
        } = self.layout;
        if found == format && form.is_packed() {
            return Ok(());
        }
        Err(Nvfp4Error::value(
            argument,
            format!("{found:?} as {form:?}"),
            format!("{format:?} as codes"),
        ))
    }

    /// Returns an error if there are groups.
    pub(crate) fn check_no_groups(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        match self.groups {
            Groups::One => Ok(()),
            _ => Err(Nvfp4Error::value(
                argument,
                format!("{} groups", self.groups.count()),
                "no groups",
            )),
        }
    }

    /// Returns an error unless block scales are in rows and there are no groups.
    pub(crate) fn check_compact(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        let form = self.layout.form;
        if !form.has_tiles() && matches!(self.groups, Groups::One) {
            return Ok(());
        }
        Err(Nvfp4Error::value(
            argument,
            format!("{form:?}, {} groups", self.groups.count()),
            "block scales in rows, no groups",
        ))
    }

    /// Copies a host tensor to the device.
    pub fn from_host(client: &Client, tensor: &QuantizedTensor) -> Self {
        let amax = bytemuck::cast_slice(tensor.amax().values());
        Self::new(
            *tensor.layout(),
            (
                upload(client, tensor.codes()),
                upload(client, tensor.scales()),
                upload(client, amax),
            ),
        )
    }

    /// Copies the tensor to the host, waiting for the device. `origin` describes how it was
    /// quantized, which device memory does not record.
    ///
    /// # Errors
    /// Returns an error if a queued kernel failed, the buffers do not fit the shape, `origin`
    /// cannot yield such a tensor, values are stored instead of codes, or there are groups. Read
    /// groups from [`Self::codes`] and [`Self::scales`] instead.
    pub fn to_host(&self, client: &Client, origin: Origin) -> Result<QuantizedTensor, Nvfp4Error> {
        self.check_no_groups("self")?;
        self.check("self")?;
        let amax = download(client, &self.amax, self.amax_len() * 4)?;
        let amax = amax.chunks_exact(4).map(bytemuck::pod_read_unaligned);
        QuantizedTensor::from_parts(
            self.layout,
            download(client, &self.codes, self.code_bytes())?,
            download(client, &self.scales, self.scale_bytes())?,
            Amax::new(&self.layout, amax.collect()),
            origin,
        )
    }
}

/// See [`DeviceQuantized::blocks`].
fn blocks(layout: &Layout, groups: &Groups) -> usize {
    let unit = layout.unit();
    match layout.usage {
        Usage::Rowwise => layout.blocks(),
        Usage::Columnwise => groups.units(layout.rows, unit) * (unit / layout.format.block()),
    }
}

/// See [`DeviceQuantized::code_bytes`].
fn code_bytes(layout: &Layout, groups: &Groups) -> usize {
    layout.outer() * blocks(layout, groups) * layout.block_bytes()
}

/// See [`DeviceQuantized::scale_bytes`].
fn scale_bytes(layout: &Layout, groups: &Groups) -> usize {
    let block = layout.format.block();
    match (layout.form.has_tiles(), layout.usage) {
        _ if !layout.form.is_packed() => 0,
        (false, _) => layout.outer() * blocks(layout, groups),
        (true, Usage::Rowwise) => {
            let blocks = layout.blocks().next_multiple_of(4);
            groups.units(layout.rows, 128) * 128 * blocks
        }
        (true, Usage::Columnwise) => {
            let unit = layout.unit().max(4 * block);
            let blocks = groups.units(layout.rows, unit) * (unit / block);
            layout.cols.next_multiple_of(128) * blocks
        }
    }
}

/// See [`DeviceQuantized::amax_len`].
pub(crate) fn amax_len(layout: &Layout, groups: &Groups) -> usize {
    match (layout.amax, layout.usage) {
        _ if !layout.format.has_global_scale() => 0,
        (AmaxGranularity::PerTensor, _) => groups.count(),
        (AmaxGranularity::PerRow, Usage::Rowwise) => layout.rows,
        (AmaxGranularity::PerRow, Usage::Columnwise) => groups.count() * layout.cols,
    }
}
