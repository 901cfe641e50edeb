//! Each policy on its own.

use std::collections::BTreeMap;

use super::*;

/// A queue, and what is waiting in it.
struct Line {
    queue: Box<dyn Queue>,
    waiters: BTreeMap<SeqId, Waiter>,
    found: BTreeMap<SeqId, u32>,
    n_arrivals: u64,
    step: u64,
}

impl Line {
    fn new(policy: Policy) -> Self {
        let (waiters, found) = (BTreeMap::new(), BTreeMap::new());
        Line { queue: policy.queue(), waiters, found, n_arrivals: 0, step: 0 }
    }

    fn come(&mut self, seq: u64, hints: Hints, n_prompt: u32) {
        self.n_arrivals += 1;
        let rank = self.queue.rank(Arrival::nth(self.n_arrivals), &hints, n_prompt);
        let since = self.step;
        let seq = SeqId(seq);
        self.wait(Waiter { seq, rank, tenant: hints.tenant, is_started: false, since });
    }

    fn wait(&mut self, waiter: Waiter) {
        self.queue.push(waiter);
        self.waiters.insert(waiter.seq, waiter);
    }

    fn next(&mut self, may_start: bool) -> Option<u64> {
        let n_found = |seq: SeqId| self.found.get(&seq).copied().unwrap_or(0);
        let ask = Ask { may_start, step: self.step, n_found: &n_found };
        self.queue.next(&ask).map(|seq| seq.0)
    }

    /// Admits who is next.
    fn admit(&mut self) -> Option<u64> {
        let seq = self.next(true)?;
        let waiter = self.waiters.remove(&SeqId(seq)).expect("it waits");
        self.queue.admitted(&waiter);
        self.queue.remove(&waiter);
        assert_eq!(self.queue.len(), self.waiters.len());
        Some(seq)
    }

    /// Admits who is next and serves it once.
    fn serve_next(&mut self, n_computed: u32, n_sampled: u32) -> Waiter {
        let seq = self.next(true).expect("someone waits");
        let waiter = self.waiters[&SeqId(seq)];
        self.admit();
        self.queue.serve(&waiter, Service { n_computed, n_sampled, n_since_rank: 0 });
        waiter
    }

    fn admit_all(&mut self) -> Vec<u64> {
        std::iter::from_fn(|| self.admit()).collect()
    }
}

fn priority(priority: u8) -> Hints {
    Hints { priority, ..Hints::default() }
}

fn tenant(tenant: u64) -> Hints {
    Hints { tenant: Tenant(tenant), ..Hints::default() }
}

#[test]
fn fcfs_keeps_the_order_of_arrival_also_for_who_comes_back() {
    let mut line = Line::new(Policy::Fcfs);
    for seq in [5, 3, 9] {
        line.come(seq, Hints::default(), 1);
    }
    let first = line.waiters[&SeqId(5)];
    assert_eq!(line.admit(), Some(5));
    line.come(7, Hints::default(), 1);
    line.wait(Waiter { is_started: true, ..first });
    assert_eq!(line.next(true), Some(5));
    assert_eq!(line.next(false), Some(5));
    assert_eq!(line.admit_all(), [5, 3, 9, 7]);
    assert_eq!(line.next(true), None);
}

#[test]
fn only_who_is_known_comes_when_nobody_may_start() {
    let policies = [
        Policy::Fcfs,
        Policy::Priority { boost: 3 },
        Policy::Prefix { ageing: 1, window: 4 },
        Policy::Fair,
        Policy::Mlfq { levels: 3, quantum: 4, max_wait: 9, max_running: 4 },
    ];
    for policy in policies {
        let mut line = Line::new(policy);
        line.come(1, Hints::default(), 1);
        assert_eq!(line.next(false), None, "{policy:?}");
        line.come(2, Hints::default(), 100);
        let waiter = line.waiters[&SeqId(2)];
        line.queue.remove(&waiter);
        line.wait(Waiter { is_started: true, ..waiter });
        assert_eq!(line.next(false), Some(2), "{policy:?}");
    }
}

#[test]
fn priority_overtakes_only_who_came_shortly_before() {
    let mut line = Line::new(Policy::Priority { boost: 2 });
    for (seq, level) in [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2)] {
        line.come(seq, priority(level), 1);
    }
    // Two steps of priority are worth four arrivals, one is worth two.
    assert_eq!(line.admit_all(), [1, 5, 2, 4, 3]);
}

#[test]
fn prefix_takes_who_finds_most_but_passes_nobody_over_for_ever() {
    let mut line = Line::new(Policy::Prefix { ageing: 10, window: 8 });
    line.come(1, Hints::default(), 1);
    for seq in 2..8 {
        line.come(seq, Hints::default(), 1);
        line.found.insert(SeqId(seq), 25);
    }
    // Three times passed over is worth thirty tokens.
    assert_eq!(line.admit_all(), [2, 3, 4, 1, 5, 6, 7]);
}

#[test]
fn fair_serves_tenants_by_their_weights() {
    let mut line = Line::new(Policy::Fair);
    line.queue.set_weight(Tenant(2), 3);
    for seq in 0..40 {
        line.come(seq, tenant(1), 1);
        line.come(100 + seq, tenant(2), 1);
    }
    let mut served = [0; 2];
    for _ in 0..40 {
        let waiter = line.serve_next(10, 5);
        served[usize::from(waiter.tenant == Tenant(2))] += 1;
    }
    assert_eq!(served, [10, 30]);
}

#[test]
fn fair_gives_no_credit_for_a_pause() {
    let mut line = Line::new(Policy::Fair);
    for seq in 0..20 {
        line.come(seq, tenant(1), 1);
    }
    for _ in 0..10 {
        line.serve_next(10, 0);
    }
    // The second tenant comes late. It is level with the first, not ten requests ahead.
    for seq in 100..120 {
        line.come(seq, tenant(2), 1);
    }
    let order: Vec<u64> = (0..8).map(|_| line.serve_next(10, 0).tenant.0).collect();
    assert_eq!(order, [1, 2, 1, 2, 1, 2, 1, 2]);
}

#[test]
fn fair_gives_no_credit_for_a_pause_when_nobody_waits_either() {
    let mut line = Line::new(Policy::Fair);
    for seq in 0..10 {
        line.come(seq, tenant(1), 1);
        line.serve_next(10, 0);
    }
    line.come(100, tenant(2), 1);
    line.come(10, tenant(1), 1);
    line.come(101, tenant(2), 1);
    let order: Vec<u64> = (0..3).map(|_| line.serve_next(10, 0).tenant.0).collect();
    assert_eq!(order, [2, 1, 2]);
}

#[test]
fn mlfq_joins_at_the_level_of_the_prompt_and_sinks_by_service() {
    let mut line = Line::new(Policy::Mlfq { levels: 3, quantum: 4, max_wait: 50, max_running: 2 });
    for (seq, n_prompt) in [(1, 100), (2, 8), (3, 4), (4, 5)] {
        line.come(seq, Hints::default(), n_prompt);
    }
    let long = line.waiters[&SeqId(1)];
    let short = line.waiters[&SeqId(3)];
    assert_eq!(line.admit_all(), [3, 2, 4, 1]);
    let mut serve = |waiter, n_since_rank| {
        let service = Service { n_computed: 1, n_sampled: 1, n_since_rank };
        line.queue.serve(waiter, service).map(|rank| rank.class)
    };
    assert_eq!(serve(&short, 3), None);
    assert_eq!(serve(&short, 4), Some(1));
    assert_eq!(serve(&long, 1000), None, "there is no lower level");
}

#[test]
fn mlfq_lets_nobody_starve() {
    let mut line = Line::new(Policy::Mlfq { levels: 3, quantum: 4, max_wait: 50, max_running: 2 });
    line.come(1, Hints::default(), 100);
    line.step = 49;
    line.come(2, Hints::default(), 1);
    assert_eq!(line.next(true), Some(2));
    line.step = 50;
    assert_eq!(line.next(true), Some(1));
    let waiter = line.waiters[&SeqId(1)];
    assert_eq!(line.queue.rank_to_run(&waiter, 50).class, 0);
}

#[test]
fn fair_forgets_tenants_who_came_once() {
    let mut fair = super::fair::Fair::default();
    let service = Service { n_computed: 10, n_sampled: 1, n_since_rank: 0 };
    for n in 1..20_000 {
        let rank = Rank { class: 0, arrival: Arrival::nth(n) };
        let (seq, tenant) = (SeqId(n), Tenant(n));
        let waiter = Waiter { seq, rank, tenant, is_started: false, since: 0 };
        fair.push(waiter);
        fair.remove(&waiter);
        fair.serve(&waiter, service);
        assert!(fair.n_tenants() <= 1025, "{} after {n}", fair.n_tenants());
    }
}
