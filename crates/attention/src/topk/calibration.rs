//! What is made of the queries and keys of a text.

use super::compact;
use super::frames::principal_frame;
use super::profile::Profile;
use super::run::TopKShape;

/// First tokens that are left out: their keys are unlike all others, and they are always attended.
const N_SINKS: usize = 16;
/// Keys of a text that are kept of each head, about, and tokens whose queries are.
const N_KEYS: usize = 512;
const N_QUERIES: usize = 96;

/// Sums over the queries and keys of a text, from which a profile's averages are made.
#[derive(Clone, Debug)]
pub struct Calibration {
    shape: TopKShape,
    /// `[kv layer][G]`.
    heads: Vec<HeadSums>,
    /// `[layer][H]` sums of cosines of adjacent queries, and how many.
    similarity: Vec<(f64, u32)>,
}

#[derive(Clone, Debug, Default)]
struct HeadSums {
    n: u32,
    /// `[D]`.
    sum: Vec<f64>,
    /// `[D][D]`.
    moments: Vec<f64>,
    /// `[D]` of absolute values.
    keys: Vec<f64>,
    queries: Vec<f64>,
}

/// Who is shown the queries and keys of a text as they are computed.
pub trait Witness {
    /// The queries of one layer, `[T][H D]`, of adjacent tokens of a text from place `start` on.
    fn queries(&mut self, layer: usize, kv_layer: usize, queries: &[f32], start: usize);

    /// The keys of one head, `[T][D]`, of a text from place `start` on.
    fn keys(&mut self, kv_layer: usize, head: usize, keys: &[f32], start: usize);
}

impl Calibration {
    /// Sums over nothing.
    pub fn new(shape: TopKShape) -> Self {
        let d = shape.head_dim;
        let sums = HeadSums {
            n: 0,
            sum: vec![0.0; d],
            moments: vec![0.0; d * d],
            keys: vec![0.0; d],
            queries: vec![0.0; d],
        };
        Calibration {
            heads: vec![sums; shape.n_kv_layers * shape.n_kv_heads],
            similarity: vec![(0.0, 0); shape.n_layers * shape.n_kv_heads * shape.group],
            shape,
        }
    }

    /// Writes the averages to a profile of the same shape.
    pub fn finish(&self, profile: &mut Profile) {
        let d = self.shape.head_dim;
        let average = |&(sum, n): &(f64, u32)| (sum / f64::from(n.max(1))) as f32;
        profile.similarity = self.similarity.iter().map(average).collect();
        (profile.mean, profile.channels, profile.principal) = Default::default();
        profile.lengths.clear();
        for sums in &self.heads {
            let n = f64::from(sums.n.max(1));
            profile.mean.extend(sums.sum.iter().map(|x| (x / n) as f32));
            let mut channels: Vec<u16> = (0..d as u16).collect();
            let weight = |c: u16| sums.queries[usize::from(c)] * sums.keys[usize::from(c)];
            channels.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)).then(a.cmp(&b)));
            profile.channels.extend(channels);
            // As they would be read again, so that a stored profile finds the same.
            let (rows, moments) = principal_frame(&sums.moments, d, d);
            profile.lengths.extend(moments.iter().map(|x| (x / n).sqrt() as f32));
            profile.principal.extend(rows.chunks_exact(d).map(compact::rounded));
        }
    }
}

impl Witness for Calibration {
    fn queries(&mut self, layer: usize, kv_layer: usize, queries: &[f32], start: usize) {
        let TopKShape { n_kv_heads, group, head_dim: d, .. } = self.shape;
        let n_heads = n_kv_heads * group;
        let n_sinks = N_SINKS.saturating_sub(start);
        let rows: Vec<&[f32]> = queries.chunks_exact(n_heads * d).skip(n_sinks).collect();
        for (row, next) in rows.iter().zip(rows.iter().skip(1)) {
            for head in 0..n_heads {
                let range = head * d..(head + 1) * d;
                let cosine = nuthatch_backend::topk::cosine(&row[range.clone()], &next[range]);
                let (sum, n) = &mut self.similarity[layer * n_heads + head];
                (*sum, *n) = (*sum + f64::from(cosine), *n + 1);
            }
        }
        for row in &rows {
            for (head, query) in row.chunks_exact(d).enumerate() {
                let sums = &mut self.heads[kv_layer * n_kv_heads + head / group];
                sums.queries.iter_mut().zip(query).for_each(|(s, x)| *s += f64::from(x.abs()));
            }
        }
    }

    fn keys(&mut self, kv_layer: usize, head: usize, keys: &[f32], start: usize) {
        let d = self.shape.head_dim;
        let sums = &mut self.heads[kv_layer * self.shape.n_kv_heads + head];
        for key in keys.chunks_exact(d).skip(N_SINKS.saturating_sub(start)) {
            sums.n += 1;
            for (i, &a) in key.iter().enumerate() {
                sums.sum[i] += f64::from(a);
                sums.keys[i] += f64::from(a.abs());
                for (moment, &b) in sums.moments[i * d..(i + 1) * d].iter_mut().zip(key) {
                    *moment += f64::from(a) * f64::from(b);
                }
            }
        }
    }
}

/// Keys and queries of a text themselves, of some tokens of it.
#[derive(Clone, Debug)]
pub struct KeptRows {
    shape: TopKShape,
    /// Of so many tokens, the key of one is kept, and the queries of one.
    key_stride: usize,
    query_stride: usize,
    /// `[kv layer][G]`.
    pub heads: Vec<HeadRows>,
}

/// Those of one key/value head.
#[derive(Clone, Debug, Default)]
pub struct HeadRows {
    /// `[n][D]`, in the order of the text.
    pub keys: Vec<f32>,
    /// `[n][group][D]`.
    pub queries: Vec<f32>,
    /// How many of the keys come before each token whose queries these are.
    pub n_seen: Vec<usize>,
}

impl KeptRows {
    /// Nothing yet of a text of this many tokens.
    pub fn new(shape: TopKShape, n_tokens: usize) -> Self {
        KeptRows {
            key_stride: (n_tokens / N_KEYS).max(1),
            query_stride: (n_tokens / N_QUERIES).max(1),
            heads: vec![HeadRows::default(); shape.n_kv_layers * shape.n_kv_heads],
            shape,
        }
    }
}

impl Witness for KeptRows {
    fn queries(&mut self, _layer: usize, kv_layer: usize, queries: &[f32], start: usize) {
        let TopKShape { n_kv_heads, group, head_dim: d, .. } = self.shape;
        let rows = queries.chunks_exact(n_kv_heads * group * d).enumerate();
        for (place, row) in rows.map(|(i, row)| (start + i, row)) {
            if (place + 1).is_multiple_of(self.query_stride) {
                for (head, queries) in row.chunks_exact(group * d).enumerate() {
                    let head = &mut self.heads[kv_layer * n_kv_heads + head];
                    head.queries.extend(queries);
                    head.n_seen.push(place.saturating_sub(N_SINKS).div_ceil(self.key_stride));
                }
            }
        }
    }

    fn keys(&mut self, kv_layer: usize, head: usize, keys: &[f32], start: usize) {
        let d = self.shape.head_dim;
        let head = &mut self.heads[kv_layer * self.shape.n_kv_heads + head];
        for (place, key) in keys.chunks_exact(d).enumerate().map(|(i, key)| (start + i, key)) {
            if place >= N_SINKS && (place - N_SINKS).is_multiple_of(self.key_stride) {
                head.keys.extend(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topk::Retriever;

    const SHAPE: TopKShape =
        TopKShape { n_layers: 2, n_kv_layers: 1, n_kv_heads: 2, group: 2, head_dim: 4 };

    #[test]
    fn averages_are_those_of_the_tokens_after_the_sinks() {
        let mut calibration = Calibration::new(SHAPE);
        let mut keys = vec![100.0; N_SINKS * 4];
        keys.extend([1.0, 0.0, -3.0, 0.0, 3.0, 0.0, -5.0, 0.5]);
        // In two pieces.
        calibration.keys(0, 1, &keys[..9 * 4], 0);
        calibration.keys(0, 1, &keys[9 * 4..], 9);
        let mut queries = vec![7.0; N_SINKS * 16];
        queries.extend([1.0; 16]);
        queries.extend([1.0, -1.0, 1.0, -1.0].repeat(4));
        calibration.queries(1, 0, &queries, 0);
        let mut profile = Profile::empty(&SHAPE);
        calibration.finish(&mut profile);
        assert_eq!(profile.mean[4..], [2.0, 0.0, -4.0, 0.25]);
        assert_eq!(profile.channels[4..], [2, 0, 3, 1]);
        assert_eq!(profile.similarity[4..], [0.0; 4]);
        let first = &profile.principal[4];
        assert!(first[2].abs() > 0.8 && first[0] * first[2] < 0.0, "{first:?}");
        assert!(Profile::from_json(&serde_json::to_string(&profile).unwrap()).is_ok());
        let digest = profile.digest(Retriever::DoubleSparsity { channels: 2 }).unwrap();
        assert_eq!(digest.frame_of(1, 4), [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
        // (1 + 9 + 9 + 25 + 0.25) / 2 in all directions together.
        let squares = profile.lengths[4..].iter().map(|x| x * x).sum::<f32>();
        assert!((squares - 22.125).abs() < 1e-3, "{:?}", profile.lengths);
    }

    #[test]
    fn queries_are_kept_with_the_keys_before_them() {
        let text: Vec<f32> = (0..40 * 4).map(|i| (i / 4) as f32).collect();
        let queries: Vec<f32> = (0..40 * 16).map(|i| (i / 16) as f32).collect();
        let mut kept = KeptRows::new(SHAPE, 0);
        (kept.key_stride, kept.query_stride) = (3, 16);
        for (start, end) in [(0, 17), (17, 40)] {
            kept.queries(1, 0, &queries[start * 16..end * 16], start);
            kept.keys(0, 1, &text[start * 4..end * 4], start);
        }
        let head = &kept.heads[1];
        let places: Vec<f32> = head.keys.chunks_exact(4).map(|key| key[0]).collect();
        assert_eq!(places, [16.0, 19.0, 22.0, 25.0, 28.0, 31.0, 34.0, 37.0]);
        assert_eq!(head.queries.len(), 2 * 2 * 4);
        assert_eq!((head.queries[0], head.queries[8]), (15.0, 31.0));
        assert_eq!(head.n_seen, [0, 5], "the key of the token itself is not among them");
    }
}
