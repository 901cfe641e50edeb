//! How well places fit the queries of one head.
//!
//! Questions are cut into pieces, which threads share. Signs are counted; everything else goes
//! through a softmax over all places: each piece takes the exponentials of differences from a number of
//! its own, and in the end pieces are brought to a common one.

use std::sync::OnceLock;

use nuthatch_backend::{Ask, Best, DigestKind, ScoreBy};

use super::agree::agreements;
use super::nibbles::{AHEAD, Codes, nibble_exponentials, nibble_scores};
use super::numbers::{bound, channel_scores, combine, exponentials, fetch, largest};
use super::select::select_combined;
use super::{DigestPages, signs};
use crate::attend::{Attention, MAX_GROUP, Rows, row_scores};
use crate::kv::PAGE;
use crate::mem::{SharedMut, lines};
use crate::plan::CHUNK;
use crate::pool::Pool;

/// Pages that one thread scores at a time.
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
    /// Its places are `start..start + n`.
    start: usize,
    n: usize,
    /// Where its raw scores are, `[group][n]`; nowhere for signs.
    raw: usize,
}

/// The queries of a question, as they meet its digest.
enum Queries {
    /// `[group][words]`.
    Signs(Vec<u64>),
    /// `[group][width]` channels, or `[group][D]` scaled queries.
    Floats(Vec<f32>),
    /// Channels in eight bits.
    Codes(Codes),
}

/// Memory that calls may share.
#[derive(Default)]
pub(crate) struct Memory {
    pieces: Vec<Piece>,
    /// Raw scores of all pieces.
    raw: Vec<f32>,
    /// What was subtracted, and the sum of exponentials, of each row, `[piece][group]`, and of all pieces of a question,
    /// `[ask][group]`.
    sums: Vec<(f32, f32)>,
    totals: Vec<(f32, f32)>,
    /// What rows are to be multiplied by, `[piece][group]`.
    factors: Vec<f32>,
    /// Of queries with a frame.
    products: Vec<f32>,
}

/// Answers, raw scores and sums, which threads write.
type Shared<'a> = (SharedMut<'a, u32>, SharedMut<'a, f32>, SharedMut<'a, (f32, f32)>);

/// Exponentials of all pieces; none if all questions are about signs.
struct Weighed<'a> {
    pieces: &'a [Piece],
    raw: &'a [f32],
    factors: &'a [f32],
    group: usize,
}

impl<'a> Weighed<'a> {
    fn n_pieces(&self) -> usize {
        self.factors.len() / self.group
    }

    /// The rows of a piece, and what they are to be multiplied by.
    fn rows(&self, i: usize) -> (&'a [f32], &'a [f32]) {
        let Piece { raw, n, .. } = self.pieces[i];
        (&self.raw[raw..raw + self.group * n], &self.factors[i * self.group..][..self.group])
    }
}

impl Scoring<'_> {
    /// Answers on the threads of a pool.
    pub(crate) fn run(&self, pool: &Pool, asks: &[Ask], memory: &mut Memory, scores: &mut [u32]) {
        let weighed = self.weigh(Some(pool), asks, memory, scores);
        let shared_scores = SharedMut::new(scores);
        // In parallel again, because what another thread has written is slow to read.
        pool.run(weighed.n_pieces(), &|i| {
            let Piece { ask, start, n, .. } = weighed.pieces[i];
            let ask = &asks[ask];
            if self.signs_of(ask).is_some() {
                return;
            }
            #[expect(unsafe_code, reason = "threads write disjoint parts")]
            // SAFETY: neither answers nor pieces overlap, as in `weigh`.
            let out = unsafe { shared_scores.part(ask.at + start, n) };
            let (rows, factors) = weighed.rows(i);
            combine(self.attention.isa, rows, factors, out);
        });
    }

    /// Answers one question and selects by that, on this thread alone; `scores` is memory that calls may
    /// share, too.
    pub(crate) fn choose(
        &self,
        ask: &Ask,
        best: Best,
        (memory, scores): (&mut Memory, &mut Vec<u32>),
        chosen: &mut Vec<u32>,
    ) {
        let scores = lines(scores, ask.n as usize);
        let weighed = self.weigh(None, std::slice::from_ref(ask), memory, scores);
        let pieces = (0..weighed.n_pieces()).map(|i| weighed.rows(i));
        select_combined(self.attention.isa, pieces, best, scores, chosen);
    }

    /// Answers questions about signs, and of others takes the exponentials of all pieces.
    fn weigh<'m>(
        &self,
        pool: Option<&Pool>,
        asks: &[Ask],
        memory: &'m mut Memory,
        scores: &mut [u32],
    ) -> Weighed<'m> {
        let group = self.attention.plan.group();
        let Memory { pieces, raw, sums, totals, factors, products } = memory;
        let n_raw = self.cut(asks, pieces);
        let (pieces, raw) = (&pieces[..], lines(raw, n_raw));
        sums.clear();
        sums.resize(pieces.len() * group, (0.0, 0.0));
        let shared = (SharedMut::new(scores), SharedMut::new(raw), SharedMut::new(sums));
        match pool {
            Some(pool) => {
                let queries: Vec<OnceLock<Queries>> =
                    asks.iter().map(|_| OnceLock::new()).collect();
                pool.run(pieces.len(), &|i| {
                    let (ask, queries) = (&asks[pieces[i].ask], &queries[pieces[i].ask]);
                    // Threads that come at the same time compute the same, rather than wait.
                    let new = || self.queries_of(ask, &mut Vec::new());
                    let own = queries.get().is_none().then(new);
                    let queries = queries.get_or_init(|| own.unwrap_or_else(new));
                    self.weigh_piece((ask, queries), (i, &pieces[i]), &shared);
                });
            }
            None => {
                for (of_ask, ask) in asks.iter().enumerate() {
                    let queries = self.queries_of(ask, products);
                    let own = pieces.iter().enumerate().filter(|(_, piece)| piece.ask == of_ask);
                    own.for_each(|piece| self.weigh_piece((ask, &queries), piece, &shared));
                }
            }
        }
        factors.clear();
        if asks.iter().any(|ask| self.signs_of(ask).is_none()) {
            self.add_up(asks.len(), pieces, sums, totals);
            let of_pieces = pieces.iter().zip(sums.chunks_exact(group));
            factors.extend(of_pieces.flat_map(|(piece, sums)| {
                let pairs = sums.iter().zip(&totals[piece.ask * group..]);
                pairs.map(|((m, _), (max, total))| (m - max).exp() / total)
            }));
        }
        Weighed { pieces, raw, factors, group }
    }

    /// The same of one piece.
    fn weigh_piece(
        &self,
        (ask, queries): (&Ask, &Queries),
        (i, piece): (usize, &Piece),
        (scores, raw, sums): &Shared<'_>,
    ) {
        let (group, Piece { first_page, start, n, raw: raw_at, .. }) =
            (self.attention.plan.group(), *piece);
        #[expect(unsafe_code, reason = "threads write disjoint parts")]
        // SAFETY: answers do not overlap (the caller's duty, as `at` is theirs), nor do pieces, of which each is given
        // to one thread.
        let (out, raw, sums) = unsafe {
            let n_raw = if matches!(queries, Queries::Signs(_)) { 0 } else { group * n };
            (scores.part(ask.at + start, n), raw.part(raw_at, n_raw), sums.part(i * group, group))
        };
        match queries {
            Queries::Signs(codes) => self.score_signs(ask, codes, first_page, out),
            Queries::Floats(_) | Queries::Codes(_) => {
                self.exponentials(ask, queries, first_page, raw, sums);
            }
        }
    }

    /// The exponentials of a piece, and of each row what was subtracted before, and the sum.
    fn exponentials(
        &self,
        ask: &Ask,
        queries: &Queries,
        first_page: usize,
        raw: &mut [f32],
        sums: &mut [(f32, f32)],
    ) {
        let (isa, group) = (self.attention.isa, sums.len());
        let n = raw.len() / group;
        if let (Queries::Codes(codes), Some(digest)) = (queries, self.digest(ask)) {
            // To the question's end, so that the next piece's pages come while the last ones are scored.
            let n_pages = (ask.n as usize).div_ceil(PAGE) - first_page;
            let pages = self.pages(ask, digest, first_page, n_pages);
            if nibble_exponentials(isa, pages, codes, raw, sums) {
                return;
            }
        }
        let mut maxima = [0.0; MAX_GROUP];
        let maxima = &mut maxima[..group];
        self.raw_scores(ask, queries, first_page, (raw, maxima));
        for ((row, sum), &mut max) in raw.chunks_exact_mut(n).zip(sums).zip(maxima) {
            *sum = exponentials(isa, row, max);
        }
    }

    /// What is subtracted and the sum of exponentials of each question's rows, `[ask][group]`, from those of
    /// the pieces.
    fn add_up(
        &self,
        n_asks: usize,
        pieces: &[Piece],
        sums: &[(f32, f32)],
        totals: &mut Vec<(f32, f32)>,
    ) {
        let group = self.attention.plan.group();
        totals.clear();
        totals.resize(n_asks * group, (f32::NEG_INFINITY, 0.0));
        for (piece, sums) in pieces.iter().zip(sums.chunks_exact(group)) {
            for ((max, total), (m, l)) in totals[piece.ask * group..].iter_mut().zip(sums) {
                let new = max.max(*m);
                *total = *total * (*max - new).exp() + l * (m - new).exp();
                *max = new;
            }
        }
    }

    /// Writes the pieces of all questions, and returns how many raw scores they have together.
    fn cut(&self, asks: &[Ask], pieces: &mut Vec<Piece>) -> usize {
        let group = self.attention.plan.group();
        let mut n_raw = 0;
        pieces.clear();
        for (i, ask) in asks.iter().enumerate() {
            let places = ask.n as usize;
            for first_page in (0..places.div_ceil(PAGE)).step_by(PIECE_PAGES) {
                let start = first_page * PAGE;
                let n = (PIECE_PAGES * PAGE).min(places - start);
                pieces.push(Piece { ask: i, first_page, start, n, raw: n_raw });
                n_raw += if self.signs_of(ask).is_some() { 0 } else { group * n };
            }
        }
        // First the first pieces of all questions: their threads prepare the queries.
        pieces.sort_by_key(|piece| piece.first_page);
        n_raw
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

    fn channels_of(&self, ask: &Ask) -> Option<&DigestPages> {
        self.digest(ask).filter(|digest| digest.encoder.kind == DigestKind::Channels)
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

    /// The group's queries as they meet the digest.
    /// `products` is memory that calls may share.
    fn queries_of(&self, ask: &Ask, products: &mut Vec<f32>) -> Queries {
        let (q, isa) = (self.queries(ask), self.attention.isa);
        let scaled = || q.iter().map(|x| x * self.attention.scale).collect::<Vec<f32>>();
        let Some(digest) = self.digest(ask) else { return Queries::Floats(scaled()) };
        let encoder = &digest.encoder;
        if encoder.kind == DigestKind::Bounds {
            return Queries::Floats(scaled());
        }
        let (n_products, head) =
            (self.attention.plan.group() * encoder.width, self.head_number(ask));
        products.resize(n_products, 0.0);
        match encoder.kind {
            DigestKind::Channels => {
                encoder.project_queries(isa, head, &scaled(), products);
                Queries::Floats(std::mem::take(products))
            }
            DigestKind::Nibbles => {
                // They come while queries meet the frame.
                let n_pages = AHEAD.min((ask.n as usize).div_ceil(PAGE));
                self.pages(ask, digest, 0, n_pages).for_each(fetch);
                encoder.project_queries(isa, head, q, products);
                Queries::Codes(Codes::new(products, encoder.width, self.attention.scale))
            }
            DigestKind::Signs | DigestKind::Bounds => {
                encoder.project_queries(isa, head, q, products);
                Queries::Signs(products.as_chunks::<64>().0.iter().map(signs).collect())
            }
        }
    }

    /// Slots of the sequence's pages from `first_page` on.
    fn slots(&self, ask: &Ask, first_page: usize, n_pages: usize) -> &[u32] {
        let first_slot = self.attention.plan.seqs[ask.seq as usize].first_slot;
        &self.attention.plan.slots[first_slot + first_page..][..n_pages]
    }

    /// The digests of `n_pages` pages of a question.
    fn pages<'b>(
        &'b self,
        ask: &Ask,
        digest: &'b DigestPages,
        first_page: usize,
        n_pages: usize,
    ) -> impl Iterator<Item = &'b [u8]> + Clone {
        let (bytes, page_bytes) =
            (digest.of_head(self.head_number(ask)), digest.encoder.page_bytes);
        let slots = self.slots(ask, first_page, n_pages).iter();
        slots.map(move |&slot| &bytes[slot as usize * page_bytes..][..page_bytes])
    }

    fn score_signs(&self, ask: &Ask, codes: &[u64], first_page: usize, out: &mut [u32]) {
        let Some(digest) = self.signs_of(ask) else { return };
        let pages = self.pages(ask, digest, first_page, out.len().div_ceil(PAGE));
        agreements(self.attention.isa, pages, codes, digest.encoder.width / 64, out);
    }

    /// Scaled products of the group's queries with places, or what stands for them, `[group][n]`, and the
    /// largest of each query.
    fn raw_scores(
        &self,
        ask: &Ask,
        queries: &Queries,
        first_page: usize,
        (raw, maxima): (&mut [f32], &mut [f32]),
    ) {
        let (isa, n) = (self.attention.isa, raw.len() / maxima.len());
        let pages = |digest| self.pages(ask, digest, first_page, n.div_ceil(PAGE));
        if let (Queries::Floats(q), Some(digest)) = (queries, self.channels_of(ask)) {
            let width = digest.encoder.width;
            return channel_scores(isa, pages(digest), width, q, raw, maxima);
        }
        if let (Queries::Codes(codes), Some(digest)) = (queries, self.digest(ask)) {
            return nibble_scores(isa, pages(digest), codes, raw, maxima);
        }
        self.other_scores(ask, queries, first_page, raw);
        for (row, max) in raw.chunks_exact(n).zip(maxima) {
            *max = largest(isa, row);
        }
    }

    /// The same of bounds and of keys.
    fn other_scores(&self, ask: &Ask, queries: &Queries, first_page: usize, raw: &mut [f32]) {
        let n = raw.len() / self.attention.plan.group();
        let Queries::Floats(q) = queries else { return };
        let Some(digest) = self.digest(ask) else {
            return self.key_scores(ask, q, first_page * PAGE, raw);
        };
        let pages = self.pages(ask, digest, first_page, n.div_ceil(PAGE));
        let d = self.attention.d();
        for (i, page) in pages.enumerate() {
            let places = i * PAGE..n.min((i + 1) * PAGE);
            for (q, row) in q.chunks_exact(d).zip(raw.chunks_exact_mut(n)) {
                row[places.clone()].fill(bound(page, q));
            }
        }
    }

    fn key_scores(&self, ask: &Ask, q: &[f32], start: usize, raw: &mut [f32]) {
        let Attention { kv, plan, isa, .. } = self.attention;
        assert!(kv.by_rows, "an arena with digests");
        let group = plan.group();
        let n = raw.len() / group;
        let mut chunk = vec![0.0; group * CHUNK];
        let (mut at, mut stored) = ([std::ptr::null(); CHUNK], Vec::new());
        let seq = &plan.seqs[ask.seq as usize];
        for first in (0..n).step_by(CHUNK) {
            let places = first..n.min(first + CHUNK);
            let rows = start + places.start..start + places.end;
            let head = ask.head as usize;
            let at = self.attention.row_addresses(head, seq, rows, (&mut at, &mut stored));
            let rows = Rows { dtype: kv.shape.dtype, d: kv.shape.head_dim as usize, at };
            row_scores(isa, &rows, group, q, &mut chunk);
            for (row, chunk) in raw.chunks_exact_mut(n).zip(chunk.chunks_exact(CHUNK)) {
                row[places.clone()].copy_from_slice(&chunk[..places.len()]);
            }
        }
    }
}
