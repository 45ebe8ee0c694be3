//! Overlapped exchanges give the bits of serialized ones.

use burn_core::module::Module;
use burn_core::tensor::{DType, Tensor};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::nn::{ExpertDispatch, ExpertParallelMoe, MoeOutput};

use super::{Case, Found, on_ranks};
use crate::support::{activation, device, skip_where_small_only, small_only, values};

const DISPATCHES: [ExpertDispatch; 2] = [ExpertDispatch::AllToAll, ExpertDispatch::AllGather];

/// Mixtures on two ranks with a shared expert, in high precision and in NVFP4, with overlapped
/// exchanges.
pub(super) fn cases() -> Vec<(String, Case)> {
    let mut cases = Vec::new();
    let (presets, tokens): (&[&str], _) = match small_only() {
        true => (&["nvidia"], [4, 4]),
        false => (&["bf16", "nvidia"], [24, 24]),
    };
    for preset in presets {
        for dispatch in DISPATCHES {
            let recipe = Nvfp4Recipe::preset(preset).unwrap();
            let case = Case {
                shared: true,
                dispatch,
                overlap: true,
                ..Case::new(&recipe, 4, 2, &tokens)
            };
            cases.push((format!("{preset}, {dispatch:?}"), case));
        }
    }
    cases
}

/// Asserts that all results of the case equal those of serialized exchanges.
fn check_bits(what: &str, case: &Case) {
    let of = |overlap| {
        Case {
            overlap,
            ..case.clone()
        }
        .on_ranks()
    };
    let (found, expected): (Vec<Found>, Vec<Found>) = (of(true), of(false));
    for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(found.dx == expected.dx, "{what}: dx of rank {rank}");
        assert!(found == expected, "{what}: rank {rank}");
        assert!(found.dx.iter().any(|&x| x != 0.0), "{what}");
    }
}

#[test]
fn bits_are_those_of_exchanges_in_line() {
    for (what, case) in cases() {
        check_bits(&what, &case);
        if small_only() {
            continue;
        }
        let losses = Some([30.0, 20.0]);
        let others = [
            (
                "losses",
                Case {
                    losses,
                    ..case.clone()
                },
            ),
            (
                "no shared expert",
                Case {
                    shared: false,
                    losses,
                    ..case.clone()
                },
            ),
            (
                "computed again",
                Case {
                    recompute: true,
                    losses,
                    ..case.clone()
                },
            ),
            (
                "checkpointing",
                Case {
                    checkpointing: true,
                    losses,
                    ..case.clone()
                },
            ),
            (
                "activations",
                Case {
                    dtype: activation(),
                    losses,
                    ..case.clone()
                },
            ),
            (
                "half",
                Case {
                    dtype: DType::F16,
                    losses,
                    ..case.clone()
                },
            ),
            (
                "four ranks",
                Case {
                    tokens: vec![12; 4],
                    losses,
                    ..case.clone()
                },
            ),
            (
                "one expert",
                Case {
                    favourite: Some(3),
                    top_k: 1,
                    ..case.clone()
                },
            ),
        ];
        for (other, case) in others {
            check_bits(&format!("{what}, {other}"), &case);
        }
        if case.dispatch == ExpertDispatch::AllToAll {
            let tokens = vec![5, 30];
            check_bits(&format!("{what}, unequal"), &Case { tokens, ..case });
        }
    }
}

/// Returns the results of a rank, which may be fewer if less is tracked.
fn untracked(
    case: &Case,
    freeze: fn(ExpertParallelMoe) -> ExpertParallelMoe,
    loss: fn(MoeOutput<2>) -> Tensor<1>,
) -> Vec<Vec<Vec<f32>>> {
    on_ranks(2, |group| {
        let device = case.device();
        let moe = freeze(case.part_of_moe(&device, &group));
        let x = case.rows(case.part(group.rank()), 5, &device);
        let out = moe.forward(x);
        let mut found = vec![values(out.output.clone())];
        let gradients = loss(out).backward();
        let shared = moe.shared.as_ref().expect("there is one");
        for weight in [
            &moe.router.weight,
            &shared.gate_up.weight,
            &shared.down.weight,
        ] {
            found.extend(weight.grad(&gradients).map(values));
        }
        for weight in [&moe.gate_up.weight, &moe.down.weight] {
            found.extend(weight.grad(&gradients).map(values));
        }
        found
    })
}

/// The tokens, some of the parameters, or some of the results have no gradient.
#[test]
fn bits_are_those_where_less_is_tracked() {
    skip_where_small_only!();
    type Freeze = fn(ExpertParallelMoe) -> ExpertParallelMoe;
    type Loss = fn(MoeOutput<2>) -> Tensor<1>;
    let output: Loss = |out| out.output.square().sum();
    let frozen: [(&str, Freeze, Loss, usize); 5] = [
        ("nothing", |moe| moe, output, 6),
        (
            "the router",
            |mut moe| {
                moe.router = moe.router.no_grad();
                moe
            },
            output,
            5,
        ),
        (
            "the shared expert",
            |mut moe| {
                moe.shared = moe.shared.map(Module::no_grad);
                moe
            },
            output,
            4,
        ),
        (
            "experts",
            |mut moe| {
                moe.gate_up = moe.gate_up.no_grad();
                moe.down = moe.down.no_grad();
                moe
            },
            output,
            4,
        ),
        ("all but a loss", |moe| moe, |out| out.balance_loss, 2),
    ];
    for (what, case) in cases() {
        for (frozen, freeze, loss, count) in frozen {
            let of = |overlap| {
                untracked(
                    &Case {
                        overlap,
                        ..case.clone()
                    },
                    freeze,
                    loss,
                )
            };
            let (found, expected) = (of(true), of(false));
            assert!(found == expected, "{what}: without {frozen}");
            assert!(
                found.iter().all(|found| found.len() == count),
                "{what}: without {frozen}"
            );
        }
    }
}

/// Without autodiff, and with nothing tracked by autodiff.
#[test]
fn bits_are_those_of_inference() {
    for (what, case) in cases() {
        let of = |overlap: bool, plain: bool| {
            let case = Case {
                overlap,
                ..case.clone()
            };
            on_ranks(2, |group| {
                let differentiated = case.device();
                let moe = case.part_of_moe(&differentiated, &group);
                let (moe, device) = match plain {
                    true => (moe.valid(), device()),
                    false => (moe.no_grad(), differentiated),
                };
                let out = moe.forward(case.rows(case.part(group.rank()), 5, &device));
                assert!(!out.output.is_tracked());
                values(out.output)
            })
        };
        for plain in [true, false] {
            assert!(of(true, plain) == of(false, plain), "{what}, {plain}");
        }
    }
}
