//! Compares golden models with each other and with themselves.

use burn::tensor::{Device, FloatDType};

use super::*;
use crate::progress::tests::told;
use nvfp4_test_support::golden;

const WINDOWS: Windows = Windows {
    length: 24,
    stride: 12,
};

fn load(name: &str) -> Decoder {
    let device = Device::flex();
    Decoder::load_for_inference(&golden(name), &device, FloatDType::F32, None).unwrap()
}

/// Returns two texts; the second one is a single window.
fn texts() -> [Vec<u32>; 2] {
    let text = |count: u32, step: u32| (0..count).map(|i| (i * step + 5) % 280).collect();
    [text(60, 37), text(20, 53)]
}

#[test]
fn a_model_does_not_differ_from_itself() {
    let model = load("llama3-tiny");
    let windows = compare(&model, &model, &texts(), WINDOWS).unwrap();
    let zero = Estimate {
        mean: 0.0,
        error: 0.0,
    };
    let found = Comparison::over(&windows);
    assert_eq!((found.difference, found.divergence), (zero, zero));
    assert!(found.divergence.mean.is_sign_positive());
    assert_eq!(found.model, found.baseline);
}

#[test]
fn the_difference_is_that_of_separate_evaluations() {
    let [model, baseline] = ["llama3-tiny-ct-nvfp4a16", "llama3-tiny"].map(load);
    let compared = || compare(&model, &baseline, &texts(), WINDOWS);
    let (windows, told) = told("evaluate", compared);
    let windows = windows.unwrap();
    assert_eq!((told[1], *told.last().unwrap()), ((23, 78), (78, 78)));
    let found = Comparison::over(&windows);
    let alone = |model| window_losses(model, &texts(), WINDOWS).unwrap();
    let (own, other) = (alone(&model), alone(&baseline));
    let all: Vec<WindowLoss> = windows.iter().map(ComparedWindow::model).collect();
    assert_eq!(all, own);
    assert_eq!(own.iter().filter(|it| it.text == 1).count(), 1);
    let [own_mean, other_mean] = [&own, &other].map(|losses| CrossEntropy::over(losses).mean);
    assert_eq!(
        (found.model.mean, found.baseline.mean),
        (own_mean, other_mean)
    );
    let Estimate { mean, error } = found.difference;
    assert!((mean - (own_mean - other_mean)).abs() < 1e-12);
    assert_eq!(found.difference, Estimate::difference(&own, &other));
    // Both models find the same tokens hard.
    assert!(error < found.model.error, "{error}");
    // The mean of p (ln p − ln q) is positive, although single tokens may gain.
    assert!(found.divergence.mean > 1e-6, "{:?}", found.divergence);
    assert!(found.divergence.mean < 1.0, "{:?}", found.divergence);
}

#[test]
fn divergences_are_sums_over_the_vocabulary() {
    let [model, baseline] = ["llama3-tiny-ct-nvfp4a16", "llama3-tiny"].map(load);
    let text = texts()[1].clone();
    let windows = compare(&model, &baseline, std::slice::from_ref(&text), WINDOWS);
    let windows = windows.unwrap();
    let logs = |model: &Decoder| -> Vec<f64> {
        let logits = model.logits(features(model, &text).unwrap());
        let data = log_softmax(logits, 1).into_data();
        data.iter::<f32>().map(f64::from).collect()
    };
    let (q, p) = (logs(&model), logs(&baseline));
    let expected: f64 = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
    let [window] = windows[..] else {
        panic!("{windows:?}");
    };
    let error = (window.divergence - expected).abs();
    assert!(error < 1e-4 * (1.0 + expected), "{window:?}, {expected}");
}
