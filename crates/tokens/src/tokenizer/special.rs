//! Finds added tokens in text before anything else looks at it.
//!
//! User-defined tokens are always found. Control and unknown tokens are structure, and are found
//! only when the caller says that the text may contain structure; in a user's text their spelling
//! is just text. Of tokens that start at one place the longest wins.

use aho_corasick::{AhoCorasick, MatchKind};

use super::TokenizerError;
use crate::vocab::{TokenKind, Vocab};

#[derive(Debug)]
pub(super) struct AddedTokens {
    user_defined: Finder,
    all: Finder,
}

/// A part of a text.
pub(super) enum Part<'t> {
    Text(&'t str),
    Token(u32),
}

impl AddedTokens {
    pub(super) fn new(vocab: &Vocab) -> Result<Self, TokenizerError> {
        let of_kind = |wanted: fn(TokenKind) -> bool| {
            let found = (0u32..)
                .zip(&vocab.tokens)
                .filter(|(id, token)| !token.is_empty() && wanted(vocab.kind(*id as usize)));
            Finder::new(found.map(|(id, token)| (id, token.as_str())).collect())
        };
        Ok(AddedTokens {
            user_defined: of_kind(|kind| kind == TokenKind::UserDefined)?,
            all: of_kind(|kind| kind == TokenKind::UserDefined || kind.is_special())?,
        })
    }

    /// Calls `visit` for the parts of `text`, in order; texts are not empty.
    pub(super) fn split<'t>(&self, text: &'t str, special: bool, mut visit: impl FnMut(Part<'t>)) {
        let finder = if special { &self.all } else { &self.user_defined };
        let mut done = 0;
        if let Some(automaton) = &finder.automaton {
            for found in automaton.find_iter(text) {
                if done < found.start() {
                    visit(Part::Text(&text[done..found.start()]));
                }
                visit(Part::Token(finder.ids[found.pattern().as_usize()]));
                done = found.end();
            }
        }
        if done < text.len() {
            visit(Part::Text(&text[done..]));
        }
    }
}

#[derive(Debug)]
struct Finder {
    /// Token of each pattern of the automaton.
    ids: Vec<u32>,
    automaton: Option<AhoCorasick>,
}

impl Finder {
    fn new(tokens: Vec<(u32, &str)>) -> Result<Self, TokenizerError> {
        let (ids, patterns): (Vec<u32>, Vec<&str>) = tokens.into_iter().unzip();
        let automaton = if patterns.is_empty() {
            None
        } else {
            let built =
                AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&patterns);
            Some(built.map_err(|_| TokenizerError::AddedTokensTooLarge { n_tokens: ids.len() })?)
        };
        Ok(Finder { ids, automaton })
    }
}
