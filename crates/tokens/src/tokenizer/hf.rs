//! A `tokenizer.json` run by the `tokenizers` library.
//!
//! Encoding goes through the library's parts one by one, not through its `encode`: so that special
//! tokens in the text are found only when asked for, and so that truncation, padding and templates
//! of the file do not apply. Decoding uses our own table of pieces.

use nuthatch_types::TokenId;
use serde_json::Value as Json;
use tokenizers::{
    AddedVocabulary, Encoding, Model, OffsetType, PreTokenizer, Token, Tokenizer as Library,
};

use super::TokenizerError;
use super::spm::SPACE_MARK;
use crate::byte_level::CharBytes;
use crate::guard::catch;
use crate::pieces::{Pieces, PiecesError};
use crate::vocab::{VOCAB_LEN_MAX, parse_byte_token};

pub(super) struct Hf {
    library: Library,
    /// The file's added tokens, told to leave special ones in the text alone.
    plain: AddedVocabulary,
}

/// What a file says besides how to encode.
pub(super) struct HfParts {
    pub(super) engine: Hf,
    pub(super) pieces: Pieces,
    /// Whether decoding takes one space off the begin of a text.
    pub(super) strips_leading_space: bool,
    /// The token that the file's template puts before a text, and the one after it.
    pub(super) bos: Option<TokenId>,
    pub(super) eos: Option<TokenId>,
}

impl Hf {
    pub(super) fn parse(json: &[u8]) -> Result<HfParts, TokenizerError> {
        guarded(|| {
            let mut library = Library::from_bytes(json).map_err(library_error)?;
            library.with_truncation(None).map_err(library_error)?;
            library.with_padding(None);
            let (bos, eos) = template_tokens(&library)?;
            let style = Style::of(&library)?;
            let pieces = style.pieces(&library)?;
            let mut plain = library.get_added_vocabulary().clone();
            plain.set_encode_special_tokens(true);
            let strips_leading_space = style.strips_leading_space;
            let in_vocab = |id: &u32| (*id as usize) < pieces.len();
            Ok(HfParts {
                bos: bos.filter(in_vocab).map(TokenId),
                eos: eos.filter(in_vocab).map(TokenId),
                engine: Hf { library, plain },
                strips_leading_space,
                pieces,
            })
        })
    }

    pub(super) fn encode(
        &self,
        text: &str,
        special: bool,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        guarded(|| {
            let added = if special { self.library.get_added_vocabulary() } else { &self.plain };
            let mut parts = added.extract_and_normalize(self.library.get_normalizer(), text);
            if let Some(pre_tokenizer) = self.library.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut parts).map_err(library_error)?;
            }
            let model = self.library.get_model();
            model.tokenize_in_pretokenized(&mut parts, None).map_err(library_error)?;
            let encoding = parts.into_encoding(None, 0, OffsetType::None).map_err(library_error)?;
            out.extend_from_slice(encoding.get_ids());
            Ok(())
        })
    }

    pub(super) fn id_of(&self, token: &str) -> Option<u32> {
        self.library.token_to_id(token)
    }
}

impl std::fmt::Debug for Hf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hf").finish_non_exhaustive()
    }
}

/// Runs the library, which panics on some malformed files.
fn guarded<T>(run: impl FnOnce() -> Result<T, TokenizerError>) -> Result<T, TokenizerError> {
    catch(run).unwrap_or_else(|detail| Err(TokenizerError::Library { detail }))
}

fn library_error(error: tokenizers::Error) -> TokenizerError {
    TokenizerError::Library { detail: error.to_string() }
}

/// The tokens that the file's template puts before and after a text.
fn template_tokens(library: &Library) -> Result<(Option<u32>, Option<u32>), TokenizerError> {
    let text = Encoding::from_tokens(vec![Token::new(u32::MAX, String::new(), (0, 0))], 0);
    let wrapped = library.post_process(text, None, true).map_err(library_error)?;
    let ids = wrapped.get_ids();
    let place = ids.iter().position(|&id| id == u32::MAX);
    let Some(place) = place else { return Ok((None, None)) };
    Ok((ids[..place].first().copied(), ids[place + 1..].last().copied()))
}

/// How the spelling of a token becomes its bytes.
#[derive(Default)]
struct Style {
    /// GPT-2's spelling of bytes.
    byte_level: bool,
    /// The character that stands for a space.
    space_mark: Option<char>,
    /// `<0x0A>` is a byte.
    byte_fallback: bool,
    /// Tokens are words: a space goes before each.
    joined: bool,
    strips_leading_space: bool,
}

impl Style {
    fn of(library: &Library) -> Result<Self, TokenizerError> {
        let Some(decoder) = library.get_decoder() else {
            // Without a decoder the library puts a space between tokens.
            return Ok(Style { joined: true, strips_leading_space: true, ..Style::default() });
        };
        let json = serde_json::to_value(decoder)
            .map_err(|e| TokenizerError::Library { detail: e.to_string() })?;
        let mut style = Style::default();
        style.add(&json)?;
        Ok(style)
    }

    fn add(&mut self, decoder: &Json) -> Result<(), TokenizerError> {
        let name = decoder["type"].as_str().unwrap_or("nameless");
        match name {
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => {}
            "Sequence" => {
                for inner in decoder["decoders"].as_array().into_iter().flatten() {
                    self.add(inner)?;
                }
            }
            "Metaspace" => {
                let mark = decoder["replacement"].as_str().and_then(|mark| mark.chars().next());
                self.space_mark = mark.or(Some(SPACE_MARK));
                self.strips_leading_space = decoder["prepend_scheme"] != "never";
            }
            "Replace" if decoder["content"] == " " => {
                let mark = decoder["pattern"]["String"].as_str().unwrap_or_default();
                let mut chars = mark.chars();
                match (chars.next(), chars.next()) {
                    (Some(mark), None) => self.space_mark = Some(mark),
                    _ => return Err(unsupported(name, mark)),
                }
            }
            "Strip" if decoder["content"] == " " && decoder["stop"] == 0 => {
                self.strips_leading_space = decoder["start"] != 0;
            }
            _ => return Err(unsupported(name, "")),
        }
        Ok(())
    }

    /// The bytes of every token; ids that the file leaves out have none.
    fn pieces(&self, library: &Library) -> Result<Pieces, TokenizerError> {
        let mut vocab: Vec<(u32, String)> =
            library.get_model().get_vocab().into_iter().map(|(token, id)| (id, token)).collect();
        let added = library.get_added_vocabulary().get_added_tokens_decoder();
        let id_max = vocab.iter().map(|(id, _)| *id).chain(added.keys().copied()).max();
        let n_tokens = id_max.ok_or(TokenizerError::EmptyVocab)? as usize + 1;
        if n_tokens > VOCAB_LEN_MAX {
            return Err(TokenizerError::VocabTooLarge { len: n_tokens, max: VOCAB_LEN_MAX });
        }
        vocab.sort_unstable();
        let mut vocab = vocab.into_iter().peekable();
        let chars = CharBytes::new();
        let mut pieces = Pieces::with_capacity(n_tokens);
        let mut bytes = Vec::new();
        for id in 0..n_tokens as u32 {
            bytes.clear();
            // Two spellings of one id cannot both be right; the first in order counts.
            let mut spelling = None;
            while let Some((_, token)) = vocab.next_if(|(next, _)| *next == id) {
                spelling.get_or_insert(token);
            }
            let added = added.get(&id);
            match (added, spelling) {
                // Added tokens are not byte-encoded, but their space marks are marks.
                (Some(token), _) if self.byte_level => {
                    bytes.extend_from_slice(token.content.as_bytes());
                }
                (Some(token), _) => self.decode(&token.content, &chars, &mut bytes),
                (None, Some(token)) => self.decode(&token, &chars, &mut bytes),
                (None, None) => {}
            }
            pieces
                .push(&bytes, added.is_some_and(|token| token.special))
                .map_err(|PiecesError { bytes }| TokenizerError::VocabTextTooLarge { bytes })?;
        }
        Ok(pieces)
    }

    fn decode(&self, token: &str, chars: &CharBytes, out: &mut Vec<u8>) {
        if self.byte_fallback
            && let Some(byte) = parse_byte_token(token)
        {
            out.push(byte);
            return;
        }
        if self.joined {
            out.push(b' ');
        }
        if self.byte_level {
            chars.decode(token, out);
        } else if let Some(mark) = self.space_mark {
            decode_marked(token, mark, out);
        } else {
            out.extend_from_slice(token.as_bytes());
        }
    }
}

/// Appends a spelling in which `mark` stands for a space.
pub(super) fn decode_marked(token: &str, mark: char, out: &mut Vec<u8>) {
    for c in token.chars() {
        let c = if c == mark { ' ' } else { c };
        out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
    }
}

fn unsupported(name: &str, detail: &str) -> TokenizerError {
    TokenizerError::UnsupportedDecoder { name: name.to_owned(), detail: detail.to_owned() }
}
