//! Mainloop of the bf16 GEMM of Hopper (sm_90a): `wgmma` on stages filled by TMA.
//!
//! PTX ISA "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async"; PTX 8.0, sm_90a.

use cubecl::prelude::*;

use super::Major;

/// State of a multi-stage pipeline. A stage has two mbarriers (or two pairs of them, if halves of a
/// stage are released separately): one for full, one for empty.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct PipelineState {
    /// Address of the first barrier that completes when a stage is full.
    pub full: u32,
    /// Address of the first barrier that completes when a stage is empty again.
    pub empty: u32,
    /// Index of the next stage.
    pub stage: u32,
    /// Parity of the phase of its full barrier.
    pub parity: u32,
}

/// The mainloop of one consumer warpgroup: `steps` stages of 64 elements along K, 64 rows of `a`
/// times the columns of `b` that the instruction names.
///
/// The accumulators stay inside one asm block from the first instruction to the last: across blocks
/// the compiler would have to wait for each instruction before it may copy them. One group of
/// instructions stays in flight: a stage is released to the producer after the instructions of the
/// next one are queued.
///
/// - `pipeline`: the pipeline state, with barriers of eight bytes;
/// - `a`, `b`: [descriptors](super::wgmma_descriptor()) of stage 0, advanced by the size of a stage
///   / 16 (`$a_step`, `$b_step`). Within a stage `Major::advance` moves them to the columns of the
///   next instruction;
/// - `tail`: number of instructions of 16 columns each, 0 to 3, in one more stage after `steps`
///   whole stages;
/// - `leader`: nonzero in the one unit that arrives for its warpgroup;
/// - `majors`: of `a` and of `b`.
macro_rules! mainloop {
    ($name:ident, $accumulators:literal, $wgmma:tt, $stages:tt, $a_step:tt, $b_step:tt) => {
        mainloop!($name, $accumulators, $wgmma, "{d}", $stages, $a_step, $b_step);
    };
    (
        $name:ident, $accumulators:literal, $wgmma:tt, $sums:tt, $stages:tt, $a_step:tt, $b_step:tt
    ) => {
        #[cube]
        pub fn $name(
            pipeline: PipelineState,
            a: u64,
            b: u64,
            steps: u32,
            tail: u32,
            leader: u32,
            #[comptime] majors: [Major; 2],
        ) -> Vector<f32, Const<$accumulators>> {
            let full = u32::reinterpret(pipeline.full);
            let empty = u32::reinterpret(pipeline.empty);
            let stage = u32::reinterpret(pipeline.stage);
            let parity = u32::reinterpret(pipeline.parity);
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
                // The first instruction of a tile replaces the accumulators instead of adding to
                // them.
                $wgmma, $sums, ", a, b, add, 1, 1, {a_trans}, {b_trans};",
                "add.s64 c, a, {a_1}; add.s64 d, b, {b_1};",
                $wgmma, $sums, ", c, d, 1, 1, 1, {a_trans}, {b_trans};",
                "add.s64 c, a, {a_2}; add.s64 d, b, {b_2};",
                $wgmma, $sums, ", c, d, 1, 1, 1, {a_trans}, {b_trans};",
                "add.s64 c, a, {a_3}; add.s64 d, b, {b_3};",
                $wgmma, $sums, ", c, d, 1, 1, 1, {a_trans}, {b_trans};",
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
                $wgmma, $sums, ", a, b, add, 1, 1, {a_trans}, {b_trans};",
                "wgmma.commit_group.sync.aligned;",
                "wgmma.wait_group.sync.aligned 0;",
                "add.s64 a, a, {a_1}; add.s64 b, b, {b_1}; setp.eq.u32 add, left, left;",
                "sub.u32 left, left, 1; setp.ne.u32 q, left, 0; @q bra.uni MORE;",
                "mad.lo.u32 release, stage, 8, {empty};",
                "@lead mbarrier.arrive.shared::cta.b64 token, [release];",
                "DONE: }}",
                d = out(_) sums,
                full = in(_) full, empty = in(_) empty, stage = in(_) stage, parity = in(_) parity,
                a = in(_) a, b = in(_) b,
                steps = in(_) steps, tail = in(_) tail, leader = in(_) leader,
                a_trans = const majors[0].transposes(), b_trans = const majors[1].transposes(),
                a_1 = const majors[0].advance(), b_1 = const majors[1].advance(),
                a_2 = const 2 * majors[0].advance(), b_2 = const 2 * majors[1].advance(),
                a_3 = const 3 * majors[0].advance(), b_3 = const 3 * majors[1].advance()
            );
            sums
        }
    };
}

mainloop!(
    mainloop_m64n256,
    128,
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "4",
    "1024",
    "2048"
);
// There is no vector of 88 values: the last 40 of 128 stay unwritten (and take no registers).
mainloop!(
    mainloop_m64n176,
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
mainloop!(
    mainloop_m64n128,
    64,
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "6",
    "1024",
    "1024"
);
mainloop!(
    mainloop_m64n64,
    32,
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "8",
    "1024",
    "512"
);
