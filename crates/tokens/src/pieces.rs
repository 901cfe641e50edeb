//! The raw bytes of every token, in one run of memory, so that decoding a token is one lookup.

use nuthatch_types::TokenId;

/// Bytes and speciality of each token; the index is the id.
#[derive(Clone, Debug)]
pub(crate) struct Pieces {
    /// All bytes, token after token. Written by [`Pieces::push`] only.
    bytes: Vec<u8>,
    /// `ends[i]` is where token `i` ends in `bytes`; it starts where the one before ends.
    ends: Vec<u32>,
    special: Vec<bool>,
}

/// The bytes of all tokens together do not fit 32-bit offsets.
pub(crate) struct PiecesError {
    pub(crate) bytes: usize,
}

impl Pieces {
    pub(crate) fn with_capacity(n_tokens: usize) -> Self {
        Pieces {
            bytes: Vec::new(),
            ends: Vec::with_capacity(n_tokens),
            special: Vec::with_capacity(n_tokens),
        }
    }

    /// Adds the next token.
    pub(crate) fn push(&mut self, bytes: &[u8], special: bool) -> Result<(), PiecesError> {
        let total = self.bytes.len() + bytes.len();
        let end = u32::try_from(total).map_err(|_| PiecesError { bytes: total })?;
        self.bytes.extend_from_slice(bytes);
        self.ends.push(end);
        self.special.push(special);
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token; `None` for an id outside the vocabulary.
    pub(crate) fn get(&self, id: TokenId) -> Option<&[u8]> {
        let idx = id.0 as usize;
        let end = *self.ends.get(idx)? as usize;
        let start = if idx == 0 { 0 } else { self.ends[idx - 1] as usize };
        Some(&self.bytes[start..end])
    }

    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id.0 as usize).copied().unwrap_or(false)
    }
}
