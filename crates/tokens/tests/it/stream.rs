//! The detokenizer against decoding everything at once.

use std::sync::{Arc, LazyLock};

use nuthatch_tokens::{DecodeOptions, Detokenizer, Tokenizer};
use nuthatch_types::TokenId;
use proptest::prelude::*;

use crate::common::{self, bpe_vocab, spm_vocab};

static BPE: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::from_vocab(&bpe_vocab("gpt-2")).unwrap()));
static SPM: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::from_vocab(&spm_vocab()).unwrap()));

/// What the contract says, over all bytes at once.
fn naive(tokenizer: &Tokenizer, ids: &[TokenId], options: DecodeOptions, strips: bool) -> String {
    let shown = ids.iter().filter(|&&id| !(options.skip_special && tokenizer.is_special(id)));
    let bytes: Vec<u8> =
        shown.flat_map(|&id| tokenizer.token_bytes(id).unwrap_or_default().to_vec()).collect();
    let bytes = if strips && !options.continuing {
        bytes.strip_prefix(b" ").unwrap_or(&bytes)
    } else {
        &bytes
    };
    String::from_utf8_lossy(bytes).into_owned()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Ids above the vocabulary are part of the game, and the low ones are mostly single bytes, so
    /// that broken characters of every kind come up.
    #[test]
    fn pieces_make_up_the_whole(
        ids in prop::collection::vec(prop_oneof![3 => 0u32..270, 1 => 0u32..700], 0..40),
        skip_special: bool,
        continuing: bool,
        spm: bool,
    ) {
        let tokenizer = if spm { &SPM } else { &BPE };
        let ids = common::token_ids(&ids);
        let options = DecodeOptions { skip_special, continuing };
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), options);
        let mut pieces: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        pieces += &detokenizer.flush();
        prop_assert_eq!(&pieces, &tokenizer.decode(&ids, options));
        prop_assert_eq!(&pieces, &naive(tokenizer, &ids, options, spm));
    }
}

#[test]
fn a_character_comes_when_it_is_complete_and_not_before() {
    let bytes = "\u{20ac}x".bytes().chain([0xE2, 0x82, b'y', 0xE2]);
    let id_of_byte = |byte: u8| {
        let is_it = |id: &u32| BPE.token_bytes(TokenId(*id)) == Some(&[byte]);
        TokenId((0..600).find(is_it).unwrap())
    };
    let mut detokenizer = Detokenizer::new(Arc::clone(&BPE), DecodeOptions::default());
    let pieces: Vec<String> = bytes.map(|byte| detokenizer.push(id_of_byte(byte))).collect();
    assert_eq!(pieces, ["", "", "\u{20ac}", "x", "", "", "\u{fffd}y", ""]);
    assert_eq!(detokenizer.flush(), "\u{fffd}");
    assert_eq!(detokenizer.flush(), "");
}
