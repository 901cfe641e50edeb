//! Reading a prompt whole: the probabilities of its tokens, and the mean of their hidden states.

use std::sync::mpsc::channel;
use std::time::Duration;

use crossbeam_channel::unbounded;
use nuthatch_cache::Options;
use nuthatch_engine::sample::{Sampler, Scratch};
use nuthatch_engine::{
    Capacity, EngineHandle, EngineOptions, HiddenSink, Output, Pooling, PromptScores, ScoredToken,
    Submission, SubmitError,
};
use nuthatch_types::{BeamParams, FinishReason, Limits, Sampling, TokenId};

use crate::echo::{
    Answer, CAPACITY, NAN_TOKEN, Script, VOCAB, collect_all, echo_logits, engine, engine_with,
    submission,
};
use crate::golden::{Pool, folder, golden, load_topk};

const N_TOP: u32 = 2;

/// What the fake model gives for each token of a prompt but the first, by the sampler, which has
/// never heard of prompts that are read.
fn expected(prompt: &[TokenId]) -> Vec<ScoredToken> {
    let mut scratch = Scratch::with_vocab(VOCAB as usize);
    let mut score = |end: usize| {
        let token = prompt[end];
        let mut sampler = Sampler::new(forcing(token), &[], &[]);
        let choice = sampler.sample(&mut echo_logits(&prompt[..end]), 0, &mut scratch).unwrap();
        assert_eq!(choice.token, token);
        ScoredToken { token, logprob: choice.logprob.unwrap(), top: choice.top }
    };
    (1..prompt.len()).map(&mut score).collect()
}

/// Chooses `token`, and says how probable it was before it was forced.
fn forcing(token: TokenId) -> Sampling {
    Sampling { logit_bias: vec![(token, 100.0)], n_logprobs: Some(N_TOP), ..Sampling::greedy() }
}

#[test]
fn a_prompt_that_is_read_gives_the_probability_of_each_token() {
    // Steps of 16 and of 3 rows, and outputs of five rows and of one at a time.
    let narrow = Capacity { max_rows: 3, max_seqs: 2, ..CAPACITY };
    let alone = Capacity { max_seqs: 1, ..CAPACITY };
    for capacity in [CAPACITY, narrow, alone] {
        let (mut engine, _) = engine_with(capacity, Script::default(), Options::default());
        let (outputs, news) = unbounded();
        let request = submission(4, 30, 3);
        let all = [&request.prompt[..], &[TokenId(7), TokenId(9)]].concat();
        for prompt in [&request.prompt, &request.prompt, &all] {
            let scores = PromptScores::new(N_TOP);
            let request = Submission {
                prompt: prompt.clone(),
                scores: Some(scores.clone()),
                n: 2,
                ..request.clone()
            };
            let answers = [0, 1].map(|i| Answer::of(&with_seed(&request, i), capacity.max_context));
            engine.submit(request, outputs.clone(), Duration::ZERO).unwrap();
            // Whatever else runs.
            let (others, _other_news) = unbounded();
            engine.submit(submission(6, 11, 5), others, Duration::ZERO).unwrap();
            while engine.step().unwrap() {
                engine.verify().unwrap();
                if !news.is_empty() {
                    assert_eq!(scores.tokens().len(), prompt.len() - 1, "before the first token");
                }
            }
            assert_eq!(scores.tokens(), expected(prompt));
            let got = collect_all(news.try_iter()).unwrap();
            assert_eq!(got[0].0.usage.cached_tokens, 0, "all of it is computed");
            for ((got, _), expected) in got.iter().zip(&answers) {
                assert_eq!((&got.tokens, got.reason), (&expected.tokens, expected.reason));
            }
        }
        // What was computed for it serves others.
        let (outputs, news) = unbounded();
        engine.submit(request, outputs, Duration::ZERO).unwrap();
        while engine.step().unwrap() {}
        let usage = collect_all(news.try_iter()).unwrap()[0].0.usage;
        assert!(usage.cached_tokens >= 28, "{usage:?} {capacity:?}");
    }
}

fn with_seed(request: &Submission, more: u64) -> Submission {
    let seed = request.sampling.seed + more;
    Submission { sampling: Sampling { seed, ..request.sampling.clone() }, ..request.clone() }
}

#[test]
fn preemption_reads_no_row_twice() {
    let capacity = Capacity { n_slots: 12, ..CAPACITY };
    let (mut engine, _) = engine_with(capacity, Script::default(), Options::default());
    let (outputs, _news) = unbounded();
    let mut all = Vec::new();
    for seed in 0..9 {
        let scores = PromptScores::new(N_TOP);
        let request = Submission { scores: Some(scores.clone()), ..submission(seed, 17, 24) };
        all.push((scores, request.prompt.clone()));
        engine.submit(request, outputs.clone(), Duration::ZERO).unwrap();
    }
    while engine.step().unwrap() {
        engine.verify().unwrap();
    }
    let counters = engine.stats().scheduler.counters;
    assert!(counters.preemptions > 0, "{counters:?}");
    for (scores, prompt) in all {
        assert_eq!(scores.tokens(), expected(&prompt));
    }
}

#[test]
fn logits_that_are_no_numbers_end_the_request_and_no_other() {
    let (mut engine, _) = engine(CAPACITY, Script::default());
    let (outputs, news) = unbounded();
    let mut bad = submission(0, 30, 4);
    bad.prompt[28] = NAN_TOKEN;
    bad.scores = Some(PromptScores::new(0));
    engine.submit(bad, outputs, Duration::ZERO).unwrap();
    let (outputs, good) = unbounded();
    engine.submit(submission(3, 6, 4), outputs, Duration::ZERO).unwrap();
    while engine.step().unwrap() {}
    let reason = |news: &crossbeam_channel::Receiver<Output>| {
        collect_all(news.try_iter()).unwrap()[0].0.reason
    };
    assert_eq!(reason(&news), FinishReason::Failed);
    assert_eq!(reason(&good), FinishReason::Length);

    let beam = Some(BeamParams::new(2));
    let scores = Some(PromptScores::new(0));
    let refused = Submission { beam, scores, ..submission(1, 6, 4) };
    let (outputs, _news) = unbounded();
    let refused = engine.submit(refused, outputs, Duration::ZERO);
    assert_eq!(refused, Err(SubmitError::PromptOfBeams));
}

fn handle(name: &str, max_rows: u32) -> EngineHandle {
    let pool = Pool { kv_pages: 64, host_pages: 0, spill: false, max_seqs: 4 };
    let options = EngineOptions::default();
    load_topk(&folder(name), pool, &options, max_rows, None).spawn().unwrap()
}

/// A real model: the same bits as when each token is asked for by itself, however the prompt is cut.
#[test]
fn a_model_gives_the_same_token_by_token() {
    for name in ["llama3", "qwen3", "mistral-window", "kv-shared"] {
        let (prompt, _) = golden(name);
        let limits = Limits { max_tokens: 1, ..Limits::default() };
        let mut expected = Vec::new();
        let one_by_one = handle(name, 10);
        for end in 1..prompt.len() {
            let request = Submission {
                prompt: prompt[..end].to_vec(),
                sampling: forcing(prompt[end]),
                limits: limits.clone(),
                ..Submission::default()
            };
            match one_by_one.submit(request).unwrap().recv().unwrap() {
                Output::Token { token, logprob, top, .. } => {
                    assert_eq!(token, prompt[end]);
                    expected.push(ScoredToken { token, logprob: logprob.unwrap(), top });
                }
                other @ Output::Finished { .. } => panic!("{other:?}"),
            }
        }
        // The cache of this engine is full of the prompt's pages.
        for handle in [one_by_one, handle(name, 7), handle(name, 64)] {
            let scores = PromptScores::new(N_TOP);
            let request = Submission {
                prompt: prompt.clone(),
                sampling: Sampling::greedy(),
                limits: limits.clone(),
                scores: Some(scores.clone()),
                ..Submission::default()
            };
            Answer::receive(&handle.submit(request).unwrap()).unwrap();
            assert_eq!(scores.tokens(), expected, "{name}");
            handle.shutdown().unwrap();
        }
    }
}

/// The mean over all tokens is the mean of what each of them gives as the last one.
#[test]
fn a_mean_is_over_all_tokens() {
    let (prompt, _) = golden("llama3");
    let state = |handle: &EngineHandle, prompt: &[TokenId], pooling: Pooling| {
        let (sender, states) = channel();
        let hidden = HiddenSink::new(move |hidden| sender.send(hidden.to_vec()).unwrap());
        let request = Submission {
            prompt: prompt.to_vec(),
            sampling: Sampling::greedy(),
            limits: Limits { max_tokens: 1, ..Limits::default() },
            hidden: Some(hidden.with_pooling(pooling)),
            ..Submission::default()
        };
        Answer::receive(&handle.submit(request).unwrap()).unwrap();
        let all: Vec<Vec<f32>> = states.try_iter().collect();
        assert_eq!(all.len(), 1, "once");
        all.into_iter().next().unwrap()
    };
    let last = handle("llama3", 64);
    let states: Vec<Vec<f32>> =
        (1..=prompt.len()).map(|end| state(&last, &prompt[..end], Pooling::Last)).collect();
    let mean: Vec<f32> = (0..states[0].len())
        .map(|i| {
            let sum: f64 = states.iter().map(|state| f64::from(state[i])).sum();
            (sum / states.len() as f64) as f32
        })
        .collect();
    for handle in [last, handle("llama3", 7), handle("llama3", 64)] {
        assert_eq!(state(&handle, &prompt, Pooling::Mean), mean);
        handle.shutdown().unwrap();
    }
}
