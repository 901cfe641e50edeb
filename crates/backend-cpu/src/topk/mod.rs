//! Top-k attention: digests beside the pages, scores by them, and the choice of the best.
//!
//! The arena of a digest is `[layer][kv head][slot]`, as that of the keys is, and inside a page
//!
//! ```text
//!   signs      [width / 64][16 tokens]   words of 64 bits
//!   channels   [width][16 tokens]        eight bits, then what one of them stands for, [16] f16
//!   nibbles    [width / 8][16 tokens]    four bytes, each of channel c in its low and of channel c + 4 in
//!                                        its high half; then what one stands for, [16] f16
//!   bounds     [min|max][D]              f16
//! ```
//!
//! so that sixteen tokens are scored at once. Digests are taken from keys as they are stored, so
//! that it does not matter when a page's digest is made.

mod admit;
mod agree;
mod cosine;
mod follow;
mod nibbles;
mod numbers;
mod score;
mod select;

use std::ops::Range;

use half::f16;
use nuthatch_backend::topk::channels;
use nuthatch_backend::{DeviceError, Digest, DigestKind};
use nuthatch_types::{KvDtype, PageCopy};

use crate::attend::to_floats;
use crate::coded::code;
use crate::isa::Isa;
use crate::kv::{CpuKv, PAGE};
use crate::mem::{Region, SharedMut};
use crate::pool::Pool;
use crate::versions::{fma, versions};

pub(crate) use admit::admit;
pub(crate) use cosine::cosine;
pub(crate) use score::{Memory, Scoring};
pub(crate) use select::select;

/// One digest of all pages.
pub(crate) struct DigestPages {
    pub(crate) encoder: Encoder,
    pub(crate) bytes: Region<u8>,
}

/// How a digest is taken.
pub(crate) struct Encoder {
    pub(crate) kind: DigestKind,
    pub(crate) width: usize,
    d: usize,
    n_slots: usize,
    pub(crate) page_bytes: usize,
    /// `[head][D][width]`, so that one element of the key meets many rows of the frame; or
    /// `[D][width]` for all heads.
    frame: Vec<f32>,
    /// `[head][D]`.
    mean: Vec<f32>,
    /// `[head][width]`, or nothing.
    weights: Vec<f32>,
}

impl DigestPages {
    pub(crate) fn new(
        digest: &Digest,
        heads: usize,
        n_slots: usize,
        d: usize,
    ) -> Result<Self, DeviceError> {
        let width = digest.width;
        let n_frames = if digest.has_one_frame(d) { 1 } else { heads };
        assert_eq!(digest.frame.len(), n_frames * width * d, "a frame for each head");
        assert!(digest.kind != DigestKind::Signs || width.is_multiple_of(64), "whole words");
        assert!(digest.kind != DigestKind::Signs || digest.mean.len() == heads * d, "a mean each");
        let mut frame = vec![0.0; digest.frame.len()];
        for head in 0..n_frames {
            let (source, start) = (digest.frame_of(head, d), head * width * d);
            for (row, e) in (0..width).flat_map(|row| (0..d).map(move |e| (row, e))) {
                frame[start + e * width + row] = source[row * d + e];
            }
        }
        let page_bytes = digest.page_bytes(PAGE, d);
        let has_weights = digest.weights.is_empty() || digest.weights.len() == heads * width;
        assert!(has_weights, "weights for each head");
        let (kind, mean, weights) = (digest.kind, digest.mean.clone(), digest.weights.clone());
        let encoder = Encoder { kind, width, d, n_slots, page_bytes, frame, mean, weights };
        let bytes = page_bytes.saturating_mul(n_slots).saturating_mul(heads);
        Ok(DigestPages { encoder, bytes: Region::zeroed(bytes, "digests of the KV cache")? })
    }

    /// The pages of a head, `[slot]`; `head` counts layers and heads together.
    fn of_head(&self, head: usize) -> &[u8] {
        let n_bytes = self.encoder.n_slots * self.encoder.page_bytes;
        &self.bytes[head * n_bytes..][..n_bytes]
    }

    pub(crate) fn copy_pages(&mut self, heads: usize, copies: &[PageCopy]) {
        let page = self.encoder.page_bytes;
        for head in 0..heads {
            for copy in copies {
                let source = self.encoder.page_start(head, copy.source.0 as usize);
                let target = self.encoder.page_start(head, copy.target.0 as usize);
                self.bytes.copy_within(source..source + page, target);
            }
        }
    }
}

impl Encoder {
    /// First byte of a page; `head` counts layers and heads together.
    pub(crate) fn page_start(&self, head: usize, slot: usize) -> usize {
        assert!(slot < self.n_slots, "slot outside the arena");
        (head * self.n_slots + slot) * self.page_bytes
    }

    /// Names what decides a digest's bytes.
    pub(crate) fn mark(&self) -> String {
        // FNV-1a over words, which is the same in every process.
        const PRIME: u64 = 0x0000_0100_0000_01b3;
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for x in self.frame.iter().chain(&self.mean) {
            hash = (hash ^ u64::from(x.to_bits())).wrapping_mul(PRIME);
        }
        format!("{:?} {} {hash:016x}", self.kind, self.width)
    }

    /// The products of vectors, `[n][D]`, with the head's frame, `[n][width]`.
    pub(crate) fn project(&self, isa: Isa, head: usize, x: &[f32], out: &mut [f32]) {
        let size = self.d * self.width;
        let start = if self.frame.len() == size { 0 } else { head * size };
        let frame = &self.frame[start..start + size];
        project(isa, frame, self.width, x, out);
    }

    /// The products of a head's queries, `[n][D]`, as they meet digests of keys, `[n][width]`.
    pub(crate) fn project_queries(&self, isa: Isa, head: usize, x: &[f32], out: &mut [f32]) {
        self.project(isa, head, x, out);
        if self.weights.is_empty() {
            return;
        }
        let weights = &self.weights[head * self.width..][..self.width];
        for row in out.chunks_exact_mut(self.width) {
            row.iter_mut().zip(weights).for_each(|(x, weight)| *x *= weight);
        }
    }

    /// Writes the digest of some tokens of a page; `page` is `[16][K|V][D]`.
    fn encode(&self, isa: Isa, head: usize, keys: &Keys<'_>, tokens: Range<usize>, out: &mut [u8]) {
        let mut key = vec![0.0; self.d];
        let mut products = vec![0.0; self.width];
        match self.kind {
            DigestKind::Signs => {
                let mean = &self.mean[head * self.d..][..self.d];
                for token in tokens {
                    keys.read(isa, token, &mut key);
                    key.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
                    self.project(isa, head, &key, &mut products);
                    for (word, products) in products.as_chunks::<64>().0.iter().enumerate() {
                        let at = (word * PAGE + token) * 8;
                        out[at..at + 8].copy_from_slice(&signs(products).to_le_bytes());
                    }
                }
            }
            DigestKind::Channels => {
                for token in tokens {
                    keys.read(isa, token, &mut key);
                    self.project(isa, head, &key, &mut products);
                    let (channels, unit) = channels(&products);
                    for (channel, x) in channels.into_iter().enumerate() {
                        out[channel * PAGE + token] = x.cast_unsigned();
                    }
                    let at = self.width * PAGE + token * 2;
                    out[at..at + 2].copy_from_slice(&unit.to_le_bytes());
                }
            }
            DigestKind::Nibbles => {
                for token in tokens {
                    keys.read(isa, token, &mut key);
                    self.project(isa, head, &key, &mut products);
                    nibbles::write(&products, token, out);
                }
            }
            DigestKind::Bounds => {
                // From the page's first token on, whatever was appended last.
                let (mut least, mut most) =
                    (vec![f32::INFINITY; self.d], vec![f32::NEG_INFINITY; self.d]);
                for token in 0..tokens.end {
                    keys.read(isa, token, &mut key);
                    least.iter_mut().zip(&key).for_each(|(a, &b)| *a = a.min(b));
                    most.iter_mut().zip(&key).for_each(|(a, &b)| *a = a.max(b));
                }
                for (out, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(least.iter().chain(&most))
                {
                    *out = f16::from_f32(*x).to_le_bytes();
                }
            }
        }
    }
}

/// Bits of the products that are above 0.
pub(crate) fn signs(products: &[f32; 64]) -> u64 {
    let mut word = 0;
    for (bit, &x) in products.iter().enumerate() {
        word |= u64::from(x > 0.0) << bit;
    }
    word
}

versions! {
    /// `out[i][r] = sum over e of frame[e][r] x[i][e]`.
    fn project(frame: &[f32], width: usize, x: &[f32], out: &mut [f32]) = project_inner;
}

#[inline(always)]
fn project_inner<const FUSED: bool>(frame: &[f32], width: usize, x: &[f32], out: &mut [f32]) {
    let d = frame.len() / width;
    // The frame is read once for up to four vectors: it is larger than the nearest cache.
    for (x, out) in x.chunks(4 * d).zip(out.chunks_mut(4 * width)) {
        match x.len() / d {
            4 => project_few::<FUSED, 4>(frame, width, x, out),
            3 => project_few::<FUSED, 3>(frame, width, x, out),
            2 => project_few::<FUSED, 2>(frame, width, x, out),
            _ => project_few::<FUSED, 1>(frame, width, x, out),
        }
    }
}

#[inline(always)]
fn project_few<const FUSED: bool, const N: usize>(
    frame: &[f32],
    width: usize,
    x: &[f32],
    out: &mut [f32],
) {
    let (wide, half, narrow) = (width / 64 * 64, width / 32 * 32, width / 16 * 16);
    for start in (0..wide).step_by(64) {
        project_block::<FUSED, N, 64>(frame, (width, start), x, out);
    }
    for start in (wide..half).step_by(32) {
        project_block::<FUSED, N, 32>(frame, (width, start), x, out);
    }
    for start in (half..narrow).step_by(16) {
        project_block::<FUSED, N, 16>(frame, (width, start), x, out);
    }
    for start in narrow..width {
        project_block::<FUSED, N, 1>(frame, (width, start), x, out);
    }
}

#[inline(always)]
fn project_block<const FUSED: bool, const N: usize, const W: usize>(
    frame: &[f32],
    (width, start): (usize, usize),
    x: &[f32],
    out: &mut [f32],
) {
    let d = x.len() / N;
    let mut sums = [[0.0; W]; N];
    for (e, row) in frame.chunks_exact(width).enumerate() {
        let row = &row[start..start + W];
        for (i, sums) in sums.iter_mut().enumerate() {
            let x = x[i * d + e];
            for (sum, &w) in sums.iter_mut().zip(row) {
                *sum = fma::<FUSED>(w, x, *sum);
            }
        }
    }
    for (out, sums) in out.chunks_exact_mut(width).zip(&sums) {
        out[start..start + W].copy_from_slice(sums);
    }
}

/// The keys of one page of one head, in rows.
struct Keys<'a> {
    page: &'a [u8],
    dtype: KvDtype,
    d: usize,
}

impl Keys<'_> {
    fn read(&self, isa: Isa, token: usize, key: &mut [f32]) {
        let len = self.dtype.scale_bytes() + self.d * self.dtype.bytes();
        let bytes = &self.page[2 * token * len..][..len];
        row_to_floats(isa, self.dtype, bytes, key);
    }
}

/// Converts stored elements to floats.
pub(crate) fn row_to_floats(isa: Isa, dtype: KvDtype, bytes: &[u8], out: &mut [f32]) {
    if dtype == KvDtype::F32 {
        for (out, &word) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *out = f32::from_le_bytes(word);
        }
    } else if let Some(code) = code(dtype) {
        nuthatch_backend::cold::decode(code, bytes, out);
    } else {
        to_floats(isa, dtype, bytes, out);
    }
}

/// Tokens of one page whose digests are to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageTokens {
    /// Layers and heads counted together.
    pub(crate) head: usize,
    pub(crate) slot: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// All digests of an arena, written by several threads.
pub(crate) struct Encoding<'a> {
    isa: Isa,
    dtype: KvDtype,
    d: usize,
    digests: Vec<(&'a Encoder, SharedMut<'a, u8>)>,
}

impl<'a> Encoding<'a> {
    /// The digests of an arena of this shape.
    pub(crate) fn new(isa: Isa, dtype: KvDtype, d: usize, digests: &'a mut [DigestPages]) -> Self {
        let digests = digests
            .iter_mut()
            .map(|digest| (&digest.encoder, SharedMut::new(&mut digest.bytes[..])))
            .collect();
        Encoding { isa, dtype, d, digests }
    }

    /// Whether a digest is of all tokens of a page, and not of each alone.
    pub(crate) fn is_of_pages(&self) -> bool {
        self.digests.iter().any(|(encoder, _)| encoder.kind == DigestKind::Bounds)
    }

    /// Makes the digests of some tokens of one page, whose bytes are `page`; those before them are read only if a
    /// digest is of all tokens. Each page of each head is given to one thread at a time.
    pub(crate) fn run(&self, at: PageTokens, page: &[u8]) {
        let keys = Keys { page, dtype: self.dtype, d: self.d };
        for (encoder, bytes) in &self.digests {
            let start = encoder.page_start(at.head, at.slot);
            #[expect(unsafe_code, reason = "threads write disjoint pages")]
            // SAFETY: the caller gives each page of each head to one thread, and pages do not
            // overlap.
            let out = unsafe { bytes.part(start, encoder.page_bytes) };
            encoder.encode(self.isa, at.head, &keys, at.start..at.end, out);
        }
    }
}

/// Makes the digests of whole pages again, of all layers and heads.
pub(crate) fn encode_pages(isa: Isa, pool: &Pool, kv: &mut CpuKv, slots: &[usize]) {
    if kv.digests.is_empty() {
        return;
    }
    let (dtype, d, heads) = (kv.shape.dtype, kv.shape.head_dim as usize, kv.n_heads());
    let mut digests = std::mem::take(&mut kv.digests);
    let encoding = Encoding::new(isa, dtype, d, &mut digests);
    let pages = &*kv;
    pool.run(heads, &|head| {
        let mut buffer = Vec::new();
        for &slot in slots {
            let page = pages.page(head, slot, &mut buffer);
            encoding.run(PageTokens { head, slot, start: 0, end: PAGE }, page);
        }
    });
    kv.digests = digests;
}
