//! Letting those who wait in.

use nuthatch_cache::{Admission, Admitted, Prompt, SwapIn};
use nuthatch_types::{SeqId, Window};

use crate::policy::{Ask, Rank};
use crate::sequence::{Place, Sequence};
use crate::step::Step;
use crate::{Hints, Scheduler};

/// How a waiting sequence gets its pages.
pub(crate) enum Entry {
    /// It has none: some are found, the others are computed.
    New(Admission),
    /// It was swapped: they come back.
    Back(SwapIn),
}

/// A request that did not fit when it was its turn. As long as it cannot fit, the prefix tree is not
/// walked for it again in every step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocked {
    seq: SeqId,
    /// Pages that it needed.
    n_pages: u32,
    /// [`nuthatch_cache::Cache::n_savings`] at that time.
    savings: u64,
}

impl Blocked {
    /// Whether the same request certainly needs more than `room` pages still.
    fn holds(&self, seq: SeqId, room: u32, savings: u64) -> bool {
        let n_saved = savings - self.savings;
        self.seq == seq && u64::from(self.n_pages) > u64::from(room) + n_saved
    }
}

impl Scheduler {
    /// Lets sequences wait for their turn that waited for the one that they fork.
    pub(crate) fn release_held(&mut self) {
        let mut held = std::mem::take(&mut self.held);
        held.retain(|&seq| {
            let still = self.waits_for_source(seq);
            if !still {
                let sequence = self.seq_mut(seq);
                sequence.place = Place::Waiting;
                let waiter = sequence.waiter();
                self.queue.push(waiter);
            }
            still
        });
        self.held = held;
    }

    /// Lets one who waits take the place of running sequences of a higher class, if the policy
    /// allows that and it would not get a place otherwise.
    pub(crate) fn displace(&mut self, step: &mut Step) {
        if !self.queue.displaces() {
            return;
        }
        // Decoding comes first, so each running sequence may need a token.
        let budget = step.budget.saturating_sub(self.running.len() as u32);
        let next = self.next_waiting(self.may_start());
        let Some((seq, rank)) = next.filter(|_| budget > 0) else { return };
        if self.has_seat() && self.fitting(seq, self.outstanding()).is_some() {
            return;
        }
        let is_above = |&other: &SeqId| self.seq(other).rank.class <= rank.class;
        let n_kept = self.running.partition_point(is_above);
        let victims: Vec<SeqId> = self.running[n_kept..].to_vec();
        for victim in victims.into_iter().rev() {
            if self.seq(victim).protected {
                continue;
            }
            self.displace_seq(victim, step);
            let promised = self.outstanding();
            if self.has_seat()
                && let Some(entry) = self.fitting(seq, promised)
            {
                let before = std::mem::replace(&mut step.budget, budget);
                self.admit(seq, rank, entry, step);
                step.budget = before - (budget - step.budget);
                return;
            }
        }
    }

    /// Admits sequences while seats, tokens and pages last. A request is admitted when all its
    /// tokens fit beside what the running ones still need, so that it is not thrown out halfway
    /// through its prompt; the first that does not fit ends the search, so that no long request
    /// waits for ever.
    pub(crate) fn admit_waiting(&mut self, step: &mut Step) {
        while (self.has_seat() || self.n_guided > 0)
            && step.budget > 0
            && let Some((seq, rank)) = self.next_to_admit(step)
            && let Some(entry) = self.make_room(seq, rank, step)
        {
            self.admit(seq, rank, entry, step);
            step.promised += self.pages_outstanding(seq);
        }
    }

    pub(crate) fn has_seat(&self) -> bool {
        (self.running.len() as u32) < self.config.max_seqs.min(self.queue.max_running())
    }

    /// Whether the executor has room for a sequence that it does not know.
    pub(crate) fn may_start(&self) -> bool {
        self.n_started + self.n_unstarted < self.config.max_seqs
    }

    /// Who is next, and the rank with which it will run.
    pub(crate) fn next_waiting(&mut self, may_start: bool) -> Option<(SeqId, Rank)> {
        let Scheduler { queue, cache, seqs, .. } = self;
        let step = self.counters.steps;
        let ask = Ask {
            may_start,
            step,
            n_found: &|seq| {
                // What is found does not depend on how much of it is kept.
                let admission = cache.plan_admit(seq, prompt(&seqs[&seq], None));
                admission.miss().map_or(0, |miss| miss.at)
            },
        };
        let seq = queue.next(&ask)?;
        Some((seq, queue.rank_to_run(&seqs[&seq].waiter(), step)))
    }

    /// How a waiting sequence gets its pages, if all its tokens fit beside `promised` pages.
    pub(crate) fn fitting(&mut self, seq: SeqId, promised: u32) -> Option<Entry> {
        let is_new = self.seq(seq).place != Place::Swapped;
        let n_extra = if is_new { self.seq(seq).n_roll_pages() } else { 0 };
        let room = self.cache.n_available().saturating_sub(promised.saturating_add(n_extra));
        let savings = self.cache.n_savings();
        if self.blocked.is_some_and(|blocked| blocked.holds(seq, room, savings)) {
            return None;
        }
        let (entry, n_pages) = if is_new {
            let mut admission = self.plan_admission(seq);
            if admission.n_pages() > room {
                admission = admission.without_copy();
            }
            let n_pages = admission.n_pages();
            (Entry::New(admission), n_pages)
        } else {
            let swap = self.cache.plan_swap_in(seq);
            let n_pages = swap.n_pages() + self.pages_outstanding(seq);
            (Entry::Back(swap), n_pages)
        };
        if n_pages > room {
            // With a window, what a request needs may fall by more than is counted.
            if self.config.window.is_none() {
                self.blocked = Some(Blocked { seq, n_pages, savings });
            }
            return None;
        }
        Some(entry)
    }

    /// Gives a waiting sequence its pages, and its next tokens to compute.
    fn admit(&mut self, seq: SeqId, rank: Rank, entry: Entry, step: &mut Step) {
        let waiter = self.seq(seq).waiter();
        self.queue.admitted(&waiter);
        self.queue.remove(&waiter);
        let position = self.running.partition_point(|&other| self.seq(other).rank < rank);
        self.running.insert(position, seq);
        match entry {
            Entry::New(admission) => {
                let Admitted { n_found, .. } = self.cache.admit(admission);
                let sequence = self.seq_mut(seq);
                sequence.computed = n_found;
                if !sequence.is_started {
                    sequence.cached = n_found.min(sequence.n_prompt);
                }
            }
            Entry::Back(swap) => {
                self.swapped.remove(&(waiter.rank, seq));
                self.cache.swap_in(swap);
            }
        }
        self.n_unstarted += u32::from(!waiter.is_started);
        let budget = step.budget;
        let sequence = self.seq_mut(seq);
        sequence.place = Place::Running;
        if sequence.rank != rank {
            sequence.rank = rank;
            sequence.n_since_rank = 0;
        }
        let n_tokens = sequence.pending().min(budget);
        if self.load_stored(seq) {
            return;
        }
        let planned = self.plan_seq(seq, n_tokens, step);
        assert!(planned, "pages for all tokens were counted");
    }

    /// Admits somebody although nothing is running and the first who waits does not fit: swapped
    /// sequences release what they hold on the device.
    pub(crate) fn admit_by_force(&mut self, step: &mut Step) {
        while self.running.is_empty()
            && self.cache.n_loads() == 0
            && let Some((seq, _)) = self.next_waiting(self.may_start())
            && self.drop_swapped(Some(seq))
        {
            self.admit_waiting(step);
        }
    }

    /// Decides what a waiting sequence starts with: what is cached of its tokens, or what the
    /// sequence that it forks has, whichever is more.
    fn plan_admission(&self, seq: SeqId) -> Admission {
        let sequence = self.seq(seq);
        let found = self.cache.plan_admit(seq, prompt(sequence, self.window(&sequence.hints)));
        let n_found = found.miss().map_or(0, |miss| miss.at);
        if self.n_stored(sequence) * self.cache.config().page_len > n_found {
            // What is loaded follows full pages.
            return found.without_copy();
        }
        let Some(source) = self.fork_source(seq) else { return found };
        let n_tokens = sequence.n_sharable() as u32;
        // The last token is computed, and a table is not full before it has dropped anything.
        let n_shared = sequence.n_common.min(source.computed).min(n_tokens - 1);
        if n_shared <= n_found || !self.cache.can_fork(source.id, n_shared) {
            return found;
        }
        self.cache.plan_fork(source.id, seq, n_shared, n_tokens)
    }

    /// Pages that the running sequences still need for the tokens they have.
    fn outstanding(&self) -> u32 {
        self.running.iter().map(|&seq| self.pages_outstanding(seq)).sum()
    }

    /// Whether the sequence that a held one forks has not computed all that they share.
    fn waits_for_source(&self, seq: SeqId) -> bool {
        self.fork_source(seq).is_some_and(|source| source.computed < self.seq(seq).n_common)
    }

    /// The sequence that another one forks, if it is still there.
    fn fork_source(&self, seq: SeqId) -> Option<&Sequence> {
        self.seqs.get(&self.seq(seq).hints.fork_of?)
    }
}

fn prompt(sequence: &Sequence, window: Option<Window>) -> Prompt<'_> {
    let Hints { salt, retention, .. } = *sequence.hints;
    Prompt { tokens: &sequence.tokens[..sequence.n_sharable()], salt, retention, window }
}
