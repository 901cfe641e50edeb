//! Text to tokens, and the facts about a vocabulary.
//!
//! Three engines stand behind one type: the `tokenizers` library for `tokenizer.json`, and our own
//! byte-level BPE and SentencePiece for the vocabularies that GGUF files embed. A tokenizer never
//! changes after it was made, and can be shared between threads.

mod bpe;
mod hf;
mod merge;
mod special;
mod split;
mod spm;

use nuthatch_types::TokenId;

use self::bpe::Bpe;
use self::hf::{Hf, HfParts, decode_marked};
use self::special::{AddedTokens, Part};
use self::split::Rule;
use self::spm::{SPACE_MARK, Spm};
use crate::byte_level::CharBytes;
use crate::config::TokenizerConfig;
use crate::detokenizer::{DecodeOptions, DecodeState};
use crate::pieces::Pieces;
use crate::vocab::{TokenKind, Vocab};

/// The longest text that is encoded in one call, in bytes. Many times the longest context; it
/// bounds the memory of the merge loop.
pub const TEXT_LEN_MAX: usize = 1 << 25;

/// Spellings of tokens that end an answer in the known chat formats.
const END_TOKENS: [&str; 11] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|user|>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "</s>",
];

/// Turns text into tokens and back.
#[derive(Debug)]
pub struct Tokenizer {
    engine: Engine,
    pieces: Pieces,
    strips_leading_space: bool,
    bos: Option<TokenId>,
    eos: Option<TokenId>,
    adds_bos: bool,
    adds_eos: bool,
}

/// How a text is encoded. The default is plain text, as a user types it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// The text may contain special tokens, as a rendered chat template does. Without it the
    /// spelling of a special token is just text.
    pub special: bool,
    /// Puts the begin token first, if there is one.
    pub add_bos: bool,
    /// Puts the end token last, if there is one.
    pub add_eos: bool,
}

/// Why a tokenizer could not be made, or a text not be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The `tokenizers` library refused the file or the text.
    #[error("tokenizer.json: {detail}")]
    Library {
        /// The library's own words.
        detail: String,
    },
    /// The file decodes tokens in a way that cannot be streamed.
    #[error(
        "tokenizer.json: decoder {name} {detail:?} is not supported (supported: ByteLevel, \
         Metaspace, ByteFallback, Fuse, Sequence, Replace and Strip of a space)"
    )]
    UnsupportedDecoder {
        /// Type of the decoder.
        name: String,
        /// What about it.
        detail: String,
    },
    /// `tokenizer_config.json` does not parse.
    #[error("tokenizer_config.json: {detail}")]
    Config {
        /// The parser's words.
        detail: String,
    },
    /// A token that the configuration names is not in the vocabulary.
    #[error("{role} token {token:?} is not in the vocabulary")]
    UnknownToken {
        /// What the token is for.
        role: &'static str,
        /// Its spelling.
        token: String,
    },
    /// The vocabulary is of a model that is not supported.
    #[error("vocabulary model {name:?} is not supported (supported: gpt2, llama)")]
    UnknownModel {
        /// `tokenizer.ggml.model`.
        name: String,
    },
    /// The way to cut text into words is not known.
    #[error("pre-tokenizer {name:?} is not known (known: {})", known.join(", "))]
    UnknownPreTokenizer {
        /// `tokenizer.ggml.pre`.
        name: String,
        /// The names that are known.
        known: Vec<&'static str>,
    },
    /// There are no tokens.
    #[error("the vocabulary is empty")]
    EmptyVocab,
    /// There are too many tokens, or an id is too large.
    #[error("the vocabulary has {len} ids, at most {max} are supported")]
    VocabTooLarge {
        /// Largest id plus one.
        len: usize,
        /// The most that is supported.
        max: usize,
    },
    /// The spellings of all tokens are too large together.
    #[error("the vocabulary's text has {bytes} bytes, at most 4 GiB are supported")]
    VocabTextTooLarge {
        /// Bytes up to the token that was too much.
        bytes: usize,
    },
    /// The added tokens do not fit a search automaton.
    #[error("{n_tokens} added tokens are too large to search for")]
    AddedTokensTooLarge {
        /// How many there are.
        n_tokens: usize,
    },
    /// A list does not have one entry for each token.
    #[error("the vocabulary has {n_tokens} tokens but {len} {list}")]
    LengthMismatch {
        /// Which list.
        list: &'static str,
        /// Its entries.
        len: usize,
        /// Tokens.
        n_tokens: usize,
    },
    /// A special token's id is not in the vocabulary.
    #[error("{role} token {} is out of range, the vocabulary has {n_tokens} tokens", id.0)]
    IdOutOfRange {
        /// What the token is for.
        role: &'static str,
        /// The id.
        id: TokenId,
        /// Tokens.
        n_tokens: usize,
    },
    /// A SentencePiece vocabulary without scores cannot be merged.
    #[error("the vocabulary has no scores")]
    MissingScores,
    /// A merge is not two tokens with a space between.
    #[error("merge {index} is {merge:?}, expected two tokens with a space between")]
    BadMerge {
        /// Its place in the list.
        index: u32,
        /// Its text.
        merge: String,
    },
    /// The text is too long to encode in one call.
    #[error("the text has {len} bytes, at most {max} are encoded in one call")]
    TextTooLong {
        /// Bytes of the text.
        len: usize,
        /// The most that is supported.
        max: usize,
    },
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. The begin and end tokens are those that the file's template puts
    /// around a text; [`Tokenizer::with_config`] knows better.
    pub fn from_json(json: impl AsRef<[u8]>) -> Result<Self, TokenizerError> {
        let HfParts { engine, pieces, strips_leading_space, bos, eos } = Hf::parse(json.as_ref())?;
        Ok(Tokenizer {
            engine: Engine::Hf(Box::new(engine)),
            pieces,
            strips_leading_space,
            adds_bos: bos.is_some(),
            adds_eos: eos.is_some(),
            bos,
            eos,
        })
    }

    /// Builds a tokenizer from an embedded vocabulary.
    pub fn from_vocab(vocab: &Vocab) -> Result<Self, TokenizerError> {
        vocab.check()?;
        match vocab.model.as_str() {
            "gpt2" => Tokenizer::bpe(vocab),
            "llama" => Tokenizer::spm(vocab),
            _ => Err(TokenizerError::UnknownModel { name: vocab.model.clone() }),
        }
    }

    fn bpe(vocab: &Vocab) -> Result<Self, TokenizerError> {
        let rule = Rule::find(&vocab.pre)?;
        let ids = TokenIds::new(vocab);
        let chars = CharBytes::new();
        Ok(Tokenizer {
            pieces: vocab.pieces(|token, out| chars.decode(token, out))?,
            engine: Engine::Embedded {
                merging: Merging::Bpe(Box::new(Bpe::new(vocab, &ids, rule)?)),
                added: AddedTokens::new(vocab)?,
                ids,
            },
            strips_leading_space: false,
            bos: vocab.bos,
            eos: vocab.eos,
            adds_bos: vocab.add_bos.unwrap_or(rule.add_bos),
            adds_eos: vocab.add_eos.unwrap_or(false),
        })
    }

    fn spm(vocab: &Vocab) -> Result<Self, TokenizerError> {
        // The ids that SentencePiece itself gives when the file names none.
        let or_usual = |id: Option<TokenId>, usual: u32| {
            id.or((vocab.tokens.len() > usual as usize).then_some(TokenId(usual)))
        };
        let ids = TokenIds::new(vocab);
        let spm = Spm::new(vocab, &ids, or_usual(vocab.unk, 0).map(|id| id.0))?;
        Ok(Tokenizer {
            pieces: vocab.pieces(|token, out| decode_marked(token, SPACE_MARK, out))?,
            strips_leading_space: spm.adds_space_prefix(),
            engine: Engine::Embedded {
                merging: Merging::Spm(Box::new(spm)),
                added: AddedTokens::new(vocab)?,
                ids,
            },
            bos: or_usual(vocab.bos, 1),
            eos: or_usual(vocab.eos, 2),
            adds_bos: vocab.add_bos.unwrap_or(true),
            adds_eos: vocab.add_eos.unwrap_or(false),
        })
    }

    /// Takes the begin and end tokens from a `tokenizer_config.json`, where it names them.
    pub fn with_config(mut self, config: &TokenizerConfig) -> Result<Self, TokenizerError> {
        let find = |role, token: &Option<String>| match token {
            None => Ok(None),
            Some(token) => match self.id_of(token) {
                Some(id) => Ok(Some(id)),
                None => Err(TokenizerError::UnknownToken { role, token: token.clone() }),
            },
        };
        let bos = find("bos", &config.bos_token)?;
        let eos = find("eos", &config.eos_token)?;
        self.bos = bos.or(self.bos);
        self.eos = eos.or(self.eos);
        self.adds_bos = config.add_bos_token.unwrap_or(self.adds_bos);
        self.adds_eos = config.add_eos_token.unwrap_or(self.adds_eos);
        Ok(self)
    }

    /// The tokens of `text`. Text that a vocabulary cannot spell becomes its unknown token or is
    /// left out.
    pub fn encode(
        &self,
        text: &str,
        options: EncodeOptions,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        if text.len() > TEXT_LEN_MAX {
            return Err(TokenizerError::TextTooLong { len: text.len(), max: TEXT_LEN_MAX });
        }
        let mut ids = Vec::new();
        ids.extend(self.bos.filter(|_| options.add_bos).map(|id| id.0));
        self.engine.encode(text, options.special, &mut ids)?;
        ids.extend(self.eos.filter(|_| options.add_eos).map(|id| id.0));
        Ok(ids.into_iter().map(TokenId).collect())
    }

    /// The text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary give
    /// nothing.
    pub fn decode(&self, ids: &[TokenId], options: DecodeOptions) -> String {
        let mut text = String::new();
        let mut state = DecodeState::new(options);
        for &id in ids {
            state.push(self, id, &mut text);
        }
        state.flush(&mut text);
        text
    }

    /// The raw bytes of one token, perhaps only a part of a character; `None` for an id outside
    /// the vocabulary.
    pub fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.pieces.get(id)
    }

    /// The token that begins a sequence.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// The token that ends a sequence.
    pub fn eos(&self) -> Option<TokenId> {
        self.eos
    }

    /// Whether the model wants the begin token before a plain text. A chat template writes its
    /// own.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos && self.bos.is_some()
    }

    /// Whether the model wants the end token after a plain text.
    pub fn adds_eos(&self) -> bool {
        self.adds_eos && self.eos.is_some()
    }

    /// The tokens that end an answer: [`Tokenizer::eos`], and special tokens of the known chat
    /// formats, in order of id.
    pub fn end_tokens(&self) -> Vec<TokenId> {
        let known = END_TOKENS.iter().filter_map(|token| self.id_of(token));
        let mut ends: Vec<TokenId> =
            known.filter(|&id| self.is_special(id)).chain(self.eos).collect();
        ends.sort_unstable();
        ends.dedup();
        ends
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The token with exactly this spelling, as the vocabulary writes it.
    pub fn id_of(&self, token: &str) -> Option<TokenId> {
        let id = match &self.engine {
            Engine::Hf(hf) => hf.id_of(token),
            Engine::Embedded { ids, .. } => ids.get(token),
        };
        id.map(TokenId)
    }

    /// Whether the token is structure rather than text.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.pieces.is_special(id)
    }

    pub(crate) fn strips_leading_space(&self) -> bool {
        self.strips_leading_space
    }
}

#[derive(Debug)]
enum Engine {
    Hf(Box<Hf>),
    Embedded { merging: Merging, added: AddedTokens, ids: TokenIds },
}

#[derive(Debug)]
enum Merging {
    Bpe(Box<Bpe>),
    Spm(Box<Spm>),
}

impl Engine {
    fn encode(&self, text: &str, special: bool, out: &mut Vec<u32>) -> Result<(), TokenizerError> {
        match self {
            Engine::Hf(hf) => hf.encode(text, special, out)?,
            Engine::Embedded { merging, added, ids } => {
                added.split(text, special, |part| match (part, merging) {
                    (Part::Token(id), _) => out.push(id),
                    (Part::Text(text), Merging::Bpe(bpe)) => bpe.encode(text, ids, out),
                    (Part::Text(text), Merging::Spm(spm)) => spm.encode(text, ids, out),
                });
            }
        }
        Ok(())
    }
}

/// A map whose keys a file chooses: hashed with a secret, so that no file makes it slow.
#[expect(clippy::disallowed_types, reason = "nothing iterates it")]
type FileMap<K, V> = std::collections::HashMap<K, V>;

/// Spellings to ids. Of equal spellings the lowest id counts.
#[derive(Debug)]
struct TokenIds {
    ids: FileMap<Box<str>, u32>,
    /// Whether a token, by id, may come from text.
    textual: Vec<bool>,
}

impl TokenIds {
    fn new(vocab: &Vocab) -> Self {
        let mut ids = FileMap::with_capacity(vocab.tokens.len());
        let mut textual = Vec::with_capacity(vocab.tokens.len());
        for (idx, token) in vocab.tokens.iter().enumerate() {
            let kind = vocab.kind(idx);
            textual.push(!kind.is_special() && kind != TokenKind::Byte);
            if !token.is_empty() {
                ids.entry(token.as_str().into()).or_insert(idx as u32);
            }
        }
        TokenIds { ids, textual }
    }

    /// The token with this spelling.
    fn get(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    /// The token with this spelling, unless it is one that text never becomes.
    fn text(&self, token: &str) -> Option<u32> {
        self.get(token).filter(|&id| self.textual[id as usize])
    }
}
