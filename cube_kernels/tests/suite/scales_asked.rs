//! The environment variable `NVFP4_SCALES`, tested in a separate process.

use crate::support::process::ran_in_own_process;
use nvfp4_formats::StoredForm;
use nvfp4_kernels::gemm::{OperandLayout, Problem, packed_reads};

#[test]
fn tiles_on_every_device() {
    let client = client!("tiles_on_every_device");
    let problem = Problem::new([OperandLayout::Packed; 2], (256, 256, 256));
    let reads = packed_reads(&client, &problem);
    let environment = [("NVFP4_SCALES", "tiles")];
    if ran_in_own_process("scales_asked", "tiles_on_every_device", &environment) {
        // Without it, the layout is the one that the device's kernels read.
        let asked = std::env::var_os("NVFP4_SCALES").is_some();
        assert!(asked || client.name() != "cpu" || reads == StoredForm::Rows);
        return;
    }
    assert_eq!(reads, StoredForm::Tiles);
}
