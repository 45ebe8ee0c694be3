//! Post-training quantization on the device: byte for byte that of the host.

use nvfp4_formats::ptq::{self, BlockQuantizer, Rule, ScaleChoice, block_amax, linalg};
use nvfp4_kernels::cubecl::prelude::Client;
use nvfp4_kernels::ptq::{InputMoments, InverseFactor, gptq, round_rows};

use crate::support::device::upload;
use crate::support::inputs::Generator;

const DAMPING: f64 = 0.01;
const RULES: [Rule; 2] = [Rule::ModelOpt, Rule::CompressedTensors];
const CHOICES: [ScaleChoice; 3] = [
    ScaleChoice::Max,
    ScaleChoice::FourOverSix,
    ScaleChoice::Search,
];

/// Moments of inputs on host and device.
struct Moments {
    squares: Vec<f64>,
    amax: Vec<f32>,
    /// Lower triangle of Σ x xᵀ.
    products: Vec<f64>,
    tokens: usize,
    device: InputMoments,
}

impl Moments {
    /// Adds `tokens` inputs of `k` features in two parts. Features have different sizes.
    fn new(client: &Client, k: usize, tokens: usize) -> Self {
        let mut random = Generator::new(k as u32);
        let size = |i: usize| 0.25 + (i % 7) as f32;
        let values: Vec<f32> = (0..tokens * k)
            .map(|i| random.normal() * size(i % k))
            .collect();
        let mut moments = Self {
            squares: vec![0.0; k],
            amax: vec![0.0; k],
            products: vec![0.0; k * k],
            tokens,
            device: InputMoments::new(client, k, true),
        };
        let x = upload(client, &values, tokens, k);
        let split = tokens / 3;
        for rows in [0..split, split..tokens] {
            moments.device.add(client, &x, rows.clone()).unwrap();
            let part = &values[rows.start * k..rows.end * k];
            linalg::add_products(&mut moments.products, part, k);
            for row in part.chunks_exact(k) {
                for (j, &x) in row.iter().enumerate() {
                    moments.squares[j] += f64::from(x) * f64::from(x);
                    moments.amax[j] = moments.amax[j].max(x.abs());
                }
            }
        }
        moments
    }

    /// Returns the factor on the host, of inputs divided by `columns`.
    fn factor(&self, columns: &[f32]) -> ptq::InverseFactor {
        let (k, tokens) = (self.amax.len(), self.tokens as f64);
        let mut hessian = vec![0.0; k * k];
        for (i, j) in (0..k).flat_map(|i| (0..=i).map(move |j| (i, j))) {
            let [a, b] = [i, j].map(|i| f64::from(columns[i]));
            let mean = self.products[i * k + j] / (a * b) / tokens;
            hessian[i * k + j] = mean;
            hessian[j * k + i] = mean;
        }
        ptq::InverseFactor::new(hessian, k, DAMPING).unwrap()
    }
}

/// A weight with zeros, a block of zeros and an outlier.
fn weight(n: usize, k: usize) -> Vec<f32> {
    let mut random = Generator::new((n * k) as u32);
    let mut values: Vec<f32> = (0..n * k).map(|_| random.normal() * 0.02).collect();
    values[..16].fill(-0.0);
    values[17] = 0.0;
    values[18] = -0.0;
    values[n * k - 1] = -0.9;
    values[n * k - 20] = 1e-30;
    values
}

fn quantizers(values: &[f32]) -> impl Iterator<Item = BlockQuantizer> {
    let amax = block_amax(values);
    let all = RULES
        .into_iter()
        .flat_map(|rule| CHOICES.map(|choice| (rule, choice)));
    all.map(move |(rule, choice)| BlockQuantizer::new(rule, choice, amax))
}

#[test]
fn moments_are_those_of_the_host() {
    let client = client!("ptq::moments_are_those_of_the_host");
    for (k, tokens) in [(16, 1), (48, 5), (160, 37)] {
        let moments = Moments::new(&client, k, tokens);
        let found = moments.device.features(&client).unwrap();
        assert_eq!(found.amax, moments.amax);
        assert_eq!(found.squares, moments.squares);
        let products = moments.device.products_on_host(&client).unwrap();
        assert_eq!(products, moments.products);
        assert_eq!(moments.device.tokens(), tokens as u64);
    }
    let mut moments = InputMoments::new(&client, 16, false);
    let x = upload(
        &client,
        &[[0.0f32; 15].as_slice(), &[f32::NAN]].concat(),
        1,
        16,
    );
    moments.add(&client, &x, 0..1).unwrap();
    let error = moments.features(&client).unwrap_err().to_string();
    assert!(error.contains("NaN in feature 15"), "{error}");
    assert!(moments.add(&client, &x, 0..2).is_err());
    let narrow = upload(&client, &[0.0f32; 16], 2, 8);
    let error = moments.add(&client, &narrow, 0..1).unwrap_err().to_string();
    assert!(error.contains("width 8"), "{error}");
}

/// Widths of one panel and of several, the last of them not full.
#[test]
fn factors_are_those_of_the_host() {
    let client = client!("ptq::factors_are_those_of_the_host");
    for k in [16, 64, 80, 208] {
        let moments = Moments::new(&client, k, 2 * k);
        let columns: Vec<f32> = (0..k).map(|i| 0.5 + (i % 5) as f32 / 3.0).collect();
        for columns in [None, Some(&columns[..])] {
            let expected = moments.factor(columns.unwrap_or(&vec![1.0; k]));
            let found = InverseFactor::new(&client, &moments.device, columns, DAMPING).unwrap();
            let found = found.to_host(&client).unwrap();
            for (i, (found, expected)) in found.iter().zip(expected.upper()).enumerate() {
                assert_eq!(found, expected, "{k}: row {}, column {}", i / k, i % k);
            }
        }
    }
    // Without damping, the second moments of one token have rank 1.
    let moments = Moments::new(&client, 32, 1);
    let error = InverseFactor::new(&client, &moments.device, None, 0.0).unwrap_err();
    assert!(error.to_string().contains("pivot 1 of 32"), "{error}");
    for (products, tokens) in [(false, 1), (true, 0)] {
        let mut empty = InputMoments::new(&client, 32, products);
        let x = upload(&client, &[1.0f32; 32], 1, 32);
        empty.add(&client, &x, 0..tokens).unwrap();
        let error = InverseFactor::new(&client, &empty, None, DAMPING).unwrap_err();
        assert!(error.to_string().contains("products of tokens"), "{error}");
    }
}

#[test]
fn rows_are_rounded_as_on_the_host() {
    let client = client!("ptq::rows_are_rounded_as_on_the_host");
    let (n, k) = (9, 80);
    let values = weight(n, k);
    let weights: Vec<f32> = (0..k).map(|i| 0.1 + (i % 5) as f32).collect();
    for quantizer in quantizers(&values) {
        let expected = ptq::round_rows(&values, &quantizer, &weights);
        let found = round_rows(&client, &values, &quantizer, &weights).unwrap();
        assert_eq!(found.1, expected.1, "scales, {quantizer:?}");
        assert_eq!(found.0, expected.0, "codes, {quantizer:?}");
    }
    let quantizer = BlockQuantizer::new(Rule::TransformerEngine, ScaleChoice::Max, 1.0);
    let error = round_rows(&client, &values, &quantizer, &weights).unwrap_err();
    assert!(error.to_string().contains("TransformerEngine"), "{error}");
    let quantizer = BlockQuantizer::new(Rule::ModelOpt, ScaleChoice::Max, 1.0);
    assert!(round_rows(&client, &values, &quantizer, &weights[1..]).is_err());
}

/// Widths of one panel of columns and of several, the last of them not full.
#[test]
fn compensated_rows_are_those_of_the_host() {
    let client = client!("ptq::compensated_rows_are_those_of_the_host");
    for (n, k) in [(5, 32), (7, 272)] {
        let moments = Moments::new(&client, k, 2 * k);
        let factor = InverseFactor::new(&client, &moments.device, None, DAMPING).unwrap();
        let on_host = moments.factor(&vec![1.0; k]);
        let values = weight(n, k);
        let weights: Vec<f32> = (moments.squares.iter())
            .map(|sum| (sum / moments.tokens as f64) as f32)
            .collect();
        for quantizer in quantizers(&values) {
            let expected = ptq::gptq(&values, &on_host, &quantizer, &weights);
            let found = gptq(&client, &values, &factor, &quantizer, &weights).unwrap();
            assert_eq!(found.1, expected.1, "scales, {k}, {quantizer:?}");
            assert_eq!(found.0, expected.0, "codes, {k}, {quantizer:?}");
        }
        let quantizer = BlockQuantizer::new(Rule::ModelOpt, ScaleChoice::Max, 1.0);
        let error = gptq(&client, &[0.0; 16], &factor, &quantizer, &[1.0; 16]).unwrap_err();
        assert!(error.to_string().contains("factor"), "{error}");
    }
}
