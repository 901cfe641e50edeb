//! Top-k attention together with everything else: prefix hits, forks, swaps, chunks, cancelling.

use nuthatch_engine::{EngineHandle, EngineOptions, Submission, TopKOptions};
use nuthatch_types::{BeamParams, EarlyStopping, Sampling, TokenId};

use crate::echo::{Answer, receive_all};
use crate::golden::{Pool, folder, golden, load_topk, request};

fn options(policy: &str) -> TopKOptions {
    let text = (0..64).map(|i| TokenId(i * 7 % 90)).collect();
    TopKOptions { policies: vec![policy.parse().unwrap()], profile: None, text, offload: None }
}

fn spawn(name: &str, pool: Pool, max_rows: u32, policy: Option<&str>) -> EngineHandle {
    let topk = policy.map(options);
    let path = folder(name);
    load_topk(&path, pool, &EngineOptions::default(), max_rows, topk.as_ref()).spawn().unwrap()
}

const POOL: Pool = Pool { kv_pages: 16, host_pages: 0, spill: false, max_seqs: 4 };

/// Policies that remember nothing from step to step: what they choose depends on the tokens alone.
const FORGETFUL: [&str; 6] = [
    "exact,k=12,sinks=4,recent=8",
    "hata:64,k=12,sinks=4,recent=8",
    "quest,k=12,sinks=4,recent=8,refresh=whole",
    "loki:4,k=12,sinks=4,recent=8,reuse=lru(page=8,capacity=3)",
    "ds:4,k=12,sinks=4,recent=8",
    "hata:64,k=12,follow=0.6,sinks=4,recent=8",
];

/// Policies that do.
const REMEMBERING: [&str; 6] = [
    "hata:128,k=8,sinks=4,recent=8,reuse=qsac(eta=0.9,p=3)",
    "hata:64,k=6,sinks=0,recent=1,working_set=2,reuse=qsac(eta=0.5,p=3,max_age=3)",
    "exact,k=8,recent=4,working_set=1.5,speculate=on",
    "hata:128,k=8,sinks=4,recent=8,reuse=qsac(eta=0.95,p=3,soft=-1)",
    "loki:4,k=6,recent=2,working_set=2,reuse=qsac(eta=0.95,floor=0.9,soft=0.2,soft_eta=0.6)",
    "loki:4,k=6,follow=0.5,recent=2,working_set=2,reuse=qsac(eta=0.9,floor=0.6)",
];

fn ask(handle: &EngineHandle, prompt: &[TokenId]) -> Answer {
    let ticket = handle.submit(request(prompt, Sampling::greedy())).unwrap();
    Answer::receive(&ticket).unwrap()
}

/// A policy that attends to everything gives the exact answer: the same bits, if it says so itself,
/// and the golden tokens, if it merely chooses all.
#[test]
fn everything_chosen_is_exact() {
    for name in ["llama3", "qwen3", "mistral-window", "kv-shared", "kv-shared-window"] {
        let (prompt, greedy) = golden(name);
        let exact = ask(&spawn(name, POOL, 10, None), &prompt);
        assert_eq!(exact.tokens, greedy);
        let full = ask(&spawn(name, POOL, 10, Some("full")), &prompt);
        assert_eq!((full.tokens, full.logprobs), (exact.tokens, exact.logprobs), "{name}");
        for policy in ["exact,k=100%", "hata:64,k=4000", "quest,k_min=4000", "loki:4", "ds:4"] {
            assert_eq!(ask(&spawn(name, POOL, 10, Some(policy)), &prompt).tokens, greedy, "{name}");
        }
    }
}

#[test]
fn policies_choose_and_answers_differ_from_streaming() {
    let (prompt, _) = golden("llama3");
    let exact = ask(&spawn("llama3", POOL, 10, None), &prompt);
    let streaming = ask(&spawn("llama3", POOL, 10, Some("streaming,sinks=4,recent=8")), &prompt);
    assert_ne!(streaming.logprobs, exact.logprobs);
    for policy in FORGETFUL {
        let answer = ask(&spawn("llama3", POOL, 10, Some(policy)), &prompt);
        assert_eq!(answer.tokens.len(), exact.tokens.len());
        assert_ne!(answer.logprobs, exact.logprobs, "{policy} attends to everything");
        assert_ne!(answer.logprobs, streaming.logprobs, "{policy} attends to nothing");
        // The first token comes from the prompt's last row, which is exact.
        assert_eq!(answer.tokens[0], exact.tokens[0]);
    }
}

/// However a prompt was cut, and whether its pages were computed or found, decoding is the same.
#[test]
fn chunks_and_prefix_hits_change_nothing() {
    let (prompt, _) = golden("llama3");
    for policy in FORGETFUL.into_iter().chain(REMEMBERING) {
        let handle = spawn("llama3", POOL, 10, Some(policy));
        let cold = ask(&handle, &prompt);
        let ticket = handle.submit(request(&prompt, Sampling::greedy())).unwrap();
        let (warm, _) = receive_all(&ticket).unwrap().remove(0);
        assert!(warm.usage.cached_tokens > 0);
        assert_eq!((&warm.tokens, &warm.logprobs), (&cold.tokens, &cold.logprobs), "{policy}");
        for max_rows in [4, prompt.len() as u32 - 1, prompt.len() as u32] {
            let other = ask(&spawn("llama3", POOL, max_rows, Some(policy)), &prompt);
            assert_eq!(
                (other.tokens, other.logprobs),
                (cold.tokens.clone(), cold.logprobs.clone())
            );
        }
    }
}

/// The pages of an answer are known when the request comes again, and take the place of those that are
/// decoded; that is no reason to choose anew.
#[test]
fn a_request_that_comes_again_is_answered_alike() {
    let (prompt, _) = golden("llama3");
    for policy in FORGETFUL.into_iter().chain(REMEMBERING) {
        let handle = spawn("llama3", Pool { kv_pages: 40, ..POOL }, 10, Some(policy));
        let again = || {
            let mut long = request(&prompt, Sampling::greedy());
            long.limits.max_tokens = 80;
            let answer = Answer::receive(&handle.submit(long).unwrap()).unwrap();
            assert_eq!(answer.tokens.len(), 80);
            (answer.tokens, answer.logprobs)
        };
        let first = again();
        assert_eq!(again(), first, "{policy}");
        assert_eq!(again(), first, "{policy}");
    }
}

/// Sequences in company that give way to each other. One that comes back with its pages goes on as if it
/// had never left, if its policy remembers nothing; one that is computed again gets exact keys where it
/// had others, and may answer otherwise.
#[test]
fn company_changes_nothing_and_everybody_finishes() {
    let (prompt, _) = golden("llama3");
    // Short prompts and long answers: more begin than can end.
    let asked = |i: usize| {
        let mut asked = request(&prompt[i..i + 20], Sampling::greedy());
        asked.limits.max_tokens = 60;
        asked
    };
    for (number, policy) in FORGETFUL.into_iter().chain(REMEMBERING).enumerate() {
        let alone: Vec<Answer> = (0..6)
            .map(|i| {
                let handle = spawn("llama3", POOL, 10, Some(policy));
                Answer::receive(&handle.submit(asked(i)).unwrap()).unwrap()
            })
            .collect();
        for (kv_pages, host_pages, spill) in
            [(40, 0, false), (7, 30, false), (7, 30, true), (7, 0, false)]
        {
            let pool = Pool { kv_pages, host_pages, spill, max_seqs: 4 };
            let handle = spawn("llama3", pool, 10, Some(policy));
            let tickets: Vec<_> = (0..6).map(|i| handle.submit(asked(i)).unwrap()).collect();
            // One that nobody waits for any more.
            drop(handle.submit(asked(9)).unwrap());
            let together: Vec<Answer> =
                tickets.iter().map(|ticket| Answer::receive(ticket).unwrap()).collect();
            let stats = handle.stats().unwrap().scheduler;
            let counters = &stats.counters;
            let what = format!("{policy}, {kv_pages} and {host_pages} pages");
            pool.expect_preemptions(counters, &what);
            let forgets = number < FORGETFUL.len() && counters.recomputed_tokens == 0;
            for (together, alone) in together.iter().zip(&alone) {
                assert_eq!(together.tokens.len(), alone.tokens.len());
                if kv_pages == 40 || forgets {
                    assert_eq!(together.tokens, alone.tokens, "{what}");
                    assert_eq!(together.logprobs, alone.logprobs, "{what}");
                }
            }
            assert_eq!(stats.cache.pages_used, 0, "{policy}: {:?}", stats.cache);
            handle.shutdown().unwrap();
        }
    }
}

/// Several answers to one prompt fork its pages and their digests; each is what its seed gives alone.
#[test]
fn samples_are_what_their_seeds_give_alone() {
    let (prompt, _) = golden("llama3");
    for policy in FORGETFUL.into_iter().chain(REMEMBERING) {
        let handle = spawn("llama3", POOL, 10, Some(policy));
        let sampling = Sampling { seed: 40, ..Sampling::default() };
        let asked = Submission { n: 3, ..request(&prompt, sampling) };
        let answers = receive_all(&handle.submit(asked.clone()).unwrap()).unwrap();
        assert_eq!(answers.len(), 3);
        for (i, (answer, _)) in (0..).zip(&answers) {
            let sampling = Sampling { seed: 40 + i, ..asked.sampling.clone() };
            let alone = Submission { n: 1, sampling, ..asked.clone() };
            let alone = Answer::receive(&handle.submit(alone).unwrap()).unwrap();
            assert_eq!((&answer.tokens, &answer.logprobs), (&alone.tokens, &alone.logprobs));
        }
    }
}

/// Beams fork each other after every token. With a policy that remembers nothing they are the same
/// however the prompt was cut; with any policy and few pages they end and leave nothing behind.
#[test]
fn beams_fork_what_was_chosen_from() {
    let (prompt, _) = golden("llama3");
    let beam = BeamParams { width: 3, length_penalty: 1.0, early_stopping: EarlyStopping::No };
    let asked = Submission { n: 3, beam: Some(beam), ..request(&prompt, Sampling::default()) };
    let search = |pool: Pool, max_rows: u32, policy: Option<&str>| {
        let handle = spawn("llama3", pool, max_rows, policy);
        let answers = receive_all(&handle.submit(asked.clone()).unwrap()).unwrap();
        assert_eq!(handle.stats().unwrap().scheduler.cache.pages_used, 0);
        answers.into_iter().map(|(answer, score)| (answer.tokens, score)).collect::<Vec<_>>()
    };
    let exact = search(POOL, 10, None);
    assert_eq!(search(POOL, 10, Some("full")), exact);
    for policy in FORGETFUL {
        let found = search(POOL, 10, Some(policy));
        assert_ne!(found, exact, "{policy} attends to everything");
        assert_eq!(search(POOL, 4, Some(policy)), found, "{policy}");
    }
    for policy in FORGETFUL.into_iter().chain(REMEMBERING) {
        for host_pages in [0, 20] {
            let pool = Pool { kv_pages: 9, host_pages, spill: false, max_seqs: 4 };
            assert_eq!(search(pool, 10, Some(policy)).len(), 3);
        }
    }
}
