//! Letting those who wait in.

use nuthatch_cache::{Admission, Admitted, Prompt, SwapIn};
use nuthatch_types::{KvSlots, SeqId, Window};

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

/// How a waiting sequence gets its pages, and where.
pub(crate) struct Fit {
    pub(crate) entry: Entry,
    /// Whether it fits only with pages on the host.
    pub(crate) is_spilled: bool,
}

/// A request that did not fit when it was its turn. As long as it cannot fit, the prefix tree is not
/// walked for it again in every step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocked {
    seq: SeqId,
    /// Pages that it needed, on both tiers together if it could spill.
    n_pages: u32,
    /// Whether it could.
    may_spill: bool,
    /// [`nuthatch_cache::Cache::n_savings`] at that time.
    savings: u64,
}

impl Blocked {
    /// Whether the same request certainly needs more than `room` pages still.
    fn holds(&self, seq: SeqId, may_spill: bool, room: u32, savings: u64) -> bool {
        let n_saved = savings - self.savings;
        let is_same = self.seq == seq && self.may_spill == may_spill;
        is_same && u64::from(self.n_pages) > u64::from(room) + n_saved
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
                && let Some(fit) = self.fitting(seq, promised)
            {
                let before = std::mem::replace(&mut step.budget, budget);
                self.admit(seq, rank, fit, step);
                step.budget = before - (budget - step.budget);
                return;
            }
        }
    }

    /// Admits sequences while seats, tokens and pages last. A request is admitted when all its
    /// tokens fit beside what the running ones still need, on the device or else on both tiers, so
    /// that it is not thrown out halfway through its prompt; the first that does not fit ends the search, so that no long request
    /// waits for ever.
    pub(crate) fn admit_waiting(&mut self, step: &mut Step) {
        while (self.has_seat() || self.n_guided > 0)
            && step.budget > 0
            && let Some((seq, rank)) = self.next_to_admit(step)
            && let Some(fit) = self.make_room(seq, rank, step)
        {
            self.admit(seq, rank, fit, step);
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
    pub(crate) fn fitting(&mut self, seq: SeqId, promised: u32) -> Option<Fit> {
        let is_new = self.seq(seq).place != Place::Swapped;
        let n_extra = if is_new { self.seq(seq).n_roll_pages() } else { 0 };
        let device = self.cache.n_available().saturating_sub(promised.saturating_add(n_extra));
        let may_spill = self.may_spill(seq);
        let host = if may_spill { self.host_room() } else { 0 };
        let room = KvSlots { device, host };
        let savings = self.cache.n_savings();
        let is_blocked = |blocked: Blocked| blocked.holds(seq, may_spill, room.total(), savings);
        if self.blocked.is_some_and(is_blocked) {
            return None;
        }
        let (fit, n_pages) =
            if is_new { self.fitting_new(seq, room) } else { self.fitting_back(seq, room)? };
        // With a window, what a request needs may fall by more than is counted.
        if fit.is_none() && self.config.window.is_none() {
            self.blocked = Some(Blocked { seq, n_pages, may_spill, savings });
        }
        fit
    }

    /// How a sequence without pages gets them, and the fewest that it needs of the room it may use.
    fn fitting_new(&self, seq: SeqId, room: KvSlots) -> (Option<Fit>, u32) {
        let mut admission = self.plan_admission(seq);
        if admission.n_pages() > room.device {
            admission = admission.without_copy();
        }
        let may_spill = self.may_spill(seq);
        let n_pages = if may_spill { admission.n_pages_spilled() } else { admission.n_pages() };
        let is_spilled = admission.n_pages() > room.device;
        let fitting = if is_spilled {
            may_spill.then(|| self.cache.spill(admission, room)).flatten()
        } else {
            Some(admission)
        };
        (fitting.map(|admission| Fit { entry: Entry::New(admission), is_spilled }), n_pages)
    }

    /// The same for a swapped sequence. `None` when it must wait for another one to move.
    fn fitting_back(&self, seq: SeqId, room: KvSlots) -> Option<(Option<Fit>, u32)> {
        let swap = self.cache.plan_swap_in(seq)?;
        let n_fresh = self.pages_outstanding(seq);
        let all = swap.n_pages() + n_fresh;
        let n_over = all.saturating_sub(room.device);
        if n_over == 0 {
            return Some((Some(Fit { entry: Entry::Back(swap), is_spilled: false }), all));
        }
        if !self.may_spill(seq) {
            return Some((None, all));
        }
        let n_stay = n_over.min(swap.n_pages());
        let fit = Fit { entry: Entry::Back(swap.spill(n_stay)), is_spilled: true };
        Some(((n_over - n_stay <= room.host).then_some(fit), n_fresh))
    }

    /// Gives a waiting sequence its pages, and its next tokens to compute.
    fn admit(&mut self, seq: SeqId, rank: Rank, fit: Fit, step: &mut Step) {
        let waiter = self.seq(seq).waiter();
        self.queue.admitted(&waiter);
        self.queue.remove(&waiter);
        let position = self.running.partition_point(|&other| self.seq(other).rank < rank);
        self.running.insert(position, seq);
        self.counters.admissions_spilled += u64::from(fit.is_spilled);
        self.seq_mut(seq).is_spilled = fit.is_spilled;
        // What comes back from a swap has its own pages, of which the last may be half full.
        let may_load = matches!(fit.entry, Entry::New(_));
        match fit.entry {
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
        if may_load && self.load_stored(seq) {
            return;
        }
        step.surplus = None;
        let planned = self.plan_seq(seq, n_tokens, step);
        assert!(planned, "pages for all tokens were counted");
    }

    /// Admits somebody although nothing is running and the first who waits does not fit: swapped
    /// sequences release what they hold.
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
        if sequence.computes_all() {
            return found;
        }
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
    pub(crate) fn outstanding(&self) -> u32 {
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
    let tokens = &sequence.tokens.settled()[..sequence.n_sharable()];
    let (may_spill, is_fresh) = (sequence.stream.is_none(), sequence.computes_all());
    Prompt { tokens, salt, retention, window, may_spill, is_fresh }
}
