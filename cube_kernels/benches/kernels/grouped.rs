//! Tokens sorted by expert, the experts' weights, and the permutation and padding of rows.

use std::cell::LazyCell;

use crate::quantize::{self, AmaxRequest, TargetSpec};
use nvfp4_formats::{BlockScaling, ErrorNorm, QuantParams, Usage, reference::Activation};
use nvfp4_kernels::{
    activation,
    gemm::proof::align_groups,
    moe,
    tensor::{Groups, Matrix},
};

use crate::{
    dense,
    harness::Section,
    inputs::{
        Inputs, NEAREST, PACKED, Rotated, copy_of, equal_groups, groups_of, plain_and_transformed,
        rht, stochastic, with_amax, words,
    },
    packed,
};

/// Multiple of rows that grouped GEMMs require.
const ALIGNMENT: usize = 32;

/// Times tokens in groups of nearly equal numbers of rows, with offsets in device memory.
pub fn tokens(section: &mut Section<'_>, inputs: &Inputs) {
    // Baseline of the groups.
    packed::grouped(&mut section.brief(), inputs, &Groups::One, inputs.amax());
    for count in [1usize, 8, 32, 64, 128, 256] {
        let groups = groups_of(&equal_groups(&section.client(), inputs.rows, count));
        copies(section, inputs, &groups);
        if [8, 64, 256].contains(&count) {
            other_copies(&mut section.brief(), inputs, &groups);
        }
    }
}

/// Times the weights of experts: matrices of equal size, stacked vertically.
pub fn experts(section: &mut Section<'_>, inputs: &Inputs, count: usize) {
    let groups = Groups::Batch(count);
    dense::tiles(section, "", inputs, &groups);
    copies(section, inputs, &groups);
}

/// Times the quantization of all groups' rows in training.
fn copies(section: &mut Section<'_>, inputs: &Inputs, groups: &Groups) {
    let client = section.client();
    let suffix = format!(", {} groups", groups.count());
    dense::amax_pair(section, &suffix, inputs, groups);
    let found = LazyCell::new(|| {
        let request = plain_and_transformed();
        let found = quantize::amaxes(&client, inputs.get(0), groups, &request).unwrap();
        [found.rows.unwrap(), found.cols.unwrap()]
    });
    let name = format!("row RN + col RHT SR, one read{suffix}");
    dense::pair(section, &name, inputs, groups, || {
        let copies = [copy_of(NEAREST, None), copy_of(stochastic(), rht())];
        let [row, col] = copies;
        [with_amax(&found[0], row), with_amax(&found[1], col)]
    });
}

/// Times less frequent quantizations of groups' rows.
fn other_copies(section: &mut Section<'_>, inputs: &Inputs, groups: &Groups) {
    let client = section.client();
    let suffix = format!(", {} groups", groups.count());
    let found = LazyCell::new(|| {
        let request = AmaxRequest {
            cols: None,
            ..plain_and_transformed()
        };
        let found = quantize::amaxes(&client, inputs.get(0), groups, &request).unwrap();
        found.rows.unwrap()
    });
    let scaled = |scaling| {
        TargetSpec::new(QuantParams {
            scaling,
            ..QuantParams::nvfp4(NEAREST)
        })
    };
    for (name, copy) in [
        ("row RN", scaled(BlockScaling::Standard)),
        ("row SR", TargetSpec::new(stochastic())),
        (
            "row 4/6 MAE",
            scaled(BlockScaling::FourOverSix(ErrorNorm::Mae)),
        ),
    ] {
        let name = format!("{name}{suffix}");
        dense::single(section, &name, inputs, groups, Usage::Rowwise, || {
            with_amax(&found, copy.clone())
        });
    }
    dense::tiles(section, &suffix, inputs, groups);
    packed::grouped(section, inputs, groups, &found);
}

/// Times the permutation of rows to the experts and back.
pub fn rows(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    let (count, bytes) = (inputs.rows, inputs.bytes(0.0));
    let groups = equal_groups(&client, count, 8);
    // As a router would leave them: in no order, each row once.
    let places = words(
        &client,
        (0..count as u32).map(|row| row.wrapping_mul(40_503) % count as u32),
    );
    let weights = words(&client, (0..count).map(|_| 0.5f32.to_bits()));
    let half = count / 2;
    section.time("rows permuted", 2.0 * bytes, |i| {
        moe::moe_permute(&client, inputs.get(i), &places, count).unwrap();
    });
    let (of_experts, request) = (groups_of(&groups), plain_and_transformed());
    section.time(
        "rows permuted, amax and amax after the RHT",
        2.0 * bytes,
        |i| {
            let rows = (&places, count);
            moe::moe_permute_with_amaxes(&client, inputs.get(i), rows, &of_experts, &request)
                .unwrap();
        },
    );
    section.time("rows gathered", 2.0 * bytes, |i| {
        moe::moe_unpermute(&client, inputs.get(i), &places, None, (count, 1)).unwrap();
    });
    section.time("rows combined, 2 to 1", 1.5 * bytes, |i| {
        let weights = Some(&weights);
        moe::moe_unpermute(&client, inputs.get(i), &places, weights, (half, 2)).unwrap();
    });
    section.time("rows combined, 2 to 1, backward", 2.5 * bytes, |i| {
        let grad = Matrix {
            rows: half,
            ..inputs.get(i + 1).clone()
        };
        let x = inputs.get(i);
        moe::moe_unpermute_backward(&client, &grad, x, &places, &weights, (2, moe::Named::All))
            .unwrap();
    });
    section.time("sums of groups", bytes, |i| {
        moe::segment_sum(&client, inputs.get(i), &groups).unwrap();
    });
    section.time("sums of columns", bytes, |i| {
        moe::column_sums(&client, inputs.get(i)).unwrap();
    });
    section.time("rows of no group cleared", 0.0, |i| {
        moe::zero_padding_rows(&client, inputs.get(i), &groups).unwrap();
    });
    section.time("SwiGLU of groups", 1.5 * bytes, |i| {
        let x = (inputs.get(i), None);
        let groups = groups_of(&groups);
        activation::activation_of_groups(&client, Activation::SwiGlu, x, &groups).unwrap();
    });
    section.time("maxima of groups for each row", 4.0 * count as f64, |_| {
        moe::broadcast_group_values(&client, &weights, &groups, count).unwrap();
    });
    for groups in [1, 8, 16] {
        let offsets = equal_groups(&client, count, groups);
        section.time(&format!("padded, {groups} groups"), 2.0 * bytes, |i| {
            moe::pad_groups(&client, inputs.get(i), &offsets, ALIGNMENT).unwrap();
        });
        let name = format!("padded, {groups} groups alone");
        section.time(&name, 2.0 * bytes, |i| {
            moe::pad_groups_only(&client, inputs.get(i), &offsets, ALIGNMENT).unwrap();
        });
        let padded = LazyCell::new(|| {
            let rows = moe::pad_groups(&client, inputs.get(0), &offsets, ALIGNMENT)
                .unwrap()
                .0
                .rows;
            Inputs::bf16(&client, rows, inputs.cols)
        });
        section.time(&format!("unpadded, {groups} groups"), 2.0 * bytes, |i| {
            moe::unpad_groups(&client, padded.get(i), count, &offsets, ALIGNMENT).unwrap();
        });
    }
    side_by_side(section, inputs);
}

/// Times quantized groups as operands of grouped GEMMs.
fn side_by_side(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    for count in [8, 64] {
        let offsets = equal_groups(&client, inputs.rows, count);
        let groups = groups_of(&offsets);
        let found = LazyCell::new(|| {
            let request = plain_and_transformed();
            quantize::amaxes(&client, inputs.get(0), &groups, &request).unwrap()
        });
        let name = format!("row RN + col RHT SR, side by side, one read, {count} groups");
        section.time(&name, inputs.bytes(2.0), |i| {
            let row = with_amax(found.rows.as_ref().unwrap(), copy_of(NEAREST, None));
            let col = with_amax(found.cols.as_ref().unwrap(), copy_of(stochastic(), rht()));
            let x = inputs.get(i);
            quantize::quantize_side_by_side(&client, x, &offsets, Some(&row), Some(&col)).unwrap();
        });
        // As `tcgen05` reads groups along K.
        let made = Rotated::new(inputs.elements() * PACKED, |i| {
            let col = with_amax(found.cols.as_ref().unwrap(), copy_of(stochastic(), rht()));
            let x = inputs.get(i);
            let made = quantize::quantize_side_by_side(&client, x, &offsets, None, Some(&col));
            made.unwrap().1.unwrap()
        });
        // Every group of the packed tensor begins at a multiple of the transform.
        let columns = offsets.aligned(&client, inputs.rows, 16).unwrap();
        let name = format!("groups along K aligned to 64 columns, {count} groups");
        section.time(&name, 2.0 * inputs.elements() * PACKED, |i| {
            align_groups(&client, &made[i], &columns).unwrap();
        });
    }
}
