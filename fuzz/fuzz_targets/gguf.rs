//! A GGUF file of any bytes is a model or an error.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use nuthatch_model::{Gguf, ModelFiles};

/// Parts of a split model are found by name, so the file has a fixed one.
static FILE: OnceLock<PathBuf> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    if Gguf::parse(bytes).is_err() {
        return;
    }
    // A header that parses goes the whole way: configuration, names, shapes, tokenizer lists.
    let path = FILE.get_or_init(|| {
        std::env::temp_dir().join(format!("nuthatch-fuzz-{}.gguf", std::process::id()))
    });
    std::fs::write(path, bytes).expect("the temporary folder can be written");
    if let Ok(files) = ModelFiles::open(path) {
        let _ = files.tokenizer();
        let _ = files.weight_bytes();
        let _ = files.fingerprint();
    }
});
