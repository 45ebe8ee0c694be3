//! Cube: launches of the CubeCL kernels. Runs on the fusion server's thread where fusion is on.

use burn_core::backend::tensor::FloatTensor;
use burn_core::tensor::{DType, FloatDType, Shape};
use burn_cubecl::{
    CubeBackend,
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use cubecl::server::Handle;
use nvfp4_kernels::device::{AmaxScope, DeviceCopy, DevicePacked, FloatKind, Groups, Matrix};
use nvfp4_kernels::ops::{AmaxRequest, CopyRequest};
use nvfp4_kernels::{Hadamard, Nvfp4Error, PackedAxis, Rounding, gemm, ops};

use super::{
    Bias, Nvfp4Ops, Packed, PackedLayout, PackedPair, PairSpec, QuantizeSpec, copy_name, trace_op,
};

impl Nvfp4Ops for CubeBackend {
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        let x = Source::new(x);
        trace_op(
            "quantize",
            copy_name(spec.axis),
            x.matrix.rows,
            x.matrix.cols,
        );
        let amax = x.amax(spec.hadamard);
        let (client, matrix) = (&x.tensor.client, &x.matrix);
        let packed = launched(match spec.axis {
            PackedAxis::Cols => ops::quantize_row(client, matrix, &amax, spec.rounding.into()),
            PackedAxis::Rows => {
                ops::quantize_col(client, matrix, &amax, spec.rounding.into(), spec.hadamard)
            }
        });
        x.packed(packed, spec.hadamard)
    }

    fn nvfp4_quantize_pair(x: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let x = Source::new(x);
        trace_op("quantize", "pair", x.matrix.rows, x.matrix.cols);
        let (client, matrix) = (&x.tensor.client, &x.matrix);
        match spec {
            PairSpec::Tile => {
                let amax = x.amax(None);
                let (row, col) = launched(ops::quantize_tile(client, matrix, &amax));
                PackedPair {
                    row: x.packed(row, None),
                    col: x.packed(col, None),
                }
            }
            PairSpec::Blocks { row, col, hadamard } => {
                let (amax, col_amax) = x.pair_amax(hadamard);
                let request = |amax, rounding: Rounding, hadamard| CopyRequest {
                    amax,
                    scope: AmaxScope::Group,
                    copy: DeviceCopy {
                        hadamard,
                        ..DeviceCopy::new(rounding)
                    },
                };
                let (row, col) = launched(ops::quantize_both(
                    client,
                    matrix,
                    &Groups::One,
                    &request(&amax, row, None),
                    &request(&col_amax, col, hadamard),
                ));
                PackedPair {
                    row: x.packed(row, None),
                    col: x.packed(col, hadamard),
                }
            }
        }
    }

    fn nvfp4_dequantize(packed: Packed<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let PackedLayout {
            rows, cols, axis, ..
        } = packed.layout;
        trace_op("dequantize", copy_name(axis), rows, cols);
        let like = packed.codes.clone();
        let out = launched(ops::dequantize(
            &like.client,
            &device(packed),
            float_kind(dtype),
        ));
        result(&like, out, dtype)
    }

    fn nvfp4_matmul(
        a: Packed<Self>,
        b: Packed<Self>,
        bias: Bias<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        trace_op("matmul", "", a.layout.outer(), b.layout.outer());
        let like = a.codes.clone();
        let bias = match bias {
            Bias::Absent => None,
            Bias::Vector(bias) => {
                let bias = into_contiguous(cast(bias, DType::F32));
                let len = bias.meta.shape()[0];
                Some(launched(Matrix::new(bias.handle, 1, len, FloatKind::F32)))
            }
        };
        let out = gemm::gemm(
            &like.client,
            &device(a),
            &device(b),
            bias.as_ref(),
            float_kind(dtype),
        );
        result(&like, launched(out), dtype)
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

    /// The largest magnitude, after the transform if there is one.
    fn amax(&self, hadamard: Option<Hadamard>) -> Handle {
        launched(ops::amax(&self.tensor.client, &self.matrix, hadamard))
    }

    /// The maxima for a row-wise copy and for a column-wise one after the transform, in one read; the
    /// same one serves both copies without a transform.
    fn pair_amax(&self, hadamard: Option<Hadamard>) -> (Handle, Handle) {
        if hadamard.is_none() {
            let amax = self.amax(None);
            return (amax.clone(), amax);
        }
        let request = AmaxRequest {
            rows: Some(AmaxScope::Group),
            cols: Some((AmaxScope::Group, hadamard)),
        };
        let (client, matrix) = (&self.tensor.client, &self.matrix);
        let found = launched(ops::amaxes(client, matrix, &Groups::One, &request));
        let [row, col] = [found.rows, found.cols].map(|amax| amax.expect("asked for"));
        (row, col)
    }

    fn packed(&self, packed: DevicePacked, hadamard: Option<Hadamard>) -> Packed<CubeBackend> {
        let DevicePacked {
            rows, cols, axis, ..
        } = packed;
        let layout = PackedLayout {
            rows,
            cols,
            axis,
            hadamard,
        };
        let (outer, blocks) = (layout.outer(), layout.blocks());
        let like = &self.tensor;
        Packed {
            codes: new_tensor(
                like,
                packed.codes,
                Shape::new([outer, blocks * 2]),
                DType::U32,
            ),
            scales: new_tensor(like, packed.scales, Shape::new([outer, blocks]), DType::U8),
            amax: new_tensor(like, packed.amax, Shape::new([1]), DType::F32),
            layout,
        }
    }
}

/// The kernels' view of a packed matrix.
fn device(packed: Packed<CubeBackend>) -> DevicePacked {
    let PackedLayout {
        rows,
        cols,
        axis,
        hadamard,
    } = packed.layout;
    let parts = [packed.codes, packed.scales, packed.amax].map(|part| into_contiguous(part).handle);
    DevicePacked::plain(parts.into(), (rows, cols), axis, hadamard)
}

/// What a kernel wrote, as a tensor beside `like`.
pub(super) fn result(like: &CubeTensor, out: Matrix, dtype: FloatDType) -> CubeTensor {
    new_tensor(
        like,
        out.handle,
        Shape::new([out.rows, out.cols]),
        dtype.into(),
    )
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
