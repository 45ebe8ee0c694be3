//! Operations that Burn's fusion holds back.

use burn_core::backend::Backend;

/// Runs the operations on `device` that Burn's fusion holds back. Does not wait for the device.
///
/// # Panics
/// If one of them fails.
pub(crate) fn run_queued<B: Backend>(device: &B::Device) {
    B::flush(device).unwrap_or_else(|error| panic!("an operation held back by fusion: {error}"));
}
