//! Mainloop of the W4A16 GEMM of Hopper (sm_90a): `wgmma` with a packed operand that is dequantized
//! in registers.
//!
//! PTX ISA "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async"; PTX 8.0, sm_90a.

use cubecl::prelude::*;

use super::sm90_mainloop::PipelineState;

/// Layout of the pipeline, which one warpgroup may share with others.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Ring {
    /// Number of stages.
    pub stages: u32,
    /// Stages from one to the next of this warpgroup.
    pub advance: u32,
    /// Size of half a stage of `a`, in units of 16 bytes.
    pub a_half: u64,
}

/// The packed operand in stage 0.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct PackedStage {
    /// Address of the codes of this lane's upper row, 64 bytes per row.
    pub codes: u32,
    /// Address of the scales of this lane's upper row, 8 bytes per row.
    pub scales: u32,
    /// Rows of codes and scales per stage.
    pub rows: u32,
}

/// The mainloop of one consumer warpgroup: `out[64 rows of b, $n rows of a] = Σ b · aᵀ`, where `b`
/// is packed and goes through registers (the left operand of `wgmma`, "Register Fragments for
/// wgmma") and `a` is bf16 in shared memory.
///
/// The sum over K does not depend on the order of its columns, as long as both operands agree.
/// Within 128 columns, a lane with index `q` in its quad takes the 32 columns from `32 q` on of two
/// rows: 16 bytes of codes and two scales of either. In the order of
/// [`decode_e2m1x8_pairs()`](crate::cube::codec::decode_e2m1x8_pairs()), which this inlines, a word
/// holds the lane's part of two instructions. The columns of `a` are stored in the resulting order:
/// in instruction `4 h + 2 w + j / 2`, at `8 (j % 2) + 2 q + e`, column `32 q + 16 h + 8 w + j + 4
/// e`. Each element is 2^-8 times its value.
///
/// The fragments of 64 columns are dequantized into one of two sets of registers while the
/// instructions of the other set are in flight. After the instructions of this set are queued, a
/// wait for the other set's ensures that its half of a stage can be released to the producer. Every
/// unit arrives separately: its reads are then ordered before the next copy without a barrier of
/// its warp (which is as fast as one arrival per warp).
///
/// - `pipeline`: the pipeline state, with two barriers per stage (one for each 64 columns of `a`),
///   eight bytes each; codes and scales arrive with the first;
/// - `a`: [`wgmma_descriptor`](super::wgmma_descriptor()) of stage 0; the second half of a stage is
///   `ring.a_half` further, the next stage twice that;
/// - `steps`: stages to multiply, at least one.
macro_rules! w4a16_mainloop {
    ($name:ident, $accumulators:literal, $wgmma:tt) => {
        w4a16_mainloop!($name, $accumulators, $wgmma, "{d}");
    };
    ($name:ident, $accumulators:literal, $wgmma:tt, $sums:tt) => {
        w4a16_mainloop!(
            $name, $accumulators, $wgmma, $sums,
            // Per half: the instructions before the decoding, the words with their scale and
            // fragments, the barrier of this half, the barrier of the previous half, and the
            // instructions.
            [
                "add.s64 c, a, 0;"
                ["w0" "f0" "x0" "x2" "x4" "x6"] ["w4" "f2" "x1" "x3" "x5" "x7"]
                ["w1" "f0" "x8" "x10" "x12" "x14"] ["w5" "f2" "x9" "x11" "x13" "x15"];
                ["{{x0, x1, x2, x3}}" "add"] ["{{x4, x5, x6, x7}}" "1"]
                ["{{x8, x9, x10, x11}}" "1"] ["{{x12, x13, x14, x15}}" "1"];
                "@given mbarrier.arrive.shared::cta.b64 token, [release];"
                "mad.lo.u32 release, stage, 16, {empty}; setp.eq.u32 add, left, left;"
            ]
            [
                "add.u32 full, full, 8; add.s64 c, a, {a_half};
                SECOND: mbarrier.try_wait.parity.shared::cta.b64 q, [full], parity; @!q bra SECOND;"
                ["w2" "f1" "y0" "y2" "y4" "y6"] ["w6" "f3" "y1" "y3" "y5" "y7"]
                ["w3" "f1" "y8" "y10" "y12" "y14"] ["w7" "f3" "y9" "y11" "y13" "y15"];
                ["{{y0, y1, y2, y3}}" "1"] ["{{y4, y5, y6, y7}}" "1"]
                ["{{y8, y9, y10, y11}}" "1"] ["{{y12, y13, y14, y15}}" "1"];
                "mbarrier.arrive.shared::cta.b64 token, [release];"
                "add.u32 release, release, 8; setp.eq.u32 given, left, left;"
            ]
        );
    };
    (
        $name:ident, $accumulators:literal, $wgmma:tt, $sums:tt,
        $([
            $begin:tt
            $([$word:tt $scale:tt $p0:tt $p1:tt $p2:tt $p3:tt])*;
            $([$fragment:tt $add:tt])*;
            $release:tt $next:tt
        ])*
    ) => {
        #[cube]
        pub fn $name(
            pipeline: PipelineState,
            ring: Ring,
            a: u64,
            packed: PackedStage,
            steps: u32,
        ) -> Vector<f32, Const<$accumulators>> {
            let full = u32::reinterpret(pipeline.full);
            let empty = u32::reinterpret(pipeline.empty);
            let stage = u32::reinterpret(pipeline.stage);
            let parity = u32::reinterpret(pipeline.parity);
            let stages = u32::reinterpret(ring.stages);
            let advance = u32::reinterpret(ring.advance);
            let a_half = u64::reinterpret(ring.a_half);
            let codes = u32::reinterpret(packed.codes);
            let scales = u32::reinterpret(packed.scales);
            let rows = u32::reinterpret(packed.rows);
            let sums: Vector<f32, Const<$accumulators>>;
            gpu_asm!(
                "{{ .reg .pred q, add, given;",
                ".reg .b32 stage, parity, left, full, release, at, t, u;",
                ".reg .b32 w<8>, f<4>, x<16>, y<16>; .reg .b16 s, r, l, h; .reg .f32 g, i;",
                ".reg .b64 a, c, token;",
                "mov.b32 stage, {stage}; mov.b32 parity, {parity}; mov.b32 left, {steps};",
                "mov.b32 release, 0;",
                "setp.ne.u32 add, left, left; setp.ne.u32 given, left, left;",
                "NEXT:",
                "mad.lo.u32 full, stage, 16, {full};",
                "mul.wide.u32 a, stage, 2; mad.lo.u64 a, a, {a_half}, {a};",
                "FIRST: mbarrier.try_wait.parity.shared::cta.b64 q, [full], parity;",
                "@!q bra FIRST;",
                "mul.lo.u32 at, stage, {rows}; shl.b32 at, at, 3; add.u32 at, at, {scales};",
                "ld.shared.b16 s, [at]; ld.shared.b16 r, [at + 64];",
                "mul.lo.u32 at, stage, {rows}; shl.b32 at, at, 6; add.u32 at, at, {codes};",
                "ld.shared.v4.b32 {{w0, w1, w2, w3}}, [at];",
                "ld.shared.v4.b32 {{w4, w5, w6, w7}}, [at + 512];",
                // Scales times 2^118 in both halves of a word.
                "cvt.rn.f16x2.e4m3x2 t, s; mov.b32 {{l, h}}, t;",
                "cvt.f32.f16 g, l; cvt.f32.f16 i, h;",
                "mul.rn.f32 g, g, 0f7A800000; mul.rn.f32 i, i, 0f7A800000;",
                "cvt.rn.bf16x2.f32 f0, g, g; cvt.rn.bf16x2.f32 f1, i, i;",
                "cvt.rn.f16x2.e4m3x2 t, r; mov.b32 {{l, h}}, t;",
                "cvt.f32.f16 g, l; cvt.f32.f16 i, h;",
                "mul.rn.f32 g, g, 0f7A800000; mul.rn.f32 i, i, 0f7A800000;",
                "cvt.rn.bf16x2.f32 f2, g, g; cvt.rn.bf16x2.f32 f3, i, i;",
                $(
                    $(
                        "and.b32 t,", $word, ", 0x000f000f; mul.lo.u32 t, t, 0x1040;",
                        "and.b32 t, t, 0x81c081c0; mul.rn.bf16x2", $p0, ", t,", $scale, ";",
                        "and.b32 t,", $word, ", 0x00f000f0; mul.lo.u32 t, t, 0x104;",
                        "and.b32 t, t, 0x81c081c0; mul.rn.bf16x2", $p1, ", t,", $scale, ";",
                        "shr.u32 u,", $word, ", 8;",
                        "and.b32 t, u, 0x000f000f; mul.lo.u32 t, t, 0x1040;",
                        "and.b32 t, t, 0x81c081c0; mul.rn.bf16x2", $p2, ", t,", $scale, ";",
                        "and.b32 t, u, 0x00f000f0; mul.lo.u32 t, t, 0x104;",
                        "and.b32 t, t, 0x81c081c0; mul.rn.bf16x2", $p3, ", t,", $scale, ";",
                    )*
                    $begin,
                    "wgmma.fence.sync.aligned;",
                    $(
                        $wgmma, $sums, ",", $fragment, ", c,", $add, ", 1, 1, 0;",
                        "add.s64 c, c, 2;",
                    )*
                    "wgmma.commit_group.sync.aligned;",
                    "wgmma.wait_group.sync.aligned 1;",
                    $release,
                    $next,
                )*
                "add.u32 stage, stage, {advance}; setp.ge.u32 q, stage, {stages};",
                "@q sub.u32 stage, stage, {stages}; @q xor.b32 parity, parity, 1;",
                "sub.u32 left, left, 1; setp.ne.u32 q, left, 0; @q bra.uni NEXT;",
                "wgmma.wait_group.sync.aligned 0;",
                "mbarrier.arrive.shared::cta.b64 token, [release];",
                "}}",
                d = out(_) sums,
                full = in(_) full, empty = in(_) empty, stage = in(_) stage, parity = in(_) parity,
                a = in(_) a, a_half = in(_) a_half, stages = in(_) stages, advance = in(_) advance,
                codes = in(_) codes, scales = in(_) scales, rows = in(_) rows, steps = in(_) steps
            );
            sums
        }
    };
}

w4a16_mainloop!(
    w4a16_mainloop_n256,
    128,
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"
);
// There is no vector of 96 values: the last 32 of 128 stay unwritten (and take no registers).
w4a16_mainloop!(
    w4a16_mainloop_n192,
    128,
    "// {d}
    wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16",
    "{{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, \
     %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, \
     %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, \
     %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, \
     %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, \
     %92, %93, %94, %95}}"
);
w4a16_mainloop!(
    w4a16_mainloop_n128,
    64,
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
);
// There is no vector of 56 values: the last 8 of 64 stay unwritten (and take no registers).
w4a16_mainloop!(
    w4a16_mainloop_n112,
    64,
    "// {d}
    wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16",
    "{{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, \
     %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, \
     %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, \
     %53, %54, %55}}"
);
// There is no vector of 48 values: the last 16 of 64 stay unwritten (and take no registers).
w4a16_mainloop!(
    w4a16_mainloop_n96,
    64,
    "// {d}
    wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16",
    "{{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, \
     %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, \
     %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}}"
);
w4a16_mainloop!(
    w4a16_mainloop_n64,
    32,
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
);
w4a16_mainloop!(
    w4a16_mainloop_n32,
    16,
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
);
