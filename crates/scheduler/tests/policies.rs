//! What each policy is for, measured: the same requests, the same executor, another policy.
//!
//! Time is counted in steps.

use std::collections::BTreeMap;

use nuthatch_cache::{Cache, Options};
use nuthatch_scheduler::{Config, Hints, Output, Policy, Scheduler, Stats, Submission, Tenant};
use nuthatch_testkit::{FakeExecutor, Rng};
use nuthatch_types::{Limits, Sampling, SeqId, TokenId};

const N_VOCAB: u32 = 50;

/// A request and the step in which it comes.
struct Arrival {
    step: u64,
    prompt: Vec<TokenId>,
    max_tokens: u32,
    hints: Hints,
}

impl Arrival {
    fn new(step: u64, prompt: Vec<TokenId>, max_tokens: u32) -> Self {
        Arrival { step, prompt, max_tokens, hints: Hints::default() }
    }
}

/// Steps from a request's arrival to its first and to its last token, by request.
struct Times {
    first: Vec<f64>,
    last: Vec<f64>,
    stats: Stats,
}

fn run(policy: Policy, config: Config, n_pages: u32, arrivals: &[Arrival]) -> Times {
    let sizes = nuthatch_cache::Config { page_len: 4, n_pages, n_host_pages: 0 };
    let cache = Cache::with_options(sizes, Options::default()).expect("valid sizes");
    let mut scheduler = Scheduler::with_policy(config, cache, policy).expect("valid limits");
    let mut executor = FakeExecutor::new(4, n_pages, N_VOCAB);
    let mut firsts: BTreeMap<SeqId, u64> = BTreeMap::new();
    let mut lasts: BTreeMap<SeqId, u64> = BTreeMap::new();
    let mut step = 0;
    while lasts.len() < arrivals.len() {
        for (i, arrival) in arrivals.iter().enumerate().filter(|(_, a)| a.step == step) {
            let submission = Submission {
                seq: SeqId(i as u64),
                prompt: arrival.prompt.clone(),
                sampling: Sampling::default(),
                limits: Limits { max_tokens: arrival.max_tokens, ..Limits::default() },
            };
            scheduler.submit_with(submission, arrival.hints).expect("fits");
        }
        step += 1;
        assert!(step < 100_000, "no end in sight");
        let Some(plan) = scheduler.plan() else { continue };
        let result = executor.run(&plan);
        for output in scheduler.commit(result) {
            firsts.entry(output.seq()).or_insert(step);
            if let Output::Finished { seq, .. } = output {
                lasts.insert(seq, step);
            }
        }
    }
    scheduler.verify().expect("sound at the end");
    let since = |times: BTreeMap<SeqId, u64>| {
        times.iter().map(|(seq, step)| (step - arrivals[seq.0 as usize].step) as f64).collect()
    };
    Times { first: since(firsts), last: since(lasts), stats: scheduler.stats() }
}

fn mean(times: impl Iterator<Item = f64>) -> f64 {
    let times: Vec<f64> = times.collect();
    times.iter().sum::<f64>() / times.len() as f64
}

fn tokens(rng: &mut Rng, n: u32) -> Vec<TokenId> {
    (0..n).map(|_| TokenId(rng.range(0..N_VOCAB))).collect()
}

fn config() -> Config {
    Config { max_batched_tokens: 64, max_seqs: 8, ..Config::default() }
}

#[test]
fn fair_shields_a_small_tenant_from_a_large_one() {
    let mut rng = Rng::new(1);
    let mut arrivals: Vec<Arrival> =
        (0..80).map(|_| Arrival::new(0, tokens(&mut rng, 20), 20)).collect();
    for i in 0..8 {
        let mut small = Arrival::new(5 + 20 * i, tokens(&mut rng, 20), 20);
        small.hints.tenant = Tenant(1);
        arrivals.push(small);
    }
    let small = |times: &Times| mean(times.first[80..].iter().copied());
    let fcfs = run(Policy::Fcfs, config(), 200, &arrivals);
    let fair = run(Policy::Fair, config(), 200, &arrivals);
    assert!(small(&fair) * 3.0 < small(&fcfs), "{} and {}", small(&fair), small(&fcfs));
    // Nothing is lost for it: the last answer is no later.
    let end = |times: &Times| times.stats.counters.steps;
    assert!(end(&fair) <= end(&fcfs) + 20, "{} and {}", end(&fair), end(&fcfs));
}

#[test]
fn fair_puts_a_tenant_off_no_longer_than_until_the_others_were_served_alike() {
    let mut rng = Rng::new(5);
    // The first tenant has more waiting than is ever served, the second comes back again and again.
    let mut arrivals: Vec<Arrival> =
        (0..400).map(|i| Arrival::new(i / 4, tokens(&mut rng, 20), 20)).collect();
    for i in 0..10 {
        let mut small = Arrival::new(40 + 37 * i, tokens(&mut rng, 20), 20);
        small.hints.tenant = Tenant(1);
        arrivals.push(small);
    }
    let times = run(Policy::Fair, config(), 200, &arrivals);
    let begins = |i: usize| arrivals[i].step as f64 + times.first[i];
    for (i, small) in arrivals.iter().enumerate().skip(400) {
        // Nobody is charged before the step in which it is served, so whoever has the lowest counter
        // may take all seats at once; the next turn is the other's.
        let since = small.step as f64 + 1.0;
        let n_before = (0..400).filter(|&j| begins(j) > since && begins(j) < begins(i)).count();
        assert!(n_before <= config().max_seqs as usize, "{i}: behind {n_before}");
    }
}

#[test]
fn priority_answers_the_urgent_first() {
    let mut rng = Rng::new(2);
    let mut arrivals: Vec<Arrival> =
        (0..60).map(|_| Arrival::new(0, tokens(&mut rng, 20), 40)).collect();
    for i in 0..6 {
        let mut urgent = Arrival::new(10 + 10 * i, tokens(&mut rng, 20), 10);
        urgent.hints.priority = 3;
        arrivals.push(urgent);
    }
    let urgent = |times: &Times| mean(times.first[60..].iter().copied());
    let policy = Policy::Priority { boost: 1000 };
    let fcfs = run(Policy::Fcfs, config(), 200, &arrivals);
    let priority = run(policy, config(), 200, &arrivals);
    assert!(urgent(&priority) * 5.0 < urgent(&fcfs), "{}", urgent(&priority));
}

#[test]
fn prefix_runs_requests_that_begin_alike_together() {
    let mut rng = Rng::new(3);
    let openings: Vec<_> = (0..4).map(|_| tokens(&mut rng, 60)).collect();
    let mut arrivals = Vec::new();
    for i in 0..48 {
        let mut prompt = openings[i % 4].clone();
        prompt.extend(tokens(&mut rng, 5));
        arrivals.push(Arrival::new(0, prompt, 4));
    }
    // One opening and a few answers fit, not four openings.
    let config = Config { max_seqs: 2, ..config() };
    let computed = |policy| run(policy, config, 40, &arrivals).stats.counters.computed_tokens;
    let fcfs = computed(Policy::Fcfs);
    let prefix = computed(Policy::Prefix { ageing: 1, window: 64 });
    assert!(prefix * 2 < fcfs, "{prefix} and {fcfs}");
}

#[test]
fn mlfq_lets_short_answers_pass_long_ones() {
    let mut rng = Rng::new(4);
    let mut arrivals: Vec<Arrival> =
        (0..6).map(|_| Arrival::new(0, tokens(&mut rng, 20), 300)).collect();
    for i in 0..20 {
        arrivals.push(Arrival::new(30 + 5 * i, tokens(&mut rng, 10), 10));
    }
    let config = Config { max_seqs: 16, ..config() };
    let few_seats = |levels| Policy::Mlfq { levels, quantum: 32, max_wait: 1000, max_running: 4 };
    let short = |times: &Times| mean(times.last[6..].iter().copied());
    // One level is first come, first served with as many seats.
    let flat = run(few_seats(1), config, 1000, &arrivals);
    let mlfq = run(few_seats(4), config, 1000, &arrivals);
    assert!(short(&mlfq) * 4.0 < short(&flat), "{} and {}", short(&mlfq), short(&flat));
    assert!(mlfq.stats.counters.displacements > 0);
    let all = |times: &Times| mean(times.last.iter().copied());
    assert!(all(&mlfq) < all(&flat), "{} and {}", all(&mlfq), all(&flat));
}
