//! Hash codes: texts to learn them from, all heads beside each other, and how much they find.

use std::io::{self, Write as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use nuthatch_backend::Backend;
use nuthatch_engine::LoadedModel;
use nuthatch_engine::topk::{HashTexts, HeadRows, KeptRows, Profile, learn as learn_frame, recall};

use super::{TASKS, progress};
use crate::eval::Prompts;

/// Questions that codes are learnt from, and others that they are judged by.
const N_TAUGHT: u64 = 6;
const N_JUDGED: u64 = 3;
/// Pieces of prose that they are learnt from too.
const N_PROSE: usize = 2;
/// Of the first question; importance is measured on others.
const SEED: u64 = 1_000_000;

/// Keys and queries of all heads.
pub(super) struct Texts {
    taught: Vec<KeptRows>,
    judged: Vec<KeptRows>,
}

impl Texts {
    /// Reads questions and prose with the model.
    pub(super) fn read<B: Backend>(
        model: &mut LoadedModel<B>,
        prompts: &Prompts,
        length: u32,
    ) -> anyhow::Result<Self> {
        let bar = progress("texts for hash codes", (N_TAUGHT + N_JUDGED) as usize + N_PROSE)?;
        let mut texts = Texts { taught: Vec::new(), judged: Vec::new() };
        let prose = prompts.prose_tokens()?;
        // A text that is shorter than a piece is read once.
        let pieces = prose.chunks((prose.len() / N_PROSE).max(length as usize)).take(N_PROSE);
        for piece in pieces.map(|piece| &piece[..piece.len().min(length as usize)]) {
            texts.taught.push(model.keep_rows(piece)?);
            bar.inc(1);
        }
        for i in 0..N_TAUGHT + N_JUDGED {
            let question = prompts.question(TASKS[i as usize % TASKS.len()], length, SEED + i)?;
            let rows = model.keep_rows(&question)?;
            if i < N_TAUGHT {
                texts.taught.push(rows)
            } else {
                texts.judged.push(rows)
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(texts)
    }
}

/// What one head learnt, and the share of the best keys that it finds with it and found before.
struct Learnt {
    frame: Vec<f32>,
    recall: Option<(f64, f64)>,
}

/// Learns codes of this many bits for all heads, and says what they are good for.
pub(super) fn learn(profile: &mut Profile, texts: &Texts, bits: usize) -> anyhow::Result<()> {
    let (start, d) = (profile.random_frame(bits), profile.head_dim as usize);
    let group = (profile.n_heads / profile.n_kv_heads.max(1)) as usize;
    let n_heads = (profile.n_kv_layers * profile.n_kv_heads) as usize;
    let bar = progress("hash codes", n_heads)?;
    let one = |head: usize| {
        let of = |texts: &[KeptRows]| -> Vec<HeadRows> {
            texts.iter().map(|text| text.heads[head].clone()).collect()
        };
        let (taught, judged) = (of(&texts.taught), of(&texts.judged));
        let mean = &profile.mean[head * d..][..d];
        let taught: Vec<&HeadRows> = taught.iter().collect();
        let judged: Vec<&HeadRows> = judged.iter().collect();
        let frame = learn_frame(&HashTexts { texts: &taught, mean, group }, &start);
        let judged = HashTexts { texts: &judged, mean, group };
        let recall = recall(&judged, &frame).zip(recall(&judged, &start));
        bar.inc(1);
        Learnt { frame, recall }
    };
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(n_heads)));
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(|| {
                loop {
                    let head = next.fetch_add(1, Ordering::Relaxed);
                    if head >= n_heads {
                        return;
                    }
                    let learnt = one(head);
                    done.lock().unwrap_or_else(|e| e.into_inner()).push((head, learnt));
                }
            });
        }
    });
    bar.finish_and_clear();
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|&(head, _)| head);
    profile.set_hash(done.iter().map(|(_, learnt)| &learnt.frame[..]));
    let recalls: Vec<(f64, f64)> = done.iter().filter_map(|(_, learnt)| learnt.recall).collect();
    if !recalls.is_empty() {
        let average = |part: fn(&(f64, f64)) -> f64| {
            100.0 * recalls.iter().map(part).sum::<f64>() / recalls.len() as f64
        };
        writeln!(
            io::stderr().lock(),
            "hash codes of {bits} bits find {:.1} % of the best tenth of the keys, random ones {:.1} %",
            average(|r| r.0),
            average(|r| r.1),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nuthatch_engine::topk::{Retriever, TopKShape, Witness as _};

    /// Two heads over one key/value head of each of two layers.
    const SHAPE: TopKShape =
        TopKShape { n_layers: 2, n_kv_layers: 2, n_kv_heads: 1, group: 2, head_dim: 12 };

    fn text(n: usize, seed: usize) -> KeptRows {
        let mut rows = KeptRows::new(SHAPE, n);
        let waves = |n: usize, step: usize| -> Vec<f32> {
            (0..n).map(|i| ((i * i * step + seed) as f32 * 0.37).sin()).collect()
        };
        for layer in 0..2 {
            rows.queries(layer, layer, &waves(n * 24, 5 + layer), 0);
            rows.keys(layer, 0, &waves(n * 12, 3 + layer), 0);
        }
        rows
    }

    #[test]
    fn every_head_has_codes_of_its_own_and_those_of_short_texts_are_random() {
        let learnt = |n: usize| {
            let mut profile = Profile::empty(&SHAPE);
            profile.mean = vec![0.0; 24];
            let texts = Texts { taught: vec![text(n, 1), text(n, 2)], judged: vec![text(n, 3)] };
            learn(&mut profile, &texts, 64).unwrap();
            assert_eq!(profile.hash_bits(), 64);
            let json = serde_json::to_string(&profile).unwrap();
            Profile::from_json(&json).unwrap().digest(Retriever::Hata { bits: 64 }).unwrap()
        };
        let (long, short) = (learnt(300), learnt(40));
        assert_ne!(long.frame_of(0, 12), long.frame_of(1, 12));
        assert_eq!(short.frame_of(0, 12), short.frame_of(1, 12));
        assert_eq!(learnt(300), long, "the same however threads share the heads");
    }
}
