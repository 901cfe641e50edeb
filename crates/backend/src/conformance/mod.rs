//! The suite that judges a device.
