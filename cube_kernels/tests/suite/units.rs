//! Cubes of any number of units give the same bytes: every kernel of every way of quantizing,
//! against the oracle. In a process of its own, since all kernels of a process have as many units;
//! `NVFP4_TEST_UNITS=64` asks for it in all other tests.

use crate::support::{
    process::ran_in_own_process,
    samples::{CHECKS, Sample},
};
use nvfp4_kernels::quantize::kernels::set_units;

#[test]
fn units_of_a_cube_do_not_matter() {
    if ran_in_own_process("units", "units_of_a_cube_do_not_matter", &[]) {
        return;
    }
    let client = client!("units_of_a_cube_do_not_matter");
    // More units than cores wait for each other for a very long time on the CPU.
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
