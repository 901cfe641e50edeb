//! Each filter against its definition in f64, and against Hugging Face's own.

use nuthatch_types::{Sampling, TokenId};
use proptest::prelude::*;

use super::nucleus::{self, Candidate, Room};
use super::*;

/// The tokens that may be drawn and their probabilities, by definition: sorts, `f64`, no shortcuts.
/// Also returns the distance of the nearest probability sum to the limit of top-p: rounding may
/// decide a cut that is closer than the sums are exact.
fn naive(sampling: &Sampling, logits: &[f32]) -> (Vec<(u32, f64)>, f64) {
    let t = f64::from(sampling.temperature);
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut kept: Vec<(u32, f64)> =
        (0u32..).zip(logits).map(|(id, &x)| (id, (f64::from(x - max) / t).exp())).collect();
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if sampling.top_k > 0 {
        kept.truncate(sampling.top_k as usize);
    }
    let total: f64 = kept.iter().map(|k| k.1).sum();
    let mut margin = f64::INFINITY;
    if sampling.top_p < 1.0 {
        let mut before = 0.0;
        let mut n_kept = 0;
        for &(_, w) in &kept {
            margin = margin.min((before / total - f64::from(sampling.top_p)).abs());
            n_kept += usize::from(before / total < f64::from(sampling.top_p));
            before += w;
        }
        kept.truncate(n_kept);
    }
    let best = kept[0].1;
    for &(_, w) in &kept {
        if w < best && w < 1.0 {
            margin = margin.min((w / best - f64::from(sampling.min_p)).abs());
        }
    }
    kept.retain(|&(_, w)| w >= f64::from(sampling.min_p) * best);
    let total: f64 = kept.iter().map(|k| k.1).sum();
    let mut kept: Vec<(u32, f64)> = kept.into_iter().map(|(id, w)| (id, w / total)).collect();
    kept.sort_by_key(|k| k.0);
    (kept, margin)
}

/// The same from the code under test.
fn filtered(sampling: &Sampling, logits: &[f32]) -> Vec<(u32, f64)> {
    let mut room = Room::with_vocab(logits.len());
    let max = softmax::finite_max(logits).unwrap();
    nucleus::filter(sampling, logits, max, &mut room);
    let total: f64 = room.candidates.iter().map(|c| f64::from(c.value)).sum();
    let mut kept: Vec<(u32, f64)> =
        room.candidates.iter().map(|c| (c.id, f64::from(c.value) / total)).collect();
    kept.sort_by_key(|k| k.0);
    kept
}

fn assert_close(got: &[(u32, f64)], expected: &[(u32, f64)], what: &str) {
    let visible = |kept: &[(u32, f64)]| -> Vec<(u32, f64)> {
        // Weights that an f32 cannot hold may be missing.
        kept.iter().copied().filter(|k| k.1 > 1e-30).collect()
    };
    let (got, expected) = (visible(got), visible(expected));
    let ids = |kept: &[(u32, f64)]| -> Vec<u32> { kept.iter().map(|k| k.0).collect() };
    assert_eq!(ids(&got), ids(&expected), "{what}");
    for (g, e) in got.iter().zip(&expected) {
        assert!((g.1 - e.1).abs() <= 1e-5 * e.1, "{what}: token {} {} {}", g.0, g.1, e.1);
    }
}

fn any_sampling() -> impl Strategy<Value = Sampling> {
    let top_k = prop_oneof![Just(0u32), 1..40u32, 100..400u32];
    let top_p = prop_oneof![Just(1.0f32), 0.01..1.0f32, 0.9..1.0f32];
    let min_p = prop_oneof![Just(0.0f32), 0.0..1.0f32, 0.0..0.05f32];
    (0.05..4.0f32, top_k, top_p, min_p, any::<u64>()).prop_map(
        |(temperature, top_k, top_p, min_p, seed)| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            ..Sampling::default()
        },
    )
}

/// Logits with many ties (whole numbers), few ties, and tokens that cannot come.
fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let one = prop_oneof![
        4 => -20.0..20.0f32,
        4 => (-5..5i32).prop_map(|x| x as f32),
        1 => Just(f32::NEG_INFINITY),
    ];
    proptest::collection::vec(one, 1..1500)
        .prop_filter("one token can come", |x| x.iter().any(|v| v.is_finite()))
}

proptest! {
    #[test]
    fn filters_keep_what_the_definition_keeps(sampling in any_sampling(), logits in any_logits()) {
        let (expected, margin) = naive(&sampling, &logits);
        prop_assume!(margin > 1e-5);
        assert_close(&filtered(&sampling, &logits), &expected, "filter");
    }

    #[test]
    fn a_draw_falls_on_a_kept_token(sampling in any_sampling(), logits in any_logits()) {
        let (kept, margin) = naive(&sampling, &logits);
        prop_assume!(margin > 1e-5);
        let mut scratch = Scratch::with_vocab(logits.len());
        let mut sampler = Sampler::new(sampling, &[], &[]);
        for position in 0..20 {
            let choice = sampler.sample(&mut logits.clone(), position, &mut scratch).unwrap();
            prop_assert!(kept.iter().any(|k| k.0 == choice.token.0));
        }
    }

    #[test]
    fn best_tokens_are_those_of_a_sort(logits in any_logits(), k in 1..600usize) {
        let mut got = Vec::new();
        nucleus::select_best(&logits, k, &mut got);
        nucleus::sort_best(&mut got);
        let mut all: Vec<u32> = (0..logits.len() as u32).collect();
        all.sort_by(|&a, &b| {
            logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b))
        });
        all.truncate(k);
        let ids: Vec<u32> = got.iter().map(|c: &Candidate| c.id).collect();
        prop_assert_eq!(ids, all);
    }

    #[test]
    fn greedy_takes_the_first_of_the_best(logits in any_logits()) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let first = logits.iter().position(|&x| x == max).unwrap();
        let mut scratch = Scratch::with_vocab(logits.len());
        let mut sampler = Sampler::new(Sampling::greedy(), &[], &[]);
        let choice = sampler.sample(&mut logits.clone(), 3, &mut scratch).unwrap();
        prop_assert_eq!(choice.token.0 as usize, first);
    }

    #[test]
    fn logprobs_are_the_log_softmax_of_the_raw_logits(
        logits in any_logits(),
        bias in proptest::collection::vec((0..40u32, -100.0..100.0f32), 0..4),
        repetition in prop_oneof![Just(1.0f32), 0.5..2.0f32],
        n in 0..12u32,
    ) {
        let sampling = Sampling {
            n_logprobs: Some(n),
            repetition_penalty: repetition,
            logit_bias: bias.into_iter().map(|(t, b)| (TokenId(t), b)).collect(),
            ..Sampling::default()
        };
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let total = max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
        let mut scratch = Scratch::with_vocab(logits.len());
        let history = ([TokenId(1), TokenId(9_999)], [TokenId(0)]);
        let mut sampler = Sampler::new(sampling.clone(), &history.0, &history.1);
        let choice = sampler.sample(&mut logits.clone(), 0, &mut scratch).unwrap();
        // Whether they are asked for does not change the token.
        let mut silent =
            Sampler::new(Sampling { n_logprobs: None, ..sampling }, &history.0, &history.1);
        let same = silent.sample(&mut logits.clone(), 0, &mut scratch).unwrap();
        prop_assert_eq!((same.token, same.logprob, same.top), (choice.token, None, Vec::new()));
        let exact = |t: TokenId| f64::from(logits[t.0 as usize]) - total;
        prop_assert!((f64::from(choice.logprob.unwrap()) - exact(choice.token)).abs() < 1e-5);
        prop_assert_eq!(choice.top.len(), (n as usize).min(logits.len()));
        for &(token, logprob) in &choice.top {
            let exact = exact(token) as f32;
            prop_assert!(logprob == exact || (logprob - exact).abs() < 1e-5);
        }
        prop_assert!(choice.top.is_sorted_by(|a, b| a.1 >= b.1));
    }

    #[test]
    fn candidates_are_the_best_of_the_penalised_log_softmax(
        logits in any_logits(),
        repetition in prop_oneof![Just(1.0f32), 0.5..2.0f32],
        presence in prop_oneof![Just(0.0f32), -2.0..2.0f32],
        n in 1..40u32,
    ) {
        let sampling = Sampling {
            n_candidates: n,
            repetition_penalty: repetition,
            presence_penalty: presence,
            ..Sampling::default()
        };
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let total = max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
        let mut expected: Vec<f64> = logits.iter().map(|&x| f64::from(x) - total).collect();
        for (token, logprob) in expected.iter_mut().enumerate().take(3) {
            *logprob *= f64::from(repetition);
            *logprob -= if token == 2 { f64::from(presence) } else { 0.0 };
        }
        let mut scratch = Scratch::with_vocab(logits.len());
        // Token 2 is told as the caller's choice.
        let mut sampler = Sampler::new(sampling, &[TokenId(0), TokenId(1)], &[]);
        sampler.remember(TokenId(2));
        let choice = sampler.sample(&mut logits.clone(), 0, &mut scratch).unwrap();
        prop_assert_eq!((choice.token, choice.logprob), (choice.top[0].0, Some(choice.top[0].1)));
        prop_assert_eq!(choice.top.len(), (n as usize).min(logits.len()));
        let close = |a: f64, b: f64| a == b || (a - b).abs() < 1e-4;
        for &(token, logprob) in &choice.top {
            prop_assert!(close(f64::from(logprob), expected[token.0 as usize]));
        }
        expected.sort_by(|a, b| b.total_cmp(a));
        for (&(_, logprob), &expected) in choice.top.iter().zip(&expected) {
            prop_assert!(close(f64::from(logprob), expected));
        }
        // Giving candidates changes nothing.
        let again = sampler.sample(&mut logits.clone(), 1, &mut scratch).unwrap();
        prop_assert_eq!(again, choice);
    }

    #[test]
    fn penalties_follow_their_formulas(
        prompt in proptest::collection::vec(0..30u32, 0..20),
        answer in proptest::collection::vec(0..30u32, 0..20),
        repetition in prop_oneof![Just(1.0f32), 0.5..2.0f32],
        frequency in prop_oneof![Just(0.0f32), -2.0..2.0f32],
        presence in prop_oneof![Just(0.0f32), -2.0..2.0f32],
        logit_bias in proptest::collection::vec((0..33u32, -5.0..5.0f32), 0..4),
        logits in proptest::collection::vec(-10.0..10.0f32, 30),
    ) {
        let logit_bias: Vec<_> = logit_bias.into_iter().map(|(t, bias)| (TokenId(t), bias)).collect();
        let sampling = Sampling {
            logit_bias: logit_bias.clone(),
            repetition_penalty: repetition,
            frequency_penalty: frequency,
            presence_penalty: presence,
            ..Sampling::greedy()
        };
        let tokens = |ids: &[u32]| -> Vec<TokenId> { ids.iter().map(|&t| TokenId(t)).collect() };
        // The last tokens of the answer arrive one by one, as they do when they are sampled.
        let (first, last) = answer.split_at(answer.len() / 2);
        let mut seen = Seen::new(&sampling, &tokens(&prompt), &tokens(first));
        for &token in last {
            seen.push(&sampling, TokenId(token));
        }
        let mut got = logits.clone();
        // Steps that are on their way keep what they were told.
        let told = Arc::clone(seen.moved());
        let before = told.to_vec();
        let mut later = seen.clone();
        later.push(&sampling, TokenId(7));
        prop_assert_eq!(&*told, &before);
        seen.apply(&mut got);
        for (id, (&raw, &got)) in (0u32..).zip(logits.iter().zip(&got)) {
            let count = answer.iter().filter(|&&t| t == id).count() as f32;
            let mut expected = raw;
            if count > 0.0 || prompt.contains(&id) {
                expected = if raw > 0.0 { raw / repetition } else { raw * repetition };
            }
            expected -= count * frequency;
            expected -= if count > 0.0 { presence } else { 0.0 };
            expected += logit_bias.iter().filter(|(t, _)| t.0 == id).map(|(_, b)| b).sum::<f32>();
            prop_assert!((got - expected).abs() < 1e-4, "token {} {} {}", id, got, expected);
        }
    }
}

/// Draws many tokens and compares their counts with the definition's probabilities.
fn chi_square(sampling: &Sampling, logits: &[f32], n: u32) -> (f64, usize) {
    let (kept, _) = naive(sampling, logits);
    let mut counts = vec![0u32; logits.len()];
    let mut scratch = Scratch::with_vocab(logits.len());
    let mut sampler = Sampler::new(sampling.clone(), &[], &[]);
    for position in 0..n {
        let choice = sampler.sample(&mut logits.to_vec(), position, &mut scratch).unwrap();
        counts[choice.token.0 as usize] += 1;
    }
    let mut sum = 0.0;
    let (mut rare, mut rare_expected) = (0.0, 0.0);
    let mut cells = 0;
    for &(id, p) in &kept {
        let expected = p * f64::from(n);
        let got = f64::from(counts[id as usize]);
        if expected < 8.0 {
            rare += got;
            rare_expected += expected;
        } else {
            sum += (got - expected).powi(2) / expected;
            cells += 1;
        }
    }
    if rare_expected > 0.0 {
        sum += (rare - rare_expected).powi(2) / rare_expected;
        cells += 1;
    }
    (sum, cells - 1)
}

#[test]
fn draws_follow_the_distribution() {
    let logits: Vec<f32> = (0..1300).map(|i| ((i * 37 % 101) as f32).sqrt() * 0.9).collect();
    let base = Sampling { seed: 20_260, ..Sampling::default() };
    let cases = [
        base.clone(),
        Sampling { temperature: 0.4, ..base.clone() },
        Sampling { top_k: 30, ..base.clone() },
        Sampling { top_p: 0.5, ..base.clone() },
        Sampling { min_p: 0.3, ..base.clone() },
        Sampling { top_k: 200, top_p: 0.8, min_p: 0.1, ..base },
    ];
    for sampling in cases {
        let (chi, freedom) = chi_square(&sampling, &logits, 6_000);
        // Mean `freedom`, variance twice that: five deviations, and the seed is fixed.
        let limit = freedom as f64 + 5.0 * (2.0 * freedom as f64).sqrt();
        assert!(chi < limit, "{sampling:?}: {chi} of {freedom}");
        assert!(freedom > 10, "the case draws from many tokens: {sampling:?}");
    }
}

#[test]
fn keeps_what_hugging_face_keeps() {
    let golden = include_str!("../../tests/golden/sampling.txt");
    let lines: Vec<&str> = golden.lines().collect();
    assert_eq!(lines.len() % 4, 0);
    for case in lines.chunks(4) {
        let numbers = |i: usize| case[i].split(' ').map(|x| x.parse::<f32>().unwrap());
        let p: Vec<f32> = numbers(0).collect();
        let sampling = Sampling {
            temperature: p[0],
            top_k: p[1] as u32,
            top_p: p[2],
            min_p: p[3],
            repetition_penalty: p[4],
            ..Sampling::default()
        };
        let prompt: Vec<TokenId> = numbers(1).map(|t| TokenId(t as u32)).collect();
        let mut logits: Vec<f32> = numbers(2).collect();
        let pair = |s: &str| s.split_once(':').map(|(i, p)| (i.to_owned(), p.to_owned())).unwrap();
        let expected: Vec<(u32, f64)> = case[3]
            .split(' ')
            .map(pair)
            .map(|(id, p)| (id.parse().unwrap(), p.parse().unwrap()))
            .collect();
        Seen::new(&sampling, &prompt, &[]).apply(&mut logits);
        let got = filtered(&sampling, &logits);
        let ids = |kept: &[(u32, f64)]| -> Vec<u32> { kept.iter().map(|k| k.0).collect() };
        assert_eq!(ids(&got), ids(&expected), "{sampling:?}");
        for (g, e) in got.iter().zip(&expected) {
            assert!((g.1 - e.1).abs() < 1e-6, "{sampling:?}: token {}", g.0);
        }
    }
}

#[test]
fn same_seed_same_answer_whatever_else_was_drawn() {
    let logits: Vec<f32> = (0..700).map(|i| (i % 13) as f32 * 0.3).collect();
    let sampling = Sampling { seed: 5, top_p: 0.95, ..Sampling::default() };
    let mut scratch = Scratch::with_vocab(logits.len());
    let mut one = Sampler::new(sampling.clone(), &[], &[]);
    let whole: Vec<TokenId> =
        (0..50).map(|p| one.sample(&mut logits.clone(), p, &mut scratch).unwrap().token).collect();
    // A second sampler takes over in the middle, with others drawing between.
    let mut two = Sampler::new(sampling.clone(), &[], &whole[..20]);
    let mut other = Sampler::new(Sampling { seed: 6, ..sampling }, &[], &[]);
    for p in 20..50 {
        other.sample(&mut logits.clone(), p, &mut scratch).unwrap();
        let again = two.sample(&mut logits.clone(), p, &mut scratch).unwrap().token;
        assert_eq!(again, whole[p as usize]);
    }
    assert!(whole.iter().any(|t| *t != whole[0]), "the draws differ from each other");
}

#[test]
fn logits_that_are_not_numbers_are_an_error_and_change_nothing() {
    let mut scratch = Scratch::with_vocab(40);
    for bad in [f32::NAN, f32::INFINITY] {
        for sampling in [Sampling::greedy(), Sampling { top_k: 3, ..Sampling::default() }] {
            let mut sampler = Sampler::new(sampling, &[], &[]);
            let mut logits = vec![0.5f32; 40];
            logits[17] = bad;
            let error = sampler.sample(&mut logits, 9, &mut scratch).unwrap_err();
            assert_eq!(error, SampleError::Logits { position: 9 });
            let mut logits = vec![0.5f32; 40];
            assert!(sampler.sample(&mut logits, 9, &mut scratch).is_ok());
        }
    }
    let mut nothing = vec![f32::NEG_INFINITY; 40];
    let mut sampler = Sampler::new(Sampling::greedy(), &[], &[]);
    assert!(sampler.sample(&mut nothing, 0, &mut scratch).is_err());
}

#[test]
fn the_smallest_temperatures_are_greedy() {
    let logits: Vec<f32> = (0..600).map(|i| ((i * 7) % 599) as f32 * 0.01).collect();
    let best = logits.iter().position(|&x| x == 598.0 * 0.01).unwrap() as u32;
    let mut scratch = Scratch::with_vocab(logits.len());
    for temperature in [1e-6, f32::MIN_POSITIVE, 1e-45] {
        for top_p in [1.0, 0.9] {
            let sampling = Sampling { temperature, top_p, ..Sampling::default() };
            let mut sampler = Sampler::new(sampling, &[], &[]);
            let choice = sampler.sample(&mut logits.clone(), 1, &mut scratch).unwrap();
            assert_eq!(choice.token.0, best);
        }
    }
}

#[test]
fn bias_forces_and_forbids() {
    let mut scratch = Scratch::with_vocab(8);
    let force = Sampling { logit_bias: vec![(TokenId(6), 100.0)], ..Sampling::default() };
    let forbid = Sampling { logit_bias: vec![(TokenId(0), -100.0)], ..Sampling::greedy() };
    for position in 0..50 {
        let mut logits = vec![3.0f32, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let mut sampler = Sampler::new(force.clone(), &[], &[]);
        let token = sampler.sample(&mut logits, position, &mut scratch).unwrap().token;
        assert_eq!(token, TokenId(6));
    }
    let mut logits = vec![3.0f32, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let choice = Sampler::new(forbid, &[], &[]).sample(&mut logits, 0, &mut scratch).unwrap();
    assert_eq!(choice.token, TokenId(1));
}
