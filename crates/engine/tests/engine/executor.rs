//! The executor alone, given plans by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nuthatch_backend::DeviceError;
use nuthatch_engine::{Execute, Executor, Submission};
use nuthatch_types::{
    Clock, PageCopy, PageShift, Sampling, SeqId, SeqStart, SeqStep, Slot, StepPlan, TableChange,
    TokenId,
};

use crate::echo::{Answer, CAPACITY, Echo, Script, submission};

fn executor(script: Script) -> Executor<Echo> {
    Executor::new(Echo::new(CAPACITY, script), CAPACITY)
}

fn start(seq: u64) -> SeqStart {
    SeqStart { seq: SeqId(seq), sampling: Sampling::greedy(), history: vec![], n_prompt: 0 }
}

fn step<'a>(
    seq: u64,
    start: u32,
    tokens: &'a [TokenId],
    keep: u32,
    push: &'a [Slot],
) -> SeqStep<'a> {
    let (seq, table) = (SeqId(seq), TableChange { keep, push });
    SeqStep { seq, start, shift: 0, tokens, table, sample: true }
}

/// A clock that moves on by a millisecond with each look.
#[derive(Default)]
struct Ticking(AtomicU64);

impl Clock for Ticking {
    fn now(&self) -> Duration {
        Duration::from_millis(self.0.fetch_add(1, Ordering::SeqCst))
    }
}

#[test]
fn a_step_says_what_it_took_and_copies_alone_are_a_step() {
    let (prompt, _) = greedy_text(6);
    let started = vec![start(1)];
    let plan = StepPlan {
        started,
        seqs: [step(1, 0, &prompt, 0, &[9, 3].map(Slot))].into(),
        ..StepPlan::default()
    };
    let result = executor(Script::default()).run(&plan).unwrap();
    assert_eq!((result.copy_nanos, result.compute_nanos), (0, 0), "no clock, no figures");
    let mut executor = executor(Script::default()).with_clock(Arc::new(Ticking::default()));
    let result = executor.run(&plan).unwrap();
    assert_eq!((result.copy_nanos, result.compute_nanos), (1_000_000, 1_000_000));
    let copies = vec![PageCopy { source: Slot(3), target: Slot(11) }];
    let result = executor.run(&StepPlan { copies, ..StepPlan::default() }).unwrap();
    assert!(result.sampled.is_empty());
    assert_eq!((result.copy_nanos, result.compute_nanos), (1_000_000, 0));
}

/// Prompt and answer of a greedy request.
fn greedy_text(n_prompt: u32) -> (Vec<TokenId>, Vec<TokenId>) {
    let request = submission(0, n_prompt, 8);
    (request.prompt.clone(), Answer::of(&request, CAPACITY.max_context).tokens)
}

#[test]
fn chunks_tables_copies_and_rows_keep_sequences_apart() {
    let (prompt, answer) = greedy_text(6);
    let mut executor = executor(Script::default());

    // Two sequences with the same prompt, one in two chunks, in pages that interleave.
    let plan = StepPlan {
        started: vec![start(1), start(2)],
        seqs: [
            step(1, 0, &prompt, 0, &[9, 3].map(Slot)),
            SeqStep { sample: false, ..step(2, 0, &prompt[..3], 0, &[8].map(Slot)) },
        ]
        .into(),
        ..StepPlan::default()
    };
    let sampled = executor.run(&plan).unwrap().sampled;
    assert_eq!(sampled.len(), 1);
    assert_eq!((sampled[0].seq, sampled[0].token), (SeqId(1), answer[0]));

    // The second page of sequence 1 moves; sequence 2 gets its old slot.
    let plan = StepPlan {
        copies: vec![PageCopy { source: Slot(3), target: Slot(11) }],
        seqs: [
            step(2, 3, &prompt[3..], 1, &[3].map(Slot)),
            step(1, 6, &answer[..1], 1, &[11].map(Slot)),
        ]
        .into(),
        ..StepPlan::default()
    };
    let sampled = executor.run(&plan).unwrap().sampled;
    assert_eq!((sampled[0].seq, sampled[0].token), (SeqId(2), answer[0]));
    assert_eq!((sampled[1].seq, sampled[1].token), (SeqId(1), answer[1]));

    // Sequence 1 ends, another takes its table and its pages in the same plan.
    let plan = StepPlan {
        ended: vec![SeqId(1)],
        started: vec![start(3)],
        seqs: [step(3, 0, &prompt, 0, &[11, 9].map(Slot)), step(2, 6, &answer[..1], 2, &[])].into(),
        ..StepPlan::default()
    };
    let sampled = executor.run(&plan).unwrap().sampled;
    assert_eq!((sampled[0].seq, sampled[0].token), (SeqId(3), answer[0]));
    assert_eq!((sampled[1].seq, sampled[1].token), (SeqId(2), answer[1]));
}

/// Copies come before shifts, shifts before the pass, and tokens go to places, not positions.
#[test]
fn a_sequence_that_dropped_a_page_reads_its_table() {
    let (prompt, _) = greedy_text(12);
    let mut executor = executor(Script::default());
    let plan = StepPlan {
        started: vec![start(1)],
        seqs: [SeqStep { sample: false, ..step(1, 0, &prompt[..11], 0, &[9, 3, 5].map(Slot)) }]
            .into(),
        ..StepPlan::default()
    };
    executor.run(&plan).unwrap();
    // The second page goes, and the first is written anew by way of a copy.
    let plan = StepPlan {
        copies: vec![PageCopy { source: Slot(9), target: Slot(7) }],
        shifts: vec![PageShift { source: Slot(7), target: Slot(8), by: 4 }],
        seqs: [SeqStep { shift: 4, ..step(1, 7, &prompt[11..], 0, &[8, 5].map(Slot)) }].into(),
        ..StepPlan::default()
    };
    let sampled = executor.run(&plan).unwrap().sampled;
    let kept = [&prompt[..4], &prompt[8..]].concat();
    let request = Submission { prompt: kept, ..submission(0, 1, 1) };
    assert_eq!(sampled[0].token, Answer::of(&request, CAPACITY.max_context).tokens[0]);
}

#[test]
fn refuses_work_after_a_fault() {
    let mut executor = executor(Script { fault_at: Some(1), ..Script::default() });
    let plan = StepPlan {
        started: vec![start(1)],
        seqs: [step(1, 0, &[TokenId(5)], 0, &[0].map(Slot))].into(),
        ..StepPlan::default()
    };
    assert!(executor.run(&plan).is_err());
    // The device itself would work again; what it held is lost all the same.
    let DeviceError::Fault(reason) = executor.run(&StepPlan::default()).unwrap_err() else {
        panic!("a fault is told as one");
    };
    assert!(reason.starts_with("the device failed before: "), "{reason}");
}

#[test]
#[should_panic(expected = "every token has a page")]
fn a_token_without_a_page_is_a_bug() {
    let plan = StepPlan {
        started: vec![start(1)],
        seqs: [step(1, 0, &[TokenId(5); 5], 0, &[0].map(Slot))].into(),
        ..StepPlan::default()
    };
    let _ = executor(Script::default()).run(&plan);
}

#[test]
#[should_panic(expected = "a sequence is in a step once")]
fn a_sequence_twice_is_a_bug() {
    let one = step(1, 0, &[TokenId(5)], 0, &[Slot(0)]);
    let plan = StepPlan { started: vec![start(1)], seqs: [one, one].into(), ..StepPlan::default() };
    let _ = executor(Script::default()).run(&plan);
}

#[test]
#[should_panic(expected = "slot outside the arena")]
fn a_slot_that_is_not_there_is_a_bug() {
    let plan = StepPlan {
        started: vec![start(1)],
        seqs: [step(1, 0, &[TokenId(5)], 0, &[Slot(CAPACITY.n_slots)])].into(),
        ..StepPlan::default()
    };
    let _ = executor(Script::default()).run(&plan);
}
