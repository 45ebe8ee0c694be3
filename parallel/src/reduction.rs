//! How elements of several ranks become one.

use std::fmt;

/// How elements of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum; integers wrap around.
    Sum,
    /// The sum divided by the number of ranks; of floats.
    Avg,
    /// The largest; NaN if there is one.
    Max,
    /// The smallest; NaN if there is one.
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
