//! Unmodified models through the decorator, on the device that `NVFP4_TEST_DEVICE` names: `cpu`
//! (CubeCL's CPU runtime, the default here) or `cuda`. In a process of their own, because Burn's
//! fusion takes a provider for the whole process, and only before the first tensor.

mod cache;
mod equal;
mod formats;
mod misuse;
mod models;
mod refuse;
mod stacked;
mod transformer;
mod uses;
