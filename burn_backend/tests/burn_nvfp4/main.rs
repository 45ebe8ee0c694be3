//! The Burn integration, on the device that `NVFP4_TEST_DEVICE` names: `flex` (the default), `cpu`
//! (CubeCL's CPU runtime) or `cuda`. CubeCL's CPU runtime compiles each kernel for a tenth of a
//! second and interprets barriers slowly, so tests that are not about the kernels skip themselves
//! on it, with a message, and run only on Flex.

mod accuracy;
mod add_linear;
mod attention;
mod block;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod decorate;
#[cfg(feature = "cpu")]
mod decorate_limits;
mod draws;
mod drop_in;
mod errors;
mod feed_forward;
mod fp8;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod fusion;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod graph;
mod grouped;
mod layer_norm;
mod layers;
mod linear;
mod loss;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod memory;
mod module;
mod moe;
mod muon;
mod norm_linear;
mod operations;
mod optim;
mod packed;
mod parallel;
mod quantize;
mod recipe;
mod schedule;
mod state;
mod support;
mod telemetry;
mod training;
mod unbiased;
mod work;
