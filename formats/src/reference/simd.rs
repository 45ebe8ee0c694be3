//! Sixteen interleaved blocks, and their compilation for vector instructions.
//!
//! The arithmetic of the oracle is written once, on plain arrays whose last index runs over 16
//! blocks (*lanes*): every step is a loop over lanes without a branch, which the compiler turns
//! into vector instructions. [`run`] compiles that code twice, for the baseline of the target and
//! for AVX2, and chooses at run time. Both perform the same IEEE operations in the same order (Rust
//! never contracts or reorders them), so the choice does not affect results.

use crate::BLOCK;

/// One value per block, for 16 blocks.
pub(super) type Lanes<T> = [T; BLOCK];

/// 16 interleaved blocks: entry `[i][lane]` is element `i` of block `lane`.
pub(super) type Tile = [Lanes<f32>; BLOCK];

/// Computes `op` of each lane.
#[inline(always)]
pub(super) fn lanes<T: Copy + Default>(op: impl Fn(usize) -> T) -> Lanes<T> {
    let mut out = [T::default(); BLOCK];
    for (lane, out) in out.iter_mut().enumerate() {
        *out = op(lane);
    }
    out
}

/// Work that is compiled for wide vectors. `compute` and all functions that it calls must be
/// `#[inline(always)]`: only code that is inlined into [`run`] is compiled for them.
pub(super) trait Task {
    /// Performs the work on a processor that has `isa`.
    fn compute<I: Isa>(self, isa: I);
}

/// Instructions of the processor: the two that the compiler does not generate by itself.
pub(super) trait Isa: Copy {
    /// Transposes a tile: 16 consecutive blocks become a [`Tile`].
    fn transpose(self, tile: &Tile) -> Tile;

    /// Prefetches the cache line of `value`.
    fn prefetch<T>(self, value: &T);
}

/// Instructions that every processor has.
#[derive(Clone, Copy)]
pub(super) struct Baseline;

impl Isa for Baseline {
    #[inline(always)]
    fn transpose(self, tile: &Tile) -> Tile {
        std::array::from_fn(|c| std::array::from_fn(|r| tile[r][c]))
    }

    #[inline(always)]
    fn prefetch<T>(self, _: &T) {}
}

/// Performs `task` with the widest vectors that the processor has.
#[inline]
pub(super) fn run(task: impl Task) {
    #[cfg(target_arch = "x86_64")]
    if let Some(isa) = x86::Avx2::detect() {
        return isa.run(task);
    }
    task.compute(Baseline);
}

/// Returns the number of rows of `cols` elements per task, enough to be worth starting one.
pub(super) fn rows_per_task(cols: usize) -> usize {
    const ELEMENTS: usize = 8192;
    (ELEMENTS / cols.max(1)).max(1)
}

/// Defines a function that runs `$body`, an `#[inline(always)]` function with the same arguments,
/// with fused multiply-adds and the widest vectors that the processor has. Without them, every
/// `mul_add` compiles to a call. Only code that is inlined into `$body` is compiled for them, so
/// that hot code must be small or `#[inline(always)]`, too. Results do not depend on the processor.
///
/// Generic parameters are written in brackets:
/// `with_fma!(fn f[T: Element](x: &mut [T]) = f_body);`.
#[doc(hidden)]
#[macro_export]
macro_rules! with_fma {
    (
        $(#[$attribute:meta])*
        $vis:vis fn $name:ident $([$($generics:tt)*])? ($($argument:ident: $type:ty),* $(,)?)
        $(-> $out:ty)? = $body:path
    ) => {
        $(#[$attribute])*
        #[inline]
        $vis fn $name $(<$($generics)*>)? ($($argument: $type),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            if ::std::is_x86_feature_detected!("avx2") && ::std::is_x86_feature_detected!("fma") {
                #[target_feature(enable = "avx2,fma")]
                fn wide $(<$($generics)*>)? ($($argument: $type),*) $(-> $out)? {
                    $body($($argument),*)
                }
                // SAFETY: the processor has both.
                return unsafe { wide($($argument),*) };
            }
            $body($($argument),*)
        }
    };
}
pub(super) use with_fma;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, Isa, Task, Tile};

    /// Proof that the processor has AVX2: only [`Avx2::detect`] creates it.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(());

    impl Avx2 {
        #[inline]
        pub(super) fn detect() -> Option<Self> {
            std::is_x86_feature_detected!("avx2").then_some(Self(()))
        }

        #[inline]
        pub(super) fn run(self, task: impl Task) {
            #[target_feature(enable = "avx2")]
            fn wide(isa: Avx2, task: impl Task) {
                task.compute(isa);
            }
            // SAFETY: `self` witnesses AVX2.
            unsafe { wide(self, task) }
        }
    }

    impl Isa for Avx2 {
        #[inline(always)]
        fn transpose(self, tile: &Tile) -> Tile {
            let mut out = [[0f32; BLOCK]; BLOCK];
            for row in [0, 8] {
                for col in [0, 8] {
                    // SAFETY: `self` witnesses AVX2.
                    unsafe { transpose_quarter(tile, &mut out, row, col) };
                }
            }
            out
        }

        #[inline(always)]
        fn prefetch<T>(self, value: &T) {
            // SAFETY: a prefetch has no effect but on time, and the reference is valid.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
        }
    }

    /// Transposes the 8x8 quarter of `tile` at (`row`, `col`) into `out`: interleaves pairs of
    /// elements, then pairs of pairs, then halves.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn transpose_quarter(tile: &Tile, out: &mut Tile, row: usize, col: usize) {
        let load = |r: usize| {
            let values: &[f32; 8] = tile[row + r][col..].first_chunk().expect("col is 0 or 8");
            // SAFETY: eight elements are readable.
            unsafe { _mm256_loadu_ps(values.as_ptr()) }
        };
        let rows: [__m256; 8] = std::array::from_fn(load);
        let pairs: [__m256; 8] = std::array::from_fn(|i| {
            let (a, b) = (rows[i & !1], rows[i | 1]);
            if i % 2 == 0 {
                _mm256_unpacklo_ps(a, b)
            } else {
                _mm256_unpackhi_ps(a, b)
            }
        });
        // Column c of rows 0..4 or 4..8 in each half: c and c + 4.
        let quads: [__m256; 8] = std::array::from_fn(|i| {
            let (base, c) = (i / 4 * 4, i % 4);
            let (a, b) = (pairs[base + c / 2], pairs[base + 2 + c / 2]);
            if c % 2 == 0 {
                _mm256_shuffle_ps::<0x44>(a, b)
            } else {
                _mm256_shuffle_ps::<0xEE>(a, b)
            }
        });
        for c in 0..8 {
            let (a, b) = (quads[c % 4], quads[4 + c % 4]);
            let column = if c < 4 {
                _mm256_permute2f128_ps::<0x20>(a, b)
            } else {
                _mm256_permute2f128_ps::<0x31>(a, b)
            };
            let target: &mut [f32; 8] = out[col + c][row..]
                .first_chunk_mut()
                .expect("row is 0 or 8");
            // SAFETY: eight elements are writable.
            unsafe { _mm256_storeu_ps(target.as_mut_ptr(), column) };
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::reference::simd::Baseline;

        #[test]
        fn transposes_agree() {
            let Some(isa) = Avx2::detect() else { return };
            let tile: Tile = std::array::from_fn(|r| std::array::from_fn(|c| (16 * r + c) as f32));
            let found = isa.transpose(&tile);
            assert_eq!(found, Baseline.transpose(&tile));
            assert_eq!(found[3][7], tile[7][3]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Transpose<'a>(&'a mut Tile);

    impl Task for Transpose<'_> {
        #[inline(always)]
        fn compute<I: Isa>(self, isa: I) {
            *self.0 = isa.transpose(self.0);
        }
    }

    #[test]
    fn tasks_run() {
        let mut tile: Tile = std::array::from_fn(|r| std::array::from_fn(|c| (16 * r + c) as f32));
        run(Transpose(&mut tile));
        assert_eq!(tile[2][5], (16 * 5 + 2) as f32);
    }
}
