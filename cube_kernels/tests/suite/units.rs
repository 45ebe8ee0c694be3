//! Cubes of any number of units give the same bytes: every kernel of every quantization, compared
//! with the oracle. Runs in a separate process, because all kernels of a process have the same
//! number of units; `NVFP4_TEST_UNITS=64` sets it in all other tests.

use crate::support::{
    process::ran_in_own_process,
    samples::{CHECKS, Sample},
};
use nvfp4_kernels::proof::set_units;

#[test]
fn units_of_a_cube_do_not_matter() {
    if ran_in_own_process("units", "units_of_a_cube_do_not_matter", &[]) {
        return;
    }
    let client = client!("units_of_a_cube_do_not_matter");
    // On the CPU, barriers among more units than cores take very long.
    let all: &[usize] = match client.name() {
        "cuda" => &[32, 64, 128, 256],
        _ => &[2],
    };
    for &units in all {
        set_units(units);
        for shape in [(48, 144), (160, 272)] {
            let sample = Sample::new(&client, shape);
            for check in CHECKS {
                check(&client, &sample);
            }
        }
    }
}
