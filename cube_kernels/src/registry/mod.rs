//! Instances of every kernel, made without a launch. Tests compile them to machine code on a
//! machine without a GPU.
//!
//! Each module with kernels has a function `instances(&DummyDevice) -> Vec<Instance>`, which uses
//! the macro `instance!`; [`instances`] lists the modules. A test compares the kernels found here
//! with all kernels that the crate defines. Only the feature `proof` compiles all of this, and no
//! module of a kernel imports it (`cargo xtask imports`).

pub(crate) mod instance;

pub use instance::{Architectures, DummyDevice, Expected, Instance};

/// Returns all instances that `device` uses.
pub fn instances(device: &DummyDevice) -> Vec<Instance> {
    let modules = [
        crate::activation::instances::instances,
        crate::attention::instances::instances,
        crate::bring_up::instances::instances,
        crate::embedding::instances::instances,
        crate::fp8::instances::instances,
        crate::gemm::instances::instances,
        crate::graph::instances::instances,
        crate::greedy::instances::instances,
        crate::loss::instances::instances,
        crate::moe::instances::instances,
        crate::norm::instances::instances,
        crate::optimizer::instances::instances,
        crate::ptq::instances::instances,
        crate::quantize::instances::instances,
    ];
    modules
        .iter()
        .flat_map(|instances| instances(device))
        .collect()
}
