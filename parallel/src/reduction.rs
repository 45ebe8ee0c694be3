//! Reductions over ranks.

use std::fmt;

/// Reduction over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Sum; integers wrap around.
    Sum,
    /// Sum divided by the number of ranks; only for floats.
    Avg,
    /// Maximum; NaN if any element is NaN.
    Max,
    /// Minimum; NaN if any element is NaN.
    Min,
}

impl Reduction {
    pub(crate) const ALL: [Self; 4] = [Self::Sum, Self::Avg, Self::Max, Self::Min];
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Max => "max",
            Self::Min => "min",
        })
    }
}
