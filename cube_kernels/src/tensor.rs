//! Matrices and quantized tensors in device memory.

use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind as CubeFloat, UIntKind},
    server::Handle,
};

pub use crate::policy::AmaxGranularity;
use crate::{
    Amax, BLOCK, Nvfp4Error, Origin, QuantizedTensor, RandomStream, ScaleLayout, Usage,
    format::check_extent,
    memory::{allocate, check_memory, download, upload},
    policy::{BlockScaling, Hadamard, QuantParams, Rounding},
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

/// What the codes and block scales of an NVFP4 matrix stand for, without the factor of the tensor: code
/// times block scale, exact in bf16. It has four times the bytes of a [`DeviceQuantized`], and saves a
/// product that decodes its operands the work, once.
#[derive(Debug, Clone)]
pub struct DeviceUnscaled {
    /// The values in stored orientation, bf16: a row for each stored row, as long as the packed axis
    /// with its padding, which is zeros.
    pub values: Matrix,
    /// The largest magnitudes: `f32`, as many as `scope` says.
    pub amax: Handle,
    /// What one of them stands for.
    pub scope: AmaxGranularity,
    /// How block scales were found, which decides the range that an amax stands for.
    pub scaling: BlockScaling,
}

impl DeviceUnscaled {
    /// The copy that `packed` describes, whose codes are the memory of values.
    pub(crate) fn of(packed: DeviceQuantized) -> Self {
        let (rows, cols) = (packed.outer(), packed.blocks() * BLOCK);
        Self {
            values: Matrix {
                handle: packed.codes,
                rows,
                cols,
                dtype: FloatKind::Bf16,
            },
            amax: packed.amax,
            scope: packed.scope,
            scaling: packed.scaling,
        }
    }
}

/// A quantized copy in either form.
#[derive(Debug, Clone)]
pub enum DeviceOperand {
    /// Codes and scales.
    Packed(DeviceQuantized),
    /// Their values.
    Decoded(DeviceUnscaled),
}

impl DeviceOperand {
    /// The copy, if it is codes and scales.
    pub fn into_packed(self) -> Option<DeviceQuantized> {
        match self {
            Self::Packed(packed) => Some(packed),
            Self::Decoded(_) => None,
        }
    }

    /// The copy, if it is values.
    pub fn into_decoded(self) -> Option<DeviceUnscaled> {
        match self {
            Self::Packed(_) => None,
            Self::Decoded(decoded) => Some(decoded),
        }
    }
}

/// Which rows of a matrix belong together: they share maxima and blocks, and their copies lie one
/// after another.
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
            Self::Offsets { count, .. } => (rows + (unit - 1) * count) / unit,
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
pub const MAX_GROUPS: usize = 512;

/// An NVFP4 matrix in device memory.
///
/// Without groups the layout is that of [`QuantizedTensor`]: `outer` stored rows of `blocks` blocks.
/// With groups the copies of the groups lie one after another, each in that layout: the row-wise
/// codes and compact scales are then those of the whole matrix, a column-wise copy starts anew in
/// every group, and so does the 128x4 tiling of swizzled scales. Buffers are as large as the groups
/// may need ([`Self::code_blocks`], [`Self::scale_bytes`]).
#[derive(Debug, Clone)]
pub struct DeviceQuantized {
    /// The codes, eight to a `u32`, two words to a block.
    pub codes: Handle,
    /// The block scales, E4M3 bytes.
    pub scales: Handle,
    /// The largest magnitudes: `f32`, as many as `scope` says.
    pub amax: Handle,
    /// Rows of the source matrix, of all groups.
    pub rows: usize,
    /// Columns of the source matrix.
    pub cols: usize,
    /// The axis of the source along which it is packed.
    pub usage: Usage,
    /// Order of the block scales.
    pub layout: ScaleLayout,
    /// How block scales were found, which decides how an amax decodes.
    pub scaling: BlockScaling,
    /// What one amax stands for.
    pub scope: AmaxGranularity,
    /// The transform along the packed axis, which is padded to a multiple of its size.
    pub hadamard: Option<Hadamard>,
    /// Which rows of the source belong together.
    pub groups: Groups,
}

impl DeviceQuantized {
    /// A plain copy over existing memory: compact scales, one amax, no groups.
    pub fn plain(
        (codes, scales, amax): (Handle, Handle, Handle),
        (rows, cols): (usize, usize),
        usage: Usage,
        hadamard: Option<Hadamard>,
    ) -> Self {
        Self {
            codes,
            scales,
            amax,
            rows,
            cols,
            usage,
            layout: ScaleLayout::Compact,
            scaling: BlockScaling::Standard,
            scope: AmaxGranularity::PerTensor,
            hadamard,
            groups: Groups::One,
        }
    }

    /// Stored rows; of one group where there are several.
    pub fn outer(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).0
    }

    /// Length of the packed axis, without padding.
    pub fn inner(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).1
    }

    /// Elements to whose multiple the packed axis is padded.
    pub fn unit(&self) -> usize {
        self.hadamard
            .map_or(BLOCK, |hadamard| hadamard.size().elements())
    }

    /// Blocks in one stored row of a matrix without groups; summed over the groups along the rows, at
    /// most, for a column-wise copy with groups.
    pub fn blocks(&self) -> usize {
        let unit = self.unit();
        match self.usage {
            Usage::Rowwise => self.cols.div_ceil(unit) * (unit / BLOCK),
            Usage::Columnwise => self.groups.units(self.rows, unit) * (unit / BLOCK),
        }
    }

    /// Blocks that the codes have room for.
    pub fn code_blocks(&self) -> usize {
        self.outer() * self.blocks()
    }

    /// Bytes that the scales have room for, in their layout.
    pub fn scale_bytes(&self) -> usize {
        match (self.layout, self.usage) {
            (ScaleLayout::Compact, _) => self.code_blocks(),
            (ScaleLayout::Swizzled128x4, Usage::Rowwise) => {
                self.groups.units(self.rows, 128) * 128 * self.blocks().next_multiple_of(4)
            }
            (ScaleLayout::Swizzled128x4, Usage::Columnwise) => {
                let unit = self.unit().max(4 * BLOCK);
                let blocks = self.groups.units(self.rows, unit) * (unit / BLOCK);
                self.cols.next_multiple_of(128) * blocks
            }
        }
    }

    /// Values of `amax`.
    pub fn amax_len(&self) -> usize {
        match (self.scope, self.usage) {
            (AmaxGranularity::PerTensor, _) => self.groups.count(),
            (AmaxGranularity::PerRow, Usage::Rowwise) => self.rows,
            (AmaxGranularity::PerRow, Usage::Columnwise) => self.groups.count() * self.cols,
        }
    }

    /// Gives `codes` and `scales` memory with undefined contents.
    pub(crate) fn allocated(mut self, client: &Client) -> Self {
        self.codes = allocate(client, self.code_blocks() * 8);
        self.scales = allocate(client, self.scale_bytes());
        self
    }

    pub(crate) fn check(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        check_extent(argument, self.rows, self.cols)?;
        check_memory(argument, &self.codes, self.code_blocks() * 8)?;
        check_memory(argument, &self.scales, self.scale_bytes())?;
        check_memory(argument, &self.amax, self.amax_len() * 4)
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
        if self.layout == ScaleLayout::Compact && matches!(self.groups, Groups::One) {
            return Ok(());
        }
        Err(Nvfp4Error::value(
            argument,
            format!("{:?} scales, {} groups", self.layout, self.groups.count()),
            "compact scales, no groups",
        ))
    }

    /// Copies a host tensor to the device.
    pub fn from_host(client: &Client, packed: &QuantizedTensor) -> Self {
        let (scope, amax) = match packed.amax() {
            Amax::Tensor(amax) => (AmaxGranularity::PerTensor, amax.to_ne_bytes().to_vec()),
            Amax::PerRow(amax) => (AmaxGranularity::PerRow, bytemuck::cast_slice(amax).to_vec()),
        };
        Self {
            codes: upload(client, packed.codes()),
            scales: upload(client, packed.scales()),
            amax: upload(client, &amax),
            rows: packed.rows(),
            cols: packed.cols(),
            usage: packed.usage(),
            layout: packed.scale_layout(),
            scaling: packed.origin().scaling,
            scope,
            hadamard: packed.origin().hadamard,
            groups: Groups::One,
        }
    }

    /// Copies the tensor to the host, waiting for the device. `origin` says how it was made, which
    /// device memory does not record.
    ///
    /// # Errors
    /// When a queued kernel failed, the buffers do not fit the shape, `origin` has another transform (than
    /// one that the tensor records) or other block scales than the tensor, or there are groups: their parts are read from
    /// [`Self::codes`] and [`Self::scales`].
    pub fn to_host(&self, client: &Client, origin: Origin) -> Result<QuantizedTensor, Nvfp4Error> {
        if !matches!(self.groups, Groups::One) {
            return Err(Nvfp4Error::value("groups", "several", "one matrix"));
        }
        self.check("packed")?;
        // MS-EDEN's copies do not record their transform, which `origin` may have.
        let other_transform = self.hadamard.is_some() && origin.hadamard != self.hadamard;
        if other_transform || origin.scaling != self.scaling {
            return Err(Nvfp4Error::value(
                "origin",
                format!("{:?}, {:?}", origin.hadamard, origin.scaling),
                format!(
                    "{:?}, {:?}, those of the tensor",
                    self.hadamard, self.scaling
                ),
            ));
        }
        let amax = download(client, &self.amax, self.amax_len() * 4)?;
        let amax: Vec<f32> = amax
            .chunks_exact(4)
            .map(bytemuck::pod_read_unaligned)
            .collect();
        QuantizedTensor::from_parts(
            (self.rows, self.cols),
            self.usage,
            download(client, &self.codes, self.code_blocks() * 8)?,
            (
                self.layout,
                download(client, &self.scales, self.scale_bytes())?,
            ),
            match self.scope {
                AmaxGranularity::PerTensor => Amax::Tensor(amax[0]),
                AmaxGranularity::PerRow => Amax::PerRow(amax),
            },
            origin,
        )
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

/// How one packed copy is made on a device: [`QuantParams`], with the random offset
/// on either side.
#[derive(Debug, Clone)]
pub struct DeviceQuantParams {
    /// How elements are rounded. Four over six rounds to nearest only.
    pub rounding: DeviceRounding,
    /// The transform along the packed axis first, if any; column-wise copies only.
    pub hadamard: Option<Hadamard>,
    /// How block scales are found.
    pub scaling: BlockScaling,
    /// Order in which the block scales are stored.
    pub layout: ScaleLayout,
}

impl DeviceQuantParams {
    /// Rounding by `rounding`, and everything else plain: no transform, standard scales, compact.
    pub fn new(rounding: impl Into<DeviceRounding>) -> Self {
        Self {
            rounding: rounding.into(),
            hadamard: None,
            scaling: BlockScaling::Standard,
            layout: ScaleLayout::Compact,
        }
    }
}

impl From<QuantParams> for DeviceQuantParams {
    fn from(policy: QuantParams) -> Self {
        Self {
            rounding: policy.rounding.into(),
            hadamard: policy.hadamard,
            scaling: policy.scaling,
            layout: policy.layout,
        }
    }
}
