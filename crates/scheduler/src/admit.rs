//! Letting those who wait in.

use nuthatch_cache::{Admission, Admitted, Prompt};
use nuthatch_types::SeqId;

use crate::policy::{Ask, Rank};
use crate::sequence::{Place, Sequence};
use crate::step::Step;
use crate::{Hints, Scheduler};

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
        let Some((seq, rank)) = self.next_waiting().filter(|_| budget > 0) else { return };
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
                && let Some(admission) = self.fitting(seq, promised)
            {
                let before = std::mem::replace(&mut step.budget, budget);
                self.admit(seq, rank, admission, step);
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
        while self.has_seat()
            && step.budget > 0
            && let Some((seq, rank)) = self.next_waiting()
            && let Some(admission) = self.fitting(seq, step.promised)
        {
            self.admit(seq, rank, admission, step);
            step.promised += self.pages_outstanding(seq);
        }
    }

    fn has_seat(&self) -> bool {
        (self.running.len() as u32) < self.config.max_seqs.min(self.queue.max_running())
    }

    /// Who is next, and the rank with which it will run.
    fn next_waiting(&mut self) -> Option<(SeqId, Rank)> {
        let Scheduler { queue, cache, seqs, .. } = self;
        let step = self.counters.steps;
        let ask = Ask {
            may_start: self.n_started < self.config.max_seqs,
            step,
            n_found: &|seq| {
                let admission = cache.plan_admit(seq, prompt(&seqs[&seq]));
                admission.miss().map_or(0, |miss| miss.at)
            },
        };
        let seq = queue.next(&ask)?;
        Some((seq, queue.rank_to_run(&seqs[&seq].waiter(), step)))
    }

    /// What a waiting sequence starts with, if all its tokens fit beside `promised` pages.
    fn fitting(&self, seq: SeqId, promised: u32) -> Option<Admission> {
        let room = self.cache.n_available().saturating_sub(promised);
        let mut admission = self.plan_admission(seq);
        if admission.n_pages() > room {
            admission = admission.without_copy();
        }
        (admission.n_pages() <= room).then_some(admission)
    }

    /// Gives a waiting sequence what was found for it, and its first tokens to compute.
    fn admit(&mut self, seq: SeqId, rank: Rank, admission: Admission, step: &mut Step) {
        let waiter = self.seq(seq).waiter();
        self.queue.admitted(&waiter);
        self.queue.remove(&waiter);
        let position = self.running.partition_point(|&other| self.seq(other).rank < rank);
        self.running.insert(position, seq);
        let Admitted { n_found, copy } = self.cache.admit(admission);
        step.plan.copies.extend(copy);
        let budget = step.budget;
        let sequence = self.seq_mut(seq);
        sequence.place = Place::Running;
        if sequence.rank != rank {
            sequence.rank = rank;
            sequence.n_since_rank = 0;
        }
        sequence.computed = n_found;
        if !sequence.is_started() {
            sequence.cached = n_found.min(sequence.n_prompt);
        }
        let n_tokens = sequence.pending().min(budget);
        let planned = self.plan_seq(seq, n_tokens, step);
        assert!(planned, "pages for all tokens were counted");
    }

    /// Decides what a waiting sequence starts with: what is cached of its tokens, or what the
    /// sequence that it forks has, whichever is more.
    fn plan_admission(&self, seq: SeqId) -> Admission {
        let sequence = self.seq(seq);
        let found = self.cache.plan_admit(seq, prompt(sequence));
        let n_found = found.miss().map_or(0, |miss| miss.at);
        let Some(source) = self.fork_source(seq) else { return found };
        let n_shared = sequence.n_common.min(source.computed);
        if n_shared <= n_found {
            return found;
        }
        self.cache.plan_fork(source.id, seq, n_shared, sequence.tokens.len() as u32)
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

fn prompt(sequence: &Sequence) -> Prompt<'_> {
    let Hints { salt, retention, .. } = sequence.hints;
    Prompt { tokens: &sequence.tokens, salt, retention }
}
