//! Every invariant of the scheduler, one function each.

use nuthatch_types::SeqId;
use thiserror::Error;

use crate::Scheduler;
use crate::sequence::Place;

/// A broken invariant: a bug in this crate or in the cache, never the fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// The cache is broken.
    #[error(transparent)]
    Cache(#[from] nuthatch_cache::Fault),
    /// A sequence is not where it is said to be, or out of order there.
    #[error("{seq:?} is not in its place")]
    Queue {
        /// The sequence.
        seq: SeqId,
    },
    /// A sequence's table and its tokens disagree.
    #[error("{seq:?} has {computed} computed tokens and {stored} in the cache")]
    Length {
        /// The sequence.
        seq: SeqId,
        /// Tokens that the scheduler thinks computed.
        computed: u32,
        /// Tokens that have a place in the cache.
        stored: u32,
    },
    /// The cache has a table for a sequence that is not running.
    #[error("the cache has {tables} tables for {running} running sequences")]
    Tables {
        /// Tables in the cache.
        tables: u32,
        /// Running sequences.
        running: u32,
    },
    /// More sequences run, or are known to the executor, than may.
    #[error("{known} sequences are running or were, but only {max_seqs} may")]
    Seats {
        /// Sequences that run or that the executor knows.
        known: u32,
        /// Most that may.
        max_seqs: u32,
    },
    /// A counter differs from what it counts.
    #[error("the counter of {name} says {counted}, but {found} were found")]
    Counter {
        /// What is counted.
        name: &'static str,
        /// What the counter says.
        counted: usize,
        /// What was found.
        found: usize,
    },
}

/// Checks everything; linear in pages and sequences.
pub(crate) fn verify(scheduler: &Scheduler) -> Result<(), Fault> {
    scheduler.cache.verify()?;
    queues_are_a_partition(scheduler)?;
    lengths_agree(scheduler)?;
    seats_are_kept(scheduler)
}

fn queues_are_a_partition(scheduler: &Scheduler) -> Result<(), Fault> {
    let Scheduler { seqs, queue, held, running, is_unsorted, .. } = scheduler;
    let mut last = None;
    for &seq in running {
        let rank = seqs.get(&seq).filter(|s| s.place == Place::Running).map(|s| s.rank);
        if rank.is_none() || (rank <= last && !is_unsorted) {
            return Err(Fault::Queue { seq });
        }
        last = rank;
    }
    for &seq in held {
        if seqs.get(&seq).is_none_or(|sequence| sequence.place != Place::Held) {
            return Err(Fault::Queue { seq });
        }
    }
    for (&seq, sequence) in seqs {
        if sequence.id != seq {
            return Err(Fault::Queue { seq });
        }
    }
    let at = |place: Place| seqs.values().filter(|s| s.place == place).count();
    count("running sequences", running.len(), at(Place::Running))?;
    count("held sequences", held.len(), at(Place::Held))?;
    count("waiting sequences", queue.len(), at(Place::Waiting))?;
    let n_started = seqs.values().filter(|s| s.is_started()).count();
    count("started sequences", scheduler.n_started as usize, n_started)
}

fn lengths_agree(scheduler: &Scheduler) -> Result<(), Fault> {
    let tables = scheduler.cache.stats().seqs;
    let n_running = scheduler.running.len() as u32;
    if tables != n_running {
        return Err(Fault::Tables { tables, running: n_running });
    }
    for &seq in &scheduler.running {
        let sequence = scheduler.seq(seq);
        let stored = scheduler.cache.len(seq);
        // Between a plan and its commit the cache is ahead by the tokens of the step.
        let flights = scheduler.in_flight.iter().flat_map(|step| &step.flights);
        let ahead: u32 = flights.filter(|f| f.seq == seq).map(|f| f.n_tokens).sum();
        if sequence.computed + ahead != stored || sequence.pending() == 0 {
            return Err(Fault::Length { seq, computed: sequence.computed, stored });
        }
    }
    Ok(())
}

/// Neither the tables of the cache nor those of the executor are more than they may be.
fn seats_are_kept(scheduler: &Scheduler) -> Result<(), Fault> {
    let max_seqs = scheduler.config.max_seqs;
    let known = scheduler.n_started.max(scheduler.running.len() as u32);
    if known <= max_seqs { Ok(()) } else { Err(Fault::Seats { known, max_seqs }) }
}

fn count(name: &'static str, counted: usize, found: usize) -> Result<(), Fault> {
    if counted == found { Ok(()) } else { Err(Fault::Counter { name, counted, found }) }
}
