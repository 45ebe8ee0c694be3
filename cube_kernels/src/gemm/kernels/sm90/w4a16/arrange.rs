//! Rearranges `a` for the [`sm90_w4a16`](super) kernel: bf16 in the order in which
//! lanes hold the codes of `b`. Also writes the schedule of a grouped GEMM.

use cubecl::{prelude::*, server::Handle};

use crate::{
    cube::{
        codec::{decode_e2m1_pair, decode_e4m3x2},
        w4a16_order::{SPAN, word_of},
    },
    gemm::{
        arguments::{MixedMatrix, MixedMatrixLaunch},
        materialize::Materialized,
        scheduler::{GroupArgs, Schedule, schedule_groups},
    },
    memory::{address_type, allocate},
};

/// Units per cube.
const UNITS: usize = 256;

/// Vectors of eight elements that a unit of `arrange_kernel` writes.
const VECTORS: usize = 2;

/// Sizes of the input and output of `arrange_kernel`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ArrangeSize {
    /// Words of eight columns per row of `a`.
    pub words: u32,
    /// Vectors of eight elements of the output.
    pub vectors: u32,
    /// Groups of rows.
    pub groups: u32,
}

/// Writes `a` in the form that the kernel reads
/// ([`sm90_mainloop_w4a16`](crate::cube::ptx::sm90_mainloop_w4a16)): rows of whole `SPAN`s in the
/// order of `cube::w4a16_order`, with zeros after `words` words of eight columns, and packed elements
/// times 2^-8. The first cube also writes the schedule of a grouped GEMM
/// (`scheduler::schedule_groups`).
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn arrange_kernel(
    a: MixedMatrix<u32, u16>,
    out: &mut [Vector<u32, Const<4>>],
    offsets: &[u32],
    schedule: &mut [Vector<u32, Const<4>>],
    size: ArrangeSize,
    #[comptime] packed: bool,
    #[comptime] grouped: Option<Schedule>,
) {
    let words = size.words;
    let vectors = size.vectors;
    let first = CUBE_POS as u32 * comptime!((UNITS * VECTORS) as u32) + UNIT_POS;
    // Vectors per row.
    let width = words.div_ceil(comptime!(SPAN as u32 / 8)) * comptime!(SPAN as u32 / 8);
    if comptime!(grouped.is_some()) {
        let rows = vectors / width;
        schedule_groups(
            offsets,
            schedule,
            size.groups,
            rows,
            comptime!(grouped.unwrap()),
        );
    }
    let mut pairs = Array::<u32>::new(comptime!(4 * VECTORS));
    let mut bytes = Array::<u32>::new(comptime!(4 * VECTORS));
    #[unroll]
    for i in 0..VECTORS {
        let vector = first + comptime!((i * UNITS) as u32);
        let row = vector / width;
        let within = vector % width;
        #[unroll]
        for q in 0..4usize {
            let slot = comptime!(4 * i + q);
            let word = word_of(within, comptime!(q as u32));
            let inside = vector < vectors && word < words;
            let at = row as usize * words as usize + word as usize;
            pairs[slot] = 0u32;
            bytes[slot] = 0u32;
            if inside {
                if comptime!(packed) {
                    pairs[slot] = a.codes[at];
                    bytes[slot] = u32::cast_from(a.scales[at / 2usize]);
                } else {
                    let at = at * 8usize + (within % 4u32) as usize;
                    pairs[slot] = u32::cast_from(a.dense[at])
                        | (u32::cast_from(a.dense[at + 4usize]) << 16u32);
                }
            }
        }
    }
    #[unroll]
    for i in 0..VECTORS {
        let vector = first + comptime!((i * UNITS) as u32);
        let mut eight = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for q in 0..4usize {
            let slot = comptime!(4 * i + q);
            if comptime!(packed) {
                let scale = decode_e4m3x2(u16::cast_from(bytes[slot]));
                let pair = (pairs[slot] >> ((vector % 4u32) * 4u32)) & 0x000f_000fu32;
                eight.insert(
                    q,
                    decode_e2m1_pair(u32::reinterpret(pair), scale.extract(0usize)),
                );
            } else {
                eight.insert(q, pairs[slot]);
            }
        }
        if vector < vectors {
            out[vector as usize] = eight;
        }
    }
}

/// Returns `operand` as bf16 in the order of `arrange_kernel`, with rows padded to whole [`SPAN`]s,
/// and the schedule of `entries` entries if the GEMM has groups along M. Both live until the last
/// kernel that reads them has run. Rows and columns must not be empty.
pub(crate) fn arrange(
    client: &Client,
    operand: &Materialized,
    k: usize,
    groups: &GroupArgs,
    entries: usize,
    order: Option<Schedule>,
) -> (Handle, Handle) {
    let words = k / 8;
    let vectors = operand.rows * words.next_multiple_of(SPAN / 8);
    let (out, schedule) = (
        allocate(client, vectors * 16),
        allocate(client, entries * 16),
    );
    let read = operand.rows * words;
    // SAFETY: the operand was checked against its shape, there are entries for a tile at the end of
    // each group, and the kernel masks what it reads and writes.
    unsafe {
        arrange_kernel::launch_unchecked(
            client,
            CubeCount::Static(vectors.div_ceil(UNITS * VECTORS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(vectors * 8),
            MixedMatrixLaunch::new(
                BufferArg::from_raw_parts(operand.elements.clone(), read),
                BufferArg::from_raw_parts(operand.scales.clone(), read / 2),
                BufferArg::from_raw_parts(operand.elements.clone(), read * 8),
            ),
            BufferArg::from_raw_parts(out.clone(), vectors),
            BufferArg::from_raw_parts(groups.offsets.clone(), groups.groups + 1),
            BufferArg::from_raw_parts(schedule.clone(), entries),
            ArrangeSizeLaunch::new(words as u32, vectors as u32, groups.groups as u32),
            operand.is_packed(),
            order,
        );
    }
    (out, schedule)
}
