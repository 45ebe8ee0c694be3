//! Unmodified models through the decorator, on the device that `NVFP4_TEST_DEVICE` names: `cpu`
//! (CubeCL's CPU runtime, the default here) or `cuda`. A process of its own, because Burn's fusion
//! takes a provider for the whole process, and only before the first tensor.
#![cfg(any(feature = "cpu", feature = "cuda"))]

mod cache;
mod equal;
mod formats;
mod misuse;
mod models;
mod refuse;
mod timing;
mod transformer;
mod uses;

#[path = "../shared/counted.rs"]
mod counted;
#[path = "../shared/skip.rs"]
mod skip;
