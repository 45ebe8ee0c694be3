//! Instances of the GEMM kernels for the registry, with their specializations.

use cubecl::prelude::*;
use half::bf16;

mod align_groups;
mod inputs;
mod sm100;
pub(crate) mod specialization;

use inputs::{ALL, ALL_GROUPS, BLOCKS, COLS, NO_SPILLS, PLAIN, ROWS, epilogue, map, problem};

use super::kernels::small_m::launch::loads_a_late;
use super::proof::{
    ArrangeSizeLaunch, CMMA_UNITS, CmmaPlan, CmmaTile, EpilogueKind, Factor, GemmInstance,
    GroupedDim, MixedMatrixLaunch, Multiply, PackedMatrixLaunch, PartialTilesLaunch, Pieces,
    ProblemShapeLaunch, SM90_UNITS, ScalarPlan, Schedule, ScheduledProblemLaunch, Sm90Plan,
    Sm90Tile, Sm120Plan, Sm120Tile, SmallMLeft, SmallMNorm, SmallMShape, StreamKPlan,
    StreamKProblemLaunch, W4a16MnMajorPlan, W4a16MnTile, W4a16Plan, W4a16Tile, add_rows_kernel,
    arrange_kernel, cmma_kernel, dequantize_unscaled_kernel, factors_kernel, scalar_grouped_kernel,
    scalar_kernel, sm90_bf16_kernel, sm90_stream_k_kernel, sm90_w4a16_kernel,
    sm90_w4a16_mn_major_kernel, sm120_block_scaled_kernel, small_m_kernel, small_m_norm_kernel,
    transpose_kernel,
};
use crate::{
    cube::ptx::{BlockScaled, Major},
    gemm::tiles::{SM90_BOX, SM90_TILE_M},
    norm::{forward::NormInputsLaunch, instances::prologue_plan},
    registry::instance::{Architectures, DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let factor = Factor::Tensor;
    let mut all = Vec::new();
    all.extend(align_groups::instances(device));
    all.extend(around(device));
    all.extend(sm90_bf16(device));
    all.extend(sm90_stream_k(device));
    all.extend(sm90_w4a16(device));
    all.extend(sm90_w4a16_mn_major(device));
    all.extend(sm100::block_scaled(device));
    all.extend(sm100::probes(device));
    all.extend(sm120_block_scaled(device));
    all.extend(small_m(device));
    all.extend(cmma(device));
    all.extend(scalar_grouped(device));
    all.push(instance!(
        device,
        factors_kernel,
        "",
        Expected::default(),
        b(1),
        b(1),
        b(2),
        2688.0,
        2688.0,
        1.0,
        factor,
        factor
    ));
    for (dtype, address) in [
        (FloatKind::F32, AddressType::U32),
        (FloatKind::F16, AddressType::U32),
        (FloatKind::Bf16, AddressType::U32),
        (FloatKind::Bf16, AddressType::U64),
    ] {
        let elem = dtype.storage_type();
        let tag = format!("{dtype:?}-{address:?}");
        for add in [false, true] {
            all.push(instance!(
                device,
                add_rows_kernel,
                format!("{tag}-{add}"),
                Expected::default(),
                address,
                b(COLS),
                b(ROWS * COLS),
                ROWS * COLS,
                COLS,
                add,
                dtype,
                elem
            ));
        }
        for bias in [false, true] {
            all.push(instance!(
                device,
                scalar_kernel,
                format!("{tag}-{bias}"),
                Expected::default(),
                address,
                PackedMatrixLaunch::new(b(BLOCKS), b(BLOCKS)),
                PackedMatrixLaunch::new(b(BLOCKS), b(BLOCKS)),
                ProblemShapeLaunch::of((ROWS, ROWS, COLS), 1),
                epilogue(
                    device,
                    EpilogueKind {
                        bias,
                        out: dtype,
                        ..PLAIN
                    }
                ),
                b(ROWS * COLS),
                true,
                elem
            ));
        }
    }
    all
}

fn packed<C: CubePrimitive>(device: &DummyDevice) -> PackedMatrixLaunch<C> {
    PackedMatrixLaunch::new(device.buffer(BLOCKS), device.buffer(BLOCKS))
}

fn mixed<C: CubePrimitive, D: CubePrimitive>(device: &DummyDevice) -> MixedMatrixLaunch<C, D> {
    let b = || device.buffer(BLOCKS);
    MixedMatrixLaunch::new(b(), b(), b())
}

/// Returns a tensor map for the Hopper bf16 kernels, with stages of `rows` rows.
fn sm90_operand(device: &DummyDevice, rows: usize, major: Major) -> TensorMapArg<Tiled> {
    let rows = if major == Major::Mn { SM90_BOX } else { rows };
    map(device, [rows, SM90_BOX], bf16::elem_type_native()).with_swizzle(TensorMapSwizzle::B128)
}

/// Instances of the kernels that prepare operands.
fn around(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let dequantize = |bounded: bool| {
        let tag = if bounded { "bounded" } else { "" };
        instance!(
            device,
            dequantize_unscaled_kernel,
            tag,
            NO_SPILLS,
            AddressType::U32,
            b(2048),
            b(1024),
            b(2048),
            b(1),
            2048,
            32,
            bounded,
        )
        .of_gemm(GemmInstance::Dequantize, Architectures::All)
    };
    let mut all = vec![dequantize(false), dequantize(true)];
    for vector in [8, 1] {
        let instance = instance!(
            device,
            transpose_kernel,
            vector,
            NO_SPILLS,
            AddressType::U32,
            vector,
            vector,
            b(1024),
            b(1024),
            128,
            64,
            1,
        );
        all.push(instance.of_gemm(GemmInstance::Transpose { vector }, Architectures::All));
    }
    let order = |tile, by_width| Some(Schedule { tile, by_width });
    for (variant, packed, schedule) in [
        ("packed", true, None),
        ("bf16", false, None),
        ("grouped-0", true, order(W4a16Tile::ALL[0], true)),
        ("grouped-1", true, order(W4a16Tile::ALL[1], true)),
        ("grouped-1-in-order", true, order(W4a16Tile::ALL[1], false)),
    ] {
        let instance = instance!(
            device,
            arrange_kernel,
            variant,
            NO_SPILLS,
            AddressType::U32,
            mixed(device),
            b(2048),
            b(9),
            b(32),
            ArrangeSizeLaunch::new(16, 2048, 8),
            packed,
            schedule,
        );
        let grouped = schedule.is_some();
        all.push(instance.of_gemm(GemmInstance::Arrange { grouped }, Architectures::Sm90a));
    }
    all
}

/// Each tile: dense, with the full epilogue, and with operands in the other layout.
fn sm90_stream_k(device: &DummyDevice) -> Vec<Instance> {
    let mut all = Vec::new();
    for tile in Sm90Tile::ALL {
        let mut forms = vec![
            (PLAIN, [Major::K; 2]),
            (ALL, [Major::K; 2]),
            (PLAIN, [Major::Mn, Major::K]),
        ];
        if tile.takes_mn_major() {
            forms.extend([(PLAIN, [Major::K, Major::Mn]), (PLAIN, [Major::Mn; 2])]);
        }
        for (kind, majors) in forms {
            let plan = StreamKPlan { tile, majors };
            let shape = ProblemShapeLaunch::of((128, 128, 128), 1);
            let problem = StreamKProblemLaunch::new(shape, 0, 1, 2, 1, 0, 0, 16);
            let instance = instance!(
                device,
                units SM90_UNITS,
                sm90_stream_k_kernel,
                format!("{tile:?}-{}-{majors:?}", kind.accumulate),
                Expected::default(),
                AddressType::U32,
                sm90_operand(device, SM90_TILE_M, majors[0]),
                sm90_operand(device, tile.n(), majors[1]),
                problem,
                PartialTilesLaunch::new(device.buffer(1 << 12), device.buffer(1)),
                epilogue(device, kind),
                device.buffer(1 << 12),
                plan,
            );
            all.push(instance.of_gemm(GemmInstance::Sm90StreamK(plan), Architectures::Sm90a));
        }
    }
    all
}

/// Each tile: dense with both 16-bit output types, grouped, with the full epilogue, and with
/// operands in the other layout.
fn sm90_bf16(device: &DummyDevice) -> Vec<Instance> {
    let mut all = Vec::new();
    for tile in Sm90Tile::ALL {
        let [k_major, mn_major] = [[Major::K; 2], [Major::Mn; 2]];
        let out = |out| EpilogueKind { out, ..PLAIN };
        let mut plans = vec![
            (GroupedDim::None, PLAIN, k_major),
            (GroupedDim::None, out(FloatKind::F16), k_major),
            (GroupedDim::M, PLAIN, k_major),
            (GroupedDim::K, out(FloatKind::F32), k_major),
            (GroupedDim::None, ALL, k_major),
            (GroupedDim::None, PLAIN, [Major::Mn, Major::K]),
        ];
        if tile.takes_mn_major() {
            plans.extend([
                (GroupedDim::None, PLAIN, [Major::K, Major::Mn]),
                (GroupedDim::None, PLAIN, mn_major),
                (GroupedDim::M, PLAIN, [Major::K, Major::Mn]),
                (GroupedDim::K, out(FloatKind::F32), mn_major),
                (GroupedDim::None, ALL, mn_major),
            ]);
        }
        for (grouped, kind, majors) in plans {
            let plan = Sm90Plan {
                grouped,
                tile,
                majors,
            };
            let instance = instance!(
                device,
                units SM90_UNITS,
                sm90_bf16_kernel,
                format!(
                    "{tile:?}-{grouped:?}-{}-{:?}-{majors:?}",
                    kind.accumulate, kind.out
                ),
                Expected::default(),
                AddressType::U32,
                sm90_operand(device, SM90_TILE_M, majors[0]),
                sm90_operand(device, tile.n(), majors[1]),
                problem(device, 1),
                epilogue(device, kind),
                device.buffer(1 << 12),
                plan,
            );
            all.push(instance.of_gemm(GemmInstance::Sm90Bf16(plan, kind), Architectures::Sm90a));
        }
    }
    all
}

/// Each tile. The full epilogue and groups are only instantiated for a wide and a narrow tile,
/// because an instance takes seconds to compile.
fn sm90_w4a16(device: &DummyDevice) -> Vec<Instance> {
    let mut all = Vec::new();
    for tile in W4a16Tile::ALL {
        let f16 = EpilogueKind {
            out: FloatKind::F16,
            ..PLAIN
        };
        let plans = [
            (GroupedDim::None, PLAIN),
            (GroupedDim::M, f16),
            (GroupedDim::None, ALL),
        ];
        let count = match tile.rows_a {
            32 | 192 | 256 => plans.len(),
            _ => 1,
        };
        for (grouped, kind) in plans.into_iter().take(count) {
            let plan = W4a16Plan { grouped, tile };
            let rows_b = tile.rows_b();
            let instance = instance!(
                device,
                units tile.units(),
                sm90_w4a16_kernel,
                format!("{}-{rows_b}-{grouped:?}-{:?}", tile.rows_a, kind.out),
                Expected::default(),
                AddressType::U32,
                map(device, [tile.rows_of_copy(), 64], bf16::elem_type_native())
                    .with_swizzle(TensorMapSwizzle::B128),
                map(device, [rows_b, 16], u32::elem_type_native()),
                device.buffer(512),
                ScheduledProblemLaunch::new(
                    ProblemShapeLaunch::of((ROWS, ROWS, 64), 1),
                    device.buffer(256),
                    8,
                ),
                epilogue(device, kind),
                device.buffer(1 << 12),
                plan,
            );
            all.push(instance.of_gemm(GemmInstance::Sm90W4a16(plan), Architectures::Sm90a));
        }
    }
    all
}

/// Both tiles; the higher one also with groups and the full epilogue.
fn sm90_w4a16_mn_major(device: &DummyDevice) -> Vec<Instance> {
    let (none, m) = (GroupedDim::None, GroupedDim::M);
    let f16 = EpilogueKind {
        out: FloatKind::F16,
        ..PLAIN
    };
    let (high, low) = (W4a16MnTile::M128, W4a16MnTile::M64);
    let mut all = Vec::new();
    for (tile, grouped, kind) in [
        (high, none, PLAIN),
        (high, m, f16),
        (high, none, ALL),
        (low, none, PLAIN),
        (low, m, ALL_GROUPS),
    ] {
        let plan = W4a16MnMajorPlan { grouped, tile };
        let instance = instance!(
            device,
            units SM90_UNITS,
            sm90_w4a16_mn_major_kernel,
            format!("{tile:?}-{grouped:?}-{:?}", kind.out),
            Expected::default(),
            AddressType::U32,
            sm90_operand(device, 32, Major::K),
            map(device, [64, 32], u32::elem_type_native()).with_swizzle(TensorMapSwizzle::B128),
            device.buffer(512),
            problem(device, 1),
            epilogue(device, kind),
            device.buffer(1 << 12),
            plan,
        );
        all.push(instance.of_gemm(GemmInstance::Sm90W4a16MnMajor(plan), Architectures::Sm90a));
    }
    all
}

/// With the instruction, for GPUs that have it, and with its emulation, for Hopper.
fn sm120_block_scaled(device: &DummyDevice) -> Vec<Instance> {
    let mut all = Vec::new();
    for (multiply, architectures) in [
        (Multiply::Instruction, Architectures::Sm120),
        (Multiply::Software, Architectures::Sm90a),
    ] {
        use BlockScaled::{Mxfp8, Nvfp4};
        for (format, strips, k, grouped, kind) in [
            (Nvfp4, 2, 128, GroupedDim::None, PLAIN),
            (Nvfp4, 1, 128, GroupedDim::None, PLAIN),
            (Nvfp4, 2, 64, GroupedDim::M, PLAIN),
            (Nvfp4, 2, 128, GroupedDim::None, ALL),
            (Nvfp4, 1, 16, GroupedDim::M, ALL),
            (Nvfp4, 2, 32, GroupedDim::None, ALL),
            (Nvfp4, 2, 16, GroupedDim::K, ALL),
            (Nvfp4, 1, 64, GroupedDim::K, PLAIN),
            (Mxfp8, 2, 32, GroupedDim::None, PLAIN),
            (Mxfp8, 1, 32, GroupedDim::None, ALL),
            (Mxfp8, 2, 32, GroupedDim::M, ALL),
            (Mxfp8, 2, 32, GroupedDim::K, ALL),
        ] {
            let plan = Sm120Plan {
                grouped,
                tile: Sm120Tile {
                    format,
                    strips,
                    multiply,
                },
                pieces: Pieces::of(format, k),
            };
            let expected = match multiply {
                Multiply::Instruction => NO_SPILLS,
                Multiply::Software => Expected::default(),
            };
            let instance = instance!(
                device,
                sm120_block_scaled_kernel,
                format!(
                    "{format:?}-{strips}-{k}-{grouped:?}-{:?}-{multiply:?}",
                    kind.out
                ),
                expected,
                AddressType::U32,
                packed(device),
                packed(device),
                problem(device, 1),
                epilogue(device, kind),
                device.buffer(256),
                plan,
            );
            all.push(instance.of_gemm(GemmInstance::Sm120BlockScaled(plan), architectures));
        }
    }
    all
}

/// Shapes for all sizes of `m`, and the full epilogue with rows that end in partial vectors.
fn small_m(device: &DummyDevice) -> Vec<Instance> {
    let (whole, tail, halves) = ((false, false), (true, false), (true, true));
    let mut all = Vec::new();
    for (warps, strips, columns, ahead, (tail, halves), left, kind) in [
        (16, 2, 1, 1, whole, SmallMLeft::Packed, PLAIN),
        (16, 1, 1, 1, tail, SmallMLeft::Packed, ALL),
        (16, 2, 1, 1, whole, SmallMLeft::Bf16, PLAIN),
        (8, 2, 2, 2, tail, SmallMLeft::Bf16, ALL),
        (16, 1, 1, 2, whole, SmallMLeft::Staged(1792), PLAIN),
        (32, 1, 1, 1, whole, SmallMLeft::Staged(1024), PLAIN),
        (32, 1, 1, 1, tail, SmallMLeft::Bf16, ALL),
        (32, 1, 1, 1, halves, SmallMLeft::Packed, ALL),
        (8, 2, 2, 2, whole, SmallMLeft::Packed, PLAIN),
        (8, 1, 2, 2, whole, SmallMLeft::Packed, PLAIN),
        (16, 2, 1, 2, whole, SmallMLeft::Packed, PLAIN),
        (8, 2, 2, 2, halves, SmallMLeft::Bf16, ALL),
        (16, 2, 1, 1, halves, SmallMLeft::Packed, PLAIN),
        (8, 2, 2, 2, tail, SmallMLeft::Packed, ALL),
    ] {
        let work = (warps, strips, columns, ahead);
        let shape = small_m_shape(device, work, (tail, halves), left, false);
        all.push(small_m_instance(device, shape, kind));
    }
    // One chunk per warp.
    for left in [SmallMLeft::Packed, SmallMLeft::Bf16] {
        let shape = SmallMShape {
            early: true,
            ..small_m_shape(device, (16, 1, 1, 1), whole, left, false)
        };
        all.push(small_m_instance(device, shape, PLAIN));
    }
    all.extend(small_m_fused(device));
    all
}

fn small_m_instance(device: &DummyDevice, shape: SmallMShape, kind: EpilogueKind) -> Instance {
    let instance = instance!(
        device,
        units 32 * shape.warps as u32,
        small_m_kernel,
        small_m_name(shape),
        NO_SPILLS,
        AddressType::U32,
        mixed(device),
        packed(device),
        ProblemShapeLaunch::of((8, 64, 256), 1),
        epilogue(device, kind),
        device.buffer(64),
        shape,
    );
    instance.of_gemm(GemmInstance::SmallM(shape), Architectures::All)
}

/// Returns the name that distinguishes an instance.
fn small_m_name(shape: SmallMShape) -> String {
    let (warps, strips, columns, ahead) = (shape.warps, shape.strips, shape.columns, shape.ahead);
    let (tail, halves, left) = (shape.tail, shape.halves, shape.left);
    let early = if shape.early { "-Early" } else { "" };
    let swiglu = if shape.swiglu.is_some() {
        "-SwiGlu"
    } else {
        ""
    };
    format!("{warps}-{strips}-{columns}-{ahead}-{tail}-{halves}-{left:?}{early}{swiglu}")
}

/// A small-M shape with several chunks per warp.
fn small_m_shape(
    device: &DummyDevice,
    (warps, strips, columns, ahead): (usize, usize, usize, usize),
    (tail, halves): (bool, bool),
    left: SmallMLeft,
    swiglu: bool,
) -> SmallMShape {
    let compute = if device.has_nearest() { 100 } else { 90 };
    SmallMShape {
        warps,
        strips,
        columns,
        ahead,
        early: false,
        tail,
        halves,
        left,
        converts: device.conversion.has_e4m3(),
        late: loads_a_late(columns, left, Some(compute)),
        overlaps: device.overlaps,
        swiglu: swiglu.then_some(device.conversion),
    }
}

/// SwiGLU epilogue, and RMSNorm prologue for one row and for several.
fn small_m_fused(device: &DummyDevice) -> Vec<Instance> {
    let mut all = Vec::new();
    for (work, tail) in [
        ((8, 2, 1, 1), false),
        ((16, 1, 1, 1), true),
        ((8, 2, 2, 2), false),
    ] {
        let shape = small_m_shape(device, work, (tail, false), SmallMLeft::Bf16, true);
        all.push(small_m_instance(device, shape, PLAIN));
    }
    for (work, swiglu, rows, cols, residual) in [
        ((16, 1, 1, 1), true, 1, 2048, true),
        ((16, 1, 1, 1), false, 1, 2048, true),
        ((16, 1, 1, 1), true, 1, 4096, true),
        ((16, 1, 1, 1), false, 1, 4096, false),
        ((8, 1, 2, 2), false, 16, 512, true),
    ] {
        let left = SmallMLeft::Normed;
        let shape = SmallMShape {
            early: work == (16, 1, 1, 1) && cols <= 2048,
            ..small_m_shape(device, work, (false, false), left, swiglu)
        };
        let norm = SmallMNorm {
            plan: prologue_plan(device, cols, residual, shape.warps),
            rows,
        };
        let b = |len| device.buffer(len);
        let instance = instance!(
            device,
            units 32 * shape.warps as u32,
            small_m_norm_kernel,
            format!("{}-{rows}-{cols}-{residual}", small_m_name(shape)),
            NO_SPILLS,
            AddressType::U32,
            NormInputsLaunch::new(b(64), b(64), b(64), b(64), 1e-6),
            b(64),
            packed(device),
            ProblemShapeLaunch::of((rows, 64, cols), 1),
            epilogue(device, EpilogueKind { a: Factor::One, ..PLAIN }),
            device.buffer(64),
            norm,
            shape,
        );
        all.push(instance.of_gemm(GemmInstance::SmallM(shape), Architectures::All));
    }
    all
}

/// Both tiles, all row alignments, matrices of more than 2^31 elements, and an MN-major `b`.
fn cmma(device: &DummyDevice) -> Vec<Instance> {
    let (short, long) = (AddressType::U32, AddressType::U64);
    let (none, m, k) = (GroupedDim::None, GroupedDim::M, GroupedDim::K);
    let (large, small) = (CmmaTile::M128, CmmaTile::M32);
    let out = |out, kind: EpilogueKind| EpilogueKind { out, ..kind };
    let (f16, bf16) = (out(FloatKind::F16, PLAIN), out(FloatKind::Bf16, ALL_GROUPS));
    // Packed operands, and MN-major `b`.
    let both = ([true, true], false);
    let neither = ([false, false], false);
    let weight = ([false, true], false);
    let mn_major = ([false, true], true);
    let mut all = Vec::new();
    for (address, width, grouped, tile, form, kind) in [
        (short, 8, none, large, both, PLAIN),
        (long, 8, none, large, both, PLAIN),
        (short, 8, none, large, both, ALL_GROUPS),
        (short, 8, none, small, weight, f16),
        (short, 1, none, large, neither, PLAIN),
        (short, 8, m, small, both, ALL_GROUPS),
        (short, 4, m, large, weight, bf16),
        (short, 8, k, large, both, ALL_GROUPS),
        (short, 8, none, large, mn_major, PLAIN),
        (short, 8, m, large, mn_major, bf16),
        (short, 8, m, small, mn_major, bf16),
    ] {
        let (packed, b_mn_major) = form;
        let plan = CmmaPlan {
            grouped,
            tile,
            packed,
            b_mn_major,
            ordered_add: true,
        };
        let major = if b_mn_major { "-MnMajor" } else { "" };
        let instance = instance!(
            device,
            units CMMA_UNITS as u32,
            cmma_kernel,
            format!(
                "{address:?}-{width}-{grouped:?}-{tile:?}-{packed:?}-{:?}-{}{major}",
                kind.out, kind.accumulate
            ),
            Expected::default(),
            address,
            width,
            mixed(device),
            mixed(device),
            problem(device, 1),
            epilogue(device, kind),
            device.buffer(1024),
            plan,
            kind.out.storage_type(),
        );
        all.push(instance.of_gemm(GemmInstance::Cmma(plan, address), Architectures::All));
    }
    all
}

/// Each kind of groups, with packed and with bf16 operands.
fn scalar_grouped(device: &DummyDevice) -> Vec<Instance> {
    let mut all = Vec::new();
    for (grouped, packed, b_mn_major, kind) in [
        (GroupedDim::None, [true, false], false, ALL),
        (GroupedDim::M, [true, true], false, ALL_GROUPS),
        (GroupedDim::K, [false, true], false, PLAIN),
        (GroupedDim::M, [false, true], true, PLAIN),
    ] {
        let plan = ScalarPlan {
            grouped,
            packed,
            b_mn_major,
            ordered_add: true,
        };
        let major = if b_mn_major { "-MnMajor" } else { "" };
        let instance = instance!(
            device,
            scalar_grouped_kernel,
            format!("{grouped:?}-{packed:?}{major}"),
            NO_SPILLS,
            AddressType::U64,
            mixed(device),
            mixed(device),
            problem(device, 2),
            epilogue(device, kind),
            device.buffer(1024),
            plan,
            kind.out.storage_type(),
        );
        all.push(instance.of_gemm(GemmInstance::Scalar(plan), Architectures::All));
    }
    all
}
