//! Learning what hash codes project keys on.
//!
//! A random frame spends its bits on all directions alike. A learnt one spends them where a model's
//! queries tell its keys apart, and finds more of them with as many bits:
//!
//! ```text
//!   h(x)   tanh(slope * frame . x * sqrt(D) / |x|)         signs, made smooth; keys are centred
//!   p(k)   softmax over keys of SHARPNESS * h(q) . h(k) / bits
//!   loss   cross entropy of p and the best tenth of the keys, which weigh 20 to 1 by their rank
//! ```
//!
//! HATA's own loss (the distances of codes, weighted by those ranks, with a penalty for frames that
//! are not orthonormal) leaves a random frame almost as it is, and finds no more with it.
//!
//! Positions turn keys, so a frame knows only distances that it was taught: in texts that are longer it
//! finds less than a random one.

use super::calibration::HeadRows;
use super::compact;
use super::frames::Bell;

/// Share of the keys that count as best.
const BEST_SHARE: f64 = 0.1;
/// What the best of them weighs, when the last weighs 1.
const BEST_WEIGHT: f32 = 20.0;
const N_STEPS: usize = 300;
/// Queries and keys of one text that are looked at in a step.
const N_QUERIES: usize = 32;
const N_KEYS: usize = 256;
/// Of the first step; goes down to 0.
const RATE: f32 = 0.02;
/// Of the first step; three times as steep in the end.
const SLOPE: f32 = 0.5;
const SHARPNESS: f32 = 20.0;
/// A query that has fewer keys before it teaches nothing.
const N_SEEN_MIN: usize = 64;

/// What one key/value head is taught, or judged, by.
#[derive(Clone, Copy, Debug)]
pub struct HashTexts<'a> {
    /// Its keys and queries of some texts.
    pub texts: &'a [&'a HeadRows],
    /// `[D]` the average key, which is subtracted.
    pub mean: &'a [f32],
    /// Query heads.
    pub group: usize,
}

/// The share of the best keys that codes by a frame, `[bits][D]`, find when they choose as many, on
/// the average over all tokens; nothing if there is none.
pub fn recall(head: &HashTexts<'_>, frame: &[f32]) -> Option<f64> {
    let (d, group) = (head.mean.len(), head.group);
    let (mut sum, mut n) = (0.0, 0);
    for text in head.texts {
        let centred = |key: &[f32]| -> Vec<f32> {
            key.iter().zip(head.mean).map(|(x, mean)| x - mean).collect()
        };
        let codes: Vec<Vec<bool>> =
            text.keys.chunks_exact(d).map(|key| code(&centred(key), frame)).collect();
        for (queries, &n_seen) in text.queries.chunks_exact(group * d).zip(&text.n_seen) {
            let n_seen = n_seen.min(codes.len());
            if n_seen < N_SEEN_MIN {
                continue;
            }
            let (mut fits, mut agreements) = (vec![0.0; n_seen], vec![0.0; n_seen]);
            for query in queries.chunks_exact(d) {
                add_fits(query, &text.keys, &mut fits);
                let query = code(query, frame);
                for (sum, key) in agreements.iter_mut().zip(&codes) {
                    *sum += query.iter().zip(key).filter(|(a, b)| a == b).count() as f32;
                }
            }
            let (best, found) = (best_places(&fits), best_places(&agreements));
            let n_found = best.iter().filter(|place| found.contains(place)).count();
            sum += n_found as f64 / best.len() as f64;
            n += 1;
        }
    }
    (n > 0).then(|| sum / f64::from(n))
}

/// Adds the shares of a query's attention that fall on the first keys.
fn add_fits(query: &[f32], keys: &[f32], fits: &mut [f32]) {
    let d = query.len();
    let scale = 1.0 / (d as f32).sqrt();
    let keys = keys.chunks_exact(d).take(fits.len());
    let products: Vec<f32> = keys.map(|key| dot(query, key) * scale).collect();
    let most = products.iter().copied().fold(f32::MIN, f32::max);
    let total: f32 = products.iter().map(|x| (x - most).exp()).sum();
    fits.iter_mut().zip(products).for_each(|(fit, x)| *fit += (x - most).exp() / total);
}

fn code(x: &[f32], frame: &[f32]) -> Vec<bool> {
    frame.chunks_exact(x.len()).map(|row| dot(row, x) > 0.0).collect()
}

/// The best share of some numbers' places, best first; at least one.
fn best_places(scores: &[f32]) -> Vec<usize> {
    let mut places: Vec<usize> = (0..scores.len()).collect();
    let order = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
    let n = ((scores.len() as f64 * BEST_SHARE) as usize).max(1);
    if n < places.len() {
        places.select_nth_unstable_by(n, order);
        places.truncate(n);
    }
    places.sort_unstable_by(order);
    places
}

/// A frame, `[bits][D]`, that begins as `start` and was taught by these texts; `start` itself if they
/// are too short to teach.
pub fn learn(head: &HashTexts<'_>, start: &[f32]) -> Vec<f32> {
    let d = head.mean.len();
    let usable =
        |text: &&&HeadRows| text.n_seen.iter().any(|&n| n.min(text.keys.len() / d) >= N_SEEN_MIN);
    let texts: Vec<&HeadRows> = head.texts.iter().filter(usable).copied().collect();
    if texts.is_empty() {
        return start.to_vec();
    }
    let mut learner = Learner::new(d, start);
    let mut random = Bell::new(1);
    for step in 0..N_STEPS {
        let lesson = Lesson::draw(texts[step % texts.len()], head, &mut random);
        learner.step(&lesson, step);
    }
    // As it would be read again, so that it is judged as it will be used.
    learner.frame().chunks_exact(d).flat_map(compact::rounded).collect()
}

/// Queries and keys of one step, all of the same length.
struct Lesson {
    /// `[N_QUERIES][D]`.
    queries: Vec<f32>,
    /// `[N_KEYS][D]`, centred.
    keys: Vec<f32>,
    /// `[N_QUERIES][N_KEYS]` what the key should weigh for the query; below 0 where it comes later
    /// than the query.
    targets: Vec<f32>,
}

impl Lesson {
    fn draw(text: &HeadRows, head: &HashTexts<'_>, random: &mut Bell) -> Self {
        let (d, group) = (head.mean.len(), head.group);
        let n_keys = text.keys.len() / d;
        let mut below = |n: usize| ((random.unit() * n as f64) as usize).min(n - 1);
        let usable: Vec<usize> =
            (0..text.n_seen.len()).filter(|&i| text.n_seen[i].min(n_keys) >= N_SEEN_MIN).collect();
        let places: Vec<usize> = (0..N_KEYS).map(|_| below(n_keys)).collect();
        let mut lesson = Lesson { queries: vec![], keys: vec![], targets: vec![] };
        for &place in &places {
            let key = &text.keys[place * d..][..d];
            lesson.keys.extend(even(key.iter().zip(head.mean).map(|(x, mean)| x - mean)));
        }
        for _ in 0..N_QUERIES {
            let token = usable[below(usable.len())];
            let query = &text.queries[(token * group + below(group)) * d..][..d];
            lesson.queries.extend(even(query.iter().copied()));
            let seen: Vec<usize> =
                (0..N_KEYS).filter(|&i| places[i] < text.n_seen[token]).collect();
            let products: Vec<f32> =
                seen.iter().map(|&i| dot(query, &text.keys[places[i] * d..][..d])).collect();
            let start = lesson.targets.len();
            lesson.targets.resize(start + N_KEYS, -1.0);
            let targets = &mut lesson.targets[start..];
            seen.iter().for_each(|&i| targets[i] = 0.0);
            let best = if seen.is_empty() { vec![] } else { best_places(&products) };
            let fall = (BEST_WEIGHT - 1.0) / (best.len().max(2) - 1) as f32;
            let weight = |rank: usize| BEST_WEIGHT - fall * rank as f32;
            let total: f32 = (0..best.len()).map(weight).sum();
            for (rank, &i) in best.iter().enumerate() {
                targets[seen[i]] = weight(rank) / total;
            }
        }
        lesson
    }
}

/// The vector as long as one of ones.
fn even(x: impl Iterator<Item = f32>) -> Vec<f32> {
    let x: Vec<f32> = x.collect();
    let scale = (x.len() as f32).sqrt() / dot(&x, &x).sqrt().max(1e-6);
    x.iter().map(|x| x * scale).collect()
}

/// Adam, with the frame turned so that all bits of a row lie together.
struct Learner {
    d: usize,
    bits: usize,
    /// `[D][bits]`, as the others.
    frame: Vec<f32>,
    slopes: Vec<f32>,
    squares: Vec<f32>,
}

impl Learner {
    fn new(d: usize, start: &[f32]) -> Self {
        let bits = start.len() / d;
        let frame = (0..d * bits).map(|i| start[i % bits * d + i / bits]).collect();
        Learner { d, bits, frame, slopes: vec![0.0; d * bits], squares: vec![0.0; d * bits] }
    }

    fn frame(&self) -> Vec<f32> {
        (0..self.d * self.bits).map(|i| self.frame[i % self.d * self.bits + i / self.d]).collect()
    }

    fn step(&mut self, lesson: &Lesson, step: usize) {
        let (bits, done) = (self.bits, step as f32 / N_STEPS as f32);
        let slope = SLOPE * (1.0 + 2.0 * done);
        let smooth = |x: &[f32]| {
            let mut h = product(x, self.d, &self.frame, bits);
            h.iter_mut().for_each(|x| *x = (*x * slope).tanh());
            h
        };
        let (keys, queries) = (smooth(&lesson.keys), smooth(&lesson.queries));
        let off = distances(&queries, &keys, &lesson.targets, bits);
        let mut for_queries = product(&off, N_KEYS, &keys, bits);
        let mut for_keys = vec![0.0; N_KEYS * bits];
        add_turned_product(&off, N_KEYS, &queries, bits, &mut for_keys);
        let mut downhill = vec![0.0; self.d * bits];
        for (x, h, change) in
            [(&lesson.keys, &keys, &mut for_keys), (&lesson.queries, &queries, &mut for_queries)]
        {
            change.iter_mut().zip(h).for_each(|(g, h)| *g *= (1.0 - h * h) * slope);
            add_turned_product(x, self.d, change, bits, &mut downhill);
        }
        let rate = RATE * (1.0 - done);
        let (n, parts) = (step as i32 + 1, self.slopes.iter_mut().zip(&mut self.squares));
        let (first, second) = (1.0 - 0.9f32.powi(n), 1.0 - 0.99f32.powi(n));
        for ((x, g), (mean, square)) in self.frame.iter_mut().zip(downhill).zip(parts) {
            *mean = 0.9 * *mean + 0.1 * g;
            *square = 0.99 * *square + 0.01 * g * g;
            *x -= rate * (*mean / first) / ((*square / second).sqrt() + 1e-8);
        }
    }
}

/// `[N_QUERIES][N_KEYS]` how the loss falls with the products of codes.
fn distances(queries: &[f32], keys: &[f32], targets: &[f32], bits: usize) -> Vec<f32> {
    let sharpness = SHARPNESS / bits as f32;
    let mut off = Vec::with_capacity(targets.len());
    for (query, targets) in queries.chunks_exact(bits).zip(targets.chunks_exact(N_KEYS)) {
        let fit = |(key, &target): (&[f32], &f32)| {
            if target < 0.0 { f32::MIN } else { dot(query, key) * sharpness }
        };
        let fits: Vec<f32> = keys.chunks_exact(bits).zip(targets).map(fit).collect();
        let most = fits.iter().copied().fold(f32::MIN, f32::max);
        let total: f32 = fits.iter().map(|x| (x - most).exp()).sum();
        off.extend(fits.iter().zip(targets).map(|(x, &target)| {
            let share = if target < 0.0 { 0.0 } else { (x - most).exp() / total - target };
            share * sharpness / N_QUERIES as f32
        }));
    }
    off
}

/// `[n][k]` times `[k][width]`.
fn product(a: &[f32], k: usize, b: &[f32], width: usize) -> Vec<f32> {
    let mut out = vec![0.0; a.len() / k * width];
    for (row, out) in a.chunks_exact(k).zip(out.chunks_exact_mut(width)) {
        for (&x, b) in row.iter().zip(b.chunks_exact(width)) {
            out.iter_mut().zip(b).for_each(|(out, b)| *out += x * b);
        }
    }
    out
}

/// Adds `[n][k]` turned, times `[n][width]`, to `[k][width]`.
fn add_turned_product(a: &[f32], k: usize, b: &[f32], width: usize, out: &mut [f32]) {
    for (row, b) in a.chunks_exact(k).zip(b.chunks_exact(width)) {
        for (&x, out) in row.iter().zip(out.chunks_exact_mut(width)) {
            out.iter_mut().zip(b).for_each(|(out, b)| *out += x * b);
        }
    }
}

/// In eight sums, which a compiler may keep beside each other.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a8.iter().zip(b8) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topk::orthonormal_frame;

    const D: usize = 16;
    const GROUP: usize = 2;

    /// Keys that differ most in directions that no query has anything of.
    fn text(seed: u64) -> HeadRows {
        let mut random = Bell::new(seed);
        let mut rows = |n: usize, loud: f32, mute: f32| -> Vec<f32> {
            (0..n * D).map(|i| random.next() as f32 * if i % D < 4 { loud } else { mute }).collect()
        };
        let (keys, queries) = (rows(400, 1.0, 2.0), rows(40 * GROUP, 2.0, 0.1));
        HeadRows { keys, queries, n_seen: (0..40).map(|i| i * 10).collect() }
    }

    #[test]
    fn a_learnt_frame_finds_more_in_texts_that_it_was_not_taught_by() {
        let texts = [text(1), text(2), text(3)];
        let mean = vec![0.0; D];
        let taught: Vec<&HeadRows> = texts[..2].iter().collect();
        let start = orthonormal_frame(64, D, 3);
        let learnt = learn(&HashTexts { texts: &taught, mean: &mean, group: GROUP }, &start);
        let judged = HashTexts { texts: &[&texts[2]], mean: &mean, group: GROUP };
        let before = recall(&judged, &start).unwrap();
        let after = recall(&judged, &learnt).unwrap();
        assert!(before < 0.4 && after > before + 0.1, "{before} and {after}");
    }

    #[test]
    fn what_is_too_short_teaches_nothing() {
        let start = orthonormal_frame(64, D, 3);
        let short = HeadRows { n_seen: vec![3; 40], ..text(1) };
        let none = HeadRows { keys: vec![], ..text(1) };
        let mean = vec![0.0; D];
        for texts in [&[&short, &none][..], &[]] {
            let head = HashTexts { texts, mean: &mean, group: GROUP };
            assert_eq!(learn(&head, &start), start);
            assert_eq!(recall(&head, &start), None);
        }
        // Numbers that say nothing end in numbers.
        let flat = HeadRows { keys: vec![1.0; 400 * D], ..text(1) };
        let head = HashTexts { texts: &[&flat], mean: &[1.0; D], group: GROUP };
        assert!(learn(&head, &start).iter().all(|x| x.is_finite()));
    }
}
