//! Instances of the kernels of embeddings, for the registry.

use cubecl::prelude::*;

use super::kernel::{
    LookUpLaunch, LookUpPlan, SortedTokensLaunch, embedding_kernel, join_runs_kernel,
    sum_runs_kernel,
};
use crate::{
    cube::row_blocks::RowPlan,
    registry::instance::{DummyDevice, Expected, Instance, instance},
    sort::{PlacePlan, SortPlan, TokensLaunch, count_digits_kernel, place_kernel, scan_kernel},
    tensor::FloatKind,
};

/// Nothing is launched, so sizes do not matter.
const TOKENS: usize = 256;
const VOCAB: usize = 256;
const COLS: usize = 256;
const SORT: SortPlan = SortPlan { tile: 256, bits: 8 };

/// For rows that are not whole blocks of 8: ptxas keeps some values that are used before and after
/// the loop on the stack, for sm_90a or for sm_100a, for any number of rows in flight.
const ODD_ROWS: Expected = Expected {
    spills: None,
    ..Expected::NONE
};

/// Returns rows as kernels load them: whole blocks, whole words, elements.
pub(crate) fn row_plans(kind: FloatKind) -> Vec<(usize, RowPlan, ElemType)> {
    let word = u32::elem_type_native();
    let plan = |whole, elements| RowPlan {
        elements,
        whole,
        kind,
    };
    let mut plans = vec![(4, plan(true, false), word), (1, plan(false, false), word)];
    if kind != FloatKind::F32 {
        plans.push((1, plan(false, true), u16::elem_type_native()));
    }
    plans
}

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let sorted = || SortedTokensLaunch::new(b(TOKENS), b(TOKENS), TOKENS, VOCAB, COLS);
    let wide = AddressType::U64;
    let mut all = vec![
        instance!(
            device,
            count_digits_kernel,
            "",
            Expected::NONE,
            b(TOKENS),
            b(TOKENS),
            TOKENS,
            256,
            8,
            SORT
        ),
        instance!(
            device,
            scan_kernel,
            "",
            Expected::NONE,
            b(TOKENS),
            TOKENS,
            256
        ),
    ];
    for first in [false, true] {
        all.push(instance!(
            device,
            place_kernel,
            format!("{first}"),
            Expected::NONE,
            TokensLaunch::new(b(TOKENS), b(TOKENS)),
            b(TOKENS),
            b(TOKENS),
            b(TOKENS),
            TOKENS,
            256,
            8,
            PlacePlan { sort: SORT, first }
        ));
    }
    for width in [1, 4] {
        all.push(instance!(
            device,
            join_runs_kernel,
            format!("{width}"),
            Expected::NONE,
            wide,
            width,
            b(TOKENS),
            sorted(),
            b(TOKENS)
        ));
    }
    let kinds = [FloatKind::F32, FloatKind::F16, FloatKind::Bf16];
    for (width, plan, elem) in kinds.into_iter().flat_map(row_plans) {
        let tag = format!("{:?}-{}-{}", plan.kind, plan.whole, plan.elements);
        all.push(instance!(
            device,
            sum_runs_kernel,
            &tag,
            match plan.whole {
                true => Expected::NONE,
                false => ODD_ROWS,
            },
            wide,
            width,
            width,
            b(TOKENS),
            sorted(),
            b(TOKENS),
            b(TOKENS),
            plan,
            elem
        ));
        for (to_width, to, to_elem) in kinds.into_iter().flat_map(row_plans) {
            if to.whole != plan.whole {
                continue;
            }
            all.push(instance!(
                device,
                embedding_kernel,
                format!("{tag}-to-{:?}-{}", to.kind, to.elements),
                Expected::NONE,
                wide,
                width,
                to_width,
                b(TOKENS),
                LookUpLaunch::new(b(TOKENS), TOKENS, 0, VOCAB, VOCAB, COLS),
                b(TOKENS),
                LookUpPlan {
                    from: plan,
                    to,
                    conversion: device.conversion,
                    overlaps: device.overlaps,
                },
                elem,
                to_elem
            ));
        }
    }
    all
}
