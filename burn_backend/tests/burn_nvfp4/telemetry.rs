//! Telemetry equals the oracle's statistics.

use burn_core::tensor::{DType, Int, Tensor, TensorData};
use burn_nvfp4::ops::{BackwardSource, LinearSpec, OperandSpec, QuantParams};
use burn_nvfp4::telemetry::{OperandSample, Telemetry};
use burn_nvfp4::{
    ExpertOffsets, Hadamard, Nvfp4GroupedLinearConfig, Nvfp4LinearConfig, Nvfp4MoeConfig,
    Nvfp4Recipe, Rounding, Usage,
};
use nvfp4_formats::format::e2m1;
use nvfp4_formats::reference::EDEN_GROUP;
use nvfp4_formats::{BLOCK, QuantizedTensor, reference};

use crate::support::{Matrix, Operand, activation, device, skip_where_small_only, sqnr, values};

const WIDTHS: [usize; 2] = [64, 48];

/// Operands sampled in a step of a plain layer.
const OPERANDS: [&str; 5] = ["fprop.w", "fprop.x", "wgrad.x", "dgrad.dy", "wgrad.dy"];

/// Normal values, with zeros, and one block so much smaller than the rest that its scale
/// underflows.
fn input(dtype: DType) -> Matrix {
    let mut x = Matrix::gaussian(20, WIDTHS[0], dtype, 5);
    for (i, value) in x.values.iter_mut().enumerate() {
        match i {
            0..16 => *value = 1e-6,
            16..20 => *value = 0.0,
            _ => {}
        }
    }
    let values = std::mem::take(&mut x.values);
    Matrix::new(values, x.rows, x.cols, dtype)
}

/// Asserts that `found` has the statistics of all `parts`, each a matrix and the oracle's packed
/// tensor of it.
fn assert_sample(found: &OperandSample, parts: &[(Matrix, QuantizedTensor)]) {
    let exact: Vec<f32> = parts.iter().flat_map(|(x, _)| x.values.clone()).collect();
    let decoded: Vec<f32> = parts
        .iter()
        .flat_map(|(_, packed)| reference::dequantize(packed))
        .collect();
    let expected = sqnr(&exact, &decoded);
    assert!(
        (found.sqnr_db - expected).abs() < 1e-6,
        "{found:?}, {expected}"
    );
    let ratio = 10f64.powf(expected / 20.0);
    assert!((found.signal_to_noise / ratio - 1.0).abs() < 1e-6);
    let pairs = || exact.iter().zip(&decoded);
    let lost = pairs().filter(|(x, d)| **x != 0.0 && **d == 0.0).count();
    let nonzero = exact.iter().filter(|x| **x != 0.0).count();
    assert_eq!(found.zeros, lost as f64 / nonzero as f64);
    let (mut largest, mut full, mut underflowed) = (0usize, 0usize, 0usize);
    for (_, packed) in parts {
        let codes = || {
            let bytes = packed.codes().iter();
            bytes.flat_map(|byte| [byte & 15, byte >> 4])
        };
        largest += codes()
            .filter(|code| e2m1::decode(*code).abs() == e2m1::MAX)
            .count();
    }
    assert_eq!(found.saturated, largest as f64 / exact.len() as f64);
    for (x, packed) in parts {
        let (outer, inner) = packed.usage().stored_shape(x.rows, x.cols);
        for block in 0..outer * inner / BLOCK {
            let own = (0..BLOCK).map(|i| {
                let (row, col) = (block * BLOCK / inner, block * BLOCK % inner + i);
                match packed.usage() {
                    Usage::Rowwise => x.values[row * x.cols + col],
                    Usage::Columnwise => x.values[col * x.cols + row],
                }
            });
            if own.into_iter().any(|value| value != 0.0) {
                full += 1;
                underflowed += usize::from(packed.scales()[block] == 0);
            }
        }
    }
    assert_eq!(found.underflowed_blocks, underflowed as f64 / full as f64);
    let largest = |packed: &QuantizedTensor| {
        let own = (0..packed.outer()).map(|outer| packed.amax().of(outer));
        own.fold(0f32, f32::max)
    };
    let amax = parts.iter().map(|(_, packed)| largest(packed));
    assert_eq!(found.amax, amax.fold(0f32, f32::max));
}

/// Asserts that `found` has the statistics of `parts` after `hadamard`, including padding: each a
/// matrix and the oracle's packed tensor of its transform.
fn assert_transformed_sample(
    found: &OperandSample,
    parts: &[(&Matrix, QuantizedTensor)],
    hadamard: Option<Hadamard>,
) {
    let (mut stored, mut decoded, mut largest) = (Vec::new(), Vec::new(), 0f32);
    for (exact, packed) in parts {
        let width = packed.blocks() * BLOCK;
        let (outer, inner) = packed.usage().stored_shape(exact.rows, exact.cols);
        let mut own = vec![0.0; outer * width];
        for (row, own) in own.chunks_exact_mut(width).enumerate() {
            for (i, value) in own[..inner].iter_mut().enumerate() {
                *value = match packed.usage() {
                    Usage::Rowwise => exact.values[row * exact.cols + i],
                    Usage::Columnwise => exact.values[i * exact.cols + row],
                };
            }
            if let Some(hadamard) = &hadamard {
                for group in own.chunks_exact_mut(hadamard.size().elements()) {
                    reference::transform(group, hadamard);
                }
            }
        }
        stored.extend(own);
        let range = packed.range();
        let mut own = reference::decode_blocks(packed);
        for (row, own) in own.chunks_exact_mut(width).enumerate() {
            let amax = packed.amax().of(row);
            own.iter_mut().for_each(|value| *value *= amax / range);
            largest = largest.max(amax);
        }
        decoded.extend(own);
    }
    let expected = sqnr(&stored, &decoded);
    assert!(
        (found.sqnr_db - expected).abs() < 1e-4,
        "{found:?}, expected {expected} dB"
    );
    assert_eq!(found.amax, largest, "{found:?}");
}

/// Tokens of three experts, one of which has none, and tokens of no expert.
struct Experts {
    x: Matrix,
    dy: Matrix,
}

impl Experts {
    const SIZES: [usize; 3] = [9, 0, 4];
    const TOKENS: usize = 16;
    /// Offsets of the experts, with the tokens of no expert last.
    const STARTS: [usize; 5] = [0, 9, 9, 13, Self::TOKENS];

    /// Inputs of different magnitudes, so that another expert's scale would be detected.
    fn new() -> Self {
        let mut x = input(activation());
        x.rows = Self::TOKENS;
        x.values.truncate(Self::TOKENS * WIDTHS[0]);
        let scales = [1.0, 8.0, 64.0, 1024.0];
        for (row, values) in x.values.chunks_exact_mut(WIDTHS[0]).enumerate() {
            let expert = Self::STARTS[1..].iter().position(|&end| row < end);
            let scale = scales[expert.unwrap()];
            values.iter_mut().for_each(|value| *value *= scale);
        }
        Self {
            x,
            dy: Matrix::gaussian(Self::TOKENS, WIDTHS[1], activation(), 6),
        }
    }

    /// Returns the operands of a step by `preset`, their samples, and the weights.
    fn step(&self, preset: &str) -> (LinearSpec, Vec<OperandSample>, Vec<f32>) {
        let device = device().autodiff();
        let counts = Self::SIZES.map(|size| size as i64);
        let counts = Tensor::<1, Int>::from_data(TensorData::from(counts), &device);
        let groups = ExpertOffsets::from_counts(counts, Self::TOKENS);
        let recipe = Nvfp4Recipe::preset(preset).unwrap();
        let layer = Nvfp4GroupedLinearConfig::new(Self::SIZES.len(), WIDTHS[0], WIDTHS[1])
            .with_recipe(recipe.clone())
            .init(&device);
        let spec = recipe.spec(&layer.state.rng_state());
        let telemetry = Telemetry::start(&layer);
        let y = layer.forward(self.x.tensor(&device).require_grad(), &groups);
        (y * self.dy.tensor(&device)).sum().backward();
        let samples = telemetry.finish();
        let names: Vec<&str> = samples.iter().map(|sample| sample.operand).collect();
        assert_eq!(names, OPERANDS, "{preset}");
        (spec, samples, values(layer.weight.val().inner()))
    }

    /// Returns the rows of each expert in `matrix` as a separate matrix, with their offset.
    fn apart(matrix: &Matrix) -> Vec<(usize, Matrix)> {
        let ranges = Self::STARTS.windows(2).take(Self::SIZES.len());
        ranges
            .map(|range| {
                let (start, end) = (range[0] * matrix.cols, range[1] * matrix.cols);
                let own = Matrix {
                    values: matrix.values[start..end].to_vec(),
                    rows: range[1] - range[0],
                    ..*matrix
                };
                (range[0], own)
            })
            .collect()
    }
}

/// Returns the quantization parameters of `operand`.
fn params_of(operand: OperandSpec) -> QuantParams {
    *operand.params().expect("it is quantized")
}

/// Samples of experts: each expert's tokens and weights compared with their quantization by its own
/// global scale, including an expert without tokens and tokens without an expert.
#[test]
fn samples_of_experts_are_the_oracles() {
    let experts = Experts::new();
    for preset in ["nvidia", "per_token"] {
        let (spec, samples, weights) = experts.step(preset);
        let stochastic: Vec<bool> = samples.iter().map(|sample| sample.stochastic).collect();
        assert_eq!(stochastic, [false, false, false, true, true], "{preset}");
        // Each expert's rows are a matrix; blocks, and so random bits, are numbered consecutively.
        let by_expert = |matrix: &Matrix, operand: OperandSpec| -> Vec<_> {
            let packed = |(start, own): (usize, Matrix)| {
                let first = start * matrix.cols / BLOCK;
                let packed = own.copy_from(Usage::Rowwise, &params_of(operand), first);
                (own, packed)
            };
            Experts::apart(matrix).into_iter().map(packed).collect()
        };
        assert_sample(&samples[1], &by_expert(&experts.x, spec.fprop_x));
        assert_sample(&samples[3], &by_expert(&experts.dy, spec.dgrad_dy));
        let weights: Vec<_> = weights
            .chunks_exact(WIDTHS[0] * WIDTHS[1])
            .map(|weight| {
                let own = Matrix::new(weight.to_vec(), WIDTHS[0], WIDTHS[1], DType::F32);
                match own.operand(&spec.fprop_w, Usage::Columnwise, activation()) {
                    Operand::Nvfp4(packed) => (own, packed),
                    _ => panic!("{preset}: {:?}", spec.fprop_w),
                }
            })
            .collect();
        assert_sample(&samples[0], &weights);
    }
}

/// Operands of the weights' gradients: each expert's tokens are padded, transformed and packed
/// separately, in blocks that begin after those of the previous expert.
#[test]
fn samples_of_experts_along_the_tokens_are_the_oracles() {
    let experts = Experts::new();
    for preset in ["nvidia", "per_token"] {
        let (spec, samples, _) = experts.step(preset);
        for (sample, matrix, operand) in [
            (&samples[2], &experts.x, spec.wgrad_x),
            (&samples[4], &experts.dy, spec.wgrad_dy),
        ] {
            let params = params_of(operand);
            let apart = Experts::apart(matrix);
            let mut blocks = 0;
            let mut parts = Vec::new();
            for (_, own) in apart.iter().filter(|(_, own)| own.rows > 0) {
                let packed = own.copy_from(Usage::Columnwise, &params, matrix.cols * blocks);
                blocks += packed.blocks();
                parts.push((own, packed));
            }
            assert_transformed_sample(sample, &parts, params.hadamard);
            assert!(sample.sqnr_db > 10.0, "{preset}: {sample:?}");
        }
    }
}

/// Version by MS-EDEN, whose groups of 128 are padded for each expert.
#[test]
fn samples_of_experts_by_ms_eden_are_the_oracles() {
    skip_where_small_only!();
    let experts = Experts::new();
    let (spec, samples, _) = experts.step("quartet2");
    let params = params_of(spec.wgrad_dy);
    assert!(params.is_ms_eden());
    let apart = Experts::apart(&experts.dy);
    let (mut first, mut parts) = (0, Vec::new());
    for (_, own) in apart.iter().filter(|(_, own)| own.rows > 0) {
        let packed = own.eden_from(Usage::Columnwise, &params, first);
        first += packed.scales().len() / (EDEN_GROUP / BLOCK);
        parts.push((own, packed));
    }
    assert_transformed_sample(&samples[4], &parts, params.hadamard);
}

/// Both layers of a mixture's experts, in a step that sends each token to two of them.
#[test]
fn a_mixture_is_looked_at_layer_by_layer() {
    let device = device().autodiff();
    let moe = Nvfp4MoeConfig::new(WIDTHS[0], WIDTHS[1], 4).init(&device);
    let telemetry = Telemetry::start(&moe);
    let x = input(activation()).tensor(&device).require_grad();
    let y = moe.forward(x).output;
    y.cast(DType::F32).square().sum().backward();
    let samples = telemetry.finish();
    let found = samples.iter().map(|s| (s.layer.as_str(), s.operand));
    let expected = ["gate_up", "down"].map(|layer| OPERANDS.map(|operand| (layer, operand)));
    assert!(found.eq(expected.into_iter().flatten()), "{samples:?}");
    for sample in samples {
        assert!(sample.sqnr_db > 10.0, "{sample:?}");
    }
}

/// For operands larger than a sample, the rows are evenly spaced: every expert has a share.
#[test]
fn samples_are_of_all_rows() {
    skip_where_small_only!();
    let device = device().autodiff();
    let (tokens, width) = (4096, 256);
    // Only the second half of the tokens, those of the second expert, loses values to zero.
    let mut x = Matrix::gaussian(tokens, width, DType::F32, 3);
    for values in x.values[tokens / 2 * width..].chunks_exact_mut(BLOCK) {
        values.iter_mut().for_each(|value| *value = 1e-3);
        values[0] = 1.0;
    }
    let counts = [tokens as i64 / 2; 2];
    let counts = Tensor::<1, Int>::from_data(TensorData::from(counts), &device);
    let layer = Nvfp4GroupedLinearConfig::new(2, width, 16).init(&device);
    let telemetry = Telemetry::start(&layer);
    let groups = ExpertOffsets::from_counts(counts, tokens);
    let y = layer.forward(x.tensor(&device).require_grad(), &groups);
    y.sum().backward();
    let samples = telemetry.finish();
    // 15 of 16 values in one half, and few of the normal ones in the other.
    let zeros = samples[1].zeros;
    assert!((0.46..0.56).contains(&zeros), "{:?}", samples[1]);
}

#[test]
fn samples_are_the_oracles() {
    let device = device().autodiff();
    let layer = Nvfp4LinearConfig::new(WIDTHS[0], WIDTHS[1]).init(&device);
    let x = input(activation());
    let step = || {
        let y = layer.forward(x.tensor(&device).require_grad());
        y.cast(DType::F32).square().sum().backward();
    };
    step();
    let telemetry = Telemetry::start(&layer);
    step();
    let samples = telemetry.finish();
    step();
    let names: Vec<&str> = samples.iter().map(|sample| sample.operand).collect();
    assert_eq!(names, OPERANDS);
    assert_eq!(
        samples.iter().map(|s| s.stochastic).collect::<Vec<_>>(),
        [false, false, false, true, true]
    );

    assert_sample(&samples[1], &[(x.clone(), x.row(Rounding::Nearest))]);
    assert_eq!(samples[1].underflowed_blocks, 1.0 / (20.0 * 4.0));
    let weight = layer.weight.val().inner();
    let weight = Matrix::new(values(weight), WIDTHS[0], WIDTHS[1], DType::F32);
    let (_, col) = weight.tiles(Default::default());
    assert_eq!(col.usage(), Usage::Columnwise);
    assert_sample(&samples[0], &[(weight, col)]);
    for sample in &samples[2..] {
        assert!(sample.sqnr_db > 10.0, "{sample:?}");
    }
    let line = samples[1].csv();
    assert_eq!(
        line.split(',').count(),
        burn_nvfp4::telemetry::CSV_HEADER.split(',').count()
    );
}

#[test]
fn other_formats_are_not_looked_at() {
    let device = device().autodiff();
    for name in ["bf16", "mxfp8", "mxfp4"] {
        let recipe = Nvfp4Recipe::preset(name).unwrap();
        let layer = Nvfp4LinearConfig::new(WIDTHS[0], WIDTHS[1]).with_recipe(recipe);
        let layer = layer.init(&device);
        let telemetry = Telemetry::start(&layer);
        let y = layer.forward(input(activation()).tensor(&device));
        y.cast(DType::F32).sum().backward();
        assert_eq!(telemetry.finish(), []);
    }
}

/// Operands of the weight's gradient, and those by MS-EDEN, equal the oracle's quantization of the
/// transformed values, including padding, and are compared with those values.
#[test]
fn transformed_operands_are_measured_in_their_basis() {
    skip_where_small_only!();
    let device = device().autodiff();
    // A number of tokens that fills no block of any size.
    let tokens = 40;
    let x = Matrix::gaussian(tokens, WIDTHS[0], DType::F32, 5);
    let dy = Matrix::gaussian(tokens, WIDTHS[1], DType::F32, 6);
    for preset in ["nvidia", "per_token", "quartet2"] {
        let recipe = Nvfp4Recipe::preset(preset).unwrap().with_seed(3);
        let layer = Nvfp4LinearConfig::new(WIDTHS[0], WIDTHS[1])
            .with_recipe(recipe.clone())
            .init(&device);
        let spec = recipe.spec(&layer.state.rng_state());
        let telemetry = Telemetry::start(&layer);
        let y = layer.forward(x.tensor(&device).require_grad());
        (y * dy.tensor(&device)).sum().backward();
        let samples = telemetry.finish();
        let names: Vec<&str> = samples.iter().map(|sample| sample.operand).collect();
        assert_eq!(names, OPERANDS, "{preset}");
        let (rows, cols) = (Usage::Columnwise, Usage::Rowwise);
        let wgrad_x = match spec.source {
            BackwardSource::Original => x.operand(&spec.wgrad_x, rows, DType::F32),
            BackwardSource::Forward => {
                x.operand(&spec.fprop_x, cols, DType::F32)
                    .again(&spec.wgrad_x, rows, DType::F32)
            }
        };
        let dgrad_dy = dy.operand(&spec.dgrad_dy, cols, DType::F32);
        let wgrad_dy = dy.operand(&spec.wgrad_dy, rows, DType::F32);
        for (found, exact, spec, operand) in [
            (&samples[2], &x, spec.wgrad_x, wgrad_x),
            (&samples[3], &dy, spec.dgrad_dy, dgrad_dy),
            (&samples[4], &dy, spec.wgrad_dy, wgrad_dy),
        ] {
            let hadamard = params_of(spec).hadamard;
            let Operand::Nvfp4(packed) = operand else {
                panic!("{preset}: {} is no NVFP4", found.operand);
            };
            assert_transformed_sample(found, &[(exact, packed)], hadamard);
        }
        assert!(samples[3].stochastic && samples[4].stochastic, "{preset}");
    }
}
