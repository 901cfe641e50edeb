//! A config.json of any bytes is a configuration with possible shapes, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nuthatch_model::ModelConfig;

fuzz_target!(|bytes: &[u8]| {
    // A zero byte separates config.json from generation_config.json.
    let (config, generation) = match bytes.iter().position(|byte| *byte == 0) {
        Some(at) => (&bytes[..at], Some(&bytes[at + 1..])),
        None => (bytes, None),
    };
    let Ok(config) = ModelConfig::from_json(config, generation) else { return };
    assert!(config.n_layers > 0);
    assert!(config.n_kv_heads > 0);
    assert_eq!(config.n_heads % config.n_kv_heads, 0);
    let _ = config.rope_spec(64);
});
