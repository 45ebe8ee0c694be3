//! Calls of a group's operations as data: checked, compared between ranks, and named in errors.

use std::fmt;

use crate::buffer::DType;
use crate::error::{ParallelError, Result};
use crate::reduction::Reduction;
use crate::wire::Reader;

/// Operation of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// All-reduce: every rank gets the reduction of all ranks' elements.
    AllReduce(Reduction),
    /// Reduce-scatter: rank `r` gets shard `r` of the reduction.
    ReduceScatter(Reduction),
    /// All-gather: every rank gets the elements of all ranks, in rank order.
    AllGather,
    /// Broadcast: every rank gets the elements of rank `root`.
    Broadcast {
        /// Rank whose elements are broadcast.
        root: usize,
    },
    /// Send from the calling rank to rank `to`, which receives.
    Send {
        /// Receiving rank.
        to: usize,
    },
    /// All-to-all: every rank sends a part of any length to every rank.
    AllToAll,
    /// Barrier, without data.
    Barrier,
}

/// Operation with the dtype and the number of elements. For [`Operation::ReduceScatter`] and
/// [`Operation::AllGather`] the count is that of one rank's shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// Operation.
    pub operation: Operation,
    /// Element dtype.
    pub dtype: DType,
    /// Number of elements; 0 for [`Operation::AllToAll`], where it differs between ranks.
    pub count: usize,
}

impl Call {
    /// Size of the result of [`encode`](Self::encode) in bytes.
    pub(crate) const BYTES: usize = 24;

    /// Encodes the call for the wire: operation, reduction, dtype, a zero byte, a rank (4 bytes),
    /// the count, and 8 zero bytes.
    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let (code, reduction, rank) = match self.operation {
            Operation::AllReduce(reduction) => (0, reduction, 0),
            Operation::ReduceScatter(reduction) => (1, reduction, 0),
            Operation::AllGather => (2, Reduction::Sum, 0),
            Operation::Broadcast { root } => (3, Reduction::Sum, root),
            Operation::Send { to } => (4, Reduction::Sum, to),
            Operation::AllToAll => (5, Reduction::Sum, 0),
            Operation::Barrier => (6, Reduction::Sum, 0),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[0] = code;
        bytes[1] = index(&Reduction::ALL, reduction);
        bytes[2] = index(&DType::ALL, self.dtype);
        bytes[4..8].copy_from_slice(&(rank as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&(self.count as u64).to_le_bytes());
        bytes
    }

    /// Decodes the result of [`encode`](Self::encode).
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(bytes);
        let [code, reduction, dtype, _] = reader.array()?;
        let rank = reader.u32()? as usize;
        let count = usize::try_from(reader.u64()?).map_err(|_| malformed("count"))?;
        let reduction = *Reduction::ALL
            .get(usize::from(reduction))
            .ok_or_else(|| malformed("reduction"))?;
        let operation = match code {
            0 => Operation::AllReduce(reduction),
            1 => Operation::ReduceScatter(reduction),
            2 => Operation::AllGather,
            3 => Operation::Broadcast { root: rank },
            4 => Operation::Send { to: rank },
            5 => Operation::AllToAll,
            6 => Operation::Barrier,
            _ => return Err(malformed("operation")),
        };
        let dtype = *DType::ALL
            .get(usize::from(dtype))
            .ok_or_else(|| malformed("element type"))?;
        Ok(Self {
            operation,
            dtype,
            count,
        })
    }
}

fn index<T: PartialEq>(all: &[T], one: T) -> u8 {
    let place = all.iter().position(|other| *other == one);
    place.expect("the list has all") as u8
}

fn malformed(what: &str) -> ParallelError {
    ParallelError::Malformed(format!("the {what} of a call is not one that there is"))
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, count, .. } = self;
        match self.operation {
            Operation::AllReduce(reduction) => {
                write!(f, "all-reduce({reduction}, {count} {dtype})")
            }
            Operation::ReduceScatter(reduction) => {
                write!(f, "reduce-scatter({reduction}, {count} {dtype} a rank)")
            }
            Operation::AllGather => write!(f, "all-gather({count} {dtype} a rank)"),
            Operation::Broadcast { root } => {
                write!(f, "broadcast({count} {dtype} from rank {root})")
            }
            Operation::Send { to } => write!(f, "send({count} {dtype} to rank {to})"),
            Operation::AllToAll => write!(f, "all-to-all({dtype})"),
            Operation::Barrier => f.write_str("barrier"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_travel() {
        let operations = [
            Operation::AllReduce(Reduction::Max),
            Operation::ReduceScatter(Reduction::Avg),
            Operation::AllGather,
            Operation::Broadcast { root: 3 },
            Operation::Send { to: 2 },
            Operation::AllToAll,
            Operation::Barrier,
        ];
        for operation in operations {
            for dtype in DType::ALL {
                let call = Call {
                    operation,
                    dtype,
                    count: 1 << 33,
                };
                assert_eq!(Call::decode(&call.encode()), Ok(call));
            }
        }
        for (place, name) in [(0, "operation"), (1, "reduction"), (2, "element type")] {
            let mut bytes = [0; Call::BYTES];
            bytes[place] = 9;
            let error = Call::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        assert!(Call::decode(&[0; 7]).is_err());
    }
}
