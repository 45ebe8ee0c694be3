//! The device under test, and moving tensors there and back.

use super::{inputs::TestElement, is_full};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_kernels::{
    QuantizedTensor,
    capabilities::Capabilities,
    cube::codec::emulate_e2m1_instructions,
    quantize::kernels::set_units,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};
use nvfp4_test_support::Skip;

/// The device that `NVFP4_TEST_DEVICE` names (`cpu`, the default, or `cuda`), or `None` (after
/// saying so) where it cannot be had. With `NVFP4_TEST_EMULATED` its kernels are those of
/// Blackwell, the instructions for E2M1 emulated; `NVFP4_TEST_UNITS` is a number of units for each
/// cube.
pub fn client(test: &str) -> Option<Client> {
    if std::env::var_os("NVFP4_TEST_EMULATED").is_some() {
        emulate_e2m1_instructions();
    }
    if let Ok(units) = std::env::var("NVFP4_TEST_UNITS") {
        set_units(units.parse().expect("NVFP4_TEST_UNITS is a number"));
    }
    match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
        #[cfg(feature = "cuda")]
        Ok("cuda") => Some(cubecl::Device::Cuda(Default::default()).client()),
        #[cfg(feature = "cpu")]
        Ok("cpu") | Err(_) => Some(cubecl::Device::Cpu(Default::default()).client()),
        #[cfg(not(feature = "cpu"))]
        Err(_) => {
            Skip::NoGpu.print(test, "NVFP4_TEST_DEVICE names none");
            None
        }
        other => {
            panic!("{test}: NVFP4_TEST_DEVICE is {other:?}, which this build has no runtime for")
        }
    }
}

/// Whether this run leaves out what only repeats other tests: on CubeCL's CPU runtime, which
/// compiles a kernel for seconds, without `cargo xtask test --full`.
pub fn is_brief(client: &Client) -> bool {
    client.name() == "cpu" && !is_full()
}

/// The device under test, or `None` (after saying so) where a run without `--full` leaves `test`
/// out.
pub fn client_of_full_run(test: &str) -> Option<Client> {
    let client = client(test)?;
    if is_brief(&client) {
        Skip::OnlyFull.print(test, "");
        return None;
    }
    Some(client)
}

/// The CUDA GPU under test, or `None` (after saying so); `why` says why the test takes one.
pub fn client_of_gpu(test: &str, why: &str) -> Option<Client> {
    let client = client(test)?;
    if client.name() == "cpu" {
        Skip::NoGpu.print(test, why);
        return None;
    }
    Some(client)
}

/// The CUDA GPU under test if its capabilities are `wanted`, or `None` (after saying so); `needs`
/// names the compute capability.
pub fn client_with(
    test: &str,
    needs: &str,
    wanted: impl Fn(&Capabilities) -> bool,
) -> Option<Client> {
    let client = client_of_gpu(test, needs)?;
    if !wanted(Capabilities::of(&client)) {
        Skip::OtherGpu.print(test, needs);
        return None;
    }
    Some(client)
}

/// The client, or an early return.
macro_rules! client {
    ($test:expr) => {
        match $crate::support::device::client($test) {
            Some(client) => client,
            None => return,
        }
    };
}

/// The client of a GPU, or an early return that says why it takes one.
macro_rules! on_gpu {
    ($test:expr, $why:literal) => {
        match $crate::support::device::client_of_gpu($test, $why) {
            Some(client) => client,
            None => return,
        }
    };
}

/// The client of a GPU with matrix instructions, or an early return.
macro_rules! gpu {
    ($test:expr) => {{
        use nvfp4_kernels::capabilities::GemmBackend;
        match $crate::support::device::client_with($test, "8.0 or later", |here| {
            here.gemm != GemmBackend::Scalar
        }) {
            Some(client) => client,
            None => return,
        }
    }};
}

/// The client of a Hopper GPU, or an early return.
macro_rules! hopper {
    ($test:expr) => {{
        use nvfp4_kernels::capabilities::GemmBackend;
        match $crate::support::device::client_with($test, "9.0", |here| {
            here.gemm == GemmBackend::Sm90Wgmma
        }) {
            Some(client) => client,
            None => return,
        }
    }};
}

/// A test of `check` for each type of element.
macro_rules! element_tests {
    ($($check:ident: $f32:ident, $bf16:ident, $f16:ident;)*) => {$(
        #[test]
        fn $f32() {
            $check::<f32>(&client!(stringify!($f32)));
        }
        #[test]
        fn $bf16() {
            $check::<bf16>(&client!(stringify!($bf16)));
        }
        #[test]
        fn $f16() {
            // All that is different from bf16 is the conversion, which other tests have.
            if let Some(client) = $crate::support::device::client_of_full_run(stringify!($f16)) {
                $check::<f16>(&client);
            }
        }
    )*};
}

/// Tests of `check`, which takes a client, a matrix, its rows and columns and what it is: matrices
/// of all `shapes`, and data of every kind in one of shape `of_kinds`, for each type of element.
macro_rules! matrix_tests {
    ($check:ident, $shapes:expr, $of_kinds:expr) => {
        fn check_shapes<T: DeviceElement>(client: &Client) {
            for (i, (rows, cols)) in $shapes.into_iter().enumerate() {
                let x = values(Kind::Heavy, rows * cols, i as u32);
                $check(client, &convert::<T>(&x), rows, cols, "shapes");
            }
        }

        fn check_kinds<T: DeviceElement>(client: &Client) {
            let (rows, cols) = $of_kinds;
            for (i, kind) in $crate::support::inputs::ALL_KINDS.into_iter().enumerate() {
                let x = values(kind, rows * cols, 100 + i as u32);
                $check(client, &convert::<T>(&x), rows, cols, &format!("{kind:?}"));
            }
        }

        element_tests! {
            check_shapes: shapes_f32, shapes_bf16, shapes_f16;
            check_kinds: kinds_f32, kinds_bf16, kinds_f16;
        }
    };
}

pub trait DeviceElement: TestElement + Default {
    const KIND: FloatKind;
}
impl DeviceElement for f32 {
    const KIND: FloatKind = FloatKind::F32;
}
impl DeviceElement for bf16 {
    const KIND: FloatKind = FloatKind::Bf16;
}
impl DeviceElement for f16 {
    const KIND: FloatKind = FloatKind::F16;
}

pub fn upload_bytes(client: &Client, bytes: &[u8]) -> Handle {
    if bytes.is_empty() {
        client.empty(1)
    } else {
        client.create_from_slice(bytes)
    }
}

pub fn upload<T: DeviceElement>(client: &Client, x: &[T], rows: usize, cols: usize) -> Matrix {
    assert_eq!(x.len(), rows * cols);
    let handle = upload_bytes(client, bytemuck::cast_slice(x));
    Matrix::new(handle, rows, cols, T::KIND).unwrap()
}

/// Groups of `sizes` rows, with offsets on the device.
pub fn offsets(client: &Client, sizes: &[usize]) -> Groups {
    let mut offsets = vec![0u32];
    offsets.extend(sizes.iter().scan(0, |sum, &size| {
        *sum += size as u32;
        Some(*sum)
    }));
    Groups::Offsets {
        offsets: client.create_from_slice(bytemuck::cast_slice(&offsets)),
        count: sizes.len(),
    }
}

pub fn read_bytes(client: &Client, handle: &Handle, len: usize) -> Vec<u8> {
    if len == 0 {
        return Vec::new();
    }
    client.read_one(handle.clone()).unwrap()[..len].to_vec()
}

pub fn read_u32(client: &Client, handle: &Handle, len: usize) -> Vec<u32> {
    let bytes = read_bytes(client, handle, len * 4);
    bytes
        .chunks_exact(4)
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

pub fn read_f32(client: &Client, handle: &Handle) -> f32 {
    read_f32s(client, handle, 1)[0]
}

pub fn read_f32s(client: &Client, handle: &Handle, len: usize) -> Vec<f32> {
    let bits = read_u32(client, handle, len);
    bits.into_iter().map(f32::from_bits).collect()
}

pub fn read_matrix<T: DeviceElement>(client: &Client, matrix: &Matrix) -> Vec<T> {
    assert_eq!(matrix.dtype, T::KIND);
    let bytes = read_bytes(client, &matrix.handle, matrix.len() * size_of::<T>());
    bytes
        .chunks_exact(size_of::<T>())
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

/// Equal bits, or both NaN.
pub fn assert_floats<T: TestElement>(found: &[T], expected: &[T], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let (a, b) = (found.to_f32(), expected.to_f32());
        assert!(
            a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
            "{what}: element {i}: {a:e} != {b:e}"
        );
    }
}

/// Equal bytes.
pub fn assert_bytes(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if let Some(i) = (0..found.len()).find(|&i| found[i] != expected[i]) {
        panic!(
            "{what}: byte {i}: {:#04x} != {:#04x}",
            found[i], expected[i]
        );
    }
}

/// Two packed tensors, NVFP4 or MXFP8, have one shape and axis, and equal scales and codes.
macro_rules! assert_blocks {
    ($found:expr, $expected:expr, $what:expr) => {{
        let (found, expected, what) = (&$found, &$expected, $what);
        assert_eq!(
            (found.rows(), found.cols()),
            (expected.rows(), expected.cols()),
            "{what}"
        );
        assert_eq!(found.usage(), expected.usage(), "{what}");
        $crate::support::device::assert_bytes(
            found.scales(),
            expected.scales(),
            &format!("{what}: scales"),
        );
        $crate::support::device::assert_bytes(
            found.codes(),
            expected.codes(),
            &format!("{what}: codes"),
        );
    }};
}

/// Codes, scales and maxima are equal, bit for bit, but for NaN, of which there are many.
pub fn assert_packed(
    client: &Client,
    found: &DeviceQuantized,
    expected: &QuantizedTensor,
    what: &str,
) {
    let found = found.to_host(client, *expected.origin()).unwrap();
    assert_blocks!(found, expected, what);
    assert_floats(
        found.amax().values(),
        expected.amax().values(),
        &format!("{what}: amax"),
    );
}
