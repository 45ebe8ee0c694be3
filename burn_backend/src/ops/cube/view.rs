//! The memory of a tensor, for kernels that Burn does not call.

use burn_core::tensor::{DType, Tensor};
use burn_cubecl::{Cube, CubeBackend};
use cubecl::client::Client;
use nvfp4_kernels::tensor::Matrix;

use super::tensors::Source;

/// Returns `x` as a matrix in device memory, for the functions of `nvfp4_kernels`, with the client
/// of its device. Runs the operations that Burn's fusion has queued for it.
///
/// Returns `None` if its device is not one of CubeCL's, it is tracked by autodiff, or its type is
/// not `f32`, `bf16` or `f16`.
pub fn device_matrix(x: Tensor<2>) -> Option<(Client, Matrix)> {
    let is_float = matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16);
    let x = x.try_into_primitive::<Cube>().ok().filter(|_| is_float)?;
    let client = x.client.clone();
    let Source { tensor, matrix } = Source::new(client.resolve_tensor_float::<CubeBackend>(x));
    Some((tensor.client, matrix))
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn_core::tensor::{Device, TensorData};

    use super::*;

    #[test]
    fn a_view_has_the_values_of_the_tensor() {
        let device = Device::cpu();
        let data = TensorData::from([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        let x = Tensor::<2>::from_data(data, &device);
        // Not contiguous, and still queued.
        let x = (x * 2.0).transpose();
        let (client, matrix) = device_matrix(x).expect("a CubeCL device");
        assert_eq!((matrix.rows, matrix.cols), (3, 2));
        let bytes = client
            .read_one(matrix.handle)
            .expect("the kernels have run");
        let values: Vec<f32> = (bytes.chunks_exact(4))
            .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("4 bytes")))
            .collect();
        assert_eq!(values, [2.0, 8.0, 4.0, 10.0, 6.0, 12.0]);
    }

    #[cfg(feature = "flex")]
    #[test]
    fn other_devices_have_no_view() {
        let x = Tensor::<2>::zeros([2, 2], &Device::flex());
        assert!(device_matrix(x).is_none());
        let tracked = Tensor::<2>::zeros([2, 2], &Device::cpu().autodiff());
        assert!(device_matrix(tracked).is_none());
    }
}
