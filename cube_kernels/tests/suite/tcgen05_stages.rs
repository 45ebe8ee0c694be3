//! Operands that the `tcgen05` kernel computes for its instructions, on pipeline stages in its
//! layout, by the software model on CubeCL's CPU runtime or any other device: both formats, normal
//! operands, operands split over two CTAs, exchanged operands, and groups along K.

use crate::support::{
    device::{read_u32, upload_bytes},
    mxfp8::Mxfp8,
    packed::Packed,
};
use crate::tcgen05_model::{BASE, expected, ordered_sums, sums};
use cubecl::prelude::*;
use nvfp4_formats::format::swizzle::swizzle;
use nvfp4_kernels::{
    gemm::proof::{
        Fault, GroupedDim, Sm100Form, Sm100Plan, TensorCore,
        sm100::engine::{
            BAD_INSTRUCTION, BAD_SHARED, Command, Memory, Peer, TMEM_WORDS, VIOLATIONS,
            execute_copy, execute_mma, is_bad_instruction,
        },
        sm100::operands,
    },
    proof::ptx::{BlockScaled, instruction_descriptor},
};

const NVFP4: BlockScaled = BlockScaled::Nvfp4;
const ONE: Sm100Form = Sm100Form::OneCta;
const TWO: Sm100Form = Sm100Form::TwoCta;

/// Parameters of a tile besides its operands.
#[derive(Clone, Copy)]
struct Part {
    /// Number of columns, counted from the start of the first stage.
    k: usize,
    /// Number of leading steps that are not multiplied.
    lead: usize,
    /// With exchanged operands: number of rows of the second operand, and its first row among its
    /// 128 rows of scales.
    n: usize,
    b_row: usize,
}

impl Part {
    /// Returns a tile of all `k` columns.
    fn of(k: usize) -> Self {
        Self {
            k,
            lead: 0,
            n: 0,
            b_row: 0,
        }
    }
}

/// Executes the instructions of the kernel for a K of `k` in the kernel's order, one stage per K
/// tile. `part` contains `k`, `lead`, `n` and `b_row`.
#[cube(launch_unchecked)]
fn execute_stages_kernel(
    shared: &[u32],
    tmem: &mut [u32],
    violations: &[Atomic<u32>],
    part: &[u32],
    #[comptime] plan: Sm100Plan,
) {
    // With two CTAs, the stages of the odd one follow those of the even one.
    let memory = Memory {
        shared: BASE.runtime(),
        bytes: comptime!(plan.operands() as u32).runtime(),
        tmem: 0usize.runtime(),
        peer: comptime!(match plan.ctas() {
            1 => Peer::None,
            _ => Peer::Adjacent,
        }),
    };
    let lanes = comptime!(128 * plan.ctas() as u32);
    let (k, lead) = (part[0], part[1]);
    if UNIT_POS == 0u32 {
        for k_tile in 0..k.div_ceil(comptime!(plan.format.tile_k() as u32)) {
            let steps = operands::steps_of(k_tile, k, comptime!(plan.format));
            let atoms = operands::atoms_of(k_tile, k, comptime!(plan.format));
            let at = operands::StageAt {
                operands: BASE.runtime(),
                tmem: 0u32.runtime(),
                stage: k_tile,
                k_tile,
                lead,
                n: part[2],
                b_row: part[3],
            };
            #[unroll]
            for atom in 0..comptime!(plan.atoms()) {
                if comptime!(atom as u32).runtime() < atoms {
                    #[unroll]
                    for half in 0..comptime!(1 + plan.b_tiles()) {
                        let copy = operands::scale_copy(at, atom, half, plan);
                        let command = Command {
                            opcode: 0u32.runtime(),
                            target: copy.target,
                            a: copy.source,
                            b: 0u64.runtime(),
                            idesc: 0u32.runtime(),
                            a_scales: 0u32.runtime(),
                            b_scales: 0u32.runtime(),
                            accumulate: 0u32.runtime(),
                        };
                        for lane in 0..lanes {
                            execute_copy(shared, tmem, memory, command, lane, violations);
                        }
                    }
                }
            }
            let first = select(k_tile == 0u32, lead, 0u32);
            #[unroll]
            for step in 0..4usize {
                let number = comptime!(step as u32).runtime();
                if number < steps && number >= first {
                    let mma = operands::mma_operands(at, step, plan);
                    let command = Command {
                        opcode: 1u32.runtime(),
                        target: mma.d,
                        a: mma.a,
                        b: mma.b,
                        idesc: mma.idesc,
                        a_scales: mma.a_scales,
                        b_scales: mma.b_scales,
                        accumulate: mma.accumulate,
                    };
                    let kind = comptime!(plan.format);
                    for lane in 0..lanes {
                        execute_mma(shared, tmem, memory, command, lane, violations, kind);
                    }
                }
            }
        }
    }
}

/// Loads of the kernel for a CTA of a tile at the first row of either operand.
struct Loads {
    /// First rows of `a` and of `b` whose codes are loaded.
    rows: [usize; 2],
    /// Index of the 128 rows of `a` whose scales are loaded.
    a_tile: usize,
    /// Indices of the 128 rows of `b` whose scales are loaded.
    b_tiles: Vec<usize>,
}

/// Writes the loads of each CTA: first rows of `a` and `b`, the tile of scales of `a`, and up to
/// two of `b`.
#[cube(launch_unchecked)]
fn loads_kernel(out: &mut [u32], #[comptime] plan: Sm100Plan) {
    if UNIT_POS == 0u32 {
        for rank in 0..comptime!(plan.ctas() as u32) {
            let share = operands::cta_share(rank, plan);
            let first = (rank * 5u32) as usize;
            out[first] = share.a;
            out[first + 1usize] = share.b;
            out[first + 2usize] = share.a_tile;
            #[unroll]
            for part in 0..comptime!(plan.b_tiles()) {
                out[first + 3usize + part] = operands::scales_of_part(rank, part, plan);
            }
        }
    }
}

/// Returns the loads of the kernel for each CTA that shares a tile.
fn loads(client: &Client, plan: Sm100Plan) -> Vec<Loads> {
    let len = 5 * plan.ctas();
    let out = upload_bytes(client, &vec![0; 4 * len]);
    // SAFETY: five words for each CTA.
    unsafe {
        loads_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            BufferArg::from_raw_parts(out.clone(), len),
            plan,
        );
    }
    let words = read_u32(client, &out, len);
    let words: Vec<usize> = words.into_iter().map(|word| word as usize).collect();
    (words.chunks(5))
        .map(|words| Loads {
            rows: [words[0], words[1]],
            a_tile: words[2],
            b_tiles: words[3..3 + plan.b_tiles()].to_vec(),
        })
        .collect()
}

/// An operand of the instruction as it is stored, in either format.
struct Stored<'a> {
    rows: usize,
    /// Bytes per row of codes and of scales.
    bytes: usize,
    blocks: usize,
    codes: &'a [u8],
    scales: &'a [u8],
    /// First row among the 128 of its scales.
    first: usize,
}

impl<'a> From<&'a Packed> for Stored<'a> {
    fn from(packed: &'a Packed) -> Self {
        Self {
            rows: packed.rows,
            bytes: packed.blocks * 8,
            blocks: packed.blocks,
            codes: &packed.codes,
            scales: &packed.scales,
            first: 0,
        }
    }
}

impl<'a> From<&'a Mxfp8> for Stored<'a> {
    fn from(packed: &'a Mxfp8) -> Self {
        Self {
            rows: packed.rows,
            bytes: packed.blocks * 32,
            blocks: packed.blocks,
            codes: &packed.codes,
            scales: &packed.scales,
            first: 0,
        }
    }
}

/// Returns the memory of all stages of a CTA, one K tile per stage: codes as TMA writes them, zeros
/// past the last row and column, and the available scales; arbitrary bytes elsewhere. Two CTAs load
/// scales as boxes as high as a stage: past the last column these are scales of other rows, and
/// zeros past the last of all.
fn stages_of_cta(a: &Stored, b: &Stored, loads: &Loads, plan: Sm100Plan) -> Vec<u8> {
    let mut bytes = vec![0x77u8; plan.operands()];
    let (in_boxes, whole) = (plan.ctas() > 1, plan.atoms() * 512);
    let atoms = a.blocks.div_ceil(4);
    let a_tiles = [loads.a_tile];
    for stage in 0..a.bytes.div_ceil(128) {
        let count = (atoms - stage * plan.atoms()).min(plan.atoms()) * 512;
        for (stored, first, rows, codes_at, scales_at, tiles) in [
            (a, loads.rows[0], 128, 0, plan.a_scales_at(), &a_tiles[..]),
            (
                b,
                loads.rows[1],
                plan.b_rows_of_cta(),
                plan.b_codes_at(),
                plan.b_scales_at(),
                &loads.b_tiles[..],
            ),
        ] {
            for row in 0..rows {
                for byte in 0..128 {
                    let (from, column) = (first + row, stage * 128 + byte);
                    let code = match from < stored.rows && column < stored.bytes {
                        true => stored.codes[from * stored.bytes + column],
                        false => 0,
                    };
                    let part = (byte / 16) ^ (row % 8);
                    let at = codes_at + (stage * rows + row) * 128 + part * 16 + byte % 16;
                    bytes[at] = code;
                }
            }
            let mut scales = vec![0x55; stored.first * stored.blocks];
            scales.extend_from_slice(stored.scales);
            let all = stored.first + stored.rows;
            let swizzled = swizzle(&scales, all, stored.blocks);
            for (part, tile) in tiles.iter().enumerate() {
                let from = (tile * atoms + stage * plan.atoms()) * 512;
                let to = scales_at + (stage * tiles.len() + part) * whole;
                if in_boxes {
                    let there = swizzled.iter().skip(from).copied();
                    let with_zeros = there.chain(std::iter::repeat(0)).take(whole);
                    bytes.splice(to..to + whole, with_zeros);
                } else if *tile < all.div_ceil(128) {
                    bytes[to..to + count].copy_from_slice(&swizzled[from..from + count]);
                }
            }
        }
    }
    bytes
}

/// Returns the sums of [`execute_stages_kernel`], in rows as wide as the tile, and the counts of
/// violations.
fn execute_stages<'a>(
    client: &Client,
    a: impl Into<Stored<'a>>,
    b: impl Into<Stored<'a>>,
    part: Part,
    plan: Sm100Plan,
) -> (Vec<f32>, Vec<u32>) {
    let b = Stored {
        first: part.b_row,
        ..b.into()
    };
    let a = a.into();
    let ctas = loads(client, plan);
    let shared: Vec<u8> = (ctas.iter())
        .flat_map(|loads| stages_of_cta(&a, &b, loads, plan))
        .collect();
    let words = plan.ctas() * TMEM_WORDS;
    let poison = vec![0x7fff_ffffu32; words];
    let tmem = upload_bytes(client, bytemuck::cast_slice(&poison));
    let violations = upload_bytes(client, &[0; 4 * VIOLATIONS]);
    let part = [part.k, part.lead, part.n, part.b_row].map(|it| it as u32);
    let arg = |handle: &cubecl::server::Handle, len| {
        // SAFETY: the buffer has so many elements.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    // SAFETY: the model checks its addresses.
    unsafe {
        execute_stages_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            arg(&upload_bytes(client, &shared), shared.len() / 4),
            arg(&tmem, words),
            arg(&violations, VIOLATIONS),
            arg(
                &upload_bytes(client, bytemuck::cast_slice(&part)),
                part.len(),
            ),
            plan,
        );
    }
    let tmem = read_u32(client, &tmem, words);
    let ctas = tmem.chunks(TMEM_WORDS);
    (
        ctas.flat_map(|tmem| sums(tmem, plan.b_rows())).collect(),
        read_u32(client, &violations, VIOLATIONS),
    )
}

/// Returns a plan without groups.
fn plan(format: BlockScaled, form: Sm100Form, core: TensorCore) -> Sm100Plan {
    Sm100Plan {
        format,
        form,
        grouped: GroupedDim::None,
        core,
    }
}

/// Asserts that `found`, of a tile of width `width`, begins with `expected`, in rows of `n`.
fn assert_tile(found: &[f32], expected: &[f32], n: usize, width: usize, what: &str) {
    assert!(expected.iter().any(|sum| *sum != 0.0), "{what}");
    for (i, expected) in expected.iter().enumerate() {
        let (row, column) = (i / n, i % n);
        let found = found[row * width + column];
        assert_eq!(
            found.to_bits(),
            expected.to_bits(),
            "{what}: ({row}, {column})"
        );
    }
}

/// Operands that the kernel computes for its instructions, on stages in its layout: whole and
/// partial K tiles, with and without a second 128 rows of `b`, and for two CTAs with and without
/// rows of `a` in the odd one.
#[test]
fn the_operands_of_the_kernel_multiply_its_stages() {
    let client = client!("tcgen05_model::the_operands_of_the_kernel_multiply_its_stages");
    for core in [TensorCore::Instruction, TensorCore::Software(Fault::None)] {
        for (form, (m, n, k)) in [
            (ONE, (128, 256, 1024)),
            (ONE, (128, 104, 32)),
            (ONE, (77, 136, 608)),
            (TWO, (256, 256, 1280)),
            (TWO, (128, 104, 32)),
            (TWO, (201, 136, 608)),
        ] {
            let what = format!("{form}, {m} x {n} x {k}");
            let (a, b) = (Packed::random(m, k, 3), Packed::random(n, k, 4));
            let plan = plan(NVFP4, form, core);
            let (found, violations) = execute_stages(&client, &a, &b, Part::of(k), plan);
            assert_eq!(violations, [0; VIOLATIONS], "{what}");
            assert_tile(&found, &expected(&a, &b), n, 256, &what);
        }
    }
}

/// MXFP8: a word of scales serves the four instructions of a stage.
#[test]
fn the_operands_of_the_kernel_multiply_mxfp8() {
    let client = client!("tcgen05_model::the_operands_of_the_kernel_multiply_mxfp8");
    for core in [TensorCore::Instruction, TensorCore::Software(Fault::None)] {
        for (form, (m, n, k)) in [
            (ONE, (128, 256, 512)),
            (ONE, (128, 104, 32)),
            (ONE, (77, 136, 224)),
            (TWO, (256, 256, 640)),
            (TWO, (128, 104, 32)),
            (TWO, (201, 136, 224)),
        ] {
            let what = format!("{form}, {m} x {n} x {k}");
            let (a, b) = (Mxfp8::random(m, k, 3), Mxfp8::random(n, k, 4));
            let plan = plan(BlockScaled::Mxfp8, form, core);
            let (found, violations) = execute_stages(&client, &a, &b, Part::of(k), plan);
            assert_eq!(violations, [0; VIOLATIONS], "{what}");
            let expected = ordered_sums(&a.decoded(), &b.decoded(), k, 0..k);
            assert_tile(&found, &expected, n, 256, &what);
        }
    }
}

/// Exchanged operands: narrow instructions, and rows of the second operand in either half of the
/// 128 rows of its scales. Columns past the narrow ones keep their contents.
#[test]
fn the_operands_of_the_kernel_multiply_few_rows() {
    let client = client!("tcgen05_model::the_operands_of_the_kernel_multiply_few_rows");
    for (m, rows, k, b_row) in [
        (128, 64usize, 1792, 0),
        (128, 64, 512, 64),
        (77, 1, 96, 0),
        (128, 17, 352, 64),
        (5, 40, 64, 0),
    ] {
        let what = format!("{m} x {rows} x {k}, row {b_row}");
        let part = Part {
            n: rows.next_multiple_of(8),
            b_row,
            ..Part::of(k)
        };
        let (a, b) = (Packed::random(m, k, 3), Packed::random(rows, k, 4));
        let own = plan(NVFP4, Sm100Form::SwapAb, TensorCore::Instruction);
        let (found, violations) = execute_stages(&client, &a, &b, part, own);
        assert_eq!(violations, [0; VIOLATIONS], "{what}");
        assert_tile(&found, &expected(&a, &b), rows, 64, &what);
        if part.n < 64 {
            assert_eq!(found[part.n].to_bits(), 0x7fff_ffff, "{what}");
        }
        // There are seven stages, half as wide in MXFP8.
        let k = k / 2 / 32 * 32;
        let (a, b) = (Mxfp8::random(m, k, 3), Mxfp8::random(rows, k, 4));
        let own = plan(
            BlockScaled::Mxfp8,
            Sm100Form::SwapAb,
            TensorCore::Instruction,
        );
        let part = Part { k, ..part };
        let (found, violations) = execute_stages(&client, &a, &b, part, own);
        assert_eq!(violations, [0; VIOLATIONS], "MXFP8, {what}");
        let expected = ordered_sums(&a.decoded(), &b.decoded(), k, 0..k);
        assert_tile(&found, &expected, rows, 64, &format!("MXFP8, {what}"));
    }
}

/// A group along K ends within a stage, and is followed by the codes of the next group: neither
/// these nor their NaN scales enter a sum.
#[test]
fn columns_behind_a_group_are_not_multiplied() {
    let client = client!("tcgen05_model::columns_behind_a_group_are_not_multiplied");
    let (m, n, stored) = (40, 136, 608);
    for k in [64, 192, 320, 512] {
        let (mut a, b) = (Packed::random(m, stored, 3), Packed::random(n, stored, 4));
        for row in a.scales.chunks_mut(stored / 16) {
            row[k / 16..].fill(0x7f);
        }
        let (own_a, own_b) = (a.columns(0..k / 16), b.columns(0..k / 16));
        let expected = expected(&own_a, &own_b);
        for form in [ONE, TWO] {
            let what = format!("{form}, {k}");
            let plan = plan(NVFP4, form, TensorCore::Instruction);
            let (found, violations) = execute_stages(&client, &a, &b, Part::of(k), plan);
            assert_eq!(violations, [0; VIOLATIONS], "{what}");
            assert_tile(&found, &expected, n, 256, &what);
        }
    }
}

/// In MXFP8 a group along K may also begin within a stage: data before or after it does not enter a
/// sum.
#[test]
fn columns_around_a_group_of_mxfp8_are_not_multiplied() {
    let client = client!("tcgen05_model::columns_around_a_group_of_mxfp8_are_not_multiplied");
    let (m, n, stored) = (40, 136, 416);
    for columns in [0..32, 32..64, 96..128, 64..160, 32..416, 96..288, 0..128] {
        let (mut a, b) = (Mxfp8::random(m, stored, 3), Mxfp8::random(n, stored, 4));
        let decoded = a.decoded();
        for row in a.scales.chunks_mut(stored / 32) {
            row[..columns.start / 32].fill(0xff);
            row[columns.end / 32..].fill(0xff);
        }
        let part = Part {
            lead: columns.start / 32,
            ..Part::of(columns.end)
        };
        let expected = ordered_sums(&decoded, &b.decoded(), stored, columns.clone());
        for form in [ONE, TWO] {
            let what = format!("{form}, {columns:?}");
            let plan = Sm100Plan {
                grouped: GroupedDim::K,
                ..plan(BlockScaled::Mxfp8, form, TensorCore::Instruction)
            };
            let (found, violations) = execute_stages(&client, &a, &b, part, plan);
            assert_eq!(violations, [0; VIOLATIONS], "{what}");
            assert_tile(&found, &expected, n, 256, &what);
        }
    }
}

/// Faults in operands, and in each CTA's loads of them: the model reports them, or the sums are
/// wrong.
#[test]
fn faults_of_operands_are_noticed() {
    let client = client!("tcgen05_model::faults_of_operands_are_noticed");
    let of_all = [
        (Fault::WrongScaleColumn, [None, None]),
        (
            Fault::WrongInstructionDescriptor,
            [Some(BAD_INSTRUCTION), Some(BAD_INSTRUCTION)],
        ),
        (Fault::WrongStride, [Some(BAD_SHARED), Some(BAD_SHARED)]),
        // Any byte of a word of scales is valid in MXFP8.
        (Fault::WrongScaleId, [Some(BAD_INSTRUCTION), None]),
    ];
    let of_pairs = [
        (Fault::WrongHalf, [None, None]),
        (Fault::HalfOfScales, [None, None]),
    ];
    for (form, of_form) in [(ONE, &[][..]), (TWO, &of_pairs)] {
        let (m, n, k) = (128 * form.ctas(), 256, 512);
        let (a, b) = (Packed::random(m, k, 3), Packed::random(n, k, 4));
        let own = expected(&a, &b);
        let (x, y) = (Mxfp8::random(m, k, 3), Mxfp8::random(n, k, 4));
        let of_mxfp8 = ordered_sums(&x.decoded(), &y.decoded(), k, 0..k);
        for (fault, kinds) in of_all.iter().chain(of_form) {
            let core = TensorCore::Software(*fault);
            let part = Part::of(k);
            let nvfp4 = execute_stages(&client, &a, &b, part, plan(NVFP4, form, core));
            let mxfp8 = plan(BlockScaled::Mxfp8, form, core);
            let mxfp8 = execute_stages(&client, &x, &y, part, mxfp8);
            let found = [(nvfp4, &own), (mxfp8, &of_mxfp8)];
            for (((found, violations), expected), kind) in found.into_iter().zip(kinds) {
                let what = format!("{form}, {fault:?}");
                match kind {
                    Some(kind) => assert!(violations[*kind] > 0, "{what}: {violations:?}"),
                    None => {
                        assert_eq!(violations, [0; VIOLATIONS], "{what}");
                        assert_ne!(found, *expected, "{what}");
                    }
                }
            }
        }
    }
}

/// Writes which of `idescs` are invalid instruction descriptors of `kind` for `ctas` CTAs.
#[cube(launch_unchecked)]
fn bad_instructions_kernel(
    idescs: &[u32],
    out: &mut [u32],
    #[comptime] kind: BlockScaled,
    #[comptime] ctas: u32,
) {
    if UNIT_POS == 0u32 {
        for i in 0..idescs.len() {
            out[i] = u32::cast_from(is_bad_instruction(idescs[i], kind, ctas));
        }
    }
}

/// An instruction for two CTAs is invalid for one, and vice versa; with two, each has the same
/// number of rows of `b`.
#[test]
fn instructions_are_of_as_many_ctas() {
    let client = client!("tcgen05_model::instructions_are_of_as_many_ctas");
    let of = |m, n| instruction_descriptor(NVFP4, m, n);
    let idescs = [
        of(128, 256),
        of(256, 256),
        of(256, 128),
        of(256, 136),
        of(128, 136),
    ];
    for (ctas, expected) in [(1, [0, 1, 1, 1, 0]), (2, [1, 0, 0, 1, 1])] {
        let bytes = upload_bytes(&client, bytemuck::cast_slice(&idescs));
        let out = upload_bytes(&client, &[0xff; 4 * 5]);
        // SAFETY: five words each.
        unsafe {
            bad_instructions_kernel::launch_unchecked(
                &client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(1),
                BufferArg::from_raw_parts(bytes, 5),
                BufferArg::from_raw_parts(out.clone(), 5),
                NVFP4,
                ctas,
            );
        }
        assert_eq!(read_u32(&client, &out, 5), expected, "{ctas}");
    }
}
