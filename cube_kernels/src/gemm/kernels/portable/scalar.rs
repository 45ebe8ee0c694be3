//! The GEMM for any device, with one unit per output element: packed operands are decoded on the
//! fly, exactly, and multiplied with `f32` accumulation. Memory never holds a dequantized copy of
//! an operand.

use std::fmt;

use cubecl::{prelude::*, server::Handle};

use crate::{
    BLOCK, Nvfp4Error,
    capabilities::GemmBackend,
    cube::codec::{decode_e2m1, decode_e4m3, load, magnitude_bits, store},
    gemm::{
        arguments::{
            GroupedProblem, GroupedProblemLaunch, MixedMatrix, MixedMatrixLaunch, PackedMatrix,
            PackedMatrixLaunch, ProblemShape, ProblemShapeLaunch,
        },
        epilogue::{Addends, Epilogue, Factor, apply_on},
        operand::OperandLayout,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal},
        scheduler::GroupedDim,
    },
    launch::grid,
    memory::address_type,
    moe::groups::span,
    tensor::FloatKind,
};

/// Range of an amax with block scales up to 448: 6 · 448.
const RANGE: f32 = 2688.0;

/// The GEMM of any device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scalar;

impl GemmKernel for Scalar {
    fn name(&self) -> &'static str {
        "scalar"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Scalar
    }

    fn supports(&self, _device: &Device, _problem: &Problem) -> Result<(), Refusal> {
        Ok(())
    }

    fn plan(&self, _device: &Device, _problem: &Problem) -> Candidate {
        Self.into()
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one thread for each output element")
    }
}

impl GemmPlan for Scalar {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &Scalar
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        let Launch {
            a,
            b,
            groups,
            epilogue,
            ..
        } = *launch;
        let kind = epilogue.kind;
        let is_plain = groups.grouping == GroupedDim::None
            && [a.layout, b.layout] == [OperandLayout::Packed; 2]
            && [kind.a, kind.b] == [Factor::Tensor; 2]
            && epilogue.ranges == [RANGE; 2]
            && !kind.accumulate
            && kind.amax.is_none();
        match is_plain {
            true => queue_packed(launch),
            false => queue(launch),
        }
        Ok(())
    }
}

/// Queues the kernel for two packed operands with one amax each.
fn queue_packed(launch: &Launch) {
    let Launch {
        client,
        capabilities,
        a,
        b,
        output,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let (blocks, result) = (k / BLOCK, output.matrix());
    let out = result.dtype;
    let address = address_type((m.max(n) * blocks * BLOCK).max(result.len()));
    // SAFETY (of every argument): the caller checked the buffers against the shapes.
    let memory =
        |handle: &Handle, len: usize| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    let (count, dim) = grid(client, m * n);
    // SAFETY: the kernel stays below m * n.
    unsafe {
        scalar_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            PackedMatrixLaunch::new(
                memory(&a.elements, m * blocks),
                memory(&a.scales, m * blocks),
            ),
            PackedMatrixLaunch::new(
                memory(&b.elements, n * blocks),
                memory(&b.scales, n * blocks),
            ),
            ProblemShapeLaunch::of((m, n, k), 1),
            launch.epilogue.launch([1, n], 1, (&result.handle, 1), 1.0),
            memory(&result.handle, m * n),
            // `add.rn` if the compiler may contract, as CUDA's does.
            capabilities.runtime == "cuda",
            out.storage_type(),
        );
    }
}

/// Each unit computes every `units`-th output element in ascending `k`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn scalar_kernel<F: Numeric>(
    a: PackedMatrix<Vector<u32, Const<2>>>,
    b: PackedMatrix<Vector<u32, Const<2>>>,
    problem: ProblemShape,
    epilogue: Epilogue,
    out: &mut [F],
    #[comptime] ordered_add: bool,
    #[define(F)] _storage: ElemType,
) {
    let kind = comptime!(epilogue.kind);
    let m = problem.m as usize;
    let n = problem.n as usize;
    let blocks = problem.k as usize / 16usize;
    let alpha = epilogue.a_tile_factor(0u32) * epilogue.b_tile_factor(0u32);
    let mut item = ABSOLUTE_POS;
    while item < m * n {
        let a_row = (item / n) * blocks;
        let b_row = (item % n) * blocks;
        let mut sum = 0.0f32;
        for block in 0..blocks {
            let a_words = a.codes[a_row + block];
            let b_words = b.codes[b_row + block];
            let a_scale = decode_e4m3(u32::cast_from(a.scales[a_row + block]));
            let b_scale = decode_e4m3(u32::cast_from(b.scales[b_row + block]));
            #[unroll]
            for i in 0..16usize {
                let shift = comptime!(4 * (i as u32 % 8));
                let x = decode_e2m1(a_words.extract(comptime!(i / 8)) >> shift) * a_scale;
                let y = decode_e2m1(b_words.extract(comptime!(i / 8)) >> shift) * b_scale;
                // The product is exact, so contracting this sum changes nothing.
                sum += x * y;
            }
        }
        let with = Addends {
            alpha,
            bias: epilogue.load_bias(item % n),
            c: 0.0f32.runtime(),
        };
        out[item] = store::<F>(apply_on(sum, with, ordered_add, kind), kind.out);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Queues the kernel for operands in any form. A dense GEMM has no groups and reads no offsets.
fn queue(launch: &Launch) {
    let Launch {
        client,
        capabilities,
        a,
        b,
        groups,
        epilogue,
        output,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let result = output.matrix();
    let (count, dim) = grid(client, result.len());
    // SAFETY (of every argument): the caller checked the buffers against the shapes.
    let memory =
        |handle: &Handle, len: usize| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    let (a_len, b_len) = (a.rows * k, b.stored_len(k));
    // SAFETY: the kernel stays below the outputs, and below the offsets, which the caller
    // guarantees.
    unsafe {
        scalar_grouped_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(a_len.max(b_len).max(result.len())),
            MixedMatrixLaunch::new(
                memory(&a.elements, a_len / 8),
                memory(&a.scales, a_len / BLOCK),
                memory(&a.elements, a_len),
            ),
            MixedMatrixLaunch::new(
                memory(&b.elements, b_len / 8),
                memory(&b.scales, b_len / BLOCK),
                memory(&b.elements, b_len),
            ),
            GroupedProblemLaunch::new(
                ProblemShapeLaunch::of((m, n, k), groups.groups),
                memory(&groups.offsets, groups.groups + 1),
                1,
            ),
            epilogue.launch(
                [m, b.stack * b.rows],
                groups.groups,
                (&result.handle, 1),
                1.0,
            ),
            memory(&result.handle, result.len()),
            ScalarPlan {
                grouped: groups.grouping,
                packed: [a.is_packed(), b.is_packed()],
                b_mn_major: b.is_mn_major(),
                ordered_add: capabilities.runtime == "cuda",
            },
            result.dtype.storage_type(),
        );
    }
}

/// Comptime configuration of `scalar_grouped_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScalarPlan {
    /// Grouped dimension.
    pub grouped: GroupedDim,
    /// True if `a` and `b` are packed, respectively.
    pub packed: [bool; 2],
    /// True if the stored rows of a packed `b` are K.
    pub b_mn_major: bool,
    /// True if the compiler may contract additions with multiplications, which must then be
    /// separate instructions; see `gemm::epilogue::apply_on`.
    pub ordered_add: bool,
}

/// Returns one element of an operand without the global scale factor.
#[cube]
fn element(matrix: &MixedMatrix<u32, u16>, index: usize, #[comptime] packed: bool) -> f32 {
    if comptime!(packed) {
        let word = matrix.codes[index / 8usize] >> (4u32 * (index % 8usize) as u32);
        decode_e2m1(word) * decode_e4m3(u32::cast_from(matrix.scales[index / 16usize]))
    } else {
        load::<u16>(matrix.dense[index], FloatKind::Bf16)
    }
}

/// Each unit computes every `units`-th output element in ascending `k`. The epilogue reads the
/// previous contents of the output from `out`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn scalar_grouped_kernel<F: Numeric>(
    a: MixedMatrix<u32, u16>,
    b: MixedMatrix<u32, u16>,
    problem: GroupedProblem,
    epilogue: Epilogue,
    out: &mut [F],
    #[comptime] plan: ScalarPlan,
    #[define(F)] _storage: ElemType,
) {
    let kind = comptime!(epilogue.kind);
    let m = problem.shape.m as usize;
    let n = problem.shape.n as usize;
    let k = problem.shape.k as usize;
    let groups = problem.shape.groups as usize;
    let mut outputs = m * n;
    if comptime!(plan.grouped == GroupedDim::K) {
        outputs = m * n * groups;
    }
    // Amax of the elements that the unit wrote, and their group.
    let mut largest = 0u32;
    let mut group_of_largest = 0usize;
    let mut item = ABSOLUTE_POS;
    while item < outputs {
        let row = item / n;
        let column = item % n;
        let mut group = 0usize;
        let mut a_row = row;
        let mut first = 0usize;
        let mut end = k;
        let mut inside = true;
        if comptime!(plan.grouped == GroupedDim::M) {
            while group < groups && row >= problem.offsets[group + 1usize] as usize {
                group += 1usize;
            }
            inside = group < groups && row >= problem.offsets[0] as usize;
        }
        if comptime!(plan.grouped == GroupedDim::K) {
            group = row / m;
            a_row = row % m;
            let columns = span(&problem.offsets, group, k);
            first = columns.start;
            end = columns.end;
        }
        if inside {
            let mut b_row = column;
            if comptime!(plan.grouped == GroupedDim::M) {
                b_row = group * n + column;
            }
            // Index of the first element to multiply, and the stride to the next.
            let mut b_at = b_row * k + first;
            let mut b_step = 1usize;
            if comptime!(plan.b_mn_major) {
                b_step = n.div_ceil(16usize) * 16usize;
                b_at = first * b_step + column;
                if comptime!(plan.grouped == GroupedDim::M) {
                    b_at += group * k * b_step;
                }
            }
            let mut sum = 0.0f32;
            let mut depth = first;
            while depth < end {
                let x = element(&a, a_row * k + depth, comptime!(plan.packed[0]));
                let y = element(&b, b_at, comptime!(plan.packed[1]));
                b_at += b_step;
                // The product is exact, so contracting this sum changes nothing.
                sum += x * y;
                depth += 1usize;
            }
            // Every group along K has separate factors for all stored rows; those of `a` are
            // numbered like the rows of the output.
            let mut b_own = b_row;
            if comptime!(plan.grouped == GroupedDim::K) {
                b_own += group * n;
            }
            let mut c = 0.0f32;
            if comptime!(kind.accumulate) {
                c = load::<F>(out[item], kind.out);
            }
            let with = Addends {
                alpha: epilogue.a_factor(row as u32, group as u32)
                    * epilogue.b_factor(b_own as u32, group as u32),
                bias: epilogue.load_bias(group * n + column),
                c,
            };
            let value = apply_on(sum, with, plan.ordered_add, kind);
            let stored = store::<F>(value, kind.out);
            out[item] = stored;
            if comptime!(kind.amax.is_some()) {
                if group != group_of_largest {
                    epilogue.atomic_amax_of_unit(group_of_largest as u32, largest);
                    largest = 0u32;
                    group_of_largest = group;
                }
                largest = max(largest, magnitude_bits(load::<F>(stored, kind.out)));
            }
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
    epilogue.atomic_amax_of_unit(group_of_largest as u32, largest);
}
