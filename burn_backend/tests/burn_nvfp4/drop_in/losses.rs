//! Cross entropy: the values and gradients of burn-nn's.

use burn_core::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_nn::loss as burn_loss;
use burn_nvfp4::nn::loss as our_loss;

use crate::attention::{argument, assert_near, tensor};
use crate::support::{counted, device, flex_only, values};

/// Sizes that no other test has.
const ROWS: usize = 11;
const CLASSES: usize = 37;

fn targets(device: &Device) -> Tensor<1, Int> {
    let targets = Tensor::<1, Int>::arange(0..ROWS as i64, device);
    targets.mul_scalar(5).remainder_scalar(CLASSES as i64)
}

#[test]
fn losses_are_burn_nns() {
    flex_only!();
    let plain = device();
    let device = plain.clone().autodiff();
    let _alone = counted::collect();
    let weights: Vec<f32> = (1..=CLASSES).map(|class| class as f32 * 0.1).collect();
    // The fused kernel computes the first cases.
    macro_rules! case {
        ($config:ident => $options:expr) => {{
            let with = |config: our_loss::CrossEntropyLossConfig| {
                let $config = config;
                $options
            };
            let burns_with = |config: burn_loss::CrossEntropyLossConfig| {
                let $config = config;
                $options
            };
            let ours = with(our_loss::CrossEntropyLossConfig::new());
            let burns = burns_with(burn_loss::CrossEntropyLossConfig::new());
            (ours.init(&device), burns.init(&device))
        }};
    }
    let cases = [
        (case!(config => config), true),
        (case!(config => config.with_pad_tokens(Some(vec![5]))), true),
        (case!(config => config.with_pad_tokens(Some(vec![]))), true),
        (case!(config => config.with_smoothing(Some(0.3))), true),
        (
            case!(config => config.with_pad_tokens(Some(vec![0])).with_smoothing(Some(0.1))),
            true,
        ),
        (
            case!(config => config.with_pad_tokens(Some(vec![5, 10]))),
            false,
        ),
        (
            case!(config => config.with_weights(Some(weights.clone()))),
            false,
        ),
        (case!(config => config.with_logits(false)), false),
    ];
    for (index, ((ours, burns), is_fused)) in cases.into_iter().enumerate() {
        let logits = tensor([ROWS, CLASSES], 1, &plain);
        let input = match ours.logits {
            true => logits,
            false => burn_core::tensor::activation::softmax(logits, 1),
        };
        macro_rules! results {
            ($loss:ident) => {{
                let x = Tensor::from_inner(input.clone()).require_grad();
                let loss = $loss.forward(x.clone(), targets(&plain));
                let grads = loss.clone().backward();
                (values(loss), values(x.grad(&grads).unwrap()))
            }};
        }
        counted::taken();
        let (found, gradient) = results!(ours);
        let is_kernel = |work: &counted::Work| {
            work.op == "cross_entropy" && [work.rows, work.cols] == [ROWS as u64, CLASSES as u64]
        };
        assert_eq!(counted::taken().iter().any(is_kernel), is_fused, "{index}");
        let (expected, expected_gradient) = results!(burns);
        assert_near(&format!("loss {index}"), &found, &expected, 1e-5);
        assert_near(
            &format!("gradient {index}"),
            &gradient,
            &expected_gradient,
            1e-5,
        );
    }
}

#[test]
fn losses_keep_the_dtype_of_the_logits() {
    flex_only!();
    let device = device();
    let logits = tensor::<2>([ROWS, CLASSES], 1, &device).cast(FloatDType::BF16);
    let loss = our_loss::CrossEntropyLoss::new(Some(5), &device);
    let found = loss.forward(logits.clone(), targets(&device));
    assert_eq!(found.dtype(), DType::BF16);
    let expected = loss.forward(logits.cast(FloatDType::F32), targets(&device));
    assert_near("bf16", &values(found), &values(expected), 4e-3);
    let all = loss.forward(
        tensor([ROWS, CLASSES], 1, &device),
        targets(&device).mul_scalar(0).add_scalar(5),
    );
    assert_eq!(values(all), [0.0], "all rows are ignored");
}

#[test]
fn bad_losses_are_named() {
    flex_only!();
    let device = device();
    let config = our_loss::CrossEntropyLossConfig::new;
    let refused = |config: our_loss::CrossEntropyLossConfig| argument(config.try_init(&device));
    assert_eq!(refused(config().with_smoothing(Some(1.5))), "smoothing");
    assert_eq!(
        refused(config().with_smoothing(Some(f32::NAN))),
        "smoothing"
    );
    assert_eq!(
        refused(config().with_weights(Some(vec![1.0, 0.0]))),
        "weights"
    );
    let logits = tensor::<2>([ROWS, CLASSES], 1, &device);
    let short = targets(&device).narrow(0, 1, ROWS - 1);
    for config in [config(), config().with_pad_tokens(Some(vec![0, 1]))] {
        let loss = config.init(&device);
        let bad = loss.try_forward(logits.clone(), short.clone());
        assert_eq!(argument(bad), "targets");
        let double = logits.clone().cast(FloatDType::F64);
        let bad = loss.try_forward(double, targets(&device));
        assert_eq!(argument(bad), "logits");
    }
    let weighted = config().with_weights(Some(vec![1.0; 3])).init(&device);
    let bad = weighted.try_forward(logits, targets(&device));
    assert_eq!(argument(bad), "weights");
}
