//! The one error type of the crate: it names the argument, what it was and what it may be.

/// What is wrong with the arguments of an operation, or with the device that should run it.
///
/// Every variant about an argument carries its name, what was found and what is accepted, so that
/// a caller can fix the call from the message alone.
#[derive(thiserror::Error, Debug, Clone, PartialEq, Eq)]
pub enum Nvfp4Error {
    /// A shape, or the length of a buffer, does not fit.
    #[error("shape of `{argument}`: found {found}, expected {expected}")]
    Shape {
        /// Name of the argument.
        argument: &'static str,
        /// What it was.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// An element type that the operation does not take.
    #[error("element type of `{argument}`: found {found}, expected {expected}")]
    DType {
        /// Name of the argument.
        argument: &'static str,
        /// What it was.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// A value, option or combination of options outside what the operation takes.
    #[error("value of `{argument}`: found {found}, expected {expected}")]
    Value {
        /// Name of the argument.
        argument: &'static str,
        /// What it was.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// A device or backend that cannot run the operation.
    #[error("device of `{argument}`: found {found}, expected {expected}")]
    Device {
        /// Name of the argument.
        argument: &'static str,
        /// What it was.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// A library that is not there, or that does not do what it was asked for on this device.
    #[error("{library} does not take {problem}: {reason}")]
    Unsupported {
        /// Name of the library.
        library: &'static str,
        /// What it was asked for, and where.
        problem: String,
        /// What it answered.
        reason: String,
    },
    /// The runtime refused to launch a kernel.
    #[error("kernel launch: {0}")]
    Launch(String),
}

impl Nvfp4Error {
    /// An error about the shape of `argument`.
    pub fn shape(
        argument: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::Shape {
            argument,
            found: found.into(),
            expected: expected.into(),
        }
    }

    /// An error about the value of `argument`.
    pub fn value(
        argument: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::Value {
            argument,
            found: found.into(),
            expected: expected.into(),
        }
    }
}
