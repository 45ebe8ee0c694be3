//! Codes and scales of a weight, as module state.

use burn_core as burn;

use burn_core::backend::Dispatch;
use burn_core::module::{Module, Param, ParamId};
use burn_core::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use nvfp4_kernels::{BLOCK, BlockScaling, Layout, Nvfp4Error, Usage};

use crate::ops::{MaybeTensor, Nvfp4KernelOps, QuantizedData, QuantizedMatrix, RowGroups};
use crate::validate;

/// A weight in NVFP4, or a stack of them: element `(n, k)` is `e2m1(code) · e4m3(scale) · global`.
///
/// It has no gradient and no copy in high precision. A module with it moves between devices and is
/// saved in records as any other; its integers are no weights to optimizers.
#[derive(Module, Debug)]
pub struct Nvfp4Weight {
    /// Codes, `u32[n, k / 8]`: eight to a word, the first in the lowest four bits.
    pub codes: Param<Tensor<2, Int>>,
    /// Block scales, `u8[n, k / 16]`: E4M3 bytes.
    pub scales: Param<Tensor<2, Int>>,
    /// The factors that dequantize, `f32[stack]`: one for each matrix of equally many rows.
    pub global: Param<Tensor<1>>,
}

impl Nvfp4Weight {
    /// A weight of these buffers.
    ///
    /// # Errors
    /// When a buffer has another shape or type than its field says, they are on different devices,
    /// or the device has no implementation.
    pub fn try_from_parts(
        codes: Tensor<2, Int>,
        scales: Tensor<2, Int>,
        global: Tensor<1>,
    ) -> Result<Self, Nvfp4Error> {
        let device = codes.device();
        validate::device("codes", &device)?;
        let ([n, words], [stack]) = (codes.dims(), global.dims());
        validate::blocks("codes", "k", words * 8)?;
        validate::buffer("codes", &codes, [n, words], DType::U32)?;
        validate::buffer("scales", &scales, [n, words / 2], DType::U8)?;
        validate::buffer("global", &global, [stack], DType::F32)?;
        validate::same_device(("codes", &device), ("scales", &scales.device()))?;
        validate::same_device(("codes", &device), ("global", &global.device()))?;
        if n == 0 || stack == 0 || !n.is_multiple_of(stack) {
            return Err(Nvfp4Error::shape(
                "global",
                format!("{stack} for {n} rows"),
                "a divisor of the rows: one for each matrix",
            ));
        }
        Ok(Self {
            codes: Param::initialized(ParamId::new(), codes),
            scales: Param::initialized(ParamId::new(), scales),
            global: Param::initialized(ParamId::new(), global.detach().set_require_grad(false)),
        })
    }

    /// A weight of the bytes of a checkpoint, on `device`: `codes` `[n, k / 2]` with the even
    /// element in the low half, E4M3 `scales` `[n, k / 16]`, both row-major.
    ///
    /// # Errors
    /// When a number of bytes does not fit the shape; and as
    /// [`try_from_parts`](Self::try_from_parts).
    pub fn try_from_bytes(
        [n, k]: [usize; 2],
        codes: Vec<u8>,
        scales: Vec<u8>,
        global: Vec<f32>,
        device: &Device,
    ) -> Result<Self, Nvfp4Error> {
        validate::blocks("shape", "k", k)?;
        for (name, found, expected) in [
            ("codes", codes.len(), n * k / 2),
            ("scales", scales.len(), n * k / BLOCK),
        ] {
            if found != expected {
                return Err(Nvfp4Error::shape(
                    name,
                    format!("{found} bytes"),
                    format!("{expected}, for a weight of {n} x {k}"),
                ));
            }
        }
        let stack = global.len();
        let codes = TensorData::from_bytes_vec(codes, [n, k / 8], DType::U32);
        let scales = TensorData::new(scales, [n, k / BLOCK]);
        let global = TensorData::new(global, [stack]);
        Self::try_from_parts(
            Tensor::from_data(codes, (device, DType::U32)),
            Tensor::from_data(scales, (device, DType::U8)),
            Tensor::from_data(global, (device, DType::F32)),
        )
    }

    /// The columnwise tensor of a trained weight, `[d_in, d_out]` or a stack of them one below
    /// another, as the rowwise tensor of its transpose.
    pub(super) fn from_trained(trained: QuantizedMatrix<Dispatch>) -> Result<Self, Nvfp4Error> {
        let layout = trained.layout;
        let amax = trained.amax.clone().into_option();
        let amax = Tensor::<1>::from_dispatch(amax.expect("NVFP4 has a global scale"));
        let (codes, scales) = trained.into_packed();
        Self::try_from_parts(
            Tensor::from_dispatch(codes),
            Tensor::from_dispatch(scales),
            amax / layout.scaling.range(),
        )
    }

    /// Rows of all matrices, and the length of each: `[n, k]`.
    pub fn shape(&self) -> [usize; 2] {
        let [n, words] = self.codes.dims();
        [n, 8 * words]
    }

    /// Number of matrices.
    pub fn stack(&self) -> usize {
        self.global.dims()[0]
    }

    /// Bytes of codes, block scales and global scales.
    pub fn bytes(&self) -> usize {
        let [n, k] = self.shape();
        n * k / 2 + n * k / BLOCK + 4 * self.stack()
    }

    /// The values, `[n, k]` as `dtype`: the weight in high precision.
    ///
    /// # Errors
    /// When `dtype` is not one of `F32`, `BF16` and `F16`.
    pub fn try_dequantize(&self, dtype: FloatDType) -> Result<Tensor<2>, Nvfp4Error> {
        validate::float("dtype", dtype.into())?;
        let groups = match self.stack() {
            1 => RowGroups::Whole,
            stack => RowGroups::Batch(stack),
        };
        let values = Dispatch::nvfp4_dequantize(self.quantized(), groups, dtype);
        Ok(Tensor::from_dispatch(values))
    }

    /// The rowwise tensor that a GEMM reads.
    pub(super) fn quantized(&self) -> QuantizedMatrix<Dispatch> {
        let [n, k] = self.shape();
        QuantizedMatrix {
            data: QuantizedData::Packed {
                codes: self.codes.val().into_dispatch(),
                scales: self.scales.val().into_dispatch(),
            },
            amax: MaybeTensor::Present(self.global.val().into_dispatch()),
            layout: Layout {
                scaling: BlockScaling::Static,
                ..Layout::nvfp4(n, k, Usage::Rowwise)
            },
        }
    }
}
