//! Kernels of the gradients' norm; their summation order is that of `reference::square_sums`.

use cubecl::prelude::*;

use crate::{
    cube::{
        codec::{Conversion, load},
        exact::{fma, reciprocal, sqrt},
    },
    gemm::arguments::thread_in_cta,
    reference::{NORM_EPSILON, SQUARE_CHUNK, SQUARE_LANES},
    tensor::FloatKind,
};

/// Consecutive elements in a lane's group.
const LANE: usize = 4;
/// Elements of all lanes' groups.
const ROW: usize = SQUARE_LANES * LANE;

/// One gradient of a launch.
#[derive(CubeType, CubeLaunch)]
pub struct GradientSlot<G: CubePrimitive> {
    /// Gradient.
    pub gradient: Box<[G]>,
    /// Number of elements, a multiple of the vector width.
    pub elements: usize,
    /// Start of its chunks among those of the launch.
    pub start: usize,
    /// End of its chunks.
    pub end: usize,
    /// Offset of its sums in the output.
    pub out: usize,
}

/// Comptime choices of `square_sums_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SquarePlan {
    /// Type of the gradients.
    pub gradient: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
}

/// Each cube sums the squares of every `cubes`-th chunk.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn square_sums_kernel<G: Numeric, N: Size>(
    slots: Sequence<GradientSlot<Vector<G, N>>>,
    sums: &mut [f32],
    #[comptime] plan: SquarePlan,
    #[define(G)] _gradient: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(SQUARE_LANES);
    let mut chunk = CUBE_POS;
    #[unroll]
    for s in 0..slots.len() {
        let slot = slots.index(s);
        while chunk < slot.end {
            let first = (chunk - slot.start) * SQUARE_CHUNK;
            let mut lane = thread_in_cta() as usize;
            while lane < SQUARE_LANES {
                lanes[lane] = lane_sum::<G, N>(slot, first + lane * LANE, plan);
                lane += CUBE_DIM as usize;
            }
            let sum = tree(&mut lanes);
            if thread_in_cta() == 0u32 {
                sums[slot.out + (chunk - slot.start)] = sum;
            }
            // The next chunk overwrites the lanes only after every unit has read the sum.
            sync_cube();
            chunk += CUBE_COUNT;
        }
    }
}

/// Returns the sums of squares of four lanes; the first lane begins at element `first`.
#[cube]
fn lane_sum<G: Numeric, N: Size>(
    slot: &GradientSlot<Vector<G, N>>,
    first: usize,
    #[comptime] plan: SquarePlan,
) -> f32 {
    let width = N::value();
    let conversion = comptime!(plan.conversion);
    let unrolled = comptime!(conversion.has_ptx());
    let vectors = comptime!(LANE / width);
    let mut sums = Array::<f32>::new(LANE);
    #[unroll]
    for l in 0..LANE {
        sums[l] = 0.0f32;
    }
    #[unroll(unrolled)]
    for row in 0..comptime!(SQUARE_CHUNK / ROW) {
        #[unroll]
        for part in 0..vectors {
            let element = first + row * ROW + comptime!(part * width);
            let inside = element < slot.elements;
            // Past the end, the last vector is loaded and not used, so that loads do not branch.
            let last = slot.elements / width - 1usize;
            let vector = slot.gradient[select(inside, element / width, last)];
            #[unroll]
            for e in 0..width {
                let value = load::<G>(vector.extract(e), plan.gradient);
                let value = select(inside, value, 0.0f32);
                let lane = comptime!(part * width + e);
                sums[lane] = fma(value, value, sums[lane], conversion);
            }
        }
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}

/// Returns the sum of all lanes to every unit.
#[cube]
fn tree(lanes: &mut Shared<[f32]>) -> f32 {
    #[unroll]
    for level in 0..comptime!(SQUARE_LANES.ilog2() as usize) {
        let stride = comptime!(SQUARE_LANES >> (level + 1));
        sync_cube();
        let mut lane = thread_in_cta() as usize;
        while lane < stride {
            let sum = lanes[lane] + lanes[lane + stride];
            lanes[lane] = sum;
            lane += CUBE_DIM as usize;
        }
    }
    sync_cube();
    lanes[0]
}

/// Sums all chunks with one cube. Writes the norm, and the factor that scales gradients down to
/// `max_norm`.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn clip_factor_kernel(
    sums: &[f32],
    out: &mut [f32],
    count: usize,
    max_norm: f32,
    #[comptime] conversion: Conversion,
) {
    let mut lanes = Shared::<[f32]>::new_slice(SQUARE_LANES);
    let mut lane = thread_in_cta() as usize;
    while lane < SQUARE_LANES {
        let mut sum = 0.0f32;
        let mut i = lane;
        while i < count {
            sum += sums[i];
            i += SQUARE_LANES;
        }
        lanes[lane] = sum;
        lane += CUBE_DIM as usize;
    }
    let norm = sqrt(tree(&mut lanes), conversion);
    let factor = reciprocal(norm + NORM_EPSILON, conversion) * max_norm;
    if thread_in_cta() == 0u32 {
        out[0] = norm;
        // A NaN factor stays NaN.
        out[1] = select(factor > 1.0f32, 1.0f32, factor);
    }
}
