//! The operands that the kernel for `tcgen05` computes for its instructions, on stages as it lays
//! them out, by the software model on CubeCL's CPU runtime or any other device: both formats,
//! operands as they are and exchanged, and groups along K.

use crate::support::{
    device::{read_u32, upload_bytes},
    mxfp8::Mxfp8,
    packed::Packed,
};
use crate::tcgen05_model::{BASE, expected, ordered_sums, sums};
use cubecl::prelude::*;
use nvfp4_kernels::{
    cube::ptx::BlockScaled,
    format::swizzle::swizzle,
    gemm::kernels::{
        Fault, GroupedDim, Sm100Plan, TensorCore,
        sm100_block_scaled_engine::{
            BAD_INSTRUCTION, BAD_SHARED, Command, Memory, TMEM_WORDS, VIOLATIONS, execute_copy,
            execute_mma,
        },
        sm100_block_scaled_operands as operands,
    },
};

const NVFP4: BlockScaled = BlockScaled::Nvfp4;

/// What a tile is made of beside its operands.
#[derive(Clone, Copy)]
struct Part {
    /// Columns, from where the first stage begins.
    k: usize,
    /// Steps of these that are not multiplied.
    lead: usize,
    /// With exchanged operands: rows of the second one, and the first of them among its 128 rows of
    /// scales.
    n: usize,
    b_row: usize,
}

impl Part {
    /// All of `k` columns.
    fn of(k: usize) -> Self {
        Self {
            k,
            lead: 0,
            n: 0,
            b_row: 0,
        }
    }
}

/// Executes the instructions of the kernel for a contraction of `k` in the order of the kernel, one
/// stage for each K tile. `part` has `k`, `lead`, `n` and `b_row`.
#[cube(launch_unchecked)]
fn execute_stages_kernel(
    shared: &[u32],
    tmem: &mut [u32],
    violations: &[Atomic<u32>],
    part: &[u32],
    #[comptime] plan: Sm100Plan,
) {
    let memory = Memory {
        shared: BASE.runtime(),
        bytes: comptime!(plan.operands() as u32).runtime(),
        tmem: 0usize.runtime(),
    };
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
                        for lane in 0..128u32 {
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
                    for lane in 0..128u32 {
                        execute_mma(shared, tmem, memory, command, lane, violations, kind);
                    }
                }
            }
        }
    }
}

/// An operand of the instruction as it is stored, in either format.
struct Stored<'a> {
    rows: usize,
    /// Bytes of codes and of scales of a row.
    bytes: usize,
    blocks: usize,
    codes: &'a [u8],
    scales: &'a [u8],
    /// Its first row among the 128 of its scales.
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

/// The memory of all stages of the kernel, each with the K tile of its number: codes as TMA leaves
/// them, zeros behind the last row and column, and the scales that there are; anything elsewhere.
fn stages_of_kernel(a: &Stored, b: &Stored, plan: Sm100Plan) -> Vec<u8> {
    let mut bytes = vec![0x77u8; plan.operands()];
    let atoms = a.blocks.div_ceil(4);
    for stage in 0..a.bytes.div_ceil(128) {
        let count = (atoms - stage * plan.atoms()).min(plan.atoms()) * 512;
        for (stored, rows, codes_at, scales_at, tiles) in [
            (a, 128, 0, plan.a_scales_at(), 1),
            (
                b,
                plan.b_rows(),
                plan.b_codes_at(),
                plan.b_scales_at(),
                plan.b_tiles(),
            ),
        ] {
            for row in 0..rows {
                for byte in 0..128 {
                    let column = stage * 128 + byte;
                    let code = match row < stored.rows && column < stored.bytes {
                        true => stored.codes[row * stored.bytes + column],
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
            for tile in 0..all.div_ceil(128) {
                let from = (tile * atoms + stage * plan.atoms()) * 512;
                let to = scales_at + (stage * tiles + tile) * plan.atoms() * 512;
                bytes[to..to + count].copy_from_slice(&swizzled[from..from + count]);
            }
        }
    }
    bytes
}

/// The sums of [`execute_stages_kernel`], as many to a row as the tile has columns, and the counts
/// of violations.
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
    let shared = stages_of_kernel(&a.into(), &b, plan);
    let poison = vec![0x7fff_ffffu32; TMEM_WORDS];
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
            arg(&tmem, TMEM_WORDS),
            arg(&violations, VIOLATIONS),
            arg(
                &upload_bytes(client, bytemuck::cast_slice(&part)),
                part.len(),
            ),
            plan,
        );
    }
    let tmem = read_u32(client, &tmem, TMEM_WORDS);
    (
        sums(&tmem, plan.b_rows()),
        read_u32(client, &violations, VIOLATIONS),
    )
}

/// A plan without groups.
fn plan(format: BlockScaled, swap_ab: bool, core: TensorCore) -> Sm100Plan {
    Sm100Plan {
        format,
        swap_ab,
        grouped: GroupedDim::None,
        core,
    }
}

/// `found`, of a tile that is `width` wide, begins with `expected`, in rows of `n`.
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

/// The operands that the kernel computes for its instructions, on the stages as it lays them out:
/// whole and partial K tiles, with and without a second 128 rows of `b`.
#[test]
fn the_operands_of_the_kernel_multiply_its_stages() {
    let client = client!("tcgen05_model::the_operands_of_the_kernel_multiply_its_stages");
    for core in [TensorCore::Instruction, TensorCore::Software(Fault::None)] {
        for (m, n, k) in [(128, 256, 1024), (128, 104, 32), (77, 136, 608)] {
            let what = format!("{m} x {n} x {k}");
            let (a, b) = (Packed::random(m, k, 3), Packed::random(n, k, 4));
            let plan = plan(NVFP4, false, core);
            let (found, violations) = execute_stages(&client, &a, &b, Part::of(k), plan);
            assert_eq!(violations, [0; VIOLATIONS], "{what}");
            assert_tile(&found, &expected(&a, &b), n, 256, &what);
        }
    }
}

/// The same in MXFP8: a word of scales serves the four instructions of a stage.
#[test]
fn the_operands_of_the_kernel_multiply_mxfp8() {
    let client = client!("tcgen05_model::the_operands_of_the_kernel_multiply_mxfp8");
    for core in [TensorCore::Instruction, TensorCore::Software(Fault::None)] {
        for (m, n, k) in [(128, 256, 512), (128, 104, 32), (77, 136, 224)] {
            let what = format!("{m} x {n} x {k}");
            let (a, b) = (Mxfp8::random(m, k, 3), Mxfp8::random(n, k, 4));
            let plan = plan(BlockScaled::Mxfp8, false, core);
            let (found, violations) = execute_stages(&client, &a, &b, Part::of(k), plan);
            assert_eq!(violations, [0; VIOLATIONS], "{what}");
            let expected = ordered_sums(&a.decoded(), &b.decoded(), k, 0..k);
            assert_tile(&found, &expected, n, 256, &what);
        }
    }
}

/// With exchanged operands: narrow instructions, and rows of the second operand in either half of
/// the 128 rows of its scales. Columns behind the narrow ones keep what was there.
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
        let own = plan(NVFP4, true, TensorCore::Instruction);
        let (found, violations) = execute_stages(&client, &a, &b, part, own);
        assert_eq!(violations, [0; VIOLATIONS], "{what}");
        assert_tile(&found, &expected(&a, &b), rows, 64, &what);
        if part.n < 64 {
            assert_eq!(found[part.n].to_bits(), 0x7fff_ffff, "{what}");
        }
        // The ring has seven stages, half as wide in MXFP8.
        let k = k / 2 / 32 * 32;
        let (a, b) = (Mxfp8::random(m, k, 3), Mxfp8::random(rows, k, 4));
        let own = plan(BlockScaled::Mxfp8, true, TensorCore::Instruction);
        let part = Part { k, ..part };
        let (found, violations) = execute_stages(&client, &a, &b, part, own);
        assert_eq!(violations, [0; VIOLATIONS], "MXFP8, {what}");
        let expected = ordered_sums(&a.decoded(), &b.decoded(), k, 0..k);
        assert_tile(&found, &expected, rows, 64, &format!("MXFP8, {what}"));
    }
}

/// A group along K ends within a stage, behind which lie the codes of the next group: they are in
/// no sum, NaN scales of theirs neither.
#[test]
fn columns_behind_a_group_are_not_multiplied() {
    let client = client!("tcgen05_model::columns_behind_a_group_are_not_multiplied");
    let (m, n, stored) = (40, 136, 608);
    for k in [64, 192, 320, 512] {
        let (mut a, b) = (Packed::random(m, stored, 3), Packed::random(n, stored, 4));
        for row in a.scales.chunks_mut(stored / 16) {
            row[k / 16..].fill(0x7f);
        }
        let plan = plan(NVFP4, false, TensorCore::Instruction);
        let (found, violations) = execute_stages(&client, &a, &b, Part::of(k), plan);
        assert_eq!(violations, [0; VIOLATIONS], "{k}");
        let (a, b) = (a.columns(0..k / 16), b.columns(0..k / 16));
        assert_tile(&found, &expected(&a, &b), n, 256, &k.to_string());
    }
}

/// In MXFP8 a group along K may begin within a stage too: neither what is before nor what is behind
/// it is in a sum.
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
        let plan = Sm100Plan {
            grouped: GroupedDim::K,
            ..plan(BlockScaled::Mxfp8, false, TensorCore::Instruction)
        };
        let part = Part {
            lead: columns.start / 32,
            ..Part::of(columns.end)
        };
        let (found, violations) = execute_stages(&client, &a, &b, part, plan);
        assert_eq!(violations, [0; VIOLATIONS], "{columns:?}");
        let expected = ordered_sums(&decoded, &b.decoded(), stored, columns.clone());
        assert_tile(&found, &expected, n, 256, &format!("{columns:?}"));
    }
}

/// The faults that are in operands: the model reports them, or the sums are wrong.
#[test]
fn faults_of_operands_are_noticed() {
    let client = client!("tcgen05_model::faults_of_operands_are_noticed");
    let (a, b) = (Packed::random(128, 512, 3), Packed::random(256, 512, 4));
    let own = expected(&a, &b);
    let (x, y) = (Mxfp8::random(128, 512, 3), Mxfp8::random(256, 512, 4));
    let of_mxfp8 = ordered_sums(&x.decoded(), &y.decoded(), 512, 0..512);
    for (fault, kinds) in [
        (Fault::WrongScaleColumn, [None, None]),
        (
            Fault::WrongInstructionDescriptor,
            [Some(BAD_INSTRUCTION), Some(BAD_INSTRUCTION)],
        ),
        (Fault::WrongStride, [Some(BAD_SHARED), Some(BAD_SHARED)]),
        // Any byte of a word of scales is one of MXFP8.
        (Fault::WrongScaleId, [Some(BAD_INSTRUCTION), None]),
    ] {
        let core = TensorCore::Software(fault);
        let part = Part::of(512);
        let nvfp4 = execute_stages(&client, &a, &b, part, plan(NVFP4, false, core));
        let mxfp8 = plan(BlockScaled::Mxfp8, false, core);
        let mxfp8 = execute_stages(&client, &x, &y, part, mxfp8);
        let found = [(nvfp4, &own), (mxfp8, &of_mxfp8)];
        for (((found, violations), expected), kind) in found.into_iter().zip(kinds) {
            match kind {
                Some(kind) => assert!(violations[kind] > 0, "{fault:?}: {violations:?}"),
                None => {
                    assert_eq!(violations, [0; VIOLATIONS], "{fault:?}");
                    assert_ne!(found, *expected, "{fault:?}");
                }
            }
        }
    }
}
