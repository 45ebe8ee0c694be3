//! Quantized all-gathers: gathered codes, scales and amax equal those of the gathered tokens.

use std::time::Duration;

use burn_core::tensor::{DType, Int, Tensor};
use burn_nvfp4::functions::{Nvfp4Tensor, quantize};
use burn_nvfp4::parallel::{ProcessGroup, try_quantize_all_gather};
use burn_nvfp4::{Hadamard, RandomStream, Rounding, Usage};

use super::super::on_ranks;
use super::{bits, own};
use crate::support::{Matrix, activation, device};

const STREAM: RandomStream = RandomStream::new(3, 4, 5);

fn tokens(rows: usize, cols: usize) -> Tensor<2> {
    let mut x = Matrix::gaussian(rows, cols, activation(), 31);
    // The largest element is on the last rank.
    *x.values.last_mut().unwrap() = 17.0;
    x.tensor(&device())
}

fn bytes(x: &Tensor<2, Int>) -> Vec<u8> {
    x.clone().into_data().as_bytes().to_vec()
}

fn assert_same(found: &Nvfp4Tensor, expected: &Nvfp4Tensor, what: &str) {
    assert_eq!(found.layout(), expected.layout(), "{what}");
    assert_eq!(
        bytes(found.scales()),
        bytes(expected.scales()),
        "{what}: scales"
    );
    assert_eq!(
        bytes(found.codes()),
        bytes(expected.codes()),
        "{what}: codes"
    );
    assert_eq!(
        bits(found.amax().clone()),
        bits(expected.amax().clone()),
        "{what}: amax"
    );
}

#[test]
fn gathered_bytes_are_those_of_gathered_tokens() {
    let transforms = [None, Some(Hadamard::default())];
    let roundings = [Rounding::Nearest, Rounding::Stochastic(STREAM)];
    for (size, rows, cols) in [(2, 64, 48), (4, 64, 32), (2, 96, 16)] {
        for usage in [Usage::Rowwise, Usage::Columnwise] {
            for hadamard in transforms {
                if (usage, hadamard.is_some()) == (Usage::Rowwise, true) {
                    continue;
                }
                for rounding in roundings {
                    let what = format!("{size} ranks, {rows} x {cols}, {usage:?} {hadamard:?}");
                    let found = on_ranks(size, |group| {
                        let x = tokens(rows, cols);
                        let part = own(x.clone(), 0, group.rank(), size);
                        let local = quantize(part.clone(), usage, rounding, hadamard);
                        let found =
                            try_quantize_all_gather(part, usage, rounding, hadamard, &group);
                        let expected = quantize(x, usage, rounding, hadamard);
                        assert_same(&found.unwrap(), &expected, &what);
                        // The amax of the rank's own shard differs on the first rank.
                        bits(local.amax().clone()) == bits(expected.amax().clone())
                    });
                    assert!(!found[0], "{what}: every rank has the largest element");
                }
            }
        }
    }
}

#[test]
fn tokens_that_fill_no_block_are_refused() {
    let groups = ProcessGroup::loopback(2, Duration::ZERO);
    let gather = |x, usage| {
        let made = try_quantize_all_gather(x, usage, Rounding::Nearest, None, &groups[0]);
        made.unwrap_err().to_string()
    };
    for usage in [Usage::Rowwise, Usage::Columnwise] {
        let error = gather(tokens(24, 32), usage);
        assert!(
            error.contains("found 24 rows on each of 2 ranks"),
            "{error}"
        );
        assert!(error.contains("a multiple of 16"), "{error}");
    }
    let error = gather(tokens(16, 24), Usage::Rowwise);
    assert!(error.contains("cols"), "{error}");
    let ints = Tensor::<2>::zeros([16, 16], (&device(), DType::F64));
    assert!(gather(ints, Usage::Rowwise).contains('x'));
}
