//! The scheduler's rules, one at a time, on plans small enough to read.

use nuthatch_cache::{Cache, Options, Outcome};
use nuthatch_scheduler::{
    Config, ConfigError, Hints, Output, Policy, Scheduler, Source, StoredPages, Submission,
    SubmitError, Usage,
};
use nuthatch_types::{
    FinishReason, HostReads, Limits, PageCopy, PageShift, Sampled, Sampling, SeqId, Slot, StepPlan,
    StepResult, Streaming, TableChange, TokenId,
};

const EOS: TokenId = TokenId(0);

fn scheduler(page_len: u32, n_pages: u32, config: Config) -> Scheduler {
    let sizes = nuthatch_cache::Config { page_len, n_pages, n_host_pages: 0 };
    let cache = Cache::with_options(sizes, Options::default()).expect("valid sizes");
    Scheduler::new(config, cache).expect("valid limits")
}

fn request(seq: u64, n_prompt: u32, max_tokens: u32) -> Submission {
    Submission {
        seq: SeqId(seq),
        // No two requests begin alike, unless a test says so.
        prompt: (1..=n_prompt).map(|i| TokenId(1000 * seq as u32 + i)).collect(),
        sampling: Sampling::greedy(),
        limits: Limits { max_tokens, stop_tokens: vec![EOS], min_tokens: 0 },
    }
}

/// The sequences of a plan: id, start, number of tokens, whether sampled.
fn shape(plan: &StepPlan) -> Vec<(u64, u32, usize, bool)> {
    plan.seqs.iter().map(|s| (s.seq.0, s.start, s.tokens.len(), s.sample)).collect()
}

/// Gives `token` to every sequence that asked for one.
fn answer(scheduler: &mut Scheduler, plan: &StepPlan, token: TokenId) -> Vec<Output> {
    let asked = plan.seqs.sampled();
    let sample = |seq| Sampled { seq, token, logprob: None, top: vec![] };
    let sampled = asked.map(|step| sample(step.seq)).collect();
    let outputs = scheduler.commit(StepResult { sampled, ..StepResult::default() });
    scheduler.verify().expect("sound after a commit");
    outputs
}

fn step(scheduler: &mut Scheduler, token: TokenId) -> (StepPlan, Vec<Output>) {
    let plan = scheduler.plan().expect("there is work");
    let outputs = answer(scheduler, &plan, token);
    (plan, outputs)
}

#[test]
fn decoding_comes_first_and_prompts_fill_the_budget_in_chunks() {
    let config = Config { max_batched_tokens: 8, max_seqs: 4, ..Config::default() };
    let mut scheduler = scheduler(4, 32, config);
    scheduler.submit(request(1, 3, 10)).expect("fits");
    scheduler.submit(request(2, 12, 10)).expect("fits");
    let (plan, _) = step(&mut scheduler, TokenId(7));
    assert_eq!(shape(&plan), [(1, 0, 3, true), (2, 0, 5, false)]);
    let (plan, outputs) = step(&mut scheduler, TokenId(7));
    assert_eq!(shape(&plan), [(1, 3, 1, true), (2, 5, 7, true)]);
    assert_eq!(outputs.len(), 2);
    let (plan, _) = step(&mut scheduler, TokenId(7));
    assert_eq!(shape(&plan), [(1, 4, 1, true), (2, 12, 1, true)]);
}

#[test]
fn a_decode_step_names_only_what_changes() {
    let mut scheduler = scheduler(4, 8, Config::default());
    scheduler.submit(request(1, 7, 10)).expect("fits");
    let (plan, _) = step(&mut scheduler, TokenId(9));
    assert_eq!(plan.started[0].history.len(), 7);
    assert_eq!(plan.seqs.get(0).table, TableChange { keep: 0, push: &[Slot(0), Slot(1)] });
    let (plan, _) = step(&mut scheduler, TokenId(9));
    assert!(plan.started.is_empty());
    assert_eq!(plan.seqs.get(0).table, TableChange { keep: 2, push: &[] });
    let (plan, _) = step(&mut scheduler, TokenId(9));
    assert_eq!(plan.seqs.get(0).table, TableChange { keep: 2, push: &[Slot(2)] });
}

#[test]
fn the_youngest_gives_way_and_is_computed_again() {
    let mut scheduler = scheduler(4, 4, Config::default());
    scheduler.submit(request(1, 7, 9)).expect("fits");
    scheduler.submit(request(2, 7, 9)).expect("fits");
    step(&mut scheduler, TokenId(5));
    step(&mut scheduler, TokenId(5));
    // Both now need a third page, and there are four.
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(1, 8, 1, true)]);
    assert_eq!(scheduler.stats().counters.preemptions, 1);
    assert_eq!(scheduler.stats().waiting, 1);
    let mut plan = plan;
    while plan.seqs.get(0).seq == SeqId(1) {
        plan = step(&mut scheduler, TokenId(5)).0;
    }
    // The first took every page, so prompt and both sampled tokens are computed again, into a new
    // table; the sampler is still there.
    assert_eq!(shape(&plan), [(2, 0, 9, true)]);
    assert_eq!(plan.seqs.get(0).table.keep, 0);
    assert_eq!((plan.ended, plan.started), (vec![SeqId(1)], vec![]));
    assert_eq!(scheduler.stats().counters.recomputed_tokens, 8);
}

#[test]
fn a_request_that_can_never_fit_is_refused_with_the_numbers() {
    let mut scheduler =
        scheduler(4, 4, Config { max_context: 20, max_waiting: 1, ..Config::default() });
    let refused = [
        (request(1, 0, 1), SubmitError::EmptyPrompt),
        (request(1, 3, 0), SubmitError::NoAnswer),
        (request(1, 20, 1), SubmitError::ExceedsContext { prompt: 20, max_context: 20 }),
        (
            request(1, 16, 1),
            SubmitError::ExceedsCache { prompt: 16, needed: 5, n_pages: 4, page_len: 4 },
        ),
    ];
    for (request, error) in refused {
        assert_eq!(scheduler.submit(request), Err(error));
    }
    let mut bad = request(1, 3, 3);
    bad.sampling.top_p = f32::NAN;
    assert!(matches!(scheduler.submit(bad), Err(SubmitError::Sampling(_))));
    scheduler.submit(request(1, 15, 1)).expect("fits exactly");
    assert_eq!(
        scheduler.submit(request(1, 3, 3)),
        Err(SubmitError::DuplicateSeq { seq: SeqId(1) })
    );
    assert_eq!(scheduler.submit(request(2, 3, 3)), Err(SubmitError::QueueFull { waiting: 1 }));
    assert_eq!(scheduler.stats().counters.refused, 7);
}

#[test]
fn an_answer_is_clipped_to_the_context() {
    let mut scheduler = scheduler(4, 100, Config { max_context: 6, ..Config::default() });
    scheduler.submit(request(1, 4, u32::MAX)).expect("fits");
    let (_, outputs) = step(&mut scheduler, TokenId(3));
    assert_eq!(outputs.len(), 1);
    let (_, outputs) = step(&mut scheduler, TokenId(3));
    let usage = Usage { prompt_tokens: 4, cached_tokens: 0, completion_tokens: 2 };
    let last = Output::Finished { seq: SeqId(1), reason: FinishReason::Length, usage };
    assert_eq!(outputs.last(), Some(&last));
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.plan(), None);
}

#[test]
fn a_stop_token_ends_the_answer_once_it_is_long_enough() {
    let mut scheduler = scheduler(4, 8, Config::default());
    let mut submission = request(1, 4, 9);
    submission.limits.min_tokens = 1;
    scheduler.submit(submission).expect("fits");
    let (_, outputs) = step(&mut scheduler, EOS);
    assert!(matches!(outputs[..], [Output::Token(Sampled { token: EOS, .. })]));
    let (_, outputs) = step(&mut scheduler, EOS);
    let usage = Usage { prompt_tokens: 4, cached_tokens: 0, completion_tokens: 1 };
    assert_eq!(outputs, [Output::Finished { seq: SeqId(1), reason: FinishReason::Stop, usage }]);
}

#[test]
fn cancelling_frees_everything_at_once_even_during_a_step() {
    let mut scheduler = scheduler(4, 8, Config::default());
    scheduler.submit(request(1, 8, 9)).expect("fits");
    scheduler.submit(request(2, 4, 9)).expect("fits");
    let plan = scheduler.plan().expect("there is work");
    scheduler.submit(request(3, 4, 9)).expect("fits");
    assert!(scheduler.cancel(SeqId(1)).is_some());
    assert!(scheduler.cancel(SeqId(3)).is_some());
    assert_eq!(scheduler.cancel(SeqId(9)), None);
    assert_eq!(scheduler.stats().cache.pages_used, 1);
    let outputs = answer(&mut scheduler, &plan, TokenId(5));
    assert_eq!(outputs.len(), 1);
    // The third never started, so there is nothing to forget.
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!((shape(&plan), plan.ended), (vec![(2, 4, 1, true)], vec![SeqId(1)]));
}

#[test]
fn a_device_fault_ends_everything_and_leaks_nothing() {
    let mut scheduler = scheduler(4, 8, Config { max_seqs: 1, ..Config::default() });
    scheduler.submit(request(1, 4, 9)).expect("fits");
    scheduler.submit(request(2, 4, 9)).expect("fits");
    scheduler.plan().expect("there is work");
    let outputs = scheduler.fail_all();
    let failed =
        |output: &Output| matches!(output, Output::Finished { reason: FinishReason::Failed, .. });
    assert!(outputs.len() == 2 && outputs.iter().all(failed));
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.stats().cache.pages_used, 0);
    scheduler.submit(request(3, 4, 9)).expect("fits");
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(plan.ended, [SeqId(1)]);
}

#[test]
fn limits_under_which_nothing_runs_are_refused() {
    let check = |config: Config, error: ConfigError| assert_eq!(config.validate(), Err(error));
    let default = Config::default();
    check(Config { max_seqs: 0, ..default }, ConfigError::Zero { field: "max_seqs" });
    check(Config { max_context: 1, ..default }, ConfigError::NoContext { max_context: 1 });
    check(
        Config { max_seqs: 9, max_batched_tokens: 8, ..default },
        ConfigError::BudgetTooSmall { max_batched_tokens: 8, max_seqs: 9 },
    );
    assert_eq!(default.validate(), Ok(()));
}

#[test]
fn a_spared_sequence_gives_way_when_nothing_else_could_run() {
    // The third is preempted, comes back when the second ends, and is halfway through its prompt
    // when the first has taken the last page: neither could go on.
    let config = Config { max_batched_tokens: 3, max_seqs: 3, ..Config::default() };
    let mut scheduler = scheduler(1, 12, config);
    for (seq, n_prompt, max_tokens) in [(1, 2, 100), (2, 2, 4), (3, 5, 2)] {
        scheduler.submit(request(seq, n_prompt, max_tokens)).expect("fits");
    }
    while !scheduler.is_idle() {
        step(&mut scheduler, TokenId(5));
    }
    let counters = scheduler.stats().counters;
    assert_eq!((counters.preemptions, counters.forced_preemptions), (2, 1));
    assert_eq!(counters.finished, 3);
}

#[test]
fn a_second_request_computes_only_what_the_first_did_not() {
    let mut scheduler = scheduler(4, 16, Config::default());
    scheduler.submit(request(1, 10, 1)).expect("fits");
    step(&mut scheduler, TokenId(5));
    // Two full pages are shared. The third was not full when the first ended.
    let same = Submission { seq: SeqId(2), ..request(1, 10, 1) };
    scheduler.submit(same.clone()).expect("fits");
    let (plan, outputs) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(2, 8, 2, true)]);
    assert!(plan.copies.is_empty());
    let usage = Usage { prompt_tokens: 10, cached_tokens: 8, completion_tokens: 1 };
    let last = Output::Finished { seq: SeqId(2), reason: FinishReason::Length, usage };
    assert_eq!(outputs.last(), Some(&last));
    // A prompt that ends inside a cached page copies that page.
    let mut shorter = Submission { seq: SeqId(3), ..same };
    shorter.prompt.truncate(7);
    scheduler.submit(shorter).expect("fits");
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(3, 6, 1, true)]);
    assert_eq!(plan.copies.len(), 1);
    assert_eq!(plan.copies[0].target, plan.seqs.get(0).table.push[1]);
}

#[test]
fn equal_prompts_computed_at_the_same_time_end_up_in_the_same_pages() {
    let mut scheduler = scheduler(4, 16, Config::default());
    scheduler.submit(request(1, 10, 9)).expect("fits");
    scheduler.submit(Submission { seq: SeqId(2), ..request(1, 10, 9) }).expect("fits");
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(1, 0, 10, true), (2, 0, 10, true)]);
    assert_eq!(scheduler.stats().cache.counters.pages_merged, 2);
    let (first, second) = (plan.seqs.get(0).table.push, plan.seqs.get(1).table.push);
    // The executor is told where the second one's tokens are now.
    let (next, _) = step(&mut scheduler, TokenId(5));
    let table = TableChange { keep: 0, push: &[first[0], first[1], second[2]] };
    assert_eq!(next.seqs.get(1).table, table);
}

#[test]
fn forks_wait_for_the_prompt_and_share_it_all() {
    let config = Config { max_batched_tokens: 6, max_seqs: 6, ..Config::default() };
    let mut scheduler = scheduler(4, 16, config);
    scheduler.submit(request(1, 11, 9)).expect("fits");
    for seq in [2, 3] {
        let fork = Submission { seq: SeqId(seq), ..request(1, 11, 9) };
        let hints = Hints { fork_of: Some(SeqId(1)), ..Hints::default() };
        scheduler.submit_with(fork, hints).expect("fits");
    }
    scheduler.submit(request(4, 1, 9)).expect("fits");
    // The source's prompt does not fit into one step. A stranger does not wait behind the forks.
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(1, 0, 6, false)]);
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(1, 6, 5, true), (4, 0, 1, true)]);
    // Each fork shares two pages, copies one and computes the last token of the prompt.
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(
        shape(&plan),
        [(1, 11, 1, true), (4, 1, 1, true), (2, 10, 1, true), (3, 10, 1, true)]
    );
    let source = scheduler.cache().slots(SeqId(1), 2).next().expect("the third page");
    assert_eq!(plan.copies.iter().map(|copy| copy.source).collect::<Vec<_>>(), [source; 2]);
    assert_eq!(scheduler.stats().cache.pages_used, 2 + 3 + 1);
}

/// Two sequences that need one page more than there are, and room for one of them on the host.
fn tight(n_host_pages: u32) -> Scheduler {
    let sizes = nuthatch_cache::Config { page_len: 4, n_pages: 4, n_host_pages };
    let options = Options { host_reads: HostReads::Never, ..Options::default() };
    let cache = Cache::with_options(sizes, options).expect("valid sizes");
    let mut scheduler = Scheduler::new(Config::default(), cache).expect("valid limits");
    scheduler.submit(request(1, 7, 5)).expect("fits");
    scheduler.submit(request(2, 7, 5)).expect("fits");
    step(&mut scheduler, TokenId(5));
    step(&mut scheduler, TokenId(5));
    scheduler
}

#[test]
fn who_gives_way_takes_its_pages_to_the_host_and_computes_nothing_again() {
    let mut scheduler = tight(2);
    let pages: Vec<Slot> = scheduler.cache().slots(SeqId(2), 0).collect();
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(1, 8, 1, true)]);
    // The last page first. The first sequence's third page is where one of the second's was.
    let copy = |source, target| PageCopy { source, target: Slot(target) };
    assert_eq!(plan.copies, [copy(pages[1], 4), copy(pages[0], 5)]);
    assert!(pages.contains(&plan.seqs.get(0).table.push[0]));
    let stats = scheduler.stats();
    assert_eq!((stats.swapped, stats.cache.host_used), (1, 2));
    assert_eq!((stats.counters.preemptions_swap, stats.counters.preemptions_short), (1, 1));
    let mut plan = plan;
    while plan.seqs.get(0).seq == SeqId(1) {
        plan = step(&mut scheduler, TokenId(5)).0;
    }
    assert_eq!(shape(&plan), [(2, 8, 1, true)]);
    assert_eq!(plan.copies.iter().filter(|copy| copy.source.0 >= 4).count(), 2);
    assert_eq!(plan.seqs.get(0).table.push.len(), 3);
    let stats = scheduler.stats();
    assert_eq!((stats.swapped, stats.counters.recomputed_tokens), (0, 0));
    assert_eq!(stats.cache.counters.pages_swapped_in, 2);
}

#[test]
fn a_swapped_sequence_is_cancelled_and_its_pages_are_gone_at_once() {
    let mut scheduler = tight(2);
    let plan = scheduler.plan().expect("there is work");
    assert!(scheduler.cancel(SeqId(2)).is_some());
    assert_eq!(scheduler.stats().cache.host_used, 0);
    answer(&mut scheduler, &plan, TokenId(5));
    assert_eq!(scheduler.stats().waiting, 0);
}

#[test]
fn a_swapped_sequence_keeps_nobody_from_running() {
    let sizes = nuthatch_cache::Config { page_len: 4, n_pages: 6, n_host_pages: 6 };
    let options = Options { host_reads: HostReads::Never, ..Options::default() };
    let cache = Cache::with_options(sizes, options).expect("valid sizes");
    let policy = Policy::Priority { boost: 1000 };
    let mut scheduler =
        Scheduler::with_policy(Config::default(), cache, policy).expect("valid limits");
    let urgent = |priority| Hints { priority, ..Hints::default() };
    scheduler.submit_with(request(1, 8, 99), urgent(1)).expect("fits");
    let mut second = Submission { seq: SeqId(2), ..request(1, 8, 9) };
    second.prompt.push(TokenId(77));
    scheduler.submit_with(second, urgent(0)).expect("fits");
    while scheduler.stats().swapped == 0 {
        step(&mut scheduler, TokenId(5));
    }
    // The second holds the two pages that it shared with the first, on the device.
    assert!(scheduler.cancel(SeqId(1)).is_some());
    assert_eq!(scheduler.stats().cache.pages_used, 2);
    scheduler.submit_with(request(3, 22, 1), urgent(2)).expect("fits");
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(3, 0, 22, true)]);
    let stats = scheduler.stats();
    assert_eq!((stats.counters.swaps_dropped, stats.swapped, stats.waiting), (1, 0, 1));
    while !scheduler.is_idle() {
        step(&mut scheduler, TokenId(5));
    }
    let counters = scheduler.stats().counters;
    assert_eq!(counters.recomputed_dropped, counters.recomputed_tokens);
}

#[test]
fn pages_are_computed_again_when_the_host_has_no_room_or_copies_are_dear() {
    let mut scheduler = tight(1);
    step(&mut scheduler, TokenId(5));
    let counters = scheduler.stats().counters;
    assert_eq!((counters.preemptions_swap, counters.preemptions_recompute), (0, 1));
    // The same with room, once a page was seen to take longer than a hundred prompts.
    let mut scheduler = tight(2);
    let page_nanos = 100.0 * scheduler.rates().compute(0..8);
    while scheduler.stats().counters.preemptions < 2 {
        if scheduler.is_idle() {
            scheduler.submit(request(1, 7, 5)).expect("fits");
            scheduler.submit(request(2, 7, 5)).expect("fits");
        }
        let plan = scheduler.plan().expect("there is work");
        let sampled = plan.seqs.sampled().map(|step| Sampled {
            seq: step.seq,
            token: TokenId(5),
            logprob: None,
            top: vec![],
        });
        let copy_nanos = page_nanos as u64 * plan.copies.len() as u64;
        let result = StepResult { sampled: sampled.collect(), copy_nanos, ..StepResult::default() };
        scheduler.commit(result);
    }
    assert_eq!(scheduler.rates().page_nanos, (page_nanos as u64) as f64);
    let counters = scheduler.stats().counters;
    assert_eq!((counters.preemptions_swap, counters.preemptions_recompute), (1, 1));
}

#[test]
fn an_idle_page_goes_to_the_host_and_comes_back_for_who_asks() {
    let sizes = nuthatch_cache::Config { page_len: 4, n_pages: 4, n_host_pages: 4 };
    let cache = Cache::with_options(sizes, Options::default()).expect("valid sizes");
    let mut scheduler = Scheduler::new(Config::default(), cache).expect("valid limits");
    for seq in [1, 2] {
        scheduler.submit(request(seq, 13, 1)).expect("fits");
        step(&mut scheduler, TokenId(5));
    }
    // The second needed all four pages, so the first one's three are on the host.
    assert_eq!(scheduler.stats().cache.counters.pages_demoted, 3);
    scheduler.submit(Submission { seq: SeqId(3), ..request(1, 13, 1) }).expect("fits");
    let (plan, outputs) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(3, 12, 1, true)]);
    let counters = scheduler.stats().cache.counters;
    assert_eq!((counters.pages_promoted, counters.pages_demoted), (3, 6));
    assert!(matches!(
        outputs.last(),
        Some(Output::Finished { usage: Usage { cached_tokens: 12, .. }, .. })
    ));
}

#[test]
fn a_sequence_waits_for_its_load_and_computes_what_does_not_come() {
    let mut scheduler = scheduler(4, 8, Config::default());
    let hints = Hints { n_stored: 11, ..Hints::default() };
    scheduler.submit_with(request(1, 12, 5), hints).expect("fits");
    assert_eq!(scheduler.plan(), None);
    let loads = scheduler.take_loads();
    let [load] = &loads[..] else { panic!("one load, not {loads:?}") };
    assert_eq!((load.seq, load.start, load.slots.len()), (SeqId(1), 0, 2));
    // Others run meanwhile.
    scheduler.submit(request(2, 3, 5)).expect("fits");
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(2, 0, 3, true)]);
    scheduler.complete_load(load.id, Outcome::Ended { n_pages: 1 });
    scheduler.verify().expect("sound after a load");
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(2, 3, 1, true), (1, 4, 8, true)]);
    assert_eq!(plan.seqs.get(1).table.push[0], load.slots[0]);
}

#[test]
fn nobody_gets_the_slots_of_a_load_before_it_has_ended() {
    let mut scheduler = scheduler(4, 4, Config::default());
    let hints = Hints { n_stored: 12, ..Hints::default() };
    scheduler.submit_with(request(1, 15, 1), hints).expect("fits");
    assert_eq!(scheduler.plan(), None);
    let load = scheduler.take_loads().remove(0);
    assert!(scheduler.cancel(SeqId(1)).is_some());
    scheduler.verify().expect("sound after a cancellation");
    assert_eq!(scheduler.stats().cache.pages_free, 1);
    scheduler.submit(request(2, 8, 1)).expect("fits");
    assert_eq!(scheduler.plan(), None);
    scheduler.complete_load(load.id, Outcome::Ended { n_pages: 3 });
    assert_eq!(scheduler.stats().cache.pages_free, 4);
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(2, 0, 8, true)]);
}

#[test]
fn what_takes_longer_to_load_than_to_compute_is_computed() {
    let mut scheduler = scheduler(4, 8, Config::default());
    scheduler.expect_loads();
    let hints = Hints { n_stored: 8, ..Hints::default() };
    // Two pages take longer than eight tokens at the rate that is guessed.
    scheduler.loaded(Source::Disk, 1, 1_000_000);
    let two = StoredPages { n_disk: 2, n_remote: 0 };
    assert!(!scheduler.is_worth_loading(0, two) && scheduler.is_worth_loading(5_000, two));
    // What the disk takes says nothing of a store somewhere else, nor the other way round.
    assert!(scheduler.is_worth_loading(0, StoredPages { n_disk: 0, n_remote: 2 }));
    scheduler.submit_with(request(1, 12, 5), hints).expect("fits");
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(1, 0, 12, true)]);
    assert!(scheduler.take_loads().is_empty());
    assert_eq!(scheduler.stats().counters.loads_declined, 1);
    assert_eq!(scheduler.take_published().len(), 3, "what was computed can be saved");
}

#[test]
fn a_late_load_is_not_waited_for() {
    let mut scheduler = scheduler(4, 8, Config::default());
    let hints = Hints { n_stored: 8, ..Hints::default() };
    scheduler.submit_with(request(1, 12, 5), hints).expect("fits");
    assert_eq!(scheduler.plan(), None);
    let load = scheduler.take_loads().remove(0);
    scheduler.complete_load(load.id, Outcome::Late);
    let (plan, _) = step(&mut scheduler, TokenId(5));
    assert_eq!(shape(&plan), [(1, 0, 12, true)]);
    assert!(load.slots.iter().all(|slot| !plan.seqs.get(0).table.push.contains(slot)));
    scheduler.complete_load(load.id, Outcome::Ended { n_pages: 2 });
    scheduler.verify().expect("sound after a load");
    assert_eq!(scheduler.stats().cache.counters.pages_not_loaded, 2);
}

#[test]
fn a_window_frees_its_pages_in_the_step_in_which_they_fall_out() {
    let config =
        Config { max_batched_tokens: 4, max_seqs: 2, window: Some(6), ..Config::default() };
    let mut scheduler = scheduler(4, 3, config);
    // Forty tokens, where the cache holds twelve.
    scheduler.submit(request(1, 30, 10)).expect("what is seen of it fits");
    for (start, n_used) in [(0, 1), (4, 2), (8, 2), (12, 2)] {
        let (plan, _) = step(&mut scheduler, TokenId(9));
        assert_eq!(shape(&plan), [(1, start, 4, false)]);
        let stats = scheduler.stats().cache;
        // A page that others can find stays, but not for this sequence.
        assert_eq!((stats.pages_used, stats.pages_total), (n_used, 3), "{start}");
    }
    let mut n_tokens = 0;
    while !scheduler.is_idle() {
        let (_, outputs) = step(&mut scheduler, TokenId(9));
        n_tokens += outputs.iter().filter(|o| matches!(o, Output::Token(_))).count();
        assert!(scheduler.stats().cache.pages_used <= 3);
    }
    assert_eq!(n_tokens, 10);
    let stats = scheduler.stats();
    assert_eq!((stats.cache.pages_used, stats.counters.preemptions), (0, 0));
    // 39 tokens were computed, and 34 of them are out of the sight of the next.
    assert_eq!(stats.cache.counters.pages_out, 34 / 4);
}

#[test]
fn a_window_that_does_not_fit_is_refused_with_its_pages() {
    let config =
        Config { max_batched_tokens: 8, max_seqs: 2, window: Some(9), ..Config::default() };
    let mut scheduler = scheduler(4, 4, config);
    // The window, a step, and a page that is half seen at either end.
    let (prompt, needed, n_pages, page_len) = (16, 5, 4, 4);
    let refused = SubmitError::ExceedsCache { prompt, needed, n_pages, page_len };
    assert_eq!(scheduler.submit(request(1, 16, 1)), Err(refused));
    scheduler.submit(request(2, 15, 99)).expect("all of it fits");
    while !scheduler.is_idle() {
        step(&mut scheduler, TokenId(9));
    }
    assert_eq!(scheduler.stats().counters.sampled_tokens, 1, "clipped to what the cache holds");
}

#[test]
fn a_stream_drops_its_oldest_page_and_turns_its_sinks() {
    // The table, the sink as it was computed, and one page to spare.
    let mut scheduler = scheduler(4, 5, Config { max_context: 12, ..Config::default() });
    let streaming = Some(Streaming { n_sinks: 1, window: 8 });
    let hints = Hints { streaming, ..Hints::default() };
    scheduler.submit_with(request(1, 14, 30), hints).expect("what it keeps fits");
    // A full table first, although the budget has room for the whole prompt.
    let (plan, _) = step(&mut scheduler, TokenId(9));
    assert_eq!(shape(&plan), [(1, 0, 12, false)]);
    assert_eq!(plan.seqs.get(0).table.push, [0, 1, 2].map(Slot));
    // The second page goes, and stays findable. The first is written anew to a page of the
    // sequence's own.
    let (plan, _) = step(&mut scheduler, TokenId(9));
    assert_eq!(plan.shifts, [PageShift { source: Slot(0), target: Slot(3), by: 4 }]);
    assert_eq!(shape(&plan), [(1, 8, 2, true)]);
    assert_eq!((plan.seqs.get(0).shift, plan.seqs.get(0).table.keep), (4, 0));
    assert_eq!(plan.seqs.get(0).table.push, [3, 2, 4].map(Slot));
    for (start, shift) in [(10, 4), (11, 4), (8, 8), (9, 8), (10, 8), (11, 8), (8, 12)] {
        let (plan, _) = step(&mut scheduler, TokenId(9));
        assert_eq!((plan.seqs.get(0).start, plan.seqs.get(0).shift), (start, shift));
        assert_eq!(scheduler.stats().cache.pages_used, 4);
        let is_full = start == 8;
        let sink = PageShift { source: Slot(0), target: Slot(3), by: shift as i32 };
        assert_eq!(plan.shifts, vec![sink; usize::from(is_full)]);
        let push = if is_full { 2 } else { 0 };
        assert_eq!(plan.seqs.get(0).table.push.len(), push);
    }
    let mut n_tokens = 8;
    while !scheduler.is_idle() {
        let (_, outputs) = step(&mut scheduler, TokenId(9));
        n_tokens += outputs.iter().filter(|o| matches!(o, Output::Token(_))).count();
    }
    assert_eq!(n_tokens, 30, "neither the context nor the cache ends it");
    // Only the three pages that saw everything were ever findable.
    assert_eq!(scheduler.stats().cache.counters.pages_published, 3);
}

#[test]
fn a_stream_that_does_not_fit_is_refused_with_numbers() {
    let mut scheduler = scheduler(4, 8, Config { max_context: 20, ..Config::default() });
    let mut submit = |n_sinks, window| {
        let streaming = Some(Streaming { n_sinks, window });
        scheduler.submit_with(request(1, 10, 1), Hints { streaming, ..Hints::default() })
    };
    assert_eq!(submit(1, 0), Err(SubmitError::NoStreamingWindow));
    let exceeds = |kept, needed| {
        Err(SubmitError::StreamingExceeds { kept, max_context: 20, needed, n_pages: 8 })
    };
    assert_eq!(submit(4, 17), exceeds(24, 8));
    assert_eq!(submit(12, 8), exceeds(20, 9));
    assert_eq!(submit(8, 12), Ok(()));
}
