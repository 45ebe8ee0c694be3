//! Both quantized tensors of a matrix with one amax per row and per column (per token), compared
//! with one amax per tensor: the comparison of TransformerEngine's pull request 3045, at its shapes.
//!
//! Everything from the matrix on is included: amax values, then the rowwise tensor rounded to
//! nearest and the columnwise one after the RHT, rounded stochastically. Launches are timed one by
//! one, with the time of the host if that is longer, and replayed from a graph.

use nvfp4_formats::AmaxGranularity;
use nvfp4_kernels::{quantize::Quantize, tensor::Groups};

use crate::{
    common::device::sizes,
    harness::{Bench, Effort::Brief, PER_TENSOR, PER_TOKEN, Section},
    inputs::{Inputs, NEAREST, copy_of, equal_groups, groups_of, rht, stochastic},
};

/// Tokens, of one tensor or of all groups.
const TOKENS: [usize; 6] = [1024, 2048, 4096, 8192, 16384, 32768];
/// Features.
const FEATURES: [usize; 3] = [2048, 4096, 8192];
/// Number of groups of equal size.
const GROUPS: usize = 8;

/// Times one tensor, and groups, at all shapes.
pub fn compare(bench: &mut Bench) {
    for is_grouped in [false, true] {
        for rows in TOKENS {
            for cols in FEATURES {
                let grouped = if is_grouped { " grouped" } else { "" };
                let name = format!("per-token{grouped} {rows}x{cols}");
                bench.at(name, Brief, |section| {
                    let client = section.client();
                    let [rows, cols] = sizes([rows, cols]);
                    // Groups of 16 rows at least, a transform.
                    let rows = rows.max(16 * GROUPS);
                    let inputs = Inputs::bf16(&client, rows, cols);
                    let offsets = equal_groups(&client, rows, GROUPS);
                    let groups = match is_grouped {
                        true => groups_of(&offsets),
                        false => Groups::One,
                    };
                    both(section, &inputs, &groups);
                });
            }
        }
    }
}

/// Times both granularities, launched one by one and from a graph.
fn both(section: &mut Section<'_>, inputs: &Inputs, groups: &Groups) {
    for (name, granularity) in [
        (PER_TENSOR, AmaxGranularity::PerTensor),
        (PER_TOKEN, AmaxGranularity::PerRow),
    ] {
        let client = section.client();
        let launch = |i: usize| {
            let [row, col] = [copy_of(NEAREST, None), copy_of(stochastic(), rht())]
                .map(|target| target.granularity(granularity));
            let request = Quantize::new(inputs.get(i)).groups(groups);
            let request = request.rowwise(row).columnwise(col);
            request.launch(&client).unwrap();
        };
        let bytes = inputs.bytes(2.0);
        section.time(&format!("{name}, eager"), bytes, launch);
        section
            .captured()
            .time(&format!("{name}, graph"), bytes, launch);
    }
}
