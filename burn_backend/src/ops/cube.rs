//! Cube: launches of the CubeCL kernels. Runs on the fusion server's thread where fusion is on.

use burn_core::backend::tensor::FloatTensor;
use burn_core::tensor::FloatDType;
use burn_cubecl::CubeBackend;

use super::{Bias, Nvfp4Ops, Packed, PackedPair, PairSpec, QuantizeSpec};

impl Nvfp4Ops for CubeBackend {
    fn nvfp4_quantize(_x: FloatTensor<Self>, _spec: QuantizeSpec) -> Packed<Self> {
        unimplemented!()
    }

    fn nvfp4_quantize_pair(_x: FloatTensor<Self>, _spec: PairSpec) -> PackedPair<Self> {
        unimplemented!()
    }

    fn nvfp4_dequantize(_packed: Packed<Self>, _dtype: FloatDType) -> FloatTensor<Self> {
        unimplemented!()
    }

    fn nvfp4_matmul(
        _a: Packed<Self>,
        _b: Packed<Self>,
        _bias: Bias<Self>,
        _dtype: FloatDType,
    ) -> FloatTensor<Self> {
        unimplemented!()
    }
}
