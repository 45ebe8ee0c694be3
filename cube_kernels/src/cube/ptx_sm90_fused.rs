//! PTX of Hopper (sm_90a) for products whose packed operand is decoded in registers: the main loop of
//! a warpgroup, and the exchange between the warpgroups.
//!
//! As in [`ptx_sm90`](super::ptx_sm90) sections are those of the PTX ISA, and results are returned
//! reinterpreted as themselves.

use cubecl::prelude::*;

/// Arrives once at the barrier at `barrier`: `mbarrier.arrive`, which releases what was written
/// before.
#[cube]
pub fn barrier_arrive(barrier: u32) {
    gpu_asm!(
        "{{ .reg .b64 token; mbarrier.arrive.shared::cta.b64 token, [{barrier}]; }}",
        barrier = in(_) barrier
    );
}

/// Waits for `units` units at the named barrier `number`: `barrier.sync`, which orders their memory
/// accesses.
#[cube]
pub fn meet(number: u32, units: u32) {
    gpu_asm!("barrier.sync.aligned {n}, {u};", n = in(_) number, u = in(_) units);
}

/// Gives registers of this warpgroup back, down to 56 a unit: `setmaxnreg.dec`.
#[cube]
pub fn keep_56_registers() {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 56;");
}

/// Takes registers that another warpgroup gave back, up to 224 a unit: `setmaxnreg.inc`. With 384 units
/// of 168 registers, two warpgroups can, once a third has [kept 56](keep_56_registers()).
#[cube]
pub fn take_224_registers() {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 224;");
}

/// Makes what this unit wrote to shared memory visible to wgmma: `fence.proxy.async`.
#[cube]
pub fn fence_shared() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Stores one value to shared memory.
#[cube]
pub fn store_shared_f32(address: u32, value: f32) {
    gpu_asm!("st.shared.f32 [{a}], {v};", a = in(_) address, v = in(_) value);
}

/// Stores four words to shared memory, aligned to sixteen bytes.
#[cube]
pub fn store_shared_4(address: u32, words: Vector<u32, Const<4>>) {
    gpu_asm!(
        "st.shared.v4.b32 [{a}], {w};",
        a = in(_) address, w = in(_) Vector::<u32, Const<4>>::reinterpret(words)
    );
}

/// Loads four values from shared memory, aligned to sixteen bytes.
#[cube]
pub fn load_shared_f32_4(address: u32) -> Vector<f32, Const<4>> {
    let values: Vector<f32, Const<4>>;
    gpu_asm!("ld.shared.v4.f32 {v}, [{a}];", v = out(_) values, a = in(_) address);
    Vector::<f32, Const<4>>::reinterpret(values)
}

/// The bytes of two words that a lane's codes are in, as a selector of `fused_loop`: byte `quarter`
/// of the first and of the second word, twice.
#[cube]
pub fn byte_selector(quarter: u32) -> u32 {
    (quarter | ((quarter + 4u32) << 4u32)) * 0x101u32
}

/// The main loop of one consumer warpgroup: `out[64 rows of b, $n rows of a] = Σ b · aᵀ`, where `b` is
/// packed and goes through registers (the left operand of `wgmma`, "Register Fragments for wgmma") and
/// `a` is bf16 in shared memory.
///
/// In each block of 16 a lane holds columns `2 q`, `2 q + 1`, `2 q + 8` and `2 q + 9` of two rows, `q`
/// being `lane % 4`: byte `q` of either word of codes. One `prmt` collects both bytes, another puts the
/// even codes into the lower and the odd ones into the upper half, four bits up. A code's exponent and
/// mantissa in the lowest exponent bits of a bf16 are the code times 2^-126; the scale times 2^118
/// ([`decode_e4m3x2`](super::ptx_sm90::decode_e4m3x2())) brings it back, times 2^-8, exactly. Eleven
/// instructions for four elements.
///
/// The fragments of 64 columns are decoded together, eight chains of instructions beside each other, into
/// one of two sets of registers, while the products of the other set are in flight. When those of this
/// set are queued, a wait for the other's says that its stage may go back to the producer. (One set and a
/// wait in every block of 16 was as fast: the consumers wait for the scales, not for each other.)
///
/// - `full`, `empty`: the barriers of the stages, eight bytes each;
/// - `a`: [`descriptor`](super::ptx_sm90::descriptor()) of stage 0, which advances by `$a_stage`;
///   64 columns further it advances by `$a_part`;
/// - `codes`, `scales`: addresses in stage 0 of this lane's upper row; the codes of 64 columns are 32
///   bytes, swizzled in their row, and each scale is a word with the scale times 2^118 in both halves;
/// - `selector`: [`byte_selector()`];
/// - `stage`, `parity`: where the ring stands; `advance`: stages from one to the next of this
///   warpgroup;
/// - `steps`: parts of 64 columns, `$parts` to a stage;
/// - `leader`: nonzero in the one unit that arrives for its warp.
macro_rules! fused_loop {
    (
        $name:ident, $accumulators:literal, $wgmma:tt, stages $stages:tt, parts $parts:tt,
        a $a_stage:tt $a_part:tt, codes $codes_stage:tt $codes_lower:tt,
        scales $scales_stage:tt $scales_part:tt
    ) => {
        fused_loop!(
            $name, $accumulators, $wgmma, $stages, $parts, $a_stage, $a_part, $codes_stage,
            $codes_lower, $scales_stage, $scales_part,
            // The two sets, each with its label and what follows it.
            [
                "FIRST"
                "@q bra.uni DONE;"
                ["w0, w1" "f0" "x0" "x2"] ["w8, w9" "f4" "x1" "x3"]
                ["w2, w3" "f1" "x4" "x6"] ["w10, w11" "f5" "x5" "x7"]
                ["w4, w5" "f2" "x8" "x10"] ["w12, w13" "f6" "x9" "x11"]
                ["w6, w7" "f3" "x12" "x14"] ["w14, w15" "f7" "x13" "x15"];
                ["{{x0, x1, x2, x3}}" "0" "add"] ["{{x4, x5, x6, x7}}" "2" "1"]
                ["{{x8, x9, x10, x11}}" "4" "1"] ["{{x12, x13, x14, x15}}" "6" "1"]
            ]
            [
                "SECOND"
                "@!q bra.uni NEXT;"
                ["w0, w1" "f0" "y0" "y2"] ["w8, w9" "f4" "y1" "y3"]
                ["w2, w3" "f1" "y4" "y6"] ["w10, w11" "f5" "y5" "y7"]
                ["w4, w5" "f2" "y8" "y10"] ["w12, w13" "f6" "y9" "y11"]
                ["w6, w7" "f3" "y12" "y14"] ["w14, w15" "f7" "y13" "y15"];
                ["{{y0, y1, y2, y3}}" "0" "1"] ["{{y4, y5, y6, y7}}" "2" "1"]
                ["{{y8, y9, y10, y11}}" "4" "1"] ["{{y12, y13, y14, y15}}" "6" "1"]
            ]
        );
    };
    (
        $name:ident, $accumulators:literal, $wgmma:tt, $stages:tt, $parts:tt, $a_stage:tt,
        $a_part:tt, $codes_stage:tt, $codes_lower:tt, $scales_stage:tt, $scales_part:tt,
        $([
            $label:tt $continue:tt
            $([$words:tt $scale:tt $low:tt $high:tt])*;
            $([$fragment:tt $columns:tt $add:tt])*
        ])*
    ) => {
        #[cube]
        pub fn $name(
            full: u32,
            empty: u32,
            a: u64,
            codes: u32,
            scales: u32,
            selector: u32,
            stage: u32,
            parity: u32,
            advance: u32,
            steps: u32,
            leader: u32,
        ) -> Vector<f32, Const<$accumulators>> {
            let sums: Vector<f32, Const<$accumulators>>;
            gpu_asm!(
                "{{ .reg .pred q, lead, add, last, given;",
                ".reg .b32 stage, parity, left, part, full, release, codes, scales, t, u, z;",
                ".reg .b32 w<16>, f<8>, x<16>, y<16>;",
                ".reg .b64 a, c, token;",
                "mov.b32 stage, {stage}; mov.b32 parity, {parity}; mov.b32 left, {steps};",
                "mov.b32 part, 0; mov.b32 release, 0; setp.ne.u32 lead, {leader}, 0;",
                "setp.ne.u32 add, left, left; setp.ne.u32 given, left, left;",
                "NEXT:",
                $(
                    "mad.lo.u32 full, stage, 8, {full};",
                    "mad.wide.u32 a, stage,", $a_stage, ", {a};",
                    "mad.wide.u32 a, part,", $a_part, ", a;",
                    "mad.lo.u32 codes, stage,", $codes_stage, ", {codes};",
                    "shl.b32 t, part, 5; xor.b32 codes, codes, t;",
                    "mad.lo.u32 scales, stage,", $scales_stage, ", {scales};",
                    "mad.lo.u32 scales, part,", $scales_part, ", scales;",
                    $label, ": mbarrier.try_wait.parity.shared::cta.b64 q, [full], parity;",
                    "@!q bra", $label, ";",
                    "ld.shared.v4.b32 {{w0, w1, w2, w3}}, [codes];",
                    "ld.shared.v4.b32 {{w8, w9, w10, w11}}, [codes +", $codes_lower, "];",
                    "ld.shared.v4.b32 {{f0, f1, f2, f3}}, [scales];",
                    "ld.shared.v4.b32 {{f4, f5, f6, f7}}, [scales + 128];",
                    "xor.b32 codes, codes, 16;",
                    "ld.shared.v4.b32 {{w4, w5, w6, w7}}, [codes];",
                    "ld.shared.v4.b32 {{w12, w13, w14, w15}}, [codes +", $codes_lower, "];",
                    $(
                        "prmt.b32 t,", $words, ", {selector}; shl.b32 u, t, 4;",
                        "prmt.b32 z, u, t, 0x7610;",
                        "and.b32 t, z, 0x00f000f0; mul.lo.u32 t, t, 0x104;",
                        "and.b32 t, t, 0x81c081c0; mul.rn.bf16x2", $low, ", t,", $scale, ";",
                        "shr.u32 t, z, 6; and.b32 t, t, 0x01c001c0; and.b32 z, z, 0x80008000;",
                        "or.b32 t, t, z; mul.rn.bf16x2", $high, ", t,", $scale, ";",
                    )*
                    "wgmma.fence.sync.aligned;",
                    $(
                        "add.s64 c, a,", $columns, ";",
                        $wgmma, "{d},", $fragment, ", c,", $add, ", 1, 1, 0;",
                    )*
                    "wgmma.commit_group.sync.aligned; setp.eq.u32 add, left, left;",
                    "wgmma.wait_group.sync.aligned 1;",
                    "@given mbarrier.arrive.shared::cta.b64 token, [release];",
                    "add.u32 part, part, 1; setp.eq.u32 last, part,", $parts, ";",
                    "and.pred given, last, lead; mad.lo.u32 release, stage, 8, {empty};",
                    "@last mov.b32 part, 0; @last add.u32 stage, stage, {advance};",
                    "setp.ge.u32 q, stage,", $stages, "; @q sub.u32 stage, stage,", $stages, ";",
                    "@q xor.b32 parity, parity, 1;",
                    "sub.u32 left, left, 1; setp.eq.u32 q, left, 0;",
                    $continue,
                )*
                "DONE: wgmma.wait_group.sync.aligned 0;",
                "@given mbarrier.arrive.shared::cta.b64 token, [release];",
                "}}",
                d = out(_) sums,
                full = in(_) full, empty = in(_) empty, a = in(_) a, codes = in(_) codes,
                scales = in(_) scales, selector = in(_) selector, stage = in(_) stage,
                parity = in(_) parity, advance = in(_) advance, steps = in(_) steps,
                leader = in(_) leader
            );
            sums
        }
    };
}

// The numbers: stages, parts, the bytes (of `a`, units of 16 bytes) of a stage and of a part.
fused_loop!(
    fused_loop_256_128, 128, "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    stages "5", parts "1", a "2048" "2048", codes "4096" "256", scales "2048" "2048"
);
fused_loop!(
    fused_loop_128_128, 64, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    stages "8", parts "1", a "1024" "1024", codes "4096" "256", scales "2048" "2048"
);
fused_loop!(
    fused_loop_128_64, 64, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    stages "8", parts "1", a "1024" "1024", codes "2048" "256", scales "1024" "1024"
);
fused_loop!(
    fused_loop_64_128, 32, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    stages "6", parts "2", a "1024" "512", codes "8192" "512", scales "4096" "2048"
);
fused_loop!(
    fused_loop_64_64, 32, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    stages "8", parts "2", a "1024" "512", codes "4096" "512", scales "2048" "1024"
);
fused_loop!(
    fused_loop_32_64, 16, "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16",
    stages "8", parts "2", a "512" "256", codes "4096" "512", scales "2048" "1024"
);
fused_loop!(
    fused_loop_16_64, 8, "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16",
    stages "8", parts "2", a "256" "128", codes "4096" "512", scales "2048" "1024"
);
fused_loop!(
    fused_loop_8_64, 4, "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
    stages "8", parts "2", a "128" "64", codes "4096" "512", scales "2048" "1024"
);
