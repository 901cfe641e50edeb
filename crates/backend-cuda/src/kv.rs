//! The arena of keys and values: `[layer][kv head][slot]`, and inside a page of one head the order
//! that `kernels/kv.cuh` draws.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use nuthatch_backend::{DeviceError, NearCounts, PageLayout, RowCode};
use nuthatch_types::{HeadSet, KvDtype, KvShape, KvSlots, LayerSet, PageImage, Slot};

use crate::device::{Device, Memory};
use crate::door::Door;
use crate::launch::{CodeRows, NearPages, count};
use crate::link::Link;
use crate::near::{ChosenRows, Codes, Near};
use crate::pinned::PinnedMemory;
use crate::sparse::Sparse;

/// Tokens of a page.
pub(crate) const PAGE_LEN: usize = 16;

/// What decides the bytes of one head's page, and the kernels for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PageShape {
    pub(crate) dtype: KvDtype,
    pub(crate) head_dim: u32,
}

impl PageShape {
    /// That of a layer.
    pub(crate) fn of_layer(shape: &KvShape, layer: u32) -> Self {
        PageShape { dtype: shape.dtype.of_layer(layer), head_dim: shape.head_dim }
    }

    /// Those of all layers: of those that are unlike others, if there are any, at last.
    pub(crate) fn all(shape: &KvShape) -> Vec<Self> {
        let mut pages: Vec<Self> = (0..shape.n_layers).map(|l| Self::of_layer(shape, l)).collect();
        pages.sort_unstable_by_key(|page| (!page.dtype.is_coded(), *page));
        pages.dedup();
        pages
    }

    /// Elements of a head as they are stored: with 16 bits and less, a multiple of 32.
    pub(crate) fn width(self) -> usize {
        let head_dim = self.head_dim as usize;
        match self.dtype {
            KvDtype::F32 => head_dim,
            KvDtype::F16 | KvDtype::Bf16 | KvDtype::Int8(_) | KvDtype::Fp8(_) => {
                head_dim.next_multiple_of(32)
            }
        }
    }

    /// Bytes of one head's page.
    pub(crate) fn bytes(self) -> usize {
        2 * PAGE_LEN * (self.width() * self.dtype.bytes() + self.dtype.scale_bytes())
    }

    /// Bytes of one head's page of a working set: rows may stay in eight bits as they come, each with its factors.
    pub(crate) fn set_bytes(self, is_kept: bool) -> usize {
        if is_kept { 2 * PAGE_LEN * (self.width() + 2) } else { self.bytes() }
    }

    /// Whether rows that come so stay so in working sets: `KEEPS_CODES` of the kernels.
    pub(crate) fn keeps(self, code: RowCode) -> bool {
        matches!(self.dtype, KvDtype::F16 | KvDtype::Bf16) && code == RowCode::Fp8
    }
}

/// Where eight columns of a token's key are, as `kernels/kv.cuh` counts them.
fn key_piece(width: usize, token: usize, c: usize) -> usize {
    token / 8 * width + c / 4 * 32 + token % 8 * 4 + ((c % 4) ^ (token % 8 / 2))
}

/// Where one column of eight tokens' values is, from the first value on.
fn value_piece(column: usize, c: usize) -> usize {
    column * 2 + (c ^ (column / 4 % 2))
}

/// Single tokens are chosen and brought only where keys and values are floats.
pub(crate) fn refuse_rows(dtype: KvDtype) -> DeviceError {
    let fault = format!(
        "keys and values as {dtype}, and --sparse or --kv-offload: a GPU has one or the other"
    );
    DeviceError::Fault(fault)
}

/// Whether there are kernels for pages of this shape.
fn check(shape: &KvShape, is_far: bool) -> Result<(), DeviceError> {
    if shape.page_len as usize != PAGE_LEN {
        let fault = format!("pages of {} tokens; this device has {PAGE_LEN}", shape.page_len);
        return Err(DeviceError::Fault(fault));
    }
    if let Some(layer) = shape.dtype.wide_layers().layers().find(|&l| l >= shape.n_layers) {
        let fault =
            format!("layer {layer} of the KV cache cannot be f16: there are {}", shape.n_layers);
        return Err(DeviceError::Fault(fault));
    }
    if is_far && shape.dtype.is_coded() {
        return Err(refuse_rows(shape.dtype));
    }
    if !shape.head_dim.is_multiple_of(8) {
        let fault = format!("heads of width {}; this device needs a multiple of 8", shape.head_dim);
        return Err(DeviceError::Fault(fault));
    }
    Ok(())
}

/// Pages are far, in memory of the host, which kernels read and write over the link: for top-k attention,
/// whose working sets are on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FarPages {
    /// Pages that have copies on the device.
    pub n_near: u32,
    /// Layers whose pages are on the device.
    pub resident: LayerSet,
    /// Threads of the host that bring rows; if none, the device reads them over the link by itself.
    pub n_threads: u32,
    /// What rows are brought as: half the bytes, if in eight bits. Pages are as they are, and there is half as
    /// much beside them.
    pub code: Option<RowCode>,
    /// Heads, counting those of all layers, whose rows in eight bits are on the device; threads of the host bring
    /// none of these.
    pub coded_here: HeadSet,
    /// Orders after which one of the threads fails: for tests.
    pub fails_after: Option<u32>,
}

/// Where the pages of the device tier are.
struct Arena {
    /// Of resident layers, or of all.
    device: Memory,
    /// Of the others.
    far: Option<PinnedMemory>,
    resident: LayerSet,
    /// Heads on the device.
    n_resident: usize,
    /// Threads that bring rows of the others.
    n_threads: u32,
    fails_after: Option<u32>,
}

/// Heads whose pages are alike and in one run of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadRun {
    pub(crate) first: usize,
    pub(crate) n: usize,
    pub(crate) address: u64,
    pub(crate) page: PageShape,
    /// Bytes of a page that belong to the heads before it.
    pub(crate) before: usize,
}

/// The keys and values of all layers.
pub struct CudaKv {
    pub(crate) shape: KvShape,
    /// Of one layer, or of all where pages are of rows or far.
    pub(crate) page: PageShape,
    /// `[heads + 1]` bytes of a page that belong to the heads before each.
    starts: Vec<usize>,
    pub(crate) slots: KvSlots,
    arena: Arena,
    /// The pages that wait on the host, in the same order.
    pub(crate) host: Option<PinnedMemory>,
    /// Room for one page on its way out: `[layer][kv head]`.
    pub(crate) gate: PinnedMemory,
    /// Room for pages on their way in, when there were some.
    pub(crate) door: Option<Door>,
    /// Copies of pages that are far.
    pub(crate) near: Option<Near>,
    /// Rows in eight bits beside those.
    pub(crate) codes: Option<Codes>,
    /// Rows that the host keeps on the device, where it decides.
    pub(crate) chosen: Option<ChosenRows>,
    /// What top-k attention keeps; its pages are of rows.
    pub(crate) sparse: Option<Sparse>,
    /// By row of the tables, pages that have memory behind them, where it comes little by little.
    backed: Mutex<BTreeMap<u32, u32>>,
}

impl CudaKv {
    pub(crate) fn new(
        device: &Device,
        shape: KvShape,
        slots: KvSlots,
        far: Option<FarPages>,
    ) -> Result<Self, DeviceError> {
        check(&shape, far.is_some())?;
        let page = PageShape::of_layer(&shape, 0);
        let layers = (0..shape.n_layers).flat_map(|layer| vec![layer; shape.n_kv_heads as usize]);
        let mut starts = vec![0];
        for layer in layers {
            starts.push(starts[starts.len() - 1] + PageShape::of_layer(&shape, layer).bytes());
        }
        let heads = starts.len() - 1;
        let bytes = |n_slots: u32| starts[heads].saturating_mul(n_slots as usize);
        let stays = |layer: &u32| far.is_none_or(|far| far.resident.contains(*layer));
        let n_whole = (0..shape.n_layers).filter(stays).count();
        let n_resident = n_whole * shape.n_kv_heads as usize;
        let here = starts[n_resident].saturating_mul(slots.device as usize);
        let n_far = heads - n_resident;
        let arena = Arena {
            device: device.alloc_kv(here)?,
            far: match bytes(slots.device) - here {
                0 => None,
                n => Some(PinnedMemory::new(device, n, "the KV cache on the host")?),
            },
            resident: far.map_or(LayerSet::NONE, |far| far.resident),
            n_resident,
            n_threads: far.map_or(0, |far| far.n_threads),
            fails_after: far.and_then(|far| far.fails_after),
        };
        let near = match (far, &arena.far) {
            (Some(far), Some(pages)) => {
                let layers = (page.bytes() * n_far, shape.n_layers - count(n_whole));
                Some(Near::new(device, layers, (slots.device, far.n_near), pages)?)
            }
            _ => None,
        };
        let code = far.and_then(|far| far.code).filter(|_| arena.far.is_some());
        let coded_here =
            far.filter(|far| far.n_threads == 0).map_or(HeadSet::NONE, |far| far.coded_here);
        let is_here = |head: &usize| coded_here.contains(*head);
        let n_layer = shape.n_kv_heads as usize;
        let is_far = |head: &usize| !stays(&count(head / n_layer));
        let are_here: Vec<bool> = (0..heads).filter(is_far).map(|head| is_here(&head)).collect();
        let codes_of = |code| Codes::new(device, code, page, (&are_here, slots.device));
        let codes = code.map(codes_of).transpose()?;
        let host = match slots.host {
            0 => None,
            n => Some(PinnedMemory::new(device, bytes(n), "the host's KV pages")?),
        };
        let gate = PinnedMemory::new(device, bytes(1), "a KV page on its way")?;
        Ok(CudaKv {
            shape,
            page,
            starts,
            slots,
            arena,
            host,
            gate,
            door: None,
            near,
            codes,
            chosen: None,
            sparse: None,
            backed: Mutex::default(),
        })
    }

    pub(crate) fn has_link(&self) -> bool {
        self.arena.n_threads > 0 && self.arena.far.is_some()
    }

    /// Threads that bring rows of pages that are far, if that is how they come.
    pub(crate) fn start_link(&self, device: &Device) -> Result<Option<Link>, DeviceError> {
        let (Some((first, n)), true) = (self.far_heads(), self.has_link()) else {
            return Ok(None);
        };
        let half_page = self.page.bytes() / 2;
        let pages = first..first + self.head_bytes() * n as u64;
        let (pages, sizes) = match self.codes.as_ref().map(|codes| codes.all(n)) {
            Some((codes, width)) => (codes, (width, width)),
            None => (pages, (half_page / PAGE_LEN, half_page)),
        };
        let threads = (self.arena.n_threads, self.arena.fails_after);
        Link::start(device, threads, sizes, pages).map(Some)
    }

    /// Bytes of a page over all layers, and how they lie; `is_exact` says how they were computed.
    pub(crate) fn page_image(&self, arch: &str, is_exact: bool) -> PageImage {
        let bytes = self.page_bytes();
        let layout = format!("cuda 1, {arch}, exact {is_exact}, {:?}", self.shape);
        let is_even = self.shape.dtype.wide_layers().is_empty() && self.arena.far.is_none();
        let layer_bytes = is_even.then(|| bytes / self.shape.n_layers.max(1) as usize);
        PageImage { bytes, layer_bytes, layout }
    }

    /// Heads of all layers.
    pub(crate) fn n_heads(&self) -> usize {
        self.shape.n_layers as usize * self.shape.n_kv_heads as usize
    }

    /// Where the numbers of a page are, if they are floats.
    pub(crate) fn page_layout(&self) -> Option<PageLayout> {
        let KvShape { n_layers, n_kv_heads, head_dim, dtype, .. } = self.shape;
        let (width, d) = (self.page.width(), head_dim as usize);
        let place = move |token: usize, is_value: bool, i: usize| match (dtype, is_value) {
            (KvDtype::F32, _) => (token + usize::from(is_value) * PAGE_LEN) * width + i,
            (_, false) => key_piece(width, token, i / 8) * 8 + i % 8,
            (_, true) => PAGE_LEN * width + value_piece(i, token / 8) * 8 + token % 8,
        };
        let (places, head_len) = (PageLayout::places(PAGE_LEN, d, place), 2 * PAGE_LEN * width);
        let layout = PageLayout { n_layers, n_kv_heads, d, dtype, places, head_len, tail_bytes: 0 };
        (!dtype.is_coded() && self.sparse.is_none()).then_some(layout)
    }

    /// Bytes of a page over all layers.
    pub(crate) fn page_bytes(&self) -> usize {
        self.starts[self.n_heads()]
    }

    /// Bytes of one head's part of a page, counting all layers' heads.
    fn head_page_bytes(&self, head: usize) -> usize {
        self.starts[head + 1] - self.starts[head]
    }

    /// Which bytes of a page are each head's, and where these start in the host's pages.
    pub(crate) fn host_parts(&self, slot: Slot) -> Vec<(Range<usize>, usize)> {
        let (n_host, place) = (self.slots.host as usize, (slot.0 - self.slots.device) as usize);
        let part = |head: usize| {
            let at = self.starts[head] * n_host + place * self.head_page_bytes(head);
            (self.starts[head]..self.starts[head + 1], at)
        };
        (0..self.n_heads()).map(part).collect()
    }

    /// Puts memory behind slots, for all heads of all layers, and gives the bytes behind all slots.
    pub(crate) fn back(&self, device: &Device, slots: Range<u32>) -> Result<usize, DeviceError> {
        assert!(slots.end <= self.slots.device, "slots of the arena");
        let (memory, n_slots) = (&self.arena.device, self.slots.device as usize);
        let at = |head: usize, slot: u32| {
            self.starts[head] * n_slots + slot as usize * self.head_page_bytes(head)
        };
        for head in 0..self.arena.n_resident {
            device.back(memory, at(head, slots.start)..at(head, slots.end))?;
        }
        Ok(memory.backed_bytes())
    }

    /// Puts memory behind the first pages of a row of tables that are `table_len` long, many at a time.
    pub(crate) fn back_table(
        &self,
        device: &Device,
        (row, table_len): (u32, u32),
        n_pages: u32,
    ) -> Result<(), DeviceError> {
        /// Bytes of a head that are backed at once; the driver's granule is no larger.
        const RUN_BYTES: usize = 2 << 20;
        let mut all = self.backed.lock().unwrap_or_else(PoisonError::into_inner);
        let backed = all.entry(row).or_default();
        if n_pages <= *backed {
            return Ok(());
        }
        let run = (RUN_BYTES / self.page.bytes()).max(1) as u32;
        let (first, end) = (*backed, n_pages.next_multiple_of(run).min(table_len));
        self.back(device, row * table_len + first..row * table_len + end)?;
        *backed = end;
        Ok(())
    }

    /// Bytes of all device slots of one head, where all are alike.
    pub(crate) fn head_bytes(&self) -> u64 {
        self.page.bytes() as u64 * u64::from(self.slots.device)
    }

    /// The same of one head of a layer.
    pub(crate) fn layer_head_bytes(&self, layer: u32) -> u64 {
        let head = (layer * self.shape.n_kv_heads) as usize;
        self.head_page_bytes(head) as u64 * u64::from(self.slots.device)
    }

    /// How the pages of a layer lie.
    pub(crate) fn page_of(&self, layer: u32) -> PageShape {
        PageShape::of_layer(&self.shape, layer)
    }

    /// Heads by where and what their pages are, in order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = HeadRun> + use<> {
        let mut runs: Vec<HeadRun> = Vec::new();
        for layer in 0..self.shape.n_layers {
            let (page, n) = (self.page_of(layer), self.shape.n_kv_heads as usize);
            let first = layer as usize * n;
            match runs.last_mut() {
                Some(run) if run.page == page && !self.turns_at(layer) => run.n += n,
                _ => {
                    let (address, before) = (self.head_address(first), self.starts[first]);
                    runs.push(HeadRun { first, n, address, page, before });
                }
            }
        }
        runs.into_iter()
    }

    /// Where the pages of all heads are that are far, and how many these are.
    pub(crate) fn far_heads(&self) -> Option<(u64, usize)> {
        let far = self.arena.far.as_ref()?;
        Some((far.address(), self.n_heads() - self.arena.n_resident))
    }

    /// Whether the pages of a layer are far.
    pub(crate) fn is_far(&self, layer: u32) -> bool {
        self.arena.far.is_some() && !self.arena.resident.contains(layer)
    }

    /// Whether the pages of a layer are elsewhere than those of the one before it.
    fn turns_at(&self, layer: u32) -> bool {
        layer > 0 && self.is_far(layer) != self.is_far(layer - 1)
    }

    /// How many layers before this one are where it is.
    pub(crate) fn rank(&self, layer: u32) -> u32 {
        count((0..layer).filter(|&other| self.is_far(other) == self.is_far(layer)).count())
    }

    /// The next layer whose pages are far.
    pub(crate) fn far_after(&self, layer: u32) -> Option<u32> {
        (layer + 1..self.shape.n_layers).find(|&layer| self.is_far(layer))
    }

    /// Where the pages of a head are, counting all layers' heads.
    pub(crate) fn head_address(&self, head: usize) -> u64 {
        let Some(far) = &self.arena.far else {
            let before = self.starts[head] as u64 * u64::from(self.slots.device);
            return self.arena.device.address() + before;
        };
        let n = self.shape.n_kv_heads as usize;
        let layer = count(head / n);
        let before = u64::from(self.rank(layer)) * n as u64 + (head % n) as u64;
        let is_far = self.is_far(layer);
        let memory = if is_far { far.address() } else { self.arena.device.address() };
        memory + before * self.head_bytes()
    }

    /// Where the copies of a layer's pages are, of all heads.
    pub(crate) fn near_pages(&self, layer: u32) -> NearPages {
        let near = self.near.as_ref().filter(|_| self.is_far(layer));
        let copies = near.and_then(|near| near.of_layer((layer, self.rank(layer)), self));
        copies.unwrap_or(NearPages::NONE)
    }

    /// The same, as long as the pass takes.
    pub(crate) fn lasting_pages(&self, layer: u32) -> NearPages {
        let takes_turns = self.near.as_ref().is_some_and(Near::takes_turns);
        if takes_turns { NearPages::NONE } else { self.near_pages(layer) }
    }

    /// Where rows that are written go beside a layer's pages: copies of its first heads, and of how many.
    pub(crate) fn written_pages(&self, layer: u32) -> (NearPages, u32) {
        let in_turn = self.near.as_ref().filter(|_| self.is_far(layer));
        let in_turn = in_turn.and_then(|near| near.written(layer, self));
        in_turn.unwrap_or_else(|| (self.near_pages(layer), self.shape.n_kv_heads))
    }

    /// Rows in eight bits beside a layer's pages.
    pub(crate) fn codes_of(&self, layer: u32) -> CodeRows {
        let Some(codes) = self.codes.as_ref().filter(|_| self.is_far(layer)) else {
            return CodeRows::NONE;
        };
        codes.starting_at((self.rank(layer) * self.shape.n_kv_heads) as usize)
    }

    /// Whether the working sets of a layer have rows in eight bits.
    pub(crate) fn keeps_codes(&self, layer: u32) -> bool {
        let codes = self.codes.as_ref().filter(|_| self.is_far(layer));
        codes.is_some_and(|codes| self.page.keeps(codes.code()))
    }

    /// Whether the working sets of some layers have rows in eight bits, and others rows as they are.
    pub(crate) fn has_both_sets(&self) -> bool {
        (1..self.shape.n_layers).any(|layer| self.keeps_codes(layer) != self.keeps_codes(0))
    }

    /// [`CudaKv::codes_of`], for what decides: to its working sets rows may come as they are.
    pub(crate) fn kept_codes_of(&self, layer: u32) -> CodeRows {
        CodeRows { are_kept: self.keeps_codes(layer).into(), ..self.codes_of(layer) }
    }

    /// These pages were written, but not their copies on the device.
    pub(crate) fn forget_near(
        &self,
        device: &Device,
        slots: impl Iterator<Item = Slot>,
    ) -> Result<(), DeviceError> {
        self.near.as_ref().map_or(Ok(()), |near| near.forget(device, slots))
    }

    /// Rows that were copied to the device because they were missing there.
    pub(crate) fn near_counts(&self) -> NearCounts {
        let (n_loaded, link_rate) =
            self.near.as_ref().map_or((0, 0), |near| (near.n_loaded(), near.link_rate));
        let rows = (PAGE_LEN * (self.n_heads() - self.arena.n_resident)) as u64;
        let coded_row_bytes = self.codes.as_ref().map_or(0, Codes::row_bytes);
        let n_brought = self.chosen.as_ref().map_or(0, ChosenRows::n_brought);
        NearCounts {
            n_brought,
            n_filled: n_loaded * rows,
            coded_row_bytes,
            link_rate,
            file_bytes: 0,
        }
    }

    /// Where the heads of a layer start.
    pub(crate) fn layer_address(&self, layer: u32) -> u64 {
        assert!(layer < self.shape.n_layers, "a layer of the model");
        self.head_address((layer * self.shape.n_kv_heads) as usize)
    }
}
