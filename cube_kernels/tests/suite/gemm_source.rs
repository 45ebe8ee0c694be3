//! Required machine code of the GEMM kernels: exactly as many matrix instructions as the tile
//! needs, no accumulator that waits for another, and no spilled registers within a main loop.
//! `registry_source` compiles the kernels and calls this module.

use crate::support::sources::{count, spills};
use cubecl::prelude::AddressType;
use nvfp4_kernels::{
    gemm::proof::{
        CmmaPlan, CmmaTile, EpilogueKind, GemmInstance, Multiply, Sm90Plan, Sm90Tile, Sm100Form,
        Sm100Plan, Sm120Plan, SmallMShape, StreamKPlan, TensorCore, sm100_units,
    },
    proof::ptx::{BlockScaled, Major},
};

/// SASS of `mma.sync.m16n8k64` with E2M1 operands and E4M3 scales for 16 elements.
const NVFP4_BLOCK_SCALED: &str = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X";
/// SASS of the MXFP8 instruction: 16 x 8 x 32.
const MXFP8_BLOCK_SCALED: &str = "QMMA.SF.16832.F32.E4M3.E4M3.E8";

/// Resources of a CTA.
#[derive(Clone, Copy)]
pub struct Resources {
    /// Registers per thread.
    pub registers: usize,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// Asserts that the machine code `sass` of `gemm` for `arch` has the required instructions. `name`
/// is for the messages.
pub fn check(name: &str, gemm: GemmInstance, takes: Resources, sass: &str, arch: &str) {
    let name = &format!("{name} for {arch}");
    println!(
        "{name}: {} HGMMA, {} OMMA, {} HMMA, {} LDL and STL, {} lines",
        count(sass, "HGMMA"),
        count(sass, "OMMA"),
        count(sass, "HMMA"),
        spills(sass),
        sass.lines().count()
    );
    match gemm {
        GemmInstance::Sm90Bf16(plan, kind) => sm90_bf16(name, plan, kind, sass),
        GemmInstance::Sm90StreamK(plan) => sm90_stream_k(name, plan, sass),
        GemmInstance::Sm90W4a16(plan) => sm90_w4a16(name, plan.tile.widths(), sass),
        GemmInstance::Sm90W4a16MnMajor(plan) => {
            sm90_w4a16(name, plan.tile.widths(), sass);
            assert_eq!(spills(sass), 0, "{name} spills");
        }
        GemmInstance::Sm100BlockScaled(plan) => sm100_block_scaled(name, plan, takes, sass),
        GemmInstance::Sm100Probe { copies, multiplies } => {
            sm100_probe(name, copies, multiplies, sass);
        }
        GemmInstance::Sm120BlockScaled(plan) => sm120_block_scaled(name, plan, sass),
        GemmInstance::SmallM(shape) => small_m(name, shape, sass, arch),
        GemmInstance::Cmma(plan, address) => cmma(name, plan, address, sass, arch),
        GemmInstance::Scalar(_) => assert_eq!(count(sass, "HMMA"), 0, "{name}"),
        GemmInstance::Arrange { grouped } => {
            if !grouped {
                assert_eq!(count(sass, "STG.E.128"), 2, "{name}");
            }
        }
        GemmInstance::Dequantize => assert_eq!(count(sass, "STG.E.128"), 4, "{name}"),
        GemmInstance::Transpose { vector } => {
            // Vectors of eight bf16 are loaded and stored whole.
            if vector == 8 {
                assert!(count(sass, "LDG.E.128") >= 2, "{name}");
                assert!(count(sass, "STG.E.128") >= 1, "{name}");
            }
        }
    }
}

fn sm90_bf16(name: &str, plan: Sm90Plan, kind: EpilogueKind, sass: &str) {
    // With all epilogue operations, the widest tile spills one register of the epilogue.
    let most = match kind.accumulate && plan.tile == Sm90Tile::N256 {
        true => 2,
        false => 0,
    };
    assert!(spills(sass) <= most, "{name} spills");
    bf16_main_loop(name, plan.tile, plan.majors, sass);
}

fn sm90_stream_k(name: &str, plan: StreamKPlan, sass: &str) {
    bf16_main_loop(name, plan.tile, plan.majors, sass);
    // A partial tile is written and read 16 bytes at a time, and its counter is raised and polled
    // with GPU scope.
    let vectors = plan.tile.n() / 8;
    assert!(count(sass, "STG.E.128") >= vectors, "{name}");
    assert!(count(sass, "LDGSTS.E.BYPASS.128") >= vectors, "{name}");
    assert!(count(sass, "LDG.E.STRONG.GPU") >= 1, "{name}");
    assert!(
        count(sass, "RED.E.ADD.STRONG.GPU") + count(sass, "REDG.E.ADD.STRONG.GPU") >= 1,
        "{name}"
    );
}

/// Checks the main loop of the kernels that read bf16.
fn bf16_main_loop(name: &str, tile: Sm90Tile, majors: [Major; 2], sass: &str) {
    // Four in the loop, one in the tail.
    assert_eq!(count(sass, "HGMMA"), 5, "{name}");
    // Operands that the instruction transposes.
    let mn_major = majors.map(|major| major == Major::Mn);
    for (which, is_transposed) in [(".tnspA", mn_major[0]), (".tnspB", mn_major[1])] {
        let expected = if is_transposed { 5 } else { 0 };
        assert_eq!(sass.matches(which).count(), expected, "{name}: {which}");
    }
    let lines: Vec<&str> = sass.lines().collect();
    let is_wgmma = |line: &&str| line.contains("HGMMA");
    let first = lines.iter().position(is_wgmma).unwrap();
    let last = lines.iter().rposition(is_wgmma).unwrap();
    let main_loop = lines[first..last].join("\n");
    assert_eq!(spills(&main_loop), 0, "{name} spills in its main loop");
    let boxes = |rows: usize, mn_major| if mn_major { rows / 64 } else { 1 };
    let boxes = boxes(128, mn_major[0]) + boxes(tile.n(), mn_major[1]);
    assert!(count(sass, "UTMALDG") >= boxes, "{name}");
}

/// Checks the W4A16 kernels with instructions of these widths.
fn sm90_w4a16(name: &str, widths: &[usize], sass: &str) {
    let widths = widths.len();
    // Two sets of four per pipeline stage: one per 16 K columns, or two per 16 for half-width
    // instructions.
    assert_eq!(count(sass, "HGMMA"), 8 * widths, "{name}");
    // No wait is for more than the instructions of one set: the compiler has not serialized them
    // (it would emit `gsb0, 0x0` after each one).
    let waits = sass.matches("WARPGROUP.DEPBAR.LE gsb0, 0x0").count();
    assert_eq!(waits, widths, "{name} is serialized");
    // A main loop is the code between the first and the last instruction of a width.
    let lines: Vec<&str> = sass.lines().collect();
    let wgmma: Vec<usize> = (0..lines.len())
        .filter(|&line| lines[line].contains("HGMMA"))
        .collect();
    for wgmma in wgmma.chunks(8) {
        let main_loop = lines[wgmma[0]..wgmma[7]].join("\n");
        assert_eq!(spills(&main_loop), 0, "{name} spills in its main loop");
    }
}

/// Registers, and shared memory, of a CTA on sm_90 and sm_100.
const REGISTERS: usize = 65536;
const SHARED: usize = 227 << 10;
/// Largest number of registers of the `tcgen05` kernel over the instances of the registry: with
/// normal operands, and with exchanged ones, whose epilogue shuffles sums among lanes. The
/// accumulators are in tensor memory and a CTA is alone on its SM, so registers limit neither.
const SM100_REGISTERS: usize = 56;
const SM100_SWAPPED_REGISTERS: usize = 80;

fn sm100_block_scaled(name: &str, plan: Sm100Plan, takes: Resources, sass: &str) {
    let units = sm100_units(plan.core) as usize;
    let Resources { registers, shared } = takes;
    let found = |opcode| count(sass, opcode);
    println!(
        "{name}: {} UTCOMMA, {} UTCQMMA, {} UTCCP, {} UTCBAR, {} ELECT, {} LDTM, {registers} \
         registers, {shared} bytes of shared memory, {} lines",
        found("UTCOMMA"),
        found("UTCQMMA"),
        found("UTCCP"),
        found("UTCBAR"),
        found("ELECT"),
        found("LDTM"),
        sass.lines().count()
    );
    if plan.core == TensorCore::Instruction {
        assert_eq!(spills(sass), 0, "{name} spills");
        let most = match plan.form {
            Sm100Form::OneCta | Sm100Form::TwoCta => SM100_REGISTERS,
            Sm100Form::SwapAb => SM100_SWAPPED_REGISTERS,
        };
        assert!(registers <= most, "{name}: {registers} registers");
    }
    assert!(
        units * registers <= REGISTERS,
        "{name}: {registers} registers"
    );
    assert!(shared <= SHARED, "{name}: {shared} bytes");
    for other in ["HMMA", "OMMA", "QMMA", "HGMMA"] {
        assert_eq!(found(other), 0, "{name}: {other}");
    }
    // Codes of both operands, and the scales of one and of one or two times 128 rows, for each
    // unrolled iteration of the loop.
    let (boxes, tiles) = (found("UTMALDG"), 1 + plan.b_tiles());
    // Two CTAs also load scales as TMA boxes.
    let (of_stage, copies) = match plan.ctas() {
        1 => (2, tiles),
        _ => (2 + tiles, 0),
    };
    assert!(
        boxes > 0 && boxes.is_multiple_of(of_stage),
        "{name}: {boxes} UTMALDG"
    );
    assert_eq!(found("UBLKCP"), boxes / of_stage * copies, "{name}");
    let (multiply, copies, commits) = match plan.core {
        // Per K tile: four multiplications; scale copies per 128 rows, in NVFP4 for each of the
        // four and in MXFP8 once for all of them; and a commit. One further commit per tile of the
        // output.
        TensorCore::Instruction => (4, plan.atoms() * tiles, 2),
        TensorCore::Software(_) => (0, 0, 0),
    };
    let of_format = |format| if plan.format == format { multiply } else { 0 };
    for (opcode, expected) in [
        ("UTCOMMA", of_format(BlockScaled::Nvfp4)),
        ("UTCQMMA", of_format(BlockScaled::Mxfp8)),
        ("UTCCP", copies),
        ("UTCBAR", commits),
    ] {
        assert_eq!(found(opcode), expected, "{name}: {opcode}");
    }
    if plan.ctas() == 2 && plan.core == TensorCore::Instruction {
        // All of them are the two-CTA form, and a commit arrives in both.
        let all = |opcode, of_two: &str| {
            let lines = sass.lines().filter(|line| line.contains(of_two));
            assert_eq!(lines.count(), found(opcode), "{name}: {opcode}, {of_two}");
        };
        all("UTCOMMA", "UTCOMMA.2CTA");
        all("UTCQMMA", "UTCQMMA.2CTA");
        all("UTCCP", "UTCCP.T.S.2CTA");
        all("UTCBAR", "UTCBAR.2CTA.MULTICAST");
        all("UTMALDG", "UTMALDG.2D.2CTA");
        // Only the barriers of the cluster wait for the memory of other SMs or invalidate the L1
        // cache.
        assert!(
            found("UCGABAR_ARV") > 0,
            "{name}: no barrier of the cluster"
        );
        assert_eq!(found("MEMBAR.ALL.GPU"), found("UCGABAR_ARV"), "{name}");
        assert_eq!(found("CCTL.IVALL"), found("UCGABAR_WAIT"), "{name}");
    }
    // If ptxas does not recognize that one thread is elected for an instruction, it generates loops
    // that elect one thread after another.
    assert_eq!(sass.matches("BRA.U.ANY").count(), 0, "{name}: a loop");
    if plan.core == TensorCore::Instruction {
        assert!(found("LDTM.x16") > 0, "{name}: LDTM");
        let lines: Vec<&str> = sass.lines().collect();
        let first = lines
            .iter()
            .position(|line| line.contains("UTCCP"))
            .unwrap();
        let last = lines
            .iter()
            .rposition(|line| line.contains("UTCBAR"))
            .unwrap();
        let main_loop = lines[first..last].join("\n");
        assert_eq!(
            count(&main_loop, "ELECT"),
            0,
            "{name}: ELECT in the main loop"
        );
    }
}

/// Checks for at most one multiplication, after the copies of its scales, without electing loops.
fn sm100_probe(name: &str, copies: usize, multiplies: Option<BlockScaled>, sass: &str) {
    let commits = usize::from(copies > 0);
    for (opcode, expected) in [
        ("UTCCP", copies),
        (
            "UTCOMMA",
            usize::from(multiplies == Some(BlockScaled::Nvfp4)),
        ),
        (
            "UTCQMMA",
            usize::from(multiplies == Some(BlockScaled::Mxfp8)),
        ),
        ("UTCBAR", commits),
        ("HGMMA", 0),
        ("OMMA", 0),
    ] {
        assert_eq!(count(sass, opcode), expected, "{name}: {opcode}");
    }
    assert_eq!(spills(sass), 0, "{name} spills");
    assert_eq!(sass.matches("BRA.U.ANY").count(), 0, "{name}: a loop");
    for opcode in ["STTM", "LDTM.x16"] {
        assert!(count(sass, opcode) > 0, "{name}: {opcode}");
    }
}

fn sm120_block_scaled(name: &str, plan: Sm120Plan, sass: &str) {
    let (opcode, own) = match plan.tile.format {
        BlockScaled::Nvfp4 => (NVFP4_BLOCK_SCALED, "OMMA"),
        BlockScaled::Mxfp8 => (MXFP8_BLOCK_SCALED, "QMMA"),
    };
    let found = count(sass, opcode);
    for other in ["OMMA", "QMMA", "IMMA", "HMMA"] {
        let expected = if other == own { found } else { 0 };
        assert_eq!(count(sass, other), expected, "{name}: {other}");
    }
    if plan.tile.multiply == Multiply::Software {
        return assert_eq!(found, 0, "{name}");
    }
    // Two instructions per pipeline stage along K, for each strip and each eight columns; the
    // compiler may have unrolled the loop over stages.
    let strips = plan.tile.strips;
    let stage = 2 * strips * 8;
    let stages = found / stage;
    assert!(stages > 0 && found == stages * stage, "{name}: {found}");
    // Fragments of two columns of `b`, and of one strip of `a`, with one load each.
    let loads = stages * 2 * (4 + strips);
    assert_eq!(count(sass, "LDSM.16.M88.4"), loads, "{name}");
}

fn small_m(name: &str, shape: SmallMShape, sass: &str, arch: &str) {
    // Two instructions per word, strip and group of columns, and four words.
    let step = 8 * shape.ahead * shape.strips * shape.columns;
    let found = count(sass, "HMMA");
    match arch {
        "sm_90a" => assert_eq!(found, step, "{name}"),
        // For other architectures the compiler may have unrolled the loop.
        _ => assert!(found > 0 && found.is_multiple_of(step), "{name}: {found}"),
    }
}

fn cmma(name: &str, plan: CmmaPlan, address: AddressType, sass: &str, arch: &str) {
    // For matrices of more than 2^31 elements: one register, stored and loaded once; before sm_90
    // up to three per tile.
    let most = match (address, arch) {
        (AddressType::U64, "sm_100a" | "sm_103a") => 2,
        (AddressType::U64, "sm_80" | "sm_86" | "sm_89") => 7,
        _ => 0,
    };
    assert!(spills(sass) <= most, "{name} spills {}", spills(sass));
    // A step of 16 takes two instructions for 16 x 16, and 32 columns are decoded at a time.
    let instructions = match plan.tile {
        CmmaTile::M128 => 4 * 2,
        CmmaTile::M32 => 2,
    };
    let found = count(sass, "HMMA.16816.F32.BF16");
    assert_eq!(found, 2 * 2 * instructions, "{name}");
}
