//! Memory for pages on their way to and from slower tiers. Buffers travel with jobs and come back, so
//! that there are never more than were counted at the start.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use nuthatch_backend::PageCodec;
use nuthatch_types::{PageKey, TokenId};

use crate::cipher::{RecordForm, StoreKey};
use crate::disk::{BLOCK, PageName, PartChecks, RecordShape};

/// Memory of one tier's buffers.
const BUFFER_BYTES: usize = 64 << 20;
/// The fewest and the most pages on their way in one direction.
const N_BUFFERS: (usize, usize) = (4, 1024);

/// How pages are made into records: coded or as they are, encrypted or not.
#[derive(Clone)]
pub struct RecordLayout {
    pub(crate) form: Arc<RecordForm>,
    pub(crate) codec: Option<Arc<dyn PageCodec>>,
}

impl RecordLayout {
    /// Records of this shape. With a codec they hold coded pages, whose bytes the shape has; it also
    /// says whether there is a key.
    pub fn new(
        shape: RecordShape,
        codec: Option<Arc<dyn PageCodec>>,
        key: Option<&StoreKey>,
    ) -> Self {
        RecordLayout { form: Arc::new(RecordForm::new(shape, key)), codec }
    }
}

/// Bytes that begin at a multiple of [`BLOCK`] in memory, as direct I/O asks, and stay there.
#[derive(Debug, Default)]
pub struct Blocks {
    memory: Vec<u8>,
    range: Range<usize>,
}

impl Blocks {
    pub(crate) fn new(n_bytes: usize) -> Self {
        let memory = vec![0; n_bytes + BLOCK];
        // Where it cannot be known, direct I/O fails and is done otherwise.
        let start = memory.as_ptr().align_offset(BLOCK).min(BLOCK);
        Blocks { memory, range: start..start + n_bytes }
    }
}

impl Deref for Blocks {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[self.range.clone()]
    }
}

impl DerefMut for Blocks {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.range.clone()]
    }
}

/// Bytes for one record, or for a part of one.
#[derive(Debug)]
pub struct PageBuf {
    pub(crate) bytes: Blocks,
    /// Where the page is, or what it is coded as.
    pub(crate) body: Range<usize>,
    /// The page itself, if the record holds it in fewer bits.
    page: Option<Vec<u8>>,
    /// What the parts of its page are checked by, if its record's header was read with a part.
    pub(crate) checks: Box<PartChecks>,
    /// Whether it is for parts of pages.
    pub(crate) is_part: bool,
}

impl PageBuf {
    /// What the other parts of its page are checked by, if this is the first.
    pub fn checks(&self) -> PartChecks {
        *self.checks
    }

    /// The page, or the part of it that was read.
    pub fn page(&self) -> &[u8] {
        self.page.as_deref().unwrap_or(&self.bytes[self.body.clone()])
    }

    /// The page, to be written.
    pub fn page_mut(&mut self) -> &mut [u8] {
        match &mut self.page {
            Some(page) => page,
            None => &mut self.bytes[self.body.clone()],
        }
    }

    /// Codes the page for its record.
    pub(crate) fn encode(&mut self, codec: Option<&dyn PageCodec>) {
        if let (Some(codec), Some(page)) = (codec, &self.page) {
            codec.encode(page, &mut self.bytes[self.body.clone()]);
        }
    }

    /// Makes the page of its record, or some of its layers of a part.
    pub(crate) fn decode(&mut self, codec: Option<&dyn PageCodec>) {
        let (Some(codec), Some(page)) = (codec, &mut self.page) else { return };
        let coded = &self.bytes[self.body.clone()];
        match codec.layer_bytes().filter(|_| self.is_part) {
            Some((layer_bytes, coded_bytes)) => {
                page.resize(coded.len() / coded_bytes * layer_bytes, 0);
                codec.decode_layers(coded, page);
            }
            None => codec.decode(coded, page),
        }
    }
}

/// Buffers of one direction: made when first needed, never more than there may be.
pub(crate) struct Buffers {
    free: Vec<PageBuf>,
    n_unmade: usize,
    shape: RecordShape,
    /// Bytes of a page, if records hold it in fewer bits.
    page_bytes: Option<usize>,
    /// Bytes of a record, or of a part of one.
    n_bytes: usize,
    are_parts: bool,
}

impl Buffers {
    pub(crate) fn new(shape: RecordShape, codec: Option<&dyn PageCodec>) -> Self {
        Self::with_bytes(BUFFER_BYTES / 2, shape, codec)
    }

    /// The same with so much memory.
    pub(crate) fn with_bytes(
        bytes_max: usize,
        shape: RecordShape,
        codec: Option<&dyn PageCodec>,
    ) -> Self {
        let (least, most) = N_BUFFERS;
        let page_bytes = codec.map(PageCodec::page_bytes);
        let n_bytes = shape.record_bytes();
        let n = (bytes_max / (n_bytes + page_bytes.unwrap_or(0))).clamp(least, most);
        Buffers { free: Vec::new(), n_unmade: n, shape, page_bytes, n_bytes, are_parts: false }
    }

    /// Buffers for parts of pages, with the blocks that they begin and end in.
    pub(crate) fn for_parts(shape: RecordShape, codec: Option<&dyn PageCodec>) -> Self {
        let n_bytes = shape.header_bytes() + shape.part_bytes + 2 * BLOCK;
        let (least, most) = N_BUFFERS;
        let page_bytes = codec.map(|codec| {
            // Where layers cannot come alone, a part is a page.
            let layer_bytes = codec.layer_bytes().unwrap_or((codec.page_bytes(), shape.page_bytes));
            shape.part_bytes.div_ceil(layer_bytes.1) * layer_bytes.0
        });
        let n = (BUFFER_BYTES / 2 / (n_bytes + page_bytes.unwrap_or(0))).clamp(least, most);
        Buffers { free: Vec::new(), n_unmade: n, shape, page_bytes, n_bytes, are_parts: true }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.is_empty() && self.n_unmade == 0
    }

    pub(crate) fn take(&mut self) -> Option<PageBuf> {
        if let Some(buf) = self.free.pop() {
            return Some(buf);
        }
        self.n_unmade = self.n_unmade.checked_sub(1)?;
        let bytes = Blocks::new(self.n_bytes);
        let page = self.page_bytes.map(|n| vec![0; n]);
        let (checks, is_part) = (Box::default(), self.are_parts);
        Some(PageBuf { bytes, body: self.shape.body(), page, checks, is_part })
    }

    pub(crate) fn give_back(&mut self, buf: PageBuf) {
        self.free.push(buf);
    }
}

/// The name of a page, owned.
#[derive(Clone, Debug)]
pub(crate) struct OwnedName {
    pub(crate) key: PageKey,
    parent: PageKey,
    tokens: Box<[TokenId]>,
}

impl OwnedName {
    pub(crate) fn new(name: &PageName<'_>) -> Self {
        OwnedName { key: name.key, parent: name.parent, tokens: name.tokens.into() }
    }

    pub(crate) fn borrow(&self) -> PageName<'_> {
        PageName { key: self.key, parent: self.parent, tokens: &self.tokens }
    }
}
