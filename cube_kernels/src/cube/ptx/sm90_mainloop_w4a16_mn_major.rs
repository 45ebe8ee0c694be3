//! Mainloop of the W4A16 GEMM of Hopper (sm_90a) for an MN-major packed operand: `wgmma` with an
//! operand that is dequantized in registers, and whose stored rows are K.
//!
//! PTX ISA "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async"; PTX 8.0, sm_90a.

use cubecl::prelude::*;

use super::sm90_mainloop::PipelineState;

/// K indices per stage.
pub const STAGE_K: usize = 64;
/// Bytes of codes per stage: 128 per K index.
pub const STAGE_CODES: usize = STAGE_K * 128;
/// Pitch in bytes of the scales of 16 K indices: 32 for each of 16 blocks, plus 32 against bank
/// conflicts of a warp's writes.
pub const STEP_SCALES: usize = 16 * 32 + 32;
/// Bytes of scales per stage.
pub const STAGE_SCALES: usize = STAGE_K / 16 * STEP_SCALES;

/// The packed operand in stage 0, as one lane reads it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct MnMajorStage {
    /// Address of the lane's four codes at its first K index, an even one.
    pub even: u32,
    /// Address of the lane's four codes at the next K index.
    pub odd: u32,
    /// Address of the lane's four scales at the first 16 K indices.
    pub scales: u32,
}

/// The mainloop of one consumer warpgroup: `out[128 columns of b, rows of a] = Σ bᵀ · aᵀ`, where
/// `b` is packed, with K down its columns, and goes through registers (the left operand of `wgmma`,
/// "Register Fragments for wgmma"), and `a` is K-major bf16 in shared memory.
///
/// An instruction takes 64 columns of `b` at 16 K indices. The choice of these columns is free, as
/// long as the epilogue agrees. A lane with index `q` in its quad, in quad number `g`, has columns
/// `4 g` to `4 g + 3` of the 32 of its warp: the first two as the upper and lower row of its
/// fragment of one instruction, the others as those of a second one. So its codes at a K index are
/// 16 adjacent bits with one scale. The fragment requires the K indices `2 q`, `2 q + 1`, `2 q + 8`
/// and `2 q + 9`. Two of them make a word, in which the order of
/// [`decode_e2m1x8_pairs()`](crate::cube::codec::decode_e2m1x8_pairs()), which this inlines, finds
/// both at once. Each element is 2^-8 times its value.
///
/// Codes are stored as TMA writes them with the 128-byte swizzle, so that the four rows that a warp
/// reads together are in different banks. Scales are stored as pairs of bf16, times 2^118
/// ([`decode_e4m3_pair()`](crate::cube::codec::decode_e4m3_pair())), with those of a lane's four K
/// indices adjacent: at `32 b + 8 q + 4 h + 2 e` of 16 K indices, the scale of block `b` at `8 h +
/// 2 q + e`.
///
/// The fragments of 32 K indices are dequantized into one of two sets of registers while the
/// instructions of the other set are in flight. After the instructions of the first half of a stage
/// are queued, a wait for the others ensures that the previous stage can be released to the
/// producers. Every unit arrives separately.
///
/// - `pipeline`: the pipeline state, with barriers of eight bytes;
/// - `a`: [`wgmma_descriptor`](super::wgmma_descriptor()) of stage 0, advanced by `a_stage`, the
///   size of a stage / 16;
/// - `steps`: stages to multiply, at least one.
///
/// The sums are those of the first of the two instructions, then those of the second.
macro_rules! mn_major_mainloop {
    ($name:ident, $accumulators:literal, $wgmma:tt, $first:tt, $second:tt) => {
        mn_major_mainloop!(
            $name, $accumulators, $wgmma, $first, $second,
            // Per half: two times 16 K indices with the offsets of their codes and scales, the
            // fragments of either instruction, whether they add, and the code after the wait.
            [
                ["0" "1024" "0" "x0" "x1" "x2" "x3" "x4" "x5" "x6" "x7"]
                ["2048" "3072" "544" "x8" "x9" "x10" "x11" "x12" "x13" "x14" "x15"];
                ["{{x0, x1, x2, x3}}" "{{x4, x5, x6, x7}}" "add"]
                ["{{x8, x9, x10, x11}}" "{{x12, x13, x14, x15}}" "1"];
                "@given mbarrier.arrive.shared::cta.b64 token, [release];
                mad.lo.u32 release, stage, 8, {empty}; setp.eq.u32 add, left, left;"
            ]
            [
                ["4096" "5120" "1088" "y0" "y1" "y2" "y3" "y4" "y5" "y6" "y7"]
                ["6144" "7168" "1632" "y8" "y9" "y10" "y11" "y12" "y13" "y14" "y15"];
                ["{{y0, y1, y2, y3}}" "{{y4, y5, y6, y7}}" "1"]
                ["{{y8, y9, y10, y11}}" "{{y12, y13, y14, y15}}" "1"];
                "setp.eq.u32 given, left, left;"
            ]
        );
    };
    (
        $name:ident, $accumulators:literal, $wgmma:tt, $first:tt, $second:tt,
        $([
            $([
                $near:tt $far:tt $scale:tt
                $p0:tt $p1:tt $p2:tt $p3:tt $p4:tt $p5:tt $p6:tt $p7:tt
            ])*;
            $([$one:tt $other:tt $add:tt])*;
            $then:tt
        ])*
    ) => {
        #[cube]
        pub fn $name(
            pipeline: PipelineState,
            a: u64,
            packed: MnMajorStage,
            steps: u32,
            #[comptime] a_stage: u32,
            #[comptime] stages: u32,
        ) -> Vector<f32, Const<$accumulators>> {
            let full = u32::reinterpret(pipeline.full);
            let empty = u32::reinterpret(pipeline.empty);
            let stage = u32::reinterpret(pipeline.stage);
            let parity = u32::reinterpret(pipeline.parity);
            let even = u32::reinterpret(packed.even);
            let odd = u32::reinterpret(packed.odd);
            let scales = u32::reinterpret(packed.scales);
            let sums: Vector<f32, Const<$accumulators>>;
            gpu_asm!(
                "// {d}
                {{ .reg .pred q, add, given;",
                ".reg .b32 stage, parity, left, full, release, even, odd, scales, t, u, v, f, g;",
                ".reg .b32 x<16>, y<16>; .reg .b16 h<4>; .reg .b64 a, c, token;",
                "mov.b32 stage, {stage}; mov.b32 parity, {parity}; mov.b32 left, {steps};",
                "mov.b32 release, 0;",
                "setp.ne.u32 add, left, left; setp.ne.u32 given, left, left;",
                "NEXT:",
                "mad.lo.u32 full, stage, 8, {full}; mad.wide.u32 a, stage, {a_stage}, {a};",
                "WAIT: mbarrier.try_wait.parity.shared::cta.b64 q, [full], parity;",
                "@!q bra WAIT;",
                "mad.lo.u32 even, stage, {codes}, {even}; mad.lo.u32 odd, stage, {codes}, {odd};",
                "mad.lo.u32 scales, stage, {stage_scales}, {scales};",
                "mov.b64 c, a;",
                $(
                    $(
                        "ld.shared.b16 h0, [even +", $near, "];",
                        "ld.shared.b16 h1, [odd +", $near, "];",
                        "ld.shared.b16 h2, [even +", $far, "];",
                        "ld.shared.b16 h3, [odd +", $far, "];",
                        "ld.shared.v2.b32 {{f, g}}, [scales +", $scale, "];",
                        "mov.b32 t, {{h0, h1}}; mov.b32 u, {{h2, h3}};",
                        "and.b32 v, t, 0x000f000f; mul.lo.u32 v, v, 0x1040;",
                        "and.b32 v, v, 0x81c081c0; mul.rn.bf16x2", $p0, ", v, f;",
                        "and.b32 v, t, 0x00f000f0; mul.lo.u32 v, v, 0x104;",
                        "and.b32 v, v, 0x81c081c0; mul.rn.bf16x2", $p1, ", v, f;",
                        "and.b32 v, u, 0x000f000f; mul.lo.u32 v, v, 0x1040;",
                        "and.b32 v, v, 0x81c081c0; mul.rn.bf16x2", $p2, ", v, g;",
                        "and.b32 v, u, 0x00f000f0; mul.lo.u32 v, v, 0x104;",
                        "and.b32 v, v, 0x81c081c0; mul.rn.bf16x2", $p3, ", v, g;",
                        "shr.u32 t, t, 8; shr.u32 u, u, 8;",
                        "and.b32 v, t, 0x000f000f; mul.lo.u32 v, v, 0x1040;",
                        "and.b32 v, v, 0x81c081c0; mul.rn.bf16x2", $p4, ", v, f;",
                        "and.b32 v, t, 0x00f000f0; mul.lo.u32 v, v, 0x104;",
                        "and.b32 v, v, 0x81c081c0; mul.rn.bf16x2", $p5, ", v, f;",
                        "and.b32 v, u, 0x000f000f; mul.lo.u32 v, v, 0x1040;",
                        "and.b32 v, v, 0x81c081c0; mul.rn.bf16x2", $p6, ", v, g;",
                        "and.b32 v, u, 0x00f000f0; mul.lo.u32 v, v, 0x104;",
                        "and.b32 v, v, 0x81c081c0; mul.rn.bf16x2", $p7, ", v, g;",
                    )*
                    "wgmma.fence.sync.aligned;",
                    $(
                        // The first instructions of a tile replace the accumulators instead of
                        // adding to them.
                        $wgmma, $first, ",", $one, ", c,", $add, ", 1, 1, 0;",
                        $wgmma, $second, ",", $other, ", c,", $add, ", 1, 1, 0;",
                        "add.s64 c, c, 2;",
                    )*
                    "wgmma.commit_group.sync.aligned;",
                    "wgmma.wait_group.sync.aligned 1;",
                    $then,
                )*
                "add.u32 stage, stage, 1; setp.eq.u32 q, stage, {stages};",
                "selp.b32 stage, 0, stage, q; @q xor.b32 parity, parity, 1;",
                "sub.u32 left, left, 1; setp.ne.u32 q, left, 0; @q bra.uni NEXT;",
                "wgmma.wait_group.sync.aligned 0;",
                "mbarrier.arrive.shared::cta.b64 token, [release];",
                "}}",
                d = out(_) sums,
                full = in(_) full, empty = in(_) empty, stage = in(_) stage, parity = in(_) parity,
                a = in(_) a, even = in(_) even, odd = in(_) odd, scales = in(_) scales,
                steps = in(_) steps, a_stage = const a_stage, stages = const stages,
                codes = const STAGE_CODES as u32, stage_scales = const STAGE_SCALES as u32
            );
            sums
        }
    };
}

mn_major_mainloop!(
    mn_major_mainloop_n128,
    128,
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "{{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, \
     %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, \
     %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, \
     %55, %56, %57, %58, %59, %60, %61, %62, %63}}",
    "{{%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, \
     %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, \
     %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, \
     %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}}"
);
mn_major_mainloop!(
    mn_major_mainloop_n64,
    64,
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "{{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, \
     %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}}",
    "{{%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, \
     %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}}"
);
mn_major_mainloop!(
    mn_major_mainloop_n32,
    32,
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16",
    "{{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}}",
    "{{%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}}"
);
