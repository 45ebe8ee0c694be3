//! All readers of packed operands support every scaling: dequantize, NVFP4 to MXFP8 and MS-EDEN
//! accept tensors made with four over six, and tensors with one amax per stored row. On CubeCL's
//! CPU runtime or on a GPU (`NVFP4_TEST_DEVICE`).

use crate::support::device::{assert_bytes, assert_floats, read_f32, read_matrix};
use crate::support::inputs::{Kind, convert, values};
use crate::support::quantize;
use half::bf16;
use nvfp4_formats::{
    Amax, BlockScaling, ErrorNorm, Format, Hadamard, HadamardSize, QuantParams, QuantizedTensor,
    RandomStream, Rounding, Usage,
    reference::{self, EdenParams},
};
use nvfp4_kernels::{
    bring_up,
    capabilities::Capabilities,
    proof::codec::Conversion,
    tensor::{DeviceQuantized, FloatKind},
};

const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];
const SHAPE: (usize, usize) = (40, 48);

fn copy(usage: Usage, scaling: BlockScaling, per_row: bool) -> QuantizedTensor {
    let (rows, cols) = SHAPE;
    let x: Vec<f32> = values(Kind::Normal, rows * cols, 5);
    let amax = match (per_row, usage) {
        (false, _) => Amax::Tensor(reference::amax(&x)),
        (true, Usage::Rowwise) => Amax::PerRow(reference::amax_rows(&x, rows, cols)),
        (true, Usage::Columnwise) => Amax::PerRow(reference::amax_cols(&x, rows, cols)),
    };
    let policy = QuantParams {
        scaling,
        ..QuantParams::nvfp4(Rounding::Nearest)
    };
    reference::quantize(&x, rows, cols, usage, &amax, &policy, 0).unwrap()
}

const FOUR_OVER_SIX: BlockScaling = BlockScaling::FourOverSix(ErrorNorm::Mae);

#[test]
fn dequantize_reads_every_scaling_and_scope() {
    let client = client!("dequantize_reads_every_scaling_and_scope");
    for usage in USAGES {
        for scaling in [BlockScaling::Standard, FOUR_OVER_SIX] {
            for per_row in [false, true] {
                let packed = copy(usage, scaling, per_row);
                let device = DeviceQuantized::from_host(&client, &packed);
                let expected = reference::dequantize(&packed);
                let what = format!("{usage:?} {scaling:?} per outer {per_row}");
                let found = quantize::dequantize(&client, &device, FloatKind::F32).unwrap();
                assert_floats(&read_matrix::<f32>(&client, &found), &expected, &what);
                let found = quantize::dequantize(&client, &device, FloatKind::Bf16).unwrap();
                let expected = convert::<bf16>(&expected);
                assert_floats(&read_matrix::<bf16>(&client, &found), &expected, &what);
            }
        }
    }
}

/// Operands are decoded by their range and, per token, by the amax of each row.
#[test]
fn operands_are_requantized_by_what_scales_them() {
    let client = client!("operands_are_requantized_by_what_scales_them");
    let (rows, cols) = SHAPE;
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 9);
    let stream = RandomStream::new(1, 2, 3);
    for (from, per_row) in USAGES
        .into_iter()
        .flat_map(|usage| [(usage, false), (usage, true)])
    {
        let packed = copy(from, FOUR_OVER_SIX, per_row);
        let device = DeviceQuantized::from_host(&client, &packed);
        let values = reference::dequantize(&packed);
        for to in USAGES {
            let what = format!("{from:?} to {to:?}, per outer {per_row}");
            let expected =
                reference::mx_quantize(&convert::<bf16>(&values), rows, cols, to, Format::Mxfp8)
                    .unwrap();
            let found =
                quantize::mx_requantize(&client, &device, to, Format::Mxfp8, FloatKind::Bf16)
                    .unwrap();
            let found = found.to_host(&client, *expected.origin()).unwrap();
            assert_bytes(found.codes(), expected.codes(), &what);
            assert_bytes(found.scales(), expected.scales(), &what);

            let amax = reference::ms_eden_amax(&values, rows, cols, to, &hadamard).unwrap();
            let found = quantize::ms_eden_amax(&client, &device, to, &hadamard).unwrap();
            assert_eq!(read_f32(&client, &found), amax, "{what}");
            let expected = reference::ms_eden(
                &values,
                rows,
                cols,
                to,
                amax,
                &EdenParams { hadamard, stream },
            )
            .unwrap();
            let found = quantize::ms_eden(&client, &device, to, &found, &hadamard, stream).unwrap();
            let found = found.to_host(&client, *expected.origin()).unwrap();
            assert_bytes(found.codes(), expected.codes(), &what);
            assert_bytes(found.scales(), expected.scales(), &what);
        }
    }
}

/// The device's stochastic rounding uses eight separate bits per element, and with their order the
/// oracle gives the same answers. Without an instruction, the order is that of the software form;
/// the emulated instruction reverses it.
#[test]
fn random_bits_are_read_off_the_device() {
    let client = client!("random_bits_are_read_off_the_device");
    let ask = |questions: &[reference::Question]| bring_up::answer_random_bits(&client, questions);
    let bits = reference::read_random_bits(ask).unwrap();
    let software = reference::RandomBits::software();
    let reversed = reference::RandomBits {
        positions: software
            .positions
            .map(|of| of.map(|position| 31 - position)),
    };
    match Capabilities::of(&client).conversion {
        Conversion::Hardware => {}
        Conversion::Emulated => assert_eq!(bits, reversed),
        _ => assert_eq!(bits, software),
    }
    let found = reference::compare_random_bits(&bits, 1 << 14, ask).unwrap();
    assert_eq!(found.different, 0, "{found:?}");
    assert!(
        bring_up::answer_random_bits(&client, &[])
            .unwrap()
            .is_empty()
    );
}
