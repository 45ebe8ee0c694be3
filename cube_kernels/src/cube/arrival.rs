//! Detection of the last of several cubes, which continues with the results of all of them in the
//! same launch.

use cubecl::prelude::*;

use super::ptx;

/// Returns true in the last of `cubes` cubes (at least one) that arrive at word `at` of `counters`.
/// The last cube sees everything that the others wrote to device memory before arriving. The word
/// must be zero before the first arrival, and is zero again after the last, for the next launch.
///
/// All units of a cube must call it together; `verdict` is a word of its shared memory.
/// `concurrent` means that cubes run at the same time, as on CUDA devices; the CPU runtime runs
/// them one after another.
#[cube]
pub fn is_last_cube(
    counters: &mut [u32],
    at: usize,
    cubes: u32,
    verdict: &mut Shared<[u32]>,
    #[comptime] concurrent: bool,
) -> bool {
    // Unit 0 releases the writes of all units, with which it has synchronized.
    sync_cube();
    if UNIT_POS == 0u32 {
        let mut before = 0u32;
        if cubes > 1u32 {
            if comptime!(concurrent) {
                let address = ptx::cvta_to_global::<u32>(counters.as_ptr());
                let counter = address + u64::cast_from(at) * 4u64;
                before = ptx::atom_acq_rel_gpu_inc(counter, cubes - 1u32);
            } else {
                before = counters[at];
                counters[at] = select(before == cubes - 1u32, 0u32, before + 1u32);
            }
        }
        verdict[0] = u32::cast_from(before == cubes - 1u32);
    }
    // All units see what unit 0 acquired.
    sync_cube();
    verdict[0] == 1u32
}
