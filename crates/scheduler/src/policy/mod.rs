//! Who is next, and who gives way: one queue for each policy.
//!
//! A policy orders those who wait and ranks those who run; it never touches pages. What is common to
//! all of them is elsewhere: decoding first, all or nothing, and sparing who made no progress.
//!
//! | policy | next | how long others can be put first |
//! |---|---|---|
//! | [`Policy::Fcfs`] | who came first | never |
//! | [`Policy::Priority`] | the highest priority | for `boost` arrivals for each priority above |
//! | [`Policy::Prefix`] | who finds most in the cache | until being passed over has made up for it |
//! | [`Policy::Fair`] | the tenant who was served least | until both were served alike |
//! | [`Policy::Mlfq`] | who has used least so far | for `max_wait` steps |

mod fair;
mod fcfs;
mod mlfq;
mod prefix;
mod priority;
mod sorted;

use std::fmt::Debug;

use nuthatch_types::SeqId;

use crate::Hints;

/// Who is next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The highest priority first. A request gives way to a lower one that came `boost` requests
    /// earlier for each priority between them, so that no one waits for ever.
    Priority {
        /// Arrivals that one step of priority is worth.
        boost: u32,
    },
    /// The longest cached prefix first, so that requests that begin alike run together. Each time a
    /// request is passed over it counts as if `ageing` more of its tokens were cached.
    Prefix {
        /// Tokens that being passed over is worth.
        ageing: u32,
        /// Most requests that are looked at for one decision, oldest first.
        window: u32,
    },
    /// The tenant who was served least first, by virtual token counters: a token of a prompt counts
    /// one, a token of an answer two, divided by the tenant's weight.
    Fair,
    /// Least attained service first, in levels: a request starts at the level whose quantum covers
    /// its prompt and sinks when it has used the quantum up; each level's quantum is twice the one
    /// above. Higher levels displace lower ones.
    Mlfq {
        /// Levels, at least one.
        levels: u8,
        /// Tokens of service at the first level.
        quantum: u32,
        /// Steps after which one who waits rises to the first level.
        max_wait: u32,
        /// Most sequences that run at one time. Less than `max_seqs` leaves room for displaced
        /// ones, whose samplers stay with the executor.
        max_running: u32,
    },
}

impl Policy {
    pub(crate) fn queue(self) -> Box<dyn Queue> {
        match self {
            Policy::Fcfs => Box::new(fcfs::Fcfs::default()),
            Policy::Priority { boost } => Box::new(priority::Priority::new(boost)),
            Policy::Prefix { ageing, window } => Box::new(prefix::Prefix::new(ageing, window)),
            Policy::Fair => Box::new(fair::Fair::default()),
            Policy::Mlfq { levels, quantum, max_wait, max_running } => {
                let config = mlfq::Config { levels, quantum, max_wait, max_running };
                Box::new(mlfq::Mlfq::new(config))
            }
        }
    }
}

/// Who pays for a request, under [`Policy::Fair`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant(pub u64);

/// The place of a sequence in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Arrival {
    /// The request's place.
    pub(crate) request: u64,
    /// The place among the sequences that the request was forked into; 0 for the first.
    pub(crate) fork: u64,
}

impl Arrival {
    /// The first sequence of the request that came as the `n`-th.
    pub(crate) fn nth(n: u64) -> Self {
        Arrival { request: n, fork: 0 }
    }
}

/// The place of a sequence in a policy's order; lower comes first. No two are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// Sequences of a lower class come first, and may displace those of a higher one.
    pub(crate) class: i64,
    /// Within a class, who came first.
    pub(crate) arrival: Arrival,
}

/// One who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) seq: SeqId,
    pub(crate) rank: Rank,
    pub(crate) tenant: Tenant,
    /// Whether the executor knows it, because it ran before.
    pub(crate) is_started: bool,
    /// The step since which it waits.
    pub(crate) since: u64,
}

/// What a sequence got in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Service {
    /// Tokens computed.
    pub(crate) n_computed: u32,
    /// Tokens sampled.
    pub(crate) n_sampled: u32,
    /// Tokens computed since its rank changed last, these included.
    pub(crate) n_since_rank: u64,
}

/// What a queue is told when it is asked.
pub(crate) struct Ask<'a> {
    /// Whether a sequence that the executor does not know may start.
    pub(crate) may_start: bool,
    /// The step being planned.
    pub(crate) step: u64,
    /// Tokens of a waiting sequence that are cached.
    pub(crate) n_found: &'a dyn Fn(SeqId) -> u32,
}

/// Those who wait, in a policy's order.
pub(crate) trait Queue: Debug + Send {
    /// The rank of a new request.
    fn rank(&self, arrival: Arrival, hints: &Hints, n_prompt: u32) -> Rank;
    /// Adds one who waits from now on.
    fn push(&mut self, waiter: Waiter);
    /// Takes out one who was added just like this.
    fn remove(&mut self, waiter: &Waiter);
    /// Who is next.
    fn next(&mut self, ask: &Ask<'_>) -> Option<SeqId>;
    /// Those who wait.
    fn len(&self) -> usize;

    /// Records that one who waited is admitted, just before it is taken out.
    fn admitted(&mut self, _waiter: &Waiter) {}
    /// Whether the policy looks at what running sequences get.
    fn counts_service(&self) -> bool {
        false
    }
    /// Records what a running sequence got, and says its rank if that changes.
    fn serve(&mut self, _waiter: &Waiter, _service: Service) -> Option<Rank> {
        None
    }
    /// The rank with which one who was chosen runs.
    fn rank_to_run(&self, waiter: &Waiter, _step: u64) -> Rank {
        waiter.rank
    }
    /// Whether one who waits may take the place of a running sequence of a higher class.
    fn displaces(&self) -> bool {
        false
    }
    /// Most sequences that run at one time.
    fn max_running(&self) -> u32 {
        u32::MAX
    }
    /// Sets what a tenant's share is worth.
    fn set_weight(&mut self, _tenant: Tenant, _weight: u32) {}
}

#[cfg(test)]
mod tests;
