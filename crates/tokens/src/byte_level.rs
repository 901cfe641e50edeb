//! GPT-2's spelling of bytes as printable characters, which byte-level BPE vocabularies use.
//!
//! Printable Latin-1 bytes stand for themselves; the rest are moved, in order, to U+0100 and up.

/// The spelling of every byte.
pub(crate) fn byte_chars() -> [char; 256] {
    let mut chars = ['\0'; 256];
    let mut moved = 0u32;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        chars[usize::from(byte)] = if printable {
            char::from(byte)
        } else {
            moved += 1;
            char::from_u32(0xFF + moved).expect("below the surrogates")
        };
    }
    chars
}

/// The byte that each spelling stands for.
pub(crate) struct CharBytes([Option<u8>; CharBytes::LEN]);

impl CharBytes {
    /// One more than the last spelling, U+0143.
    const LEN: usize = 0x144;

    pub(crate) fn new() -> Self {
        let mut bytes = [None; CharBytes::LEN];
        for (byte, c) in (0..=255u8).zip(byte_chars()) {
            bytes[c as usize] = Some(byte);
        }
        CharBytes(bytes)
    }

    /// The byte that `c` spells.
    pub(crate) fn get(&self, c: char) -> Option<u8> {
        self.0.get(c as usize).copied().flatten()
    }

    /// Appends the bytes that `token` spells. A token with a character that spells no byte is an
    /// added one that was never byte-encoded: it stands for itself.
    pub(crate) fn decode(&self, token: &str, out: &mut Vec<u8>) {
        let n_before = out.len();
        for c in token.chars() {
            let Some(byte) = self.get(c) else {
                out.truncate(n_before);
                out.extend_from_slice(token.as_bytes());
                return;
            };
            out.push(byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_spelling() {
        let chars = byte_chars();
        assert_eq!(chars[b' ' as usize], '\u{120}');
        assert_eq!(chars[b'\n' as usize], '\u{10A}');
        assert_eq!(chars[0xAD], '\u{143}');
        let back = CharBytes::new();
        for byte in 0..=255u8 {
            assert_eq!(back.get(chars[usize::from(byte)]), Some(byte));
        }
    }

    #[test]
    fn a_token_that_was_never_encoded_stands_for_itself() {
        let mut out = Vec::new();
        CharBytes::new().decode("\u{120}a\u{2581}", &mut out);
        CharBytes::new().decode("\u{120}a", &mut out);
        assert_eq!(out, "\u{120}a\u{2581} a".as_bytes());
    }
}
