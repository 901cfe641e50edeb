//! A tokenizer.json of any bytes is a tokenizer that encodes and decodes, or an error.
//!
//! The library that reads these files panics on some of them, and our crate makes that an error. So
//! the hook that ends the process at any panic is taken out; one that leaves our crate still ends it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nuthatch_tokens::{DecodeOptions, EncodeOptions, Tokenizer, TokenizerConfig};

const TEXT: &str = "ab abc 123 \u{e9}\u{1f43f} <s>";

fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |bytes: &[u8]| {
    // A zero byte separates tokenizer.json from tokenizer_config.json.
    let (json, config) = match bytes.iter().position(|byte| *byte == 0) {
        Some(at) => (&bytes[..at], TokenizerConfig::from_json(&bytes[at + 1..]).ok()),
        None => (bytes, None),
    };
    let Ok(tokenizer) = Tokenizer::from_json(json) else { return };
    let tokenizer = match config {
        Some(config) => match tokenizer.with_config(&config) {
            Ok(tokenizer) => tokenizer,
            Err(_) => return,
        },
        None => tokenizer,
    };
    if let Ok(ids) = tokenizer.encode(TEXT, EncodeOptions::default()) {
        let _ = tokenizer.decode(&ids, DecodeOptions::default());
    }
    let _ = tokenizer.end_tokens();
});
