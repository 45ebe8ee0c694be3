//! The products as they are called: what an operand is, what the epilogue does, and which path runs.

use std::cell::OnceCell;

use cubecl::{client::Client, server::Handle};

use super::{
    cublaslt,
    epilogue::{EpilogueArgs, EpilogueKind, Factor, OutputAmax},
    kernels::{cmma, scalar, sm90_bf16, sm90_w4a16, sm120_nvfp4, small_m},
    scheduler::{GroupArgs, GroupedDim},
    select::{self, Plan},
    workspace,
};
use crate::{
    BLOCK, Format, Layout, Nvfp4Error, ScaleLayout, Storage,
    capabilities::{Capabilities, GemmBackend},
    memory::is_aligned,
    quantize::{self, amax::zeros},
    tensor::{AmaxGranularity, DeviceQuantized, FloatKind, Matrix},
};

/// What the maximum of a tensor with block scales up to 448 stands for: 6 · 448.
const SCALE_RANGE: f32 = 2688.0;

/// The elements of an operand: `outer` rows along the contraction.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// Codes and block scales.
    Packed(&'a DeviceQuantized),
    /// Code times block scale in bf16, stored in their place.
    Bf16Unscaled(&'a DeviceQuantized),
    /// A bf16 matrix, its columns being the contraction, as long as that of the other operand is in
    /// memory: where a packed one pads it with zeros, columns of anything finite.
    Bf16(&'a Matrix),
    /// A bf16 matrix whose *rows* are the contraction: the transpose of what [`Self::Bf16`] takes, with
    /// the same product, bit for bit. Hopper's kernel reads it as it is, if it has a multiple of 8 columns.
    /// Elsewhere a transposed copy is made first, which a tracing event says.
    Bf16MnMajor(&'a Matrix),
}

/// How the elements of an operand are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperandLayout {
    /// Codes and block scales, in rows along the contraction.
    Packed,
    /// bf16, in rows along the contraction.
    KMajor,
    /// bf16, in columns down the contraction.
    MnMajor,
}

impl OperandLayout {
    /// Of an operand in rows.
    pub const fn in_rows(packed: bool) -> Self {
        if packed { Self::Packed } else { Self::KMajor }
    }
}

/// The factor `amax / range` of an operand, which the epilogue multiplies sums by.
#[derive(Debug, Clone, Copy)]
pub enum Scale<'a> {
    /// One.
    One,
    /// One maximum, an `f32` on the device, for the operand, and the range that it stands for: 2688,
    /// or 1536 where scales were bounded by 256 (four-over-six).
    Tensor(&'a Handle, f32),
    /// One maximum for each stored row.
    PerRow(&'a Handle, f32),
    /// One maximum for each group of a grouped product.
    PerGroup(&'a Handle, f32),
}

/// One side of a product.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// Its elements.
    pub elements: Elements<'a>,
    /// Their factor.
    pub scale: Scale<'a>,
}

impl<'a> From<&'a DeviceQuantized> for Operand<'a> {
    /// A packed tensor with its own maxima, one or one for each stored row, and its own range.
    fn from(packed: &'a DeviceQuantized) -> Self {
        let range = packed.layout.scaling.range();
        Self {
            elements: match packed.layout.storage {
                Storage::Packed => Elements::Packed(packed),
                Storage::Bf16Unscaled => Elements::Bf16Unscaled(packed),
            },
            scale: match packed.layout.amax {
                AmaxGranularity::PerTensor => Scale::Tensor(&packed.amax, range),
                AmaxGranularity::PerRow => Scale::PerRow(&packed.amax, range),
            },
        }
    }
}

impl<'a> From<&'a Matrix> for Operand<'a> {
    /// A bf16 matrix as it is.
    fn from(matrix: &'a Matrix) -> Self {
        Self {
            elements: Elements::Bf16(matrix),
            scale: Scale::One,
        }
    }
}

impl Operand<'_> {
    /// Rows, which become rows or columns of the product.
    pub fn outer(&self) -> usize {
        match self.elements {
            Elements::Packed(packed) | Elements::Bf16Unscaled(packed) => packed.outer(),
            Elements::Bf16(matrix) => matrix.rows,
            Elements::Bf16MnMajor(matrix) => matrix.cols,
        }
    }

    /// Length of the contraction, without padding.
    pub fn inner(&self) -> usize {
        match self.elements {
            Elements::Packed(packed) => packed.inner(),
            Elements::Bf16Unscaled(packed) => packed.blocks() * BLOCK,
            Elements::Bf16(matrix) => matrix.cols,
            Elements::Bf16MnMajor(matrix) => matrix.rows,
        }
    }

    /// Length of the contraction in memory: packed operands are padded to whole blocks, with zeros.
    pub(super) fn stored(&self) -> usize {
        match self.elements {
            Elements::Packed(packed) | Elements::Bf16Unscaled(packed) => packed.blocks() * BLOCK,
            Elements::Bf16(_) | Elements::Bf16MnMajor(_) => self.inner(),
        }
    }

    /// Fails where `a` and `b`, the sides of a product, are packed after different transforms: those do
    /// not cancel. What is not packed does not say how it was made.
    pub(super) fn check_same_transform(a: &Self, b: &Self) -> Result<(), Nvfp4Error> {
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

    /// Checks elements and factors against the shape, for a product of `groups` groups, or none.
    pub(super) fn check(
        &self,
        argument: &'static str,
        groups: Option<usize>,
    ) -> Result<(), Nvfp4Error> {
        match self.elements {
            Elements::Packed(packed) => {
                packed.check_codes(argument, Format::Nvfp4)?;
                packed.check(argument)?;
                // A dense product unswizzles where its kernel wants rows, or takes the tiles.
                match (groups, packed.layout.scale_layout) {
                    (None, ScaleLayout::Swizzled128x4) => packed.check_no_groups(argument)?,
                    _ => packed.check_compact(argument)?,
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
                        "a factor for each group",
                        "one for the tensor or for each row: the product has no groups",
                    ));
                }
            },
        };
        let found = amax.size_in_used() as usize;
        if found < needed {
            return Err(Nvfp4Error::shape(
                argument,
                format!("{found} bytes of maxima"),
                format!("at least {needed}"),
            ));
        }
        Ok(())
    }

    /// The operand with other elements, where there are any.
    pub(super) fn with_elements<'a>(&'a self, other: &'a Option<Brought>) -> Operand<'a> {
        Operand {
            elements: match other {
                None => self.elements,
                Some(Brought::Packed(packed)) => Elements::Packed(packed),
                Some(Brought::Bf16(matrix)) => Elements::Bf16(matrix),
            },
            scale: self.scale,
        }
    }

    /// Whether its memory begins at a multiple of 16 bytes, as the Hopper kernels read it. Every
    /// allocation does; a view into one may not.
    pub(super) fn is_aligned(&self) -> bool {
        match self.elements {
            Elements::Packed(packed) => is_aligned(&packed.codes) && is_aligned(&packed.scales),
            Elements::Bf16Unscaled(packed) => is_aligned(&packed.codes),
            Elements::Bf16(matrix) | Elements::Bf16MnMajor(matrix) => is_aligned(&matrix.handle),
        }
    }

    pub(super) fn is_packed(&self) -> bool {
        matches!(self.elements, Elements::Packed(_))
    }

    pub(super) fn storage(&self) -> OperandLayout {
        match self.elements {
            Elements::Packed(_) => OperandLayout::Packed,
            Elements::Bf16Unscaled(_) | Elements::Bf16(_) => OperandLayout::KMajor,
            Elements::Bf16MnMajor(_) => OperandLayout::MnMajor,
        }
    }

    /// Some memory of it.
    pub(super) fn memory(&self) -> &Handle {
        match self.elements {
            Elements::Packed(packed) | Elements::Bf16Unscaled(packed) => &packed.codes,
            Elements::Bf16(matrix) | Elements::Bf16MnMajor(matrix) => &matrix.handle,
        }
    }

    /// Its memory, for kernels that take either kind of elements in rows. What they do not read is
    /// `unread`.
    pub(super) fn parts(&self, unread: &Handle) -> Parts {
        match self.elements {
            Elements::Packed(packed) => Parts {
                codes: packed.codes.clone(),
                scales: packed.scales.clone(),
                dense: unread.clone(),
                packed: true,
            },
            Elements::Bf16Unscaled(DeviceQuantized { codes: dense, .. })
            | Elements::Bf16(Matrix { handle: dense, .. }) => Parts {
                codes: unread.clone(),
                scales: unread.clone(),
                dense: dense.clone(),
                packed: false,
            },
            Elements::Bf16MnMajor(_) => unreachable!("was brought into rows before: `bring`"),
        }
    }

    pub(super) fn factor(&self) -> (Factor, Option<Handle>, f32) {
        match self.scale {
            Scale::One => (Factor::One, None, 1.0),
            Scale::Tensor(amax, range) => (Factor::Tensor, Some(amax.clone()), range),
            Scale::PerRow(amax, range) => (Factor::PerRow, Some(amax.clone()), range),
            Scale::PerGroup(amax, range) => (Factor::PerGroup, Some(amax.clone()), range),
        }
    }

    /// The operand in bf16: as it is, or a copy that the product alone holds.
    pub(super) fn decoded(&self, client: &Client) -> sm90_bf16::Operand {
        let handle = match self.elements {
            Elements::Packed(packed) => workspace::decode(client, packed),
            Elements::Bf16Unscaled(packed) => packed.codes.clone(),
            Elements::Bf16(matrix) | Elements::Bf16MnMajor(matrix) => matrix.handle.clone(),
        };
        sm90_bf16::Operand {
            handle,
            rows: self.outer(),
            in_columns: self.storage() == OperandLayout::MnMajor,
        }
    }
}

/// The memory of an operand: codes and scales where it is packed, `dense` where it is bf16.
pub(super) struct Parts {
    pub codes: Handle,
    pub scales: Handle,
    pub dense: Handle,
    pub packed: bool,
}

/// What a product writes, and where.
#[derive(Debug, Clone, Copy)]
pub enum Target<'a> {
    /// A new matrix of this type.
    New(FloatKind),
    /// Add to an existing matrix (gradient accumulation): sum and addend are rounded once, together.
    Accumulate(&'a Matrix),
}

/// The matrix that a product writes. A new one is allocated when it is first asked for, which is right
/// before the kernel that writes it is queued, behind those that prepare its operands: CubeCL 0.11.3 has a
/// stream wait for another one's memory unless it has waited since the memory was *allocated*. Where another
/// thread waits for this stream between the two (as Burn's averaging of gradients over GPUs does, over
/// and over), it would not wait for the product, and would read memory that is not written yet.
pub(super) struct Output<'a> {
    client: &'a Client,
    target: Target<'a>,
    rows: usize,
    cols: usize,
    matrix: OnceCell<Matrix>,
}

impl<'a> Output<'a> {
    /// Fails unless the matrix to add to, if there is one, is `rows` x `cols`.
    pub fn new(
        client: &'a Client,
        target: Target<'a>,
        rows: usize,
        cols: usize,
    ) -> Result<Self, Nvfp4Error> {
        if let Target::Accumulate(matrix) = target {
            matrix.check("target")?;
            if (matrix.rows, matrix.cols) != (rows, cols) {
                return Err(Nvfp4Error::shape(
                    "target",
                    format!("{} x {}", matrix.rows, matrix.cols),
                    format!("{rows} x {cols}"),
                ));
            }
        }
        Ok(Self {
            client,
            target,
            rows,
            cols,
            matrix: OnceCell::new(),
        })
    }

    /// The matrix. Asked for too early, what reads it on another stream may not wait for the product.
    pub fn matrix(&self) -> &Matrix {
        self.matrix.get_or_init(|| match self.target {
            Target::New(out) => Matrix::empty(self.client, self.rows, self.cols, out),
            Target::Accumulate(matrix) => matrix.clone(),
        })
    }

    pub fn into_matrix(self) -> Matrix {
        self.matrix();
        self.matrix.into_inner().expect("just made")
    }

    pub fn is_empty(&self) -> bool {
        self.rows * self.cols == 0
    }

    pub fn dtype(&self) -> FloatKind {
        match self.target {
            Target::New(out) => out,
            Target::Accumulate(matrix) => matrix.dtype,
        }
    }

    /// Whether the product is added to what is there.
    pub fn accumulates(&self) -> bool {
        matches!(self.target, Target::Accumulate(_))
    }

    /// Whether it begins where fast paths need it to. New memory does.
    fn is_aligned(&self) -> bool {
        match self.target {
            Target::New(_) => true,
            Target::Accumulate(matrix) => is_aligned(&matrix.handle),
        }
    }
}

/// `out[m, n] = fl(fl(alpha · Σ a[m, k] · b[n, k]) + bias[n])`, rounded once to `out`: the operands
/// in stored orientation, `alpha` from their two maxima on the device. `bias`, a 1 x n `f32` matrix,
/// may be absent.
///
/// The sum is in `f32`. On [`GemmBackend::Scalar`] `k` ascends, which is the order of
/// [`reference::gemm_f32`](crate::reference::gemm_f32), bit for bit; matrix instructions add in
/// their own order. [`path_of`] says which path a shape takes.
///
/// # Errors
/// When the contractions differ in length, the bias does not fit, or a buffer is smaller than its
/// shape.
pub fn gemm(
    client: &Client,
    a: &DeviceQuantized,
    b: &DeviceQuantized,
    bias: Option<&Matrix>,
    out: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    product(client, None, &a.into(), &b.into(), bias, Target::New(out))
}

/// [`gemm`] on a given path, for tests and comparisons.
///
/// # Errors
/// As [`gemm`], and when the device or the shape lacks the path.
pub fn gemm_on(
    client: &Client,
    path: GemmBackend,
    a: &DeviceQuantized,
    b: &DeviceQuantized,
    bias: Option<&Matrix>,
    out: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    product(
        client,
        Some(path),
        &a.into(),
        &b.into(),
        bias,
        Target::New(out),
    )
}

/// The product of two bf16 matrices, `out[m, n] = fl(Σ a[m, k] · b[n, k] + bias[n])`: the bf16
/// instance of the same kernels.
///
/// # Errors
/// As [`product`].
pub fn gemm_bf16(
    client: &Client,
    a: &Matrix,
    b: &Matrix,
    bias: Option<&Matrix>,
    out: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    product(client, None, &a.into(), &b.into(), bias, Target::New(out))
}

/// The path that [`product`] takes on this device for an `m` x `n` output with a contraction of `k`.
///
/// The kernels of Hopper and of consumer Blackwell write 16 bytes and read rows of whole 16 bytes: `n`
/// and `k` must be multiples of 8. cuBLASLt wants rows of 16 bytes too, of FP4 codes: `n` a multiple of 8
/// and `k` of 32. Other shapes take the portable kernels, and so do few bf16 rows with a packed `b` there, operands whose memory
/// does not begin at a multiple of 16 bytes, and on consumer Blackwell products with a bf16 operand (but
/// for few rows of it with a packed `b`) and contractions in groups.
pub fn path_of(capabilities: &Capabilities, n: usize, k: usize) -> GemmBackend {
    let takes = match capabilities.gemm {
        GemmBackend::Sm90Wgmma | GemmBackend::Sm120BlockScaled => {
            n.is_multiple_of(8) && k.is_multiple_of(8)
        }
        GemmBackend::CublasLt => n.is_multiple_of(8) && k.is_multiple_of(32),
        GemmBackend::Cmma | GemmBackend::Scalar => true,
    };
    if takes {
        capabilities.gemm
    } else {
        GemmBackend::Cmma
    }
}

/// [`path_of`] two bf16 operands in columns ([`Elements::Bf16MnMajor`]). No stored row is along the contraction
/// then, and Hopper's kernel takes any length of it, where `m` is a multiple of 8 as `n` is.
pub fn path_of_columns(capabilities: &Capabilities, m: usize, n: usize, k: usize) -> GemmBackend {
    match capabilities.gemm {
        GemmBackend::Sm90Wgmma if m.is_multiple_of(8) => path_of(capabilities, n, 0),
        _ => path_of(capabilities, n, k),
    }
}

/// The path of these operands, and of this plan where one is given: [`Plan::is_emulated`] ones run on
/// CUDA devices that lack their instruction.
pub(super) fn possible_path(
    capabilities: &Capabilities,
    plan: Option<Plan>,
    a: &Operand,
    b: &Operand,
    result: &Output,
    (m, n, k): (usize, usize, usize),
    grouping: GroupedDim,
) -> GemmBackend {
    let mut capabilities = capabilities.clone();
    let emulated = plan.is_some_and(|plan| plan.is_emulated());
    if emulated && capabilities.runtime == "cuda" && capabilities.gemm != GemmBackend::Scalar {
        capabilities.gemm = GemmBackend::Sm120BlockScaled;
    }
    let packed = (a.is_packed(), b.is_packed());
    let aligned = are_aligned(a, b, result);
    let path = match [a, b].map(|operand| operand.storage()) {
        [OperandLayout::MnMajor, OperandLayout::MnMajor] => path_of_columns(&capabilities, m, n, k),
        _ => path_of(&capabilities, n, k),
    };
    match path {
        GemmBackend::Sm90Wgmma if !aligned => GemmBackend::Cmma,
        // cuBLASLt's own grouped products are not used: see docs/src/gemm.md.
        GemmBackend::CublasLt if grouping != GroupedDim::None => GemmBackend::Cmma,
        GemmBackend::Sm120BlockScaled
            if !aligned || select::block_scaled(1, packed, (m, n, k), grouping).is_none() =>
        {
            GemmBackend::Cmma
        }
        path => path,
    }
}

fn are_aligned(a: &Operand, b: &Operand, result: &Output) -> bool {
    a.is_aligned() && b.is_aligned() && result.is_aligned()
}

/// The error of a path that this device or these operands lack.
pub(super) fn missing(
    path: GemmBackend,
    capabilities: &Capabilities,
    (m, n, k): (usize, usize, usize),
) -> Nvfp4Error {
    let expected = match path {
        GemmBackend::Sm90Wgmma => {
            "compute capability 9.0, n and k multiples of 8, and memory that begins at multiples of \
             16 bytes"
        }
        GemmBackend::CublasLt => "compute capability 10.0 or 10.3 and no groups",
        GemmBackend::Sm120BlockScaled => {
            "compute capability 12.0 or 12.1, packed operands (or a packed `b` and up to 16 rows), \
             dense or with rows in groups, n a multiple of 8, and memory that begins at multiples of \
             16 bytes"
        }
        GemmBackend::Cmma => "a device with 16x16x16 bf16 matrix instructions and planes of 32",
        GemmBackend::Scalar => "any device",
    };
    Nvfp4Error::Device {
        argument: "path",
        found: format!("{path:?} on {} for {m} x {n} x {k}", capabilities.device),
        expected: expected.into(),
    }
}

/// `a · bᵀ` with the whole epilogue: `fl(fl(sum · fl(α_a · α_b)) + bias)`, plus what the output
/// held, rounded once. `path` overrides [`path_of`]; without it few rows with a packed `b` have their own
/// kernel on every CUDA device from sm_80 on, and with it only on those of [`GemmBackend::Sm90Wgmma`] and
/// [`GemmBackend::Sm120BlockScaled`].
///
/// A tracing event says which kernel a product takes.
///
/// Packed operands may have their block scales in rows or, without groups, in 128x4 tiles, which
/// [`GemmBackend::CublasLt`] reads and the other paths turn into rows before. On that path the library
/// rounds once more: a bias of an output of 16 bits is rounded to the output's type first, and it adds in
/// its own order. Where it refuses a product, a tracing event says why and the path is
/// [`GemmBackend::Cmma`]; a `path` that was asked for is never replaced.
///
/// # Errors
/// When a shape, element type or buffer does not fit, or when the path that was asked for does not
/// exist on this device or for these operands.
pub fn product(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    target: Target,
) -> Result<Matrix, Nvfp4Error> {
    let (result, _) = run(client, None, path, a, b, bias, target, None, false)?;
    Ok(result)
}

/// [`product`], and the largest magnitude of the result as it is stored, one `f32` in device memory
/// (what [`quantize::amax`](crate::quantize::amax) of the result would find): quantizing the result next needs
/// no pass over it. NaN and infinity survive.
///
/// All kernels of this crate find it while they write; after cuBLASLt a second kernel reads the result, which a
/// tracing event says.
///
/// # Errors
/// As [`product`].
pub fn product_amax(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    target: Target,
) -> Result<(Matrix, Handle), Nvfp4Error> {
    let (result, amax) = run(client, None, path, a, b, bias, target, None, true)?;
    Ok((result, amax.expect("asked for")))
}

/// [`product`] with a given kernel and tile, for measurements and tests.
///
/// # Errors
/// As [`product`], and when the plan does not fit the operands.
#[doc(hidden)]
pub fn product_with(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    target: Target,
    plan: Option<Plan>,
) -> Result<Matrix, Nvfp4Error> {
    let (result, _) = run(client, None, path, a, b, bias, target, plan, false)?;
    Ok(result)
}

/// [`product`] as on a device that can do something else, for tests of the choice.
///
/// # Errors
/// As [`product`].
#[doc(hidden)]
pub fn product_as(
    client: &Client,
    capabilities: &Capabilities,
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    target: Target,
) -> Result<Matrix, Nvfp4Error> {
    let device = Some(capabilities);
    let (result, _) = run(client, device, None, a, b, bias, target, None, false)?;
    Ok(result)
}

/// [`product_amax`] with a given kernel and tile, for tests.
///
/// # Errors
/// As [`product_with`].
#[doc(hidden)]
pub fn product_amax_with(
    client: &Client,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    target: Target,
    plan: Option<Plan>,
) -> Result<(Matrix, Handle), Nvfp4Error> {
    let (result, amax) = run(client, None, path, a, b, None, target, plan, true)?;
    Ok((result, amax.expect("asked for")))
}

fn run(
    client: &Client,
    device: Option<&Capabilities>,
    path: Option<GemmBackend>,
    a: &Operand,
    b: &Operand,
    bias: Option<&Matrix>,
    target: Target,
    plan: Option<Plan>,
    find_amax: bool,
) -> Result<(Matrix, Option<Handle>), Nvfp4Error> {
    a.check("a", None)?;
    b.check("b", None)?;
    // What is not packed does not say how much of it is padding.
    let same = a.inner() == b.inner() || !(a.is_packed() && b.is_packed());
    if !same || a.stored() != b.stored() {
        return Err(Nvfp4Error::shape(
            "b",
            format!("{} x {} (stored)", b.outer(), b.inner()),
            format!("a contraction of {}, that of `a`", a.inner()),
        ));
    }
    Operand::check_same_transform(a, b)?;
    let (m, n, k) = (a.outer(), b.outer(), a.stored());
    if let Some(bias) = bias {
        bias.check("bias")?;
        if bias.len() != n || bias.dtype != FloatKind::F32 {
            return Err(Nvfp4Error::shape(
                "bias",
                format!("{} x {} of {:?}", bias.rows, bias.cols, bias.dtype),
                format!("1 x {n} of F32"),
            ));
        }
    }
    let result = Output::new(client, target, m, n)?;
    let accumulate = result.accumulates();
    let amax = find_amax.then(|| zeros(client, 1));
    if result.is_empty() {
        return Ok((result.into_matrix(), amax));
    }
    let capabilities = device.map_or_else(|| Capabilities::of(client), Clone::clone);
    let (shape, dense) = ((m, n, k), GroupedDim::None);
    let asked = path.is_some();
    let possible = possible_path(&capabilities, plan, a, b, &result, shape, dense);
    let few_rows = match are_aligned(a, b, &result) {
        true => select::portable(&capabilities, b.is_packed(), shape, dense),
        false => None,
    };
    let path = match path {
        Some(path) => path,
        // The library would have all of the weight decoded for a few rows.
        None if possible == GemmBackend::CublasLt && !a.is_packed() && few_rows.is_some() => {
            GemmBackend::Cmma
        }
        None if possible == GemmBackend::CublasLt => {
            cublaslt::or_portable(client, a, b, bias, result.matrix(), accumulate)
        }
        None => possible,
    };
    let tiles_are_read = path == GemmBackend::CublasLt && a.is_packed() && b.is_packed();
    let [a_brought, b_brought] = [a, b].map(|operand| bring(client, operand, path, tiles_are_read));
    let (a_brought, b_brought) = (a_brought?, b_brought?);
    let (a, b) = (&a.with_elements(&a_brought), &b.with_elements(&b_brought));
    let ((a_kind, a_amax, a_range), (b_kind, b_amax, b_range)) = (a.factor(), b.factor());
    // What the epilogue does not read may be any memory.
    let unread = a.memory();
    let epilogue = EpilogueArgs {
        kind: EpilogueKind {
            a: a_kind,
            b: b_kind,
            bias: bias.is_some(),
            accumulate,
            out: result.dtype(),
            amax: find_amax.then_some(OutputAmax::Whole),
        },
        a_amax: a_amax.unwrap_or_else(|| unread.clone()),
        b_amax: b_amax.unwrap_or_else(|| unread.clone()),
        ranges: [a_range, b_range],
        bias: bias.map_or(unread, |bias| &bias.handle).clone(),
        amax: amax.as_ref().unwrap_or(unread).clone(),
    };
    let groups = GroupArgs {
        grouping: dense,
        offsets: unread.clone(),
        groups: 1,
    };
    match path {
        GemmBackend::CublasLt => {
            let kernel = match tiles_are_read {
                true => cublaslt::NVFP4,
                false => cublaslt::BF16,
            };
            trace(shape, path, kernel);
            cublaslt::launch(client, a, b, bias, result.matrix(), accumulate)?;
        }
        GemmBackend::Sm90Wgmma | GemmBackend::Sm120BlockScaled if path == possible => {
            let plan = match plan {
                Some(plan) => plan,
                None => select::plan_on(client, path, a, b, shape, dense, 1)?,
            };
            trace(shape, path, &plan.to_string());
            let device = &capabilities;
            launch_plan(
                client, device, plan, a, b, shape, &groups, &epilogue, &result,
            )?;
        }
        GemmBackend::Cmma if capabilities.gemm != GemmBackend::Scalar => {
            if let (Some(plan), false) = (few_rows, asked) {
                trace(shape, path, &plan.to_string());
                let device = &capabilities;
                launch_plan(
                    client, device, plan, a, b, shape, &groups, &epilogue, &result,
                )?;
            } else {
                trace(shape, path, select::TILES);
                let (device, out) = (&capabilities, result.matrix());
                cmma::launch(client, device, a, b, shape, &groups, &epilogue, out);
            }
        }
        GemmBackend::Scalar => {
            trace(shape, path, "one unit for each output element");
            let plain = |operand: &Operand| match (operand.elements, operand.scale) {
                (Elements::Packed(packed), Scale::Tensor(amax, range)) if range == SCALE_RANGE => {
                    Some(DeviceQuantized {
                        amax: amax.clone(),
                        ..packed.clone()
                    })
                }
                _ => None,
            };
            if let (Some(a), Some(b), false) = (plain(a), plain(b), accumulate || find_amax) {
                scalar::launch(client, &capabilities, &a, &b, bias, result.matrix());
            } else {
                scalar::launch_grouped(
                    client,
                    &capabilities,
                    dense,
                    a,
                    b,
                    None,
                    shape,
                    &epilogue,
                    result.matrix(),
                );
            }
        }
        _ => return Err(missing(path, &capabilities, shape)),
    }
    let amax = match amax {
        // The library does not find it while it writes.
        Some(_) if path == GemmBackend::CublasLt => {
            Some(amax_of(client, shape, path, result.matrix())?)
        }
        amax => amax,
    };
    Ok((result.into_matrix(), amax))
}

/// Elements that a product made of those it was given.
pub(super) enum Brought {
    Packed(Box<DeviceQuantized>),
    Bf16(Matrix),
}

/// The elements of `operand` as the kernels of `path` take them, where it has others: block scales in rows
/// instead of 128x4 tiles, unless `tiles_are_read`, and bf16 elements in rows instead of columns, which only
/// the copy engine of Hopper reads, where a stored row is a multiple of 16 bytes.
pub(super) fn bring(
    client: &Client,
    operand: &Operand,
    path: GemmBackend,
    tiles_are_read: bool,
) -> Result<Option<Brought>, Nvfp4Error> {
    match operand.elements {
        Elements::Packed(packed)
            if packed.layout.scale_layout == ScaleLayout::Swizzled128x4 && !tiles_are_read =>
        {
            let (outer, blocks) = (packed.outer(), packed.blocks());
            tracing::debug!(outer, blocks, "gemm: block scales from tiles to rows");
            Ok(Some(Brought::Packed(Box::new(DeviceQuantized {
                scales: quantize::unswizzle(client, &packed.scales, outer, blocks)?,
                layout: Layout {
                    scale_layout: ScaleLayout::Compact,
                    ..packed.layout
                },
                ..packed.clone()
            }))))
        }
        Elements::Bf16MnMajor(matrix)
            if path != GemmBackend::Sm90Wgmma || !matrix.cols.is_multiple_of(8) =>
        {
            let (rows, cols) = (matrix.rows, matrix.cols);
            tracing::debug!(rows, cols, ?path, "gemm: a transposed copy of an operand");
            Ok(Some(Brought::Bf16(workspace::transposed(client, matrix))))
        }
        _ => Ok(None),
    }
}

/// The maximum of what a kernel wrote that does not find it.
fn amax_of(
    client: &Client,
    shape: (usize, usize, usize),
    path: GemmBackend,
    result: &Matrix,
) -> Result<Handle, Nvfp4Error> {
    trace(
        shape,
        path,
        "a second kernel finds the maximum of the output",
    );
    quantize::amax(client, result, None)
}

/// Queues the kernels of a plan, dense or in groups.
pub(super) fn launch_plan(
    client: &Client,
    capabilities: &Capabilities,
    plan: Plan,
    a: &Operand,
    b: &Operand,
    (m, n, k): (usize, usize, usize),
    groups: &GroupArgs,
    epilogue: &EpilogueArgs,
    result: &Output,
) -> Result<(), Nvfp4Error> {
    let shape = (m, n, k);
    let columns = [a, b].map(|operand| operand.storage() == OperandLayout::MnMajor);
    match (plan, b.elements) {
        (plan, _) if !plan.takes_columns(columns) => {
            return Err(Nvfp4Error::value(
                "plan",
                format!("{plan} and bf16 operands in columns, a and b: {columns:?}"),
                "one that takes them so",
            ));
        }
        (Plan::W4a16(tile, band), Elements::Packed(b))
            if sm90_w4a16::takes(k) && groups.grouping != GroupedDim::K =>
        {
            let out = &result.matrix().handle;
            sm90_w4a16::launch(client, a, b, shape, groups, epilogue, out, (tile, band));
        }
        (Plan::BlockScaled(tile), Elements::Packed(right)) if groups.grouping != GroupedDim::K => {
            let Elements::Packed(left) = a.elements else {
                return Err(Nvfp4Error::value(
                    "plan",
                    format!("{plan} and a bf16 `a`"),
                    "packed operands",
                ));
            };
            let out = &result.matrix().handle;
            sm120_nvfp4::launch(client, left, right, shape, groups, epilogue, out, tile);
        }
        (Plan::SmallM, Elements::Packed(b))
            if small_m::takes(m, k) && groups.grouping == GroupedDim::None =>
        {
            let out = &result.matrix().handle;
            small_m::launch(client, capabilities, a, b, k, epilogue, out);
        }
        (Plan::DequantThenBf16(tile, band), _) => {
            let (left, right) = (a.decoded(client), b.decoded(client));
            let out = &result.matrix().handle;
            sm90_bf16::launch(
                client,
                &left,
                &right,
                shape,
                groups,
                epilogue,
                out,
                (tile, band),
            );
        }
        (plan, _) => {
            return Err(Nvfp4Error::value(
                "plan",
                format!("{plan} for {m} x {n} x {k}, {:?}", groups.grouping),
                "one that takes the operands",
            ));
        }
    }
    Ok(())
}

/// Says which kernel a product takes.
fn trace((m, n, k): (usize, usize, usize), path: GemmBackend, kernel: &str) {
    tracing::debug!(m, n, k, ?path, kernel, "gemm");
}
