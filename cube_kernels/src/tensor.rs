//! Matrices and quantized tensors in device memory.

use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind as CubeFloat, UIntKind},
    server::Handle,
};

pub use crate::policy::AmaxGranularity;
use crate::{
    Amax, Format, Layout, Nvfp4Error, Origin, QuantizedTensor, RandomStream, ScaleLayout, Storage,
    Usage,
    format::{check_extent, padding::padded_bound},
    memory::{allocate, check_memory, download, upload},
    moe::EarlierGroups,
    policy::{BlockScaling, Hadamard, Nvfp4Params, Rounding},
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
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The type that kernels load and store. A bf16 travels as its 16 bits and is converted by
    /// integer arithmetic ([`cube::codec`](crate::cube::codec)): CubeCL's CPU runtime has no
    /// conversion to bf16, and the bits of a NaN are the same everywhere this way.
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
    /// The memory, `rows * cols` elements.
    pub handle: Handle,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Element type.
    pub dtype: FloatKind,
}

impl Matrix {
    /// A matrix over existing memory.
    ///
    /// # Errors
    /// When the memory is smaller than the matrix.
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

    /// Memory for a matrix, with undefined contents.
    pub fn empty(client: &Client, rows: usize, cols: usize, dtype: FloatKind) -> Self {
        Self {
            handle: allocate(client, rows * cols * dtype.size()),
            rows,
            cols,
            dtype,
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn check(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        check_extent(argument, self.rows, self.cols)?;
        check_memory(argument, &self.handle, self.len() * self.dtype.size())
    }
}

/// Which rows of a matrix belong together: they share amax values and blocks, and their copies lie
/// one after another.
#[derive(Debug, Clone, Default)]
pub enum Groups {
    /// All of them.
    #[default]
    One,
    /// This many matrices of equally many rows, one below the other: 3-D weights.
    Batch(usize),
    /// Groups of any sizes, 0 included: tokens sorted by expert.
    Offsets {
        /// `count + 1` ascending `u32` row numbers in device memory: group `g` is the rows from
        /// entry `g` to entry `g + 1`. Rows behind the last entry belong to nobody.
        offsets: Handle,
        /// Number of groups.
        count: usize,
    },
}

impl Groups {
    /// Groups of a number that is known here.
    pub fn count(&self) -> usize {
        match self {
            Self::One => 1,
            Self::Batch(count) | Self::Offsets { count, .. } => *count,
        }
    }

    /// Of `rows` rows in all, the largest sum over groups of `ceil(rows of the group / unit)`: what
    /// a buffer must have room for, whatever the sizes of the groups turn out to be.
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

/// The most groups with offsets in device memory: their starts are kept in shared memory.
const MAX_GROUPS: usize = 512;

/// A quantized matrix in device memory.
///
/// Without groups the buffers are those of [`QuantizedTensor`]: `outer` stored rows of `blocks`
/// blocks. With groups the tensors of the groups lie one after another, each in that layout: the
/// rowwise codes and compact scales are then those of the whole matrix, a columnwise tensor starts
/// anew in every group, and so does the 128x4 tiling of swizzled scales. Buffers are as large as
/// the groups may need ([`Self::code_bytes`], [`Self::scale_bytes`]).
#[derive(Debug, Clone)]
pub struct DeviceQuantized {
    /// What the buffers mean; `rows` are those of all groups.
    pub layout: Layout,
    /// Which rows of the source belong together.
    pub groups: Groups,
    /// The codes, the first element in the lowest bits; or the bf16 values.
    pub codes: Handle,
    /// The block scales, a byte each. Not read where values are stored.
    pub scales: Handle,
    /// The largest magnitudes, `f32`. Not read where the format has no global scale.
    pub amax: Handle,
}

impl DeviceQuantized {
    /// A tensor over existing memory, `(codes, scales, amax)`, without groups.
    pub fn new(layout: Layout, (codes, scales, amax): (Handle, Handle, Handle)) -> Self {
        Self {
            layout,
            groups: Groups::One,
            codes,
            scales,
            amax,
        }
    }

    /// Codes and scales with undefined contents for `layout` and `groups`, and the given amax.
    pub(crate) fn empty(client: &Client, layout: Layout, groups: Groups, amax: &Handle) -> Self {
        let codes = allocate(client, code_bytes(&layout, &groups));
        Self {
            scales: match layout.storage {
                Storage::Packed => allocate(client, scale_bytes(&layout, &groups)),
                Storage::Bf16Unscaled => codes.clone(),
            },
            amax: amax.clone(),
            codes,
            layout,
            groups,
        }
    }

    /// [`Self::empty`] in a format without a global scale.
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

    /// Rows of the source matrix, of all groups.
    pub fn rows(&self) -> usize {
        self.layout.rows
    }

    /// Columns of the source matrix.
    pub fn cols(&self) -> usize {
        self.layout.cols
    }

    /// The axis of the source along which blocks lie.
    pub fn usage(&self) -> Usage {
        self.layout.usage
    }

    /// Stored rows; of one group where there are several.
    pub fn outer(&self) -> usize {
        self.layout.outer()
    }

    /// Length of a stored row, without padding.
    pub fn inner(&self) -> usize {
        self.layout.inner()
    }

    /// Elements to whose multiple stored rows are padded.
    pub fn unit(&self) -> usize {
        self.layout.unit()
    }

    /// Blocks in one stored row of a matrix without groups; summed over the groups along the rows,
    /// at most, for a columnwise tensor with groups.
    pub fn blocks(&self) -> usize {
        blocks(&self.layout, &self.groups)
    }

    /// Blocks that the codes have room for.
    pub fn code_blocks(&self) -> usize {
        self.outer() * self.blocks()
    }

    /// Bytes that the codes, or the bf16 values, have room for.
    pub fn code_bytes(&self) -> usize {
        code_bytes(&self.layout, &self.groups)
    }

    /// Bytes that the scales have room for, in their order.
    pub fn scale_bytes(&self) -> usize {
        scale_bytes(&self.layout, &self.groups)
    }

    /// Number of amax values.
    pub fn amax_len(&self) -> usize {
        amax_len(&self.layout, &self.groups)
    }

    /// Whether codes and scales are stored, and not their products.
    pub fn is_packed(&self) -> bool {
        self.layout.storage == Storage::Packed
    }

    /// The bf16 values in stored orientation, padding included, where these are stored in order.
    pub fn values(&self) -> Option<Matrix> {
        (self.layout.storage == Storage::Bf16Unscaled).then(|| Matrix {
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

    /// An error unless these are codes in the format `format`.
    pub(crate) fn check_codes(
        &self,
        argument: &'static str,
        format: Format,
    ) -> Result<(), Nvfp4Error> {
        let (found, storage) = (self.layout.format, self.layout.storage);
        if found == format && storage == Storage::Packed {
            return Ok(());
        }
        Err(Nvfp4Error::value(
            argument,
            format!("{found:?} as {storage:?}"),
            format!("{format:?} as {:?}", Storage::Packed),
        ))
    }

    /// An error unless there are no groups.
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

    /// An error unless scales are compact and there are no groups.
    pub(crate) fn check_compact(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        let order = self.layout.scale_layout;
        if order == ScaleLayout::Compact && matches!(self.groups, Groups::One) {
            return Ok(());
        }
        Err(Nvfp4Error::value(
            argument,
            format!("{order:?} scales, {} groups", self.groups.count()),
            "compact scales, no groups",
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

    /// Copies the tensor to the host, waiting for the device. `origin` says how it was made, which
    /// device memory does not record.
    ///
    /// # Errors
    /// When a queued kernel failed, the buffers do not fit the shape, `origin` is no way to make
    /// such a tensor, values are stored instead of codes, or there are groups: their parts are read
    /// from [`Self::codes`] and [`Self::scales`].
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

/// [`DeviceQuantized::blocks`].
fn blocks(layout: &Layout, groups: &Groups) -> usize {
    let unit = layout.unit();
    match layout.usage {
        Usage::Rowwise => layout.blocks(),
        Usage::Columnwise => groups.units(layout.rows, unit) * (unit / layout.format.block()),
    }
}

/// [`DeviceQuantized::code_bytes`].
fn code_bytes(layout: &Layout, groups: &Groups) -> usize {
    layout.outer() * blocks(layout, groups) * layout.block_bytes()
}

/// [`DeviceQuantized::scale_bytes`].
fn scale_bytes(layout: &Layout, groups: &Groups) -> usize {
    let block = layout.format.block();
    match (layout.storage, layout.scale_layout, layout.usage) {
        (Storage::Bf16Unscaled, ..) => 0,
        (_, ScaleLayout::Compact, _) => layout.outer() * blocks(layout, groups),
        (_, ScaleLayout::Swizzled128x4, Usage::Rowwise) => {
            let blocks = layout.blocks().next_multiple_of(4);
            groups.units(layout.rows, 128) * 128 * blocks
        }
        (_, ScaleLayout::Swizzled128x4, Usage::Columnwise) => {
            let unit = layout.unit().max(4 * block);
            let blocks = groups.units(layout.rows, unit) * (unit / block);
            layout.cols.next_multiple_of(128) * blocks
        }
    }
}

/// [`DeviceQuantized::amax_len`].
pub(crate) fn amax_len(layout: &Layout, groups: &Groups) -> usize {
    match (layout.amax, layout.usage) {
        _ if !layout.format.has_global_scale() => 0,
        (AmaxGranularity::PerTensor, _) => groups.count(),
        (AmaxGranularity::PerRow, Usage::Rowwise) => layout.rows,
        (AmaxGranularity::PerRow, Usage::Columnwise) => groups.count() * layout.cols,
    }
}

/// How a kernel rounds, with the random offset on either side.
#[derive(Debug, Clone)]
pub enum DeviceRounding {
    /// To nearest, ties to even.
    Nearest,
    /// Stochastically, with the offset of the stream as a plain argument.
    Stochastic(RandomStream),
    /// Stochastically, at the offset of the stream plus the one in device memory (two `u32`, low
    /// word first). A captured graph that advances the buffer draws fresh bits at each replay.
    StochasticAt(RandomStream, Handle),
}

impl From<Rounding> for DeviceRounding {
    fn from(rounding: Rounding) -> Self {
        match rounding {
            Rounding::Nearest => Self::Nearest,
            Rounding::Stochastic(stream) => Self::Stochastic(stream),
        }
    }
}

/// How one packed copy is made on a device: [`Nvfp4Params`], with the random offset
/// on either side.
#[derive(Debug, Clone)]
pub struct DeviceNvfp4Params {
    /// How elements are rounded. Four over six rounds to nearest only.
    pub rounding: DeviceRounding,
    /// The transform along the contraction first, if any; columnwise tensors only.
    pub hadamard: Option<Hadamard>,
    /// How block scales are found.
    pub scaling: BlockScaling,
    /// Order in which the block scales are stored.
    pub layout: ScaleLayout,
    /// Pad the contraction of a columnwise tensor with zeros to whole 128x4 tiles of scales, 64
    /// elements, so that any number of tokens is one that FP4 tensor cores take. The result is that
    /// of a matrix with so many more rows of zeros, but for the order of random bits, which is that
    /// of the matrix as it is. Needs [`ScaleLayout::Swizzled128x4`].
    pub whole_tiles: bool,
    /// The groups of rows that stand before those of the matrix in the logical tensor, for matrices
    /// whose groups have offsets: stochastic rounding numbers blocks behind theirs.
    pub earlier: Option<EarlierGroups>,
}

impl DeviceNvfp4Params {
    /// Rounding by `rounding`, and everything else plain: no transform, standard scales, compact.
    pub fn new(rounding: impl Into<DeviceRounding>) -> Self {
        Self {
            rounding: rounding.into(),
            hadamard: None,
            scaling: BlockScaling::Standard,
            layout: ScaleLayout::Compact,
            whole_tiles: false,
            earlier: None,
        }
    }

    /// With block scales in 128x4 tiles, and the contraction of a columnwise tensor padded to whole
    /// ones: see [`Self::whole_tiles`].
    pub fn in_whole_tiles(self) -> Self {
        Self {
            layout: ScaleLayout::Swizzled128x4,
            whole_tiles: true,
            ..self
        }
    }
}

impl From<Nvfp4Params> for DeviceNvfp4Params {
    fn from(policy: Nvfp4Params) -> Self {
        Self {
            rounding: policy.rounding.into(),
            hadamard: policy.hadamard,
            scaling: policy.scaling,
            layout: policy.layout,
            whole_tiles: false,
            earlier: None,
        }
    }
}
