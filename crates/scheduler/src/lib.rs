//! Who runs next: queues, budgets, preemption.
//!
//! There is no prefill phase and no decode phase. Each sequence has tokens and a number of them
//! that are computed; a step lets *computed* catch up with the tokens, within a budget shared by
//! all sequences. A sequence that has caught up gets one sampled token, and so one more to compute.
//!
//! ```text
//!   submit --> waiting --admit--> running --finish, cancel--> ended
//!                 ^                 |  ^
//!                 +---- preempt ----+  |
//!                 |  recompute      |  +--admit-- swapped
//!                 |                 +---- preempt ---^ |
//!                 +-------------- dropped -------------+
//! ```
//!
//! A sequence whose tokens the caller chooses (for beam search) pauses at each one; `pause` draws
//! how it goes on.
//!
//! Code map: [`Scheduler`] is the facade; `sequence` holds what is known of one request, `step`
//! fills one plan, `admit` lets those who wait in, `policy` says who is next, `preempt` chooses who
//! gives way and how, `spill` who runs on pages of the host, `cost` knows what moving and computing cost, `kept` how much of a sequence
//! stays in the cache, `load` waits for pages of slower tiers, `commit` takes a result in, `pause`
//! lets the caller choose tokens.
//!
//! The crate owns the sequences and the cache. It knows no device, no clock, no thread and no file,
//! and it sees no strings: stop strings are the caller's, who cancels.
//!
//! ```
//! use nuthatch_cache::Cache;
//! use nuthatch_scheduler::{Config, Output, Scheduler, Submission};
//! use nuthatch_types::{Limits, Sampled, Sampling, SeqId, StepResult, TokenId};
//!
//! let cache = Cache::new(nuthatch_cache::Config::default())?;
//! let mut scheduler = Scheduler::new(Config::default(), cache)?;
//! scheduler.submit(Submission {
//!     seq: SeqId(1),
//!     prompt: vec![TokenId(5); 20],
//!     sampling: Sampling::greedy(),
//!     limits: Limits { max_tokens: 1, ..Limits::default() },
//! })?;
//!
//! let plan = scheduler.plan().expect("one sequence is waiting");
//! assert_eq!(plan.seqs.get(0).tokens.len(), 20);
//! let sampled = Sampled { seq: SeqId(1), token: TokenId(9), logprob: None, top: vec![] };
//! let result = StepResult { sampled: vec![sampled], ..StepResult::default() };
//! let outputs = scheduler.commit(result);
//! assert!(matches!(outputs[..], [Output::Token(_), Output::Finished { .. }]));
//! assert!(scheduler.is_idle());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod admit;
mod commit;
mod config;
mod cost;
mod kept;
mod load;
mod output;
mod pause;
mod policy;
mod preempt;
mod scheduler;
mod sequence;
mod spill;
mod stats;
mod step;
mod tokens;
mod verify;

pub use config::{Config, ConfigError};
pub use cost::{Rates, Source, StoredPages};
pub use output::{Output, Usage};
pub use policy::{Policy, Tenant};
pub use scheduler::{Hints, Scheduler, Submission, SubmitError};
pub use stats::{Counters, Stats};
pub use verify::Fault;
