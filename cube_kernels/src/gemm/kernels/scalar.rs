//! The product for any device, one unit for each output element: two packed operands are decoded on the
//! fly, exactly, and multiplied with `f32` accumulation. No decoded copy of an operand is ever in memory.

use cubecl::{prelude::*, server::Handle};

use crate::{
    BLOCK, Nvfp4Error,
    capabilities::GemmBackend,
    cube::{
        codec::{decode_e2m1, decode_e4m3, load, magnitude_bits, store},
        ptx,
    },
    gemm::{
        epilogue::{EpilogueArgs, EpilogueKind, Factor, factor, finish_on, raise_alone},
        problem::{Candidate, Device, GemmShape, Kernel, Launch, Plan, Problem, Refusal},
        scheduler::GroupedDim,
    },
    launch::grid,
    memory::address_type,
    moe::groups::span,
    tensor::FloatKind,
};

/// The range of an amax with block scales up to 448: 6 · 448.
const RANGE: f32 = 2688.0;

/// The GEMM of any device.
pub(crate) struct Scalar;

impl Kernel for Scalar {
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
        Plan::Scalar.into()
    }

    fn launch(&self, launch: &Launch, _plan: Plan) -> Result<(), Nvfp4Error> {
        let Launch {
            a,
            b,
            groups,
            epilogue,
            ..
        } = *launch;
        let kind = epilogue.kind;
        let is_plain = groups.grouping == GroupedDim::None
            && a.is_packed()
            && b.is_packed()
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

/// Queues the kernel of two packed operands with one amax each.
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
    // `add.rn` where the compiler may contract, which is CUDA's; see `Epilogue::ordered_add`.
    let epilogue = Epilogue {
        bias: launch.epilogue.kind.bias,
        ordered_add: capabilities.runtime == "cuda",
    };
    let address = address_type((m.max(n) * blocks * BLOCK).max(result.len()));
    // SAFETY (of every argument): the caller checked the buffers against the shapes.
    let memory =
        |handle: &Handle, len: usize| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    let EpilogueArgs {
        a_amax,
        b_amax,
        bias,
        ..
    } = launch.epilogue;
    let (count, dim) = grid(client, m * n);
    // SAFETY: the kernel stays below m * n.
    unsafe {
        scalar_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            memory(&a.codes, m * blocks),
            memory(&a.scales, m * blocks),
            memory(a_amax, 1),
            memory(&b.codes, n * blocks),
            memory(&b.scales, n * blocks),
            memory(b_amax, 1),
            memory(bias, n),
            memory(&result.handle, m * n),
            m,
            n,
            blocks,
            epilogue,
            out,
            out.storage_type(),
        );
    }
}

/// The comptime choices of the epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Add a bias.
    pub bias: bool,
    /// Add it by an instruction that is never contracted with the multiplication before it: the
    /// specification rounds both.
    pub ordered_add: bool,
}

#[cube]
fn finish(
    sum: f32,
    alpha: f32,
    bias: &[f32],
    column: usize,
    #[comptime] epilogue: Epilogue,
) -> f32 {
    let scaled = sum * alpha;
    let mut value = scaled;
    if comptime!(epilogue.bias) {
        if comptime!(epilogue.ordered_add) {
            // `scaled`, not `value`: a mutable variable would reach the instruction as a pointer.
            value = ptx::add_rn(scaled, bias[column]);
        } else {
            value = scaled + bias[column];
        }
    }
    value
}

#[cube]
fn alpha(amax_a: &[f32], amax_b: &[f32]) -> f32 {
    (amax_a[0] / 2688.0f32) * (amax_b[0] / 2688.0f32)
}

/// One unit computes every `units`-th output element, `k` ascending.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn scalar_kernel<F: Numeric>(
    a_codes: &[Vector<u32, Const<2>>],
    a_scales: &[u8],
    a_amax: &[f32],
    b_codes: &[Vector<u32, Const<2>>],
    b_scales: &[u8],
    b_amax: &[f32],
    bias: &[f32],
    out: &mut [F],
    m: usize,
    n: usize,
    blocks: usize,
    #[comptime] epilogue: Epilogue,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let alpha = alpha(a_amax, b_amax);
    let mut item = ABSOLUTE_POS;
    while item < m * n {
        let a_row = (item / n) * blocks;
        let b_row = (item % n) * blocks;
        let mut sum = 0.0f32;
        for block in 0..blocks {
            let a_words = a_codes[a_row + block];
            let b_words = b_codes[b_row + block];
            let a_scale = decode_e4m3(u32::cast_from(a_scales[a_row + block]));
            let b_scale = decode_e4m3(u32::cast_from(b_scales[b_row + block]));
            #[unroll]
            for i in 0..16usize {
                let shift = comptime!(4 * (i as u32 % 8));
                let x = decode_e2m1(a_words.extract(comptime!(i / 8)) >> shift) * a_scale;
                let y = decode_e2m1(b_words.extract(comptime!(i / 8)) >> shift) * b_scale;
                // The product is exact, so a contraction of this sum changes nothing.
                sum += x * y;
            }
        }
        out[item] = store::<F>(finish(sum, alpha, bias, item % n, epilogue), kind);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Queues the kernel of any operands. A dense GEMM has no groups and reads no offsets.
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
    let (a_len, b_len) = (a.rows * k, b.rows * k);
    // SAFETY: the kernel stays below the outputs, and below offsets that the caller vouches for.
    unsafe {
        grouped_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(a_len.max(b_len).max(result.len())),
            memory(&a.codes, a_len / 8),
            memory(&a.scales, a_len / BLOCK),
            memory(&a.dense, a_len),
            memory(&b.codes, b_len / 8),
            memory(&b.scales, b_len / BLOCK),
            memory(&b.dense, b_len),
            memory(&epilogue.a_amax, m),
            memory(&epilogue.b_amax, b.rows),
            memory(&epilogue.bias, b.rows),
            memory(&groups.offsets, groups.groups + 1),
            memory(&result.handle, result.len()),
            memory(&epilogue.amax, epilogue.amax_len(groups.groups)),
            m,
            n,
            k,
            groups.groups,
            epilogue.ranges[0],
            epilogue.ranges[1],
            groups.grouping,
            [a.is_packed(), b.is_packed()],
            capabilities.runtime == "cuda",
            epilogue.kind,
            result.dtype.storage_type(),
        );
    }
}

/// One element of an operand, without the factor of the tensor.
#[cube]
fn element(
    codes: &[u32],
    scales: &[u8],
    dense: &[u16],
    index: usize,
    #[comptime] packed: bool,
) -> f32 {
    if comptime!(packed) {
        let word = codes[index / 8usize] >> (4u32 * (index % 8usize) as u32);
        decode_e2m1(word) * decode_e4m3(u32::cast_from(scales[index / 16usize]))
    } else {
        load::<u16>(dense[index], FloatKind::Bf16)
    }
}

/// One unit computes every `units`-th output element, `k` ascending.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn grouped_kernel<F: Numeric>(
    a_codes: &[u32],
    a_scales: &[u8],
    a_dense: &[u16],
    b_codes: &[u32],
    b_scales: &[u8],
    b_dense: &[u16],
    a_amax: &[f32],
    b_amax: &[f32],
    bias: &[f32],
    offsets: &[u32],
    out: &mut [F],
    amax: &mut [Atomic<u32>],
    m: usize,
    n: usize,
    k: usize,
    groups: usize,
    a_range: f32,
    b_range: f32,
    #[comptime] grouping: GroupedDim,
    #[comptime] packed: [bool; 2],
    #[comptime] ordered_add: bool,
    #[comptime] kind: EpilogueKind,
    #[define(F)] _storage: ElemType,
) {
    let mut outputs = m * n;
    if comptime!(grouping == GroupedDim::K) {
        outputs = m * n * groups;
    }
    // Of what the unit wrote, and the group of it.
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
        if comptime!(grouping == GroupedDim::M) {
            while group < groups && row >= offsets[group + 1usize] as usize {
                group += 1usize;
            }
            inside = group < groups && row >= offsets[0] as usize;
        }
        if comptime!(grouping == GroupedDim::K) {
            group = row / m;
            a_row = row % m;
            let columns = span(offsets, group, k);
            first = columns.start;
            end = columns.end;
        }
        if inside {
            let mut b_row = column;
            if comptime!(grouping == GroupedDim::M) {
                b_row = group * n + column;
            }
            let mut sum = 0.0f32;
            let mut depth = first;
            while depth < end {
                let x = element(
                    a_codes,
                    a_scales,
                    a_dense,
                    a_row * k + depth,
                    comptime!(packed[0]),
                );
                let y = element(
                    b_codes,
                    b_scales,
                    b_dense,
                    b_row * k + depth,
                    comptime!(packed[1]),
                );
                // The product is exact, so a contraction of this sum changes nothing.
                sum += x * y;
                depth += 1usize;
            }
            // Every group of a contraction in groups has factors of its own for all stored rows: those
            // of `a` are numbered as the rows of the output.
            let mut b_own = b_row;
            if comptime!(grouping == GroupedDim::K) {
                b_own += group * n;
            }
            let a_factor = factor(a_amax, row as u32, group as u32, a_range, kind.a);
            let b_factor = factor(b_amax, b_own as u32, group as u32, b_range, kind.b);
            let mut addend = 0.0f32;
            if comptime!(kind.bias) {
                addend = bias[group * n + column];
            }
            let mut before = 0.0f32;
            if comptime!(kind.accumulate) {
                before = load::<F>(out[item], kind.out);
            }
            let alpha = a_factor * b_factor;
            let value = finish_on(sum, alpha, addend, before, ordered_add, kind);
            let stored = store::<F>(value, kind.out);
            out[item] = stored;
            if comptime!(kind.amax.is_some()) {
                if group != group_of_largest {
                    raise_alone(amax, group_of_largest as u32, largest, kind);
                    largest = 0u32;
                    group_of_largest = group;
                }
                largest = max(largest, magnitude_bits(load::<F>(stored, kind.out)));
            }
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
    if comptime!(kind.amax.is_some()) {
        raise_alone(amax, group_of_largest as u32, largest, kind);
    }
}
