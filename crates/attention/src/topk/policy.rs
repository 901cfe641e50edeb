//! How top-k attention is done.

use nuthatch_backend::{Digest, DigestKind};
use nuthatch_types::KvShape;

/// By what tokens are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retriever {
    /// All tokens are attended.
    Full,
    /// Only sinks and recent tokens are attended.
    Streaming,
    /// By exact scores: the yardstick.
    Exact,
    /// By hash codes of this many bits.
    Hata {
        /// A multiple of 64.
        bits: u32,
    },
    /// By the bounds of the keys of each page.
    Quest,
    /// By the first principal channels of the keys.
    Loki {
        /// How many.
        channels: u32,
        /// Of each: 8 or 4.
        bits: u32,
    },
    /// By the channels that matter most to products.
    DoubleSparsity {
        /// How many.
        channels: u32,
    },
}

impl Retriever {
    /// What must be kept of keys for it, and how wide.
    pub fn digest(self) -> Option<(DigestKind, u32)> {
        match self {
            Retriever::Full | Retriever::Streaming | Retriever::Exact => None,
            Retriever::Hata { bits } => Some((DigestKind::Signs, bits)),
            Retriever::Quest => Some((DigestKind::Bounds, 0)),
            Retriever::Loki { channels, bits: 4 } => Some((DigestKind::Nibbles, channels)),
            Retriever::Loki { channels, .. } | Retriever::DoubleSparsity { channels } => {
                Some((DigestKind::Channels, channels))
            }
        }
    }
}

/// Bytes of what these policies keep of the keys of one page, over all layers and heads.
pub fn digest_page_bytes(policies: &[Policy], shape: &KvShape) -> usize {
    let mut retrievers: Vec<Retriever> = Vec::new();
    let mut bytes = 0;
    for &Policy { retriever, .. } in policies {
        let Some((kind, width)) = retriever.digest().filter(|_| !retrievers.contains(&retriever))
        else {
            continue;
        };
        retrievers.push(retriever);
        let (frame, mean, weights) = Default::default();
        let digest = Digest { kind, width: width as usize, frame, mean, weights };
        bytes += digest.page_bytes(shape.page_len as usize, shape.head_dim as usize);
    }
    bytes * shape.n_layers as usize * shape.n_kv_heads as usize
}

/// How many tokens a selection has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Percent of the tokens between sinks and tail.
    pub percent: f64,
    /// At least this many.
    pub min: u32,
    /// At most this many.
    pub max: u32,
}

impl Budget {
    /// Tokens that are selected of `n`.
    pub fn rows(&self, n: u32) -> u32 {
        self.weighted_rows(n, 1.0)
    }

    /// The same for a head whose share is `weight` times the usual one.
    pub fn weighted_rows(&self, n: u32, weight: f32) -> u32 {
        let wanted = (self.percent * f64::from(weight) * f64::from(n) / 100.0).ceil() as u32;
        wanted.max(self.min).min(self.max).min(n)
    }
}

/// How the similarities of a group's query heads become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregate {
    /// The harmonic mean, weighted by importance, as published.
    Harmonic,
    /// The least: what the papers compare with.
    Min,
    /// The mean: the prototype's.
    Mean,
}

/// The query-similarity cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Qsac {
    /// The threshold of a head of importance 1.
    pub eta: f32,
    /// The power of importance.
    pub p: f32,
    /// The threshold of a head of importance 0; -1, as published, freezes it.
    pub floor: f32,
    /// Whether thresholds follow importance; otherwise all are `eta`.
    pub is_adaptive: bool,
    /// How a group's similarities become one.
    pub aggregate: Aggregate,
    /// A selection is made again after this many steps, if given.
    pub max_age: Option<u32>,
    /// Queries that have turned, but not too far, are served by the selection that there is, and the
    /// next one is made after their layer's attention, if given.
    pub soft: Option<Soft>,
}

/// The similarity from which on a query that misses is served late.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Soft {
    /// Of a head of importance 0; -1 if any query is.
    pub floor: f32,
    /// Of a head of importance 1.
    pub eta: f32,
}

impl Default for Qsac {
    fn default() -> Self {
        Qsac {
            eta: 0.8,
            p: 3.0,
            floor: -1.0,
            is_adaptive: true,
            aggregate: Aggregate::Harmonic,
            max_age: None,
            soft: None,
        }
    }
}

/// When a selection is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reuse {
    /// At each step.
    Never,
    /// When the query has turned away from the one that the last selection was made for.
    Qsac(Qsac),
    /// At each step, and rows are cached by the page, the least recently used going first
    /// (RetroInfer's way); only the selection is attended.
    PageLru {
        /// Tokens of a page.
        page: u32,
        /// Room, in selections.
        capacity: f32,
    },
}

/// What is moved when a selection changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refresh {
    /// Rows that are not there yet.
    Delta,
    /// All rows of the selection.
    Whole,
}

/// How top-k attention is done. Read from text by `parse`, see [`GRAMMAR`](super::GRAMMAR).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// By what tokens are found.
    pub retriever: Retriever,
    /// How many.
    pub budget: Budget,
    /// How many times as many the most important heads have as the least, at least 1; on the average
    /// over heads there are as many as `budget` says.
    pub focus: f32,
    /// What a token's score is worth to the one after it, from 0, which is nothing, to below 1.
    pub follow: f32,
    /// When.
    pub reuse: Reuse,
    /// What is moved then.
    pub refresh: Refresh,
    /// Rows that stay, in selections, at least 1: those of earlier selections stay by recency and
    /// are attended too.
    pub working_set: f32,
    /// First tokens that are always attended.
    pub sinks: u32,
    /// Last tokens that are always attended, counted when a selection is made; those that come
    /// later are attended until the next one. At least 1.
    pub recent: u32,
    /// First layers that attend to everything.
    pub dense_layers: u32,
    /// Tokens of a sequence from which on tokens are chosen; a shorter one is attended whole.
    pub from: u32,
    /// Whether the query of the layer before is used, projected by this layer's weights.
    pub speculates: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            retriever: Retriever::Hata { bits: 256 },
            budget: Budget { percent: 10.0, min: 256, max: u32::MAX },
            focus: 1.0,
            follow: 0.0,
            reuse: Reuse::Never,
            refresh: Refresh::Delta,
            working_set: 1.0,
            sinks: 16,
            recent: 64,
            dense_layers: 0,
            from: 0,
            speculates: false,
        }
    }
}

impl Policy {
    /// Where the tail begins in a sequence of `kv_len` tokens; before it lie sinks and candidates.
    pub fn cut(&self, kv_len: u32) -> u32 {
        kv_len.saturating_sub(self.recent).max(self.sinks.min(kv_len))
    }

    /// The most rows of the working set of a head whose share is `weight` times the usual one, of a
    /// context of `n` tokens.
    pub fn rows_max(&self, n: u32, weight: f32) -> u32 {
        if matches!(self.retriever, Retriever::Full | Retriever::Streaming) {
            return 0;
        }
        let k = self.budget.weighted_rows(n, weight) as usize;
        let rows = match self.reuse {
            // Each row of a selection may be of another page, and all of them stay for it.
            Reuse::PageLru { page, capacity } => {
                let n_pages = (k as f32 * capacity / page as f32).ceil() as usize;
                n_pages.max(k).saturating_mul(page as usize)
            }
            Reuse::Never | Reuse::Qsac(_) => self.set_size(k),
        };
        rows.min(n as usize) as u32
    }

    /// Whether a selection that no longer serves may serve once more, while the next one is made.
    pub fn is_soft(&self) -> bool {
        matches!(self.reuse, Reuse::Qsac(Qsac { soft: Some(_), .. }))
    }

    /// What a score loses with each place that follows it, of a head of `group` query heads.
    ///
    /// Scores are the bits of floats, whose exponents count halvings; those by hash codes are bits that
    /// agree, of which a sixty-fourth stands for a halving.
    pub fn fade(&self, group: usize) -> u32 {
        if self.follow == 0.0 {
            return 0;
        }
        let halving = if let Retriever::Hata { bits } = self.retriever {
            (group as u32 * bits) as f32 / 64.0
        } else {
            (1 << 23) as f32
        };
        (-self.follow.log2() * halving).ceil() as u32
    }

    /// Rows of a working set to which selections of `k` are added.
    pub fn set_size(&self, k: usize) -> usize {
        (k as f32 * self.working_set).ceil() as usize
    }
}
