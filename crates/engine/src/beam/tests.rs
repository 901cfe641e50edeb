//! The search against a transcription of Hugging Face's: arrays of fixed size in which -1e9 marks
//! what is not there, whole vocabularies instead of candidates, and no sequences.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const ABSENT: f64 = -1e9;

/// The log probabilities after some tokens of an answer: any, but always the same.
fn logprobs(seed: u64, tokens: &[u32], vocab: usize) -> Vec<f32> {
    let mut state = tokens.iter().fold(seed, |state, &token| {
        (state ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23)
    });
    let logits: Vec<f64> = (0..vocab)
        .map(|_| {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (state >> 40) as f64 / (1u64 << 22) as f64
        })
        .collect();
    let total = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
    logits.iter().map(|logit| (logit - total) as f32).collect()
}

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    vocab: usize,
    params: BeamParams,
    limits: Limits,
}

/// Tokens with the stop token, and the score.
type Answer = (Vec<u32>, f64);

/// `_beam_search` of transformers 5.22 for a batch of one.
fn transformers(case: &Case) -> Vec<Answer> {
    let Case { seed, vocab, params, limits } = case;
    let width = params.width as usize;
    let n_keep = width * 2.max(1 + limits.stop_tokens.len());
    let penalty = f64::from(params.length_penalty);
    let is_stop = |token: u32| limits.stop_tokens.contains(&TokenId(token));

    let mut running: Vec<Answer> = vec![(vec![], ABSENT); width];
    running[0].1 = 0.0;
    let mut finished: Vec<(Answer, bool)> = vec![((vec![], ABSENT), false); width];
    for n_tokens in 1.. {
        let mut all: Vec<Answer> = Vec::new();
        for (tokens, sum) in &running {
            for (token, &logprob) in (0u32..).zip(&logprobs(*seed, tokens, *vocab)) {
                let is_masked = n_tokens <= limits.min_tokens && is_stop(token);
                let logprob = if is_masked { f64::NEG_INFINITY } else { f64::from(logprob) };
                all.push(([tokens.as_slice(), &[token]].concat(), sum + logprob));
            }
        }
        let by_score = |a: &Answer, b: &Answer| b.1.total_cmp(&a.1);
        all.sort_by(by_score);
        all.truncate(n_keep);
        let hits: Vec<bool> = all
            .iter()
            .map(|(tokens, _)| {
                is_stop(*tokens.last().expect("one was added")) || n_tokens == limits.max_tokens
            })
            .collect();
        let mut next = all.clone();
        next.iter_mut().zip(&hits).for_each(|((_, sum), &hit)| *sum += f64::from(hit) * ABSENT);
        next.sort_by(by_score);
        next.truncate(width);
        running = next;
        for (i, (tokens, sum)) in all.into_iter().enumerate() {
            let has_finished = hits[i] && i < width;
            let score = sum / f64::from(n_tokens).powf(penalty);
            let score = score + if has_finished { 0.0 } else { ABSENT };
            finished.push(((tokens, score), has_finished));
        }
        finished.sort_by(|a, b| b.0.1.total_cmp(&a.0.1));
        finished.truncate(width);

        let hypothetical = match params.early_stopping {
            EarlyStopping::Never if penalty > 0.0 => limits.max_tokens,
            EarlyStopping::Never | EarlyStopping::Yes | EarlyStopping::No => n_tokens,
        };
        let best = running[0].1 / f64::from(hypothetical).powf(penalty);
        let worst = finished.iter().map(|f| f.0.1).fold(f64::INFINITY, f64::min);
        let can_improve = finished.iter().any(|f| best > if f.1 { worst } else { ABSENT });
        let all_finished = finished.iter().all(|f| f.1);
        let is_open = !(all_finished && params.early_stopping == EarlyStopping::Yes);
        if !(can_improve && is_open && hits.iter().any(|&hit| !hit)) {
            break;
        }
    }
    finished.into_iter().filter(|f| f.1).map(|f| f.0).collect()
}

/// The same by the code under test, which is told candidates only. Also checks the moves.
fn searched(case: &Case) -> Vec<Answer> {
    let Case { seed, vocab, params, limits } = case;
    let n_candidates = params.n_candidates(limits.stop_tokens.len()) as usize;
    let mut search = BeamSearch::new(*params, limits.clone(), SeqId(0));
    let mut seqs = BTreeMap::from([(SeqId(0), Vec::new())]);
    let mut n_seqs = 0;
    while !seqs.is_empty() {
        assert_eq!(search.seqs().count(), seqs.len());
        let mut is_ready = false;
        for (&seq, tokens) in &seqs {
            assert!(!is_ready, "all sequences are waited for");
            let mut candidates: Vec<Scored> =
                (0u32..).map(TokenId).zip(logprobs(*seed, tokens, *vocab)).collect();
            candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
            candidates.truncate(n_candidates);
            is_ready = search.take(seq, candidates);
        }
        assert!(is_ready);
        let moves = search.advance(|| {
            n_seqs += 1;
            SeqId(n_seqs)
        });
        for step in moves {
            match step {
                Move::Discard(seq) => assert!(seqs.remove(&seq).is_some()),
                Move::Fork { source, seq, token } => {
                    let tokens = [seqs[&source].as_slice(), &[token.0]].concat();
                    assert!(seqs.insert(seq, tokens).is_none());
                }
                Move::Proceed { seq, token } => {
                    seqs.get_mut(&seq).expect("it is there").push(token.0);
                }
            }
        }
        assert!(seqs.len() <= params.width as usize);
    }
    let answer = |hypothesis: Hypothesis| {
        let tokens = hypothesis.tokens.iter().map(|(token, _)| token.0).collect();
        (tokens, hypothesis.score)
    };
    search.into_best(params.width).into_iter().map(answer).collect()
}

fn any_case() -> impl Strategy<Value = Case> {
    let early =
        prop_oneof![Just(EarlyStopping::Yes), Just(EarlyStopping::No), Just(EarlyStopping::Never)];
    let penalty = prop_oneof![Just(0.0f32), Just(1.0), -2.0..3.0f32];
    let limits = (1..12u32, 0..6u32, 0..4usize);
    (any::<u64>(), 12..40usize, 1..6u32, penalty, early, limits).prop_map(
        |(seed, vocab, width, length_penalty, early_stopping, (max_tokens, min_tokens, n_stop))| {
            // Every candidate comes from the first beam at first, so the vocabulary must have them.
            let vocab = vocab.max(width as usize * (1 + n_stop).max(2) + n_stop);
            Case {
                seed,
                vocab,
                params: BeamParams { width, length_penalty, early_stopping },
                limits: Limits {
                    max_tokens,
                    min_tokens,
                    stop_tokens: (0..n_stop as u32).map(|i| TokenId(i * 3)).collect(),
                },
            }
        },
    )
}

proptest! {
    #[test]
    fn finds_what_transformers_finds(case in any_case()) {
        let expected = transformers(&case);
        let found = searched(&case);
        prop_assert_eq!(expected.len(), found.len());
        for (mut expected, found) in expected.into_iter().zip(found) {
            if expected.0.last().is_some_and(|&token| case.limits.stop_tokens.contains(&TokenId(token))) {
                expected.0.pop();
            }
            prop_assert_eq!(&expected.0, &found.0);
            prop_assert!((expected.1 - found.1).abs() <= 1e-9 * expected.1.abs().max(1.0));
        }
    }
}

#[test]
fn a_width_of_one_is_greedy() {
    let case = Case {
        seed: 3,
        vocab: 20,
        params: BeamParams::new(1),
        limits: Limits { max_tokens: 9, ..Limits::default() },
    };
    let mut greedy: Vec<u32> = Vec::new();
    for _ in 0..9 {
        let logprobs = logprobs(3, &greedy, 20);
        let best = (0u32..).zip(&logprobs).max_by(|a, b| a.1.total_cmp(b.1));
        greedy.push(best.expect("twenty tokens").0);
    }
    assert_eq!(searched(&case)[0].0, greedy);
}

#[test]
fn candidates_that_cannot_come_are_not_followed() {
    let mut search = BeamSearch::new(
        BeamParams::new(3),
        Limits { max_tokens: 5, min_tokens: 1, stop_tokens: vec![TokenId(1)] },
        SeqId(0),
    );
    let candidates = [(0, -0.5), (1, -0.6), (2, f32::NEG_INFINITY)];
    assert!(search.take(SeqId(0), candidates.map(|(t, p)| (TokenId(t), p)).to_vec()));
    // The stop token comes too early and the other cannot come, so one beam is left.
    let moves = search.advance(|| unreachable!("nothing is forked"));
    assert_eq!(moves, [Move::Proceed { seq: SeqId(0), token: TokenId(0) }]);
}
