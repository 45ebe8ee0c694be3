//! Codes and scales of a packed weight, as module state.

use burn_core as burn;

use burn_core::backend::Dispatch;
use burn_core::module::{Module, Param, ParamId};
use burn_core::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use nvfp4_formats::{BLOCK, BlockScaling, Layout, Nvfp4Error, Usage};

use super::scales::{BlockScales, Matrices};
use crate::functions::into_bias;
use crate::ops::inference::PackedShape;
use crate::ops::packed::{Activations, PackedInput, PackedOps};
use crate::ops::{
    MaybeTensor, Nvfp4KernelOps, OperandSpec, QuantizedData, QuantizedMatrix, RowGroups, StoredForm,
};
use crate::validate;

/// Weight in NVFP4, or a stack of weights: element `(n, k)` is `e2m1(code) · e4m3(scale) · global`.
///
/// It has no gradient and no high-precision copy. A module that contains it moves between devices
/// and is saved in records like any other; optimizers ignore its integer tensors.
#[derive(Module, Debug)]
pub struct Nvfp4Weight {
    /// Codes, `u32[n, k / 8]`: eight codes per word, the first in the lowest four bits.
    pub codes: Param<Tensor<2, Int>>,
    /// Block scales, `u8[n, k / 16]`: E4M3 bytes. In memory they may be in 128x4 tiles.
    pub scales: BlockScales,
    /// Global scales that dequantize, `f32[stack]`: one per matrix, all with the same number of
    /// rows.
    pub global: Param<Tensor<1>>,
}

impl Nvfp4Weight {
    /// Creates a weight from these buffers.
    ///
    /// # Errors
    /// Returns an error if a buffer has another shape or dtype than documented at its field, the
    /// devices differ, or the device has no implementation.
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
            scales: BlockScales::new(scales),
            global: Param::initialized(ParamId::new(), global.detach().set_require_grad(false)),
        })
    }

    /// Creates a weight on `device` from the bytes of a checkpoint: `codes` `[n, k / 2]` with the
    /// even element in the low half, E4M3 `scales` `[n, k / 16]`, both row-major.
    ///
    /// # Errors
    /// Returns an error if a number of bytes does not match the shape; otherwise same as
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

    /// Reinterprets the column-wise tensor of a trained weight, `[d_in, d_out]` or a vertical stack
    /// of them, as the row-wise tensor of its transpose.
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

    /// Returns `[n, k]`: number of rows of all matrices, and length of a row.
    pub fn shape(&self) -> [usize; 2] {
        let [n, words] = self.codes.dims();
        [n, 8 * words]
    }

    /// Number of matrices in the stack.
    pub fn stack(&self) -> usize {
        self.global.dims()[0]
    }

    /// Size in bytes of codes, block scales and global scales, without the padding of tiles.
    pub fn bytes(&self) -> usize {
        let [n, k] = self.shape();
        n * k / 2 + n * k / BLOCK + 4 * self.stack()
    }

    /// Dequantizes the weight to `[n, k]` in `dtype`.
    ///
    /// # Errors
    /// Returns an error if `dtype` is not one of `F32`, `BF16` and `F16`.
    pub fn try_dequantize(&self, dtype: FloatDType) -> Result<Tensor<2>, Nvfp4Error> {
        validate::float("dtype", dtype.into())?;
        let groups = match self.stack() {
            1 => RowGroups::Whole,
            stack => RowGroups::Batch(stack),
        };
        let values = Dispatch::nvfp4_dequantize(self.quantized(), groups, dtype);
        Ok(Tensor::from_dispatch(values))
    }

    /// Converts the block scales to the layout that the GEMMs of a layer with inputs quantized by
    /// `x` read, for any number of rows; `experts` is true for a grouped layer. The conversion runs
    /// once, here and when a record is loaded.
    pub(super) fn read_by(self, x: &OperandSpec, experts: bool) -> Self {
        let (device, shape) = (self.codes.device(), self.packed_shape(experts));
        // With one row, a GEMM takes only as long as reading its weight: there is no time for a
        // conversion pass.
        let reads_tiles = |rows| shape.form(&device, x, rows) == StoredForm::Tiles;
        match [1, 4096].into_iter().all(reads_tiles) {
            true => self.in_form(StoredForm::Tiles),
            false => self.in_form(StoredForm::Rows),
        }
    }

    /// Returns the properties of the weight that the choice of a GEMM depends on; `experts` is true
    /// for a grouped layer.
    pub(super) fn packed_shape(&self, experts: bool) -> PackedShape {
        let ([n, k], stack) = (self.shape(), self.stack());
        PackedShape {
            matrix: (n / stack, k),
            stack: experts.then_some(stack),
        }
    }

    /// Converts the block scales to tiles or to rows.
    fn in_form(self, form: StoredForm) -> Self {
        let ([n, k], stack) = (self.shape(), self.stack());
        let matrices = Matrices {
            count: stack,
            rows: n / stack,
            blocks: k / BLOCK,
        };
        Self {
            scales: self.scales.in_form(form, matrices),
            ..self
        }
    }

    /// Computes `y = x wᵀ + bias` for rows `x` (`[rows, k]`) that the layer has checked: with the
    /// matrix of its group for each row. `input` are the static global scales of static
    /// `activations`.
    pub(super) fn multiply<const B: usize>(
        &self,
        x: Tensor<2>,
        (activations, input): (Activations, Option<&Param<Tensor<1>>>),
        bias: Option<&Param<Tensor<B>>>,
        groups: RowGroups<Dispatch>,
    ) -> Tensor<2> {
        let shape = self.packed_shape(!matches!(groups, RowGroups::Whole));
        let form = shape.form(&x.device(), &activations.spec(), x.dims()[0]);
        let y = Dispatch::nvfp4_packed_linear(
            x.into_dispatch(),
            PackedInput { activations, form },
            self.quantized(),
            into_bias(bias.map(|bias| bias.val())),
            groups,
            input.map(|input| input.val().into_dispatch()).into(),
        );
        Tensor::from_dispatch(y)
    }

    /// Returns the row-wise tensor that a GEMM reads.
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
                form: self.scales.form(),
                ..Layout::nvfp4(n, k, Usage::Rowwise)
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_core::store::ModuleRecord;
    use burn_core::tensor::Distribution;
    use nvfp4_formats::reference::swizzle;

    use super::*;
    use crate::nn::Nvfp4PackedLinear;

    const ROWS: usize = 130;
    const K: usize = 80;

    /// Device that `NVFP4_TEST_DEVICE` names.
    fn device() -> Device {
        match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
            #[cfg(feature = "cpu")]
            Ok("cpu") => nvfp4_test_support::cpu_runtime(Device::cpu),
            #[cfg(feature = "cuda")]
            Ok("cuda") => Device::cuda(0),
            #[cfg(feature = "flex")]
            Ok("flex") | Err(_) => Device::flex(),
            other => panic!("NVFP4_TEST_DEVICE={other:?}: not a device of this build"),
        }
    }

    /// Creates a stack of weights; also returns their scale bytes in row-major layout.
    fn weight(stack: usize, seed: u8) -> (Nvfp4Weight, Vec<u8>) {
        let n = stack * ROWS;
        let bytes = |len: usize, step: usize| (0..len).map(move |i| (i * step % 251) as u8);
        let codes = bytes(n * K / 2, 7).map(|byte| byte ^ seed).collect();
        // Positive and finite.
        let scales: Vec<u8> = bytes(n * K / BLOCK, 3).map(|byte| byte % 0x60).collect();
        let global = (0..stack).map(|i| 0.01 * (i + 1) as f32).collect();
        let made = Nvfp4Weight::try_from_bytes([n, K], codes, scales.clone(), global, &device());
        (made.unwrap(), scales)
    }

    fn scales(weight: &Nvfp4Weight) -> Vec<u8> {
        weight.scales.val().into_data().iter::<u8>().collect()
    }

    #[test]
    fn tiles_are_those_of_the_oracle() {
        for stack in [1, 3] {
            let (weight, rows) = weight(stack, 0);
            let tiled = weight.in_form(StoredForm::Tiles);
            let expected = swizzle::swizzle_batch(&rows, stack, ROWS, K / BLOCK);
            assert_eq!(scales(&tiled), expected);
            assert_eq!((tiled.shape(), tiled.stack()), ([stack * ROWS, K], stack));
            assert_eq!(scales(&tiled.in_form(StoredForm::Rows)), rows);
        }
    }

    /// The bytes of a record do not depend on the layout in memory, and a record can be loaded into
    /// a weight of either layout.
    #[test]
    fn records_hold_rows() {
        let ((rows, bytes), (other, _)) = (weight(3, 0), weight(3, 0x55));
        let tiled = rows.clone().in_form(StoredForm::Tiles);
        let record = |weight: &Nvfp4Weight| weight.clone().into_record().into_bytes().unwrap();
        let saved = record(&rows);
        assert_eq!(saved, record(&tiled));
        let saved = || ModuleRecord::from_bytes(saved.clone()).unwrap();
        let into_rows = other.clone().load_record(saved());
        assert_eq!(scales(&into_rows), bytes);
        let into_tiles = other.in_form(StoredForm::Tiles).load_record(saved());
        assert_eq!(scales(&into_tiles), scales(&tiled));
        let codes = |weight: &Nvfp4Weight| weight.codes.val().into_data();
        assert_eq!(codes(&into_tiles), codes(&rows));
    }

    /// GEMM results and dequantized values have the same bits in both layouts.
    #[test]
    fn layers_compute_the_same() {
        let device = device();
        if matches!(
            std::env::var("NVFP4_TEST_DEVICE").as_deref(),
            Err(_) | Ok("flex")
        ) {
            // Flex has no tiles of scales.
            nvfp4_test_support::elsewhere!(Cube);
        }
        let normal = Distribution::Normal(0.0, 1.0);
        for activations in [Activations::HighPrecision, Activations::DYNAMIC] {
            let (weight, _) = weight(1, 0);
            let layer = Nvfp4PackedLinear::try_new(weight, activations, None, None).unwrap();
            let in_this_form = |form| {
                let mut layer = layer.clone();
                layer.weight = layer.weight.in_form(form);
                layer
            };
            let rows = in_this_form(StoredForm::Rows);
            let tiles = in_this_form(StoredForm::Tiles);
            let x = Tensor::<2>::random([5, K], normal, (&device, DType::F32));
            let y = |layer: &Nvfp4PackedLinear| layer.forward(x.clone()).into_data();
            assert_eq!(y(&rows), y(&tiles), "{activations:?}");
            let values = |layer: &Nvfp4PackedLinear| {
                let values = layer.weight.try_dequantize(FloatDType::F32);
                values.unwrap().into_data()
            };
            assert_eq!(values(&rows), values(&tiles));
        }
        let (stack, _) = weight(3, 0);
        let values = |weight: &Nvfp4Weight| weight.try_dequantize(FloatDType::F32).unwrap();
        let tiled = stack.clone().in_form(StoredForm::Tiles);
        assert_eq!(values(&stack).into_data(), values(&tiled).into_data());
    }
}
