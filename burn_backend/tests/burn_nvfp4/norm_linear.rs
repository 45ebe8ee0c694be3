//! Norms followed by a packed linear layer: the bits of the separate steps, in one kernel if the
//! device has it.

use burn_core::module::Param;
use burn_core::tensor::{DType, Device, Tensor, TensorData};
use burn_nvfp4::functions::try_swiglu;
use burn_nvfp4::nn::{
    Activations, NormLinear, Nvfp4PackedLinear, Nvfp4Weight, ResidualStream, RmsNorm, RmsNormConfig,
};
use burn_nvfp4::{Nvfp4Error, Rounding, Usage};
use nvfp4_formats::{Amax, QuantParams, reference};

use crate::support::counted::{collect, taken};
use crate::support::{Matrix, activation, device, gaussian, gpu_only, values};

const K: usize = 128;
const N: usize = 104;
/// No other test has a weight with this many rows, which identifies the work of this one.
const COUNTED: usize = 136;

fn weight(n: usize, device: &Device) -> Nvfp4Weight {
    let source = gaussian(n * K, 31);
    let amax = Amax::Tensor(reference::amax(&source));
    let params = QuantParams::nvfp4(Rounding::Nearest);
    let made = reference::quantize(&source, n, K, Usage::Rowwise, &amax, &params, 0).unwrap();
    let (codes, scales) = (made.codes().to_vec(), made.scales().to_vec());
    Nvfp4Weight::try_from_bytes([n, K], codes, scales, vec![0.01], device).unwrap()
}

fn norm(device: &Device) -> RmsNorm {
    let gain = gaussian(K, 32);
    let mut norm = RmsNormConfig::new(K).init(device);
    let gain = Tensor::from_data(TensorData::new(gain, [K]), device);
    norm.gamma = Param::from_tensor(gain);
    norm
}

fn linear(activations: Activations, bias: bool, device: &Device) -> Nvfp4PackedLinear {
    let bias = bias.then(|| Tensor::from_data(TensorData::new(gaussian(N, 33), [N]), device));
    Nvfp4PackedLinear::try_new(weight(N, device), activations, None, bias).unwrap()
}

fn stream(dtype: DType, [batch, time]: [usize; 2], pending: bool) -> ResidualStream {
    let draw = |seed| -> Tensor<3> {
        let rows = Matrix::gaussian(batch * time, K, dtype, seed).tensor(&device());
        rows.reshape([batch, time, K])
    };
    ResidualStream {
        sum: draw(34),
        pending: pending.then(|| draw(35)),
    }
}

/// Runs the steps separately.
fn separate(of: &NormLinear<'_>, stream: ResidualStream) -> (Tensor<3>, Tensor<3>) {
    let (sum, x) = of.norm.try_forward_stream(stream).unwrap();
    let y = of.linear.forward(x);
    let y = match of.swiglu {
        true => try_swiglu(y).unwrap(),
        false => y,
    };
    (sum, y)
}

#[test]
fn it_has_the_bits_of_its_parts() {
    let norm = norm(&device());
    for activations in [Activations::HighPrecision, Activations::DYNAMIC] {
        for (i, shape) in [[1, 1], [1, 3], [4, 5]].into_iter().enumerate() {
            for (dtype, pending, swiglu) in [
                (activation(), true, true),
                (activation(), true, false),
                (activation(), false, i == 1),
                (DType::F32, true, true),
            ] {
                let linear = linear(activations, i == 1, &device());
                let fused = NormLinear {
                    norm: &norm,
                    linear: &linear,
                    swiglu,
                };
                let (sum, y) = fused.try_forward(stream(dtype, shape, pending)).unwrap();
                let (sum_parts, y_parts) = separate(&fused, stream(dtype, shape, pending));
                let what = format!("{activations:?} {dtype:?} {shape:?} {pending} {swiglu}");
                let [batch, time] = shape;
                let width = if swiglu { N / 2 } else { N };
                assert_eq!(y.dims(), [batch, time, width], "{what}");
                assert_eq!((y.dtype(), sum.dtype()), (dtype, dtype), "{what}");
                let bits = |x: Tensor<3>| -> Vec<u32> {
                    values(x).into_iter().map(f32::to_bits).collect()
                };
                assert_eq!(bits(sum), bits(sum_parts), "{what}");
                let (found, expected) = (bits(y), bits(y_parts));
                assert!(expected.iter().any(|bits| *bits != 0), "{what}");
                assert_eq!(found, expected, "{what}");
            }
        }
    }
}

/// On a GPU one row uses one kernel: no separate norm, GEMM or activation.
#[test]
fn one_row_takes_one_kernel() {
    gpu_only!();
    let _alone = collect();
    let (norm, weight) = (norm(&device()), weight(COUNTED, &device()));
    let linear =
        Nvfp4PackedLinear::try_new(weight, Activations::HighPrecision, None, None).unwrap();
    let fused = NormLinear {
        norm: &norm,
        linear: &linear,
        swiglu: true,
    };
    let stream = stream(DType::BF16, [1, 1], true);
    taken();
    let (_, y) = fused.try_forward(stream).unwrap();
    assert_eq!(values(y).len(), COUNTED / 2);
    let work = taken();
    let of = |op: &str, cols: usize| {
        let is_it = |work: &&_| {
            let work: &crate::support::counted::Work = work;
            work.op == op && (work.rows, work.cols) == (1, cols as u64)
        };
        work.iter().filter(is_it).count()
    };
    assert_eq!(of("norm_linear", COUNTED), 1, "{work:?}");
    assert_eq!(
        of("gemm", COUNTED) + of("activation", COUNTED),
        0,
        "{work:?}"
    );
}

/// With gradients it computes the separate steps, and so do the backwards.
#[test]
fn gradients_are_those_of_its_parts() {
    let autodiff = device().autodiff();
    let (norm, linear) = (
        norm(&autodiff),
        linear(Activations::HighPrecision, true, &autodiff),
    );
    let fused = NormLinear {
        norm: &norm,
        linear: &linear,
        swiglu: true,
    };
    let gradients = |forward: &dyn Fn(ResidualStream) -> (Tensor<3>, Tensor<3>)| {
        let ResidualStream { sum, pending } = stream(DType::F32, [1, 3], true);
        let tracked = |x: Tensor<3>| -> Tensor<3> {
            Tensor::from_data(x.into_data(), &autodiff).require_grad()
        };
        let (x, pending) = (tracked(sum), tracked(pending.unwrap()));
        let (sum, y) = forward(ResidualStream {
            sum: x.clone(),
            pending: Some(pending.clone()),
        });
        let grads = (sum.sum() + (y.clone() * y).sum()).backward();
        let all = [
            values(x.grad(&grads).unwrap()),
            values(pending.grad(&grads).unwrap()),
            values(norm.gamma.grad(&grads).unwrap()),
        ];
        assert!(all.iter().all(|grad| grad.iter().any(|x| *x != 0.0)));
        all
    };
    let found = gradients(&|stream| fused.try_forward(stream).unwrap());
    let expected = gradients(&|stream| separate(&fused, stream));
    assert_eq!(found, expected);
}

#[test]
fn bad_arguments_are_named() {
    let (norm, linear) = (
        norm(&device()),
        linear(Activations::HighPrecision, false, &device()),
    );
    let odd = Nvfp4PackedLinear::try_new(
        weight(N - 1, &device()),
        Activations::HighPrecision,
        None,
        None,
    )
    .unwrap();
    let fused = NormLinear {
        norm: &norm,
        linear: &linear,
        swiglu: true,
    };
    let good = || stream(DType::F32, [1, 2], true);
    let narrow: Tensor<3> = good().sum.narrow(2, 0, K - 16);
    let cases: [(&str, Result<_, Nvfp4Error>); 4] = [
        (
            "residual",
            fused.try_forward(ResidualStream {
                sum: stream(DType::F32, [1, 3], false).sum,
                ..good()
            }),
        ),
        (
            "residual",
            fused.try_forward(ResidualStream {
                pending: Some(stream(DType::BF16, [1, 2], false).sum),
                ..good()
            }),
        ),
        ("gamma", fused.try_forward(narrow.into())),
        (
            "linear",
            NormLinear {
                linear: &odd,
                ..fused
            }
            .try_forward(good()),
        ),
    ];
    for (argument, found) in cases {
        let error = found.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(argument), "{argument}: {error}");
    }
}
