//! The form of segment files: a header, then records of one length.
//!
//! ```text
//!   segment   [ magic 8 | version 4 | page_len 4 | page_bytes 8 | part_bytes 8 | namespace 16 |
//!               number 8 | check 8 ][ record ][ record ] ...
//!   record    [ magic 4 | n_tokens 4 | key 16 | parent 16 | part checks 8 * 16 | tokens 4 * page_len |
//!               header check 8 ][ body: part | part | ... ]
//! ```
//!
//! Numbers are little-endian. All records of a segment have one length, so that a broken one costs
//! itself only. A body has up to eight parts, each with its own check, so that a page can be read part
//! by part. The checks are xxh3, with the namespace as seed for headers and with the key for parts: a
//! record that strayed from another file, or a body under another header, is found out like a flipped
//! bit. Encrypted records have the same header and parts ([`crate::RecordForm`]), whose checks are then
//! the tags of the cipher. Nothing here is executed, followed or allocated from.
//!
//! Of large pages each of headers, bodies and records begins with a block of the disk and is filled up
//! with zeros, as direct I/O asks.

use std::ops::Range;

use nuthatch_types::{PageKey, TokenId};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use crate::cipher::{HEAD_BYTES, TAG_BYTES, read_head};
use crate::page_buf::OwnedName;

const SEGMENT_MAGIC: [u8; 8] = *b"NUTHKVS\0";
const RECORD_MAGIC: [u8; 4] = *b"PAGE";
const VERSION: u32 = 3;

/// What direct I/O asks of places in files, of lengths and of memory.
pub(crate) const BLOCK: usize = 4096;
/// Pages of so many bytes have records of whole blocks; for smaller ones that would be a waste.
const BLOCKS_FROM: usize = 2 * BLOCK;
/// The most parts of a page.
pub const N_PARTS: usize = 8;

/// Bytes of a segment's header.
pub(crate) const SEGMENT_HEADER_BYTES: usize = 64;
/// Where the tokens of a record begin.
const TOKENS_START: usize = CHECKS_START + CHECK_BYTES * N_PARTS;
/// Where the checks of parts begin, and bytes of each.
const CHECKS_START: usize = 40;
const CHECK_BYTES: usize = 16;

/// What all records of a directory's own segments have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordShape {
    /// Says whose pages these are: everything that decides a page's bytes beside its tokens.
    pub namespace: u128,
    /// Tokens of a page.
    pub page_len: u32,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Bytes of each part of a page that can be read alone; the last may have fewer.
    pub part_bytes: usize,
    /// Whether records are encrypted.
    pub is_encrypted: bool,
}

/// Which page a record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageName<'a> {
    /// Its own name.
    pub key: PageKey,
    /// The name of what comes before it.
    pub parent: PageKey,
    /// `[page_len]`
    pub tokens: &'a [TokenId],
}

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// They end too early.
    Torn,
    /// They are not as they were written.
    Corrupt,
    /// They belong to another model, another layout or another version.
    Foreign,
    /// They are a page with other tokens.
    Stale,
}

impl RecordShape {
    /// Whether records are whole blocks.
    pub fn has_blocks(&self) -> bool {
        self.page_bytes >= BLOCKS_FROM
    }

    /// So many bytes, filled up to whole blocks if records have such.
    fn filled(&self, bytes: usize) -> usize {
        if self.has_blocks() { bytes.next_multiple_of(BLOCK) } else { bytes }
    }

    /// Bytes that a record's header says something with.
    fn header_len(&self) -> usize {
        TOKENS_START + 4 * self.page_len as usize + 8
    }

    /// Bytes of a record before its page.
    pub fn header_bytes(&self) -> usize {
        let around = if self.is_encrypted { HEAD_BYTES + TAG_BYTES } else { 0 };
        self.filled(around + self.header_len())
    }

    /// Bytes of a record.
    pub fn record_bytes(&self) -> usize {
        self.filled(self.header_bytes() + self.page_bytes)
    }

    /// Where the header itself is.
    pub(crate) fn header(&self) -> Range<usize> {
        let start = if self.is_encrypted { HEAD_BYTES } else { 0 };
        start..start + self.header_len()
    }

    /// Where the page is.
    pub fn body(&self) -> Range<usize> {
        self.header_bytes()..self.header_bytes() + self.page_bytes
    }

    /// Parts of a page.
    pub fn n_parts(&self) -> usize {
        self.page_bytes.div_ceil(self.part_bytes)
    }

    /// Where a part is in its page.
    pub fn part(&self, part: usize) -> Range<usize> {
        part * self.part_bytes..((part + 1) * self.part_bytes).min(self.page_bytes)
    }

    /// Bytes at a record's beginning that say which page it holds.
    pub(crate) fn head_bytes(&self) -> usize {
        if self.is_encrypted { HEAD_BYTES } else { self.header_len() }
    }

    /// Where a record starts in its segment.
    pub(crate) fn record_start(&self, record: u32) -> u64 {
        let header_bytes = self.filled(SEGMENT_HEADER_BYTES) as u64;
        header_bytes + u64::from(record) * self.record_bytes() as u64
    }

    /// The seed of headers' checks.
    pub(crate) fn seed(&self) -> u64 {
        (self.namespace >> 64) as u64 ^ self.namespace as u64
    }

    /// The header of the segment with this number.
    pub(crate) fn segment_header(&self, number: u64) -> [u8; SEGMENT_HEADER_BYTES] {
        let mut bytes = [0; SEGMENT_HEADER_BYTES];
        bytes[..8].copy_from_slice(&SEGMENT_MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.page_len.to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.page_bytes as u64).to_le_bytes());
        bytes[24..32].copy_from_slice(&(self.part_bytes as u64).to_le_bytes());
        bytes[32..48].copy_from_slice(&self.namespace.to_le_bytes());
        bytes[48..56].copy_from_slice(&number.to_le_bytes());
        let check = xxh3_64_with_seed(&bytes[..56], 0);
        bytes[56..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Checks that bytes are the header of the segment with this number and of this shape.
    pub fn check_segment(&self, bytes: &[u8], number: u64) -> Result<(), Defect> {
        let Some((header, _)) = bytes.split_first_chunk::<SEGMENT_HEADER_BYTES>() else {
            return Err(Defect::Torn);
        };
        let check = xxh3_64_with_seed(&header[..56], 0);
        if header[..8] != SEGMENT_MAGIC || header[56..] != check.to_le_bytes() {
            return Err(Defect::Corrupt);
        }
        if *header == self.segment_header(number) { Ok(()) } else { Err(Defect::Foreign) }
    }

    /// The checks of a page's parts.
    pub(crate) fn checks(&self, key: PageKey, body: &[u8]) -> [u128; N_PARTS] {
        let mut checks = [0; N_PARTS];
        for (part, check) in checks.iter_mut().enumerate().take(self.n_parts()) {
            *check = part_check(key, &body[self.part(part)]);
        }
        checks
    }

    /// Writes what a record's header says.
    pub(crate) fn write_header(
        &self,
        page: &PageName<'_>,
        checks: &[u128; N_PARTS],
        header: &mut [u8],
    ) {
        assert_eq!(header.len(), self.header_len(), "headers have one length");
        assert_eq!(page.tokens.len(), self.page_len as usize, "only full pages are stored");
        header[..4].copy_from_slice(&RECORD_MAGIC);
        header[4..8].copy_from_slice(&self.page_len.to_le_bytes());
        header[8..24].copy_from_slice(&page.key.0.to_le_bytes());
        header[24..CHECKS_START].copy_from_slice(&page.parent.0.to_le_bytes());
        let (bytes, _) = header[CHECKS_START..TOKENS_START].as_chunks_mut::<CHECK_BYTES>();
        for (bytes, check) in bytes.iter_mut().zip(checks) {
            *bytes = check.to_le_bytes();
        }
        let end = header.len() - 8;
        for (bytes, token) in header[TOKENS_START..end].chunks_exact_mut(4).zip(page.tokens) {
            bytes.copy_from_slice(&token.0.to_le_bytes());
        }
        let check = xxh3_64_with_seed(&header[..end], self.seed());
        header[end..].copy_from_slice(&check.to_le_bytes());
    }

    /// The name of the page whose record begins with these bytes; its body is not looked at.
    pub fn read_key(&self, bytes: &[u8]) -> Result<PageKey, Defect> {
        if self.is_encrypted { read_head(self, bytes) } else { self.read_plain_key(bytes) }
    }

    fn read_plain_key(&self, bytes: &[u8]) -> Result<PageKey, Defect> {
        let header = bytes.get(..self.header_len()).ok_or(Defect::Torn)?;
        let (content, check) = header.split_at(header.len() - 8);
        if content[..4] != RECORD_MAGIC
            || content[4..8] != self.page_len.to_le_bytes()
            || *check != xxh3_64_with_seed(content, self.seed()).to_le_bytes()
        {
            return Err(Defect::Corrupt);
        }
        Ok(PageKey(u128_at(content, 8)))
    }

    /// Which page a record that is not encrypted holds, by the header that it begins with.
    pub(crate) fn read_name(&self, bytes: &[u8]) -> Option<OwnedName> {
        let key = self.read_plain_key(bytes).ok()?;
        let token = |bytes: &[u8; 4]| TokenId(u32::from_le_bytes(*bytes));
        let (tokens, _) = bytes[TOKENS_START..].as_chunks();
        let tokens: Vec<TokenId> = tokens.iter().take(self.page_len as usize).map(token).collect();
        let parent = PageKey(u128_at(bytes, 24));
        Some(OwnedName::new(&PageName { key, parent, tokens: &tokens }))
    }

    /// Checks that a record that is not encrypted begins with a whole header of this page, and gives the
    /// checks of its parts.
    pub(crate) fn open_header(
        &self,
        page: &PageName<'_>,
        record: &[u8],
    ) -> Result<PartChecks, Defect> {
        let key = self.read_plain_key(record)?;
        let tokens = record[TOKENS_START..].chunks_exact(4).take(self.page_len as usize);
        let is_same = |(bytes, token): (&[u8], &TokenId)| *bytes == token.0.to_le_bytes();
        if key != page.key
            || u128_at(record, 24) != page.parent.0
            || page.tokens.len() != self.page_len as usize
            || !tokens.zip(page.tokens).all(is_same)
        {
            return Err(Defect::Stale);
        }
        let mut checks = PartChecks::default();
        let (bytes, _) = record[CHECKS_START..TOKENS_START].as_chunks::<CHECK_BYTES>();
        for (check, bytes) in checks.checks.iter_mut().zip(bytes) {
            *check = u128::from_le_bytes(*bytes);
        }
        Ok(checks)
    }
}

/// What the parts of a page are checked by, or decrypted with, when they come alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartChecks {
    pub(crate) checks: [u128; N_PARTS],
    /// Of an encrypted record.
    pub(crate) nonce: [u8; 12],
}

pub(crate) fn part_check(key: PageKey, bytes: &[u8]) -> u128 {
    xxh3_128_with_seed(bytes, key.low())
}

fn u128_at(bytes: &[u8], start: usize) -> u128 {
    let mut number = [0; 16];
    number.copy_from_slice(&bytes[start..start + 16]);
    u128::from_le_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RecordForm, StoreKey};

    const SHAPE: RecordShape = RecordShape {
        namespace: 5,
        page_len: 3,
        page_bytes: 40,
        part_bytes: 9,
        is_encrypted: false,
    };

    fn record() -> (PageName<'static>, Vec<u8>) {
        let name = PageName {
            key: PageKey(77),
            parent: PageKey(u128::MAX),
            tokens: &[TokenId(1), TokenId(2), TokenId(300_000)],
        };
        let mut record = vec![0xAB; SHAPE.record_bytes()];
        form(SHAPE).seal(&name, &mut record).unwrap();
        (name, record)
    }

    fn form(shape: RecordShape) -> RecordForm {
        RecordForm::new(shape, None)
    }

    fn open(shape: RecordShape, name: &PageName<'_>, record: &[u8]) -> Result<Vec<u8>, Defect> {
        let mut record = record.to_vec();
        form(shape).open(name, &mut record)?;
        Ok(record[shape.body()].to_vec())
    }

    #[test]
    fn a_record_comes_back_and_every_flipped_bit_is_found() {
        let (name, record) = record();
        assert_eq!(open(SHAPE, &name, &record), Ok(vec![0xAB; 40]));
        assert_eq!(SHAPE.read_key(&record), Ok(name.key));
        for bit in 0..record.len() * 8 {
            let mut broken = record.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(SHAPE, &name, &broken), Err(Defect::Corrupt), "bit {bit}");
        }
        for len in 0..record.len() {
            assert_eq!(open(SHAPE, &name, &record[..len]), Err(Defect::Torn));
        }
    }

    #[test]
    fn another_page_is_stale_and_another_namespace_does_not_open() {
        let (name, record) = record();
        let tokens = [TokenId(1), TokenId(2), TokenId(3)];
        for other in [
            PageName { key: PageKey(78), ..name },
            PageName { parent: PageKey(0), ..name },
            PageName { tokens: &tokens, ..name },
            PageName { tokens: &tokens[..2], ..name },
        ] {
            assert_eq!(open(SHAPE, &other, &record), Err(Defect::Stale));
        }
        let foreign = RecordShape { namespace: 6, ..SHAPE };
        assert_eq!(open(foreign, &name, &record), Err(Defect::Corrupt));
    }

    #[test]
    fn large_pages_have_whole_blocks_and_parts_that_open_alone() {
        let shape = RecordShape { page_bytes: 20 * BLOCK + 7, part_bytes: 5 * BLOCK, ..SHAPE };
        let (name, _) = record();
        let key = StoreKey::read(&[3; 32]).unwrap();
        for is_encrypted in [false, true] {
            let shape = RecordShape { is_encrypted, ..shape };
            let form = RecordForm::new(shape, is_encrypted.then_some(&key));
            assert!(shape.record_bytes().is_multiple_of(BLOCK));
            assert!(shape.record_start(3).is_multiple_of(BLOCK as u64));
            assert_eq!((shape.body().start, shape.n_parts()), (BLOCK, 5));
            let mut record = vec![3; shape.record_bytes()];
            form.seal(&name, &mut record).unwrap();
            let checks = form.open_header(&name, &mut record[..BLOCK].to_vec()).unwrap();
            for part in 0..5 {
                let bytes = &record[shape.body()][shape.part(part)];
                let open = |as_part: usize, checks: &PartChecks, flip: usize| {
                    let mut bytes = bytes.to_vec();
                    bytes[flip / 8] ^= u8::from(flip > 0) << (flip % 8);
                    form.open_part(name.key, as_part, &mut bytes, checks).map(|()| bytes)
                };
                assert_eq!(open(part, &checks, 0), Ok(vec![3; bytes.len()]));
                assert_eq!(open(part, &checks, 8 * bytes.len() - 1), Err(Defect::Corrupt));
                let mut other = checks;
                other.checks[part] ^= 1;
                assert_eq!(open(part, &other, 0), Err(Defect::Corrupt));
                // Encrypted parts cannot take each other's places, whatever they say.
                let at = (part + 1) % 4;
                other.checks[at] = checks.checks[part];
                assert_eq!(open(at, &other, 0).is_err(), is_encrypted);
            }
            let mut broken = record.clone();
            broken[shape.body().end - 1] ^= 1;
            assert_eq!(form.open(&name, &mut broken), Err(Defect::Corrupt));
        }
    }

    #[test]
    fn a_segment_knows_its_shape_and_its_number() {
        let header = SHAPE.segment_header(9);
        assert_eq!(SHAPE.check_segment(&header, 9), Ok(()));
        assert_eq!(SHAPE.check_segment(&header, 8), Err(Defect::Foreign));
        assert_eq!(SHAPE.check_segment(&header[..63], 9), Err(Defect::Torn));
        for other in [
            RecordShape { page_bytes: 41, ..SHAPE },
            RecordShape { part_bytes: 10, ..SHAPE },
            RecordShape { namespace: 6, ..SHAPE },
        ] {
            assert_eq!(other.check_segment(&header, 9), Err(Defect::Foreign));
        }
        for bit in 0..header.len() * 8 {
            let mut broken = header;
            broken[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SHAPE.check_segment(&broken, 9), Err(Defect::Corrupt));
        }
    }
}
