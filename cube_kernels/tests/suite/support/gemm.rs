//! GEMMs of which a test wants the matrix alone.

use cubecl::{client::Client, server::Handle};
use nvfp4_kernels::{
    Nvfp4Error,
    gemm::{self, Gemm},
    tensor::Matrix,
};

/// The output of a request.
pub fn multiply(client: &Client, request: Gemm) -> Result<Matrix, Nvfp4Error> {
    gemm::gemm(client, &request).map(|output| output.matrix)
}

/// The output of a request for amax values, and those.
pub fn multiply_amax(client: &Client, request: Gemm) -> Result<(Matrix, Handle), Nvfp4Error> {
    let output = gemm::gemm(client, &request)?;
    Ok((output.matrix, output.amax.expect("asked for")))
}
