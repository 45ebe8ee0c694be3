//! Sixteen blocks side by side, and the instructions that compute them.
//!
//! The arithmetic of the oracle is written once, on plain arrays whose last index runs over 16
//! blocks (*lanes*): every step is a loop over lanes without a branch, which the compiler turns into
//! vector instructions. [`run`] has that code compiled twice, for the baseline of the target and for
//! AVX2, and picks one when it runs. Both do the same IEEE operations in the same order (Rust never
//! contracts or reorders them), so the choice cannot be seen in a result.

use crate::BLOCK;

/// One value for each of 16 blocks.
pub(super) type Lanes<T> = [T; BLOCK];

/// 16 blocks side by side: entry `[i][lane]` is element `i` of block `lane`.
pub(super) type Tile = [Lanes<f32>; BLOCK];

/// Rows from columns, and columns from rows: 16 blocks one after the other become a [`Tile`].
#[inline(always)]
pub(super) fn transpose(tile: &Tile) -> Tile {
    std::array::from_fn(|c| std::array::from_fn(|r| tile[r][c]))
}

/// `op` of each lane.
#[inline(always)]
pub(super) fn lanes<T: Copy + Default>(op: impl Fn(usize) -> T) -> Lanes<T> {
    let mut out = [T::default(); BLOCK];
    for (lane, out) in out.iter_mut().enumerate() {
        *out = op(lane);
    }
    out
}

/// Work worth compiling for wide vectors. `compute` and all that it calls must be
/// `#[inline(always)]`: only what is inlined into [`run`] is compiled for them.
pub(super) trait Task {
    /// Does it.
    fn compute(self);
}

/// Does `task` with the widest vectors that the processor has.
#[inline]
pub(super) fn run(task: impl Task) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn wide(task: impl Task) {
            task.compute();
        }
        if std::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { wide(task) };
        }
    }
    task.compute();
}
