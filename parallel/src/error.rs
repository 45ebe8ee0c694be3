//! What can go wrong between ranks.

use std::fmt;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, ParallelError>;

/// Why a group of ranks cannot go on. Where a rank is known, it is that of the process that reports
/// the error, in the numbers of its group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParallelError {
    /// An argument of a call has a value that it may not have.
    #[error("{argument} is {found}, but must be {expected}")]
    Argument {
        /// Name of the argument.
        argument: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// The arguments of a collective do not fit each other.
    #[error("rank {rank}, {call}: {argument} is {found}, but must be {expected}")]
    Call {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        call: String,
        /// Name of the argument.
        argument: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// Two ranks of a group made different calls where the same is needed.
    #[error(
        "rank {rank}, {call}: rank {peer} called {other}; all ranks of a group make the same calls \
         in the same order"
    )]
    Mismatch {
        /// The rank that noticed it.
        rank: usize,
        /// Its call.
        call: String,
        /// The rank that called something else.
        peer: usize,
        /// What that was.
        other: String,
    },
    /// A rank did not answer in time.
    #[error("rank {rank}, {call}: nothing came from rank {peer} within {seconds} s")]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// Its call.
        call: String,
        /// The rank that it waited for.
        peer: usize,
        /// For how long.
        seconds: u64,
    },
    /// The connection to a rank ended.
    #[error("rank {rank}, {call}: the connection to rank {peer} ended: {reason}")]
    Lost {
        /// The rank that noticed it.
        rank: usize,
        /// Its call.
        call: String,
        /// The rank that is gone.
        peer: usize,
        /// How it ended.
        reason: String,
    },
    /// The run was ended because a rank failed.
    #[error("the run was ended: {0}")]
    Aborted(Failure),
    /// An environment variable is missing or contradicts another one.
    #[error("environment variable {variable} is {found}, but must be {expected}")]
    Environment {
        /// Its name.
        variable: String,
        /// Its value.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// Something failed between this process and the store or another rank.
    #[error("{operation} at {address}: {reason}")]
    Connection {
        /// The address of the other side.
        address: String,
        /// What was tried.
        operation: String,
        /// Why it failed.
        reason: String,
    },
    /// A message is not one of the protocol.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// A library is missing or reports an error.
    #[error("{library}, {operation}: {reason}")]
    Library {
        /// Its name.
        library: &'static str,
        /// What was asked of it.
        operation: String,
        /// Its answer.
        reason: String,
    },
    /// A command could not be started or ended badly.
    #[error("{0}")]
    Launch(String),
}

impl ParallelError {
    /// An argument with a value that it may not have.
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

    /// What failed at `address`.
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

/// The rank that ended a run, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The rank in the world.
    pub rank: usize,
    /// What it was doing.
    pub doing: String,
    /// What happened to it.
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
