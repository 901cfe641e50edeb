//! Several answers to one prompt: each is the one that its seed gives alone, and they share pages.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::unbounded;
use nuthatch_engine::{Capacity, Hints, Output, Submission};
use nuthatch_types::{FinishReason, Limits, Sampling};

use crate::echo::{Answer, CAPACITY, NAN_TOKEN, Script, engine, receive_all, submission};
use crate::golden::{Pool, folder, golden, spawn_with};

/// The request for the answer with this index alone.
fn alone(request: &Submission, index: u64) -> Submission {
    let sampling = Sampling { seed: request.sampling.seed + index, ..request.sampling.clone() };
    Submission { n: 1, sampling, ..request.clone() }
}

#[test]
fn each_sample_is_what_its_seed_gives_alone() {
    let script = Script::default();
    let n_copies = Arc::clone(&script.n_copies);
    let handle = engine(CAPACITY, script).0.spawn().unwrap();
    // A prompt of more than one step, up to the end of the context; more samples than seats.
    for (seed, n_prompt, max_tokens, n) in
        [(1, 1, 9, 3), (2, 21, 9, 4), (4, 40, 100, 2), (5, 7, 6, 9)]
    {
        let request = Submission { n, ..submission(seed, n_prompt, max_tokens) };
        let before = n_copies.load(Ordering::SeqCst);
        let answers = receive_all(&handle.submit(request.clone()).unwrap()).unwrap();
        assert_eq!(answers.len(), n as usize);
        for (index, (answer, score)) in (0u64..).zip(answers) {
            let expected = Answer::of(&alone(&request, index), CAPACITY.max_context);
            assert_eq!((&answer.tokens, score), (&expected.tokens, None));
            assert_eq!((answer.logprobs, answer.reason), (expected.logprobs, expected.reason));
            let n_prompt = if index == 0 { n_prompt } else { 0 };
            assert_eq!(answer.usage.prompt_tokens, n_prompt, "the prompt is counted once");
            assert_eq!(answer.usage.completion_tokens, answer.tokens.len() as u32);
        }
        let copied = n_copies.load(Ordering::SeqCst) - before;
        assert!(copied < u64::from(n), "{copied} pages copied for {n} samples");
    }
    let stats = handle.stats().unwrap().scheduler;
    assert_eq!(stats.cache.pages_free, CAPACITY.n_slots);
    assert!(stats.cache.counters.tokens_shared > 20 * 3);
    handle.shutdown().unwrap();
}

#[test]
fn one_sample_that_fails_fails_alone_and_a_cancel_ends_all() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let mut bad = Submission { n: 2, ..submission(1, 6, 9) };
    bad.prompt[3] = NAN_TOKEN;
    let channels = [unbounded(), unbounded()];
    let [_, second] = [(bad, 0), (Submission { n: 3, ..submission(2, 6, 30) }, 1)].map(
        |(request, i): (Submission, usize)| {
            engine.submit(request, channels[i].0.clone(), Duration::ZERO).unwrap()
        },
    );
    for _ in 0..6 {
        assert!(engine.step().unwrap());
        engine.verify().unwrap();
    }
    engine.cancel(second);
    assert!(engine.is_idle());
    let ends = channels.map(|(_, receiver)| {
        let end = |output: Output| match output {
            Output::Finished { index, reason, .. } => Some((index, reason)),
            Output::Token { .. } => None,
        };
        receiver.try_iter().filter_map(end).collect::<Vec<_>>()
    });
    assert_eq!(ends[0], [0, 1].map(|index| (index, FinishReason::Failed)));
    assert_eq!(ends[1], [0, 1, 2].map(|index| (index, FinishReason::Cancelled)));
}

#[test]
fn a_receiver_that_is_gone_cancels_every_sample() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let (outputs, receiver) = unbounded();
    engine.submit(Submission { n: 4, ..submission(0, 4, 40) }, outputs, Duration::ZERO).unwrap();
    assert!(engine.step().unwrap());
    drop(receiver);
    while engine.step().unwrap() {}
    engine.verify().unwrap();
    assert!(engine.is_idle());
    assert_eq!(engine.stats().scheduler.counters.cancelled, 4);
}

#[test]
fn a_request_is_taken_whole_or_not_at_all() {
    let capacity = Capacity { max_seqs: 1, ..CAPACITY };
    let handle = engine(capacity, Script::default()).0.spawn().unwrap();
    // Sixty-four may wait.
    let error = handle.submit(Submission { n: 70, ..submission(0, 4, 4) }).unwrap_err();
    assert!(error.to_string().contains("n is 70, but only 64 more requests may wait"), "{error}");
    let stats = handle.stats().unwrap().scheduler;
    assert_eq!((stats.running, stats.waiting), (0, 0));
    let answers = receive_all(&handle.submit(Submission { n: 3, ..submission(2, 4, 4) }).unwrap());
    assert_eq!(answers.unwrap().len(), 3);
    handle.shutdown().unwrap();
}

#[test]
fn a_salt_keeps_requests_apart() {
    let (prompt, _) = golden("llama3");
    let pool = Pool { kv_pages: 32, host_pages: 0, spill: false, max_seqs: 4 };
    let handle = spawn_with(&folder("llama3"), pool);
    let cached = |salt: &[u8]| {
        let request = Submission {
            prompt: prompt.clone(),
            sampling: Sampling::greedy(),
            limits: Limits { max_tokens: 2, ..Limits::default() },
            hints: Hints { cache_salt: salt.to_vec(), ..Hints::default() },
            ..Submission::default()
        };
        let answers = receive_all(&handle.submit(request).unwrap()).unwrap();
        answers[0].0.usage.cached_tokens
    };
    assert_eq!(cached(b"one"), 0);
    assert!(cached(b"one") > 0);
    assert_eq!(cached(b"two"), 0);
    assert_eq!(cached(b""), 0);
    assert!(cached(b"two") > 0);
    handle.shutdown().unwrap();
}

#[test]
fn one_answer_may_end_while_the_others_go_on() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let request = Submission { n: 3, ..submission(3, 6, 12) };
    let (outputs, receiver) = unbounded();
    let id = engine.submit(request.clone(), outputs, Duration::ZERO).unwrap();
    let mut answers = vec![(Vec::new(), None); 3];
    while engine.step().unwrap() {
        engine.verify().unwrap();
        for output in receiver.try_iter() {
            match output {
                Output::Token { index, token, .. } => answers[index as usize].0.push(token),
                Output::Finished { index, reason, .. } => {
                    assert_eq!(answers[index as usize].1.replace(reason), None, "it ends once");
                }
            }
        }
        // The first one is what the others were forked from.
        for index in [0, 2] {
            if answers[index].0.len() == 2 {
                engine.end_answer(id, index as u32);
            }
        }
        engine.end_answer(id, 9);
    }
    assert!(engine.is_idle());
    let whole = Answer::of(&alone(&request, 1), CAPACITY.max_context);
    assert_eq!(answers[1], (whole.tokens, Some(whole.reason)));
    for index in [0, 2] {
        let whole = Answer::of(&alone(&request, index), CAPACITY.max_context);
        let answer = &answers[index as usize];
        assert_eq!((&answer.0[..], answer.1), (&whole.tokens[..2], Some(FinishReason::Cancelled)));
    }
}
