//! Transform of two lines by the eight units that share them.
//!
//! A unit begins with the same 16 positions, a segment, of both lines. It keeps one line and sends
//! the other to the neighbouring unit, which does the opposite. This exchanges 16 values for 32
//! results, instead of 32 if each line were transformed separately. The unit then has two segments
//! of one line, keeps one and sends the other, and repeats this once. At the end it has two
//! segments, four apart, of the line that it kept.

use cubecl::prelude::*;

use crate::{
    HadamardSize,
    cube::{hadamard::butterfly, ptx},
};

/// 16 positions of two lines, or of one line twice.
#[derive(CubeType)]
pub(super) struct Segments {
    /// Values that the unit keeps in the next exchange.
    pub kept: Array<f32>,
    /// Values that it sends.
    pub sent: Array<f32>,
}

#[cube]
impl Segments {
    /// Creates segments without values.
    pub fn new() -> Segments {
        Segments {
            kept: Array::new(16usize),
            sent: Array::new(16usize),
        }
    }
}

/// Role of a unit in the three exchanges.
///
/// A unit keeps the lower or the upper of the two operands, depending on its index. In both cases
/// it computes the difference as kept minus received, which has the wrong sign if it keeps the
/// upper one. All operands that the difference is later combined with have that sign, too, so that
/// the final multiplication corrects it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Exchange {
    /// 1 if the unit keeps the sum of the first exchange, -1 if it keeps the difference.
    first: f32,
    /// 1 if the unit keeps the sum of the second exchange, -1 if it keeps the difference.
    second: f32,
    /// Factor of the lower of the two results: the transform's factor with its sign.
    pub low: f32,
    /// Factor of the upper result.
    pub high: f32,
}

/// Returns -1 if `negative`, else 1.
#[cube]
fn sign(negative: bool) -> f32 {
    select(negative, -1.0f32, 1.0f32)
}

#[cube]
impl Exchange {
    /// Returns the role of this unit.
    pub fn new() -> Exchange {
        let bit0 = UNIT_POS_PLANE & 1u32 == 1u32;
        let bit1 = UNIT_POS_PLANE & 2u32 == 2u32;
        let bit2 = UNIT_POS_PLANE & 4u32 == 4u32;
        let factor = comptime!(HadamardSize::H128.factor());
        // Differences of the first exchange by an odd unit, and of the second.
        let low = factor * sign(bit0 && bit1) * sign(bit1 && bit2);
        Exchange {
            first: sign(bit1),
            second: sign(bit2),
            low,
            high: low * sign(bit2),
        }
    }

    /// Returns the line that this unit keeps of two neighbours: 0 or 1.
    pub fn line(&self) -> usize {
        UNIT_POS_PLANE as usize % 2usize
    }

    /// Returns the segment of the lower result; that of the upper one is four more.
    pub fn segment(&self) -> usize {
        UNIT_POS_PLANE as usize % 8usize / 2usize
    }

    /// Transforms a kept line and a sent one to the lower result in `kept` and the upper one in
    /// `sent`, without the factors [`low`](Self::low) and [`high`](Self::high). Sums are over
    /// distances 1, 2, 4, .., 64 in this order. All units of the plane must call it.
    pub fn transform(&self, segments: &mut Segments) {
        self.before_last(segments);
        #[unroll]
        for i in 0..16usize {
            let received = ptx::shfl_sync_bfly(segments.sent[i], 4u32);
            let own = segments.kept[i];
            segments.kept[i] = own + received;
            segments.sent[i] = own - received;
        }
    }

    /// Returns the largest magnitude of this unit's results of [`transform`](Self::transform). The
    /// larger of a sum and a difference is the sum of the magnitudes.
    pub fn largest(&self, segments: &mut Segments) -> f32 {
        self.before_last(segments);
        let mut most = 0.0f32;
        #[unroll]
        for i in 0..16usize {
            let received = ptx::shfl_sync_bfly(segments.sent[i], 4u32);
            most = ptx::max_nan_abs(most, segments.kept[i].abs() + received.abs());
        }
        most
    }

    /// All exchanges except the last one.
    fn before_last(&self, segments: &mut Segments) {
        butterfly(&mut segments.kept, HadamardSize::H16);
        butterfly(&mut segments.sent, HadamardSize::H16);
        #[unroll]
        for stage in 0..2u32 {
            let sign = if comptime!(stage == 0) {
                self.first
            } else {
                self.second
            };
            #[unroll]
            for i in 0..16usize {
                let received = ptx::shfl_sync_bfly(segments.sent[i], comptime!(1u32 << stage));
                let own = segments.kept[i];
                segments.kept[i] = fma(received, sign, own);
                segments.sent[i] = fma(received, -sign, own);
            }
        }
    }
}
