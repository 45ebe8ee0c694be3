//! Kernels that each kind of quantization request launches, in order. Nothing is launched.

use crate::support::device::offsets;
use nvfp4_formats::{
    AmaxGranularity, BlockScaling, ErrorNorm, Format, Hadamard, HadamardSize, Layout, Nvfp4Error,
    QuantParams, RandomStream, Rounding, StoredForm, Usage,
    reference::{Activation, Gelu},
};
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    proof::codec::Conversion,
    quantize::{
        AmaxRequest, Amaxes, Quantize, Source, TargetSpec,
        proof::{
            QuantizeStep::{self, *},
            Usages::{Both, Columnwise, Rowwise},
        },
    },
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

const PER_TENSOR: AmaxGranularity = AmaxGranularity::PerTensor;
const PER_ROW: AmaxGranularity = AmaxGranularity::PerRow;
/// One amax of the untransformed values.
const ONE: AmaxRequest = AmaxRequest {
    rows: Some(PER_TENSOR),
    cols: None,
};

fn capabilities(compute_capability: Option<u32>, conversion: Conversion) -> Capabilities {
    Capabilities {
        device: "a test".into(),
        runtime: if compute_capability.is_some() {
            "cuda"
        } else {
            "cpu"
        },
        compute_capability,
        conversion,
        gemm: GemmBackend::Scalar,
    }
}

/// A Hopper GPU.
fn hopper() -> Capabilities {
    capabilities(Some(90), Conversion::Sm89)
}

/// CubeCL's CPU runtime.
fn cpu() -> Capabilities {
    capabilities(None, Conversion::Software)
}

fn nearest() -> TargetSpec {
    TargetSpec::new(Rounding::Nearest)
}

fn transformed() -> TargetSpec {
    TargetSpec::new(QuantParams {
        hadamard: Some(Hadamard::default()),
        ..QuantParams::nvfp4(Rounding::Stochastic(RandomStream::new(1, 2, 3)))
    })
}

fn eden() -> TargetSpec {
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 1);
    TargetSpec::new(QuantParams::ms_eden(hadamard, RandomStream::new(1, 2, 3)))
}

fn cols_of(hadamard: Option<Hadamard>) -> AmaxRequest {
    AmaxRequest::along(Usage::Columnwise, PER_TENSOR, hadamard)
}

/// Amax values of both usages, the second one of transformed columns.
fn pair(granularity: AmaxGranularity) -> AmaxRequest {
    AmaxRequest {
        rows: Some(granularity),
        cols: Some((granularity, Some(Hadamard::default()))),
    }
}

#[track_caller]
fn assert_steps(request: &Quantize, expected: &[QuantizeStep]) {
    request.check().unwrap();
    assert_eq!(request.plan(&hopper()), expected);
}

#[test]
fn matrices() {
    let client = client!("matrices");
    let x = &Matrix::empty(&client, 64, 128, FloatKind::Bf16);
    let request = || Quantize::new(x);
    let amax = &client.create_from_slice(&[0; 4]);

    assert_steps(
        &request().rowwise(nearest()),
        &[AmaxOfMatrix(Rowwise), Rows],
    );
    assert_steps(&request().rowwise(nearest().amax(amax)), &[Rows]);
    assert_steps(
        &request().columnwise(nearest()),
        &[AmaxOfMatrix(Columnwise), Blocks(Columnwise)],
    );
    assert_steps(
        &request().columnwise(transformed()),
        &[
            Amax(cols_of(Some(Hadamard::default())), Columnwise),
            Blocks(Columnwise),
        ],
    );
    // One amax serves both tensors if neither is transformed.
    assert_steps(
        &request().rowwise(nearest()).columnwise(nearest()),
        &[AmaxOfMatrix(Both), Blocks(Both)],
    );
    assert_steps(
        &request().rowwise(nearest()).columnwise(transformed()),
        &[Amax(pair(PER_TENSOR), Both), Blocks(Both)],
    );
    // Only the amax of the other tensor is known.
    assert_steps(
        &request()
            .rowwise(nearest().amax(amax))
            .columnwise(transformed()),
        &[
            Amax(cols_of(Some(Hadamard::default())), Columnwise),
            Blocks(Both),
        ],
    );
    let unscaled = || nearest().form(StoredForm::Bf16Unscaled);
    assert_steps(
        &request().rowwise(unscaled()),
        &[AmaxOfMatrix(Rowwise), Rows],
    );
    assert_steps(
        &request().rowwise(unscaled()).columnwise(nearest()),
        &[AmaxOfMatrix(Both), Blocks(Both)],
    );
    assert_steps(
        &request().rowwise(nearest()).unscaled(true),
        &[AmaxOfMatrix(Rowwise), RowsInBothStorages],
    );
}

#[test]
fn per_token() {
    let client = client!("per_token");
    let x = &Matrix::empty(&client, 64, 128, FloatKind::Bf16);
    let token = || nearest().granularity(PER_ROW);
    let rows = AmaxRequest::along(Usage::Rowwise, PER_ROW, None);
    let cols = AmaxRequest::along(Usage::Columnwise, PER_ROW, None);

    assert_steps(&Quantize::new(x).rowwise(token()), &[PerToken]);
    assert_steps(
        &Quantize::new(x).columnwise(token()),
        &[Amax(cols, Columnwise), Blocks(Columnwise)],
    );
    let col = transformed().granularity(PER_ROW);
    assert_steps(
        &Quantize::new(x).rowwise(token()).columnwise(col),
        &[Amax(pair(PER_ROW), Both), Blocks(Both)],
    );
    let transformed = QuantParams {
        hadamard: Some(Hadamard::default()),
        ..token().params
    };
    // These take the amax values from another pass.
    for request in [
        Quantize::new(x).rowwise(token().form(StoredForm::Bf16Unscaled)),
        Quantize::new(x).rowwise(TargetSpec::new(transformed)),
    ] {
        assert_steps(&request, &[Amax(rows, Rowwise), Rows]);
    }
    assert_steps(
        &Quantize::new(x).rowwise(token()).unscaled(true),
        &[Amax(rows, Rowwise), RowsInBothStorages],
    );
    let plan = Quantize::new(x).rowwise(token()).plan_amax(&hopper());
    assert_eq!(plan, [Amax(rows, Rowwise)]);
}

#[test]
fn tiles_and_mixed_pairs() {
    let client = client!("tiles_and_mixed_pairs");
    let x = &Matrix::empty(&client, 64, 128, FloatKind::Bf16);
    let tiles = || TargetSpec::new(QuantParams::nvfp4_2d(BlockScaling::Standard));

    assert_steps(
        &Quantize::new(x).rowwise(tiles()).columnwise(tiles()),
        &[AmaxOfMatrix(Both), Tiles(Both)],
    );
    assert_steps(
        &Quantize::new(x).columnwise(tiles()),
        &[AmaxOfMatrix(Columnwise), Tiles(Columnwise)],
    );
    let stack = Groups::Batch(2);
    assert_steps(
        &Quantize::new(x)
            .groups(&stack)
            .rowwise(tiles())
            .columnwise(tiles()),
        &[Amax(ONE, Both), Tiles(Both)],
    );
    // One kernel does not write both.
    assert_steps(
        &Quantize::new(x).rowwise(tiles()).columnwise(nearest()),
        &[
            AmaxOfMatrix(Rowwise),
            Tiles(Rowwise),
            AmaxOfMatrix(Columnwise),
            Blocks(Columnwise),
        ],
    );
    assert_steps(
        &Quantize::new(x)
            .rowwise(nearest())
            .columnwise(TargetSpec::new(Format::Mxfp8)),
        &[AmaxOfMatrix(Rowwise), Rows, Mx(Usage::Columnwise)],
    );
}

#[test]
fn groups_of_rows() {
    let client = client!("groups_of_rows");
    let x = &Matrix::empty(&client, 64, 128, FloatKind::Bf16);
    let groups = &offsets(&client, &[30, 34]);
    let request = || Quantize::new(x).groups(groups);

    assert_steps(&request().rowwise(nearest()), &[Amax(ONE, Rowwise), Rows]);
    assert_steps(
        &request().rowwise(nearest()).columnwise(transformed()),
        &[Amax(pair(PER_TENSOR), Both), BlocksSideBySide(Both)],
    );
    assert_steps(
        &request().rowwise(nearest()).columnwise(nearest()).stacked(),
        &[Amax(ONE, Both), Blocks(Both)],
    );
    // The kernel of rows takes neither tiles of scales that start anew, nor four over six.
    let swizzled = nearest().form(StoredForm::Tiles);
    let four_over_six = TargetSpec::new(QuantParams {
        scaling: BlockScaling::FourOverSix(ErrorNorm::Mae),
        ..nearest().params
    });
    for target in [swizzled, four_over_six] {
        assert_steps(
            &request().rowwise(target),
            &[Amax(ONE, Rowwise), BlocksSideBySide(Rowwise)],
        );
    }
    assert_steps(
        &request().columnwise(eden()),
        &[MsEdenAmax(Usage::Columnwise), MsEden(Usage::Columnwise)],
    );
    // One amax per matrix of a stack serves both usages.
    let stack = Groups::Batch(2);
    assert_steps(
        &Quantize::new(x).groups(&stack).columnwise(nearest()),
        &[Amax(ONE, Columnwise), Blocks(Columnwise)],
    );
    assert_steps(
        &Quantize::new(x).groups(&stack).rowwise(nearest()),
        &[Amax(ONE, Rowwise), Blocks(Rowwise)],
    );
    // An amax per column, or of transformed columns, does not.
    let per_column = AmaxRequest::along(Usage::Columnwise, PER_ROW, None);
    for (target, values) in [
        (nearest().granularity(PER_ROW), per_column),
        (transformed(), cols_of(Some(Hadamard::default()))),
    ] {
        assert_steps(
            &Quantize::new(x).groups(&stack).columnwise(target),
            &[Amax(values, Columnwise), Blocks(Columnwise)],
        );
    }
}

/// The device decides how MS-EDEN finds its amax along both axes.
#[test]
fn ms_eden_pairs() {
    let client = client!("ms_eden_pairs");
    let x = &Matrix::empty(&client, 128, 256, FloatKind::Bf16);
    let request = Quantize::new(x).rowwise(eden()).columnwise(eden());
    let quantizes = [MsEden(Usage::Rowwise), MsEden(Usage::Columnwise)];
    let [row, col] = quantizes;
    assert_steps(&request, &[MsEdenAmaxPair, row, col]);
    let apart = [MsEdenAmax(Usage::Rowwise), MsEdenAmax(Usage::Columnwise)];
    assert_eq!(request.plan(&cpu()), [apart, quantizes].concat());
    assert_eq!(request.plan_amax(&cpu()), apart);

    let amax = &client.create_from_slice(&[0; 4]);
    assert_steps(
        &Quantize::new(x)
            .rowwise(eden().amax(amax))
            .columnwise(eden()),
        &[
            MsEden(Usage::Rowwise),
            MsEdenAmax(Usage::Columnwise),
            MsEden(Usage::Columnwise),
        ],
    );
}

#[test]
fn activations() {
    let client = client!("activations");
    let x = &Matrix::empty(&client, 64, 128, FloatKind::Bf16);
    let grad = &Matrix::empty(&client, 64, 64, FloatKind::Bf16);
    let of = |kind, grad| Quantize::new(Source::Activation { kind, x, grad });
    let gelu = Activation::Gelu(Gelu::Erf);

    for grad in [None, Some(grad)] {
        let request = || of(Activation::SwiGlu, grad);
        assert_steps(
            &request().rowwise(nearest()).columnwise(transformed()),
            &[ActivationWithAmax(pair(PER_TENSOR), Both), Blocks(Both)],
        );
        let both = request().rowwise(nearest()).columnwise(transformed());
        let plan = both.plan_amax(&hopper());
        assert_eq!(plan, [ActivationWithAmax(pair(PER_TENSOR), Both)]);
        assert_steps(
            &request().rowwise(nearest()).unscaled(true),
            &[ActivationWithAmax(ONE, Rowwise), RowsInBothStorages],
        );
        // The pass that quantizes a row computes its amax.
        assert_steps(
            &request().rowwise(nearest().granularity(PER_ROW)),
            &[QuantizeStep::Activation, PerToken],
        );
        assert_steps(
            &request().rowwise(eden()),
            &[
                QuantizeStep::Activation,
                MsEdenAmax(Usage::Rowwise),
                MsEden(Usage::Rowwise),
            ],
        );
    }
    // No prologue computes this one.
    assert_steps(
        &of(gelu, None).rowwise(nearest()),
        &[QuantizeStep::Activation, Amax(ONE, Rowwise), Rows],
    );
}

#[test]
fn quantized_sources() {
    let client = client!("quantized_sources");
    let handle = || client.empty(1 << 16);
    let layout = Layout::nvfp4(64, 128, Usage::Rowwise);
    let tensor = &DeviceQuantized::new(layout, (handle(), handle(), handle()));
    let via = FloatKind::Bf16;
    let request = || Quantize::new(Source::Quantized { tensor, via });
    assert_steps(
        &request().columnwise(eden()),
        &[MsEdenAmax(Usage::Columnwise), MsEden(Usage::Columnwise)],
    );
    assert_steps(
        &request().rowwise(TargetSpec::new(Format::Mxfp4)),
        &[MxRequantize(Usage::Rowwise)],
    );
    // Elements are not rounded from codes.
    assert_refused(&request().rowwise(nearest()), "source");
}

/// Amax values that a request lacks, which then come from the kernel that wrote the source.
#[test]
fn missing_amax_values() {
    let client = client!("missing_amax_values");
    let x = &Matrix::empty(&client, 64, 128, FloatKind::Bf16);
    let amax = &client.create_from_slice(&[0; 4]);
    let request = || Quantize::new(x);
    let none = AmaxRequest::default();
    let cases = [
        (request().rowwise(nearest()), ONE),
        // One amax serves both usages of untransformed values.
        (request().columnwise(nearest()), ONE),
        (request().rowwise(nearest()).columnwise(nearest()), ONE),
        (
            request().rowwise(nearest()).columnwise(transformed()),
            pair(PER_TENSOR),
        ),
        (
            request()
                .rowwise(nearest().amax(amax))
                .columnwise(transformed()),
            cols_of(Some(Hadamard::default())),
        ),
        (request().rowwise(nearest().amax(amax)), none),
        (request().rowwise(eden()).columnwise(eden()), none),
        (request().rowwise(TargetSpec::new(Format::Mxfp8)), none),
    ];
    for (mut request, missing) in cases {
        assert_eq!(request.missing_amax(), missing, "{request:?}");
        let found = |is_missing: bool| is_missing.then(|| amax.clone());
        request.set_amax(&Amaxes {
            rows: found(missing.rows.is_some()),
            cols: found(missing.cols.is_some()),
        });
        assert_eq!(request.missing_amax(), none, "{request:?}");
        let plan = request.plan(&hopper());
        let computes = |step: &QuantizeStep| matches!(step, AmaxOfMatrix(..) | Amax(..));
        assert!(!plan.iter().any(computes), "{plan:?}");
    }
}

#[track_caller]
fn assert_refused(request: &Quantize, argument: &str) {
    match request.check() {
        Err(Nvfp4Error::Value {
            argument: found, ..
        }) => assert_eq!(found, argument),
        other => panic!("{other:?}"),
    }
}

/// Options that no kernel has are refused before anything is launched.
#[test]
fn refused_requests() {
    let client = client!("refused_requests");
    let x = &Matrix::empty(&client, 64, 128, FloatKind::Bf16);
    let request = || Quantize::new(x);
    assert_refused(&request(), "request");
    let tiles = TargetSpec::new(QuantParams::nvfp4_2d(BlockScaling::Standard));
    assert_refused(
        &request().rowwise(tiles.clone().granularity(PER_ROW)),
        "block",
    );
    let values = nearest().form(StoredForm::Bf16Unscaled);
    assert_refused(
        &request().rowwise(tiles.form(StoredForm::Bf16Unscaled)),
        "form",
    );
    assert_refused(&request().rowwise(values.clone()).unscaled(true), "form");
    assert_refused(&request().columnwise(nearest()).unscaled(true), "unscaled");
    assert_refused(&request().rowwise(eden()).unscaled(true), "unscaled");
    let groups = &Groups::Batch(2);
    assert_refused(&request().groups(groups).rowwise(values), "groups");
    let mx = TargetSpec::new(Format::Mxfp8).form(StoredForm::Bf16Unscaled);
    assert_refused(&request().rowwise(mx), "form");
}
