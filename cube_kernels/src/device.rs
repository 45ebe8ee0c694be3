//! Tensors on a device, and what the device can do.

use cubecl::{
    client::Client,
    ir::{
        AddressType, ElemType, FloatKind as CubeFloat, UIntKind,
        features::{MmaConfig, ScaledMmaConfig},
    },
    server::Handle,
};

use crate::{
    Amax, BLOCK, Nvfp4Error, Origin, PackedAxis, PackedTensor, RandomStream, ScaleLayout,
    cube::codec::Conversion,
    format::check_extent,
    policy::{BlockScaling, CopyPolicy, Hadamard, Rounding},
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
/// times block scale, exact in bf16. It has four times the bytes of a [`DevicePacked`], and saves a
/// product that decodes its operands the work, once.
#[derive(Debug, Clone)]
pub struct DeviceDecoded {
    /// The values in stored orientation, bf16: a row for each stored row, as long as the packed axis
    /// with its padding, which is zeros.
    pub values: Matrix,
    /// The largest magnitudes: `f32`, as many as `scope` says.
    pub amax: Handle,
    /// What one of them stands for.
    pub scope: AmaxScope,
    /// How block scales were found, which decides the range that an amax stands for.
    pub scaling: BlockScaling,
}

impl DeviceDecoded {
    /// The copy that `packed` describes, whose codes are the memory of values.
    pub(crate) fn of(packed: DevicePacked) -> Self {
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
    Packed(DevicePacked),
    /// Their values.
    Decoded(DeviceDecoded),
}

impl DeviceOperand {
    /// The copy, if it is codes and scales.
    pub fn into_packed(self) -> Option<DevicePacked> {
        match self {
            Self::Packed(packed) => Some(packed),
            Self::Decoded(_) => None,
        }
    }

    /// The copy, if it is values.
    pub fn into_decoded(self) -> Option<DeviceDecoded> {
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

/// What one amax in device memory stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AmaxScope {
    /// Each group of rows has one; so has a matrix that is one group.
    #[default]
    Group,
    /// Each stored row has one: a row of the source in the row-wise copy (per token), a column of
    /// each group in the column-wise one.
    Outer,
}

/// An NVFP4 matrix in device memory.
///
/// Without groups the layout is that of [`PackedTensor`]: `outer` stored rows of `blocks` blocks.
/// With groups the copies of the groups lie one after another, each in that layout: the row-wise
/// codes and compact scales are then those of the whole matrix, a column-wise copy starts anew in
/// every group, and so does the 128x4 tiling of swizzled scales. Buffers are as large as the groups
/// may need ([`Self::code_blocks`], [`Self::scale_bytes`]).
#[derive(Debug, Clone)]
pub struct DevicePacked {
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
    pub axis: PackedAxis,
    /// Order of the block scales.
    pub layout: ScaleLayout,
    /// How block scales were found, which decides how an amax decodes.
    pub scaling: BlockScaling,
    /// What one amax stands for.
    pub scope: AmaxScope,
    /// The transform along the packed axis, which is padded to a multiple of its size.
    pub hadamard: Option<Hadamard>,
    /// Which rows of the source belong together.
    pub groups: Groups,
}

impl DevicePacked {
    /// A plain copy over existing memory: compact scales, one amax, no groups.
    pub fn plain(
        (codes, scales, amax): (Handle, Handle, Handle),
        (rows, cols): (usize, usize),
        axis: PackedAxis,
        hadamard: Option<Hadamard>,
    ) -> Self {
        Self {
            codes,
            scales,
            amax,
            rows,
            cols,
            axis,
            layout: ScaleLayout::Compact,
            scaling: BlockScaling::Standard,
            scope: AmaxScope::Group,
            hadamard,
            groups: Groups::One,
        }
    }

    /// Stored rows; of one group where there are several.
    pub fn outer(&self) -> usize {
        self.axis.stored_shape(self.rows, self.cols).0
    }

    /// Length of the packed axis, without padding.
    pub fn inner(&self) -> usize {
        self.axis.stored_shape(self.rows, self.cols).1
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
        match self.axis {
            PackedAxis::Cols => self.cols.div_ceil(unit) * (unit / BLOCK),
            PackedAxis::Rows => self.groups.units(self.rows, unit) * (unit / BLOCK),
        }
    }

    /// Blocks that the codes have room for.
    pub fn code_blocks(&self) -> usize {
        self.outer() * self.blocks()
    }

    /// Bytes that the scales have room for, in their layout.
    pub fn scale_bytes(&self) -> usize {
        match (self.layout, self.axis) {
            (ScaleLayout::Compact, _) => self.code_blocks(),
            (ScaleLayout::Swizzled128x4, PackedAxis::Cols) => {
                self.groups.units(self.rows, 128) * 128 * self.blocks().next_multiple_of(4)
            }
            (ScaleLayout::Swizzled128x4, PackedAxis::Rows) => {
                let unit = self.unit().max(4 * BLOCK);
                let blocks = self.groups.units(self.rows, unit) * (unit / BLOCK);
                self.cols.next_multiple_of(128) * blocks
            }
        }
    }

    /// Values of `amax`.
    pub fn amax_len(&self) -> usize {
        match (self.scope, self.axis) {
            (AmaxScope::Group, _) => self.groups.count(),
            (AmaxScope::Outer, PackedAxis::Cols) => self.rows,
            (AmaxScope::Outer, PackedAxis::Rows) => self.groups.count() * self.cols,
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
    pub fn from_host(client: &Client, packed: &PackedTensor) -> Self {
        let (scope, amax) = match packed.amax() {
            Amax::Tensor(amax) => (AmaxScope::Group, amax.to_ne_bytes().to_vec()),
            Amax::PerOuter(amax) => (AmaxScope::Outer, bytemuck::cast_slice(amax).to_vec()),
        };
        Self {
            codes: upload(client, packed.codes()),
            scales: upload(client, packed.scales()),
            amax: upload(client, &amax),
            rows: packed.rows(),
            cols: packed.cols(),
            axis: packed.axis(),
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
    pub fn to_host(&self, client: &Client, origin: Origin) -> Result<PackedTensor, Nvfp4Error> {
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
        PackedTensor::from_parts(
            (self.rows, self.cols),
            self.axis,
            download(client, &self.codes, self.code_blocks() * 8)?,
            (
                self.layout,
                download(client, &self.scales, self.scale_bytes())?,
            ),
            match self.scope {
                AmaxScope::Group => Amax::Tensor(amax[0]),
                AmaxScope::Outer => Amax::PerOuter(amax),
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

/// How one packed copy is made on a device: [`CopyPolicy`], with the random offset
/// on either side.
#[derive(Debug, Clone)]
pub struct DeviceCopy {
    /// How elements are rounded. Four over six rounds to nearest only.
    pub rounding: DeviceRounding,
    /// The transform along the packed axis first, if any; column-wise copies only.
    pub hadamard: Option<Hadamard>,
    /// How block scales are found.
    pub scaling: BlockScaling,
    /// Order in which the block scales are stored.
    pub layout: ScaleLayout,
}

impl DeviceCopy {
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

impl From<CopyPolicy> for DeviceCopy {
    fn from(policy: CopyPolicy) -> Self {
        Self {
            rounding: policy.rounding.into(),
            hadamard: policy.hadamard,
            scaling: policy.scaling,
            layout: policy.layout,
        }
    }
}

/// What decides which code path an operation takes on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// The runtime's name for the device.
    pub device: String,
    /// The runtime: "cpu", "cuda" or another of CubeCL's.
    pub runtime: &'static str,
    /// CUDA compute capability as major * 10 + minor, where the device is a CUDA GPU.
    pub compute_capability: Option<u32>,
    /// How scaled values become codes.
    pub conversion: Conversion,
    /// How packed operands are multiplied.
    pub gemm: GemmPath,
}

/// How packed operands are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmPath {
    /// Compute capability 9.0: operands decoded to bf16 in a workspace and multiplied by `wgmma`, or
    /// few rows with a packed weight that is decoded in registers.
    Hopper,
    /// Compute capability 10.0 and 10.3: FP4 tensor cores through cuBLASLt
    /// ([`gemm::cublaslt`](crate::gemm::cublaslt)). Never run on hardware.
    CublasLt,
    /// Compute capability 12.0 and 12.1: codes and block scales go to block-scaled matrix instructions as
    /// they are (never run on hardware), or few rows are multiplied with a packed weight that is decoded in
    /// registers.
    BlockScaled,
    /// Tiles decoded to bf16 in shared memory, multiplied by 16x16x16 matrix instructions; few rows with a
    /// packed weight, where the device can, by a kernel of their own.
    MatrixInstructions,
    /// One unit for each output element.
    Scalar,
}

impl Capabilities {
    /// Asks the device behind `client`.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let runtime = client.name();
        let is_cuda = runtime == "cuda";
        let compute_capability = if is_cuda {
            compute_capability(&properties.identity.fingerprint)
        } else {
            None
        };
        let matrix = MmaConfig {
            a_type: ElemType::Float(CubeFloat::BF16),
            b_type: ElemType::Float(CubeFloat::BF16),
            cd_type: ElemType::Float(CubeFloat::F32),
            m: 16,
            n: 16,
            k: 16,
        };
        let has_matrix = properties.features.matmul.cmma.contains(&matrix)
            && properties.hardware.plane_size_min == 32
            && properties.hardware.plane_size_max == 32;
        let block_scaled = ScaledMmaConfig {
            a_type: ElemType::Float(CubeFloat::E2M1x2),
            b_type: ElemType::Float(CubeFloat::E2M1x2),
            cd_type: ElemType::Float(CubeFloat::F32),
            scales_type: ElemType::Float(CubeFloat::E4M3),
            m: 16,
            n: 8,
            k: 64,
            scales_factor: 4,
        };
        let has_block_scaled = properties
            .features
            .matmul
            .scaled_mma
            .contains(&block_scaled);
        Self {
            device: properties.identity.name.clone(),
            runtime,
            compute_capability,
            conversion: conversion(compute_capability),
            gemm: gemm_path(has_matrix, has_block_scaled, compute_capability),
        }
    }
}

/// How packed operands are multiplied on a device with or without 16x16x16 bf16 matrix instructions (in
/// planes of 32) and block-scaled ones.
fn gemm_path(
    has_matrix: bool,
    has_block_scaled: bool,
    compute_capability: Option<u32>,
) -> GemmPath {
    match compute_capability {
        Some(90) if has_matrix => GemmPath::Hopper,
        Some(100 | 103) if has_matrix => GemmPath::CublasLt,
        Some(120..130) if has_matrix && has_block_scaled => GemmPath::BlockScaled,
        _ if has_matrix => GemmPath::MatrixInstructions,
        _ => GemmPath::Scalar,
    }
}

fn conversion(compute_capability: Option<u32>) -> Conversion {
    let conversion = match compute_capability {
        Some(100 | 103) => Conversion::Hardware,
        Some(101 | 110 | 120 | 121) => Conversion::HardwareNearest,
        Some(89 | 90) => Conversion::Sm89,
        Some(80..) => Conversion::Sm80,
        _ => Conversion::Software,
    };
    conversion.or_emulated()
}

/// Who converts on the device behind `client`: [`Capabilities::conversion`] without the rest, which
/// costs an allocation.
pub(crate) fn conversion_of(client: &Client) -> Conversion {
    if client.name() != "cuda" {
        return Conversion::Software;
    }
    conversion(compute_capability(
        &client.properties().identity.fingerprint,
    ))
}

/// The number behind `sm` in CubeCL's name for what it compiles to, such as `ptx_sm90`.
fn compute_capability(fingerprint: &str) -> Option<u32> {
    let (_, rest) = fingerprint.rsplit_once("sm")?;
    let digits: String = rest
        .trim_start_matches('_')
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().ok()
}

pub(crate) fn is_cpu(client: &Client) -> bool {
    client.properties().hardware.num_cpu_cores.is_some()
}

/// Index width for kernels that address up to `elements` elements: 64 bits from 2^31 on.
pub(crate) fn address_type(elements: usize) -> AddressType {
    if elements > i32::MAX as usize {
        AddressType::U64
    } else {
        AddressType::U32
    }
}

/// Memory of `bytes`, or one byte: an empty tensor has a valid handle too.
pub(crate) fn allocate(client: &Client, bytes: usize) -> Handle {
    client.empty(bytes.max(1))
}

/// A copy of `bytes` on the device.
pub(crate) fn upload(client: &Client, bytes: &[u8]) -> Handle {
    if bytes.is_empty() {
        allocate(client, 0)
    } else {
        client.create_from_slice(bytes)
    }
}

/// The first `len` bytes of `handle`, waiting for the device.
pub(crate) fn download(
    client: &Client,
    handle: &Handle,
    len: usize,
) -> Result<Vec<u8>, Nvfp4Error> {
    if len == 0 {
        return Ok(Vec::new());
    }
    let bytes = client
        .read_one(handle.clone())
        .map_err(|error| Nvfp4Error::Launch(format!("{error:?}")))?;
    match bytes.get(..len) {
        Some(bytes) => Ok(bytes.to_vec()),
        None => Err(Nvfp4Error::shape(
            "handle",
            format!("{} bytes of memory", bytes.len()),
            format!("at least {len}"),
        )),
    }
}

/// Whether vectors of 16 bytes may be loaded from the start of the buffer.
pub(crate) fn is_aligned(handle: &Handle) -> bool {
    handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

pub(crate) fn check_memory(
    argument: &'static str,
    handle: &Handle,
    needed: usize,
) -> Result<(), Nvfp4Error> {
    let found = handle.size_in_used() as usize;
    if found < needed {
        return Err(Nvfp4Error::shape(
            argument,
            format!("{found} bytes of memory"),
            format!("at least {needed}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_devices() {
        let path = |capability| gemm_path(true, (120..130).contains(&capability), Some(capability));
        assert_eq!(path(90), GemmPath::Hopper);
        assert_eq!(path(120), GemmPath::BlockScaled);
        assert_eq!(path(121), GemmPath::BlockScaled);
        assert_eq!(path(100), GemmPath::CublasLt);
        assert_eq!(path(103), GemmPath::CublasLt);
        for capability in [80, 86, 89, 110] {
            assert_eq!(
                path(capability),
                GemmPath::MatrixInstructions,
                "{capability}"
            );
        }
        // CubeCL's LLVM path has matrix instructions and no block-scaled ones.
        let llvm = gemm_path(true, false, Some(120));
        assert_eq!(llvm, GemmPath::MatrixInstructions);
        assert_eq!(gemm_path(false, false, Some(75)), GemmPath::Scalar);
        assert_eq!(gemm_path(false, false, None), GemmPath::Scalar);
    }
}
