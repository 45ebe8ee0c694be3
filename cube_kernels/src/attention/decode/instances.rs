//! Instances of the kernels of decoding, for the registry.

use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
};

use super::{
    CacheKind, ROWS_OF_TEAM, UNITS,
    append::{CacheShapeLaunch, NewTokensLaunch, append_kernel},
    kernel::decode_run_kernel,
    merge::DecodeOutputLaunch,
    mma::decode_mma_kernel,
    mma_merge::MmaOutputLaunch,
    plan::{DecodePlan, WARPS},
};
use crate::{
    attention::scalar::problem::HeadsViewLaunch,
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Nothing is launched, so buffer lengths do not matter.
const LEN: usize = 1 << 14;

/// Shared memory per cube on Hopper.
const SHARED: usize = 227 << 10;

/// Returns all instances that `device` uses: heads, rows, types and caches of common models, and
/// the widest of each.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let (f32, f16, bf16) = (FloatKind::F32, FloatKind::F16, FloatKind::Bf16);
    let (float, e4m3) = (CacheKind::Float, CacheKind::E4m3);
    let cases = [
        (64, 4, bf16, float, AddressType::U32),
        (64, 4, bf16, e4m3, AddressType::U32),
        (64, 8, f16, float, AddressType::U32),
        (80, 1, bf16, float, AddressType::U32),
        (128, 1, f32, float, AddressType::U32),
        (128, 2, bf16, e4m3, AddressType::U32),
        (128, 4, bf16, float, AddressType::U32),
        (128, 8, bf16, float, AddressType::U64),
        (128, 8, bf16, e4m3, AddressType::U32),
        (256, 4, bf16, float, AddressType::U32),
    ];
    cases
        .into_iter()
        .flat_map(|(head, rows, kind, cache, address)| {
            let plan = DecodePlan {
                head,
                rows,
                width: if kind == f32 { 4 } else { 8 },
                rotary: head != 80,
                softcap: rows == 8,
                unroll: true,
                planes: true,
                teams: rows.div_ceil(ROWS_OF_TEAM),
                staged: 0,
                concurrent: true,
                overlaps: device.overlaps,
                kind,
                cache,
                mma: false,
                conversion: device.conversion,
            };
            let mut all = of_plan(device, plan.staged_in(SHARED), address);
            if let Some(plan) = plan.by_mma_in(SHARED) {
                all.extend(of_mma(device, plan, address));
            }
            all
        })
        .collect()
}

macro_rules! tokens {
    ($device:expr) => {{
        let b = || $device.buffer(LEN);
        let view = || HeadsViewLaunch::new(b(), 0, 1024);
        NewTokensLaunch::new(view(), view(), view(), b(), b(), 1, 1, b(), b(), 64)
    }};
}

fn shape(plan: DecodePlan) -> CacheShapeLaunch {
    let group = plan.rows as u32;
    CacheShapeLaunch::new(64, 2, group, 32, 0, 0.125, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
}

fn tag(plan: DecodePlan, address: AddressType) -> String {
    let DecodePlan {
        head,
        rows,
        kind,
        cache,
        ..
    } = plan;
    format!("{head}-{rows}-{kind:?}-{cache:?}-{address:?}")
}

/// Returns the matrix-instruction kernel.
fn of_mma(device: &DummyDevice, plan: DecodePlan, address: AddressType) -> Vec<Instance> {
    let b = || device.buffer(LEN);
    vec![instance!(
        device,
        units(32 * WARPS) as u32,
        decode_mma_kernel,
        &tag(plan, address),
        Expected::NONE,
        address,
        plan.width,
        tokens!(device),
        b(),
        b(),
        shape(plan),
        MmaOutputLaunch::new(b(), b(), b(), b()),
        plan,
        plan.kind.storage_type()
    )]
}

fn of_plan(device: &DummyDevice, plan: DecodePlan, address: AddressType) -> Vec<Instance> {
    let b = || device.buffer(LEN);
    let storage = plan.kind.storage_type();
    let cached = match plan.cache {
        CacheKind::Float => storage,
        CacheKind::E4m3 => ElemType::UInt(UIntKind::U8),
    };
    let tag = tag(plan, address);
    vec![
        instance!(
            device,
            append_kernel,
            &tag,
            Expected::NONE,
            address,
            plan.width,
            tokens!(device),
            b(),
            b(),
            shape(plan),
            b(),
            plan,
            storage,
            cached
        ),
        instance!(
            device,
            units(plan.teams * UNITS) as u32,
            decode_run_kernel,
            &tag,
            Expected::NONE,
            address,
            plan.width,
            tokens!(device),
            b(),
            b(),
            shape(plan),
            DecodeOutputLaunch::new(b(), b(), b()),
            plan,
            storage,
            cached
        ),
    ]
}
