//! Instances of the kernels of post-training quantization, for the registry.

use cubecl::{
    ir::{ElemType, FloatKind as CubeFloat},
    prelude::*,
};
use nvfp4_formats::ptq::{Rule, ScaleChoice};

use super::block::{BlockPlan, GlobalLaunch};
use super::compensate::{
    PanelColumnsLaunch, PanelOutLaunch, compensate_panel_kernel, transpose_to_f64_kernel,
};
use super::factor::{
    PanelRowsLaunch, factor_block_kernel, reversed_moments_kernel, solve_panel_kernel,
};
use super::moments::feature_sums_kernel;
use super::products::{ProductPlan, ProductShapeLaunch, products_kernel};
use super::round::{PartBlocksLaunch, round_rows_kernel};
use super::square::{fill_diagonal_kernel, reverse_kernel};
use crate::registry::instance::{DummyDevice, Expected, Instance, instance};

/// Width of the layer. Nothing is launched, so buffer lengths do not matter.
const K: usize = 256;

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = || device.buffer(K * K);
    let wide = AddressType::U64;
    let mut all = vec![
        instance!(
            device,
            feature_sums_kernel,
            "",
            Expected::NONE,
            wide,
            b(),
            b(),
            b(),
            0,
            64,
            K
        ),
        instance!(
            device,
            fill_diagonal_kernel,
            "",
            Expected::NONE,
            wide,
            b(),
            K,
            1.0
        ),
        instance!(
            device,
            reverse_kernel,
            "",
            Expected::NONE,
            wide,
            b(),
            b(),
            K * K
        ),
        instance!(
            device,
            reversed_moments_kernel,
            "",
            Expected::NONE,
            wide,
            b(),
            b(),
            b(),
            b(),
            K,
            64.0
        ),
        instance!(
            device,
            factor_block_kernel,
            "",
            Expected::NONE,
            wide,
            b(),
            b(),
            b(),
            K,
            0,
            64,
            device.conversion
        ),
        instance!(
            device,
            solve_panel_kernel,
            "",
            Expected::NONE,
            wide,
            b(),
            b(),
            b(),
            PanelRowsLaunch::new(K, 0, 64, 0, 64, K),
            device.conversion
        ),
        instance!(
            device,
            transpose_to_f64_kernel,
            "",
            Expected::NONE,
            wide,
            b(),
            b(),
            0,
            K,
            K,
            K
        ),
    ];
    for (name, kind, subtracts, upper) in [
        ("moments", CubeFloat::F32, false, true),
        ("factor", CubeFloat::F64, true, true),
        ("inverse", CubeFloat::F64, true, false),
    ] {
        let plan = ProductPlan {
            side: 16,
            subtracts,
            upper,
            conversion: device.conversion,
        };
        // Of the moments, ptxas spills words of the shape, which are read after the loop.
        let expected = Expected {
            spills: subtracts.then_some(false),
            ..Expected::NONE
        };
        all.push(instance!(
            device,
            products_kernel,
            name,
            expected,
            wide,
            b(),
            b(),
            b(),
            ProductShapeLaunch::new(64, 0, K, 0, K, 0, K, K, K),
            plan,
            ElemType::Float(kind)
        ));
    }
    for rule in [Rule::ModelOpt, Rule::CompressedTensors] {
        for choice in [
            ScaleChoice::Max,
            ScaleChoice::FourOverSix,
            ScaleChoice::Search,
        ] {
            let plan = BlockPlan {
                rule,
                choice,
                conversion: device.conversion,
            };
            let name = format!("{rule:?}-{choice:?}");
            all.push(instance!(
                device,
                round_rows_kernel,
                &name,
                Expected::NONE,
                wide,
                b(),
                b(),
                b(),
                b(),
                GlobalLaunch::new(1.0, 1.0),
                PartBlocksLaunch::new(0, K * K / 16, K / 16),
                plan
            ));
            all.push(instance!(
                device,
                compensate_panel_kernel,
                &name,
                Expected::NONE,
                wide,
                b(),
                b(),
                b(),
                PanelOutLaunch::new(b(), b(), b()),
                PanelColumnsLaunch::new(K, K, 0, 128),
                GlobalLaunch::new(1.0, 1.0),
                plan
            ));
        }
    }
    all
}
