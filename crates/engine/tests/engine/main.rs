//! The engine over a fake model that really reads its pages: executor, streaming, faults, golden.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod ahead;
mod attachments;
mod beams;
mod disk;
mod draw;
mod early;
mod echo;
mod executor;
mod golden;
mod moved;
mod offload;
mod prompt;
mod remote;
mod samples;
mod stream;
mod streaming;
mod tenants;
mod topk;
