//! Fusion that stops exploring. Runs in a separate process, because Burn reads the limit once.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_core::tensor::{Device, Distribution, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::{Decorator, Nvfp4Recipe, decorate};

use crate::support::own_process::own_process;

/// Runs GEMMs of new shapes until the limit is used up: those before it run in NVFP4; those after
/// it are errors in strict mode and counted in lenient mode. High precision never computes a number
/// unnoticed.
#[test]
fn a_used_up_exploration_limit_is_noticed() {
    own_process!("decorate_limits");
    // SAFETY: the only test of this process, before any thread of Burn exists.
    unsafe { std::env::set_var("BURN_FUSION_MAX_EXPLORATIONS", "2") };
    decorate::install().unwrap();
    let device = nvfp4_test_support::cpu_runtime(Device::cpu).autodiff();
    let layer = || -> Linear { LinearConfig::new(16, 16).init(&device) };
    let strict = decorate(layer(), &Nvfp4Recipe::new()).unwrap();
    let lenient = Decorator::new(&Nvfp4Recipe::new())
        .lenient()
        .decorate(layer())
        .unwrap();
    let x = Tensor::<2>::random([16, 16], Distribution::Default, &device);

    let run = |layer: &Linear| {
        let y = layer.forward(x.clone().require_grad().exp());
        let loss = y.sum();
        let value: f32 = loss.clone().into_scalar();
        loss.backward();
        value
    };
    let mut failed = None;
    for step in 0..4 {
        let value = catch_unwind(AssertUnwindSafe(|| run(&strict)));
        let report = decorate::report(&strict).unwrap();
        eprintln!("strict, step {step}: {value:?}\n{report}");
        if let Err(error) = report.check() {
            failed.get_or_insert(error.to_string());
        }
        match value {
            Ok(value) if report.layers[""].forward.missed == 0 => assert!(value.is_finite()),
            Ok(value) => assert!(value.is_nan(), "a number from a missed GEMM"),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                assert!(text.contains("layer ``"), "{text}");
            }
        }
    }
    let failed = failed.expect("the limit was used up");
    assert!(
        failed.contains("layer ``") && failed.contains("did not run in NVFP4"),
        "{failed}"
    );

    for _ in 0..2 {
        assert!(run(&lenient).is_finite());
    }
    let report = decorate::report(&lenient).unwrap();
    eprintln!("lenient\n{report}");
    let forward = report.layers[""].forward;
    assert_eq!(forward.missed + forward.nvfp4, 2);
    assert!(report.missed() > 0);
    assert!(report.check().is_err());
}
