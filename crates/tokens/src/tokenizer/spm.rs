//! SentencePiece's BPE over an embedded vocabulary.
//!
//! Spaces become U+2581, the text is cut into characters, and neighbours are joined into the token
//! with the best score. A character that is no token is spelled by byte tokens.

use super::merge::Merger;
use super::{TokenIds, TokenizerError};
use crate::vocab::{TokenKind, Vocab};

/// The character that stands for a space.
pub(crate) const SPACE_MARK: char = '\u{2581}';

#[derive(Debug)]
pub(super) struct Spm {
    /// Place of each token's score among all, the best first; equal scores share a place.
    ranks: Vec<u32>,
    /// Token of each byte.
    bytes: [Option<u32>; 256],
    unk: Option<u32>,
    /// Bytes of the longest token: longer pairs need no look-up.
    token_len_max: usize,
    add_space_prefix: bool,
}

impl Spm {
    pub(super) fn new(
        vocab: &Vocab,
        ids: &TokenIds,
        unk: Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let scores = vocab.scores.as_deref().ok_or(TokenizerError::MissingScores)?;
        let mut bytes = [None; 256];
        for (byte, token) in (0..=255u8).zip(&mut bytes) {
            let spelled = ids.get(&format!("<0x{byte:02X}>"));
            let is_byte = |&id: &u32| vocab.kind(id as usize) == TokenKind::Byte;
            *token =
                spelled.filter(is_byte).or_else(|| ids.text(std::str::from_utf8(&[byte]).ok()?));
        }
        Ok(Spm {
            ranks: ranks(scores),
            bytes,
            unk,
            token_len_max: vocab.tokens.iter().map(String::len).max().unwrap_or(0),
            add_space_prefix: vocab.add_space_prefix.unwrap_or(true),
        })
    }

    pub(super) fn adds_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Encodes a text, or the part of one between special tokens: each begins with a space if the
    /// vocabulary wants one.
    pub(super) fn encode(&self, text: &str, ids: &TokenIds, out: &mut Vec<u32>) {
        let mut marked = String::with_capacity(text.len() + 3);
        if self.add_space_prefix {
            marked.push(SPACE_MARK);
        }
        marked.extend(text.chars().map(|c| if c == ' ' { SPACE_MARK } else { c }));

        let mut merger = Merger::default();
        for (start, c) in marked.char_indices() {
            let len = c.len_utf8();
            // Only the ids of joined runs are needed below; single characters are looked up last.
            merger.push(start, len, super::merge::NONE);
        }
        merger.merge(|left, right| {
            let start = left.start as usize;
            let end = right.start as usize + right.len as usize;
            if end - start > self.token_len_max {
                return None;
            }
            let id = ids.text(&marked[start..end])?;
            Some((self.ranks[id as usize], id))
        });
        for symbol in merger.symbols() {
            let start = symbol.start as usize;
            let run = &marked[start..start + symbol.len as usize];
            match ids.text(run) {
                Some(id) => out.push(id),
                None => self.spell(run, out),
            }
        }
    }

    /// Spells a character that is no token: in bytes, or else as unknown.
    fn spell(&self, run: &str, out: &mut Vec<u32>) {
        for byte in run.bytes() {
            out.extend(self.bytes[usize::from(byte)].or(self.unk));
        }
    }
}

/// Places of scores, the best first. What is no number is worst.
fn ranks(scores: &[f32]) -> Vec<u32> {
    // Adding zero turns -0 into +0, so that the two share a place.
    let score = |idx: u32| {
        let score = scores[idx as usize];
        if score.is_nan() { f32::NEG_INFINITY } else { score + 0.0 }
    };
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    let mut ranks = vec![0; scores.len()];
    let mut rank = 0;
    for pair in order.windows(2) {
        if score(pair[0]) != score(pair[1]) {
            rank += 1;
        }
        ranks[pair[1] as usize] = rank;
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_share_a_place_and_nan_is_last() {
        let scores = [-2.0, 0.0, -0.0, f32::NAN, -2.0, 5.0];
        assert_eq!(ranks(&scores), [2, 1, 1, 3, 2, 0]);
        assert!(ranks(&[]).is_empty());
    }
}
