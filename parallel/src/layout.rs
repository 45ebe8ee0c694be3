//! Layout of a world's ranks in groups, by kind of parallelism.

use std::fmt;

use crate::error::{ParallelError, Result};

/// Kind of parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Tensor parallelism: neighboring ranks, because it exchanges most.
    Tensor,
    /// Expert parallelism.
    Expert,
    /// Data parallelism.
    Data,
    /// Pipeline parallelism: the most distant ranks.
    Pipeline,
}

impl Axis {
    /// All axes, from neighboring to distant ranks.
    pub const ALL: [Self; 4] = [Self::Tensor, Self::Expert, Self::Data, Self::Pipeline];
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tensor => "tensor",
            Self::Expert => "expert",
            Self::Data => "data",
            Self::Pipeline => "pipeline",
        })
    }
}

/// Sizes of the axes. Rank `((p · data + d) · expert + e) · tensor + t` has the coordinates `t`,
/// `e`, `d` and `p`: ranks of one tensor-parallel group are neighbors, as in Megatron.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    sizes: [usize; 4],
}

impl Layout {
    /// Creates the layout of `world` ranks with the given sizes; data parallelism uses the
    /// remaining factor.
    ///
    /// # Errors
    /// Returns an error if a size is zero, or the sizes multiplied together do not divide `world`.
    pub fn new(world: usize, tensor: usize, expert: usize, pipeline: usize) -> Result<Self> {
        let given = [
            ("tensor", tensor),
            ("expert", expert),
            ("pipeline", pipeline),
        ];
        for (argument, size) in [("world", world)].into_iter().chain(given) {
            if size == 0 {
                return Err(ParallelError::argument(argument, 0, "at least 1"));
            }
        }
        let product = tensor
            .checked_mul(expert)
            .and_then(|product| product.checked_mul(pipeline))
            .filter(|product| world.is_multiple_of(*product));
        let Some(product) = product else {
            let expected = format!("a multiple of tensor x expert x pipeline ({given:?})");
            return Err(ParallelError::argument("world", world, expected));
        };
        let data = world / product;
        Ok(Self {
            sizes: [tensor, expert, data, pipeline],
        })
    }

    /// Number of ranks per group along `axis`.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// Number of ranks in the world.
    pub fn world(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Returns the coordinate of `rank` along `axis`.
    pub fn place(&self, rank: usize, axis: Axis) -> usize {
        let below: usize = self.sizes[..axis as usize].iter().product();
        rank / below % self.size(axis)
    }

    /// Returns the group of `rank` along `axes`: the ranks with its coordinates on all other axes,
    /// in ascending order. The gradients of parameters that experts share are reduced over the
    /// group along data and expert.
    ///
    /// # Errors
    /// Returns an error if `rank` is not in the world.
    pub fn group(&self, rank: usize, axes: &[Axis]) -> Result<Vec<usize>> {
        if rank >= self.world() {
            let expected = format!("less than {}", self.world());
            return Err(ParallelError::argument("rank", rank, expected));
        }
        let same = |other: usize, axis: Axis| self.place(other, axis) == self.place(rank, axis);
        let member = |other: &usize| {
            let fixed = Axis::ALL.into_iter().filter(|axis| !axes.contains(axis));
            fixed.into_iter().all(|axis| same(*other, axis))
        };
        Ok((0..self.world()).filter(member).collect())
    }

    /// Returns all groups along `axes`, ordered by their first rank.
    pub fn groups(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        let groups = (0..self.world()).map(|rank| self.group(rank, axes).expect("of the world"));
        let mut groups: Vec<_> = groups.collect();
        groups.sort();
        groups.dedup();
        groups
    }
}

/// Shows the sizes, then a line with the groups of each axis that has any.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ranks", self.world())?;
        let several = Axis::ALL.into_iter().filter(|axis| self.size(*axis) > 1);
        let several: Vec<Axis> = several.collect();
        for (index, axis) in several.iter().enumerate() {
            let separator = if index == 0 { " = " } else { " x " };
            write!(f, "{separator}{} {axis}", self.size(*axis))?;
        }
        for axis in several {
            write!(f, "\n{axis:>8}")?;
            for group in self.groups(&[axis]) {
                write!(f, " {group:?}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_tensors() {
        let layout = Layout::new(8, 2, 1, 2).unwrap();
        assert_eq!(layout.size(Axis::Data), 2);
        assert_eq!(
            layout.to_string(),
            "8 ranks = 2 tensor x 2 data x 2 pipeline\n  \
             tensor [0, 1] [2, 3] [4, 5] [6, 7]\n    \
             data [0, 2] [1, 3] [4, 6] [5, 7]\n\
             pipeline [0, 4] [1, 5] [2, 6] [3, 7]"
        );
        assert_eq!(Layout::new(1, 1, 1, 1).unwrap().to_string(), "1 ranks");
    }

    /// Each axis partitions the world, and coordinates number the ranks by the formula.
    #[test]
    fn axes_split_the_world() {
        let layout = Layout::new(24, 2, 2, 3).unwrap();
        for axis in Axis::ALL {
            let mut all = layout.groups(&[axis]).concat();
            all.sort_unstable();
            assert_eq!(all, (0..24).collect::<Vec<_>>());
        }
        for rank in 0..24 {
            let [t, e, d, p] = Axis::ALL.map(|axis| layout.place(rank, axis));
            assert_eq!(((p * 2 + d) * 2 + e) * 2 + t, rank);
            let replicas = layout.group(rank, &[Axis::Data, Axis::Expert]).unwrap();
            assert_eq!(replicas.len(), 4);
            assert!(replicas.contains(&rank));
        }
    }

    #[test]
    fn sizes_must_fit() {
        for (world, tensor, name) in [(6, 4, "world"), (0, 1, "world"), (4, 0, "tensor")] {
            let error = Layout::new(world, tensor, 1, 1).unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
        assert!(Layout::new(4, usize::MAX, 2, 1).is_err());
        assert!(Layout::new(4, 2, 1, 1).unwrap().group(4, &[]).is_err());
    }
}
