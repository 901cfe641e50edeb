//! Files that lie: the answer is an error or a tokenizer that works, never a panic.

use nuthatch_tokens::{
    ChatTemplate, DecodeOptions, Message, RenderOptions, TokenKind, Tokenizer, TokenizerConfig,
    Vocab,
};
use nuthatch_types::TokenId;
use proptest::prelude::*;

use crate::common::{self, PLAIN, SPECIAL, TOKENIZER_JSON, bpe_vocab, encode};

fn kind() -> impl Strategy<Value = TokenKind> {
    (0i32..8).prop_map(TokenKind::from_gguf)
}

/// Vocabularies of short tokens, so that duplicates, empty ones and merges that fit are common.
fn vocab() -> impl Strategy<Value = Vocab> {
    let tokens = prop::collection::vec("[ab\u{120}\u{2581}]{0,3}|<0x[0-9A]{2}>|<s>|\\PC", 0..40);
    let kinds = prop::collection::vec(kind(), 0..40);
    let scores = prop::collection::vec(any::<f32>(), 0..40);
    let merges = prop::collection::vec("[ab\u{120}]{0,2} [ab\u{120}]{0,2}", 0..10);
    let id = prop::option::of((0u32..50).prop_map(TokenId));
    (tokens, kinds, scores, merges, [id.clone(), id.clone(), id], any::<(bool, bool)>()).prop_map(
        |(tokens, kinds, scores, merges, [bos, eos, unk], (spm, fit))| {
            let n_tokens = tokens.len();
            let mut vocab = Vocab {
                model: if spm { "llama" } else { "gpt2" }.into(),
                pre: "llama-bpe".into(),
                tokens,
                kinds,
                merges,
                scores: Some(scores),
                bos,
                eos,
                unk,
                ..Vocab::default()
            };
            // Most random lists do not fit together; make half of them do.
            if fit {
                vocab.kinds.resize(n_tokens, TokenKind::Normal);
                vocab.scores.as_mut().unwrap().resize(n_tokens, 0.0);
                vocab.merges.retain(|merge| !merge.starts_with(' ') && !merge.ends_with(' '));
            }
            vocab
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_vocabulary_is_refused_or_works(vocab in vocab(), text in "([ab ]|<s>|\\PC){0,30}") {
        let Ok(tokenizer) = Tokenizer::from_vocab(&vocab) else { return Ok(()) };
        for options in [PLAIN, SPECIAL] {
            let ids = tokenizer.encode(&text, options).unwrap();
            prop_assert!(ids.iter().all(|id| (id.0 as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&ids, DecodeOptions::default());
        }
        tokenizer.end_tokens();
    }

    #[test]
    fn a_damaged_template_is_an_error_or_renders(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "{%", "%}", "{{", "}}", " for x in messages ", " endfor ", " if ", " endif ",
                "messages", "[::-1]", "[0]", ".content", "|tojson", "|length", "(", ")", "'", "-",
                " set a = ", "a", " generation ", " endgeneration ", " 1e999 ", " * ", "range(9)",
            ]),
            0..20,
        ),
    ) {
        if let Ok(template) = ChatTemplate::new(&parts.concat()) {
            let _ = template.render(&[Message::new("user", "x")], &RenderOptions::default());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// One byte of a good file replaced, or the file cut off.
    #[test]
    fn a_damaged_tokenizer_json_is_an_error_or_works(at in any::<prop::sample::Index>(), byte: u8) {
        let mut json = TOKENIZER_JSON.as_bytes().to_vec();
        let at = at.index(json.len());
        json[at] = byte;
        for json in [&json[..], &json[..at]] {
            if let Ok(tokenizer) = Tokenizer::from_json(json) {
                let _ = tokenizer.encode("the seeds <|end|>  x", SPECIAL);
            }
        }
    }
}

#[test]
fn json_that_lies_is_an_error() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let deep_decoder = format!("{{\"decoder\": {deep}}}");
    for json in ["", "{}", "[]", "null", "\"\u{0}\"", &deep, &deep_decoder] {
        assert!(Tokenizer::from_json(json).is_err());
        assert!(TokenizerConfig::from_json(json).is_err() || json.len() < 10);
    }
    // The library's own parser panics on a decoder of an unknown type.
    let wrong_decoder = TOKENIZER_JSON.replace("\"decoder\"", "\"decoder\": 7, \"was\"");
    assert!(Tokenizer::from_json(&wrong_decoder).is_err());
    let huge_id = TOKENIZER_JSON.replace("\"id\": 0", "\"id\": 4294967295");
    let _ = Tokenizer::from_json(&huge_id);
}

#[test]
fn merges_of_unknown_tokens_never_apply() {
    let mut vocab = bpe_vocab("gpt-2");
    let expect = encode(&Tokenizer::from_vocab(&vocab).unwrap(), "the seeds", PLAIN);
    vocab.merges.insert(0, "th esee".into());
    vocab.merges.insert(0, "x yzzy".into());
    assert_eq!(encode(&Tokenizer::from_vocab(&vocab).unwrap(), "the seeds", PLAIN), expect);
}

#[test]
fn long_runs_take_time_in_proportion() {
    let bpe = Tokenizer::from_vocab(&bpe_vocab("llama-bpe")).unwrap();
    let spm = Tokenizer::from_vocab(&common::spm_vocab()).unwrap();
    for text in [" ".repeat(300_000), "a".repeat(300_000), "\n \n".repeat(100_000)] {
        for tokenizer in [&bpe, &spm] {
            let ids = tokenizer.encode(&text, PLAIN).unwrap();
            assert_eq!(tokenizer.decode(&ids, DecodeOptions::default()), text);
        }
    }
}
