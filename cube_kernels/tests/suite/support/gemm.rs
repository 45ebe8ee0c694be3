//! GEMMs for tests that need only the matrix.

use cubecl::{client::Client, server::Handle};
use nvfp4_formats::Nvfp4Error;
use nvfp4_kernels::{
    gemm::{self, Gemm},
    tensor::Matrix,
};

/// Returns the output of a request.
pub fn multiply(client: &Client, request: Gemm) -> Result<Matrix, Nvfp4Error> {
    gemm::gemm(client, &request).map(|output| output.matrix)
}

/// Returns the output of a request with amax values, and those values.
pub fn multiply_amax(client: &Client, request: Gemm) -> Result<(Matrix, Handle), Nvfp4Error> {
    let output = gemm::gemm(client, &request)?;
    Ok((output.matrix, output.amax.expect("asked for")))
}
