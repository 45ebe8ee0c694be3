//! Unmodified models through the decorator, on the device that `NVFP4_TEST_DEVICE` names: `cpu`
//! (CubeCL's CPU runtime, the default here) or `cuda`. They run in a separate process, because
//! Burn's fusion accepts a provider for the whole process, and only before the first tensor.

mod cache;
mod equal;
mod formats;
mod graph;
mod misuse;
mod models;
mod quantize;
mod ranks;
mod refuse;
mod stacked;
mod transformer;
mod uses;
