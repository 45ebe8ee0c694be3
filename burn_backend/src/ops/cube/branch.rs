//! Branches of captured graphs.

use burn_cubecl::CubeBackend;
use nvfp4_kernels::graph::Branch;

use super::super::branch::BranchPoint;
use super::super::tensors::{MaybeTensor, Operand, QuantizedData};
use super::tensors::like;

/// Implements [`nvfp4_branch`](super::super::Nvfp4KernelOps::nvfp4_branch).
pub(super) fn mark(operand: &Operand<CubeBackend>, branch: &Branch, point: BranchPoint) {
    let client = &like(operand).client;
    match point {
        BranchPoint::Begin => {
            hold(operand, branch);
            branch.begin(client);
        }
        BranchPoint::Reads => hold(operand, branch),
        BranchPoint::End => branch.end(client),
        BranchPoint::Join => branch.join(client),
    }
}

/// Makes `branch` hold the memory of `operand`.
fn hold(operand: &Operand<CubeBackend>, branch: &Branch) {
    let quantized = match operand {
        Operand::Quantized(quantized) | Operand::QuantizedMnMajor(quantized) => quantized,
        Operand::Float(x, _) => return branch.hold(&x.handle),
    };
    match &quantized.data {
        QuantizedData::Packed { codes, scales } => {
            branch.hold(&codes.handle);
            branch.hold(&scales.handle);
        }
        QuantizedData::Bf16Unscaled(values) => {
            branch.hold(&values.handle);
        }
    }
    if let MaybeTensor::Present(amax) = &quantized.amax {
        branch.hold(&amax.handle);
    }
}
