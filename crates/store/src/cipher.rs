//! Records, as they are or as nobody without the key can read, name or change them.
//!
//! ```text
//!   [ magic 4 | page_len 4 | key 16 | nonce 12 | zeros 4 | check 8 ][ the header, encrypted ][ tag 16 ]
//!   [ the page: parts, each encrypted ]
//! ```
//!
//! AES-256 in Galois counter mode. The header and each part are messages of their own, so that a page
//! can be read part by part; the tags of parts are their checks, in the header. The nonces of a record
//! are 92 bits, drawn for it, and four that say which of its messages it is, so that a key file is good
//! for a billion records. What stands before the header is authenticated with it. A page's key in it is
//! a keyed hash, and the key of that hash comes from the key file too.

use std::fmt;

use nuthatch_types::PageKey;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::hmac;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::disk::{Defect, N_PARTS, PageName, PartChecks, RecordShape, part_check};

const MAGIC: [u8; 4] = *b"PAGX";
/// Bytes before an encrypted header.
pub(crate) const HEAD_BYTES: usize = 48;
/// Bytes after it.
pub(crate) const TAG_BYTES: usize = 16;
/// Where the nonce is.
const NONCE_START: usize = 24;

/// What a key file holds. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreKey([u8; 32]);

/// The text or bytes are no key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key is 32 bytes, or 64 hexadecimal digits; this has {n_bytes} bytes")]
pub struct KeyError {
    /// How many bytes there are.
    pub n_bytes: usize,
}

impl StoreKey {
    /// The key that a file holds: 32 bytes, or 64 hexadecimal digits.
    pub fn read(bytes: &[u8]) -> Result<Self, KeyError> {
        if let Ok(key) = bytes.try_into() {
            return Ok(StoreKey(key));
        }
        let error = KeyError { n_bytes: bytes.len() };
        let (pairs, rest) = bytes.trim_ascii().as_chunks::<2>();
        if pairs.len() != 32 || !rest.is_empty() {
            return Err(error);
        }
        let mut key = [0; 32];
        for (byte, pair) in key.iter_mut().zip(pairs) {
            let digit = |c: u8| char::from(c).to_digit(16).map(|digit| digit as u8);
            match (digit(pair[0]), digit(pair[1])) {
                (Some(high), Some(low)) => *byte = high << 4 | low,
                _ => return Err(error),
            }
        }
        Ok(StoreKey(key))
    }

    /// The secret that names of pages are made with.
    pub fn name_secret(&self) -> u128 {
        let mut secret = [0; 16];
        secret.copy_from_slice(&self.derive(b"nuthatch page names")[..16]);
        u128::from_le_bytes(secret)
    }

    fn derive(&self, purpose: &[u8]) -> [u8; 32] {
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &self.0), purpose);
        let mut derived = [0; 32];
        derived.copy_from_slice(tag.as_ref());
        derived
    }
}

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreKey(..)")
    }
}

/// How records are written and read: their shape, and the key if they are encrypted.
#[derive(Debug)]
pub struct RecordForm {
    /// Their shape.
    pub(crate) shape: RecordShape,
    cipher: Option<LessSafeKey>,
}

impl RecordForm {
    /// Records of this shape, which says whether they are encrypted.
    pub fn new(shape: RecordShape, key: Option<&StoreKey>) -> Self {
        assert_eq!(shape.is_encrypted, key.is_some(), "who encrypts has a key");
        assert!((1..=N_PARTS).contains(&shape.n_parts()), "a check for each part");
        let cipher = key.map(|key| {
            let key = key.derive(b"nuthatch page bytes");
            LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key).expect("32 bytes are a key"))
        });
        RecordForm { shape, cipher }
    }

    /// Makes a record around its body, which is in place. An error where the system has no random
    /// numbers.
    pub fn seal(&self, name: &PageName<'_>, record: &mut [u8]) -> std::io::Result<()> {
        let shape = &self.shape;
        assert_eq!(record.len(), shape.record_bytes(), "records have one length");
        let (front, body) = record.split_at_mut(shape.header_bytes());
        let (body, rest) = body.split_at_mut(shape.page_bytes);
        rest.fill(0);
        front[shape.header().end..].fill(0);
        let Some(cipher) = &self.cipher else {
            let checks = shape.checks(name.key, body);
            shape.write_header(name, &checks, &mut front[shape.header()]);
            return Ok(());
        };
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|error| std::io::Error::other(error.to_string()))?;
        nonce[NONCE_LEN - 1] &= 0xF0;
        let too_long = |_| std::io::Error::other("a record is too long to be encrypted");
        let mut checks = [0; N_PARTS];
        for (part, check) in checks.iter_mut().enumerate().take(shape.n_parts()) {
            let (nonce, aad) = (part_nonce(nonce, part), self.part_aad(name.key));
            let text = &mut body[shape.part(part)];
            let tag = cipher.seal_in_place_separate_tag(nonce, aad, text).map_err(too_long)?;
            *check = u128::from_le_bytes(tag_bytes(&tag));
        }
        let (head, rest) = front.split_at_mut(HEAD_BYTES);
        let (text, rest) = rest.split_at_mut(shape.header().len());
        shape.write_header(name, &checks, text);
        head[..4].copy_from_slice(&MAGIC);
        head[4..8].copy_from_slice(&shape.page_len.to_le_bytes());
        head[8..24].copy_from_slice(&name.key.0.to_le_bytes());
        head[NONCE_START..36].copy_from_slice(&nonce);
        head[36..40].fill(0);
        let check = xxh3_64_with_seed(&head[..40], shape.seed());
        head[40..].copy_from_slice(&check.to_le_bytes());
        let (nonce, aad) = (Nonce::assume_unique_for_key(nonce), self.aad(head));
        let tag = cipher.seal_in_place_separate_tag(nonce, aad, text).map_err(too_long)?;
        rest[..TAG_BYTES].copy_from_slice(tag.as_ref());
        Ok(())
    }

    /// Checks that a record is whole and holds this page. Its body is in place afterwards.
    pub fn open(&self, name: &PageName<'_>, record: &mut [u8]) -> Result<(), Defect> {
        let front = record.len().min(self.shape.header_bytes());
        let checks = self.open_header(name, &mut record[..front])?;
        let body = record.get_mut(self.shape.body()).ok_or(Defect::Torn)?;
        for part in 0..self.shape.n_parts() {
            self.open_part(name.key, part, &mut body[self.shape.part(part)], &checks)?;
        }
        Ok(())
    }

    /// Checks that a record begins with a whole header of this page, and gives the checks of its parts.
    pub fn open_header(
        &self,
        name: &PageName<'_>,
        record: &mut [u8],
    ) -> Result<PartChecks, Defect> {
        let header = self.shape.header();
        let Some(cipher) = &self.cipher else { return self.shape.open_header(name, record) };
        if self.shape.read_key(record)? != name.key {
            return Err(Defect::Stale);
        }
        let front = record.get_mut(..header.end + TAG_BYTES).ok_or(Defect::Torn)?;
        let (head, text) = front.split_at_mut(HEAD_BYTES);
        let mut nonce = [0; NONCE_LEN];
        nonce.copy_from_slice(&head[NONCE_START..36]);
        let aad = self.aad(head);
        cipher
            .open_in_place(Nonce::assume_unique_for_key(nonce), aad, text)
            .map_err(|_| Defect::Corrupt)?;
        Ok(PartChecks { nonce, ..self.shape.open_header(name, text)? })
    }

    /// Checks that bytes are the part of a page that they should be; they are the page's afterwards.
    pub fn open_part(
        &self,
        key: PageKey,
        part: usize,
        bytes: &mut [u8],
        checks: &PartChecks,
    ) -> Result<(), Defect> {
        let check = checks.checks[part];
        let is_it = match &self.cipher {
            None => part_check(key, bytes) == check,
            Some(cipher) => {
                let nonce = part_nonce(checks.nonce, part);
                let (aad, tag) = (self.part_aad(key), Tag::from(check.to_le_bytes()));
                cipher.open_in_place_separate_tag(nonce, aad, tag, bytes, 0..).is_ok()
            }
        };
        if is_it { Ok(()) } else { Err(Defect::Corrupt) }
    }

    /// What is authenticated beside the header.
    fn aad(&self, head: &[u8]) -> Aad<[u8; 56]> {
        let mut aad = [0; 56];
        aad[..40].copy_from_slice(&head[..40]);
        aad[40..].copy_from_slice(&self.shape.namespace.to_le_bytes());
        Aad::from(aad)
    }

    /// What is authenticated beside a part.
    fn part_aad(&self, key: PageKey) -> Aad<[u8; 32]> {
        let mut aad = [0; 32];
        aad[..16].copy_from_slice(&key.0.to_le_bytes());
        aad[16..].copy_from_slice(&self.shape.namespace.to_le_bytes());
        Aad::from(aad)
    }
}

/// The nonce of a part, in a record with this one.
fn part_nonce(mut nonce: [u8; NONCE_LEN], part: usize) -> Nonce {
    const { assert!(N_PARTS < 16, "four bits for the header and the parts") };
    nonce[NONCE_LEN - 1] |= part as u8 + 1;
    Nonce::assume_unique_for_key(nonce)
}

fn tag_bytes(tag: &Tag) -> [u8; TAG_BYTES] {
    let mut bytes = [0; TAG_BYTES];
    bytes.copy_from_slice(tag.as_ref());
    bytes
}

/// The page that an encrypted record holds, by what stands before it.
pub(crate) fn read_head(shape: &RecordShape, bytes: &[u8]) -> Result<PageKey, Defect> {
    let (head, _) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(Defect::Torn)?;
    let (content, check) = head.split_at(40);
    if content[..4] != MAGIC
        || content[4..8] != shape.page_len.to_le_bytes()
        || *check != xxh3_64_with_seed(content, shape.seed()).to_le_bytes()
    {
        return Err(Defect::Corrupt);
    }
    let mut key = [0; 16];
    key.copy_from_slice(&content[8..24]);
    Ok(PageKey(u128::from_le_bytes(key)))
}

#[cfg(test)]
mod tests {
    use nuthatch_types::TokenId;

    use super::*;

    const SHAPE: RecordShape = RecordShape {
        namespace: 5,
        page_len: 3,
        page_bytes: 40,
        part_bytes: 16,
        is_encrypted: true,
    };
    const TOKENS: [TokenId; 3] = [TokenId(1), TokenId(2), TokenId(300_000)];
    const NAME: PageName<'_> =
        PageName { key: PageKey(77), parent: PageKey(u128::MAX), tokens: &TOKENS };

    fn form(key: u8) -> RecordForm {
        RecordForm::new(SHAPE, Some(&StoreKey([key; 32])))
    }

    fn record() -> Vec<u8> {
        let mut record = vec![0; SHAPE.record_bytes()];
        record[SHAPE.body()].fill(0xAB);
        form(1).seal(&NAME, &mut record).unwrap();
        record
    }

    #[test]
    fn a_record_comes_back_and_shows_nothing() {
        let (mut record, again) = (record(), record());
        assert_eq!(SHAPE.read_key(&record), Ok(NAME.key));
        assert_ne!(record[HEAD_BYTES..], again[HEAD_BYTES..], "nonces are used once");
        assert!(!record.windows(4).any(|bytes| bytes == [0xAB; 4]), "the page shows");
        let tokens = 300_000_u32.to_le_bytes();
        assert!(!record.windows(4).any(|bytes| bytes == tokens), "a token shows");
        assert_eq!(form(1).open(&NAME, &mut record), Ok(()));
        assert_eq!(record[SHAPE.body()], [0xAB; 40]);
    }

    #[test]
    fn whatever_changes_is_found() {
        let record = record();
        for bit in 0..record.len() * 8 {
            let mut broken = record.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(form(1).open(&NAME, &mut broken), Err(Defect::Corrupt), "bit {bit}");
        }
        for len in 0..record.len() {
            assert_eq!(form(1).open(&NAME, &mut record[..len].to_vec()), Err(Defect::Torn));
        }
        assert_eq!(form(2).open(&NAME, &mut record.clone()), Err(Defect::Corrupt));
        let other = PageName { key: PageKey(78), ..NAME };
        assert_eq!(form(1).open(&other, &mut record.clone()), Err(Defect::Stale));
        let plain = RecordForm::new(RecordShape { is_encrypted: false, ..SHAPE }, None);
        assert!(plain.open(&NAME, &mut record.clone()).is_err());
    }

    #[test]
    fn keys_are_bytes_or_digits() {
        let key = StoreKey::read(&[0x5A; 32]).unwrap();
        assert_eq!(StoreKey::read(format!("{}\n", "5a".repeat(32)).as_bytes()), Ok(key.clone()));
        assert_ne!(key.name_secret(), StoreKey([1; 32]).name_secret());
        assert_eq!(format!("{key:?}"), "StoreKey(..)");
        for bad in [&b""[..], &[0; 31], &[b'g'; 64], &[b'a'; 66]] {
            assert_eq!(StoreKey::read(bad), Err(KeyError { n_bytes: bad.len() }));
        }
    }
}
