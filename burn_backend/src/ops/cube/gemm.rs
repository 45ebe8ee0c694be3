//! GEMMs by this crate's kernels, or by Burn's matmul where that is faster.

use burn_core::backend::ops::FloatTensorOps;
use burn_core::tensor::{DType, FloatDType, Shape};
use burn_cubecl::{
    CubeBackend,
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use nvfp4_formats::{AmaxGranularity, Format, Usage};
use nvfp4_kernels::capabilities::GemmBackend;
use nvfp4_kernels::gemm::{
    self, EpilogueKind, Factor, Gemm, OperandLayout, Problem, Scale, Target,
};
use nvfp4_kernels::tensor::{DeviceQuantized, FloatKind, Groups, Matrix};

use super::super::dtype::float_kind;
use super::super::tensors::{Operand, RowGroups};
use super::super::trace_op;
use super::dequantize::dequantize;
use super::tensors::{Source, launched, like, matrix, owned, result, stored_shape, to_device};

/// Tensor that is added to the sums of a dense GEMM.
pub(super) enum Addend {
    /// None.
    None,
    /// One value per column.
    Bias(CubeTensor),
    /// One value per element, in the dtype of the output, which gets its memory.
    Matrix(CubeTensor),
}

impl Addend {
    /// Converts an optional bias.
    pub fn of_bias(bias: Option<CubeTensor>) -> Self {
        bias.map_or(Self::None, Self::Bias)
    }
}

/// Computes a dense GEMM.
pub(super) fn dense(
    a: Operand<CubeBackend>,
    b: Operand<CubeBackend>,
    addend: Addend,
    dtype: FloatDType,
) -> CubeTensor {
    let ((m, k), n) = (stored_shape(&a), stored_shape(&b).0);
    trace_op("gemm", "", m, n);
    let like = like(&a);
    // The choice of the GEMM below, unless memory is not aligned.
    let backend = || {
        let mut problem = Problem::new([&a, &b].map(operand_layout), (m, n, k));
        problem.epilogue = EpilogueKind {
            a: factor(&a),
            b: factor(&b),
            bias: matches!(addend, Addend::Bias(_)),
            accumulate: matches!(addend, Addend::Matrix(_)),
            out: float_kind(dtype),
            ..problem.epilogue
        };
        match gemm::choose(&like.client, &problem) {
            Ok(choice) => choice.backend,
            Err(_) => GemmBackend::Scalar,
        }
    };
    // The result of Burn's matmul has the dtype of its operands. It is rounded once, to `dtype`:
    // the matmul is in f32 if the output is wider, or if something is added afterwards.
    let inner = match (&a, &b, &addend) {
        (Operand::Float(x, _), Operand::Float(y, _), Addend::None)
            if x.dtype == DType::from(dtype) && y.dtype == x.dtype =>
        {
            dtype
        }
        // Exact for dequantized values, and for narrower floats.
        _ => FloatDType::F32,
    };
    let are_nvfp4 = is_nvfp4(&a) && is_nvfp4(&b);
    let are_exact = !is_wide(&a) && !is_wide(&b);
    if runs_on_kernels(are_nvfp4, are_exact, backend, inner) {
        let (bias, target) = match addend {
            Addend::None => (None, None),
            Addend::Bias(bias) => (Some(bias_matrix(bias)), None),
            Addend::Matrix(added) => (None, Some(Source::new(owned("add_gemm", added)).matrix)),
        };
        let target = match &target {
            None => Target::New(float_kind(dtype)),
            Some(target) => Target::Accumulate(target),
        };
        let (a, b) = (DeviceOperand::new(a), DeviceOperand::new(b));
        let request = Gemm::new(a.view(), b.view())
            .bias(bias.as_ref())
            .target(target);
        return result(&like, launched(gemm::gemm(&like.client, &request)).matrix);
    }
    tracing::debug!(m, n, k, ?inner, "GEMM by Burn's matmul");
    let (a, b) = (stored_rows(a, inner), stored_rows(b, inner));
    let out = CubeBackend::float_matmul(a, CubeBackend::float_swap_dims(b, 0, 1));
    let out = match addend {
        Addend::None => out,
        Addend::Bias(bias) => {
            let bias = CubeBackend::float_reshape(cast(bias, DType::F32), Shape::new([1, n]));
            CubeBackend::float_add(cast(out, DType::F32), bias)
        }
        Addend::Matrix(added) => {
            CubeBackend::float_add(cast(out, DType::F32), cast(added, DType::F32))
        }
    };
    cast(out, dtype.into())
}

/// Converts a bias to the kernels' matrix.
pub(in crate::ops) fn bias_matrix(bias: CubeTensor) -> Matrix {
    let bias = into_contiguous(cast(bias, DType::F32));
    match bias.meta.shape().num_dims() {
        1 => {
            let len = bias.meta.shape()[0];
            launched(Matrix::new(bias.handle, 1, len, FloatKind::F32))
        }
        _ => matrix(&bias),
    }
}

/// Returns true if an operand is NVFP4: codes, or their bf16 values. The kernels reject MN-major
/// operands of other formats.
fn is_nvfp4(operand: &Operand<CubeBackend>) -> bool {
    match operand {
        Operand::Quantized(quantized) => quantized.layout.format == Format::Nvfp4,
        Operand::QuantizedMnMajor(_) => true,
        Operand::Float(..) => false,
    }
}

/// Returns true if an operand is a float that the kernels do not support.
pub(super) fn is_wide(operand: &Operand<CubeBackend>) -> bool {
    matches!(operand, Operand::Float(x, _) if x.dtype != DType::BF16)
}

/// Returns the layout of an operand for the kernels of [`gemm`].
fn operand_layout(operand: &Operand<CubeBackend>) -> OperandLayout {
    match operand {
        Operand::Quantized(quantized)
            if quantized.layout.format == Format::Nvfp4 && quantized.layout.form.is_packed() =>
        {
            OperandLayout::Packed
        }
        Operand::Quantized(quantized) if quantized.layout.format == Format::Mxfp8 => {
            OperandLayout::Mxfp8
        }
        Operand::QuantizedMnMajor(_) => OperandLayout::PackedMnMajor,
        Operand::Quantized(_) | Operand::Float(_, Usage::Rowwise) => OperandLayout::KMajor,
        Operand::Float(_, Usage::Columnwise) => OperandLayout::MnMajor,
    }
}

/// Returns the granularity of an operand's global scale in a dense GEMM.
fn factor(operand: &Operand<CubeBackend>) -> Factor {
    match operand {
        Operand::Quantized(quantized) | Operand::QuantizedMnMajor(quantized)
            if quantized.layout.format.has_global_scale() =>
        {
            match quantized.layout.amax {
                AmaxGranularity::PerTensor => Factor::Tensor,
                AmaxGranularity::PerRow => Factor::PerRow,
            }
        }
        Operand::Quantized(_) | Operand::QuantizedMnMajor(_) | Operand::Float(..) => Factor::One,
    }
}

/// Returns true if a GEMM that would use `backend` runs on the kernels of [`gemm`], instead of
/// Burn's matmul in dtype `inner`, given if both operands are NVFP4, and if both are exact in bf16.
///
/// Two NVFP4 operands always use the kernels; on Hopper and with cuBLASLt, every operand that is
/// exact in bf16 does. On other GPUs two bf16 matrices go to Burn if it multiplies in bf16 (8192³
/// on an H100: 255 TFLOP/s autotuned, compared with 151 by the tiles of that backend). They use the
/// kernels if Burn would multiply in `f32`, because of an addend or because one operand is quantized
/// and would first be dequantized as a whole: with small M, a packed weight has a dedicated kernel.
/// On CubeCL's CPU runtime, which is for tests, everything except NVFP4 goes to Burn.
fn runs_on_kernels(
    are_nvfp4: bool,
    are_exact: bool,
    backend: impl FnOnce() -> GemmBackend,
    inner: FloatDType,
) -> bool {
    if are_nvfp4 || !are_exact {
        return are_nvfp4;
    }
    match backend() {
        GemmBackend::Sm90Wgmma | GemmBackend::CublasLt | GemmBackend::Sm100Tcgen05 => true,
        GemmBackend::Sm120BlockScaled | GemmBackend::Cmma => inner == FloatDType::F32,
        GemmBackend::Scalar => false,
    }
}

/// Returns the operand as a float matrix of dtype `dtype`, one row per stored row.
fn stored_rows(operand: Operand<CubeBackend>, dtype: FloatDType) -> CubeTensor {
    let (x, usage) = match operand {
        Operand::Quantized(quantized) => {
            let usage = quantized.layout.usage;
            (dequantize(quantized, &RowGroups::Whole, dtype), usage)
        }
        Operand::QuantizedMnMajor(quantized) => {
            let usage = quantized.layout.usage.transposed();
            (dequantize(quantized, &RowGroups::Whole, dtype), usage)
        }
        Operand::Float(x, usage) => (cast(x, dtype.into()), usage),
    };
    match usage {
        Usage::Rowwise => x,
        Usage::Columnwise => CubeBackend::float_swap_dims(x, 0, 1),
    }
}

/// Operand for the GEMM kernels, holding its memory.
pub(super) enum DeviceOperand {
    /// Quantized operand.
    Quantized(Box<DeviceQuantized>),
    /// MN-major NVFP4 operand: each stored row is one index of K.
    QuantizedMnMajor(Box<DeviceQuantized>),
    /// bf16 operand whose K dimension is along its columns or, for [`Usage::Columnwise`], its rows.
    Bf16(Matrix, Usage),
}

impl DeviceOperand {
    /// Converts an operand.
    pub fn new(operand: Operand<CubeBackend>) -> Self {
        match operand {
            Operand::Quantized(quantized) => {
                let is_mx = quantized.layout.format.is_mx();
                let mut stored = to_device(quantized, Groups::One);
                if is_mx {
                    // In stored orientation, including padding.
                    stored.layout = stored.layout.stored();
                }
                Self::Quantized(Box::new(stored))
            }
            Operand::QuantizedMnMajor(quantized) => {
                Self::QuantizedMnMajor(Box::new(to_device(quantized, Groups::One)))
            }
            Operand::Float(x, usage) => {
                let (x, usage) = as_in_memory(cast(x, DType::BF16), usage);
                Self::Bf16(Source::new(x).matrix, usage)
            }
        }
    }

    /// Converts the weights of a grouped GEMM, which are stacked along the rows in memory.
    pub fn stack(operand: Operand<CubeBackend>) -> Self {
        Self::new(match operand {
            Operand::Float(x, usage) => Operand::Float(into_contiguous(x), usage),
            quantized => quantized,
        })
    }

    /// Returns the operand of a dense GEMM.
    pub fn view(&self) -> gemm::Operand<'_> {
        match self {
            Self::Quantized(quantized) => gemm::Operand::from(&**quantized),
            Self::QuantizedMnMajor(quantized) => gemm::Operand::packed_mn_major(quantized),
            Self::Bf16(matrix, Usage::Rowwise) => matrix.into(),
            Self::Bf16(matrix, Usage::Columnwise) => gemm::Operand::mn_major(matrix),
        }
    }

    /// Returns the operand of a grouped GEMM: one amax per tensor is one per group.
    pub fn view_of_groups(&self) -> gemm::Operand<'_> {
        let operand = self.view();
        match operand.scale {
            Scale::Tensor(amax, range) => gemm::Operand {
                scale: Scale::PerGroup(amax, range),
                ..operand
            },
            _ => operand,
        }
    }
}

/// Returns `x` and its K axis; for a view that transposes a contiguous matrix, returns that matrix
/// and the other axis.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Covers the choice for the GEMMs of each backend.
    #[test]
    fn gemms_run_where_they_are_fastest() {
        let (bf16, f32) = (FloatDType::BF16, FloatDType::F32);
        let gpus = [
            GemmBackend::Sm90Wgmma,
            GemmBackend::CublasLt,
            GemmBackend::Sm100Tcgen05,
            GemmBackend::Sm120BlockScaled,
            GemmBackend::Cmma,
        ];
        for backend in gpus {
            let exact = |inner| runs_on_kernels(false, true, || backend, inner);
            assert!(exact(f32), "{backend:?}");
            let wide = runs_on_kernels(false, false, || backend, f32);
            assert!(!wide, "{backend:?}");
            let library = matches!(
                backend,
                GemmBackend::Sm90Wgmma | GemmBackend::CublasLt | GemmBackend::Sm100Tcgen05
            );
            assert_eq!(exact(bf16), library, "{backend:?}");
        }
        let scalar = |are_nvfp4| runs_on_kernels(are_nvfp4, true, || GemmBackend::Scalar, f32);
        assert!(!scalar(false) && scalar(true));
    }
}
