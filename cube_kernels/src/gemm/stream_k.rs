//! Stream-K: splits the tiles of the last wave along K.

use super::{
    problem::GemmShape,
    tiles::{SM90_TILE_K, SM90_TILE_M, Sm90Tile},
};

/// Returns the number of stages of [`SM90_TILE_K`] in a K dimension.
pub(crate) fn stages_of(k: usize) -> usize {
    k.div_ceil(SM90_TILE_K)
}

/// Returns the number of output tiles.
pub(crate) fn tiles_of(shape: GemmShape, tile: Sm90Tile) -> usize {
    shape.m.div_ceil(SM90_TILE_M) * shape.n.div_ceil(tile.n())
}

/// Partition of the tiles of a GEMM among CTAs. All depths are in stages of [`SM90_TILE_K`].
///
/// The grid has `slices * shared + helpers` CTAs. Each computes its share of the first `whole`
/// tiles. Then `slices` CTAs compute `slice` stages each of a shared tile. The remaining `rest`
/// stages of every shared tile go to the helpers, which take `per_helper` stages each of the
/// concatenated rests. CTAs that compute the same slice of different tiles read operands at the
/// same time and share them in the L2 cache; ranges with arbitrary starts within a tile would not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamK {
    pub whole: usize,
    pub shared: usize,
    pub slices: usize,
    pub slice: usize,
    pub rest: usize,
    pub per_helper: usize,
    pub helpers: usize,
}

impl StreamK {
    /// Returns the partition of `tiles` tiles of `depth` stages for `sms` SMs, or `None` if no
    /// tiles are shared, because the waves are full or a tile has too few stages.
    pub fn of(tiles: usize, depth: usize, sms: usize) -> Option<Self> {
        let shared = tiles % sms;
        if shared == 0 || depth < 2 {
            return None;
        }
        let whole = tiles - shared;
        let slice = (shared * depth).div_ceil(sms);
        let slices = (sms / shared).min(depth.div_ceil(slice));
        let rest = depth.saturating_sub(slices * slice);
        let (per_helper, helpers) = match sms - slices * shared {
            0 => (0, 0),
            _ if rest == 0 => (0, 0),
            helpers => {
                let per_helper = (shared * rest).div_ceil(helpers);
                (per_helper, (shared * rest).div_ceil(per_helper))
            }
        };
        // Without helpers, `rest` is 0: `slice` was rounded up from a whole share.
        debug_assert!(rest == 0 || helpers > 0);
        let is_shared = slices > 1 || rest > 0;
        is_shared.then_some(Self {
            whole,
            shared,
            slices,
            slice,
            rest,
            per_helper,
            helpers,
        })
    }

    /// Returns the number of CTAs of the grid.
    pub fn ctas(&self) -> usize {
        self.slices * self.shared + self.helpers
    }

    /// Returns the number of partial tiles in the workspace: the slices after the first one, and
    /// the pieces of rests, which are numbered by tile plus helper.
    pub fn partials(&self) -> usize {
        let rests = if self.rest > 0 {
            self.shared + self.helpers
        } else {
            0
        };
        (self.slices - 1) * self.shared + rests
    }

    /// Returns the maximum number of partial tiles that the owner of a tile adds.
    pub fn partials_of_tile(&self) -> usize {
        let rests = match self.rest {
            0 => 0,
            rest => 1 + rest.div_ceil(self.per_helper),
        };
        self.slices - 1 + rests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Host version of `StreamKProblem::piece`.
    fn pieces(
        plan: &StreamK,
        cta: usize,
        depth: usize,
    ) -> Vec<(usize, usize, usize, Option<usize>)> {
        let last = plan.ctas() - 1 - cta;
        let own = (cta..plan.whole).step_by(plan.ctas());
        let mut pieces: Vec<_> = own.map(|tile| (tile, 0, depth, None)).collect();
        let sliced = plan.slices * plan.shared;
        if last < sliced {
            let (slice, tile) = (last / plan.shared, last % plan.shared);
            let from = slice * plan.slice;
            let partial = last.checked_sub(plan.shared);
            let to = (from + plan.slice).min(depth);
            pieces.push((plan.whole + tile, from, to, partial));
            return pieces;
        }
        let helper = last - sliced;
        let end = ((helper + 1) * plan.per_helper).min(plan.shared * plan.rest);
        let mut at = helper * plan.per_helper;
        while at < end {
            let tile = at / plan.rest;
            let behind = end.min((tile + 1) * plan.rest);
            let depth_of = |at: usize| plan.slices * plan.slice + at - tile * plan.rest;
            let partial = (plan.slices - 1) * plan.shared + tile + helper;
            pieces.push((
                plan.whole + tile,
                depth_of(at),
                depth_of(behind),
                Some(partial),
            ));
            at = behind;
        }
        pieces
    }

    /// Every stage of every tile is computed exactly once, no CTA has more than a slice of the
    /// shared tiles, and no two pieces use the same partial tile.
    #[test]
    fn all_stages_are_shared_out_evenly() {
        let mut shared = 0;
        for sms in [4, 7, 132] {
            for tiles in (1..40).chain([54, 96, 131, 132, 133, 200, 384, 500]) {
                for depth in [1, 2, 3, 5, 12, 33, 256] {
                    let Some(plan) = StreamK::of(tiles, depth, sms) else {
                        continue;
                    };
                    shared += 1;
                    assert!(plan.ctas() <= sms, "{plan:?}");
                    let mut covered = vec![vec![0; depth]; tiles];
                    let mut taken = vec![false; plan.partials()];
                    for cta in 0..plan.ctas() {
                        let mut stages = 0;
                        for (tile, from, to, partial) in pieces(&plan, cta, depth) {
                            assert!(from < to, "{plan:?}: an empty piece of CTA {cta}");
                            assert_eq!(partial.is_none(), from == 0, "{plan:?}");
                            covered[tile][from..to].iter_mut().for_each(|n| *n += 1);
                            if let Some(partial) = partial {
                                assert!(!taken[partial], "{plan:?}: {partial} twice");
                                taken[partial] = true;
                            }
                            if tile >= plan.whole {
                                stages += to - from;
                            }
                        }
                        assert!(
                            stages <= plan.slice,
                            "{plan:?}: {stages} stages of CTA {cta}"
                        );
                    }
                    assert!(covered.iter().flatten().all(|n| *n == 1), "{plan:?}");
                }
            }
        }
        assert!(shared > 500, "{shared}");
    }

    #[test]
    fn full_waves_are_not_shared_out() {
        assert_eq!(StreamK::of(132, 64, 132), None);
        assert_eq!(StreamK::of(264, 64, 132), None);
        assert_eq!(StreamK::of(5, 1, 132), None);
    }
}
