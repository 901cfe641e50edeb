//! Beam search: what transformers finds, however short pages are and whoever else is there.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Receiver, unbounded};
use nuthatch_engine::{Output, Submission, SubmitError, Usage};
use nuthatch_types::{BeamParams, EarlyStopping, FinishReason, Limits, Sampling, SeqId, TokenId};
use serde_json::Value;

use crate::echo::{CAPACITY, NAN_TOKEN, Script, collect_all, engine, receive_all, submission};
use crate::golden::{Pool, folder, golden, load, spawn_with};

/// How far the sum of an answer's log probabilities, before it is divided for its length, may be
/// from that of transformers, which adds up in f32 and computes its products in another order. Of
/// the 453 answers of [`finds_what_transformers_finds`], the farthest was 2.5e-5 away.
const SUM_TOLERANCE: f32 = 1e-4;

/// One search of `beams.json`.
struct Case {
    model: String,
    submission: Submission,
    /// Tokens, whether a stop token came after them, and the score; best first.
    answers: Vec<(Vec<TokenId>, bool, f32)>,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read(folder("beams.json")).unwrap();
    let all: Vec<Value> = serde_json::from_slice(&text).unwrap();
    all.iter().map(case).collect()
}

fn case(json: &Value) -> Case {
    let tokens = |list: &Value| -> Vec<TokenId> {
        list.as_array().unwrap().iter().map(|t| TokenId(t.as_u64().unwrap() as u32)).collect()
    };
    let answer = |answer: &Value| {
        let score = answer["score"].as_f64().unwrap() as f32;
        (tokens(&answer["tokens"]), answer["stopped"].as_bool().unwrap(), score)
    };
    let model = json["model"].as_str().unwrap().to_owned();
    let width = json["width"].as_u64().unwrap() as u32;
    let params = BeamParams {
        width,
        length_penalty: json["length_penalty"].as_f64().unwrap() as f32,
        early_stopping: match json["early_stopping"].as_bool() {
            Some(true) => EarlyStopping::Yes,
            Some(false) => EarlyStopping::No,
            None => EarlyStopping::Never,
        },
    };
    let sampling = Sampling {
        repetition_penalty: json["repetition_penalty"].as_f64().unwrap_or(1.0) as f32,
        ..Sampling::default()
    };
    let limits = Limits {
        max_tokens: 20,
        stop_tokens: tokens(&json["eos"]),
        min_tokens: json["min_tokens"].as_u64().unwrap_or(0) as u32,
    };
    let (prompt, _) = golden(&model);
    let submission = Submission {
        prompt,
        sampling,
        limits,
        n: width,
        beam: Some(params),
        ..Submission::default()
    };
    Case {
        model,
        submission,
        answers: json["answers"].as_array().unwrap().iter().map(answer).collect(),
    }
}

/// Compares the answers of a search with those of transformers.
fn check(case: &Case, outputs: impl Iterator<Item = Output>) {
    let found = collect_all(outputs).unwrap();
    let what = format!("{} {:?}", case.model, case.submission.beam);
    assert_eq!(found.len(), case.answers.len(), "{what}");
    for (i, ((answer, score), (tokens, stopped, expected))) in
        found.iter().zip(&case.answers).enumerate()
    {
        assert_eq!(&answer.tokens, tokens, "answer {i} of {what}");
        let reason = if *stopped { FinishReason::Stop } else { FinishReason::Length };
        assert_eq!(answer.reason, reason, "{what}");
        let n_tokens = tokens.len() + usize::from(*stopped);
        let scale = (n_tokens as f32).powf(case.submission.beam.unwrap().length_penalty);
        let distance = (score.unwrap() - expected).abs() * scale;
        assert!(distance <= SUM_TOLERANCE, "{what}: {score:?} and {expected}");
        assert_eq!(answer.usage.completion_tokens, tokens.len() as u32);
        let n_prompt = if i == 0 { case.submission.prompt.len() as u32 } else { 0 };
        assert_eq!(answer.usage.prompt_tokens, n_prompt, "the prompt is counted once");
    }
}

#[test]
fn finds_what_transformers_finds() {
    let cases = cases();
    assert!(cases.len() > 90);
    for model in ["llama3", "mistral-window", "qwen2-window"] {
        let pool = Pool { kv_pages: 64, host_pages: 0, spill: false, max_seqs: 8 };
        let handle = spawn_with(&folder(model), pool);
        for case in cases.iter().filter(|case| case.model == model) {
            let ticket = handle.submit(case.submission.clone()).unwrap();
            check(case, std::iter::from_fn(|| ticket.recv()));
        }
        handle.shutdown().unwrap();
    }
}

/// Three pages of the prompt are shared; each of four answers may need two more.
const PAGES_OF_FOUR: u32 = 3 + 4 * 2;

fn wide_cases() -> Vec<Case> {
    let is_wide = |case: &Case| case.model == "llama3" && case.answers.len() == 4;
    cases().into_iter().filter(is_wide).collect()
}

/// Computes the answers to all requests, submitted at once, in pages for one search of width four.
/// Also returns how often a sequence lost its pages.
fn run_tight(
    requests: &[Submission],
    max_seqs: u32,
    host_pages: u32,
) -> (Vec<Receiver<Output>>, u64) {
    let pool = Pool { kv_pages: PAGES_OF_FOUR, host_pages, spill: true, max_seqs };
    let mut engine = load(&folder("llama3"), pool);
    let submit = |request: &Submission| {
        let (outputs, receiver) = unbounded();
        engine.submit(request.clone(), outputs, Duration::ZERO).unwrap();
        receiver
    };
    let receivers = requests.iter().map(submit).collect();
    while engine.step().unwrap() {
        engine.verify().unwrap();
    }
    assert!(engine.is_idle());
    let stats = engine.stats().scheduler;
    assert_eq!((stats.running, stats.waiting, stats.parked), (0, 0, 0));
    assert_eq!(stats.cache.pages_used, 0);
    (receivers, stats.counters.preemptions)
}

#[test]
fn preemption_changes_nothing() {
    let mut n_preemptions = 0;
    for (case, host_pages) in wide_cases().iter().take(6).zip([0, 0, 0, 2, 8, 40]) {
        let ordinary = |i: usize| Submission {
            prompt: case.submission.prompt[i..].to_vec(),
            sampling: Sampling::greedy(),
            limits: Limits { max_tokens: 25, ..Limits::default() },
            ..Submission::default()
        };
        // The search comes between requests that are older and requests that are younger.
        let mut requests: Vec<Submission> = (1..7).map(ordinary).collect();
        requests.insert(1, case.submission.clone());
        let (mut receivers, n) = run_tight(&requests, 6, host_pages);
        n_preemptions += n;
        check(case, receivers.remove(1).try_iter());
        for receiver in receivers {
            let answers = collect_all(receiver.try_iter()).unwrap();
            assert_eq!(answers[0].0.tokens.len(), 25);
        }
    }
    assert!(n_preemptions > 10, "only {n_preemptions} preemptions");
}

#[test]
fn two_searches_share_a_pool_for_one() {
    let cases = wide_cases();
    let mut n_preemptions = 0;
    for pair in cases.chunks_exact(2).take(5) {
        // They share the three pages of the prompt, and eight of their own are left for two
        // searches that may need eight each.
        let requests = [&pair[0], &pair[1]].map(|case| case.submission.clone());
        for (max_seqs, host_pages) in [(4, 0), (5, 0), (8, 0), (8, 20)] {
            let (receivers, n) = run_tight(&requests, max_seqs, host_pages);
            n_preemptions += n;
            for (case, receiver) in pair.iter().zip(receivers) {
                check(case, receiver.try_iter());
            }
        }
    }
    assert!(n_preemptions > 10, "only {n_preemptions} preemptions");
}

fn search(seed: u64, width: u32) -> Submission {
    let sampling = Sampling { frequency_penalty: 0.3, ..Sampling::default() };
    let limits = Limits { max_tokens: 12, stop_tokens: vec![TokenId(3)], min_tokens: 2 };
    let beam = Some(BeamParams::new(width));
    Submission { sampling, limits, n: width, beam, ..submission(seed, 6, 0) }
}

#[test]
fn a_fork_copies_at_most_one_page() {
    let script = Script::default();
    let n_copies = Arc::clone(&script.n_copies);
    let handle = engine(CAPACITY, script).0.spawn().unwrap();
    for seed in 0..12 {
        receive_all(&handle.submit(search(seed, 4)).unwrap()).unwrap();
    }
    let stats = handle.stats().unwrap().scheduler;
    let n_copies = n_copies.load(Ordering::SeqCst);
    assert_eq!(stats.counters.preemptions, 0);
    assert!(stats.counters.forks > 100, "{:?}", stats.counters);
    // A fork at the end of a page copies nothing.
    assert!(n_copies > 0 && n_copies < stats.counters.forks, "{n_copies} of {:?}", stats.counters);
    assert_eq!(stats.cache.pages_free, CAPACITY.n_slots);
    handle.shutdown().unwrap();
}

/// Penalties look back on the tokens that the search chose, also in sequences that were forked,
/// parked and started again.
#[test]
fn company_changes_nothing() {
    let alone: Vec<_> = (0..8)
        .map(|seed| {
            let handle = engine(CAPACITY, Script::default()).0.spawn().unwrap();
            receive_all(&handle.submit(search(seed, 4)).unwrap()).unwrap()
        })
        .collect();
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let requests: Vec<_> = (0..8)
        .map(|seed| {
            let (outputs, receiver) = unbounded();
            engine.submit(search(seed, 4), outputs, Duration::ZERO).unwrap();
            receiver
        })
        .collect();
    while engine.step().unwrap() {
        engine.verify().unwrap();
    }
    assert!(engine.is_idle());
    assert!(engine.stats().scheduler.counters.preemptions > 0);
    for (receiver, alone) in requests.iter().zip(&alone) {
        let mut tokens = vec![Vec::new(); 4];
        for output in receiver.try_iter() {
            if let Output::Token { index, token, .. } = output {
                tokens[index as usize].push(token);
            }
        }
        let expected: Vec<_> = alone.iter().map(|(answer, _)| answer.tokens.clone()).collect();
        assert_eq!(tokens, expected);
    }
}

#[test]
fn a_search_that_is_cancelled_or_fails_ends_all_its_answers() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let mut bad = search(1, 3);
    bad.prompt[2] = NAN_TOKEN;
    let channels = [unbounded(), unbounded()];
    let [first, _] = [(search(0, 3), 0), (bad, 1)].map(|(request, i)| {
        let channel: &(_, _) = &channels[i];
        engine.submit(request, channel.0.clone(), Duration::ZERO).unwrap()
    });
    for _ in 0..3 {
        assert!(engine.step().unwrap());
        engine.verify().unwrap();
    }
    engine.cancel(first);
    engine.verify().unwrap();
    assert!(engine.is_idle());
    assert_eq!(engine.stats().scheduler.cache.pages_free, CAPACITY.n_slots);
    for ((_, receiver), reason) in
        channels.iter().zip([FinishReason::Cancelled, FinishReason::Failed])
    {
        let ends: Vec<_> = receiver
            .try_iter()
            .map(|output| match output {
                Output::Finished { index, reason, usage, score: None, .. } => {
                    (index, reason, usage)
                }
                other @ (Output::Token { .. } | Output::Finished { .. }) => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(ends.iter().map(|end| end.0).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(ends.iter().all(|end| end.1 == reason), "{ends:?}");
        assert_eq!(ends[1].2, Usage::default());
    }
    // Nothing is left of either.
    engine.cancel(first);
    engine.cancel(SeqId(999));
    assert!(!engine.step().unwrap());
}

#[test]
fn what_cannot_run_is_refused_with_the_reason() {
    let handle = engine(CAPACITY, Script::default()).0.spawn().unwrap();
    let refusal = |change: &dyn Fn(&mut Submission)| {
        let mut request = search(0, 2);
        change(&mut request);
        handle.submit(request).unwrap_err().to_string()
    };
    assert_eq!(refusal(&|r| r.n = 0), "n is 0, but must be at least 1");
    assert_eq!(refusal(&|r| r.n = 3), "n is 3, but must be at most the beam width of 2");
    let beam = |width, length_penalty| {
        Some(BeamParams { width, length_penalty, early_stopping: EarlyStopping::No })
    };
    assert_eq!(refusal(&|r| r.beam = beam(0, 1.0)), "beam_width is 0, but must be at least 1");
    assert_eq!(
        refusal(&|r| r.beam = beam(2, f32::NAN)),
        "length_penalty is NaN, but must be -10 to 10"
    );
    assert_eq!(
        refusal(&|r| r.beam = beam(9, 1.0)),
        "9 answers are to be followed, but only 5 sequences run at one time"
    );
    let long = refusal(&|r| {
        r.beam = beam(5, 1.0);
        r.limits.max_tokens = 40;
    });
    assert!(long.contains("need 56 pages of 4 tokens, but the cache has 24"), "{long}");
    let stopped = handle.submit(search(0, 2)).unwrap();
    handle.shutdown().unwrap();
    assert!(receive_all(&stopped).is_some());
    assert_eq!(handle.submit(search(0, 2)).unwrap_err(), SubmitError::Stopped);
}
