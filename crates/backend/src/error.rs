//! What can go wrong on a device.

use crate::WeightType;

/// A device fault. Programmer errors panic instead.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The device has no room for the allocation.
    #[error("out of memory on the device: {bytes} bytes asked for {what}")]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: usize,
        /// What for.
        what: &'static str,
    },
    /// A weight's storage type is not supported on this device.
    #[error("weights of type {0} are not supported on this device")]
    UnsupportedWeight(WeightType),
    /// A weight's bytes do not match its shape.
    #[error("a {dtype} matrix of {rows} x {cols} has {got} bytes, but needs {expected}")]
    WeightSize {
        /// Storage type.
        dtype: WeightType,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Bytes that came.
        got: usize,
        /// Bytes that the shape needs.
        expected: usize,
    },
    /// The device reported a fault, with its own words.
    #[error("device fault: {0}")]
    Fault(String),
}
