//! PTX of Hopper (sm_90a): barriers in shared memory, warpgroup matrix products, and what the
//! product's epilogue and the operand decoding need.
//!
//! Sections named are those of the PTX ISA 8.0 and later. Shared memory is addressed by its 32-bit
//! address inside the cube ([`shared_address()`]).
//!
//! The result of a block is a variable, which another block would take for a pointer: functions
//! return it reinterpreted as itself, which is a value.

use cubecl::prelude::*;

/// The address of shared memory in its own address space: `cvta.to.shared`.
#[cube]
pub fn shared_address<T: CubePrimitive>(pointer: *const T) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {o}, t; }}",
        p = in(_) pointer, o = out(_) address,
        options(pure, nomem)
    );
    u32::reinterpret(address)
}

/// The wgmma descriptor of a tile in shared memory with the 128-byte swizzle ("Matrix Descriptor
/// Format"): the address in bits 0-13 and the distance between groups of eight rows (1024 bytes) in
/// bits 32-45, both in units of 16 bytes; swizzle mode 1 (128 bytes) in bits 62-63. The tile is aligned
/// to 1024 bytes.
///
/// Rows are 128 bytes either way. Of a K-major tile they are along the contraction, and bits 16-29, the
/// leading distance, are not used. Of an MN-major one (`in_columns`) they are across it: 64 rows or
/// columns of the product at one place of the contraction. The next 64 of these lie a leading distance
/// further, behind the 64 rows (8192 bytes) that a stage of the [main loops](main_loop_64x256()) has of
/// the first.
#[cube]
pub fn descriptor(address: u32, #[comptime] in_columns: bool) -> u64 {
    u64::cast_from((address & 0x3_ffffu32) >> 4u32)
        | (comptime!(leading_distance(in_columns)) << 16u64)
        | (64u64 << 32u64)
        | (1u64 << 62u64)
}

/// The leading distance of a [`descriptor()`], in units of 16 bytes.
const fn leading_distance(in_columns: bool) -> u64 {
    if in_columns { 512 } else { 1 }
}

/// How far the 16 columns of the contraction that one instruction takes are from the next 16, in units
/// of 16 bytes: 32 bytes along a row, or 16 rows of 128 bytes.
const fn advance(in_columns: bool) -> u64 {
    if in_columns { 128 } else { 2 }
}

/// Waits until the phase of `parity` of the barrier at `barrier` is complete:
/// `mbarrier.try_wait.parity`, which acquires what was written before.
#[cube]
pub fn barrier_wait(barrier: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred done;",
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity};",
        "@!done bra WAIT; }}",
        barrier = in(_) barrier, parity = in(_) parity
    );
}

/// Arrives once at the barrier at `barrier` and lets it expect `bytes` from the copy engine:
/// `mbarrier.arrive.expect_tx`.
#[cube]
pub fn barrier_expect(barrier: u32, bytes: u32) {
    gpu_asm!(
        "{{ .reg .b64 token;",
        "mbarrier.arrive.expect_tx.shared::cta.b64 token, [{barrier}], {bytes}; }}",
        barrier = in(_) barrier, bytes = in(_) bytes
    );
}

/// Stores one word to shared memory.
#[cube]
pub fn store_shared(address: u32, word: u32) {
    gpu_asm!("st.shared.b32 [{a}], {w};", a = in(_) address, w = in(_) word);
}

/// Stores two words to shared memory, aligned to eight bytes.
#[cube]
pub fn store_shared_2(address: u32, low: u32, high: u32) {
    gpu_asm!(
        "st.shared.v2.b32 [{a}], {{{l}, {h}}};",
        a = in(_) address, l = in(_) low, h = in(_) high
    );
}

/// Loads four words from shared memory, aligned to sixteen bytes.
#[cube]
pub fn load_shared_4(address: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!("ld.shared.v4.b32 {w}, [{a}];", w = out(_) words, a = in(_) address);
    Vector::<u32, Const<4>>::reinterpret(words)
}

/// Loads four words of device memory, aligned to sixteen bytes, that nobody writes and this processor reads
/// once: `ld.global.nc.L1::no_allocate`.
#[cube]
pub fn load_once_4(address: u64) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {w}, [{a}];",
        w = out(_) words, a = in(_) address
    );
    Vector::<u32, Const<4>>::reinterpret(words)
}

/// Loads 8 bytes of device memory that nobody writes, aligned to as many, as [`load_once_4()`] does.
#[cube]
pub fn load_once_2(address: u64) -> Vector<u32, Const<2>> {
    let words: Vector<u32, Const<2>>;
    gpu_asm!(
        "ld.global.nc.L1::no_allocate.L2::256B.v2.b32 {w}, [{a}];",
        w = out(_) words, a = in(_) address
    );
    Vector::<u32, Const<2>>::reinterpret(words)
}

/// Loads one byte of device memory that nobody writes: `ld.global.nc`.
#[cube]
pub fn load_u8(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.global.nc.u8 {v}, [{a}];", v = out(_) value, a = in(_) address);
    u32::reinterpret(value)
}

/// Loads two bytes of device memory that nobody writes, aligned to two: `ld.global.nc`.
#[cube]
pub fn load_u16(address: u64) -> u32 {
    let value: u32;
    gpu_asm!("ld.global.nc.u16 {v}, [{a}];", v = out(_) value, a = in(_) address);
    u32::reinterpret(value)
}

/// Two values rounded to nearest-even bf16, `low` in the lower half: `cvt.rn.bf16x2.f32`.
#[cube]
pub fn pack_bf16(low: f32, high: f32) -> u32 {
    let word: u32;
    gpu_asm!(
        "cvt.rn.bf16x2.f32 {w}, {h}, {l};",
        w = out(_) word, h = in(_) high, l = in(_) low,
        options(pure, nomem)
    );
    u32::reinterpret(word)
}

/// Two values rounded to nearest-even f16, `low` in the lower half: `cvt.rn.f16x2.f32`.
#[cube]
pub fn pack_f16(low: f32, high: f32) -> u32 {
    let word: u32;
    gpu_asm!(
        "cvt.rn.f16x2.f32 {w}, {h}, {l};",
        w = out(_) word, h = in(_) high, l = in(_) low,
        options(pure, nomem)
    );
    u32::reinterpret(word)
}

/// The f16 in the lower half of `word`, exactly.
#[cube]
pub fn unpack_f16(word: u32) -> f32 {
    let value: f32;
    gpu_asm!(
        "{{ .reg .b16 l, h; mov.b32 {{l, h}}, {w}; cvt.f32.f16 {v}, l; }}",
        v = out(_) value, w = in(_) word,
        options(pure, nomem)
    );
    f32::reinterpret(value)
}

/// Eight E2M1 codes, element 0 in the lowest nibble, times the bf16 in both halves of `scale`, as
/// eight bf16 in order: `$multiply p, p, scale$end` is the multiplication of a pair.
///
/// The two bytes of a bf16 magnitude are looked up separately (`prmt` takes the lower three bits of
/// each of four nibbles as an index into eight bytes): 0, .5, 1, 1.5, 2, 3, 4, 6 are 0x0000, 0x3f00,
/// 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0. The product of a code and an E4M3 scale has at
/// most six significant bits, so the multiplication is exact.
macro_rules! decode_codes {
    ($name:ident, $multiply:literal, $end:literal) => {
        #[cube]
        pub fn $name(codes: u32, scale: u32) -> Vector<u32, Const<4>> {
            let pairs: Vector<u32, Const<4>>;
            gpu_asm!(
                "{{ .reg .b32 m, u, h0, l0, h1, l1, s, p<4>;",
                "and.b32 m, {c}, 0x77777777; shr.u32 u, m, 16;",
                "prmt.b32 h0, 0x3f3f3f00, 0x40404040, m; prmt.b32 l0, 0xc0800000, 0xc0804000, m;",
                "prmt.b32 h1, 0x3f3f3f00, 0x40404040, u; prmt.b32 l1, 0xc0800000, 0xc0804000, u;",
                "prmt.b32 p0, l0, h0, 0x5140; prmt.b32 p1, l0, h0, 0x7362;",
                "prmt.b32 p2, l1, h1, 0x5140; prmt.b32 p3, l1, h1, 0x7362;",
                "shl.b32 s, {c}, 12; and.b32 s, s, 0x8000; or.b32 p0, p0, s;",
                "shl.b32 s, {c}, 24; and.b32 s, s, 0x80000000; or.b32 p0, p0, s;",
                "shl.b32 s, {c}, 4; and.b32 s, s, 0x8000; or.b32 p1, p1, s;",
                "shl.b32 s, {c}, 16; and.b32 s, s, 0x80000000; or.b32 p1, p1, s;",
                "shr.u32 s, {c}, 4; and.b32 s, s, 0x8000; or.b32 p2, p2, s;",
                "shl.b32 s, {c}, 8; and.b32 s, s, 0x80000000; or.b32 p2, p2, s;",
                "shr.u32 s, {c}, 12; and.b32 s, s, 0x8000; or.b32 p3, p3, s;",
                "and.b32 s, {c}, 0x80000000; or.b32 p3, p3, s;",
                $multiply, "p0, p0, {s}", $end, $multiply, "p1, p1, {s}", $end,
                $multiply, "p2, p2, {s}", $end, $multiply, "p3, p3, {s}", $end,
                "mov.b32 %0, p0; mov.b32 %1, p1; mov.b32 %2, p2; mov.b32 %3, p3;",
                // Every operand must be named; the results were, by number.
                "// {o}",
                "}}",
                o = out(_) pairs, c = in(_) codes, s = in(_) scale,
                options(pure, nomem)
            );
            Vector::<u32, Const<4>>::reinterpret(pairs)
        }
    };
}

// The multiplication of pairs is an instruction of sm_90; where it is missing, a sum with -0 does.
decode_codes!(decode_e2m1x8, "mul.rn.bf16x2", ";");
decode_codes!(
    decode_e2m1x8_sm80,
    "mov.b32 m, 0x80008000; fma.rn.bf16x2",
    ", m;"
);

/// The main loop of one consumer warpgroup: `steps` stages of 64 along the contraction, 64 rows of
/// `a` times `$columns` of `b`.
///
/// The accumulators live from the first instruction to the last inside one block: across blocks the
/// compiler would have to wait for each product before it may copy them. One group of products stays
/// in flight: a stage is handed back to the producer when the products of the next one are queued.
///
/// - `full`, `empty`: the barriers of the stages, eight bytes each;
/// - `a`, `b`: [`descriptor`]s of stage 0, advanced by a stage's size / 16 (`$a_step`, `$b_step`);
///   within a stage [`advance`] brings them to the columns of the next instruction;
/// - `stage`, `parity`: where the ring stands;
/// - `tail`: after `steps` whole stages, instructions of 16 columns each in one more stage, 0 to 3;
/// - `leader`: nonzero in the one unit that arrives for its warpgroup;
/// - `in_columns`: whether `a` and whether `b` is MN-major, which the last two operands of the
///   instruction say.
macro_rules! main_loop {
    ($name:ident, $accumulators:literal, $wgmma:tt, $stages:tt, $a_step:tt, $b_step:tt) => {
        main_loop!($name, $accumulators, $wgmma, "{d}", $stages, $a_step, $b_step);
    };
    (
        $name:ident, $accumulators:literal, $wgmma:tt, $sums:tt, $stages:tt, $a_step:tt, $b_step:tt
    ) => {
        #[cube]
        pub fn $name(
            full: u32,
            empty: u32,
            a: u64,
            b: u64,
            stage: u32,
            parity: u32,
            steps: u32,
            tail: u32,
            leader: u32,
            #[comptime] in_columns: [bool; 2],
        ) -> Vector<f32, Const<$accumulators>> {
            let sums: Vector<f32, Const<$accumulators>>;
            gpu_asm!(
                "{{ .reg .pred q, lead, add;",
                ".reg .b32 stage, parity, left, full, release;",
                ".reg .b64 a, b, c, d, token;",
                "mov.b32 stage, {stage}; mov.b32 parity, {parity}; mov.b32 left, {steps};",
                "mov.b32 release, 0xffffffff; setp.ne.u32 lead, {leader}, 0;",
                "setp.ne.u32 add, left, left;",
                "setp.eq.u32 q, left, 0; @q bra.uni TAIL;",
                "NEXT:",
                "mad.lo.u32 full, stage, 8, {full};",
                "mad.wide.u32 a, stage,", $a_step, ", {a};",
                "mad.wide.u32 b, stage,", $b_step, ", {b};",
                "WAIT: mbarrier.try_wait.parity.shared::cta.b64 q, [full], parity;",
                "@!q bra WAIT;",
                "wgmma.fence.sync.aligned;",
                // The first product of a tile replaces the accumulators instead of adding to them.
                $wgmma, $sums, ", a, b, add, 1, 1, {a_columns}, {b_columns};",
                "add.s64 c, a, {a_1}; add.s64 d, b, {b_1};",
                $wgmma, $sums, ", c, d, 1, 1, 1, {a_columns}, {b_columns};",
                "add.s64 c, a, {a_2}; add.s64 d, b, {b_2};",
                $wgmma, $sums, ", c, d, 1, 1, 1, {a_columns}, {b_columns};",
                "add.s64 c, a, {a_3}; add.s64 d, b, {b_3};",
                $wgmma, $sums, ", c, d, 1, 1, 1, {a_columns}, {b_columns};",
                "wgmma.commit_group.sync.aligned;",
                "wgmma.wait_group.sync.aligned 1;",
                "setp.ne.u32 q, release, 0xffffffff; and.pred q, q, lead;",
                "@q mbarrier.arrive.shared::cta.b64 token, [release];",
                "mad.lo.u32 release, stage, 8, {empty};",
                "add.u32 stage, stage, 1; setp.eq.u32 q, stage,", $stages, ";",
                "selp.b32 stage, 0, stage, q; @q xor.b32 parity, parity, 1;",
                "sub.u32 left, left, 1; setp.ne.u32 q, left, 0; setp.eq.u32 add, left, left;",
                "@q bra.uni NEXT;",
                "wgmma.wait_group.sync.aligned 0;",
                "@lead mbarrier.arrive.shared::cta.b64 token, [release];",
                "TAIL:",
                "mov.b32 left, {tail}; setp.eq.u32 q, left, 0; @q bra.uni DONE;",
                "mad.lo.u32 full, stage, 8, {full};",
                "mad.wide.u32 a, stage,", $a_step, ", {a};",
                "mad.wide.u32 b, stage,", $b_step, ", {b};",
                "LAST: mbarrier.try_wait.parity.shared::cta.b64 q, [full], parity;",
                "@!q bra LAST;",
                "MORE:",
                "wgmma.fence.sync.aligned;",
                $wgmma, $sums, ", a, b, add, 1, 1, {a_columns}, {b_columns};",
                "wgmma.commit_group.sync.aligned;",
                "wgmma.wait_group.sync.aligned 0;",
                "add.s64 a, a, {a_1}; add.s64 b, b, {b_1}; setp.eq.u32 add, left, left;",
                "sub.u32 left, left, 1; setp.ne.u32 q, left, 0; @q bra.uni MORE;",
                "mad.lo.u32 release, stage, 8, {empty};",
                "@lead mbarrier.arrive.shared::cta.b64 token, [release];",
                "DONE: }}",
                d = out(_) sums,
                full = in(_) full, empty = in(_) empty, a = in(_) a, b = in(_) b,
                stage = in(_) stage, parity = in(_) parity, steps = in(_) steps,
                tail = in(_) tail, leader = in(_) leader,
                a_columns = const u32::from(in_columns[0]),
                b_columns = const u32::from(in_columns[1]),
                a_1 = const advance(in_columns[0]), b_1 = const advance(in_columns[1]),
                a_2 = const 2 * advance(in_columns[0]), b_2 = const 2 * advance(in_columns[1]),
                a_3 = const 3 * advance(in_columns[0]), b_3 = const 3 * advance(in_columns[1])
            );
            sums
        }
    };
}

main_loop!(
    main_loop_64x256,
    128,
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "4",
    "1024",
    "2048"
);
// There is no vector of 88 values: the last 40 of 128 stay unwritten (and take no registers).
main_loop!(
    main_loop_64x176,
    128,
    "// {d}
    wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16",
    "{{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, \
     %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, \
     %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, \
     %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, \
     %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87}}",
    "5",
    "1024",
    "1408"
);
main_loop!(
    main_loop_64x128,
    64,
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "6",
    "1024",
    "1024"
);
main_loop!(
    main_loop_64x64,
    32,
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "8",
    "1024",
    "512"
);

/// Two E4M3 bytes, the first in the lower eight bits, each times 2^118 as a bf16 in both halves of a
/// word: `cvt.rn.f16x2.e4m3x2` is exact, and so is every step after it (448 · 2^118 < 2^127).
#[cube]
pub fn decode_e4m3x2(bytes: u16) -> Vector<u32, Const<2>> {
    let scales: Vector<u32, Const<2>>;
    gpu_asm!(
        "{{ .reg .b32 h; .reg .b16 x, y; .reg .f32 f, g;",
        "cvt.rn.f16x2.e4m3x2 h, {b}; mov.b32 {{x, y}}, h;",
        "cvt.f32.f16 f, x; cvt.f32.f16 g, y;",
        // 2^118
        "mul.rn.f32 f, f, 0f7A800000; mul.rn.f32 g, g, 0f7A800000;",
        "cvt.rn.bf16x2.f32 %0, f, f; cvt.rn.bf16x2.f32 %1, g, g;",
        "// {o}",
        "}}",
        o = out(_) scales, b = in(_) bytes,
        options(pure, nomem)
    );
    Vector::<u32, Const<2>>::reinterpret(scales)
}

/// [`decode_e4m3x2()`] for devices without that conversion, which is one of sm_89: exponent and mantissa of a byte
/// are put where a bf16 has its lowest exponent bits, which makes the scale times 2^-120 (its bias is 7, a bf16's
/// 127; a byte without an exponent lands on a subnormal), and multiplied by 2^119 twice, exactly. The one byte
/// that is NaN would be a number.
#[cube]
pub fn decode_e4m3x2_sm80(bytes: u16) -> Vector<u32, Const<2>> {
    let scales: Vector<u32, Const<2>>;
    gpu_asm!(
        "{{ .reg .b32 v, w, s, c, m; .reg .pred p; cvt.u32.u16 v, {b};",
        "mov.b32 c, 0x7B007B00; mov.b32 m, 0x80008000;",
        "and.b32 w, v, 0x7f; setp.eq.u32 p, w, 0x7f; mul.lo.u32 w, w, 0x00100010;",
        "and.b32 s, v, 0x80; mul.lo.u32 s, s, 0x01000100; or.b32 w, w, s;",
        "fma.rn.bf16x2 w, w, c, m; fma.rn.bf16x2 w, w, c, m; selp.b32 %0, 0x7fff7fff, w, p;",
        "shr.u32 v, v, 8;",
        "and.b32 w, v, 0x7f; setp.eq.u32 p, w, 0x7f; mul.lo.u32 w, w, 0x00100010;",
        "and.b32 s, v, 0x80; mul.lo.u32 s, s, 0x01000100; or.b32 w, w, s;",
        "fma.rn.bf16x2 w, w, c, m; fma.rn.bf16x2 w, w, c, m; selp.b32 %1, 0x7fff7fff, w, p;",
        "// {o}",
        "}}",
        o = out(_) scales, b = in(_) bytes,
        options(pure, nomem)
    );
    Vector::<u32, Const<2>>::reinterpret(scales)
}

/// Eight E2M1 codes times `scale` of [`decode_e4m3x2()`], as pairs of bf16: codes (0, 4), (1, 5),
/// (2, 6), (3, 7), each 2^-8 times what it stands for.
///
/// A code's exponent and mantissa, put into the lowest exponent bits of a bf16, are the code times
/// 2^-126: its bias is 1, a bf16's is 127, and codes without an exponent land on subnormals. The
/// multiplication by the scale times 2^118 brings it back into the normal range, exactly: six
/// significant bits between 2^-18 and 2^4. Codes four apart are 16 bits apart, so one instruction
/// serves both halves; a multiplication by 2^12 + 2^6 puts copies of a code where the sign and where the magnitude
/// have to be, on a pipe that the masks leave free.
#[cube]
pub fn decode_e2m1x8_pairs(codes: u32, scale: u32) -> Vector<u32, Const<4>> {
    let pairs: Vector<u32, Const<4>>;
    gpu_asm!(
        "{{ .reg .b32 u, m, p<4>; mov.b32 m, 0x80008000;",
        "and.b32 p0, {c}, 0x000f000f; mul.lo.u32 p0, p0, 0x1040; and.b32 p0, p0, 0x81c081c0;",
        "and.b32 p1, {c}, 0x00f000f0; mul.lo.u32 p1, p1, 0x104; and.b32 p1, p1, 0x81c081c0;",
        "shr.u32 u, {c}, 8;",
        "and.b32 p2, u, 0x000f000f; mul.lo.u32 p2, p2, 0x1040; and.b32 p2, p2, 0x81c081c0;",
        "and.b32 p3, u, 0x00f000f0; mul.lo.u32 p3, p3, 0x104; and.b32 p3, p3, 0x81c081c0;",
        // A multiplication of pairs is an instruction of sm_90; a sum with -0 is one of sm_80.
        "fma.rn.bf16x2 %0, p0, {s}, m; fma.rn.bf16x2 %1, p1, {s}, m;",
        "fma.rn.bf16x2 %2, p2, {s}, m; fma.rn.bf16x2 %3, p3, {s}, m;",
        "// {o}",
        "}}",
        o = out(_) pairs, c = in(_) codes, s = in(_) scale,
        options(pure, nomem)
    );
    Vector::<u32, Const<4>>::reinterpret(pairs)
}

/// One pair of [`decode_e2m1x8_pairs()`]: codes in the lowest nibbles of both halves of `pair`, zeros above
/// them.
#[cube]
pub fn scaled_pair(pair: u32, scale: u32) -> u32 {
    let product: u32;
    gpu_asm!(
        "{{ .reg .b32 t; mul.lo.u32 t, {c}, 0x1040; and.b32 t, t, 0x81c081c0;",
        "mul.rn.bf16x2 {o}, t, {s}; }}",
        o = out(_) product, c = in(_) pair, s = in(_) scale,
        options(pure, nomem)
    );
    u32::reinterpret(product)
}

/// Four pairs in order, (0, 1), (2, 3), (4, 5), (6, 7), as (0, 4), (1, 5), (2, 6), (3, 7): the order
/// of [`decode_e2m1x8_pairs()`].
#[cube]
pub fn interleave_pairs(pairs: Vector<u32, Const<4>>) -> Vector<u32, Const<4>> {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "// {i} {o}",
        "prmt.b32 %0, %4, %6, 0x5410; prmt.b32 %1, %4, %6, 0x7632;",
        "prmt.b32 %2, %5, %7, 0x5410; prmt.b32 %3, %5, %7, 0x7632;",
        o = out(_) out, i = in(_) Vector::<u32, Const<4>>::reinterpret(pairs),
        options(pure, nomem)
    );
    Vector::<u32, Const<4>>::reinterpret(out)
}

/// `c + a · b` on one warp: `mma.sync.m16n8k16`, bf16 operands as registers of pairs, f32 sums.
#[cube]
pub fn mma_16x8x16(
    c: Vector<f32, Const<4>>,
    a0: u32,
    a1: u32,
    a2: u32,
    a3: u32,
    b0: u32,
    b1: u32,
) -> Vector<f32, Const<4>> {
    let d: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {c};",
        d = out(_) d, c = in(_) Vector::<f32, Const<4>>::reinterpret(c),
        a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3, b0 = in(_) b0, b1 = in(_) b1,
        options(pure, nomem)
    );
    Vector::<f32, Const<4>>::reinterpret(d)
}
