//! The tiny vocabularies that `fixtures/make.py` made, and the ids other tokenizers gave.

use nuthatch_tokens::{EncodeOptions, TokenKind, Tokenizer, Vocab};
use nuthatch_types::TokenId;
use serde_json::Value as Json;

pub(crate) const BPE: &str = include_str!("../fixtures/bpe.json");
pub(crate) const SPM: &str = include_str!("../fixtures/spm.json");
pub(crate) const TOKENIZER_JSON: &str = include_str!("../fixtures/tokenizer.json");

pub(crate) const SPECIAL: EncodeOptions =
    EncodeOptions { special: true, add_bos: false, add_eos: false };
pub(crate) const PLAIN: EncodeOptions =
    EncodeOptions { special: false, add_bos: false, add_eos: false };

pub(crate) fn parse(fixture: &str) -> Json {
    serde_json::from_str(fixture).unwrap()
}

pub(crate) fn bpe_vocab(pre: &str) -> Vocab {
    let fixture = parse(BPE);
    Vocab {
        model: "gpt2".into(),
        pre: pre.into(),
        tokens: strings(&fixture["tokens"]),
        kinds: kinds(&fixture["kinds"]),
        merges: strings(&fixture["merges"]),
        ..Vocab::default()
    }
}

pub(crate) fn spm_vocab() -> Vocab {
    let fixture = parse(SPM);
    let scores = fixture["scores"].as_array().unwrap();
    Vocab {
        model: "llama".into(),
        tokens: strings(&fixture["tokens"]),
        scores: Some(scores.iter().map(|score| score.as_f64().unwrap() as f32).collect()),
        kinds: kinds(&fixture["kinds"]),
        ..Vocab::default()
    }
}

pub(crate) fn encode(tokenizer: &Tokenizer, text: &str, options: EncodeOptions) -> Vec<u32> {
    tokenizer.encode(text, options).unwrap().into_iter().map(|id| id.0).collect()
}

pub(crate) fn token_ids(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

/// Pairs of a text and its ids.
pub(crate) fn cases(json: &Json) -> Vec<(String, Vec<u32>)> {
    let case = |case: &Json| {
        let ids = case["ids"].as_array().unwrap();
        let ids = ids.iter().map(|id| id.as_u64().unwrap() as u32).collect();
        (case["text"].as_str().unwrap().to_owned(), ids)
    };
    json.as_array().unwrap().iter().map(case).collect()
}

fn strings(json: &Json) -> Vec<String> {
    json.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

fn kinds(json: &Json) -> Vec<TokenKind> {
    let numbers = json.as_array().unwrap().iter();
    numbers.map(|number| TokenKind::from_gguf(number.as_i64().unwrap() as i32)).collect()
}
