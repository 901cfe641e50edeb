//! Requests through the handle: order, cancellation, crowds, faults, the end.

use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use nuthatch_engine::{
    Capacity, Ended, EngineError, EngineHandle, Output, Submission, SubmitError, Timings,
};
use nuthatch_types::{FinishReason, SamplingError, TokenId};

use crate::echo::{Answer, CAPACITY, NAN_TOKEN, Script, VOCAB, engine, submission};

fn spawn(script: Script) -> EngineHandle {
    engine(CAPACITY, script).0.spawn().unwrap()
}

/// An engine that computes a step only when `gate` is given an entry.
fn gated() -> (EngineHandle, Sender<()>) {
    let (gate, receiver) = unbounded();
    (spawn(Script { gate: Some(receiver), ..Script::default() }), gate)
}

fn expected(submission: &Submission) -> Answer {
    Answer::of(submission, CAPACITY.max_context)
}

fn tokens(outputs: &[Output]) -> Vec<TokenId> {
    let token = |output: &Output| match *output {
        Output::Token { token, .. } => Some(token),
        Output::Finished { .. } => None,
    };
    outputs.iter().filter_map(token).collect()
}

#[test]
fn tokens_come_in_order_and_then_the_end() {
    let handle = spawn(Script::default());
    // Prompts of one token, of more than one step, and up to the end of the context.
    for (seed, n_prompt, max_tokens) in [(0, 1, 9), (1, 30, 9), (2, 40, 100), (3, 7, 1)] {
        let request = submission(seed, n_prompt, max_tokens);
        let ticket = handle.submit(request.clone()).unwrap();
        let answer = Answer::receive(&ticket).unwrap();
        assert_eq!(answer, expected(&request));
        assert_eq!(ticket.try_recv(), Err(Ended));
        assert_eq!(ticket.recv_timeout(Duration::from_secs(9)), Err(Ended));
    }
    handle.shutdown().unwrap();
}

#[test]
fn a_crowd_gets_what_each_would_get_alone() {
    let handle = spawn(Script::default());
    thread::scope(|scope| {
        for submitter in 0..6u64 {
            let handle = handle.clone();
            scope.spawn(move || {
                let requests: Vec<Submission> = (0..8)
                    .map(|i| submission(submitter * 8 + i, 1 + (i as u32 * 5) % 23, 24))
                    .collect();
                let tickets: Vec<_> =
                    requests.iter().map(|r| handle.submit(r.clone()).unwrap()).collect();
                for (request, ticket) in requests.iter().zip(&tickets) {
                    assert_eq!(Answer::receive(ticket).unwrap(), expected(request));
                }
            });
        }
    });
    let stats = handle.stats().unwrap();
    assert_eq!(stats.scheduler.counters.finished, 48);
    assert_eq!((stats.scheduler.running, stats.scheduler.waiting), (0, 0));
    assert_eq!(stats.scheduler.cache.pages_free, CAPACITY.n_slots);
    assert_eq!(stats.error, None);
    handle.shutdown().unwrap();
}

#[test]
fn preempted_sequences_answer_as_if_alone() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let requests: Vec<Submission> = (0..12).map(|i| submission(i, 1 + i as u32, 30)).collect();
    let receivers: Vec<_> = requests
        .iter()
        .map(|request| {
            let (outputs, receiver) = unbounded();
            engine.submit(request.clone(), outputs, Duration::ZERO).unwrap();
            receiver
        })
        .collect();
    while engine.step().unwrap() {
        engine.verify().unwrap();
    }
    // Five sequences at a time need more than twice the pages that there are.
    assert!(engine.stats().scheduler.counters.preemptions > 0);
    for (request, receiver) in requests.iter().zip(receivers) {
        assert_eq!(tokens(&receiver.iter().collect::<Vec<_>>()), expected(request).tokens);
    }
}

#[test]
fn cancelling_one_ends_one() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let requests = [submission(0, 4, 20), submission(3, 5, 12)];
    let channels = [unbounded(), unbounded()];
    let seqs = [0, 1].map(|i: usize| {
        engine.submit(requests[i].clone(), channels[i].0.clone(), Duration::ZERO).unwrap()
    });
    for _ in 0..3 {
        assert!(engine.step().unwrap());
    }
    engine.cancel(seqs[0]);
    while engine.step().unwrap() {}
    // To cancel what has ended is no fault.
    engine.cancel(seqs[0]);
    engine.verify().unwrap();
    let [one, two] = channels.map(|(_, receiver)| receiver.try_iter().collect::<Vec<_>>());
    assert_eq!(tokens(&one), expected(&requests[0]).tokens[..3]);
    let reason = FinishReason::Cancelled;
    assert!(matches!(one.last(), Some(Output::Finished { reason: r, .. }) if *r == reason));
    assert_eq!(tokens(&two), expected(&requests[1]).tokens);
}

#[test]
fn a_ticket_cancels() {
    let (handle, gate) = gated();
    gate.send(()).unwrap();
    let ticket = handle.submit(submission(0, 4, 40)).unwrap();
    assert!(matches!(ticket.recv(), Some(Output::Token { .. })));
    ticket.cancel();
    drop(gate);
    let answer = Answer::receive(&ticket).unwrap();
    assert_eq!(answer.reason, FinishReason::Cancelled);
    // The step that was being computed still gives its token.
    assert!(answer.tokens.len() <= 1);
    ticket.cancel();
    assert_eq!(handle.stats().unwrap().scheduler.counters.cancelled, 1);
    handle.shutdown().unwrap();
}

#[test]
fn dropping_a_ticket_cancels() {
    let (handle, gate) = gated();
    gate.send(()).unwrap();
    let ticket = handle.submit(submission(0, 4, 40)).unwrap();
    assert!(matches!(ticket.recv(), Some(Output::Token { .. })));
    drop(ticket);
    // Commands are obeyed in order, so that the statistics come after the cancellation.
    drop(gate);
    let stats = handle.stats().unwrap();
    assert_eq!((stats.scheduler.running, stats.scheduler.waiting), (0, 0));
    assert_eq!(stats.scheduler.counters.cancelled, 1);
    assert_eq!(stats.scheduler.cache.pages_free, CAPACITY.n_slots);
    handle.shutdown().unwrap();
}

#[test]
fn a_receiver_that_is_gone_cancels_at_the_next_token() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let (outputs, receiver) = unbounded();
    let keeper = unbounded();
    engine.submit(submission(0, 4, 40), outputs, Duration::ZERO).unwrap();
    engine.submit(submission(3, 4, 4), keeper.0, Duration::ZERO).unwrap();
    assert!(engine.step().unwrap());
    drop(receiver);
    while engine.step().unwrap() {}
    assert_eq!(engine.stats().scheduler.counters.cancelled, 1);
    assert_eq!(keeper.1.iter().count(), 4 + 1);
    engine.verify().unwrap();
}

#[test]
fn a_device_fault_reaches_everyone() {
    let (mut engine, _) = engine(CAPACITY, Script { fault_at: Some(4), ..Script::default() });
    // More than can run at one time, so that some are waiting when it happens.
    let receivers: Vec<_> = (0..12)
        .map(|seed| {
            let (outputs, receiver) = unbounded();
            engine.submit(submission(seed, 20, 20), outputs, Duration::ZERO).unwrap();
            receiver
        })
        .collect();
    let error = loop {
        if let Err(error) = engine.step() {
            break error;
        }
    };
    engine.fail(error.into());
    for receiver in receivers {
        let last = receiver.iter().last();
        let reason = FinishReason::Failed;
        assert!(matches!(last, Some(Output::Finished { reason: r, .. }) if r == reason));
    }
    let stats = engine.stats();
    assert_eq!(stats.scheduler.counters.failed, 12);
    assert_eq!(stats.scheduler.cache.pages_free, CAPACITY.n_slots);
    engine.verify().unwrap();
}

#[test]
fn after_a_fault_the_handle_says_why() {
    let handle = spawn(Script { fault_at: Some(4), ..Script::default() });
    thread::scope(|scope| {
        for seed in 0..8 {
            let handle = handle.clone();
            scope.spawn(move || match handle.submit(submission(seed, 20, 25)) {
                Ok(ticket) => {
                    assert_eq!(Answer::receive(&ticket).unwrap().reason, FinishReason::Failed);
                }
                Err(SubmitError::Failed { reason }) => assert!(reason.contains("as it was told")),
                Err(other) => panic!("{other}"),
            });
        }
    });
    assert!(handle.stats().unwrap().error.is_some());
    assert!(handle.submit(submission(0, 3, 3)).is_err());
    assert!(matches!(handle.shutdown(), Err(EngineError::Device(_))));
}

#[test]
fn logits_that_are_no_numbers_end_their_own_sequence_only() {
    let handle = spawn(Script::default());
    let good = submission(1, 8, 20);
    let mut bad = submission(0, 6, 20);
    bad.prompt[2] = NAN_TOKEN;
    let tickets = [&good, &bad, &good].map(|r| handle.submit(r.clone()).unwrap());
    let answers = tickets.each_ref().map(|t| Answer::receive(t).unwrap());
    assert_eq!(answers[0], expected(&good));
    assert_eq!(answers[1], expected(&bad));
    assert_eq!(answers[1].reason, FinishReason::Failed);
    assert_eq!(answers[2], expected(&good));
    handle.shutdown().unwrap();
}

#[test]
fn what_cannot_run_is_refused_with_the_reason() {
    let handle = spawn(Script::default());
    let refusal = |change: &dyn Fn(&mut Submission)| {
        let mut request = submission(0, 4, 4);
        change(&mut request);
        handle.submit(request).unwrap_err()
    };
    let unknown = SubmitError::UnknownToken { token: TokenId(VOCAB), vocab: VOCAB };
    assert_eq!(refusal(&|r| r.prompt[1] = TokenId(VOCAB)), unknown);
    assert_eq!(refusal(&|r| r.sampling.logit_bias = vec![(TokenId(VOCAB), 1.0)]), unknown);
    assert_eq!(unknown.to_string(), "token 61 is not in the vocabulary of 61 tokens");
    let empty = nuthatch_scheduler::SubmitError::EmptyPrompt;
    assert_eq!(refusal(&|r| r.prompt.clear()), empty.into());
    let long = refusal(&|r| r.prompt = vec![TokenId(1); 48]);
    assert!(long.to_string().contains("48"), "{long}");
    let hot = refusal(&|r| r.sampling.temperature = -1.0);
    let field = SamplingError { field: "temperature", value: -1.0, allowed: "0 to 100" };
    assert_eq!(hot, nuthatch_scheduler::SubmitError::Sampling(field).into());
    handle.shutdown().unwrap();
}

#[test]
fn shutdown_cancels_and_later_calls_are_told() {
    let (handle, gate) = gated();
    let other = handle.clone();
    let ticket = handle.submit(submission(0, 4, 40)).unwrap();
    drop(gate);
    handle.shutdown().unwrap();
    let reason = Answer::receive(&ticket).unwrap().reason;
    // The answer may have been complete before the command was seen.
    assert!(matches!(reason, FinishReason::Cancelled | FinishReason::Length | FinishReason::Stop));
    assert_eq!(other.submit(submission(0, 4, 4)).unwrap_err(), SubmitError::Stopped);
    assert_eq!(other.stats(), None);
    other.shutdown().unwrap();
}

#[test]
fn the_thread_ends_when_nobody_is_left() {
    let (alive, gone): (Sender<()>, Receiver<()>) = bounded(0);
    let handle = spawn(Script { alive: Some(alive), ..Script::default() });
    let ticket = handle.submit(submission(0, 4, 20)).unwrap();
    drop(handle);
    // A ticket alone keeps the engine.
    assert_eq!(Answer::receive(&ticket).unwrap(), expected(&submission(0, 4, 20)));
    drop(ticket);
    assert!(gone.recv().is_err(), "the model was dropped");
}

#[test]
fn a_panic_of_the_engine_is_told_and_blocks_nobody() {
    let handle = spawn(Script { panic_at: Some(3), ..Script::default() });
    let ticket = handle.submit(submission(0, 4, 20)).unwrap();
    assert_eq!(Answer::receive(&ticket), None);
    assert_eq!(handle.submit(submission(0, 4, 4)).unwrap_err(), SubmitError::Stopped);
    assert!(matches!(handle.shutdown(), Err(EngineError::Panicked)));
}

#[test]
fn timings_are_the_parts_of_a_request() {
    let capacity = Capacity { max_seqs: 1, ..CAPACITY };
    let (mut engine, clock) = engine(capacity, Script::default());
    let channels = [unbounded(), unbounded()];
    for (outputs, _) in &channels {
        // Twenty tokens are two steps of prefill; three tokens of answer.
        engine.submit(submission(0, 20, 3), outputs.clone(), Duration::ZERO).unwrap();
    }
    clock.advance_ms(5);
    for _ in 0..8 {
        assert!(engine.step().unwrap());
        clock.advance_ms(10);
    }
    assert!(engine.is_idle());
    let timings = channels.map(|(_, receiver)| {
        receiver.try_iter().find_map(|output| match output {
            Output::Finished { timings, .. } => Some(timings),
            Output::Token { .. } => None,
        })
    });
    let ms = Duration::from_millis;
    let first = Timings { queue: ms(5), prefill: ms(10), decode: ms(20) };
    let second = Timings { queue: ms(5 + 40), prefill: ms(10), decode: ms(20) };
    assert_eq!(timings, [Some(first), Some(second)]);
}
