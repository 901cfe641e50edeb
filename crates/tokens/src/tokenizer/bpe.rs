//! Byte-level BPE over an embedded vocabulary.
//!
//! Text is cut into words, each word into bytes, and bytes are joined by the list of merges. A
//! byte that the vocabulary does not have is left out.

use super::merge::{Merger, NONE};
use super::split::{Rule, Splitter};
use super::{FileMap, TokenIds, TokenizerError};
use crate::byte_level::byte_chars;
use crate::vocab::Vocab;

#[derive(Debug)]
pub(super) struct Bpe {
    splitter: Splitter,
    /// Spelling of each byte.
    chars: [char; 256],
    /// Token of each byte, or [`NONE`].
    bytes: [u32; 256],
    merges: Merges,
    ignore_merges: bool,
}

/// `(left, right)` to the merge's place in the list and the token that it makes.
type Merges = FileMap<(u32, u32), (u32, u32)>;

impl Bpe {
    /// Builds the tables. Merges that name a token the vocabulary does not have, or that would
    /// make a special token, can never apply and are left out.
    pub(super) fn new(vocab: &Vocab, ids: &TokenIds, rule: &Rule) -> Result<Self, TokenizerError> {
        let chars = byte_chars();
        let text_id =
            |token: &str| ids.get(token).filter(|&id| !vocab.kind(id as usize).is_special());
        let bytes = chars.map(|c| text_id(c.encode_utf8(&mut [0; 4])).unwrap_or(NONE));
        let mut merges = Merges::with_capacity(vocab.merges.len());
        let mut joined = String::new();
        for (rank, merge) in (0u32..).zip(&vocab.merges) {
            let Some((left, right)) = split_merge(merge) else {
                return Err(TokenizerError::BadMerge { index: rank, merge: merge.clone() });
            };
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let parts = text_id(left).zip(text_id(right)).zip(text_id(&joined));
            if let Some((pair, id)) = parts {
                merges.entry(pair).or_insert((rank, id));
            }
        }
        Ok(Bpe {
            splitter: rule.splitter(),
            chars,
            bytes,
            merges,
            ignore_merges: rule.ignore_merges,
        })
    }

    pub(super) fn encode(&self, text: &str, ids: &TokenIds, out: &mut Vec<u32>) {
        let mut merger = Merger::default();
        let mut spelling = String::new();
        for word in self.splitter.split(text) {
            let word = &text[word];
            if self.ignore_merges {
                spelling.clear();
                spelling.extend(word.bytes().map(|byte| self.chars[usize::from(byte)]));
                if let Some(id) = ids.text(&spelling) {
                    out.push(id);
                    continue;
                }
            }
            merger.clear();
            for (place, byte) in word.bytes().enumerate() {
                merger.push(place, 1, self.bytes[usize::from(byte)]);
            }
            merger.merge(|left, right| self.merges.get(&(left.id, right.id)).copied());
            out.extend(merger.symbols().map(|symbol| symbol.id).filter(|&id| id != NONE));
        }
    }
}

/// The two sides of `left right`. The first character never separates: it may be a space itself.
fn split_merge(merge: &str) -> Option<(&str, &str)> {
    let first = merge.chars().next()?.len_utf8();
    let space = first + merge[first..].find(' ')?;
    let (left, right) = (&merge[..space], &merge[space + 1..]);
    (!right.is_empty()).then_some((left, right))
}
