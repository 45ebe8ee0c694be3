//! The last cube of several: it goes on with what all of them wrote, in the same launch.

use cubecl::prelude::*;

use super::ptx;

/// Whether this cube is the last of `cubes`, at least one, that come here with word `at` of
/// `counters`. The last one sees what all of them wrote to device memory before. The word is zero
/// before the first of them, and again behind the last, for the next launch.
///
/// All units of a cube come here together; `verdict` is a word of its shared memory. `concurrent`
/// says that cubes run at the same time, which is so on CUDA devices; the CPU runtime takes one
/// after another.
#[cube]
pub fn is_last_cube(
    counters: &mut [u32],
    at: usize,
    cubes: u32,
    verdict: &mut Shared<[u32]>,
    #[comptime] concurrent: bool,
) -> bool {
    // Unit 0 releases what it synchronized with: the writes of all units.
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
    // And all units see what it acquired.
    sync_cube();
    verdict[0] == 1u32
}
