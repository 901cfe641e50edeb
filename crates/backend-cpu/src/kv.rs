//! The arena of keys and values: `[layer][kv head][slot]`, and inside a page of one head
//! `K: [D][16 tokens]`, then `V: [16 tokens][D]`.
//!
//! Keys are stored across tokens because a query meets sixteen of them at once: one load gives one
//! element of sixteen keys, and the scores of a page are one register. Values are stored along the
//! head because an output row is a sum of whole values.
//!
//! An arena with digests is read token by token and holds rows instead: `[16 tokens][K|V][D]`.
//! Attention over whole pages converts these to the order above, and gives the same bits. So does one
//! whose pages are in a file. Elements of eight bits have scales, see `coded`.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};
use nuthatch_backend::{DeviceError, Digest, Near, PageLayout, RowCode};
use nuthatch_types::{KvDtype, KvShape, PageCopy, PageImage, Slot};

use crate::coded::{CodedPage, code};
use crate::far::PageFile;
use crate::isa::Isa;
use crate::mem::{Region, SharedMut};
use crate::near::{NearRows, Worker};
use crate::pack::LANES;
use crate::topk::{DigestPages, row_to_floats};

/// Tokens of a page: one register of scores.
pub(crate) const PAGE: usize = LANES;

/// The keys and values of all layers.
pub struct CpuKv {
    pub(crate) shape: KvShape,
    pub(crate) n_slots: usize,
    /// `[layers * heads]` where the pages of each head start.
    head_starts: Vec<usize>,
    /// All pages; empty if they are in a file.
    pub(crate) bytes: Region<u8>,
    pub(crate) file: Option<Arc<PageFile>>,
    /// Rows of running sequences, if some are kept near.
    pub(crate) near: Option<Arc<NearRows>>,
    /// Brings rows from the file while others compute.
    pub(crate) worker: Option<Worker>,
    /// Whether pages hold rows.
    pub(crate) by_rows: bool,
    pub(crate) digests: Vec<DigestPages>,
}

/// The rows of one head, `[slot][16]`. What a row's place takes is computed once for many of them.
pub(crate) struct HeadRows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
}

impl HeadRows<'_> {
    #[inline]
    pub(crate) fn address(&self, slot: usize, offset: usize) -> *const u8 {
        self.bytes[(slot * PAGE + offset) * self.row_bytes..][..self.row_bytes].as_ptr()
    }
}

impl CpuKv {
    /// Pages in memory, or in a file of their own.
    pub(crate) fn new(
        shape: KvShape,
        n_slots: u32,
        path: Option<&Path>,
    ) -> Result<Self, DeviceError> {
        if shape.page_len as usize != PAGE {
            let fault = format!("pages of {} tokens; this device has 16", shape.page_len);
            return Err(DeviceError::Fault(fault));
        }
        if let Some(layer) = shape.dtype.wide_layers().layers().find(|&l| l >= shape.n_layers) {
            let fault = format!(
                "layer {layer} of the KV cache cannot be f16: there are {}",
                shape.n_layers
            );
            return Err(DeviceError::Fault(fault));
        }
        let n_slots = n_slots as usize;
        let bytes = shape.page_bytes().saturating_mul(n_slots);
        let file = path.map(|path| PageFile::create(path, bytes).map(Arc::new)).transpose()?;
        let bytes = if file.is_some() { 0 } else { bytes };
        let bytes = Region::zeroed(bytes, "the KV cache")?;
        let by_rows = file.is_some();
        if by_rows {
            one_type(shape)?;
        }
        let layers = (0..shape.n_layers).flat_map(|layer| vec![layer; shape.n_kv_heads as usize]);
        let head_starts = layers.scan(0, |next, layer| {
            let start = *next;
            *next += n_slots * PAGE * shape.row_bytes(layer);
            Some(start)
        });
        let head_starts = head_starts.collect();
        let (near, worker, digests) = (None, None, Vec::new());
        Ok(CpuKv { shape, n_slots, head_starts, bytes, file, near, worker, by_rows, digests })
    }

    pub(crate) fn keep_near(
        &mut self,
        near: &Near,
        code: Option<RowCode>,
    ) -> Result<(), DeviceError> {
        assert_eq!(near.heads.len(), self.n_heads(), "something for each head");
        one_type(self.shape)?;
        let dtype = self.shape.dtype;
        if let Some(code) = code.filter(|_| dtype.is_coded()) {
            let fault = format!("rows as {code} from pages that are {dtype} already");
            return Err(DeviceError::Fault(fault));
        }
        let code = code.map(|code| (code, dtype));
        let near = Arc::new(NearRows::new(near, self.row_bytes(0), code)?);
        self.worker = self.file.as_ref().map(|file| Worker::start(file, &near)).transpose()?;
        self.near = Some(near);
        self.by_rows = true;
        Ok(())
    }

    /// What went wrong with the file so far, if anything did.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        self.file.as_ref().map_or(Ok(()), |file| file.check())
    }

    /// Copies bytes of pages.
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) {
        match &self.file {
            Some(file) => file.read(at, out),
            None => out.copy_from_slice(&self.bytes[at..at + out.len()]),
        }
    }

    /// The keys of one head in slots at offsets, `[n][D]`, where pages hold rows.
    pub(crate) fn read_keys(
        &self,
        isa: Isa,
        head: usize,
        places: impl Iterator<Item = (usize, usize)>,
    ) -> Vec<f32> {
        assert!(self.by_rows, "an arena with digests");
        let mut key = vec![0.0; self.shape.head_dim as usize];
        let mut bytes = vec![0; self.row_bytes(head) / 2];
        let mut keys = Vec::new();
        for (slot, offset) in places {
            self.read(self.row_start(head, slot, offset), &mut bytes);
            row_to_floats(isa, self.shape.dtype, &bytes, &mut key);
            keys.extend_from_slice(&key);
        }
        keys
    }

    /// One head's part of a page, in `buffer` if it is in a file.
    pub(crate) fn page<'b>(
        &'b self,
        head: usize,
        slot: usize,
        buffer: &'b mut Vec<u8>,
    ) -> &'b [u8] {
        let (at, len) = (self.page_start(head, slot), self.head_page_bytes(head));
        match &self.file {
            None => &self.bytes[at..at + len],
            Some(file) => {
                buffer.resize(len, 0);
                file.read(at, buffer);
                buffer
            }
        }
    }

    /// Layers and heads.
    pub(crate) fn n_heads(&self) -> usize {
        self.shape.n_layers as usize * self.shape.n_kv_heads as usize
    }

    pub(crate) fn keep_digests(&mut self, digests: &[Digest]) -> Result<(), DeviceError> {
        one_type(self.shape)?;
        let (heads, d) = (self.n_heads(), self.shape.head_dim as usize);
        let pages = digests.iter().map(|digest| DigestPages::new(digest, heads, self.n_slots, d));
        self.digests = pages.collect::<Result<_, _>>()?;
        self.by_rows = true;
        Ok(())
    }

    /// Layers and heads counted together.
    pub(crate) fn head_number(&self, layer: usize, head: usize) -> usize {
        assert!(layer < self.shape.n_layers as usize && head < self.shape.n_kv_heads as usize);
        layer * self.shape.n_kv_heads as usize + head
    }

    /// Bytes of one token's key and value of one head, counted over layers and heads.
    pub(crate) fn row_bytes(&self, head: usize) -> usize {
        self.shape.row_bytes(head as u32 / self.shape.n_kv_heads)
    }

    /// Bytes of one head's part of a page.
    pub(crate) fn head_page_bytes(&self, head: usize) -> usize {
        PAGE * self.row_bytes(head)
    }

    /// First byte of a page; `head` counts layers and heads together.
    pub(crate) fn page_start(&self, head: usize, slot: usize) -> usize {
        assert!(slot < self.n_slots, "slot outside the arena");
        self.head_starts[head] + slot * self.head_page_bytes(head)
    }

    /// The rows of one head's pages, if they are in memory.
    pub(crate) fn head_rows(&self, head: usize) -> Option<HeadRows<'_>> {
        let (start, row_bytes) = (self.head_starts[head], self.row_bytes(head));
        let bytes = self.bytes.get(start..start + self.n_slots * PAGE * row_bytes)?;
        Some(HeadRows { bytes, row_bytes })
    }

    /// First byte of a row, where pages hold rows.
    pub(crate) fn row_start(&self, head: usize, slot: usize, offset: usize) -> usize {
        self.page_start(head, slot) + offset * self.row_bytes(head)
    }

    pub(crate) fn copy_pages(&mut self, copies: &[PageCopy]) {
        let heads = self.n_heads();
        let mut buffer = Vec::new();
        for head in 0..heads {
            let len = self.head_page_bytes(head);
            for copy in copies {
                let source = self.page_start(head, copy.source.0 as usize);
                let target = self.page_start(head, copy.target.0 as usize);
                match &self.file {
                    None => self.bytes.copy_within(source..source + len, target),
                    Some(file) => {
                        file.write(target, self.page(head, copy.source.0 as usize, &mut buffer));
                    }
                }
            }
        }
        for digest in &mut self.digests {
            digest.copy_pages(heads, copies);
        }
    }

    /// How a page's bytes leave: `[layer][head]` the page of the head, and then so for each digest.
    pub(crate) fn page_image(&self, isa: Isa) -> PageImage {
        let digests = self.digests.iter().map(|digest| digest.encoder.page_bytes);
        let bytes = self.shape.page_bytes() + self.n_heads() * digests.sum::<usize>();
        let order = if self.by_rows { "rows" } else { "keys across tokens" };
        let mut layout = format!("cpu 1, {isa}, {order}, {:?}", self.shape);
        for digest in &self.digests {
            layout += &format!(", {}", digest.encoder.mark());
        }
        let is_even = self.digests.is_empty() && self.shape.dtype.wide_layers().is_empty();
        let layer_bytes = is_even.then(|| bytes / self.shape.n_layers.max(1) as usize);
        PageImage { bytes, layer_bytes, layout }
    }

    /// Where the numbers of a page of so many bytes are, if they are floats.
    pub(crate) fn page_layout(&self, page_bytes: usize) -> Option<PageLayout> {
        let KvShape { n_layers, n_kv_heads, head_dim, dtype, .. } = self.shape;
        let d = head_dim as usize;
        let place = |token: usize, is_value: bool, i: usize| match (self.by_rows, is_value) {
            (true, _) => (2 * token + usize::from(is_value)) * d + i,
            (false, false) => i * PAGE + token,
            (false, true) => (PAGE + token) * d + i,
        };
        let tail_bytes = page_bytes - self.shape.page_bytes();
        let (places, head_len) = (PageLayout::places(PAGE, d, place), 2 * PAGE * d);
        let layout = PageLayout { n_layers, n_kv_heads, d, dtype, places, head_len, tail_bytes };
        (!dtype.is_coded()).then_some(layout)
    }

    pub(crate) fn read_page(&self, slot: Slot, target: &mut [u8]) {
        let mut rest = target;
        for (arena, range) in self.parts(slot) {
            let (part, after) = rest.split_at_mut(range.len());
            match arena.checked_sub(1) {
                None => part.copy_from_slice(&self.bytes[range]),
                Some(digest) => part.copy_from_slice(&self.digests[digest].bytes[range]),
            }
            rest = after;
        }
        assert!(rest.is_empty(), "a page's bytes are as many as its image has");
    }

    pub(crate) fn write_page(&mut self, slot: Slot, start: usize, source: &[u8]) {
        let (mut rest, mut before) = (source, 0);
        for (arena, range) in self.parts(slot) {
            before += range.len();
            if before <= start || rest.is_empty() {
                continue;
            }
            let (part, after) = rest.split_at(range.len());
            match arena.checked_sub(1) {
                None => self.bytes[range].copy_from_slice(part),
                Some(digest) => self.digests[digest].bytes[range].copy_from_slice(part),
            }
            rest = after;
        }
        assert!(rest.is_empty(), "a page's bytes are as many as its image has");
    }

    /// Where a page's bytes are: in which arena, that of pages or those of digests, and which ones.
    fn parts(&self, slot: Slot) -> Vec<(usize, Range<usize>)> {
        let (heads, slot) = (0..self.n_heads(), slot.0 as usize);
        let pages = heads.clone().map(|head| {
            let start = self.page_start(head, slot);
            (0, start..start + self.head_page_bytes(head))
        });
        let digests = self.digests.iter().enumerate().flat_map(|(i, digest)| {
            let len = digest.encoder.page_bytes;
            heads.clone().map(move |head| {
                let start = (head * self.n_slots + slot) * len;
                (i + 1, start..start + len)
            })
        });
        pages.chain(digests).collect()
    }
}

/// Rows are brought and told apart by their length alone, so all layers have the same.
fn one_type(shape: KvShape) -> Result<(), DeviceError> {
    if shape.dtype.wide_layers().is_empty() {
        return Ok(());
    }
    let fault = "some layers of the KV cache cannot be f16 where tokens are chosen or pages are in a \
                 file: leave out --kv-cache-dtype-skip-layers, or --sparse and --kv-offload";
    Err(DeviceError::Fault(fault.to_owned()))
}

/// Where a token's key and value go in a page of one head.
#[derive(Clone, Copy)]
pub(crate) struct TokenPlace {
    /// First byte of the page.
    pub(crate) page: usize,
    /// Token of the page.
    pub(crate) offset: usize,
    pub(crate) dtype: KvDtype,
    /// Whether the page holds rows.
    pub(crate) by_rows: bool,
}

/// Writes one token's key and value into a page of one head; `buffer` is scratch.
pub(crate) fn write_token(
    bytes: SharedMut<'_, u8>,
    place: TokenPlace,
    (k, v): (&[f32], &[f32]),
    buffer: &mut Vec<u8>,
) {
    let TokenPlace { page, offset, dtype, by_rows } = place;
    let d = k.len();
    let size = dtype.bytes();
    let page_bytes = 2 * PAGE * (d * size + dtype.scale_bytes());
    #[expect(unsafe_code, reason = "threads write disjoint heads and tokens")]
    // SAFETY: callers write each (head, token) once per step, but tokens of one page interleave in
    // `K`; a page of one head is therefore written by one thread only (see `Cpu::rope_append`).
    let page = unsafe { bytes.part(page, page_bytes) };
    if let Some(code) = code(dtype) {
        let coded = CodedPage { code, d, by_rows };
        coded.write(page, (offset, false), k, buffer);
        coded.write(page, (offset, true), v, buffer);
        return;
    }
    // Element `i` of the key is at `first + i * step`; those of the value follow each other.
    let (keys, value, first, step) = if by_rows {
        let (key, value) = page[offset * 2 * d * size..][..2 * d * size].split_at_mut(d * size);
        (key, value, 0, 1)
    } else {
        let (keys, values) = page.split_at_mut(PAGE * d * size);
        (keys, &mut values[offset * d * size..(offset + 1) * d * size], offset, PAGE)
    };
    match dtype {
        KvDtype::F32 => {
            for (i, (&k, &v)) in k.iter().zip(v).enumerate() {
                let v = finite(v, f32::MAX);
                keys[(i * step + first) * 4..][..4].copy_from_slice(&k.to_le_bytes());
                value[i * 4..][..4].copy_from_slice(&v.to_le_bytes());
            }
        }
        KvDtype::F16 => {
            const MAX: f32 = 65504.0;
            for (i, (&k, &v)) in k.iter().zip(v).enumerate() {
                let (k, v) = (f16::from_f32(k.clamp(-MAX, MAX)), f16::from_f32(finite(v, MAX)));
                keys[(i * step + first) * 2..][..2].copy_from_slice(&k.to_le_bytes());
                value[i * 2..][..2].copy_from_slice(&v.to_le_bytes());
            }
        }
        KvDtype::Bf16 => {
            let max = bf16::MAX.to_f32();
            for (i, (&k, &v)) in k.iter().zip(v).enumerate() {
                let (k, v) = (bf16::from_f32(k), bf16::from_f32(finite(v, max)));
                keys[(i * step + first) * 2..][..2].copy_from_slice(&k.to_le_bytes());
                value[i * 2..][..2].copy_from_slice(&v.to_le_bytes());
            }
        }
        KvDtype::Int8(_) | KvDtype::Fp8(_) => unreachable!("they have codes"),
    }
}

/// The nearest number of at most `max`; 0 for NaN.
///
/// A value that is not finite would spoil rows that must not see it, because a masked key has
/// probability 0, and 0 times infinity is NaN. The sequence it belongs to is lost either way: its
/// own residual stream carries the NaN to its logits.
fn finite(x: f32, max: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(-max, max) }
}
