//! Errors between ranks.

use std::fmt;

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, ParallelError>;

/// Error of a group of ranks. A field `rank` is that of the process that reports the error,
/// numbered in its group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParallelError {
    /// An argument of a call has an invalid value.
    #[error("{argument} is {found}, but must be {expected}")]
    Argument {
        /// Name of the argument.
        argument: &'static str,
        /// Value of the argument.
        found: String,
        /// Valid values.
        expected: String,
    },
    /// The arguments of a collective do not match each other.
    #[error("rank {rank}, {call}: {argument} is {found}, but must be {expected}")]
    Call {
        /// Rank that made the call.
        rank: usize,
        /// Call.
        call: String,
        /// Name of the argument.
        argument: &'static str,
        /// Value of the argument.
        found: String,
        /// Valid values.
        expected: String,
    },
    /// Two ranks of a group made different calls where the same is needed.
    #[error(
        "rank {rank}, {call}: rank {peer} called {other}; all ranks of a group make the same calls \
         in the same order"
    )]
    Mismatch {
        /// Rank that noticed the mismatch.
        rank: usize,
        /// Call of that rank.
        call: String,
        /// Rank with the other call.
        peer: usize,
        /// Call of the other rank.
        other: String,
    },
    /// A rank did not answer in time.
    #[error("rank {rank}, {call}: nothing came from rank {peer} within {seconds} s")]
    Timeout {
        /// Rank that waited.
        rank: usize,
        /// Call of that rank.
        call: String,
        /// Rank that it waited for.
        peer: usize,
        /// Waiting time in seconds.
        seconds: u64,
    },
    /// The connection to a rank was lost.
    #[error("rank {rank}, {call}: the connection to rank {peer} ended: {reason}")]
    Lost {
        /// Rank that noticed the loss.
        rank: usize,
        /// Call of that rank.
        call: String,
        /// Rank that is gone.
        peer: usize,
        /// Reason of the loss.
        reason: String,
    },
    /// The run was ended because a rank failed.
    #[error("the run was ended: {0}")]
    Aborted(Failure),
    /// An environment variable is missing or contradicts another one.
    #[error("environment variable {variable} is {found}, but must be {expected}")]
    Environment {
        /// Name of the variable.
        variable: String,
        /// Value of the variable.
        found: String,
        /// Valid values.
        expected: String,
    },
    /// An operation between this process and the store or another rank failed.
    #[error("{operation} at {address}: {reason}")]
    Connection {
        /// Address of the peer.
        address: String,
        /// Attempted operation.
        operation: String,
        /// Reason of the failure.
        reason: String,
    },
    /// A message does not follow the protocol.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// A library is missing or reports an error.
    #[error("{library}, {operation}: {reason}")]
    Library {
        /// Name of the library.
        library: &'static str,
        /// Operation that was called.
        operation: String,
        /// Error of the library.
        reason: String,
    },
    /// A command could not be started or failed.
    #[error("{0}")]
    Launch(String),
}

impl ParallelError {
    /// Creates the error of an argument with an invalid value.
    pub(crate) fn argument(
        argument: &'static str,
        found: impl fmt::Display,
        expected: impl fmt::Display,
    ) -> Self {
        Self::Argument {
            argument,
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// Creates the error of an operation that failed at `address`.
    pub(crate) fn connection(
        address: impl fmt::Display,
        operation: impl fmt::Display,
        reason: impl fmt::Display,
    ) -> Self {
        Self::Connection {
            address: address.to_string(),
            operation: operation.to_string(),
            reason: reason.to_string(),
        }
    }
}

/// Rank that ended a run, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Rank in the world.
    pub rank: usize,
    /// Activity of the rank.
    pub doing: String,
    /// Reason of the failure.
    pub reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {}", self.rank, self.reason)?;
        if !self.doing.is_empty() {
            write!(f, " (it was doing: {})", self.doing)?;
        }
        Ok(())
    }
}
