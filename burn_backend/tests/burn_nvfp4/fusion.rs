//! One training step with fusion, which `Tensor` uses, and without it, on the backend's own
//! primitives.

use burn_core::backend::{Autodiff, AutodiffBackend, DispatchDevice, ops::FloatTensorOps};
use burn_core::tensor::{DType, TensorData};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use burn_nvfp4::functions::linear;
use burn_nvfp4::ops::{LinearContext, MaybeTensor, Nvfp4Ops, RowGroups};

use crate::support::{Matrix, activation, device, spec, values};

type Backend = Autodiff<CubeBackend>;

#[test]
fn a_step_without_fusion_is_the_step_with_it() {
    let device = device();
    let DispatchDevice::Cube(cube) = device.as_dispatch() else {
        nvfp4_test_support::elsewhere!(Cube);
    };
    let x = Matrix::gaussian(24, 32, activation(), 111);
    let w = Matrix::gaussian(32, 32, DType::F32, 112);

    let leaf = |matrix: &Matrix| {
        let data = TensorData::new(matrix.values.clone(), [matrix.rows, matrix.cols]);
        let tensor = CubeBackend::float_from_data(data.convert_dtype(matrix.dtype), cube);
        Backend::float_set_require_grad(Backend::from_inner(tensor), true)
    };
    let read = |tensor: CubeTensor| -> Vec<f32> {
        burn_cubecl::ops::into_data_sync(tensor)
            .convert::<f32>()
            .try_to_vec()
            .unwrap()
    };
    let (plain_x, plain_w) = (leaf(&x), leaf(&w));
    let y = Backend::nvfp4_linear(
        plain_x.clone(),
        plain_w.clone(),
        MaybeTensor::Absent,
        RowGroups::Whole,
        spec(0, 0),
        LinearContext::default(),
    );
    let plain_y = read(y.primitive().clone());
    let grads = Backend::backward(y);
    let plain_dx = read(Backend::grad(&plain_x, &grads).unwrap());
    let plain_dw = read(Backend::grad(&plain_w, &grads).unwrap());

    let device = device.autodiff();
    let (x, w) = (
        x.tensor(&device).require_grad(),
        w.tensor(&device).require_grad(),
    );
    let y = linear(x.clone(), w.clone(), None, spec(0, 0));
    let grads = y.clone().sum().backward();
    assert_eq!(values(y.inner()), plain_y);
    assert_eq!(values(x.grad(&grads).unwrap()), plain_dx);
    assert_eq!(values(w.grad(&grads).unwrap()), plain_dw);
}
