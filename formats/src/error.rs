//! The crate's error type: it names the argument, the value found and the values accepted.

/// Invalid arguments of an operation, or a device that cannot run it.
///
/// Every variant about an argument carries the argument's name, the value found and the values
/// accepted, so that the message alone is enough to fix the call.
#[derive(thiserror::Error, Debug, Clone, PartialEq, Eq)]
pub enum Nvfp4Error {
    /// A shape or buffer length does not fit.
    #[error("shape of `{argument}`: found {found}, expected {expected}")]
    Shape {
        /// Name of the argument.
        argument: &'static str,
        /// Value found.
        found: String,
        /// Values accepted.
        expected: String,
    },
    /// The operation does not support an element type.
    #[error("element type of `{argument}`: found {found}, expected {expected}")]
    DType {
        /// Name of the argument.
        argument: &'static str,
        /// Type found.
        found: String,
        /// Types accepted.
        expected: String,
    },
    /// The operation does not support a value, an option or a combination of options.
    #[error("value of `{argument}`: found {found}, expected {expected}")]
    Value {
        /// Name of the argument.
        argument: &'static str,
        /// Value found.
        found: String,
        /// Values accepted.
        expected: String,
    },
    /// The device or backend cannot run the operation.
    #[error("device of `{argument}`: found {found}, expected {expected}")]
    Device {
        /// Name of the argument.
        argument: &'static str,
        /// Device or backend found.
        found: String,
        /// Devices or backends accepted.
        expected: String,
    },
    /// A library is missing, or fails a request on this device.
    #[error("{library} does not take {problem}: {reason}")]
    Unsupported {
        /// Name of the library.
        library: &'static str,
        /// Request, and where it was made.
        problem: String,
        /// Answer of the library.
        reason: String,
    },
    /// The runtime failed to launch a kernel.
    #[error("kernel launch: {0}")]
    Launch(String),
}

impl Nvfp4Error {
    /// Returns an error about the shape of `argument`.
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

    /// Returns an error about the value of `argument`.
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
