//! How well places fit the queries of one head.

use nuthatch_backend::topk::softmax_scores;
use nuthatch_backend::{Ask, DigestKind, ScoreBy};

use super::agree::agreements;
use super::{DigestPages, signs};
use crate::attend::{Attention, Rows, row_scores};
use crate::isa::Isa;
use crate::kv::PAGE;
use crate::mem::SharedMut;
use crate::pack::f16_to_f32;
use crate::plan::CHUNK;
use crate::pool::Pool;
use crate::versions::{fma, versions};

/// Pages of signs that one thread scores at a time.
const PIECE_PAGES: usize = 128;

/// Questions about one layer. The queries, pages and threads are those of its attention.
pub(crate) struct Scoring<'a> {
    pub(crate) attention: Attention<'a>,
}

/// A part of a question.
#[derive(Clone, Copy)]
struct Piece {
    ask: usize,
    first_page: usize,
    n_pages: usize,
}

impl Scoring<'_> {
    pub(crate) fn run(&self, pool: &Pool, asks: &[Ask], scores: &mut [u32]) {
        let pieces = self.pieces(asks);
        let codes: Vec<Vec<u64>> = asks.iter().map(|ask| self.query_signs(ask)).collect();
        let scores = SharedMut::new(scores);
        pool.run(pieces.len(), &|i| {
            let Piece { ask, first_page, n_pages } = pieces[i];
            let (ask, codes) = (&asks[ask], &codes[ask]);
            let start = first_page * PAGE;
            let n = (n_pages * PAGE).min(ask.n as usize - start);
            #[expect(unsafe_code, reason = "threads write disjoint parts")]
            // SAFETY: answers do not overlap (the caller's duty, as `at` is theirs), nor do pieces.
            let out = unsafe { scores.part(ask.at + start, n) };
            match self.signs_of(ask) {
                Some(digest) => self.score_signs(ask, digest, codes, first_page, out),
                None => {
                    let mut raw = self.raw_scores(ask);
                    softmax_scores(&mut raw, out);
                }
            }
        });
    }

    /// Signs are scored in pieces; a softmax looks at all places.
    fn pieces(&self, asks: &[Ask]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (i, ask) in asks.iter().enumerate() {
            let n_pages = (ask.n as usize).div_ceil(PAGE);
            let step = if self.signs_of(ask).is_some() { PIECE_PAGES } else { n_pages.max(1) };
            for first_page in (0..n_pages).step_by(step) {
                pieces.push(Piece { ask: i, first_page, n_pages: step.min(n_pages - first_page) });
            }
        }
        pieces
    }

    fn digest(&self, ask: &Ask) -> Option<&DigestPages> {
        match ask.by {
            ScoreBy::Keys => None,
            ScoreBy::Digest(i) => Some(&self.attention.kv.digests[i]),
        }
    }

    fn signs_of(&self, ask: &Ask) -> Option<&DigestPages> {
        self.digest(ask).filter(|digest| digest.encoder.kind == DigestKind::Signs)
    }

    fn head_number(&self, ask: &Ask) -> usize {
        self.attention.kv.head_number(self.attention.layer, ask.head as usize)
    }

    /// The group's queries, `[group][D]`.
    fn queries(&self, ask: &Ask) -> &[f32] {
        let attention = &self.attention;
        let n = attention.plan.group() * attention.d();
        let seq = &attention.plan.seqs[ask.seq as usize];
        assert_eq!(seq.n_rows, 1, "a sequence with one row");
        assert!(ask.n as usize <= seq.kv_len(), "places of the sequence");
        &attention.qkv[seq.first_row * attention.width + ask.head as usize * n..][..n]
    }

    /// The signs of the group's queries, `[group][width / 64]`; none for other digests.
    fn query_signs(&self, ask: &Ask) -> Vec<u64> {
        let Some(DigestPages { encoder, .. }) = self.signs_of(ask) else { return Vec::new() };
        let (q, head) = (self.queries(ask), self.head_number(ask));
        let mut products = vec![0.0; self.attention.plan.group() * encoder.width];
        encoder.project(self.attention.isa, head, q, &mut products);
        products.as_chunks::<64>().0.iter().map(signs).collect()
    }

    /// Slots of the sequence's pages from `first_page` on.
    fn slots(&self, ask: &Ask, first_page: usize, n_pages: usize) -> &[u32] {
        let first_slot = self.attention.plan.seqs[ask.seq as usize].first_slot;
        &self.attention.plan.slots[first_slot + first_page..][..n_pages]
    }

    fn score_signs(
        &self,
        ask: &Ask,
        digest: &DigestPages,
        codes: &[u64],
        first_page: usize,
        out: &mut [u32],
    ) {
        let encoder = &digest.encoder;
        let (head, n_pages) = (self.head_number(ask), out.len().div_ceil(PAGE));
        let starts = self.slots(ask, first_page, n_pages).iter();
        let pages = starts.map(|&slot| {
            let start = encoder.page_start(head, slot as usize);
            &digest.bytes[start..start + encoder.page_bytes]
        });
        agreements(self.attention.isa, pages, codes, encoder.width / 64, out);
    }

    /// Scaled products of the group's queries with all places, or what stands for them,
    /// `[group][n]`.
    fn raw_scores(&self, ask: &Ask) -> Vec<f32> {
        let q: Vec<f32> = self.queries(ask).iter().map(|x| x * self.attention.scale).collect();
        match self.digest(ask) {
            None => self.key_scores(ask, &q),
            Some(digest) => self.digest_scores(ask, digest, &q),
        }
    }

    fn key_scores(&self, ask: &Ask, q: &[f32]) -> Vec<f32> {
        let Attention { kv, plan, isa, .. } = self.attention;
        assert!(kv.by_rows, "an arena with digests");
        let (n, group) = (ask.n as usize, plan.group());
        let mut raw = vec![0.0; group * n];
        let mut chunk = vec![0.0; group * CHUNK];
        let mut at = [std::ptr::null(); CHUNK];
        let seq = &plan.seqs[ask.seq as usize];
        for first in (0..n).step_by(CHUNK) {
            let places = first..n.min(first + CHUNK);
            let at = self.attention.row_addresses(ask.head as usize, seq, places.clone(), &mut at);
            let rows = Rows { dtype: kv.shape.dtype, d: kv.shape.head_dim as usize, at };
            row_scores(isa, &rows, group, q, &mut chunk);
            for (row, chunk) in raw.chunks_exact_mut(n).zip(chunk.chunks_exact(CHUNK)) {
                row[places.clone()].copy_from_slice(&chunk[..places.len()]);
            }
        }
        raw
    }

    fn digest_scores(&self, ask: &Ask, digest: &DigestPages, q: &[f32]) -> Vec<f32> {
        let encoder = &digest.encoder;
        let (isa, head) = (self.attention.isa, self.head_number(ask));
        let (n, d) = (ask.n as usize, self.attention.kv.shape.head_dim as usize);
        let mut raw = vec![0.0; q.len() / d * n];
        let mut products = vec![0.0; encoder.width];
        for (q, raw) in q.chunks_exact(d).zip(raw.chunks_exact_mut(n)) {
            if encoder.kind == DigestKind::Channels {
                encoder.project(isa, head, q, &mut products);
            }
            let pages = self.slots(ask, 0, n.div_ceil(PAGE));
            for (raw, &slot) in raw.chunks_mut(PAGE).zip(pages) {
                let start = encoder.page_start(head, slot as usize);
                let page = &digest.bytes[start..start + encoder.page_bytes];
                match encoder.kind {
                    DigestKind::Channels => {
                        let scores = channel_scores(isa, page, &products);
                        raw.copy_from_slice(&scores[..raw.len()]);
                    }
                    DigestKind::Bounds => raw.fill(bound(page, q)),
                    DigestKind::Signs => unreachable!("signs are scored by themselves"),
                }
            }
        }
        raw
    }
}

versions! {
    /// Products of sixteen keys' channels with a query's.
    fn channel_scores(page: &[u8], query: &[f32]) -> [f32; PAGE] = channel_scores_inner;
}

#[inline(always)]
fn channel_scores_inner<const FUSED: bool>(page: &[u8], query: &[f32]) -> [f32; PAGE] {
    let (halves, _) = page.as_chunks::<2>();
    let (rows, _) = halves.as_chunks::<PAGE>();
    let mut sums = [0.0; PAGE];
    for (row, &q) in rows.iter().zip(query) {
        for (sum, &half) in sums.iter_mut().zip(row) {
            *sum = fma::<FUSED>(q, f16_to_f32(u16::from_le_bytes(half)), *sum);
        }
    }
    sums
}

/// The largest product with `q` that a key within the page's bounds could have.
fn bound(page: &[u8], q: &[f32]) -> f32 {
    let (halves, _) = page.as_chunks::<2>();
    let (least, most) = halves.split_at(q.len());
    let value = |half: [u8; 2]| f16_to_f32(u16::from_le_bytes(half));
    let pairs = least.iter().zip(most).zip(q);
    pairs.map(|((&least, &most), &q)| (q * value(least)).max(q * value(most))).sum()
}
