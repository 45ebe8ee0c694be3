//! Tensors on a device, and what the device can do.

use cubecl::{
    client::Client,
    ir::{AddressType, ElemType, FloatKind as CubeFloat, UIntKind, features::MmaConfig},
    server::Handle,
};

use crate::{
    Amax, BLOCK, Nvfp4Error, Origin, PackedAxis, PackedTensor, RandomStream, ScaleLayout,
    cube::block::Conversion, policy::Rounding,
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
        check_memory(argument, &self.handle, self.len() * self.dtype.size())
    }
}

/// An NVFP4 matrix in device memory, scales in the compact layout.
///
/// The layout is that of [`PackedTensor`]: `outer` stored rows of `blocks` blocks.
#[derive(Debug, Clone)]
pub struct DevicePacked {
    /// The codes, eight to a `u32`: `[outer, blocks * 2]` words.
    pub codes: Handle,
    /// The block scales: `[outer, blocks]` E4M3 bytes.
    pub scales: Handle,
    /// The largest magnitude of the source: one `f32`.
    pub amax: Handle,
    /// Rows of the source matrix.
    pub rows: usize,
    /// Columns of the source matrix.
    pub cols: usize,
    /// The axis of the source along which it is packed.
    pub axis: PackedAxis,
}

impl DevicePacked {
    /// Stored rows.
    pub fn outer(&self) -> usize {
        self.axis.stored_shape(self.rows, self.cols).0
    }

    /// Length of the packed axis, without padding.
    pub fn inner(&self) -> usize {
        self.axis.stored_shape(self.rows, self.cols).1
    }

    /// Blocks in one stored row.
    pub fn blocks(&self) -> usize {
        self.inner().div_ceil(BLOCK)
    }

    /// Memory for a packed matrix, with undefined contents; the maximum is shared.
    pub(crate) fn empty(
        client: &Client,
        (rows, cols): (usize, usize),
        axis: PackedAxis,
        amax: &Handle,
    ) -> Self {
        let (outer, inner) = axis.stored_shape(rows, cols);
        let blocks = outer * inner.div_ceil(BLOCK);
        Self {
            codes: allocate(client, blocks * 8),
            scales: allocate(client, blocks),
            amax: amax.clone(),
            rows,
            cols,
            axis,
        }
    }

    pub(crate) fn check(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        let blocks = self.outer() * self.blocks();
        check_memory(argument, &self.codes, blocks * 8)?;
        check_memory(argument, &self.scales, blocks)?;
        check_memory(argument, &self.amax, 4)
    }

    /// Copies a host tensor to the device.
    ///
    /// # Errors
    /// When it is scaled per token: device tensors have one maximum.
    pub fn from_host(client: &Client, packed: &PackedTensor) -> Result<Self, Nvfp4Error> {
        let Amax::Tensor(amax) = packed.amax() else {
            return Err(Nvfp4Error::value(
                "packed",
                "per-token scales",
                "one amax for the tensor",
            ));
        };
        let compact = packed.clone().with_scale_layout(ScaleLayout::Compact);
        Ok(Self {
            codes: upload(client, compact.codes()),
            scales: upload(client, compact.scales()),
            amax: client.create_from_slice(&amax.to_ne_bytes()),
            rows: packed.rows(),
            cols: packed.cols(),
            axis: packed.axis(),
        })
    }

    /// Copies the tensor to the host, waiting for the device. `origin` says how it was made, which
    /// device memory does not record.
    ///
    /// # Errors
    /// When a queued kernel failed, or the buffers do not fit the shape.
    pub fn to_host(&self, client: &Client, origin: Origin) -> Result<PackedTensor, Nvfp4Error> {
        let blocks = self.outer() * self.blocks();
        let amax = download(client, &self.amax, 4)?;
        PackedTensor::from_parts(
            (self.rows, self.cols),
            self.axis,
            download(client, &self.codes, blocks * 8)?,
            (
                ScaleLayout::Compact,
                download(client, &self.scales, blocks)?,
            ),
            Amax::Tensor(f32::from_ne_bytes([amax[0], amax[1], amax[2], amax[3]])),
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
    /// Units that a kernel without barriers is launched with in each cube.
    pub units_per_cube: u32,
}

/// How packed operands are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmPath {
    /// Compute capability 9.0: operands decoded to bf16 in a workspace and multiplied by `wgmma`, or
    /// few rows with a packed weight that is decoded in registers.
    Hopper,
    /// Tiles decoded to bf16 in shared memory, multiplied by 16x16x16 matrix instructions.
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
        Self {
            device: properties.identity.name.clone(),
            runtime,
            compute_capability,
            conversion: match compute_capability {
                Some(100 | 103) => Conversion::Hardware,
                Some(101 | 110 | 120 | 121) => Conversion::HardwareNearest,
                _ => Conversion::Software,
            },
            gemm: if has_matrix && compute_capability == Some(90) {
                GemmPath::Hopper
            } else if has_matrix {
                GemmPath::MatrixInstructions
            } else {
                GemmPath::Scalar
            },
            units_per_cube: if is_cpu(client) { 1 } else { 256 },
        }
    }
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

fn upload(client: &Client, bytes: &[u8]) -> Handle {
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
    Ok(bytes[..len].to_vec())
}

fn check_memory(argument: &'static str, handle: &Handle, needed: usize) -> Result<(), Nvfp4Error> {
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
