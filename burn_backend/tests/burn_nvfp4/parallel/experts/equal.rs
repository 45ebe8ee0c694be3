//! Outputs and gradients of several ranks equal those of one rank with the tokens of all ranks.

use burn_core::tensor::DType;
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::nn::MlpActivation;
use burn_nvfp4::recipe::QuantSpec;

use super::{Case, Found, difference, joined, summed};
use crate::support::{activation, flex_only, skip_where_small_only, small_only};

/// Returns the recipe of `preset`, without random bits.
fn nearest(preset: &str) -> Nvfp4Recipe {
    let recipe = Nvfp4Recipe::preset(preset).unwrap();
    recipe.with_stochastic_rounding(false)
}

/// Number of rows of each GEMM in the batch of GEMMs that computes the logits of this many tokens.
fn router_rows(tokens: usize) -> usize {
    tokens >> tokens.trailing_zeros().min(5)
}

/// Checks equality bit for bit, except for sums over the ranks: those of the replicated parameters
/// have `f32` terms per token, which are added in another order. If the GEMMs of the router have
/// other shapes, its contribution to the gradient of the tokens differs too.
fn check(what: &str, case: &Case) {
    let one = case.on_one();
    for case in case.dispatches() {
        let what = format!("{what}, {:?}", case.dispatch);
        check_one(&what, &case, &one);
    }
}

fn check_one(what: &str, case: &Case, one: &Found) {
    let ranks = case.on_ranks();
    check_bits(what, case, one, &ranks);
    let tokens: usize = case.tokens.iter().sum();
    let dx = joined(&ranks, |found| &found.dx);
    let rows = router_rows(tokens);
    if case.tokens.iter().all(|&part| router_rows(part) == rows) {
        assert_eq!(dx, one.dx, "{what}: dx");
    } else {
        near(what, "dx", [&dx, &one.dx], 8.0 * 2f32.powi(-24));
    }
    let bound = tokens as f32 * 2f32.powi(-24);
    for (name, found, expected) in [
        ("router", summed(&ranks, |found| &found.router), &one.router),
        ("shared", summed(&ranks, |found| &found.shared), &one.shared),
    ] {
        near(what, name, [&found, expected], bound);
    }
}

/// Asserts that the difference is less than `bound` of the largest magnitude.
fn near(what: &str, name: &str, [found, expected]: [&[f32]; 2], bound: f32) {
    let error = difference(found, expected);
    assert!(error < bound, "{what}: {name}: {error:e} of {bound:e}");
}

fn check_bits(what: &str, case: &Case, one: &Found, ranks: &[Found]) {
    let equal = |name: &str, of: fn(&Found) -> &Vec<f32>| {
        assert_eq!(&joined(ranks, of), of(one), "{what}: {name}");
    };
    if case.has_bits_of_one() {
        equal("y", |found| &found.y);
    } else {
        // The contributions of the ranks and their sum are rounded, and so is the result of one
        // rank.
        let unit = match case.dtype {
            DType::F32 => 2f32.powi(-24),
            _ => 2f32.powi(-9),
        };
        let bound = (case.tokens.len().min(case.top_k) + case.top_k) as f32 * unit;
        near(what, "y", [&joined(ranks, |found| &found.y), &one.y], bound);
    }
    if case.has_gradients_of_one() {
        equal("gate_up", |found| &found.gate_up);
        equal("down", |found| &found.down);
    } else {
        let bound = case.tokens.iter().sum::<usize>() as f32 * 2f32.powi(-24);
        let gate_up = joined(ranks, |found| &found.gate_up);
        near(what, "gate_up", [&gate_up, &one.gate_up], bound);
        let down = joined(ranks, |found| &found.down);
        near(what, "down", [&down, &one.down], bound);
    }
    for found in ranks {
        assert_eq!(found.counts, one.counts, "{what}: counts");
        for (loss, expected) in found.losses.iter().zip(one.losses) {
            let error = (loss - expected).abs() / expected.abs();
            assert!(error < 1e-6, "{what}: losses: {error:e}");
        }
        assert_eq!(found.losses, ranks[0].losses, "{what}: losses of ranks");
    }
}

/// Draws random bits for every operand, with weights in 1x16 blocks.
fn stochastic() -> Nvfp4Recipe {
    let drawn = QuantSpec::NVFP4.stochastic();
    let mut recipe = Nvfp4Recipe::new();
    (recipe.fprop.x, recipe.fprop.w) = (drawn, drawn);
    recipe.dgrad.w = drawn;
    recipe.wgrad.x = drawn.rht(32);
    recipe.wgrad.dy = drawn.rht(32);
    recipe.check().unwrap();
    recipe
}

#[test]
fn two_ranks_on_every_device() {
    let tokens: &[usize] = if small_only() { &[4, 4] } else { &[24, 24] };
    check("nearest", &Case::new(&nearest("nvidia"), 4, 2, tokens));
    check("nvidia", &Case::new(&Nvfp4Recipe::new(), 4, 2, tokens));
}

#[test]
fn two_and_four_ranks_with_every_preset() {
    skip_where_small_only!();
    for preset in Nvfp4Recipe::preset_names() {
        for recipe in [Nvfp4Recipe::preset(preset).unwrap(), nearest(preset)] {
            for tokens in [&[24, 24][..], &[12, 12, 12, 12]] {
                let case = Case::new(&recipe, 8, 2, tokens);
                check(&format!("{preset}, {} ranks", tokens.len()), &case);
            }
        }
    }
}

/// Random bits are those of one rank for every operand, which numbers the blocks of a rank after
/// all earlier blocks.
#[test]
fn with_random_bits_for_every_operand() {
    skip_where_small_only!();
    for (experts, top_k, tokens) in [(8, 2, &[24, 24][..]), (4, 1, &[6, 6, 6, 6])] {
        let case = Case::new(&stochastic(), experts, top_k, tokens);
        check(&format!("{tokens:?}"), &case);
    }
    // The random bits matter: those of another stream give other gradients.
    let case = Case::new(&stochastic(), 8, 2, &[24, 24]);
    let other = Case::new(&stochastic().with_seed(9), 8, 2, &[24, 24]);
    assert_ne!(case.on_one().gate_up, other.on_one().gate_up);
}

#[test]
fn in_the_type_of_activations() {
    skip_where_small_only!();
    for preset in ["nvidia", "bf16", "mxfp8"] {
        let mut case = Case::new(&nearest(preset), 4, 2, &[24, 24]);
        case.dtype = activation();
        check(preset, &case);
    }
}

/// Includes ranks with different numbers of tokens, so that a router's GEMM has other shapes: only
/// on Flex do its rows then have the same bits.
#[test]
fn ranks_with_few_and_different_tokens() {
    flex_only!();
    for (experts, top_k, tokens) in [
        (4, 1, &[3, 3][..]),
        (8, 1, &[2, 2, 2, 2]),
        (4, 4, &[16, 48]),
        (4, 4, &[32, 32]),
        (8, 4, &[16, 16, 16, 16]),
        (4, 3, &[7, 20, 1, 5]),
        (6, 2, &[1, 40]),
    ] {
        let case = Case::new(&nearest("nvidia"), experts, top_k, tokens);
        check(&format!("{top_k} of {experts}, {tokens:?}"), &case);
    }
}

/// One rank has all the work; the others get no rows.
#[test]
fn all_tokens_choose_one_expert() {
    let cases = [
        (3, &[5, 6][..]),
        (3, &[6, 6]),
        (0, &[5, 6]),
        (2, &[4, 4, 4, 4]),
    ];
    for (favourite, tokens) in cases {
        if small_only() && favourite != 3 {
            continue;
        }
        let mut case = Case::new(&nearest("nvidia"), 4, 1, tokens);
        case.favourite = Some(favourite);
        let what = format!("expert {favourite}, {tokens:?}");
        let one = case.on_one();
        for case in case.dispatches() {
            let ranks = case.on_ranks();
            check_bits(&what, &case, &one, &ranks);
            let held = 4 / tokens.len();
            for (rank, found) in ranks.iter().enumerate() {
                let all: usize = tokens.iter().sum();
                assert_eq!(found.counts[favourite] as usize, all);
                let has_it = favourite / held == rank;
                let is_zero = found.gate_up.iter().all(|&x| x == 0.0);
                assert_eq!(is_zero, !has_it, "{what}: rank {rank}");
            }
        }
    }
}

/// The shared expert quantizes the tokens of its rank, so it equals that of one rank in high
/// precision, and in formats without a scale beyond the blocks.
#[test]
fn with_a_shared_expert() {
    skip_where_small_only!();
    for preset in ["bf16", "mxfp8"] {
        for tokens in [&[96, 96][..], &[96, 96, 96, 96]] {
            let mut case = Case::new(&nearest(preset), 4, 2, tokens);
            case.shared = true;
            check(preset, &case);
        }
    }
}

/// Gated or not, in one operation with the quantization of the output or not.
#[test]
fn with_every_activation() {
    skip_where_small_only!();
    for (name, activation) in MlpActivation::NAMES {
        for preset in ["nvidia", "mxfp8"] {
            let mut case = Case::new(&nearest(preset), 4, 2, &[96, 96]);
            case.activation = activation;
            case.shared = preset == "mxfp8";
            check(&format!("{name}, {preset}"), &case);
        }
    }
}

/// The losses and their gradients cover the tokens of all ranks.
#[test]
fn losses_are_of_all_tokens() {
    skip_where_small_only!();
    for tokens in [&[24, 24][..], &[12, 12, 12, 12], &[5, 30]] {
        for losses in [[50.0, 0.0], [0.0, 50.0], [30.0, 20.0]] {
            let what = format!("{tokens:?}, {losses:?}");
            let case = Case::new(&nearest("nvidia"), 4, 2, tokens);
            for mut case in case.dispatches() {
                let without = summed(&case.on_ranks(), |found| &found.router);
                case.losses = Some(losses);
                let (one, ranks) = (case.on_one(), case.on_ranks());
                let found = summed(&ranks, |found| &found.router);
                assert!(difference(&without, &found) > 1e-2, "{what}: they count");
                let error = difference(&found, &one.router);
                assert!(error < 4e-6, "{what}: router: {error:e}");
                let error = difference(&joined(&ranks, |found| &found.dx), &one.dx);
                assert!(error < 4e-6, "{what}: dx: {error:e}");
            }
        }
    }
}

/// The losses of the tokens of one rank differ: the test above can fail.
#[test]
fn losses_of_parts_are_others() {
    skip_where_small_only!();
    let case = Case::new(&nearest("bf16"), 4, 2, &[24, 24]);
    let all = case.on_one().losses;
    let mut part = case.clone();
    part.tokens = vec![24];
    for (loss, expected) in part.on_one().losses.iter().zip(all) {
        assert!(
            (loss - expected).abs() / expected > 1e-4,
            "{loss} {expected}"
        );
    }
    assert_eq!(case.dtype, DType::F32);
}
