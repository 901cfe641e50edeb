//! Sequences whose tokens the caller chooses: one rule at a time, on plans small enough to read.

use nuthatch_cache::{Cache, Options};
use nuthatch_scheduler::{Config, Hints, Output, Scheduler, Submission, SubmitError};
use nuthatch_types::{
    FinishReason, Limits, Sampled, Sampling, SeqId, StepPlan, StepResult, TokenId,
};

fn scheduler(page_len: u32, n_pages: u32, config: Config) -> Scheduler {
    let sizes = nuthatch_cache::Config { page_len, n_pages, n_host_pages: 0 };
    let cache = Cache::with_options(sizes, Options::default()).expect("valid sizes");
    Scheduler::new(config, cache).expect("valid limits")
}

fn guided(seq: u64, n_prompt: u32, max_tokens: u32) -> Submission {
    Submission {
        seq: SeqId(seq),
        prompt: (1..=n_prompt).map(|i| TokenId(1000 * seq as u32 + i)).collect(),
        sampling: Sampling { n_candidates: 2, ..Sampling::default() },
        limits: Limits { max_tokens, ..Limits::default() },
    }
}

fn ordinary(seq: u64, n_prompt: u32, max_tokens: u32) -> Submission {
    Submission { sampling: Sampling::greedy(), ..guided(seq, n_prompt, max_tokens) }
}

fn shape(plan: &StepPlan) -> Vec<(u64, u32, usize)> {
    plan.seqs.iter().map(|s| (s.seq.0, s.start, s.tokens.len())).collect()
}

/// Plans and commits one step; all samples are the same.
fn step(scheduler: &mut Scheduler) -> (StepPlan, Vec<Output>) {
    let plan = scheduler.plan().expect("there is work");
    let top = vec![(TokenId(7), -0.5), (TokenId(8), -1.5)];
    let sample = |seq: SeqId| Sampled { seq, token: TokenId(7), logprob: None, top: top.clone() };
    let asked = plan.seqs.sampled();
    let sampled = asked.map(|step| sample(step.seq)).collect();
    let outputs = scheduler.commit(StepResult { sampled, ..StepResult::default() });
    scheduler.verify().expect("sound after a commit");
    (plan, outputs)
}

fn paused(outputs: &[Output]) -> Vec<u64> {
    let is_paused = |output: &&Output| matches!(output, Output::Candidates { .. });
    outputs.iter().filter(is_paused).map(|output| output.seq().0).collect()
}

#[test]
fn a_fork_shares_full_pages_and_copies_one() {
    let mut scheduler = scheduler(4, 32, Config::default());
    scheduler.submit_wide(guided(1, 10, 20), Hints::default(), 3).expect("fits");
    let (_, outputs) = step(&mut scheduler);
    assert_eq!(paused(&outputs), [1]);
    // Nothing happens until the caller has chosen.
    assert_eq!(scheduler.plan(), None);
    assert!(!scheduler.is_idle());

    scheduler.fork(SeqId(1), SeqId(2), TokenId(8));
    scheduler.fork(SeqId(1), SeqId(3), TokenId(9));
    scheduler.proceed(SeqId(1), TokenId(7));
    scheduler.verify().expect("sound");
    let (plan, outputs) = step(&mut scheduler);
    assert_eq!(shape(&plan), [(1, 10, 1), (2, 10, 1), (3, 10, 1)]);
    let source = scheduler.cache().slots(SeqId(1), 2).next().expect("the third page");
    assert_eq!(plan.copies.iter().map(|copy| copy.source).collect::<Vec<_>>(), [source; 2]);
    assert_eq!(scheduler.stats().cache.pages_used, 2 + 3);
    assert_eq!(paused(&outputs), [1, 2, 3]);
    let start = &plan.started[0];
    assert_eq!((start.n_prompt, start.history.last()), (10, Some(&TokenId(8))));

    // A fork at the end of a page copies nothing.
    scheduler.discard(SeqId(1));
    scheduler.discard(SeqId(3));
    scheduler.proceed(SeqId(2), TokenId(5));
    step(&mut scheduler);
    scheduler.fork(SeqId(2), SeqId(4), TokenId(6));
    scheduler.proceed(SeqId(2), TokenId(5));
    let (plan, _) = step(&mut scheduler);
    assert_eq!(shape(&plan), [(2, 12, 1), (4, 12, 1)]);
    assert!(plan.copies.is_empty());
    assert_eq!(scheduler.stats().cache.pages_used, 3 + 2);
    for seq in [2, 4] {
        scheduler.discard(SeqId(seq));
    }
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.stats().cache.pages_used, 0);
    assert_eq!(scheduler.stats().counters.forks, 3);
}

#[test]
fn a_paused_sequence_gives_way_and_goes_on_later() {
    let mut scheduler = scheduler(4, 8, Config { max_seqs: 4, ..Config::default() });
    scheduler.submit(ordinary(1, 7, 20)).expect("fits");
    scheduler.submit_wide(guided(2, 7, 20), Hints::default(), 1).expect("fits");
    step(&mut scheduler);
    // The first needs the pages of the second, which is paused, and takes them.
    while scheduler.stats().parked == 0 {
        step(&mut scheduler);
    }
    let stats = scheduler.stats();
    assert_eq!((stats.running, stats.waiting, stats.counters.preemptions), (1, 0, 1));
    let (plan, _) = step(&mut scheduler);
    assert!(!plan.ended.contains(&SeqId(2)), "it was told before");
    scheduler.proceed(SeqId(2), TokenId(5));
    let plan = loop {
        let (plan, outputs) = step(&mut scheduler);
        if paused(&outputs) == [2] {
            break plan;
        }
    };
    // The executor has forgotten it and is told everything again.
    assert_eq!(plan.started.len(), 1);
    assert_eq!((plan.started[0].seq, plan.started[0].n_prompt), (SeqId(2), 7));
    assert_eq!(plan.started[0].history.len(), 8);
}

#[test]
fn sequences_of_two_requests_do_not_wait_for_each_other() {
    // Each request has two sequences of two pages with one page in common: three pages. There are
    // five, and seats for three.
    let config = Config { max_seqs: 3, max_batched_tokens: 16, ..Config::default() };
    let mut scheduler = scheduler(4, 5, config);
    for seq in [1, 11] {
        scheduler.submit_wide(guided(seq, 5, 3), Hints::default(), 2).expect("fits");
    }
    let (_, outputs) = step(&mut scheduler);
    assert_eq!(paused(&outputs), [1, 11]);
    for seq in [1, 11] {
        scheduler.fork(SeqId(seq), SeqId(seq + 1), TokenId(8));
    }
    // The first request needs both seats; the second gives way.
    let (_, outputs) = step(&mut scheduler);
    assert_eq!(paused(&outputs), [2]);
    scheduler.proceed(SeqId(1), TokenId(7));
    scheduler.proceed(SeqId(2), TokenId(7));
    let mut told = Vec::new();
    while told.len() < 2 {
        let (_, outputs) = step(&mut scheduler);
        told.extend(paused(&outputs));
    }
    assert_eq!(told, [1, 2]);
    for seq in told {
        scheduler.discard(SeqId(seq));
    }
    let (_, outputs) = step(&mut scheduler);
    assert_eq!(paused(&outputs), [12]);
    scheduler.cancel(SeqId(11));
    scheduler.cancel(SeqId(12));
    assert!(scheduler.is_idle());
}

#[test]
fn later_requests_give_way_at_once_and_not_only_when_nothing_runs() {
    let mut scheduler = scheduler(4, 32, Config { max_seqs: 3, ..Config::default() });
    scheduler.submit(ordinary(1, 4, 100)).expect("fits");
    scheduler.submit_wide(guided(2, 4, 9), Hints::default(), 2).expect("fits");
    scheduler.submit_wide(guided(11, 4, 9), Hints::default(), 2).expect("fits");
    let (_, outputs) = step(&mut scheduler);
    assert_eq!(paused(&outputs), [2, 11]);
    // All seats are taken, and the first request would keep its own for a hundred steps.
    scheduler.fork(SeqId(2), SeqId(3), TokenId(8));
    let (plan, outputs) = step(&mut scheduler);
    assert_eq!(shape(&plan), [(1, 4, 1), (3, 4, 1)]);
    assert_eq!((plan.ended, paused(&outputs)), (vec![SeqId(11)], vec![3]));
    assert_eq!(scheduler.stats().parked, 1);
    // The sequences of one request do not give way to each other while something runs.
    scheduler.fork(SeqId(2), SeqId(4), TokenId(9));
    let (plan, _) = step(&mut scheduler);
    assert_eq!(shape(&plan), [(1, 5, 1)]);
    assert_eq!((scheduler.stats().parked, scheduler.stats().waiting), (1, 1));
}

#[test]
fn a_fork_comes_before_requests_that_came_after_its_own() {
    let mut scheduler = scheduler(4, 32, Config { max_seqs: 2, ..Config::default() });
    scheduler.submit(ordinary(1, 4, 3)).expect("fits");
    scheduler.submit_wide(guided(2, 4, 9), Hints::default(), 2).expect("fits");
    scheduler.submit(ordinary(11, 4, 9)).expect("fits");
    let (_, outputs) = step(&mut scheduler);
    assert_eq!(paused(&outputs), [2]);
    scheduler.fork(SeqId(2), SeqId(3), TokenId(8));
    let mut seen = Vec::new();
    while !seen.contains(&3) && !seen.contains(&11) {
        let (plan, _) = step(&mut scheduler);
        seen.extend(plan.seqs.iter().map(|step| step.seq.0));
    }
    assert!(seen.contains(&3), "{seen:?}");
}

#[test]
fn what_can_never_run_together_is_refused_with_the_numbers() {
    let mut scheduler = scheduler(4, 8, Config { max_seqs: 4, ..Config::default() });
    let mut submit = |n_prompt, max_tokens, width| {
        scheduler.submit_wide(guided(1, n_prompt, max_tokens), Hints::default(), width)
    };
    assert_eq!(submit(4, 4, 5), Err(SubmitError::TooWide { width: 5, max_seqs: 4 }));
    // One page of the prompt is shared; each answer may need two more.
    let refused = submit(6, 8, 4).expect_err("nine pages");
    let expected = SubmitError::ExceedsCacheWide {
        prompt: 6,
        width: 4,
        max_len: 14,
        needed: 1 + 4 * 3,
        n_pages: 8,
        page_len: 4,
    };
    assert_eq!(refused, expected);
    assert_eq!(
        refused.to_string(),
        "4 answers to a prompt of 6 tokens, up to 14 tokens long with it, need 13 pages of 4 \
         tokens, but the cache has 8"
    );
    assert_eq!(submit(6, 3, 4), Ok(3));
    assert_eq!(scheduler.stats().counters.refused, 2);
}

#[test]
fn a_choice_that_fails_ends_its_sequence_and_leaves_no_page_behind() {
    let mut scheduler = scheduler(4, 8, Config::default());
    scheduler.submit(ordinary(1, 8, 9)).expect("fits");
    scheduler.submit(ordinary(2, 4, 9)).expect("fits");
    let plan = scheduler.plan().expect("there is work");
    assert_eq!(plan.seqs.len(), 2);
    let sampled = vec![Sampled { seq: SeqId(2), token: TokenId(7), logprob: None, top: vec![] }];
    let outputs =
        scheduler.commit(StepResult { sampled, failed: vec![SeqId(1)], ..StepResult::default() });
    scheduler.verify().expect("sound");
    let Output::Finished { seq: SeqId(1), reason: FinishReason::Failed, .. } = outputs[0] else {
        panic!("{outputs:?}");
    };
    assert_eq!(outputs[1].seq(), SeqId(2));
    assert_eq!(scheduler.stats().counters.failed, 1);
    // What a broken step wrote must not be found again.
    scheduler.submit(Submission { seq: SeqId(3), ..ordinary(1, 8, 9) }).expect("fits");
    let (plan, _) = step(&mut scheduler);
    assert_eq!(shape(&plan), [(2, 4, 1), (3, 0, 8)]);
}
