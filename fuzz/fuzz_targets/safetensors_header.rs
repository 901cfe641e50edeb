//! A model.safetensors of any bytes opens with its tensors inside the file, or is an error.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use nuthatch_model::ModelFiles;

/// A model folder whose config.json is valid; only the weights are fuzzed.
static FOLDER: OnceLock<PathBuf> = OnceLock::new();
const CONFIG: &str = include_str!("../seeds/config_json/llama.json");

fuzz_target!(|bytes: &[u8]| {
    let folder = FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("nuthatch-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("the temporary folder can be written");
        std::fs::write(folder.join("config.json"), CONFIG).expect("the same");
        folder
    });
    std::fs::write(folder.join("model.safetensors"), bytes).expect("the same");
    if let Ok(files) = ModelFiles::open(folder) {
        let _ = files.fingerprint();
        let _ = files.weight_bytes();
    }
});
