//! The device under test, and transfers of tensors.

use super::inputs::TestElement;
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::QuantizedTensor;
use nvfp4_kernels::{
    bring_up::match_random_bits,
    capabilities::Capabilities,
    proof::{emulate_e2m1_instructions, set_units},
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};
#[cfg(feature = "cpu")]
use nvfp4_test_support::cpu_runtime;
use nvfp4_test_support::{Skip, is_full};

/// Returns the device in `NVFP4_TEST_DEVICE` (`cpu`, the default, or `cuda`), or `None`, with a
/// message, if it is not available. With `NVFP4_TEST_EMULATED` its kernels are those of Blackwell,
/// with the instructions for E2M1 emulated; `NVFP4_TEST_UNITS` sets the number of units per cube.
pub fn client(test: &str) -> Option<Client> {
    if std::env::var_os("NVFP4_TEST_EMULATED").is_some() {
        emulate_e2m1_instructions();
    }
    if let Ok(units) = std::env::var("NVFP4_TEST_UNITS") {
        set_units(units.parse().expect("NVFP4_TEST_UNITS is a number"));
    }
    let client = match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
        #[cfg(feature = "cuda")]
        Ok("cuda") => cubecl::Device::Cuda(Default::default()).client(),
        #[cfg(feature = "cpu")]
        Ok("cpu") | Err(_) => cpu_runtime(|| cubecl::Device::Cpu(Default::default()).client()),
        #[cfg(not(feature = "cpu"))]
        Err(_) => {
            Skip::NoGpu.print(test, "NVFP4_TEST_DEVICE names none");
            return None;
        }
        other => {
            panic!("{test}: NVFP4_TEST_DEVICE is {other:?}, which this build has no runtime for")
        }
    };
    match_random_bits(&client).expect("the device's order of random bits");
    Some(client)
}

/// True if this run omits tests that only repeat others: on CubeCL's CPU runtime, which takes
/// seconds to compile a kernel, without `cargo xtask test --full`.
pub fn is_brief(client: &Client) -> bool {
    client.name() == "cpu" && !is_full()
}

/// Returns the device under test, or `None`, with a message, if a run without `--full` omits
/// `test`.
pub fn client_of_full_run(test: &str) -> Option<Client> {
    let client = client(test)?;
    if is_brief(&client) {
        Skip::OnlyFull.print(test, "");
        return None;
    }
    Some(client)
}

/// Returns the CUDA GPU under test, or `None`, with a message that gives `why` as the test's
/// reason.
pub fn client_of_gpu(test: &str, why: &str) -> Option<Client> {
    let client = client(test)?;
    if client.name() == "cpu" {
        Skip::NoGpu.print(test, why);
        return None;
    }
    Some(client)
}

/// Returns the CUDA GPU under test if its capabilities are `wanted`, or `None`, with a message;
/// `needs` names the compute capability.
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

/// Returns the client, or returns early.
macro_rules! client {
    ($test:expr) => {
        match $crate::support::device::client($test) {
            Some(client) => client,
            None => return,
        }
    };
}

/// Returns the client of a GPU, or returns early with the reason why the test requires one.
macro_rules! on_gpu {
    ($test:expr, $why:literal) => {
        match $crate::support::device::client_of_gpu($test, $why) {
            Some(client) => client,
            None => return,
        }
    };
}

/// Returns the client of a GPU with matrix instructions, or returns early.
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

/// Returns the client of a Hopper GPU, or returns early.
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

/// Defines a test of `check` for each element type.
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
            // Only the conversion differs from bf16, and other tests cover it.
            if let Some(client) = $crate::support::device::client_of_full_run(stringify!($f16)) {
                $check::<f16>(&client);
            }
        }
    )*};
}

/// Defines tests of `check`, which takes a client, a matrix, its rows and columns and its
/// description: matrices of all `shapes`, and data of every kind in shape `of_kinds`, for each
/// element type.
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

/// Returns groups of `sizes` rows, with offsets on the device.
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

/// Asserts equal bits, or NaN on both sides.
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

/// Asserts equal bytes.
pub fn assert_bytes(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if let Some(i) = (0..found.len()).find(|&i| found[i] != expected[i]) {
        panic!(
            "{what}: byte {i}: {:#04x} != {:#04x}",
            found[i], expected[i]
        );
    }
}

/// Asserts that two packed tensors, NVFP4 or MXFP8, have equal shape, axis, scales and codes.
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

/// Asserts that codes, scales and amax values are equal bit for bit, except that any two NaN are
/// equal.
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
