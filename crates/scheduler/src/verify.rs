//! Every invariant of the scheduler, one function each.

use nuthatch_types::SeqId;
use thiserror::Error;

use crate::Scheduler;

/// A broken invariant: a bug in this crate or in the cache, never the fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// The cache is broken.
    #[error(transparent)]
    Cache(#[from] nuthatch_cache::Fault),
    /// A sequence is in no queue, in two, or in one out of order.
    #[error("{seq:?} is not in exactly one queue, in its place")]
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
    /// More sequences run than may.
    #[error("{running} sequences are running, but only {max_seqs} may")]
    Seats {
        /// Running sequences.
        running: u32,
        /// Most that may run.
        max_seqs: u32,
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
    let Scheduler { seqs, waiting, running, .. } = scheduler;
    for (&arrival, &seq) in waiting {
        let known = seqs.get(&seq).is_some_and(|sequence| sequence.arrival == arrival);
        if !known || running.contains(&seq) {
            return Err(Fault::Queue { seq });
        }
    }
    let mut last = None;
    for &seq in running {
        let arrival = seqs.get(&seq).map(|sequence| sequence.arrival);
        if arrival.is_none() || arrival <= last {
            return Err(Fault::Queue { seq });
        }
        last = arrival;
    }
    for (&seq, sequence) in seqs {
        if sequence.id != seq {
            return Err(Fault::Queue { seq });
        }
    }
    // Distinct members of `seqs`, as many as there are: none is in no queue.
    if waiting.len() + running.len() == seqs.len() {
        Ok(())
    } else {
        let lost = seqs.iter().find(|(seq, sequence)| {
            !running.contains(seq) && !waiting.contains_key(&sequence.arrival)
        });
        Err(Fault::Queue { seq: lost.map_or(SeqId(0), |(&seq, _)| seq) })
    }
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

fn seats_are_kept(scheduler: &Scheduler) -> Result<(), Fault> {
    let running = scheduler.running.len() as u32;
    let max_seqs = scheduler.config.max_seqs;
    if running <= max_seqs { Ok(()) } else { Err(Fault::Seats { running, max_seqs }) }
}
