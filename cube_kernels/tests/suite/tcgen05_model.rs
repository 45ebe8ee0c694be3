//! The software model of `tcgen05` on CubeCL's CPU runtime or any other device: descriptors, the
//! 128-byte swizzle, the layout of scales in tensor memory, and the sums. Shared memory is a buffer
//! here, which this module fills like TMA.

use std::ops::Range;

use crate::support::{
    device::{read_u32, upload_bytes},
    inputs::Generator,
    packed::Packed,
};
use cubecl::prelude::*;
use nvfp4_formats::{format::swizzle::swizzle, reference};
use nvfp4_kernels::{
    gemm::proof::sm100::engine::{
        BAD_BOUNDS, BAD_INSTRUCTION, BAD_SHARED, BAD_TMEM, Command, Memory, Peer, TMEM_WORDS,
        VIOLATIONS, execute_copy, execute_mma,
    },
    proof::ptx::{BlockScaled, SharedLayout, instruction_descriptor, with_scale_ids},
};

const NVFP4: BlockScaled = BlockScaled::Nvfp4;
/// Columns of a pipeline stage of NVFP4.
const TILE_K: usize = 256;
/// Start of this test's shared memory in the shared window, with the alignment of code tiles.
pub const BASE: u32 = 1024;

/// A command on the host, and its form in a buffer.
#[derive(Clone, Copy, Default, Debug)]
struct HostCommand {
    is_copy: bool,
    target: u32,
    a: u64,
    b: u64,
    idesc: u32,
    a_scales: u32,
    b_scales: u32,
    accumulate: u32,
}

impl HostCommand {
    fn words(self) -> [u32; 10] {
        [
            self.is_copy as u32,
            self.target,
            self.a as u32,
            (self.a >> 32) as u32,
            self.b as u32,
            (self.b >> 32) as u32,
            self.idesc,
            self.a_scales,
            self.b_scales,
            self.accumulate,
        ]
    }
}

/// Executes commands one after another, each for all lanes, with one unit.
#[cube(launch_unchecked)]
fn execute_kernel(
    shared: &[u32],
    tmem: &mut [u32],
    commands: &[u32],
    violations: &[Atomic<u32>],
    count: u32,
    bytes: u32,
    #[comptime] kind: BlockScaled,
) {
    let memory = Memory {
        shared: BASE.runtime(),
        bytes,
        tmem: 0usize.runtime(),
        peer: Peer::None,
    };
    if UNIT_POS == 0u32 {
        for c in 0..count {
            let at = (c * 10u32) as usize;
            let (a_low, a_high) = (commands[at + 2usize], commands[at + 3usize]);
            let (b_low, b_high) = (commands[at + 4usize], commands[at + 5usize]);
            let command = Command {
                opcode: commands[at],
                target: commands[at + 1usize],
                a: u64::cast_from(a_low) | (u64::cast_from(a_high) << 32u64),
                b: u64::cast_from(b_low) | (u64::cast_from(b_high) << 32u64),
                idesc: commands[at + 6usize],
                a_scales: commands[at + 7usize],
                b_scales: commands[at + 8usize],
                accumulate: commands[at + 9usize],
            };
            for lane in 0..128u32 {
                if command.opcode == 1u32 {
                    execute_copy(shared, tmem, memory, command, lane, violations);
                } else {
                    execute_mma(shared, tmem, memory, command, lane, violations, kind);
                }
            }
        }
    }
}

/// Returns the results of [`execute_kernel`]: tensor memory, and the counts of violations.
fn execute(
    client: &Client,
    shared: &[u8],
    commands: &[HostCommand],
    kind: BlockScaled,
) -> (Vec<u32>, Vec<u32>) {
    let words: Vec<u32> = commands
        .iter()
        .flat_map(|command| command.words())
        .collect();
    let tmem = upload_bytes(
        client,
        bytemuck::cast_slice(&vec![0x7fff_ffffu32; TMEM_WORDS]),
    );
    let violations = upload_bytes(client, &[0; 4 * VIOLATIONS]);
    // SAFETY: each buffer has so many elements, and the model checks its addresses.
    unsafe {
        let arg =
            |handle: &cubecl::server::Handle, len| BufferArg::from_raw_parts(handle.clone(), len);
        execute_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            arg(&upload_bytes(client, shared), shared.len() / 4),
            arg(&tmem, TMEM_WORDS),
            arg(
                &upload_bytes(client, bytemuck::cast_slice(&words)),
                words.len(),
            ),
            arg(&violations, VIOLATIONS),
            commands.len() as u32,
            shared.len() as u32,
            kind,
        );
    }
    (
        read_u32(client, &tmem, TMEM_WORDS),
        read_u32(client, &violations, VIOLATIONS),
    )
}

/// Operands of a tile in shared memory, in this order, one pipeline stage after another.
struct Stages {
    bytes: Vec<u8>,
    /// Rows of `a` and of `b`.
    rows: [usize; 2],
    k: usize,
}

impl Stages {
    /// Returns the offsets of codes (0 and 1) and scales (2 and 3) of `a` and `b` in a stage.
    fn parts(rows: [usize; 2]) -> [usize; 5] {
        let sizes = [
            rows[0] * 128,
            rows[1] * 128,
            rows[0].div_ceil(128) * 2048,
            rows[1].div_ceil(128) * 2048,
        ];
        let mut at = [0; 5];
        for (i, size) in sizes.into_iter().enumerate() {
            at[i + 1] = (at[i] + size).next_multiple_of(1024);
        }
        at
    }

    /// Fills the stages like TMA boxes with the 128-byte swizzle, which XORs the index of a row's
    /// 16-byte chunks with the row index modulo 8, and like bulk copies of whole tiles of scales.
    fn of(a: &Packed, b: &Packed) -> Self {
        let rows = [a.rows, b.rows];
        let k = a.blocks * 16;
        let stages = k.div_ceil(TILE_K);
        let parts = Self::parts(rows);
        let mut bytes = vec![0xaau8; stages * parts[4]];
        for stage in 0..stages {
            for (which, packed) in [a, b].into_iter().enumerate() {
                let codes = stage * parts[4] + parts[which];
                for row in 0..packed.rows {
                    for byte in 0..128 {
                        // Columns past the last one are zero.
                        let column = stage * 128 + byte;
                        let code = match column < k / 2 {
                            true => packed.codes[row * k / 2 + column],
                            false => 0,
                        };
                        let part = (byte / 16) ^ (row % 8);
                        bytes[codes + row * 128 + part * 16 + byte % 16] = code;
                    }
                }
                let atoms = k.div_ceil(64);
                let tiles = swizzle(&packed.scales, packed.rows, packed.blocks);
                let count = (atoms - stage * 4).min(4) * 512;
                for tile in 0..packed.rows.div_ceil(128) {
                    let from = (tile * atoms + stage * 4) * 512;
                    let to = stage * parts[4] + parts[2 + which] + tile * 2048;
                    bytes[to..to + count].copy_from_slice(&tiles[from..from + count]);
                }
            }
        }
        Self { bytes, rows, k }
    }

    /// Returns the commands of the kernel: for each stage the copies of scales, then the
    /// multiplications.
    fn commands(&self) -> Vec<HostCommand> {
        let n = self.rows[1];
        let parts = Self::parts(self.rows);
        let idesc = instruction_descriptor(NVFP4, 128, n as u32);
        let mut commands = Vec::new();
        let at = |stage: usize, part: usize, offset: usize| {
            BASE + (stage * parts[4] + parts[part] + offset) as u32
        };
        let steps = self.k.div_ceil(64);
        for stage in 0..steps.div_ceil(4) {
            let columns = 256 + 48 * (stage as u32 % 4);
            let steps = (steps - 4 * stage).min(4);
            for i in 0..steps {
                let mut copies = vec![(columns + 4 * i as u32, at(stage, 2, 512 * i))];
                for tile in 0..n.div_ceil(128) {
                    let target = columns + 16 + 8 * i as u32 + 4 * tile as u32;
                    copies.push((target, at(stage, 3, 2048 * tile + 512 * i)));
                }
                commands.extend(copies.into_iter().map(|(target, from)| HostCommand {
                    is_copy: true,
                    target,
                    a: SharedLayout::SCALES.at(from),
                    ..Default::default()
                }));
            }
            commands.extend((0..steps).map(|i| HostCommand {
                a: SharedLayout::CODES.at(at(stage, 0, 32 * i)),
                b: SharedLayout::CODES.at(at(stage, 1, 32 * i)),
                idesc,
                a_scales: columns + 4 * i as u32,
                b_scales: columns + 16 + 8 * i as u32,
                accumulate: (stage + i > 0) as u32,
                ..Default::default()
            }));
        }
        commands
    }
}

/// Converts the sums in tensor memory from columns to rows.
pub fn sums(tmem: &[u32], n: usize) -> Vec<f32> {
    (0..128 * n)
        .map(|i| f32::from_bits(tmem[i % n * 128 + i / n]))
        .collect()
}

/// Returns sums in the exact order of the scalar kernel, for the columns `columns` of rows of `k`.
pub fn ordered_sums(x: &[f32], y: &[f32], k: usize, columns: Range<usize>) -> Vec<f32> {
    let mut out = Vec::new();
    for row in x.chunks(k) {
        for column in y.chunks(k) {
            let mut sum = 0f32;
            for i in columns.clone() {
                sum += row[i] * column[i];
            }
            out.push(sum);
        }
    }
    out
}

/// Returns these sums for whole operands.
pub fn expected(a: &Packed, b: &Packed) -> Vec<f32> {
    let k = a.blocks * 16;
    ordered_sums(&a.decoded(), &b.decoded(), k, 0..k)
}

/// Tiles of whole and of partial K, with scales that all differ: any misplaced code or scale shows.
#[test]
fn sums_have_the_bits_of_the_scalar_order() {
    let client = client!("tcgen05_model::sums_have_the_bits_of_the_scalar_order");
    for (i, (n, k)) in [(256, 64), (128, 32), (8, 256), (200, 352), (256, 608)]
        .into_iter()
        .enumerate()
    {
        let seed = 2 * i as u32;
        let (a, b) = (Packed::random(128, k, seed), Packed::random(n, k, seed + 1));
        let stages = Stages::of(&a, &b);
        let (tmem, violations) = execute(&client, &stages.bytes, &stages.commands(), NVFP4);
        assert_eq!(violations, [0; VIOLATIONS], "{n} x {k}");
        let (found, expected) = (sums(&tmem, n), expected(&a, &b));
        assert!(expected.iter().any(|sum| *sum != 0.0));
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(
                found.to_bits(),
                expected.to_bits(),
                "{n} x {k}: ({}, {})",
                at / n,
                at % n
            );
        }
        // Columns past the accumulators keep their contents.
        if n < 256 {
            assert_eq!(tmem[n * 128], 0x7fff_ffff);
        }
    }
}

/// The instruction descriptor of MXFP8: every bit except those of N and of the scales' positions is
/// checked, NVFP4's is refused, and a position selects the right scales.
#[test]
fn instruction_descriptors_of_mxfp8_are_checked() {
    let client = client!("tcgen05_model::instruction_descriptors_of_mxfp8_are_checked");
    let kind = BlockScaled::Mxfp8;
    // 128 rows of `a` and eight of `b`, all of 2, and scales of 1, 2, 4 and 8 for 32 columns each.
    let mut shared = vec![0x40u8; (128 + 8) * 128];
    let scales_at = shared.len();
    shared.extend([127, 128, 129, 130].repeat(128));
    let copy = |target| HostCommand {
        is_copy: true,
        target,
        a: SharedLayout::SCALES.at(BASE + scales_at as u32),
        ..Default::default()
    };
    let idesc = instruction_descriptor(kind, 128, 8);
    let mma = HostCommand {
        a: SharedLayout::CODES.at(BASE),
        b: SharedLayout::CODES.at(BASE + 128 * 128),
        idesc,
        a_scales: 256,
        b_scales: 260,
        ..Default::default()
    };
    let run = |idesc: u32| {
        let mma = HostCommand { idesc, ..mma };
        execute(&client, &shared, &[copy(256), copy(260), mma], kind)
    };
    for id in 0..4 {
        let (tmem, violations) = run(with_scale_ids(idesc, id));
        assert_eq!(violations, [0; VIOLATIONS]);
        let expected = 32.0 * 4.0 * 4f32.powi(id as i32);
        assert!(sums(&tmem, 8).iter().all(|sum| *sum == expected), "{id}");
    }
    let free = |bit: &u32| (17..23).contains(bit) || [4, 5, 29, 30].contains(bit);
    for bit in (0..32).filter(|bit| !free(bit)) {
        let (_, violations) = run(idesc ^ 1 << bit);
        assert_eq!(violations[BAD_INSTRUCTION], 1, "bit {bit}");
    }
    let (_, violations) = run(instruction_descriptor(NVFP4, 128, 8));
    assert_eq!(violations[BAD_INSTRUCTION], 1);
}

/// The oracle of the crate agrees with the order above.
#[test]
fn the_scalar_order_is_that_of_the_oracle() {
    let (a, b) = (Packed::integers(5, 96, 1), Packed::integers(7, 96, 2));
    let all = |packed: &Packed| packed.host(&(0..packed.rows).collect::<Vec<_>>());
    let oracle = reference::gemm_f32(&all(&a), &all(&b), None).unwrap();
    assert_eq!(oracle, expected(&a, &b));
}

/// A copy replicates a line to the four quadrants, and a lane has the scales of its row.
#[test]
fn copies_replicate_scales() {
    let client = client!("tcgen05_model::copies_replicate_scales");
    let mut random = Generator::new(9);
    let scales: Vec<u8> = (0..128 * 4)
        .map(|_| random.next_u32() as u8 & 0x7f)
        .collect();
    let mut shared = swizzle(&scales, 128, 4);
    shared.resize(1024, 0);
    let copy = HostCommand {
        is_copy: true,
        target: 300,
        a: SharedLayout::SCALES.at(BASE),
        ..Default::default()
    };
    let (tmem, violations) = execute(&client, &shared, &[copy], NVFP4);
    assert_eq!(violations, [0; VIOLATIONS]);
    for row in 0..128 {
        let expected = u32::from_le_bytes(scales[4 * row..][..4].try_into().unwrap());
        for quadrant in 0..4 {
            let (column, lane) = (300 + row / 32, row % 32 + 32 * quadrant);
            assert_eq!(
                tmem[column * 128 + lane],
                expected,
                "row {row}, lane {lane}"
            );
        }
    }
}

/// Invalid commands are counted, each under its name, and a valid one is not.
#[test]
fn violations_are_counted() {
    let client = client!("tcgen05_model::violations_are_counted");
    let (a, b) = (Packed::random(128, 64, 1), Packed::random(8, 64, 2));
    let stages = Stages::of(&a, &b);
    let commands = stages.commands();
    let (copy, mma) = (commands[0], *commands.last().unwrap());
    let end = BASE + stages.bytes.len() as u32;
    let mut cases = vec![
        (copy, None),
        (mma, None),
        // Lanes in addresses, columns out of range, and scales over accumulators.
        (
            HostCommand {
                target: 509,
                ..copy
            },
            Some(BAD_TMEM),
        ),
        (
            HostCommand {
                target: 1 << 16 | 256,
                ..copy
            },
            Some(BAD_TMEM),
        ),
        (HostCommand { target: 505, ..mma }, Some(BAD_TMEM)),
        (HostCommand { a_scales: 4, ..mma }, Some(BAD_TMEM)),
        (HostCommand { b_scales: 7, ..mma }, Some(BAD_TMEM)),
        (
            HostCommand {
                b_scales: 510,
                ..mma
            },
            Some(BAD_TMEM),
        ),
        // Outside the operands.
        (
            HostCommand {
                a: SharedLayout::CODES.at(end),
                ..mma
            },
            Some(BAD_BOUNDS),
        ),
        (
            HostCommand {
                a: SharedLayout::SCALES.at(end),
                ..copy
            },
            Some(BAD_BOUNDS),
        ),
        (
            HostCommand {
                b: SharedLayout::CODES.at(0),
                ..mma
            },
            Some(BAD_BOUNDS),
        ),
        // The other layout.
        (
            HostCommand {
                a: SharedLayout::CODES.at(BASE),
                ..copy
            },
            Some(BAD_SHARED),
        ),
        (
            HostCommand {
                b: SharedLayout::SCALES.at(BASE),
                ..mma
            },
            Some(BAD_SHARED),
        ),
        // Width of zero.
        (
            HostCommand {
                idesc: mma.idesc & !(0x3f << 17),
                ..mma
            },
            Some(BAD_INSTRUCTION),
        ),
    ];
    // Every bit of an instruction descriptor except those of N, one at a time.
    for bit in (0..32).filter(|bit| !(17..23).contains(bit)) {
        let idesc = mma.idesc ^ 1 << bit;
        cases.push((HostCommand { idesc, ..mma }, Some(BAD_INSTRUCTION)));
    }
    // Every bit of a descriptor of codes except those of the address.
    for bit in 14..64 {
        let a = mma.a ^ 1 << bit;
        cases.push((HostCommand { a, ..mma }, Some(BAD_SHARED)));
    }
    // Descriptors of scales, too, except for the leading offset, which a copy does not use, and the
    // stride, which may point elsewhere.
    for bit in (14..16).chain(30..32).chain(46..64) {
        let a = copy.a ^ 1 << bit;
        cases.push((HostCommand { a, ..copy }, Some(BAD_SHARED)));
    }
    for (command, expected) in cases {
        let (_, violations) = execute(&client, &stages.bytes, &[command], NVFP4);
        let found: Vec<usize> = (0..VIOLATIONS).filter(|&i| violations[i] > 0).collect();
        match expected {
            None => assert!(found.is_empty(), "{command:x?}: {found:?}"),
            Some(kind) => assert!(found.contains(&kind), "{command:x?}: {found:?}"),
        }
    }
}
