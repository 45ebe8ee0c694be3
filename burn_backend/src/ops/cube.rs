//! Cube: launches of the CubeCL kernels. Runs on the fusion server's thread where fusion is on.

use burn_core::backend::{ops::FloatTensorOps, tensor::FloatTensor};
use burn_core::tensor::{DType, FloatDType, Shape};
use burn_cubecl::{
    CubeBackend,
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use cubecl::server::Handle;
use nvfp4_kernels::capabilities::{Capabilities, GemmBackend};
use nvfp4_kernels::gemm::{self, Scale, Target, path_of, path_of_columns};
use nvfp4_kernels::quantize::{AmaxRequest, EdenSource, QuantRequest};
use nvfp4_kernels::reference::EdenTarget;
use nvfp4_kernels::tensor::{DeviceQuantParams, DeviceQuantized, FloatKind, Groups, Matrix};
use nvfp4_kernels::{
    BLOCK, BlockScaling, Format, Layout, MX_BLOCK, Nvfp4Error, ScaleLayout, Storage, Usage,
    quantize,
};

use super::{
    AmaxGranularity, Bias, CopySpec, Decoded, EdenSpec, MxLayout, MxPacked, Nvfp4Ops, Operand,
    OperandPair, Packed, PackedLayout, PackedPair, PairSpec, QuantizeSpec, copy_name,
    operands::dequantized, trace_op,
};

impl Nvfp4Ops for CubeBackend {
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        let x = Source::new(x);
        let QuantizeSpec { usage, copy } = spec;
        trace_op("quantize", copy_name(usage), x.matrix.rows, x.matrix.cols);
        let (client, matrix) = (&x.tensor.client, &x.matrix);
        let one_read = usage == Usage::Rowwise
            && copy.global == AmaxGranularity::PerRow
            && copy.hadamard.is_none();
        let packed = if one_read {
            launched(quantize::quantize_per_token(
                client,
                matrix,
                &device_copy(&copy),
            ))
        } else {
            let amax = x.amax(&copy, usage);
            let request = request(&copy, &amax);
            launched(quantize::quantize(
                client,
                matrix,
                &Groups::One,
                usage,
                &request,
            ))
        };
        x.packed(packed, copy.layout(x.matrix.rows, x.matrix.cols, usage))
    }

    fn nvfp4_quantize_tiles(
        x: FloatTensor<Self>,
        usage: Usage,
        scaling: BlockScaling,
    ) -> Packed<Self> {
        let x = Source::new(x);
        let (rows, cols) = (x.matrix.rows, x.matrix.cols);
        trace_op("quantize", copy_name(usage), rows, cols);
        let copy = CopySpec::of_tiles(scaling);
        let amax = x.amax(&copy, Usage::Rowwise);
        let (client, matrix, one) = (&x.tensor.client, &x.matrix, &Groups::One);
        let compact = ScaleLayout::Compact;
        let packed = launched(quantize::quantize_tile_copy(
            client, matrix, one, usage, &amax, scaling, compact,
        ));
        x.packed(packed, copy.layout(rows, cols, usage))
    }

    fn nvfp4_quantize_pair(x: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let x = Source::new(x);
        let (rows, cols) = (x.matrix.rows, x.matrix.cols);
        trace_op("quantize", "pair", rows, cols);
        let (client, matrix) = (&x.tensor.client, &x.matrix);
        let [row_copy, col_copy] = spec.copies();
        let (row, col) = match spec {
            PairSpec::Tile(scaling) => {
                let amax = x.amax(&row_copy, Usage::Rowwise);
                let compact = [ScaleLayout::Compact; 2];
                let (one, layouts) = (&Groups::One, compact);
                launched(quantize::quantize_tile_with(
                    client, matrix, one, &amax, scaling, layouts,
                ))
            }
            PairSpec::Blocks { row, col } => {
                let (row_amax, col_amax) = x.pair_amax(&row, &col);
                launched(quantize::quantize_both(
                    client,
                    matrix,
                    &Groups::One,
                    &request(&row, &row_amax),
                    &request(&col, &col_amax),
                ))
            }
        };
        PackedPair {
            row: x.packed(row, row_copy.layout(rows, cols, Usage::Rowwise)),
            col: x.packed(col, col_copy.layout(rows, cols, Usage::Columnwise)),
        }
    }

    fn nvfp4_quantize_decoded(x: FloatTensor<Self>, spec: QuantizeSpec) -> Decoded<Self> {
        let x = Source::new(x);
        let (rows, cols) = (x.matrix.rows, x.matrix.cols);
        let QuantizeSpec { usage, copy } = spec;
        trace_op("quantize", copy_name(usage), rows, cols);
        let amax = x.amax(&copy, usage);
        let request = request(&copy, &amax);
        let asked = Some((&request, Storage::Bf16Unscaled));
        let (row, col) = match usage {
            Usage::Rowwise => (asked, None),
            Usage::Columnwise => (None, asked),
        };
        let (client, matrix) = (&x.tensor.client, &x.matrix);
        let (row, col) = launched(quantize::quantize_operands(client, matrix, row, col));
        let made = row.or(col);
        let layout = copy.layout(rows, cols, usage);
        decoded_tensor(&x.tensor, made.expect("values were asked for"), layout)
    }

    fn nvfp4_quantize_forms(
        x: FloatTensor<Self>,
        row: (CopySpec, Storage),
        col: (CopySpec, Storage),
    ) -> OperandPair<Self> {
        let x = Source::new(x);
        let (rows, cols) = (x.matrix.rows, x.matrix.cols);
        trace_op("quantize", "pair", rows, cols);
        let ((row, row_form), (col, col_form)) = (row, col);
        let (row_amax, col_amax) = x.pair_amax(&row, &col);
        let (for_row, for_col) = (request(&row, &row_amax), request(&col, &col_amax));
        let made = launched(quantize::quantize_operands(
            &x.tensor.client,
            &x.matrix,
            Some((&for_row, row_form)),
            Some((&for_col, col_form)),
        ));
        let operand = |made: Option<DeviceQuantized>, copy: &CopySpec, usage| {
            let layout = copy.layout(rows, cols, usage);
            let made = made.expect("both copies were asked for");
            match made.layout.storage {
                Storage::Packed => Operand::Nvfp4(x.packed(made, layout)),
                Storage::Bf16Unscaled => Operand::Decoded(decoded_tensor(&x.tensor, made, layout)),
            }
        };
        OperandPair {
            row: operand(made.0, &row, Usage::Rowwise),
            col: operand(made.1, &col, Usage::Columnwise),
        }
    }

    fn nvfp4_eden(x: FloatTensor<Self>, spec: EdenSpec) -> Packed<Self> {
        let x = Source::new(x);
        let (rows, cols) = (x.matrix.rows, x.matrix.cols);
        trace_op("ms_eden", copy_name(spec.usage), rows, cols);
        let source = EdenSource::Matrix(&x.matrix);
        eden(&x.tensor, source, &spec, spec.layout(rows, cols), 1)
    }

    fn nvfp4_eden_packed(packed: Packed<Self>, spec: EdenSpec) -> Packed<Self> {
        let PackedLayout { rows, cols, .. } = packed.layout;
        trace_op("ms_eden", copy_name(spec.usage), rows, cols);
        let like = packed.codes.clone();
        let source = device(packed);
        let layout = spec.layout(rows, cols);
        eden(&like, EdenSource::Packed(&source), &spec, layout, 1)
    }

    fn nvfp4_mx_quantize(x: FloatTensor<Self>, usage: Usage) -> MxPacked<Self> {
        let x = Source::new(x);
        let (rows, cols) = (x.matrix.rows, x.matrix.cols);
        trace_op("mx_quantize", copy_name(usage), rows, cols);
        let mx = launched(quantize::mx_quantize(
            &x.tensor.client,
            &x.matrix,
            usage,
            Format::Mxfp8,
        ));
        mx_packed(&x.tensor, mx)
    }

    fn nvfp4_mx_requantize(packed: Packed<Self>, usage: Usage, via: FloatDType) -> MxPacked<Self> {
        let PackedLayout { rows, cols, .. } = packed.layout;
        trace_op("mx_requantize", copy_name(usage), rows, cols);
        let like = packed.codes.clone();
        let via = float_kind(via);
        let mx = launched(quantize::mx_requantize(
            &like.client,
            &device(packed),
            usage,
            Format::Mxfp8,
            via,
        ));
        mx_packed(&like, mx)
    }

    fn nvfp4_dequantize(packed: Packed<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let PackedLayout {
            rows, cols, usage, ..
        } = packed.layout;
        trace_op("dequantize", copy_name(usage), rows, cols);
        let like = packed.codes.clone();
        let kind = float_kind(dtype);
        result(
            &like,
            launched(quantize::dequantize(&like.client, &device(packed), kind)),
        )
    }

    fn nvfp4_mx_dequantize(packed: MxPacked<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let MxLayout { rows, cols, usage } = packed.layout;
        trace_op("mx_dequantize", copy_name(usage), rows, cols);
        let like = packed.codes.clone();
        let kind = float_kind(dtype);
        result(
            &like,
            launched(quantize::mx_dequantize(
                &like.client,
                &mx_device(packed),
                kind,
            )),
        )
    }

    fn nvfp4_product(
        a: Operand<Self>,
        b: Operand<Self>,
        bias: Bias<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let ((m, k), n) = (stored_shape(&a), stored_shape(&b).0);
        trace_op("matmul", "", m, n);
        let like = beside(&a);
        let capabilities = Capabilities::of(&like.client);
        let path = match (&a, &b) {
            (Operand::Float(_, Usage::Columnwise), Operand::Float(_, Usage::Columnwise)) => {
                path_of_columns(&capabilities, m, n, k)
            }
            _ => path_of(&capabilities, n, k),
        };
        // Burn's own product has a result of the type of its operands. It is rounded once, to the type
        // that was asked for: so in f32 where that is wider, or where a bias comes after.
        let inner = match (&a, &b, &bias) {
            (Operand::Float(x, _), Operand::Float(y, _), Bias::Absent)
                if x.dtype == DType::from(dtype) && y.dtype == x.dtype =>
            {
                dtype
            }
            // Exact for what was packed, and for narrower floats.
            _ => FloatDType::F32,
        };
        if is_ours(path, [Elements::of(&a), Elements::of(&b)], inner) {
            let bias = match bias {
                Bias::Absent => None,
                Bias::Vector(bias) => {
                    let bias = into_contiguous(cast(bias, DType::F32));
                    let len = bias.meta.shape()[0];
                    Some(launched(Matrix::new(bias.handle, 1, len, FloatKind::F32)))
                }
            };
            let (a, b) = (Stored::new(a), Stored::new(b));
            let out = gemm::product(
                &like.client,
                None,
                &a.operand(),
                &b.operand(),
                bias.as_ref(),
                Target::New(float_kind(dtype)),
            );
            return result(&like, launched(out));
        }
        tracing::debug!(m, n, k, ?inner, "product by Burn's matmul");
        let (a, b) = (transposed_to_rows(a, inner), transposed_to_rows(b, inner));
        let out = Self::float_matmul(a, Self::float_swap_dims(b, 0, 1));
        let out = match bias {
            Bias::Absent => out,
            Bias::Vector(bias) => {
                let bias = Self::float_reshape(cast(bias, DType::F32), Shape::new([1, n]));
                Self::float_add(cast(out, DType::F32), bias)
            }
        };
        cast(out, dtype.into())
    }
}

/// What decides who multiplies an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Elements {
    /// NVFP4 codes, or the values that they stand for.
    Nvfp4,
    /// MXFP8, which is exact in bf16.
    Mxfp8,
    Bf16,
    /// Floats that bf16 does not hold.
    Wide,
}

impl Elements {
    fn of(operand: &Operand<CubeBackend>) -> Self {
        match operand {
            Operand::Nvfp4(_) | Operand::Decoded(_) => Self::Nvfp4,
            Operand::Mxfp8(_) => Self::Mxfp8,
            Operand::Float(x, _) if x.dtype == DType::BF16 => Self::Bf16,
            Operand::Float(..) => Self::Wide,
        }
    }
}

/// Whether a product that would take `path` runs on the kernels of [`gemm`], instead of Burn's own product in the
/// type `inner`.
///
/// Two NVFP4 operands always do, and on Hopper and by cuBLASLt everything that bf16 holds. On other GPUs two bf16
/// matrices go to Burn where it multiplies in bf16 (8192³ on an H100: 255 TFLOP/s autotuned, the tiles of that path
/// 151); where it would multiply in `f32`, for a bias or because one of the operands is packed and all of it
/// decoded before, they do not: few rows of a packed weight then have their kernel. CubeCL's CPU runtime, which is
/// for tests, leaves to Burn what is not NVFP4.
fn is_ours(path: GemmBackend, operands: [Elements; 2], inner: FloatDType) -> bool {
    if operands == [Elements::Nvfp4; 2] {
        return true;
    }
    match path {
        _ if operands.contains(&Elements::Wide) => false,
        GemmBackend::Sm90Wgmma | GemmBackend::CublasLt => true,
        GemmBackend::Sm120BlockScaled | GemmBackend::Cmma => inner == FloatDType::F32,
        GemmBackend::Scalar => false,
    }
}

/// A tensor beside which the results of a product with `operand` are.
pub(super) fn beside(operand: &Operand<CubeBackend>) -> CubeTensor {
    match operand {
        Operand::Nvfp4(packed) => packed.codes.clone(),
        Operand::Decoded(decoded) => decoded.values.clone(),
        Operand::Mxfp8(packed) => packed.codes.clone(),
        Operand::Float(x, _) => x.clone(),
    }
}

/// Stored rows and the length of the contraction in memory.
pub(super) fn stored_shape(operand: &Operand<CubeBackend>) -> (usize, usize) {
    match operand {
        Operand::Nvfp4(Packed { layout, .. }) | Operand::Decoded(Decoded { layout, .. }) => {
            (layout.outer(), layout.blocks() * BLOCK)
        }
        Operand::Mxfp8(packed) => (packed.layout.outer(), packed.layout.blocks() * MX_BLOCK),
        Operand::Float(x, usage) => usage.stored_shape(x.meta.shape()[0], x.meta.shape()[1]),
    }
}

/// The operand as a float matrix, one row for each stored row, in the type `dtype`.
fn transposed_to_rows(operand: Operand<CubeBackend>, dtype: FloatDType) -> CubeTensor {
    let (x, usage) = match operand {
        Operand::Nvfp4(packed) => {
            let usage = packed.layout.usage;
            (CubeBackend::nvfp4_dequantize(packed, dtype), usage)
        }
        Operand::Decoded(decoded) => {
            let usage = decoded.layout.usage;
            (dequantized::<CubeBackend>(decoded, dtype), usage)
        }
        Operand::Mxfp8(packed) => {
            let usage = packed.layout.usage;
            (CubeBackend::nvfp4_mx_dequantize(packed, dtype), usage)
        }
        Operand::Float(x, usage) => (cast(x, dtype.into()), usage),
    };
    match usage {
        Usage::Rowwise => x,
        Usage::Columnwise => CubeBackend::float_swap_dims(x, 0, 1),
    }
}

/// An operand as the GEMM kernels take it, holding its memory.
pub(super) enum Stored {
    Packed(Box<DeviceQuantized>),
    /// Contracted along its columns or, for [`Usage::Columnwise`], its rows.
    Bf16(Matrix, Usage),
}

impl Stored {
    pub(super) fn new(operand: Operand<CubeBackend>) -> Self {
        match operand {
            Operand::Nvfp4(packed) => Self::Packed(Box::new(device(packed))),
            Operand::Decoded(decoded) => {
                let values = into_contiguous(decoded.values).handle;
                let amax = into_contiguous(decoded.amax).handle;
                let layout = Layout {
                    storage: Storage::Bf16Unscaled,
                    ..kernel_layout(&decoded.layout)
                };
                let parts = (values.clone(), values, amax);
                Self::Packed(Box::new(DeviceQuantized::new(layout, parts)))
            }
            Operand::Mxfp8(packed) => {
                // In stored orientation, padding included: each row is one of a row-wise matrix.
                let client = packed.codes.client.clone();
                let mut stored = mx_device(packed);
                stored.layout = stored.layout.stored();
                // E4M3 times a power of two is exact in bf16.
                let matrix = launched(quantize::mx_dequantize(&client, &stored, FloatKind::Bf16));
                Self::Bf16(matrix, Usage::Rowwise)
            }
            Operand::Float(x, usage) => {
                let (x, usage) = as_in_memory(cast(x, DType::BF16), usage);
                Self::Bf16(Source::new(x).matrix, usage)
            }
        }
    }

    pub(super) fn operand(&self) -> gemm::Operand<'_> {
        match self {
            Self::Packed(packed) => (&**packed).into(),
            Self::Bf16(matrix, Usage::Rowwise) => matrix.into(),
            Self::Bf16(matrix, Usage::Columnwise) => gemm::Operand {
                elements: gemm::Elements::Bf16MnMajor(matrix),
                scale: Scale::One,
            },
        }
    }
}

/// `x` and the axis of its contraction; of a view that transposes a contiguous matrix, that matrix and the
/// other axis.
fn as_in_memory(x: CubeTensor, usage: Usage) -> (CubeTensor, Usage) {
    if x.is_contiguous() {
        return (x, usage);
    }
    let transposed = CubeBackend::float_swap_dims(x.clone(), 0, 1);
    if transposed.is_contiguous() {
        (transposed, usage.transposed())
    } else {
        (x, usage)
    }
}

/// `source` by MS-EDEN, with `maxima` maxima, as tensors beside `like`.
pub(super) fn eden(
    like: &CubeTensor,
    source: EdenSource<'_>,
    spec: &EdenSpec,
    layout: PackedLayout,
    maxima: usize,
) -> Packed<CubeBackend> {
    let EdenSpec {
        usage,
        hadamard,
        stream,
    } = spec;
    let client = &like.client;
    let amax = launched(quantize::ms_eden_amax(client, source, *usage, hadamard));
    let target = EdenTarget::Backward;
    let packed = launched(quantize::ms_eden(
        client, source, *usage, &amax, hadamard, target, *stream,
    ));
    packed_tensor(like, packed, layout, maxima)
}

/// How the kernels are told to make a copy.
fn device_copy(copy: &CopySpec) -> DeviceQuantParams {
    DeviceQuantParams {
        hadamard: copy.hadamard,
        scaling: copy.scaling,
        ..DeviceQuantParams::new(copy.rounding)
    }
}

pub(super) fn request<'a>(copy: &CopySpec, amax: &'a Handle) -> QuantRequest<'a> {
    QuantRequest {
        amax,
        scope: copy.global,
        copy: device_copy(copy),
    }
}

/// A contiguous float matrix, as Burn's tensor and as the kernels' view of it.
struct Source {
    tensor: CubeTensor,
    matrix: Matrix,
}

impl Source {
    fn new(x: CubeTensor) -> Self {
        let tensor = into_contiguous(x);
        let (rows, cols) = (tensor.meta.shape()[0], tensor.meta.shape()[1]);
        let dtype = float_kind(super::float_dtype(tensor.dtype));
        let matrix = launched(Matrix::new(tensor.handle.clone(), rows, cols, dtype));
        Self { tensor, matrix }
    }

    /// The maxima that a copy along `usage` needs: one, or one for each stored row.
    fn amax(&self, copy: &CopySpec, usage: Usage) -> Handle {
        let (client, matrix) = (&self.tensor.client, &self.matrix);
        if copy.global == AmaxGranularity::PerTensor && usage == Usage::Rowwise {
            return launched(quantize::amax(client, matrix, None));
        }
        if copy.global == AmaxGranularity::PerTensor {
            return launched(quantize::amax(client, matrix, copy.hadamard));
        }
        let scope = copy.global;
        let request = AmaxRequest::along(usage, scope, copy.hadamard);
        let found = launched(quantize::amaxes(client, matrix, &Groups::One, &request));
        found.rows.or(found.cols).expect("asked for")
    }

    /// The maxima for a row-wise copy and for a column-wise one, in one read; the same one serves both
    /// where both have one and none is transformed.
    fn pair_amax(&self, row: &CopySpec, col: &CopySpec) -> (Handle, Handle) {
        let one = [row, col]
            .iter()
            .all(|copy| copy.global == AmaxGranularity::PerTensor && copy.hadamard.is_none());
        if one {
            let amax = self.amax(row, Usage::Rowwise);
            return (amax.clone(), amax);
        }
        let request = AmaxRequest {
            rows: Some(row.global),
            cols: Some((col.global, col.hadamard)),
        };
        let (client, matrix) = (&self.tensor.client, &self.matrix);
        let found = launched(quantize::amaxes(client, matrix, &Groups::One, &request));
        let [row, col] = [found.rows, found.cols].map(|amax| amax.expect("asked for"));
        (row, col)
    }

    fn packed(&self, packed: DeviceQuantized, layout: PackedLayout) -> Packed<CubeBackend> {
        packed_tensor(&self.tensor, packed, layout, layout.amax_len())
    }
}

/// What a kernel packed, with `maxima` maxima, as tensors beside `like`.
pub(super) fn packed_tensor(
    like: &CubeTensor,
    packed: DeviceQuantized,
    layout: PackedLayout,
    maxima: usize,
) -> Packed<CubeBackend> {
    let (outer, blocks) = (layout.outer(), layout.blocks());
    let codes = Shape::new([outer, blocks * 2]);
    let scales = Shape::new([outer, blocks]);
    let amax = Shape::new([maxima]);
    Packed {
        codes: new_tensor(like, packed.codes, codes, DType::U32),
        scales: new_tensor(like, packed.scales, scales, DType::U8),
        amax: new_tensor(like, packed.amax, amax, DType::F32),
        layout,
    }
}

/// What a kernel wrote as values, as tensors beside `like`.
fn decoded_tensor(
    like: &CubeTensor,
    decoded: DeviceQuantized,
    layout: PackedLayout,
) -> Decoded<CubeBackend> {
    let amax = Shape::new([layout.amax_len()]);
    let values = decoded.values().expect("values were asked for");
    Decoded {
        amax: new_tensor(like, decoded.amax, amax, DType::F32),
        values: result(like, values),
        layout,
    }
}

/// The kernels' view of a packed matrix.
pub(super) fn device(packed: Packed<CubeBackend>) -> DeviceQuantized {
    let parts = [packed.codes, packed.scales, packed.amax].map(|part| into_contiguous(part).handle);
    DeviceQuantized::new(kernel_layout(&packed.layout), parts.into())
}

/// The layout as the kernels know it.
fn kernel_layout(layout: &PackedLayout) -> Layout {
    Layout {
        hadamard: layout.hadamard,
        scaling: layout.scaling,
        amax: layout.global,
        ..Layout::nvfp4(layout.rows, layout.cols, layout.usage)
    }
}

/// What a kernel packed in MXFP8, as tensors beside `like`.
pub(super) fn mx_packed(like: &CubeTensor, mx: DeviceQuantized) -> MxPacked<CubeBackend> {
    let layout = MxLayout {
        rows: mx.rows(),
        cols: mx.cols(),
        usage: mx.usage(),
    };
    let (outer, blocks) = (layout.outer(), layout.blocks());
    let codes = Shape::new([outer, blocks * MX_BLOCK]);
    let scales = Shape::new([outer, blocks]);
    MxPacked {
        codes: new_tensor(like, mx.codes, codes, DType::U8),
        scales: new_tensor(like, mx.scales, scales, DType::U8),
        layout,
    }
}

/// The kernels' view of a matrix in MXFP8.
fn mx_device(packed: MxPacked<CubeBackend>) -> DeviceQuantized {
    let MxLayout { rows, cols, usage } = packed.layout;
    let [codes, scales] = [packed.codes, packed.scales].map(|part| into_contiguous(part).handle);
    let layout = Layout::new(Format::Mxfp8, (rows, cols), usage);
    DeviceQuantized::new(layout, (codes, scales.clone(), scales))
}

/// What a kernel wrote, as a tensor beside `like`.
pub(super) fn result(like: &CubeTensor, out: Matrix) -> CubeTensor {
    let dtype = match out.dtype {
        FloatKind::F32 => DType::F32,
        FloatKind::F16 => DType::F16,
        FloatKind::Bf16 => DType::BF16,
    };
    let shape = Shape::new([out.rows, out.cols]);
    new_tensor(like, out.handle, shape, dtype)
}

pub(super) fn new_tensor(
    like: &CubeTensor,
    handle: Handle,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        shape,
        handle,
        dtype,
    )
}

pub(super) fn float_kind(dtype: FloatDType) -> FloatKind {
    match dtype {
        FloatDType::F32 => FloatKind::F32,
        FloatDType::F16 => FloatKind::F16,
        FloatDType::BF16 => FloatKind::Bf16,
        other => panic!("element type {other:?}: expected F32, BF16 or F16"),
    }
}

/// The result of a launch whose arguments were checked before it was queued. What is left to fail
/// is the runtime itself; fusion hands the panic to whoever reads the result.
pub(super) fn launched<T>(result: Result<T, Nvfp4Error>) -> T {
    result.unwrap_or_else(|error| panic!("nvfp4 on CubeCL: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who multiplies on each path.
    #[test]
    fn products_go_to_whom_they_suit() {
        use Elements::{Bf16, Mxfp8, Nvfp4, Wide};
        let (bf16, f32) = (FloatDType::BF16, FloatDType::F32);
        let gpus = [
            GemmBackend::Sm90Wgmma,
            GemmBackend::CublasLt,
            GemmBackend::Sm120BlockScaled,
            GemmBackend::Cmma,
        ];
        for path in gpus {
            for operands in [[Bf16, Nvfp4], [Nvfp4, Bf16], [Bf16, Mxfp8], [Bf16, Bf16]] {
                assert!(is_ours(path, operands, f32), "{path:?}, {operands:?}");
            }
            assert!(!is_ours(path, [Wide, Nvfp4], f32), "{path:?}");
            let library = matches!(path, GemmBackend::Sm90Wgmma | GemmBackend::CublasLt);
            assert_eq!(is_ours(path, [Bf16, Bf16], bf16), library, "{path:?}");
        }
        for operands in [[Bf16, Nvfp4], [Bf16, Bf16], [Mxfp8, Mxfp8]] {
            assert!(!is_ours(GemmBackend::Scalar, operands, f32), "{operands:?}");
        }
        assert!(is_ours(GemmBackend::Scalar, [Nvfp4; 2], f32));
    }
}
