//! The bf16 GEMM of Hopper for outputs whose tiles do not fill the GPU evenly: the tiles of the
//! last wave are split along K, so that all SMs end at the same time (stream-K).
//!
//! It loads and multiplies like [`sm90_bf16`](super::bf16). One CTA owns each shared tile and
//! computes the first part of K. Other CTAs compute the rest, write their sums to a workspace and
//! raise the counter of the tile. The owner waits for the counter, adds their sums in ascending K
//! order, and writes the tile: the result depends on the shape and the number of SMs, but never on
//! timing.

use std::fmt;

use cubecl::{
    prelude::{barrier::Barrier, *},
    server::Handle,
};
use half::bf16;

use super::bf16::{
    A_STAGE, Depth, SharedAddresses, StageOperands, StageSource, UNITS, b_stage, check_sm90,
    fill_stage, init_barriers, major, multiply, operand_map, pipeline_at,
};
use crate::{
    Nvfp4Error, StoredForm,
    capabilities::GemmBackend,
    cube::ptx::{
        Major, cp_async, cp_async_commit_group, cp_async_wait_group, cvta_to_global,
        cvta_to_shared, ld_acquire_gpu, ld_shared_v4, named_barrier_sync, red_release_gpu_add,
    },
    gemm::{
        arguments::{ProblemShape, ProblemShapeLaunch, thread_in_cta},
        epilogue::{Epilogue, STAGING, WarpTile, write_warp_tile},
        heuristics,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal, sms},
        scheduler::{GroupedDim, Place, place},
        stream_k::{StreamK, stages_of, tiles_of},
        tiles::{SM90_TILE_K, SM90_TILE_M, Sm90Tile},
    },
    memory::{address_type, allocate},
    zeroed::zeros_of_step,
};

/// Units of the two consumer warpgroups.
const CONSUMERS: u32 = 256;

/// A GEMM with the partition [`StreamK`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct StreamKProblem {
    /// Size.
    pub shape: ProblemShape,
    /// Tiles that one CTA computes whole.
    pub whole: u32,
    /// Shared tiles.
    pub shared: u32,
    /// CTAs with a slice of a shared tile.
    pub slices: u32,
    /// Stages per slice.
    pub slice: u32,
    /// Stages of a tile after its slices.
    pub rest: u32,
    /// Stages per helper.
    pub per_helper: u32,
    /// Height of a band of tiles.
    pub band: u32,
}

/// Stages `from` to `to` of a tile; empty after the last piece of a CTA. Pieces that do not start
/// at the beginning of the tile go to partial tile `partial` of the workspace.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Piece {
    tile: u32,
    from: u32,
    to: u32,
    partial: u32,
}

/// Partial tiles of a shared tile, in ascending K order.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct PartsOfTile {
    /// Partial tile of the second slice; those of other slices are `stride` apart.
    slices: u32,
    of_slices: u32,
    stride: u32,
    /// First partial tile of the rest; the others follow.
    rest: u32,
    of_rest: u32,
}

#[cube]
impl PartsOfTile {
    /// Returns the index of partial tile `n`.
    fn index(&self, n: u32) -> u32 {
        let of_rest = self.rest + (n - min(n, self.of_slices));
        select(n < self.of_slices, self.slices + n * self.stride, of_rest)
    }
}

#[cube]
impl StreamKProblem {
    /// Returns piece `number` of this CTA, for tiles of `depth` stages.
    ///
    /// CTAs that wait for others have the highest numbers: if a GPU starts CTAs in order, those
    /// that they wait for are running, no matter how few fit at a time.
    fn piece(&self, number: u32, depth: u32) -> Piece {
        let cta = place_in_grid();
        let ctas = CUBE_COUNT as u32;
        // Whole tiles of this CTA.
        let own = (self.whole + ctas - 1u32 - cta) / ctas;
        let mut piece = Piece {
            tile: cta + number * ctas,
            from: 0u32,
            to: depth,
            partial: 0u32,
        };
        if number >= own {
            let index = number - own;
            let last = ctas - 1u32 - cta;
            let sliced = self.slices * self.shared;
            if last < sliced {
                let slice = last / self.shared;
                piece.tile = self.whole + last % self.shared;
                piece.from = slice * self.slice;
                piece.to = select(
                    index == 0u32,
                    min(piece.from + self.slice, depth),
                    piece.from,
                );
                // Not read for the first slice.
                piece.partial = last - min(last, self.shared);
            } else {
                let helper = last - sliced;
                let begin = helper * self.per_helper;
                let end = min(begin + self.per_helper, self.shared * self.rest);
                let tile = begin / self.rest + index;
                let first = max(begin, tile * self.rest);
                let behind = max(first, min(end, (tile + 1u32) * self.rest));
                let sliced_depth = self.slices * self.slice;
                piece.tile = self.whole + tile;
                piece.from = sliced_depth + (first - tile * self.rest);
                piece.to = sliced_depth + (behind - tile * self.rest);
                piece.partial = self.partial_of_rest(tile, helper);
            }
        }
        piece
    }

    /// Returns the index of the partial tile of helper `helper` for shared tile `tile`. These
    /// follow the partial tiles of slices; the next helper or the next tile has the next index.
    fn partial_of_rest(&self, tile: u32, helper: u32) -> u32 {
        (self.slices - 1u32) * self.shared + tile + helper
    }

    /// Returns the position of tile `tile`.
    fn place(&self, tile: u32, #[comptime] form: Sm90Tile) -> Place {
        place(
            tile,
            self.shape.m.div_ceil(comptime!(SM90_TILE_M as u32)),
            self.shape.n.div_ceil(comptime!(form.n() as u32)),
            self.band,
            comptime!(SM90_TILE_M as u32),
            comptime!(form.n() as u32),
        )
    }

    /// Returns the partial tiles of shared tile `tile`.
    fn parts(&self, tile: u32) -> PartsOfTile {
        let mut parts = PartsOfTile {
            slices: tile,
            of_slices: self.slices - 1u32,
            stride: self.shared,
            rest: 0u32,
            of_rest: 0u32,
        };
        if self.rest > 0u32 {
            let helper = tile * self.rest / self.per_helper;
            let last = ((tile + 1u32) * self.rest - 1u32) / self.per_helper;
            parts.rest = self.partial_of_rest(tile, helper);
            parts.of_rest = last + 1u32 - helper;
        }
        parts
    }
}

/// Returns the index of this CTA in the grid. This is a function because `rustc` takes `CUBE_POS`
/// for a constant.
#[cube]
fn place_in_grid() -> u32 {
    CUBE_POS as u32
}

/// Workspace with the sums of CTAs that do not own their tile.
#[derive(CubeType, CubeLaunch)]
pub struct PartialTiles {
    /// Partial tiles in the layout of the units of two consumer warpgroups: four sums of every
    /// unit, then the next four.
    pub sums: Box<[Vector<f32, Const<4>>]>,
    /// Number of written partial tiles per shared tile; initially zero.
    pub written: Box<[u32]>,
}

/// Returns the vectors of four sums in a partial tile. They fit into the stages of `b`.
const fn partial_len(tile: Sm90Tile) -> usize {
    let vectors = SM90_TILE_M * tile.n() / 4;
    assert!(vectors <= tile.stages() * b_stage(tile));
    vectors
}

/// Returns the offset in bytes of vector `i` of this unit in a partial tile.
#[cube]
fn offset_of(#[comptime] i: usize) -> u32 {
    (thread_in_cta() - 128u32) * 16u32 + comptime!(i as u32 * CONSUMERS * 16)
}

#[cube]
impl PartialTiles {
    /// Writes partial tile `index` of shared tile `tile`.
    fn write<S: Size>(
        &mut self,
        sums: Vector<f32, S>,
        index: u32,
        tile: u32,
        #[comptime] shape: Sm90Tile,
    ) {
        let unit = thread_in_cta() - 128u32;
        let first = index as usize * comptime!(partial_len(shape)) + unit as usize;
        #[unroll]
        for i in 0..comptime!(shape.n() / 8) {
            let mut four = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for j in 0..4usize {
                four.insert(j, sums.extract(comptime!(4 * i + j)));
            }
            self.sums[first + comptime!(i * CONSUMERS as usize)] = four;
        }
        named_barrier_sync(1u32, CONSUMERS);
        if unit == 0u32 {
            red_release_gpu_add(self.counter(tile), 1u32);
        }
    }

    /// Waits until `count` partial tiles of shared tile `tile` are written.
    fn wait(&self, tile: u32, count: u32) {
        if thread_in_cta() == 128u32 {
            let counter = self.counter(tile);
            while ld_acquire_gpu(counter) < count {}
        }
        named_barrier_sync(1u32, CONSUMERS);
    }

    /// Adds `parts` to `sums` in order.
    ///
    /// The sums of a unit take nearly all its registers, so partial tiles pass through shared
    /// memory, in chunks large enough to hide the L2 latency. Each unit only reads what it has
    /// copied itself, so it waits for no other unit.
    fn add<S: Size>(
        &self,
        sums: Vector<f32, S>,
        parts: PartsOfTile,
        landing: u32,
        #[comptime] shape: Sm90Tile,
    ) -> Vector<f32, S> {
        let vectors = comptime!(shape.n() / 16);
        let mut sums = sums;
        let count = parts.of_slices + parts.of_rest;
        #[unroll]
        for half in 0..2usize {
            self.fetch(parts.index(0u32), landing, half, shape);
            cp_async_commit_group();
        }
        for n in 0..count {
            #[unroll]
            for half in 0..2usize {
                cp_async_wait_group(1u32);
                #[unroll]
                for i in 0..vectors {
                    let i = comptime!(half * vectors + i);
                    let four = ld_shared_v4(landing + offset_of(i));
                    #[unroll]
                    for j in 0..4usize {
                        let at = comptime!(4 * i + j);
                        let addend = f32::reinterpret(four.extract(j));
                        sums.insert(at, sums.extract(at) + addend);
                    }
                }
                if n + 1u32 < count {
                    self.fetch(parts.index(n + 1u32), landing, half, shape);
                }
                cp_async_commit_group();
            }
        }
        sums
    }

    /// Starts the copy of half of partial tile `index` to `landing` in shared memory.
    fn fetch(
        &self,
        index: u32,
        landing: u32,
        #[comptime] half: usize,
        #[comptime] shape: Sm90Tile,
    ) {
        let bytes = comptime!(16 * partial_len(shape) as u64);
        let tile = cvta_to_global::<Vector<f32, Const<4>>>(self.sums.as_ptr())
            + u64::cast_from(index) * bytes;
        let vectors = comptime!(shape.n() / 16);
        #[unroll]
        for i in 0..vectors {
            let offset = offset_of(comptime!(half * vectors + i));
            cp_async(landing + offset, tile + u64::cast_from(offset), 16u32);
        }
    }

    fn counter(&self, tile: u32) -> u64 {
        cvta_to_global::<u32>(self.written.as_ptr()) + u64::cast_from(tile) * 4u64
    }
}

/// Comptime configuration of `sm90_stream_k_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamKPlan {
    /// Tile.
    pub tile: Sm90Tile,
    /// Layouts of `a` and `b`.
    pub majors: [Major; 2],
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])`. `out` is in units of 16
/// bytes.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn sm90_stream_k_kernel(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<bf16, Tiled>,
    problem: StreamKProblem,
    partials: &mut PartialTiles,
    epilogue: Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] plan: StreamKPlan,
) {
    let tile = comptime!(plan.tile);
    let mut a_tiles: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(tile.stages() * A_STAGE), 1024usize);
    let mut b_tiles: Shared<[Vector<bf16, Const<8>>]> =
        Shared::new_aligned_slice(comptime!(tile.stages() * b_stage(tile)), 1024usize);
    let staging: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(8 * STAGING / 16), 128usize);
    let barriers: Shared<[Barrier]> =
        Shared::new_aligned_slice(comptime!(2 * tile.stages()), 8usize);
    let full = cvta_to_shared::<Barrier>(barriers.as_slice().as_ptr());
    init_barriers(&barriers, comptime!(tile.stages()));
    if UNIT_POS < 128u32 {
        if UNIT_POS == 0u32 {
            produce(
                a,
                b,
                &problem,
                &mut a_tiles,
                &mut b_tiles,
                &barriers,
                full,
                plan,
            );
        }
    } else {
        let shared = SharedAddresses {
            full,
            a: cvta_to_shared::<Vector<bf16, Const<8>>>(a_tiles.as_slice().as_ptr()),
            b: cvta_to_shared::<Vector<bf16, Const<8>>>(b_tiles.as_slice().as_ptr()),
            staging: cvta_to_shared::<Vector<u32, Const<4>>>(staging.as_slice().as_ptr()),
        };
        consume(&problem, partials, &epilogue, out, shared, plan);
    }
}

/// The producer, one unit: fills the stages of all pieces of this CTA in sequence.
#[cube]
fn produce(
    a: &TensorMap<bf16, Tiled>,
    b: &TensorMap<bf16, Tiled>,
    problem: &StreamKProblem,
    a_tiles: &mut [Vector<bf16, Const<8>>],
    b_tiles: &mut [Vector<bf16, Const<8>>],
    barriers: &[Barrier],
    full: u32,
    #[comptime] plan: StreamKPlan,
) {
    let tile = comptime!(plan.tile);
    let depth = Depth::of(problem.shape.k).stages();
    let mut used = 0u32;
    let mut number = 0u32;
    let mut goes_on = true;
    while goes_on {
        let piece = problem.piece(number, depth);
        goes_on = piece.from < piece.to;
        let at = problem.place(piece.tile, tile);
        for step in piece.from..piece.to {
            let first = step * comptime!(SM90_TILE_K as u32);
            let source = StageSource {
                row: at.row,
                column: at.column,
                depth: first,
                b_depth: first,
                used,
            };
            fill_stage(
                a,
                b,
                a_tiles,
                b_tiles,
                barriers,
                full,
                source,
                comptime!((tile, plan.majors)),
            );
            used += 1u32;
        }
        number += 1u32;
    }
}

/// A consumer warpgroup: multiplies 64 rows of every piece of this CTA, and writes them to the
/// output or to the workspace.
#[cube]
fn consume(
    problem: &StreamKProblem,
    partials: &mut PartialTiles,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    shared: SharedAddresses,
    #[comptime] plan: StreamKPlan,
) {
    let tile = comptime!(plan.tile);
    let majors = comptime!(plan.majors);
    let whole_depth = Depth::of(problem.shape.k);
    let depth = whole_depth.stages();
    let operands = StageOperands::of(shared, majors);
    let warp = (thread_in_cta() - 128u32) / 32u32;
    let mut used = 0u32;
    let mut number = 0u32;
    let mut goes_on = true;
    while goes_on {
        let piece = problem.piece(number, depth);
        goes_on = piece.from < piece.to;
        if goes_on {
            let pipeline = pipeline_at(shared.full, used, comptime!(tile.stages()));
            let is_last = piece.to == depth;
            let here = Depth {
                steps: min(piece.to, whole_depth.steps) - piece.from,
                tail: select(is_last, whole_depth.tail, 0u32),
            };
            let size!(S) = comptime!(tile.accumulators());
            let mut sums = multiply::<S>(pipeline, operands, here, comptime!((tile, majors)));
            let index = piece.tile - problem.whole;
            if piece.from > 0u32 {
                partials.write::<S>(sums, piece.partial, index, tile);
            } else {
                if !is_last {
                    let parts = problem.parts(index);
                    partials.wait(index, parts.of_slices + parts.of_rest);
                    // This is the last piece of the CTA: no stage is read or filled any more.
                    sums = partials.add::<S>(sums, parts, shared.b, tile);
                }
                let at = problem.place(piece.tile, tile);
                let own = WarpTile {
                    row: at.row + warp * 16u32,
                    end: problem.shape.m,
                    column: at.column,
                    n: problem.shape.n,
                    group: 0u32,
                    staging: shared.staging + warp * comptime!(STAGING as u32),
                };
                write_warp_tile::<S>(sums, own, epilogue, out, comptime!(tile.n()));
            }
            used += piece.to - piece.from;
        }
        number += 1u32;
    }
}

/// The sm_90 GEMM with stream-K.
pub(crate) struct Sm90StreamK;

impl GemmKernel for Sm90StreamK {
    fn name(&self) -> &'static str {
        "sm90_stream_k"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Sm90Wgmma
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        problem.refuse_packed_mn_major()?;
        check_sm90(device, problem)?;
        if problem.grouped != GroupedDim::None {
            return Err(Refusal::Operands("there are groups"));
        }
        let depth = stages_of(problem.shape.k);
        let shares = |tile| StreamK::of(tiles_of(problem.shape, tile), depth, device.sms).is_some();
        match Sm90Tile::ALL.into_iter().any(shares) {
            true => Ok(()),
            false => Err(Refusal::Operands("the tiles fill all SMs, or k is short")),
        }
    }

    fn plan(&self, device: &Device, problem: &Problem) -> Candidate {
        let (tile, band, estimate) = heuristics::sm90_stream_k(device.sms, problem);
        Candidate {
            plan: DequantThenStreamK(tile, band).into(),
            estimate: Some(estimate),
        }
    }
}

/// Plan: as [`DequantThenBf16`](super::bf16::DequantThenBf16), with the tiles of the last wave split
/// along K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DequantThenStreamK(pub Sm90Tile, pub usize);

impl fmt::Display for DequantThenStreamK {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0.n();
        write!(
            f,
            "wgmma on dequantized bf16, {SM90_TILE_M} x {n} tiles, stream-K"
        )
    }
}

impl GemmPlan for DequantThenStreamK {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &Sm90StreamK
    }

    fn reads(&self) -> StoredForm {
        StoredForm::Bf16Unscaled
    }

    fn reads_mn_major(&self) -> bool {
        true
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        let Self(tile, band) = *self;
        let takes = tile.takes_mn_major() || !launch.b.is_mn_major();
        let queued = takes.then(|| queue(launch, tile, band)).flatten();
        queued.ok_or_else(|| launch.misfit(self))
    }
}

/// Queues the GEMM; returns `None` if no tiles are to be shared. `supports` must accept memory,
/// sizes and groups.
fn queue(launch: &Launch, tile: Sm90Tile, band: usize) -> Option<()> {
    let Launch {
        client,
        a,
        b,
        epilogue,
        output,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let tiles = tiles_of(launch.shape, tile);
    let schedule = StreamK::of(tiles, stages_of(k), sms(client))?;
    let partial_vectors = schedule.partials() * partial_len(tile);
    let sums = allocate(client, partial_vectors * 16);
    let written = zeros_of_step(client, schedule.shared);
    let out = &output.matrix().handle;
    let memory = |handle: &Handle, len: usize| {
        // SAFETY: the workspace was allocated with this length, and the caller checked that the
        // output's memory holds what `epilogue.kind` reads of it.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    let bytes = m * n * epilogue.kind.out.size();
    // SAFETY: the kernel masks what it writes by rows and columns, reads operands through maps, and
    // writes as many partial tiles as `schedule` says.
    unsafe {
        sm90_stream_k_kernel::launch_unchecked(
            client,
            CubeCount::Static(schedule.ctas() as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            address_type((m * n).max(partial_vectors * 4)),
            operand_map(a, k, SM90_TILE_M),
            operand_map(b, k, tile.n()),
            StreamKProblemLaunch::new(
                ProblemShapeLaunch::of((m, n, k), 1),
                schedule.whole as u32,
                schedule.shared as u32,
                schedule.slices as u32,
                schedule.slice as u32,
                schedule.rest as u32,
                schedule.per_helper as u32,
                band as u32,
            ),
            PartialTilesLaunch::new(
                memory(&sums, partial_vectors),
                memory(&written, schedule.shared),
            ),
            epilogue.launch([m, b.rows], 1, (out, bytes / 4), 1.0),
            memory(out, bytes / 16),
            StreamKPlan {
                tile,
                majors: [a, b].map(major),
            },
        );
    }
    Some(())
}
