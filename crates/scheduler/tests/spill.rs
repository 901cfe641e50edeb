//! Running on pages of the host: one rule at a time, on plans small enough to read.

use nuthatch_cache::{Cache, Options};
use nuthatch_scheduler::{Config, Output, Scheduler, Submission, SubmitError};
use nuthatch_types::{
    FinishReason, HostReads, Limits, PageCopy, Sampled, Sampling, SeqId, Slot, StepPlan,
    StepResult, TableChange, TokenId,
};

/// Pages of four tokens. Slots of the device come first.
fn scheduler(n_pages: u32, n_host_pages: u32, host_reads: HostReads) -> Scheduler {
    let sizes = nuthatch_cache::Config { page_len: 4, n_pages, n_host_pages };
    let options = Options { host_reads, ..Options::default() };
    let cache = Cache::with_options(sizes, options).expect("valid sizes");
    Scheduler::new(Config::default(), cache).expect("valid limits")
}

fn request(seq: u64, n_prompt: u32, max_tokens: u32) -> Submission {
    Submission {
        seq: SeqId(seq),
        prompt: (1..=n_prompt).map(|i| TokenId(1000 * seq as u32 + i)).collect(),
        sampling: Sampling::greedy(),
        limits: Limits { max_tokens, ..Limits::default() },
    }
}

fn shape(plan: &StepPlan) -> Vec<(u64, u32, usize)> {
    plan.seqs.iter().map(|s| (s.seq.0, s.start, s.tokens.len())).collect()
}

fn slots(scheduler: &Scheduler, seq: u64) -> Vec<u32> {
    scheduler.cache().slots(SeqId(seq), 0).map(|slot| slot.0).collect()
}

/// Plans and commits one step, whose pass takes as long as `n_copies` pages take to copy; 0 is not
/// measured.
fn step_of(scheduler: &mut Scheduler, n_copies: f64) -> (StepPlan, Vec<Output>) {
    let plan = scheduler.plan().expect("there is work");
    scheduler.verify().expect("sound while a step is in flight");
    let asked = plan.seqs.sampled();
    let sample = |seq| Sampled { seq, token: TokenId(5), logprob: None, top: vec![] };
    let sampled = asked.map(|step| sample(step.seq)).collect();
    let compute_nanos = (n_copies * scheduler.rates().page_nanos) as u64;
    let outputs = scheduler.commit(StepResult { sampled, compute_nanos, ..StepResult::default() });
    scheduler.verify().expect("sound after a commit");
    (plan, outputs)
}

fn step(scheduler: &mut Scheduler) -> StepPlan {
    step_of(scheduler, 1.0).0
}

#[test]
fn a_prompt_larger_than_the_free_pages_starts_at_once() {
    for host_reads in [HostReads::Near, HostReads::Never] {
        let spill = host_reads == HostReads::Near;
        let mut scheduler = scheduler(4, 8, host_reads);
        scheduler.submit(request(1, 6, 9)).expect("fits");
        step(&mut scheduler);
        // Four pages, and two are free.
        scheduler.submit(request(2, 15, 9)).expect("fits");
        let plan = step(&mut scheduler);
        let counters = scheduler.stats().counters;
        assert_eq!(counters.admissions_spilled, u64::from(spill));
        if spill {
            assert_eq!(shape(&plan), [(1, 6, 1), (2, 0, 15)]);
            // Its first pages are on the host, and the last ones on the device.
            let push = [4, 5, 2, 3].map(Slot).to_vec();
            assert_eq!(plan.seqs.get(1).table, TableChange { keep: 0, push: &push });
            let cache = scheduler.stats().cache;
            assert_eq!((cache.spilled, cache.host_used, cache.counters.pages_spilled), (2, 2, 2));
        } else {
            assert_eq!(shape(&plan), [(1, 6, 1)]);
        }
    }
}

#[test]
fn pages_come_to_the_device_when_others_leave_it_the_last_first_and_few_in_a_step() {
    let mut scheduler = scheduler(4, 8, HostReads::Far);
    scheduler.submit(request(1, 6, 9)).expect("fits");
    scheduler.submit(request(2, 13, 99)).expect("fits");
    step(&mut scheduler);
    assert_eq!(slots(&scheduler, 2), [4, 5, 2, 3]);
    assert!(scheduler.cancel(SeqId(1)).is_some());
    // A tenth of the last pass was a tenth of a page.
    let (plan, _) = step_of(&mut scheduler, 10.0);
    assert_eq!((shape(&plan), plan.copies), (vec![(2, 13, 1)], vec![]));
    // Now it is a whole one. One page more stays free for what is sampled next.
    let (plan, _) = step_of(&mut scheduler, 99.0);
    let copy = PageCopy { source: Slot(5), target: plan.copies[0].target };
    assert!(copy.target.0 < 4);
    assert_eq!(plan.copies, [copy]);
    let table = TableChange { keep: 1, push: &[copy.target, Slot(2), Slot(3)] };
    assert_eq!(plan.seqs.get(0).table, table);
    let plan = step(&mut scheduler);
    assert_eq!((plan.copies, plan.seqs.get(0).table.keep), (vec![], 4));
    let cache = scheduler.stats().cache;
    assert_eq!((cache.spilled, cache.counters.pages_unspilled), (1, 1));
}

#[test]
fn a_request_may_need_both_tiers_and_no_more() {
    let mut scheduler = scheduler(4, 3, HostReads::Near);
    assert_eq!(
        scheduler.submit(request(1, 28, 1)),
        Err(SubmitError::ExceedsCache { prompt: 28, needed: 8, n_pages: 7, page_len: 4 })
    );
    scheduler.submit(request(1, 20, 99)).expect("fits on both");
    let plan = step(&mut scheduler);
    assert_eq!(plan.seqs.get(0).table.push, [4, 0, 1, 2, 3].map(Slot));
    // It goes on until both are full.
    let finished = loop {
        let (_, outputs) = step_of(&mut scheduler, 1.0);
        if let Some(Output::Finished { reason, usage, .. }) = outputs.last() {
            break (*reason, usage.completion_tokens);
        }
    };
    assert_eq!(finished, (FinishReason::Length, 8));
    assert_eq!((scheduler.stats().cache.spilled, scheduler.stats().cache.host_used), (0, 0));
}

#[test]
fn an_answer_that_outgrows_the_device_goes_on_to_the_host() {
    let mut scheduler = scheduler(4, 2, HostReads::Near);
    scheduler.submit(request(1, 15, 99)).expect("fits");
    let mut n_steps = 0;
    while !scheduler.is_idle() {
        step(&mut scheduler);
        n_steps += 1;
    }
    assert_eq!(n_steps, 24 - 15);
    let stats = scheduler.stats();
    assert_eq!((stats.counters.preemptions, stats.counters.recomputed_tokens), (0, 0));
    assert_eq!(stats.cache.counters.pages_spilled, 2);
}

#[test]
fn where_the_host_is_near_nobody_gives_way_before_both_tiers_are_full() {
    let mut scheduler = scheduler(4, 4, HostReads::Near);
    scheduler.submit(request(1, 7, 9)).expect("fits");
    scheduler.submit(request(2, 7, 9)).expect("fits");
    while !scheduler.is_idle() {
        let plan = step(&mut scheduler);
        assert_eq!((plan.seqs.len(), plan.copies.len()), (2, 0));
    }
    let stats = scheduler.stats();
    assert_eq!((stats.counters.preemptions, stats.counters.admissions_spilled), (0, 0));
    assert_eq!(stats.cache.counters.pages_spilled, 4);
}

#[test]
fn over_a_link_a_spilled_sequence_rests_after_its_first_token_until_it_has_room() {
    let mut scheduler = scheduler(4, 8, HostReads::Far);
    scheduler.submit(request(1, 7, 99)).expect("fits");
    scheduler.submit(request(2, 14, 99)).expect("fits");
    let (plan, outputs) = step_of(&mut scheduler, 0.0);
    assert_eq!((shape(&plan), outputs.len()), (vec![(1, 0, 7), (2, 0, 14)], 2));
    assert_eq!(slots(&scheduler, 2), [4, 5, 2, 3]);
    // Only what is on the device is copied.
    let (plan, _) = step_of(&mut scheduler, 0.0);
    assert_eq!(shape(&plan), [(1, 7, 1)]);
    let copies: Vec<(u32, u32)> = plan.copies.iter().map(|c| (c.source.0, c.target.0)).collect();
    assert_eq!(copies, [(3, 6), (2, 7)]);
    let stats = scheduler.stats();
    assert_eq!((stats.counters.rests, stats.counters.preemptions), (1, 0));
    assert_eq!((stats.swapped, stats.cache.spilled), (1, 0));
    assert!(scheduler.cancel(SeqId(1)).is_some());
    let (plan, _) = step_of(&mut scheduler, 0.0);
    assert_eq!(shape(&plan), [(2, 14, 1)]);
    assert!(slots(&scheduler, 2).iter().all(|&slot| slot < 4));
    assert_eq!(scheduler.stats().counters.recomputed_tokens, 0);
}

#[test]
fn who_finds_pages_on_which_another_runs_shares_them_where_they_are() {
    for host_reads in [HostReads::Near, HostReads::Far] {
        let mut scheduler = scheduler(4, 8, host_reads);
        scheduler.submit(request(1, 22, 99)).expect("fits");
        step(&mut scheduler);
        assert_eq!(slots(&scheduler, 1), [4, 5, 0, 1, 2, 3]);
        scheduler.submit(Submission { seq: SeqId(2), ..request(1, 22, 99) }).expect("fits");
        let plan = step(&mut scheduler);
        assert_eq!(shape(&plan), [(1, 22, 1), (2, 20, 2)]);
        assert!(plan.copies.is_empty());
        assert_eq!(slots(&scheduler, 2), [4, 5, 0, 1, 2, 6]);
        assert_eq!(scheduler.stats().cache.spilled, 2 + 3);
    }
}
