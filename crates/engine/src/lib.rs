//! The engine.

pub mod sample;
