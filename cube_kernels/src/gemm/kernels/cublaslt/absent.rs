//! Replacement for the library in builds without the feature `cuda`: refuses every GEMM.

use std::convert::Infallible;

use cubecl::client::Client;

use super::{CublasLtGemm, CublasLtProblem};
use crate::Nvfp4Error;

/// Returns an error: no algorithm is available.
pub fn plan(client: &Client, problem: &CublasLtProblem) -> Result<Infallible, Nvfp4Error> {
    Err(Nvfp4Error::Unsupported {
        library: "cuBLASLt",
        problem: format!("{problem} on {}", client.properties().identity.name),
        reason: "built without the feature `cuda`".into(),
    })
}

/// Queues nothing.
pub fn submit(client: &Client, gemm: &CublasLtGemm) -> Result<(), Nvfp4Error> {
    plan(client, &gemm.problem()).map(|never| match never {})
}
