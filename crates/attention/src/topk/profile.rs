//! What was measured of a model's heads.

use nuthatch_backend::{Digest, DigestKind};
use serde::{Deserialize, Serialize};

use super::compact;
use super::frames::orthonormal_frame;
use super::policy::{Policy, Retriever};
use super::run::TopKShape;

/// The seed of all random frames: digests of one model are the same in every process.
const FRAME_SEED: u64 = 0x6e75_7468_6174_6368;
/// The longest hash codes that are read.
const BITS_MAX: usize = 1024;

/// What was measured of a model's heads. Lists that are empty were not measured; everything works
/// without them, only less well.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Of the format; [`Profile::VERSION`].
    pub version: u32,
    /// Of the model's files, in hexadecimal.
    pub fingerprint: String,
    /// The command that made it.
    pub command: String,
    /// Layers of the model.
    pub n_layers: u32,
    /// Layers that own keys and values.
    pub n_kv_layers: u32,
    /// Query heads of a layer.
    pub n_heads: u32,
    /// Key/value heads of a layer.
    pub n_kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// `[layer][H]` how much the output moves when the head sees only sinks and recent tokens, from
    /// 0 to 1.
    #[serde(default)]
    pub importance: Vec<f32>,
    /// `[layer][H]` the average cosine of the queries of adjacent tokens.
    #[serde(default)]
    pub similarity: Vec<f32>,
    /// `[kv layer][G][D]` the average key.
    #[serde(default)]
    pub mean: Vec<f32>,
    /// `[kv layer][G][D]` channels, those that matter most to products first.
    #[serde(default)]
    pub channels: Vec<u16>,
    /// `[kv layer][G][n]` directions of width `D` in which keys are longest, longest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "compact")]
    pub principal: Vec<Vec<f32>>,
    /// `[kv layer][G][n]` how long keys are along these directions, root mean square.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lengths: Vec<f32>,
    /// `[kv layer][G][bits]` directions of width `D` whose signs are the bits of hash codes.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "compact")]
    pub hash: Vec<Vec<f32>>,
}

/// A profile that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// It is no JSON of this form.
    #[error("not a head profile: {0}")]
    Json(#[from] serde_json::Error),
    /// Another version of the format.
    #[error("a head profile of version {found}; this program reads version {}", Profile::VERSION)]
    Version {
        /// Of the profile.
        found: u32,
    },
    /// A list has the wrong length, or a number in it makes no sense.
    #[error(
        "{list} of the head profile has {found} numbers where {expected} finite ones were expected"
    )]
    List {
        /// Which list.
        list: &'static str,
        /// Numbers that are finite.
        found: usize,
        /// Numbers that there should be.
        expected: usize,
    },
    /// It was made for a model of another shape.
    #[error("the head profile is of a model with {found}, not {expected}")]
    Shape {
        /// Layers, heads and widths of the profile.
        found: String,
        /// Those of the model.
        expected: String,
    },
    /// A line of a table of importances cannot be read.
    #[error("line {line} of the table is not {expected} numbers")]
    Table {
        /// Counted from 1.
        line: usize,
        /// Numbers that a line should have.
        expected: usize,
    },
}

impl Profile {
    /// Of the format.
    pub const VERSION: u32 = 1;

    /// A profile of which nothing was measured.
    pub fn empty(shape: &TopKShape) -> Self {
        Profile {
            version: Self::VERSION,
            n_layers: shape.n_layers as u32,
            n_kv_layers: shape.n_kv_layers as u32,
            n_heads: (shape.n_kv_heads * shape.group) as u32,
            n_kv_heads: shape.n_kv_heads as u32,
            head_dim: shape.head_dim as u32,
            ..Profile::default()
        }
    }

    /// Reads a profile and checks every list of it.
    pub fn from_json(text: &str) -> Result<Self, ProfileError> {
        let profile: Profile = serde_json::from_str(text)?;
        if profile.version != Self::VERSION {
            return Err(ProfileError::Version { found: profile.version });
        }
        profile.check()?;
        Ok(profile)
    }

    fn check(&self) -> Result<(), ProfileError> {
        // In 64 bits no product of three of these overflows, and what is compared was allocated.
        let [layers, kv_layers, heads, kv_heads, d] =
            [self.n_layers, self.n_kv_layers, self.n_heads, self.n_kv_heads, self.head_dim]
                .map(|n| (n as usize).min(1 << 12));
        let floats = |list, values: &[f32], expected: usize| {
            let found = values.iter().filter(|x| x.is_finite()).count();
            if values.is_empty() || (found == expected && values.len() == expected) {
                Ok(())
            } else {
                Err(ProfileError::List { list, found, expected })
            }
        };
        floats("importance", &self.importance, layers * heads)?;
        floats("similarity", &self.similarity, layers * heads)?;
        floats("mean", &self.mean, kv_layers * kv_heads * d)?;
        let n_principal = self.n_principal();
        let row_of = |list, row: &[f32]| match row.len() == d {
            true => floats(list, row, d),
            false => Err(ProfileError::List { list, found: row.len(), expected: d }),
        };
        for row in &self.principal {
            row_of("a principal direction", row)?;
        }
        let (found, expected) = (self.principal.len(), kv_layers * kv_heads * n_principal);
        if found != expected || n_principal > d {
            return Err(ProfileError::List { list: "principal", found, expected });
        }
        floats("lengths", &self.lengths, expected)?;
        for row in &self.hash {
            row_of("a direction of hash codes", row)?;
        }
        let (found, expected) = (self.hash.len(), kv_layers * kv_heads * self.hash_bits());
        if found != expected || self.hash_bits() > BITS_MAX {
            return Err(ProfileError::List { list: "hash", found, expected });
        }
        let expected = kv_layers * kv_heads * d;
        let found = self.channels.iter().filter(|&&c| usize::from(c) < d).count();
        if !self.channels.is_empty() && (found != expected || self.channels.len() != expected) {
            return Err(ProfileError::List { list: "channels", found, expected });
        }
        Ok(())
    }

    /// An error if the profile is of a model of another shape.
    pub fn check_shape(&self, shape: &TopKShape) -> Result<(), ProfileError> {
        let words = |p: &Profile| {
            format!(
                "{} layers ({} with KV), {} heads over {}, width {}",
                p.n_layers, p.n_kv_layers, p.n_heads, p.n_kv_heads, p.head_dim
            )
        };
        let (found, expected) = (words(self), words(&Profile::empty(shape)));
        if found == expected { Ok(()) } else { Err(ProfileError::Shape { found, expected }) }
    }

    /// Takes over importances per key/value head from a table of DuoAttention: a line for each
    /// layer, a number for each head, between tabs.
    pub fn import_table(&mut self, table: &str) -> Result<(), ProfileError> {
        let group = self.n_heads / self.n_kv_heads.max(1);
        let expected = self.n_kv_heads as usize;
        let mut importance = Vec::new();
        let lines = table.lines().filter(|line| !line.trim().is_empty());
        for (i, line) in lines.enumerate() {
            let numbers = line.split_whitespace().map(str::parse::<f32>);
            let numbers = numbers.collect::<Result<Vec<_>, _>>().unwrap_or_default();
            if numbers.len() != expected || numbers.iter().any(|x| !x.is_finite()) {
                return Err(ProfileError::Table { line: i + 1, expected });
            }
            for x in numbers {
                // Training leaves tiny negative ones.
                importance.extend(std::iter::repeat_n(x.clamp(0.0, 1.0), group as usize));
            }
        }
        let expected = self.n_layers as usize * self.n_heads as usize;
        if importance.len() != expected {
            let found = importance.len();
            return Err(ProfileError::List { list: "importance", found, expected });
        }
        self.importance = importance;
        Ok(())
    }

    /// Importances of the query heads of one key/value head; 1 where nothing was measured.
    pub fn importances(&self, layer: usize, head: usize) -> Vec<f32> {
        let group = (self.n_heads / self.n_kv_heads.max(1)) as usize;
        let start = layer * self.n_heads as usize + head * group;
        match self.importance.get(start..start + group) {
            Some(importances) => importances.to_vec(),
            None => vec![1.0; group],
        }
    }

    /// Principal directions of each head.
    fn n_principal(&self) -> usize {
        let heads = self.n_kv_layers as usize * self.n_kv_heads as usize;
        self.principal.len() / heads.max(1)
    }

    /// Bits of the hash codes that were learnt; 0 if none were.
    pub fn hash_bits(&self) -> usize {
        let heads = self.n_kv_layers as usize * self.n_kv_heads as usize;
        self.hash.len() / heads.max(1)
    }

    /// Takes over what was learnt, a frame `[bits][D]` of each head, as it would be read again.
    pub fn set_hash<'a>(&mut self, frames: impl IntoIterator<Item = &'a [f32]>) {
        let d = (self.head_dim as usize).max(1);
        let rows = frames.into_iter().flat_map(|frame| frame.chunks_exact(d));
        self.hash = rows.map(compact::rounded).collect();
    }

    /// Where hash codes of this many bits begin to be learnt, and what they are without: `[bits][D]`,
    /// random, for all heads alike.
    pub fn random_frame(&self, bits: usize) -> Vec<f32> {
        orthonormal_frame(bits, self.head_dim as usize, FRAME_SEED)
    }

    /// `[layer][G]` the average similarity of adjacent queries, over the query heads of each
    /// key/value head; nothing where nothing was measured.
    pub fn similarities(&self) -> Vec<f32> {
        let group = (self.n_heads / self.n_kv_heads.max(1)).max(1) as usize;
        let groups = self.similarity.chunks_exact(group);
        groups.map(|heads| heads.iter().sum::<f32>() / group as f32).collect()
    }

    /// Whether it has what the policy's digest needs.
    pub fn serves(&self, policy: &Policy) -> bool {
        match policy.retriever {
            Retriever::Full | Retriever::Streaming | Retriever::Exact | Retriever::Quest => true,
            Retriever::Hata { .. } => !self.mean.is_empty(),
            Retriever::Loki { channels, bits } => {
                self.n_principal() >= channels.min(self.head_dim).max(1) as usize
                    && (bits == 8 || !self.lengths.is_empty())
            }
            Retriever::DoubleSparsity { .. } => !self.channels.is_empty(),
        }
    }

    /// The digest that a retriever needs, if it needs one. What was not measured is left out: keys
    /// are not centred, channels are the first ones.
    pub fn digest(&self, retriever: Retriever) -> Option<Digest> {
        let (kind, width) = retriever.digest()?;
        let d = self.head_dim as usize;
        let heads = self.n_kv_layers as usize * self.n_kv_heads as usize;
        let width = match kind {
            DigestKind::Signs => width as usize,
            DigestKind::Channels | DigestKind::Nibbles => (width as usize).min(d),
            DigestKind::Bounds => 0,
        };
        let n_principal = self.n_principal();
        let mut frame = match retriever {
            Retriever::Hata { .. } if self.hash_bits() == width => self.hash.concat(),
            Retriever::Hata { .. } => self.random_frame(width),
            Retriever::Loki { .. } => self.first_rows(heads, width, |head, row, e| {
                self.principal.get(head * n_principal + row)?.get(e).copied()
            }),
            Retriever::DoubleSparsity { .. } => self.first_rows(heads, width, |head, row, e| {
                let channel = self.channels.get(head * d + row)?;
                Some(if usize::from(*channel) == e { 1.0 } else { 0.0 })
            }),
            Retriever::Full | Retriever::Streaming | Retriever::Exact | Retriever::Quest => {
                Vec::new()
            }
        };
        let mean = match kind {
            DigestKind::Signs if self.mean.is_empty() => vec![0.0; heads * d],
            DigestKind::Signs => self.mean.clone(),
            DigestKind::Channels | DigestKind::Nibbles | DigestKind::Bounds => Vec::new(),
        };
        let weights = match kind {
            DigestKind::Nibbles => self.even_out(heads, width, &mut frame),
            DigestKind::Signs | DigestKind::Channels | DigestKind::Bounds => Vec::new(),
        };
        Some(Digest { kind, width, frame, mean, weights })
    }

    /// Divides rows by the roots of their lengths, and gives the lengths, by which queries are to be
    /// multiplied: four bits are too few for channels of very different lengths, and if all were as
    /// long, short ones would get bits that long ones need.
    fn even_out(&self, heads: usize, width: usize, frame: &mut [f32]) -> Vec<f32> {
        let (n_principal, d) = (self.n_principal(), self.head_dim as usize);
        let mut weights = Vec::with_capacity(heads * width);
        for (i, row) in frame.chunks_exact_mut(d.max(1)).enumerate() {
            let (head, number) = (i / width, i % width);
            // A direction in which no key was seen stays as it is.
            let length = (number < n_principal)
                .then(|| self.lengths.get(head * n_principal + number).copied())
                .flatten()
                .filter(|&length| length > 1e-6)
                .unwrap_or(1.0);
            row.iter_mut().for_each(|x| *x /= length.sqrt());
            weights.push(length);
        }
        weights
    }

    /// A frame of some rows for each head; the first axes where there is nothing better.
    fn first_rows(
        &self,
        heads: usize,
        width: usize,
        element: impl Fn(usize, usize, usize) -> Option<f32>,
    ) -> Vec<f32> {
        let d = self.head_dim as usize;
        let mut frame = Vec::with_capacity(heads * width * d);
        for (head, row) in (0..heads).flat_map(|head| (0..width).map(move |row| (head, row))) {
            frame.extend(
                (0..d).map(|e| element(head, row, e).unwrap_or(if e == row { 1.0 } else { 0.0 })),
            );
        }
        frame
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: TopKShape =
        TopKShape { n_layers: 2, n_kv_layers: 1, n_kv_heads: 2, group: 2, head_dim: 4 };

    #[test]
    fn a_profile_is_read_as_it_was_written() {
        let mut profile = Profile::empty(&SHAPE);
        profile.importance = vec![0.25; 8];
        profile.mean = vec![1.5; 8];
        profile.principal = vec![vec![0.0, 1.0, 0.0, 0.0]; 4];
        let text = serde_json::to_string(&profile).unwrap();
        assert_eq!(Profile::from_json(&text).unwrap(), profile);
        assert!(profile.check_shape(&SHAPE).is_ok());
        assert!(profile.check_shape(&TopKShape { n_layers: 3, ..SHAPE }).is_err());
        for (from, to) in [
            ("\"version\":1", "\"version\":2"),
            ("0.25,", ""),
            ("0.25,", "1e300,"),
            ("\"n_heads\":4", "\"n_heads\":5"),
            ("\"command\"", "\"comand\""),
            ("007f0000", "007f00"),
            ("007f0000", "007fxx00"),
            ("\"007f0000\",", ""),
            ("{", "["),
        ] {
            let bad = text.replacen(from, to, 1);
            assert_ne!(bad, text);
            assert!(Profile::from_json(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn hash_codes_are_by_what_was_learnt_for_as_many_bits() {
        let mut profile = Profile::empty(&SHAPE);
        let random = profile.digest(Retriever::Hata { bits: 64 }).unwrap();
        assert!(random.has_one_frame(4));
        assert_eq!(random.frame, profile.random_frame(64));
        let frames: Vec<Vec<f32>> = (0..2).map(|head| vec![0.5 - head as f32; 64 * 4]).collect();
        profile.set_hash(frames.iter().map(Vec::as_slice));
        let text = serde_json::to_string(&profile).unwrap();
        let profile = Profile::from_json(&text).unwrap();
        let learnt = profile.digest(Retriever::Hata { bits: 64 }).unwrap();
        assert_eq!(learnt.frame_of(0, 4), [0.5; 64 * 4]);
        assert_eq!(learnt.frame_of(1, 4), [-0.5; 64 * 4]);
        assert!(profile.digest(Retriever::Hata { bits: 128 }).unwrap().has_one_frame(4));
        for (from, to) in [
            ("\"7f7f7f7f\",", ""),
            ("7f7f7f7f", "7f7f7f"),
            ("7f7f7f7f", ""),
            ("7f7f7f7f", "7f7f7fxx"),
        ] {
            let bad = text.replacen(from, to, 1);
            assert_ne!(bad, text);
            assert!(Profile::from_json(&bad).is_err(), "{from} as {to}");
        }
    }

    #[test]
    fn a_table_of_duo_attention_is_taken_over() {
        let mut profile = Profile::empty(&SHAPE);
        profile.import_table("0.5\t-0.001\n1.0\t0.25\n").unwrap();
        assert_eq!(profile.importance, [0.5, 0.5, 0.0, 0.0, 1.0, 1.0, 0.25, 0.25]);
        assert_eq!(profile.importances(1, 1), [0.25, 0.25]);
        for bad in ["0.5\n", "0.5\tx\n1\t1\n", "1\t1\n", "1\tnan\n1\t1\n", ""] {
            assert!(profile.import_table(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn channels_in_four_bits_are_evened_out_and_products_stay() {
        let mut profile = Profile::empty(&SHAPE);
        let (one, two) = (vec![1.0, 0.0, 0.0, 0.0], vec![0.0, 1.0, 0.0, 0.0]);
        profile.principal = vec![one.clone(), two.clone(), one, two];
        let four = Retriever::Loki { channels: 2, bits: 4 };
        let policy = Policy { retriever: four, ..Policy::default() };
        assert!(!profile.serves(&policy), "a profile without lengths");
        profile.lengths = vec![9.0, 4.0, 0.0, 1.0];
        assert!(profile.serves(&policy) && profile.check().is_ok());
        let digest = profile.digest(four).unwrap();
        assert_eq!(digest.kind, DigestKind::Nibbles);
        assert_eq!(digest.frame_of(0, 4), [1.0 / 3.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]);
        assert_eq!((digest.weights_of(0), digest.weights_of(1)), (&[9.0, 4.0][..], &[1.0; 2][..]));
        profile.lengths.pop();
        assert!(profile.check().is_err());
    }
}
