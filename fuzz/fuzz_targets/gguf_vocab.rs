//! An embedded vocabulary of any lists is a tokenizer that encodes and decodes, or an error.
#![no_main]

use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use nuthatch_tokens::{DecodeOptions, EncodeOptions, TokenKind, Tokenizer, Vocab};

/// Splitting rules worth trying; anything else is an unknown name.
const PRE: [&str; 6] = ["", "default", "smollm", "llama-bpe", "qwen2", "gpt-2"];

#[derive(Debug)]
struct Case {
    vocab: Vocab,
    text: String,
}

impl<'a> Arbitrary<'a> for Case {
    fn arbitrary(bytes: &mut Unstructured<'a>) -> Result<Self> {
        let kinds: Vec<i32> = bytes.arbitrary()?;
        let vocab = Vocab {
            model: if bytes.arbitrary()? { "gpt2" } else { "llama" }.to_owned(),
            pre: (*bytes.choose(&PRE)?).to_owned(),
            kinds: kinds.into_iter().map(|kind| TokenKind::from_gguf(kind.rem_euclid(8))).collect(),
            tokens: bytes.arbitrary()?,
            scores: bytes.arbitrary()?,
            merges: bytes.arbitrary()?,
            add_bos: bytes.arbitrary()?,
            ..Vocab::default()
        };
        Ok(Self { vocab, text: bytes.arbitrary()? })
    }
}

fuzz_target!(|case: Case| {
    let Ok(tokenizer) = Tokenizer::from_vocab(&case.vocab) else { return };
    if let Ok(ids) = tokenizer.encode(&case.text, EncodeOptions::default()) {
        let _ = tokenizer.decode(&ids, DecodeOptions::default());
    }
});
