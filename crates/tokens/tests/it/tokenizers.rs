//! Our engines against Hugging Face's tokenizers and SentencePiece.

use nuthatch_tokens::{
    DecodeOptions, EncodeOptions, TEXT_LEN_MAX, TokenKind, Tokenizer, TokenizerConfig,
    TokenizerError,
};
use nuthatch_types::TokenId;
use proptest::prelude::*;

use crate::common::{
    self, BPE, PLAIN, SPECIAL, SPM, TOKENIZER_JSON, bpe_vocab, encode, parse, spm_vocab,
};

#[test]
fn bpe_gives_the_ids_of_the_library_for_every_way_to_cut_words() {
    let fixture = parse(BPE);
    for (pre, expected) in fixture["expected"].as_object().unwrap() {
        let tokenizer = Tokenizer::from_vocab(&bpe_vocab(pre)).unwrap();
        for (options, name) in [(SPECIAL, "special"), (PLAIN, "plain")] {
            for (text, ids) in common::cases(&expected[name]) {
                assert_eq!(encode(&tokenizer, &text, options), ids, "{pre} {name} {text:?}");
            }
        }
    }
}

#[test]
fn spm_gives_the_ids_of_sentencepiece_and_back() {
    let tokenizer = Tokenizer::from_vocab(&spm_vocab()).unwrap();
    for (text, ids) in common::cases(&parse(SPM)["expected"]) {
        assert_eq!(encode(&tokenizer, &text, PLAIN), ids, "{text:?}");
        let back = tokenizer.decode(&common::token_ids(&ids), DecodeOptions::default());
        // The mark for a space cannot be told from a space any more.
        assert_eq!(back, text.replace('\u{2581}', " "));
    }
}

#[test]
fn a_tokenizer_json_gives_the_ids_of_the_library() {
    let tokenizer = Tokenizer::from_json(TOKENIZER_JSON).unwrap();
    let expected = &parse(BPE)["expected"]["qwen2"];
    for (options, name) in [(SPECIAL, "special"), (PLAIN, "plain")] {
        for (text, ids) in common::cases(&expected[name]) {
            assert_eq!(encode(&tokenizer, &text, options), ids, "{name} {text:?}");
            let options = DecodeOptions { skip_special: false, continuing: false };
            assert_eq!(tokenizer.decode(&common::token_ids(&ids), options), text);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Two engines that share nothing but the vocabulary.
    #[test]
    fn our_bpe_and_the_library_agree_on_any_text(
        text in r"([a-zA-Z' \n\t\r0-9]|\PC|the|seeds|  |<\|end\|>){0,40}",
        special: bool,
    ) {
        static BOTH: std::sync::LazyLock<(Tokenizer, Tokenizer)> = std::sync::LazyLock::new(|| {
            let ours = Tokenizer::from_vocab(&bpe_vocab("qwen2")).unwrap();
            (ours, Tokenizer::from_json(TOKENIZER_JSON).unwrap())
        });
        // The library folds the long s of a contraction; the embedded vocabularies' rule does not.
        let text = text.replace('\u{17f}', "");
        let options = EncodeOptions { special, ..PLAIN };
        let ours = encode(&BOTH.0, &text, options);
        prop_assert_eq!(&ours, &encode(&BOTH.1, &text, options));
        let keep = DecodeOptions { skip_special: false, continuing: false };
        prop_assert_eq!(BOTH.0.decode(&common::token_ids(&ours), keep), text);
    }

    #[test]
    fn spm_text_comes_back(text in r"([a-z \n\t]|\PC|the|seeds|  ){0,40}") {
        static SPM: std::sync::LazyLock<Tokenizer> =
            std::sync::LazyLock::new(|| Tokenizer::from_vocab(&spm_vocab()).unwrap());
        let text = text.replace('\u{2581}', "");
        let ids = SPM.encode(&text, PLAIN).unwrap();
        prop_assert_eq!(SPM.decode(&ids, DecodeOptions::default()), text);
    }
}

#[test]
fn special_tokens_come_from_text_only_when_asked_for() {
    let tokenizer = Tokenizer::from_vocab(&bpe_vocab("gpt-2")).unwrap();
    let [start, end] = ["<|start|>", "<|end|>"].map(|token| tokenizer.id_of(token).unwrap());
    assert!(tokenizer.is_special(start));
    let special = tokenizer.encode("<|start|>a<|end|>", SPECIAL).unwrap();
    assert_eq!([special[0], special[2]], [start, end]);
    let plain = tokenizer.encode("<|start|>a<|end|>", PLAIN).unwrap();
    assert!(plain.iter().all(|&id| !tokenizer.is_special(id)));
    assert_eq!(tokenizer.decode(&plain, DecodeOptions::default()), "<|start|>a<|end|>");
    assert_eq!(tokenizer.decode(&special, DecodeOptions::default()), "a");
    assert_eq!(tokenizer.end_tokens(), [end]);
}

#[test]
fn spm_never_merges_text_into_a_control_token() {
    let mut vocab = spm_vocab();
    // Make every part of "<s>" a token, so that the merges could reach it.
    for (token, kind) in [("<s", TokenKind::Normal), ("s>", TokenKind::Normal)] {
        vocab.tokens.push(token.into());
        vocab.scores.as_mut().unwrap().push(0.0);
        vocab.kinds.push(kind);
    }
    let tokenizer = Tokenizer::from_vocab(&vocab).unwrap();
    let plain = tokenizer.encode("<s>", PLAIN).unwrap();
    assert!(!plain.contains(&TokenId(1)), "{plain:?}");
    assert_eq!(tokenizer.encode("<s>", SPECIAL).unwrap(), [TokenId(1)]);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(TokenId(1)), Some(TokenId(2))));
    assert!(tokenizer.adds_bos());
}

#[test]
fn spm_puts_a_space_after_a_special_token_too() {
    let tokenizer = Tokenizer::from_vocab(&spm_vocab()).unwrap();
    let the = encode(&tokenizer, "the", PLAIN);
    let after = encode(&tokenizer, "<s>the", SPECIAL);
    assert_eq!(after, [&[1], the.as_slice()].concat());
    let continuing = DecodeOptions { continuing: true, ..DecodeOptions::default() };
    assert_eq!(tokenizer.decode(&common::token_ids(&the), continuing), " the");
}

#[test]
fn begin_and_end_tokens_are_added_when_asked_for() {
    let config = r#"{"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}}"#;
    let config = TokenizerConfig::from_json(config).unwrap();
    let tokenizer = Tokenizer::from_json(TOKENIZER_JSON).unwrap().with_config(&config).unwrap();
    let options = EncodeOptions { special: false, add_bos: true, add_eos: true };
    let ids = encode(&tokenizer, "a", options);
    assert_eq!((ids.first(), ids.last(), ids.len()), (Some(&0), Some(&1), 3));
    assert!(!tokenizer.adds_bos());

    let unknown = TokenizerConfig { bos_token: Some("<nope>".into()), ..config };
    let error = Tokenizer::from_json(TOKENIZER_JSON).unwrap().with_config(&unknown).unwrap_err();
    assert_eq!(error.to_string(), "bos token \"<nope>\" is not in the vocabulary");
}

#[test]
fn what_cannot_be_is_an_error_with_the_facts() {
    #[track_caller]
    fn check(change: impl Fn(&mut nuthatch_tokens::Vocab), expect: &str) {
        let mut vocab = spm_vocab();
        change(&mut vocab);
        let error = Tokenizer::from_vocab(&vocab).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    }
    check(|vocab| vocab.model = "bert".into(), "\"bert\"");
    check(|vocab| vocab.tokens.clear(), "empty");
    check(|vocab| vocab.scores = None, "no scores");
    check(|vocab| vocab.scores = Some(vec![0.0]), "1 scores");
    check(|vocab| vocab.kinds.truncate(3), "3 kinds");
    check(|vocab| vocab.eos = Some(TokenId(u32::MAX)), "eos token 4294967295");

    let mut vocab = bpe_vocab("martian");
    assert!(Tokenizer::from_vocab(&vocab).unwrap_err().to_string().contains("smollm"));
    vocab = bpe_vocab("gpt-2");
    vocab.merges.push("one".into());
    assert!(Tokenizer::from_vocab(&vocab).unwrap_err().to_string().contains("\"one\""));

    let tokenizer = Tokenizer::from_vocab(&bpe_vocab("gpt-2")).unwrap();
    let error = tokenizer.encode(&"a".repeat(TEXT_LEN_MAX + 1), PLAIN).unwrap_err();
    assert!(matches!(error, TokenizerError::TextTooLong { .. }));
}
