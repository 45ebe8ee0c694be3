//! Kernels that read one matrix.

use crate::quantize::{self, AmaxRequest, TargetSpec};
use nvfp4_formats::{
    AmaxGranularity, BlockScaling, ErrorNorm, Format, Hadamard, HadamardSize, QuantParams,
    Rounding, StoredForm, Usage,
};
use nvfp4_kernels::{
    gemm::proof::decode,
    tensor::{FloatKind, Groups},
    zeroed,
};

use crate::{
    harness::Section,
    inputs::{
        Inputs, MX, MXFP4, NEAREST, copy_of, plain_and_transformed, rht, stochastic, with_amax,
        words,
    },
};

/// Tensors per training step.
const PER_STEP: usize = 32;
const ONE: &Groups = &Groups::One;
const MAE: BlockScaling = BlockScaling::FourOverSix(ErrorNorm::Mae);
const MSE: BlockScaling = BlockScaling::FourOverSix(ErrorNorm::Mse);
const SWIZZLED: StoredForm = StoredForm::Tiles;

pub fn copy(section: &mut Section<'_>, inputs: &Inputs) {
    let bytes = inputs.rows * inputs.cols * inputs.dtype.size();
    section.copy(bytes, |i| &inputs.get(i).handle);
}

/// Times the quantization of activations and gradients in training.
pub fn activations(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    section.time("amax", inputs.bytes(0.0), |i| {
        quantize::amax(&client, inputs.get(i), None).unwrap();
    });
    amax_pair(section, "", inputs, ONE);
    for (name, rounding, hadamard) in [
        ("row RN + col RN, one read", NEAREST, None),
        ("row RN + col RHT RN, one read", NEAREST, rht()),
        ("row RN + col RHT SR, one read", stochastic(), rht()),
    ] {
        let copies = [copy_of(NEAREST, None), copy_of(rounding, hadamard)];
        pair_of(section, name, inputs, copies);
    }
    for (name, rounding) in [("row RN", NEAREST), ("row SR", stochastic())] {
        row(section, name, inputs, TargetSpec::new(rounding));
    }
    for (name, rounding) in [("per token RN", NEAREST), ("per token SR", stochastic())] {
        per_token(section, name, inputs, TargetSpec::new(rounding));
    }
}

/// Times the two amax values that training computes, for each group.
pub fn amax_pair(section: &mut Section<'_>, suffix: &str, inputs: &Inputs, groups: &Groups) {
    let client = section.client();
    let name = format!("amax plain + RHT, one read{suffix}");
    section.time(&name, inputs.bytes(0.0), |i| {
        quantize::amaxes(&client, inputs.get(i), groups, &plain_and_transformed()).unwrap();
    });
}

/// Times both quantized tensors of each group, as specified by `requests`.
pub fn pair(
    section: &mut Section<'_>,
    name: &str,
    inputs: &Inputs,
    groups: &Groups,
    requests: impl Fn() -> [TargetSpec; 2],
) {
    let client = section.client();
    section.time(name, inputs.bytes(2.0), |i| {
        let [row, col] = requests();
        quantize::quantize_both(&client, inputs.get(i), groups, &row, &col).unwrap();
    });
}

/// Times one quantized tensor of each group, as specified by `request`.
pub fn single(
    section: &mut Section<'_>,
    name: &str,
    inputs: &Inputs,
    groups: &Groups,
    usage: Usage,
    request: impl Fn() -> TargetSpec,
) {
    let client = section.client();
    section.time(name, inputs.bytes(1.0), |i| {
        quantize::quantize(&client, inputs.get(i), groups, usage, &request()).unwrap();
    });
}

fn pair_of(section: &mut Section<'_>, name: &str, inputs: &Inputs, copies: [TargetSpec; 2]) {
    pair(section, name, inputs, ONE, || {
        copies.clone().map(|copy| inputs.with(copy))
    });
}

fn row(section: &mut Section<'_>, name: &str, inputs: &Inputs, copy: TargetSpec) {
    single(section, name, inputs, ONE, Usage::Rowwise, || {
        inputs.with(copy.clone())
    });
}

fn col(section: &mut Section<'_>, name: &str, inputs: &Inputs, copy: TargetSpec) {
    single(section, name, inputs, ONE, Usage::Columnwise, || {
        inputs.with(copy.clone())
    });
}

fn per_token(section: &mut Section<'_>, name: &str, inputs: &Inputs, copy: TargetSpec) {
    let client = section.client();
    section.time(name, inputs.bytes(1.0), |i| {
        quantize::quantize_per_token(&client, inputs.get(i), &copy).unwrap();
    });
}

/// Times the quantization of weights in training, for each group.
pub fn tiles(section: &mut Section<'_>, suffix: &str, inputs: &Inputs, groups: &Groups) {
    for (policy, scaling) in [("", BlockScaling::Standard), (", 4/6", MAE)] {
        let name = format!("16x16 tiles{policy}, both copies{suffix}");
        tiles_with(section, &name, inputs, groups, (scaling, StoredForm::Rows));
    }
}

fn tiles_with(
    section: &mut Section<'_>,
    name: &str,
    inputs: &Inputs,
    groups: &Groups,
    (scaling, layout): (BlockScaling, StoredForm),
) {
    let client = section.client();
    let amax = words(&client, (0..groups.count()).map(|_| 1.0f32.to_bits()));
    section.time(name, inputs.bytes(2.0), |i| {
        let x = inputs.get(i);
        quantize::quantize_tile_with(&client, x, groups, &amax, scaling, [layout; 2]).unwrap();
    });
}

/// Times all other quantizations of one matrix.
pub fn policies(section: &mut Section<'_>, inputs: &Inputs) {
    let other_maxima = [
        ("amax of rows", Some(AmaxGranularity::PerRow), None),
        (
            "amax of columns",
            None,
            Some((AmaxGranularity::PerRow, None)),
        ),
        (
            "amax of rows + columns, one read",
            Some(AmaxGranularity::PerRow),
            Some((AmaxGranularity::PerRow, None)),
        ),
        (
            "amax RHT-128",
            None,
            Some((AmaxGranularity::PerTensor, rht_of(HadamardSize::H128))),
        ),
    ];
    let client = section.client();
    for (name, rows, cols) in other_maxima {
        section.time(name, inputs.bytes(0.0), |i| {
            let request = AmaxRequest { rows, cols };
            quantize::amaxes(&client, inputs.get(i), ONE, &request).unwrap();
        });
    }
    let nearest = || TargetSpec::new(NEAREST);
    let swizzled = |copy: TargetSpec| copy.form(StoredForm::Tiles);
    let headroom = || scaled(stochastic(), BlockScaling::Headroom);
    four_over_six(section, inputs);
    let rows = [
        ("row RN, 128x4 scales", swizzled(nearest())),
        ("row SR, headroom", headroom()),
        ("row RHT SR", copy_of(stochastic(), rht())),
    ];
    for (name, copy) in rows {
        row(section, name, inputs, copy);
    }
    let cols = [
        ("col RN", nearest()),
        ("col RN, 128x4 scales", swizzled(nearest())),
        ("col 4/6 MAE", scaled(NEAREST, MAE)),
        ("col SR", copy_of(stochastic(), None)),
        ("col SR, headroom", headroom()),
        ("col RHT RN", copy_of(NEAREST, rht())),
        ("col RHT SR", copy_of(stochastic(), rht())),
    ];
    for (name, copy) in cols {
        col(section, name, inputs, copy);
    }
    for size in [HadamardSize::H32, HadamardSize::H64, HadamardSize::H128] {
        let name = format!("col RHT-{} SR", size.elements());
        col(section, &name, inputs, copy_of(stochastic(), rht_of(size)));
    }
    let transformed = |hadamard| [nearest(), copy_of(stochastic(), hadamard)];
    let pairs = [
        (
            "row RN + col RN, 128x4 scales",
            [nearest(), nearest()].map(swizzled),
        ),
        (
            "row RN + col RHT SR, 128x4 scales",
            transformed(rht()).map(swizzled),
        ),
        (
            "row RN + col RHT-128 SR",
            transformed(rht_of(HadamardSize::H128)),
        ),
        ("row SR + col SR, headroom", [headroom(), headroom()]),
        (
            "row 4/6 MAE + col 4/6 MAE",
            [MAE; 2].map(|scaling| scaled(NEAREST, scaling)),
        ),
    ];
    for (name, copies) in pairs {
        pair_of(section, &format!("{name}, one read"), inputs, copies);
    }
    let tiles = [
        ("16x16 tiles, 4/6 MSE, both copies", (MSE, StoredForm::Rows)),
        (
            "16x16 tiles, 128x4 scales, both copies",
            (BlockScaling::Standard, SWIZZLED),
        ),
    ];
    for (name, policy) in tiles {
        tiles_with(section, name, inputs, ONE, policy);
    }
    per_token(
        section,
        "per token RN, 128x4 scales",
        inputs,
        swizzled(nearest()),
    );
    per_token(section, "per token 4/6 MAE", inputs, scaled(NEAREST, MAE));
    columns_per_token(section, inputs);
    values(section, inputs);
    mx(section, "", inputs);
}

/// Times four over six along rows.
pub fn four_over_six(section: &mut Section<'_>, inputs: &Inputs) {
    for (name, scaling) in [("row 4/6 MAE", MAE), ("row 4/6 MSE", MSE)] {
        row(section, name, inputs, scaled(NEAREST, scaling));
    }
}

fn scaled(rounding: Rounding, scaling: BlockScaling) -> TargetSpec {
    TargetSpec::new(QuantParams {
        scaling,
        ..QuantParams::nvfp4(rounding)
    })
}

fn rht_of(size: HadamardSize) -> Option<Hadamard> {
    Some(Hadamard::seeded_with_size(size, 1))
}

/// Times quantization with one amax per row and column, which takes two passes.
fn columns_per_token(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    // Everything from x on: amax values, and both tensors derived from them. Then the same as in a
    // training step, where one launch clears the amax values of many tensors.
    let copies = [copy_of(NEAREST, None), copy_of(stochastic(), rht())];
    for (place, in_step) in [("", false), (", in a step", true)] {
        let begin = |i: usize| {
            if in_step && i.is_multiple_of(PER_STEP) {
                zeroed::begin_step(&client);
            }
        };
        let name = format!("amax, then row RN + col RHT SR{place}");
        section.time(&name, inputs.bytes(2.0), |i| {
            begin(i);
            let x = inputs.get(i);
            let found = quantize::amaxes(&client, x, ONE, &plain_and_transformed()).unwrap();
            let [row, col] = &copies;
            let [rows, cols] = [found.rows, found.cols].map(Option::unwrap);
            let row = with_amax(&rows, row.clone());
            let col = with_amax(&cols, col.clone());
            quantize::quantize_both(&client, x, ONE, &row, &col).unwrap();
        });
        let name = format!("per token rows RN + columns RHT SR{place}");
        section.time(&name, inputs.bytes(2.0), |i| {
            begin(i);
            let (x, scope) = (inputs.get(i), AmaxGranularity::PerRow);
            let request = AmaxRequest {
                rows: Some(scope),
                cols: Some((scope, rht())),
            };
            let found = quantize::amaxes(&client, x, ONE, &request).unwrap();
            let [rows, cols] = [found.rows, found.cols].map(Option::unwrap);
            let [row, col] = [(&rows, &copies[0]), (&cols, &copies[1])]
                .map(|(amax, copy)| quantize::target(amax, scope, copy.clone()));
            quantize::quantize_both(&client, x, ONE, &row, &col).unwrap();
        });
        zeroed::end_step(&client);
    }
}

/// Times quantized tensors that are stored as two-byte values, for GEMMs that would decode them.
fn values(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    for (name, wanted) in [
        ("row RN, as values", [true, false]),
        ("col RHT SR, as values", [false, true]),
        ("row RN + col RHT SR, as values, one read", [true; 2]),
    ] {
        let copies = wanted.iter().filter(|&&wanted| wanted).count();
        let bytes = inputs.elements() * (inputs.dtype.size() + 2 * copies) as f64;
        section.time(name, bytes, |i| {
            let requests = [
                inputs.request(NEAREST, None),
                inputs.request(stochastic(), rht()),
            ];
            let [row, col] = [0, 1]
                .map(|copy| wanted[copy].then_some((&requests[copy], StoredForm::Bf16Unscaled)));
            quantize::quantize_operands(&client, inputs.get(i), row, col).unwrap();
        });
    }
}

/// Times the quantization of gradients and activations for GEMMs that dequantize packed operands:
/// both tensors packed, packed and then dequantized, and as unscaled bf16. The columnwise tensor of
/// activations is saved for the backward and stays packed.
pub fn unscaled(section: &mut Section<'_>, inputs: &Inputs) {
    const PACKED: StoredForm = StoredForm::Rows;
    use StoredForm::Bf16Unscaled;
    let client = section.client();
    let cases = [("dy", stochastic(), Bf16Unscaled), ("x", NEAREST, PACKED)];
    for (name, rounding, col_form) in cases {
        let quantized = |i: usize, forms: [StoredForm; 2]| {
            let requests = [None, rht()].map(|rht| inputs.request(rounding, rht));
            let [row, col] = [0, 1].map(|copy| Some((&requests[copy], forms[copy])));
            quantize::quantize_operands(&client, inputs.get(i), row, col).unwrap()
        };
        let bytes = inputs.bytes(2.0);
        section.time(&format!("{name}: packed"), bytes, |i| {
            quantized(i, [PACKED; 2]);
        });
        section.time(&format!("{name}: packed, then dequantized"), bytes, |i| {
            let (row, col) = quantized(i, [PACKED; 2]);
            decode(&client, &row.unwrap());
            if col_form == Bf16Unscaled {
                decode(&client, &col.unwrap());
            }
        });
        section.time(&format!("{name}: unscaled bf16"), bytes, |i| {
            quantized(i, [Bf16Unscaled, col_form]);
        });
    }
}

/// Times the rowwise tensor of activations if the backward re-quantizes the forward's tensor, which
/// both a GEMM and the backward read: packed and then dequantized, and in both storages from one
/// read.
pub fn both_storages(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    let bytes = inputs.bytes(1.0) + 2.0 * inputs.elements();
    for (name, copy) in [
        ("row RN", copy_of(NEAREST, None)),
        ("row SR", copy_of(stochastic(), None)),
        ("row 4/6 MSE", scaled(NEAREST, MSE)),
    ] {
        section.time(&format!("{name}: packed, then dequantized"), bytes, |i| {
            let x = inputs.get(i);
            let request = inputs.with(copy.clone());
            let made = quantize::quantize(&client, x, ONE, Usage::Rowwise, &request).unwrap();
            decode(&client, &made);
        });
        section.time(&format!("{name}: both storages"), bytes, |i| {
            let request = inputs.with(copy.clone());
            quantize::quantize_in_both_storages(&client, inputs.get(i), &request).unwrap();
        });
    }
}

/// Times the microscaling formats, in both usages.
fn mx(section: &mut Section<'_>, suffix: &str, inputs: &Inputs) {
    let client = section.client();
    for (name, format, packed) in [
        ("MXFP8", Format::Mxfp8, MX),
        ("MXFP4", Format::Mxfp4, MXFP4),
    ] {
        let bytes = inputs.elements() * (inputs.dtype.size() as f64 + packed);
        for (side, usage) in [("row", Usage::Rowwise), ("col", Usage::Columnwise)] {
            section.time(&format!("{name} {side}{suffix}"), bytes, |i| {
                quantize::mx_quantize(&client, inputs.get(i), usage, format).unwrap();
            });
        }
    }
}

/// Times the most common kernels with the other element types.
pub fn types(section: &mut Section<'_>, (rows, cols): (usize, usize)) {
    let client = section.client();
    for (dtype, suffix) in [(FloatKind::F16, ", f16"), (FloatKind::F32, ", f32")] {
        let inputs = &Inputs::new(&client, rows, cols, dtype);
        let plain = |rounding| TargetSpec::new(rounding);
        amax_pair(section, suffix, inputs, ONE);
        row(section, &format!("row RN{suffix}"), inputs, plain(NEAREST));
        row(
            section,
            &format!("row SR{suffix}"),
            inputs,
            plain(stochastic()),
        );
        let name = format!("row RN + col RHT SR, one read{suffix}");
        let copies = [plain(NEAREST), copy_of(stochastic(), rht())];
        pair_of(section, &name, inputs, copies);
        per_token(
            section,
            &format!("per token RN{suffix}"),
            inputs,
            plain(NEAREST),
        );
        tiles(section, suffix, inputs, ONE);
        mx(section, suffix, inputs);
    }
}
