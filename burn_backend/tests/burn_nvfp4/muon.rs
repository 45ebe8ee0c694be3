//! Muon: orthogonalized updates, formula, state, and training.

use burn_core as burn;

use burn_core::module::{Module, Param, ParamId};
use burn_core::tensor::{DType, Device, FloatDType, Tensor, TensorData, activation::relu};
use burn_nvfp4::optim::{AdamWConfig, MuonConfig, MuonScale, NewtonSchulz};
use burn_optim::GradientsParams;

use crate::support::{burn_matmul_error, device, gaussian, skip_where_small_only, values};

/// In `f32`, so that the arithmetic can be reproduced.
const EXACT: NewtonSchulz = NewtonSchulz {
    coefficients: [3.4445, -4.7750, 2.0315],
    steps: 5,
    precision: FloatDType::F32,
};

/// Returns the singular values of `[rows, cols]` in ascending order: the roots of the eigenvalues
/// of the smaller Gram matrix, by cyclic Jacobi rotations.
fn singular_values(x: &[f32], rows: usize, cols: usize) -> Vec<f64> {
    let n = rows.min(cols);
    let at = |vector: usize, i: usize| -> f64 {
        let index = match rows <= cols {
            true => vector * cols + i,
            false => i * cols + vector,
        };
        f64::from(x[index])
    };
    let mut a = vec![vec![0.0; n]; n];
    for (p, row) in a.iter_mut().enumerate() {
        for (q, entry) in row.iter_mut().enumerate() {
            *entry = (0..rows.max(cols)).map(|i| at(p, i) * at(q, i)).sum();
        }
    }
    for _ in 0..30 {
        for p in 0..n {
            for q in p + 1..n {
                if a[p][q].abs() < 1e-300 {
                    continue;
                }
                let theta = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
                let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let c = 1.0 / (t * t + 1.0).sqrt();
                let s = t * c;
                for row in a.iter_mut() {
                    let (of_p, of_q) = (row[p], row[q]);
                    row[p] = c * of_p - s * of_q;
                    row[q] = s * of_p + c * of_q;
                }
                let (of_p, of_q) = (a[p].clone(), a[q].clone());
                for k in 0..n {
                    a[p][k] = c * of_p[k] - s * of_q[k];
                    a[q][k] = s * of_p[k] + c * of_q[k];
                }
            }
        }
    }
    let mut roots: Vec<f64> = (0..n).map(|i| a[i][i].max(0.0).sqrt()).collect();
    roots.sort_by(f64::total_cmp);
    roots
}

/// Each singular value is the polynomial of the input's, and near 1.
#[test]
fn singular_values_are_those_of_the_polynomial() {
    skip_where_small_only!();
    let device = device();
    for (count, rows, cols) in [(1, 8, 24), (1, 24, 8), (1, 12, 12), (3, 8, 12)] {
        let x = gaussian(count * rows * cols, (rows * 100 + cols) as u64);
        let data = TensorData::new(x.clone(), [count, rows, cols]);
        let given = Tensor::<3>::from_data(data, (&device, DType::F32));
        let made: Vec<f32> = EXACT.orthogonalize(given).into_data().iter().collect();
        let size = rows * cols;
        for (x, made) in x.chunks(size).zip(made.chunks(size)) {
            let norm = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let [a, b, c] = EXACT.coefficients;
            let step = |s: f64, _| a * s + b * s.powi(3) + c * s.powi(5);
            let start = singular_values(x, rows, cols);
            // Small values are raised, but not into the band.
            let inside = start[0] / norm > 0.01;
            let mut expected: Vec<f64> = start
                .iter()
                .map(|value| (0..EXACT.steps).fold(value / norm, step))
                .collect();
            expected.sort_by(f64::total_cmp);
            let found = singular_values(made, rows, cols);
            let bound = f64::from(burn_matmul_error(1e-4)) * 20.0;
            for (found, expected) in found.iter().zip(&expected) {
                let what = format!("{rows} x {cols}: {found} and {expected}");
                assert!((found - expected).abs() < bound, "{what}");
                assert!(!inside || (0.67..1.15).contains(found), "{what}");
            }
        }
    }
    let zeros = Tensor::<2>::zeros([4, 4], &device);
    assert_eq!(values(EXACT.orthogonalize(zeros)), vec![0.0; 16]);
}

/// `bf16`, the default, is near `f32`.
#[test]
fn bf16_is_near_f32() {
    skip_where_small_only!();
    let data = TensorData::new(gaussian(16 * 48, 8), [16, 48]);
    let given = Tensor::<2>::from_data(data, (&device(), DType::F32));
    let narrow = values(NewtonSchulz::default().orthogonalize(given.clone()));
    let exact = values(EXACT.orthogonalize(given));
    let square = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>();
    let error: Vec<f32> = narrow.iter().zip(&exact).map(|(a, b)| a - b).collect();
    let relative = (square(&error) / square(&exact)).sqrt();
    // Each iteration rounds to 8 bits, and multiplies small errors by 3.4.
    assert!(relative < 0.08 && relative > 0.0, "{relative}");
}

#[test]
fn scales_are_those_of_the_papers() {
    let original = |d_in, d_out| MuonScale::Original.factor(d_in, d_out);
    assert_eq!(original(64, 256), 2.0);
    assert_eq!(original(256, 64), 1.0);
    assert!((MuonScale::MatchAdamW.factor(64, 256) - 3.2).abs() < 1e-12);
    assert!((MuonScale::MatchAdamW.factor(256, 64) - 3.2).abs() < 1e-12);
}

#[derive(Module, Debug)]
struct Net {
    embedding: Param<Tensor<2>>,
    up: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
    down: Param<Tensor<2>>,
}

const WIDTHS: (usize, usize, usize) = (8, 16, 4);

impl Net {
    fn new(dtype: DType, device: &Device) -> Self {
        let matrix = |id: u64, rows: usize, cols: usize| {
            let scale = 1.0 / (rows as f32).sqrt();
            let values = gaussian(rows * cols, id).into_iter();
            let values: Vec<f32> = values.map(|value| value * scale).collect();
            let data = TensorData::new(values, [rows, cols]);
            let value = Tensor::<2>::from_data(data, (device, dtype)).require_grad();
            Param::initialized(ParamId::from(id), value)
        };
        let (d_in, hidden, d_out) = WIDTHS;
        let zeros = Tensor::<1>::zeros([hidden], (device, dtype)).require_grad();
        Self {
            embedding: matrix(1, d_in, d_in),
            up: matrix(2, d_in, hidden),
            bias: Param::initialized(ParamId::from(3), zeros),
            down: matrix(4, hidden, d_out),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = x.matmul(self.embedding.val());
        let up = x.matmul(self.up.val()) + self.bias.val().unsqueeze();
        relu(up).matmul(self.down.val())
    }

    fn bits(&self) -> Vec<u32> {
        let matrices = [&self.embedding, &self.up, &self.down];
        let all = matrices
            .into_iter()
            .flat_map(|matrix| values(matrix.val().inner()));
        all.chain(values(self.bias.val().inner()))
            .map(f32::to_bits)
            .collect()
    }
}

fn config() -> MuonConfig {
    MuonConfig {
        newton_schulz: EXACT,
        adamw: AdamWConfig {
            weight_decay: 0.0,
            ..AdamWConfig::default()
        },
        weight_decay: 0.0,
        ..MuonConfig::default()
    }
}

/// Returns the gradients of a regression, and its loss.
fn gradients(net: &Net, device: &Device) -> (GradientsParams, f32) {
    let (d_in, _, d_out) = WIDTHS;
    let dtype = net.up.val().dtype();
    let input = |len: usize, shape: [usize; 2], seed| {
        let data = TensorData::new(gaussian(len, seed), shape);
        Tensor::<2>::from_data(data, (device, dtype))
    };
    let x = input(32 * d_in, [32, d_in], 50);
    let target = x.clone().matmul(input(d_in * d_out, [d_in, d_out], 51));
    let error = net.forward(x) - target;
    let loss = (error.clone() * error).mean();
    let found = values(loss.clone().inner())[0];
    (GradientsParams::from_grads(loss.backward(), net), found)
}

#[test]
fn muon_lowers_the_loss() {
    skip_where_small_only!();
    let device = device().autodiff();
    for (dtype, scale, lr, goal) in [
        (DType::F32, MuonScale::MatchAdamW, 0.02, 0.2),
        (DType::F32, MuonScale::Original, 0.02, 0.2),
        (DType::BF16, MuonScale::MatchAdamW, 0.02, 0.3),
    ] {
        let mut net = Net::new(dtype, &device);
        let mut optimizer = MuonConfig { scale, ..config() }.init();
        let mut losses = Vec::new();
        for _ in 0..60 {
            let (gradients, loss) = gradients(&net, &device);
            losses.push(loss);
            net = optimizer.step(lr, net, gradients);
        }
        let last = losses[losses.len() - 1];
        assert!(last < goal * losses[0], "{dtype:?}, {scale:?}: {losses:?}");
        let of_muon: Vec<u64> = optimizer.states().keys().copied().collect();
        assert_eq!(of_muon, [2, 4]);
        let of_adamw: Vec<u64> = optimizer.adamw().moments().keys().copied().collect();
        assert_eq!(of_adamw, [1, 3]);
        assert_eq!((optimizer.time(), optimizer.adamw().time()), (60, 60));
    }
}

/// Two steps of one matrix follow the formula, with and without Nesterov momentum.
#[test]
fn steps_are_the_formula() {
    skip_where_small_only!();
    let device = device().autodiff();
    let plain = device.clone().inner();
    for nesterov in [true, false] {
        let config = MuonConfig {
            nesterov,
            momentum: 0.75,
            weight_decay: 0.5,
            learning_rate: 2.0,
            ..config()
        };
        let (lr, rate) = (0.1, 0.2);
        let mut optimizer = config.init();
        let mut net = Net::new(DType::F32, &device);
        let mut weight = net.up.val().inner();
        let mut momentum = Tensor::<2>::zeros([8, 16], &plain);
        for step in 0..2 {
            let data = TensorData::new(gaussian(8 * 16, 70 + step), [8, 16]);
            let gradient = Tensor::<2>::from_data(data, (&plain, DType::F32));
            let mut given = GradientsParams::new();
            given.register(2.into(), gradient.clone());
            net = optimizer.step(lr, net, given);
            momentum = momentum * 0.75 + gradient.clone() * 0.25;
            let direction = match nesterov {
                true => momentum.clone() * 0.75 + gradient * 0.25,
                false => momentum.clone(),
            };
            let update = EXACT.orthogonalize(direction) * (rate * 0.2 * 4.0);
            weight = weight * (1.0 - rate * 0.5) - update;
            let found = values(net.up.val().inner());
            for (found, expected) in found.iter().zip(values(weight.clone())) {
                // Burn may choose another matmul the second time.
                let near = (found - expected).abs() < burn_matmul_error(1e-5);
                assert!(near, "{found}, not {expected}");
            }
        }
        assert_eq!(net.bits()[..64], Net::new(DType::F32, &device).bits()[..64]);
    }
}

/// Training resumes from the saved state with the same bits.
#[test]
fn muon_resumes_from_its_state() {
    skip_where_small_only!();
    let device = device().autodiff();
    for dtype in [DType::F32, DType::BF16] {
        let mut net = Net::new(dtype, &device);
        let mut optimizer = config().init();
        let step = |optimizer: &mut burn_nvfp4::optim::Muon, net: Net| {
            let (gradients, _) = gradients(&net, &device);
            optimizer.step(0.01, net, gradients)
        };
        for _ in 0..3 {
            net = step(&mut optimizer, net);
        }
        let mut loaded = config().init();
        let time = (optimizer.time(), optimizer.adamw().time());
        let moments = optimizer.adamw().moments().clone();
        loaded
            .restore(time, optimizer.states().clone(), moments)
            .unwrap();
        let mut other = net.clone();
        for _ in 0..3 {
            net = step(&mut optimizer, net);
            other = step(&mut loaded, other);
        }
        assert_eq!(net.bits(), other.bits(), "{dtype:?}");
    }
}

#[test]
fn settings_outside_of_their_range_are_refused() {
    let refused = |config: MuonConfig| config.try_init().unwrap_err().to_string();
    let base = config;
    let adamw = AdamWConfig {
        beta_1: 2.0,
        ..AdamWConfig::default()
    };
    let schulz = |newton_schulz| MuonConfig {
        newton_schulz,
        ..base()
    };
    let cases = [
        (
            "momentum",
            MuonConfig {
                momentum: 1.0,
                ..base()
            },
        ),
        (
            "learning_rate",
            MuonConfig {
                learning_rate: 0.0,
                ..base()
            },
        ),
        (
            "weight_decay",
            MuonConfig {
                weight_decay: f64::NAN,
                ..base()
            },
        ),
        ("steps", schulz(NewtonSchulz { steps: 0, ..EXACT })),
        (
            "precision",
            schulz(NewtonSchulz {
                precision: FloatDType::F64,
                ..EXACT
            }),
        ),
        ("beta_1", MuonConfig { adamw, ..base() }),
    ];
    for (name, config) in cases {
        let message = refused(config);
        assert!(message.contains(&format!("`{name}`")), "{message}");
    }
    let device = device().autodiff();
    let mut given = GradientsParams::new();
    given.register(
        2.into(),
        Tensor::<2>::zeros([16, 8], &device.clone().inner()),
    );
    let mut optimizer = base().init();
    let error = optimizer.try_step(0.1, Net::new(DType::F32, &device), given);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`gradient`"), "{error}");
    assert_eq!(optimizer.time(), 0);
}
