//! Every invariant of the scheduler, one function each.

use nuthatch_types::SeqId;
use thiserror::Error;

use crate::Scheduler;
use crate::sequence::{Place, Sequence};

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
        /// Tokens that have a place in the cache, or had one before the window.
        stored: u32,
    },
    /// The cache has a table for a sequence that is neither running nor swapped.
    #[error("the cache has {tables} tables for {running} running and {swapped} swapped sequences")]
    Tables {
        /// Tables in the cache.
        tables: u32,
        /// Running sequences.
        running: u32,
        /// Swapped sequences.
        swapped: u32,
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

/// Checks one sequence, one page and one table.
pub(crate) fn verify_sample(scheduler: &Scheduler, k: u64) -> Result<(), Fault> {
    scheduler.cache.verify_sample(k)?;
    seats_are_kept(scheduler)?;
    let n_seqs = scheduler.seqs.len().max(1) as u64;
    let sampled = scheduler.seqs.iter().nth((k % n_seqs) as usize);
    let Some((&seq, sequence)) = sampled else { return Ok(()) };
    let has_table = matches!(sequence.place, Place::Swapped | Place::Running);
    if sequence.id != seq || scheduler.cache.contains(seq) != has_table {
        return Err(Fault::Queue { seq });
    }
    if has_table { length_agrees(scheduler, sequence) } else { Ok(()) }
}

fn queues_are_a_partition(scheduler: &Scheduler) -> Result<(), Fault> {
    let Scheduler { seqs, queue, held, swapped, running, is_unsorted, .. } = scheduler;
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
    for &(rank, seq) in swapped {
        let place = seqs.get(&seq).map(|sequence| (sequence.place, sequence.rank));
        if place != Some((Place::Swapped, rank)) {
            return Err(Fault::Queue { seq });
        }
    }
    for (&seq, sequence) in seqs {
        // Only who is guided is ever parked, and then nobody else remembers it.
        let is_lost = sequence.place == Place::Parked
            && (!sequence.is_guided || sequence.is_started || sequence.computed > 0);
        let has_table = matches!(sequence.place, Place::Swapped | Place::Running);
        let is_astray = sequence.is_spilled && !(has_table && scheduler.can_spill(sequence));
        if sequence.id != seq || is_lost || is_astray {
            return Err(Fault::Queue { seq });
        }
    }
    let n_spare: u32 = seqs.values().map(|s| s.n_spare).sum();
    count("spare places", scheduler.n_spare as usize, n_spare as usize)?;
    let at = |place: Place| seqs.values().filter(|s| s.place == place).count();
    count("running sequences", running.len(), at(Place::Running))?;
    count("held sequences", held.len(), at(Place::Held))?;
    count("swapped sequences", swapped.len(), at(Place::Swapped))?;
    count("waiting sequences", queue.len(), at(Place::Waiting) + at(Place::Swapped))?;
    count("parked sequences", scheduler.n_parked as usize, at(Place::Parked))?;
    let n_guided = seqs.values().filter(|s| s.is_guided).count();
    count("guided sequences", scheduler.n_guided as usize, n_guided)?;
    let n_started = seqs.values().filter(|s| s.is_started).count();
    count("started sequences", scheduler.n_started as usize, n_started)?;
    let is_unstarted = |s: &&Sequence| s.place == Place::Running && !s.is_started;
    let n_unstarted = seqs.values().filter(is_unstarted).count();
    count("running sequences not started", scheduler.n_unstarted as usize, n_unstarted)
}

fn lengths_agree(scheduler: &Scheduler) -> Result<(), Fault> {
    let tables = scheduler.cache.stats().seqs;
    let n_running = scheduler.running.len() as u32;
    let n_swapped = scheduler.swapped.len() as u32;
    if tables != n_running + n_swapped {
        return Err(Fault::Tables { tables, running: n_running, swapped: n_swapped });
    }
    let swapped = scheduler.swapped.iter().map(|&(_, seq)| seq);
    let mut with_tables = scheduler.running.iter().copied().chain(swapped);
    with_tables.try_for_each(|seq| length_agrees(scheduler, scheduler.seq(seq)))
}

fn length_agrees(scheduler: &Scheduler, sequence: &Sequence) -> Result<(), Fault> {
    let seq = sequence.id;
    let stored = scheduler.cache.len(seq);
    // Between a plan and its commit the cache is ahead by the tokens of the step.
    let flights = scheduler.in_flight.iter().flat_map(|step| &step.flights);
    let ahead: u32 = flights.filter(|f| f.seq == seq).map(|f| f.n_tokens).sum();
    let is_placed = scheduler.cache.is_swapped(seq) == (sequence.place == Place::Swapped);
    let placed = sequence.computed + ahead + sequence.n_spare;
    let has_work = sequence.pending() > 0 || sequence.is_guided;
    let is_dropped = scheduler.cache.n_dropped(seq) == sequence.dropped;
    if placed != stored + sequence.dropped || !is_dropped || !has_work || !is_placed {
        return Err(Fault::Length { seq, computed: sequence.computed, stored });
    }
    Ok(())
}

/// Neither the tables of the cache nor those of the executor are more than they may be.
fn seats_are_kept(scheduler: &Scheduler) -> Result<(), Fault> {
    let max_seqs = scheduler.config.max_seqs;
    let n_started = scheduler.n_started + scheduler.n_unstarted;
    let known = n_started.max(scheduler.running.len() as u32);
    if known <= max_seqs { Ok(()) } else { Err(Fault::Seats { known, max_seqs }) }
}

fn count(name: &'static str, counted: usize, found: usize) -> Result<(), Fault> {
    if counted == found { Ok(()) } else { Err(Fault::Counter { name, counted, found }) }
}
