//! Sequences whose tokens the caller chooses, as beam search does.
//!
//! Such a sequence ([`Sampling::n_candidates`](nuthatch_types::Sampling::n_candidates)) does not go
//! on by itself. Each time its tokens are computed it tells the best candidates and pauses; the
//! caller lets it go on with one of them, forks it, or discards it.
//!
//! ```text
//!   running --Candidates--> paused --proceed--> running
//!                             | |
//!                             | +-- give way --> parked --proceed--> waiting
//!                             +---- fork ------> (another) waiting
//! ```
//!
//! A paused sequence keeps its pages, so that forks can share them, but has no claim to them: it is
//! the first to give way. It is then *parked*, which costs nothing, and computed again when it goes
//! on. So whatever paused sequences hold, those that wait get through: first the paused ones of
//! later requests give way, and if nothing could run at all, the last paused one does.

use nuthatch_types::{FinishReason, SeqId, TokenId};

use crate::admit::Fit;
use crate::policy::{Arrival, Rank};
use crate::sequence::{Loss, Place, Sequence};
use crate::step::Step;
use crate::{Hints, Scheduler, Submission, SubmitError, Usage};

impl Scheduler {
    /// Takes a request whose sequence will be forked into at most `width` at one time, and returns
    /// the most tokens of an answer; or refuses it, if that many sequences can never run together.
    pub fn submit_wide(
        &mut self,
        submission: Submission,
        hints: Hints,
        width: u32,
    ) -> Result<u32, SubmitError> {
        let prompt = u32::try_from(submission.prompt.len()).unwrap_or(u32::MAX);
        let max_len = prompt.saturating_add(submission.limits.max_tokens);
        let max_len = max_len.min(self.config.max_context);
        assert!(hints.streaming.is_none(), "what is dropped cannot be forked");
        let checked = self.check(&submission, &hints);
        let checked = checked.and_then(|_| self.check_wide(prompt, max_len, width));
        self.counters.refused += u64::from(checked.is_err());
        checked?;
        self.submit_with(submission, hints)?;
        Ok(max_len - prompt)
    }

    /// Lets a paused sequence go on with `token`.
    pub fn proceed(&mut self, seq: SeqId, token: TokenId) {
        let n_step = self.counters.steps;
        let sequence = self.seq_mut(seq);
        sequence.choose(token);
        if sequence.place == Place::Parked {
            sequence.place = Place::Waiting;
            sequence.since = n_step;
            let waiter = sequence.waiter();
            self.n_parked -= 1;
            self.queue.push(waiter);
        }
    }

    /// Makes a new sequence of the tokens of a paused one and `token`. It waits for its turn beside
    /// the sequences of its request, and then shares all full pages of `source`; the page that is
    /// not full is copied.
    pub fn fork(&mut self, source: SeqId, seq: SeqId, token: TokenId) {
        assert!(!self.seqs.contains_key(&seq), "{seq:?} is already in use");
        self.n_arrivals += 1;
        self.n_guided += 1;
        self.counters.forks += 1;
        let fork = self.n_arrivals;
        let n_step = self.counters.steps;
        let source = self.seq(source);
        let request = source.rank.arrival.request;
        let n_common = source.tokens.len();
        let mut sequence = Sequence {
            id: seq,
            rank: Rank { arrival: Arrival { request, fork }, ..source.rank },
            n_since_rank: source.n_since_rank,
            place: source.place,
            since: n_step,
            tokens: source.tokens.clone(),
            newest: source.newest,
            n_prompt: source.n_prompt,
            computed: source.computed,
            dropped: 0,
            cached: 0,
            computed_max: n_common,
            loss: Loss::PagesShort,
            n_spare: 0,
            table_known: 0,
            n_loading: 0,
            max_len: source.max_len,
            limits: source.limits.clone(),
            hints: Box::new(Hints { fork_of: Some(source.id), n_stored: 0, ..*source.hints }),
            stream: None,
            n_common,
            sampling: source.sampling.clone(),
            is_started: false,
            is_guided: true,
            is_spilled: false,
            protected: false,
            last_step: 0,
        };
        sequence.choose(token);
        sequence.reset(Loss::PagesShort);
        sequence.place = Place::Waiting;
        self.queue.push(sequence.waiter());
        self.seqs.insert(seq, sequence);
    }

    /// Ends a sequence that the caller follows no further, and frees everything it has.
    pub fn discard(&mut self, seq: SeqId) {
        let ended = self.end(seq, FinishReason::Stop);
        assert!(ended.is_some(), "{seq:?} has not ended");
        self.running.retain(|&running| running != seq);
        self.counters.discarded += 1;
    }

    /// What a sequence used so far; `None` when there is no such sequence.
    pub fn usage(&self, seq: SeqId) -> Option<Usage> {
        self.seqs.get(&seq).map(Sequence::usage)
    }

    /// Whether `width` sequences fit that share only the full pages of their prompt.
    fn check_wide(&self, prompt: u32, max_len: u32, width: u32) -> Result<(), SubmitError> {
        let max_seqs = self.config.max_seqs;
        if width > max_seqs {
            return Err(SubmitError::TooWide { width, max_seqs });
        }
        let page_len = self.cache.config().page_len;
        // All of them run at one time, so none of them is counted on the host.
        let n_pages = self.cache.device_capacity() / page_len;
        let n_shared = prompt / page_len;
        // The last token of an answer is never computed.
        let longest = max_len.saturating_sub(1).max(prompt);
        let n_own = longest.div_ceil(page_len) - n_shared;
        let needed = u64::from(n_shared) + u64::from(width) * u64::from(n_own);
        if needed > u64::from(n_pages) {
            return Err(SubmitError::ExceedsCacheWide {
                prompt,
                width,
                max_len,
                needed,
                n_pages,
                page_len,
            });
        }
        Ok(())
    }

    /// Who is next, and the rank with which it will run. When the executor has no room for another
    /// sequence, paused ones of later requests make some.
    pub(crate) fn next_to_admit(&mut self, step: &mut Step) -> Option<(SeqId, Rank)> {
        let may_start = self.may_start();
        if may_start || self.n_guided == 0 {
            return self.next_waiting(may_start);
        }
        let (seq, rank) = self.next_waiting(true)?;
        if self.seq(seq).is_started || self.park_behind(rank, step) {
            return Some((seq, rank));
        }
        self.next_waiting(false)
    }

    /// How a waiting sequence gets its pages, if it has a seat and all its tokens fit. Paused
    /// sequences of later requests give way to it.
    pub(crate) fn make_room(&mut self, seq: SeqId, rank: Rank, step: &mut Step) -> Option<Fit> {
        if self.n_guided > 0 {
            // What a fork needs changes with its source.
            self.blocked = None;
        }
        loop {
            if self.has_seat()
                && let Some(fit) = self.fitting(seq, step.promised)
            {
                return Some(fit);
            }
            if !self.park_behind(rank, step) {
                return None;
            }
        }
    }

    /// Admits somebody although paused sequences hold what is missing: if nothing could run
    /// otherwise, they give way one after the other.
    pub(crate) fn admit_over_paused(&mut self, step: &mut Step) {
        while step.flights.is_empty()
            && self.queue.len() > 0
            && self.cache.n_loads() == 0
            && self.park_last(step)
        {
            self.admit_waiting(step);
        }
    }

    /// Whether nobody who has pages has anything to compute.
    pub(crate) fn all_paused(&self) -> bool {
        self.running.iter().all(|&seq| self.seq(seq).is_paused())
    }

    /// Parks the last paused sequence. False when there is none.
    pub(crate) fn park_last(&mut self, step: &mut Step) -> bool {
        self.park_where(step, |_| true)
    }

    /// Parks the last paused sequence of a request that comes after `rank`. False when there is
    /// none. The sequences of one request need each other, so parking one of them helps nobody.
    fn park_behind(&mut self, rank: Rank, step: &mut Step) -> bool {
        self.park_where(step, |other| {
            other.rank > rank && other.rank.arrival.request != rank.arrival.request
        })
    }

    fn park_where(&mut self, step: &mut Step, is_victim: impl Fn(&Sequence) -> bool) -> bool {
        if self.n_guided == 0 {
            return false;
        }
        let victim = self.running.iter().rposition(|&other| {
            let other = self.seq(other);
            other.is_paused() && is_victim(other)
        });
        let Some(position) = victim else { return false };
        self.preempt(position, Loss::PagesShort, step);
        true
    }

    /// Takes everything from a paused sequence that has left `running`: its pages, and its place in
    /// the executor, which is told its history again when it goes on.
    pub(crate) fn park(&mut self, seq: SeqId, cause: Loss) {
        self.cache.release(seq);
        self.n_spare -= self.seq(seq).n_spare;
        let sequence = self.seq_mut(seq);
        sequence.reset(cause);
        sequence.place = Place::Parked;
        sequence.is_started = false;
        self.n_parked += 1;
        self.n_started -= 1;
        self.ended.push(seq);
    }
}

impl Sequence {
    /// Adds the token that the caller chose.
    fn choose(&mut self, token: TokenId) {
        let is_waiting = self.place == Place::Parked || self.is_paused();
        assert!(self.is_guided && is_waiting, "{:?} does not wait for a token", self.id);
        assert!(self.tokens.len() < self.max_len, "{:?} is as long as it may be", self.id);
        self.push(token);
        self.tokens.settle();
    }
}
