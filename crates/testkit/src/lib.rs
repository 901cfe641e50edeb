//! Fixtures for the tests of other crates: a seeded random stream and an executor without a model.
//!
//! Only ever a dev-dependency. What is wrong here panics with the facts, because a test is reading.

mod fake_executor;
mod rng;

pub use fake_executor::{FakeExecutor, answer_alone, candidates_after};
pub use rng::Rng;
