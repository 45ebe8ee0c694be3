//! Memory pages of CubeCL's devices.

use burn_core::tensor::Device;

/// Moves the tensors on outdated pages of `device` to current pages, if there are any.
///
/// CubeCL 0.11.3 sizes pages after the largest allocation. A larger one, such as the first forward
/// makes, outdates the pages before it, and those with parameters and optimizer state stay outdated.
/// From then on every allocation visits all tensors on outdated pages, on the host, which takes
/// longer than the GPU's work.
///
/// Pages that a graph holds cannot be left. Under [`GraphSteps`](crate::graph::GraphSteps), which
/// moves tensors before the capture, nothing is done.
pub(crate) fn leave_outdated_pages(device: &Device) {
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    if let burn_core::backend::DispatchDevice::Cube(cube) = device.as_dispatch()
        && !crate::graph::is_busy(device)
    {
        let client = cube.client();
        if outdated_pages(&client) > 0 {
            // A failure only keeps the pages.
            let _ = client.memory_cleanup();
        }
    }
    #[cfg(not(any(feature = "cpu", feature = "cuda")))]
    let _ = device;
}

/// Returns the number of outdated pages of all streams.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn outdated_pages(client: &cubecl::client::Client) -> u64 {
    let report = client.memory_report(cubecl::MemoryScope::Device);
    let pools = (report.streams.iter()).flat_map(|stream| &stream.pools.dynamic);
    pools
        .map(|pool| match pool.kind {
            cubecl::MemoryPoolKind::Adaptive { outdated_pages, .. } => outdated_pages,
            _ => 0,
        })
        .sum()
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn_core::backend::DispatchDevice;
    use burn_core::tensor::Tensor;

    use super::*;

    /// Tensors keep their values. Pages belong to this thread's stream.
    #[test]
    fn tensors_leave_outdated_pages() {
        let device = Device::cpu();
        let DispatchDevice::Cube(cube) = device.as_dispatch() else {
            panic!("{device:?}");
        };
        let client = cube.client();
        let small = Tensor::<1>::ones([1 << 17], &device) * 3.0;
        device.sync().unwrap();
        let large = Tensor::<1>::ones([1 << 22], &device);
        device.sync().unwrap();
        assert!(outdated_pages(&client) > 0);
        leave_outdated_pages(&device);
        assert_eq!(outdated_pages(&client), 0);
        assert_eq!(small.sum().into_scalar::<f32>(), 3.0 * (1 << 17) as f32);
        drop(large);
    }
}
