//! Sizes that vary from call to call compile nothing anew: the number of rows is no part of what a
//! kernel is specialized for. In a process of its own, since kernels are collected from all threads.

use std::collections::HashSet;

use cubecl::launched::LaunchedKernels;

use crate::support::{
    process::ran_in_own_process,
    samples::{CHECKS, Sample},
};

#[test]
fn rows_do_not_specialize_kernels() {
    if ran_in_own_process("launched", "rows_do_not_specialize_kernels", &[]) {
        return;
    }
    let client = client!("launched::rows_do_not_specialize_kernels");
    let launched = |shape| {
        let collected = LaunchedKernels::new();
        let sample = Sample::new(&client, shape);
        for check in CHECKS {
            check(&client, &sample);
        }
        collected.finish()
    };
    let known = launched((48, 144));
    assert!(known.len() > 20, "only {} kernels", known.len());
    for rows in [64, 112, 256] {
        let new: HashSet<_> = launched((rows, 144)).difference(&known).cloned().collect();
        assert!(new.is_empty(), "{} new kernels for {rows} rows", new.len());
    }
}
