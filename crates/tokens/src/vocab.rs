//! A vocabulary as GGUF files embed it: plain data that the caller fills from the metadata.
//!
//! This module reads no file. It checks that the lists agree with each other and turns each token
//! into its raw bytes; the tokenizer's engines build their tables from it.

use nuthatch_types::TokenId;

use crate::pieces::{Pieces, PiecesError};
use crate::tokenizer::TokenizerError;

/// The most tokens that a vocabulary may have; real ones have a few hundred thousand.
pub const VOCAB_LEN_MAX: usize = 1 << 22;

/// What a token of an embedded vocabulary is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenKind {
    /// Text.
    #[default]
    Normal,
    /// Stands for text that the vocabulary cannot spell.
    Unknown,
    /// Structure, such as the begin of a message: never made from plain text.
    Control,
    /// Text that is matched before everything else.
    UserDefined,
    /// Reserved; means nothing.
    Unused,
    /// One raw byte, spelled `<0x0A>`.
    Byte,
}

impl TokenKind {
    /// The kind for a number of GGUF's `tokenizer.ggml.token_type`; a number without a meaning is
    /// [`TokenKind::Unused`].
    pub fn from_gguf(number: i32) -> Self {
        match number {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            6 => TokenKind::Byte,
            _ => TokenKind::Unused,
        }
    }

    /// Whether the token is structure rather than text.
    pub fn is_special(self) -> bool {
        matches!(self, TokenKind::Control | TokenKind::Unknown)
    }
}

/// An embedded vocabulary, as its file gives it. Nothing is trusted until
/// [`Tokenizer::from_vocab`](crate::Tokenizer::from_vocab) has checked it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Vocab {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// `tokenizer.ggml.pre`: how text is cut into words before the merges (BPE only).
    pub pre: String,
    /// Spelling of each token; the index is the id.
    pub tokens: Vec<String>,
    /// Score of each token; SentencePiece merges the best first.
    pub scores: Option<Vec<f32>>,
    /// Kind of each token; an empty list means that all are normal.
    pub kinds: Vec<TokenKind>,
    /// Merges of BPE, the most important first, each `left right`.
    pub merges: Vec<String>,
    /// Begins a sequence.
    pub bos: Option<TokenId>,
    /// Ends a sequence.
    pub eos: Option<TokenId>,
    /// Stands for text that the vocabulary cannot spell.
    pub unk: Option<TokenId>,
    /// Whether the model wants `bos` before a text; `None` takes the model family's habit.
    pub add_bos: Option<bool>,
    /// Whether the model wants `eos` after a text; `None` means no.
    pub add_eos: Option<bool>,
    /// Whether SentencePiece puts a space before a text; `None` means yes.
    pub add_space_prefix: Option<bool>,
}

impl Vocab {
    /// Checks that the lists have one entry for each token and that the named ids exist.
    pub(crate) fn check(&self) -> Result<(), TokenizerError> {
        let n_tokens = self.tokens.len();
        if n_tokens == 0 {
            return Err(TokenizerError::EmptyVocab);
        }
        if n_tokens > VOCAB_LEN_MAX {
            return Err(TokenizerError::VocabTooLarge { len: n_tokens, max: VOCAB_LEN_MAX });
        }
        let check_len = |list: &'static str, len: usize| {
            if len == n_tokens {
                Ok(())
            } else {
                Err(TokenizerError::LengthMismatch { list, len, n_tokens })
            }
        };
        if let Some(scores) = &self.scores {
            check_len("scores", scores.len())?;
        }
        if !self.kinds.is_empty() {
            check_len("kinds", self.kinds.len())?;
        }
        for (role, id) in [("bos", self.bos), ("eos", self.eos), ("unk", self.unk)] {
            if let Some(id) = id
                && id.0 as usize >= n_tokens
            {
                return Err(TokenizerError::IdOutOfRange { role, id, n_tokens });
            }
        }
        Ok(())
    }

    /// The kind of a token; normal for all if the file gives no kinds. Some files call the begin
    /// and end tokens normal: these are structure, if they look like it.
    pub(crate) fn kind(&self, idx: usize) -> TokenKind {
        let kind = self.kinds.get(idx).copied().unwrap_or_default();
        let named = [self.bos, self.eos].iter().flatten().any(|id| id.0 as usize == idx);
        let looks_special = || {
            let token = self.tokens.get(idx).map_or("", String::as_str);
            token.starts_with('<') && token.ends_with('>')
        };
        if kind == TokenKind::Normal && named && looks_special() {
            TokenKind::Control
        } else {
            kind
        }
    }

    /// The raw bytes of every token. `decode` turns the spelling of a normal token into its bytes.
    pub(crate) fn pieces(
        &self,
        decode: impl Fn(&str, &mut Vec<u8>),
    ) -> Result<Pieces, TokenizerError> {
        let mut pieces = Pieces::with_capacity(self.tokens.len());
        let mut bytes = Vec::new();
        for (idx, token) in self.tokens.iter().enumerate() {
            bytes.clear();
            let kind = self.kind(idx);
            match kind {
                TokenKind::Normal => decode(token, &mut bytes),
                TokenKind::Unknown | TokenKind::Control | TokenKind::UserDefined => {
                    bytes.extend_from_slice(token.as_bytes());
                }
                TokenKind::Unused => {}
                TokenKind::Byte => match parse_byte_token(token) {
                    Some(byte) => bytes.push(byte),
                    None => bytes.extend_from_slice(token.as_bytes()),
                },
            }
            pieces
                .push(&bytes, kind.is_special())
                .map_err(|PiecesError { bytes }| TokenizerError::VocabTextTooLarge { bytes })?;
        }
        Ok(pieces)
    }
}

/// The byte that `<0x0A>` names.
pub(crate) fn parse_byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_tokens_parse_only_in_their_exact_form() {
        assert_eq!(parse_byte_token("<0x0A>"), Some(10));
        assert_eq!(parse_byte_token("<0xff>"), Some(255));
        for wrong in ["<0x0A", "0x0A>", "<0x+A>", "<0x0AB>", "<0x>", ""] {
            assert_eq!(parse_byte_token(wrong), None, "{wrong}");
        }
    }
}
