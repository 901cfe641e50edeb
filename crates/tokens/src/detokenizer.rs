//! Tokens back to text, one at a time and byte-exact.
//!
//! A character may be spread over several tokens. Its bytes are held back until it is complete, or
//! until the next bytes show that it never will be: only then U+FFFD takes their place. So the
//! pieces, put together, are what decoding all tokens at once gives.

use std::sync::Arc;

use nuthatch_types::TokenId;

use crate::Tokenizer;

/// How tokens become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeOptions {
    /// Leaves special tokens out.
    pub skip_special: bool,
    /// The text continues another one: a leading space is kept even where the vocabulary puts one
    /// before every text.
    pub continuing: bool,
}

impl Default for DecodeOptions {
    fn default() -> Self {
        DecodeOptions { skip_special: true, continuing: false }
    }
}

/// Turns a stream of tokens into a stream of text.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    state: DecodeState,
}

impl Detokenizer {
    /// A detokenizer at the begin of a text.
    pub fn new(tokenizer: Arc<Tokenizer>, options: DecodeOptions) -> Self {
        Detokenizer { tokenizer, state: DecodeState::new(options) }
    }

    /// Takes the next token and gives the text that is certain now, perhaps none. An id outside
    /// the vocabulary gives no text.
    pub fn push(&mut self, id: TokenId) -> String {
        let mut text = String::new();
        self.state.push(&self.tokenizer, id, &mut text);
        text
    }

    /// Ends the text: an incomplete character becomes U+FFFD. The next token begins a new text.
    pub fn flush(&mut self) -> String {
        let mut text = String::new();
        self.state.flush(&mut text);
        text
    }
}

/// What is known of a text so far.
#[derive(Clone, Debug)]
pub(crate) struct DecodeState {
    options: DecodeOptions,
    /// Bytes of a character that is not complete: at most three between calls.
    pending: Vec<u8>,
    /// Whether a byte was seen, after which a space is never a leading one.
    started: bool,
}

impl DecodeState {
    pub(crate) fn new(options: DecodeOptions) -> Self {
        DecodeState { options, pending: Vec::new(), started: false }
    }

    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, id: TokenId, out: &mut String) {
        if self.options.skip_special && tokenizer.is_special(id) {
            return;
        }
        let mut bytes = tokenizer.token_bytes(id).unwrap_or_default();
        if !self.started && !bytes.is_empty() {
            self.started = true;
            if tokenizer.strips_leading_space() && !self.options.continuing {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.pending.extend_from_slice(bytes);
        self.drain(out);
    }

    pub(crate) fn flush(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
        self.started = false;
    }

    /// Moves everything that is certain from `pending` to `out`.
    fn drain(&mut self, out: &mut String) {
        let mut n_taken = 0;
        for chunk in self.pending.utf8_chunks() {
            out.push_str(chunk.valid());
            n_taken += chunk.valid().len();
            let invalid = chunk.invalid();
            let is_last = n_taken + invalid.len() == self.pending.len();
            if invalid.is_empty() || is_last && may_complete(invalid) {
                break;
            }
            out.push(char::REPLACEMENT_CHARACTER);
            n_taken += invalid.len();
        }
        self.pending.drain(..n_taken);
    }
}

/// Whether more bytes could make `bytes` a character.
fn may_complete(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(e) if e.valid_up_to() == 0 && e.error_len().is_none())
}
