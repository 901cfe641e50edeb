//! Damaged files: whatever the bytes, a parser returns, and what it returns is inside the file.
//!
//! Wild allocation would show as an abort, an endless loop as a test that never ends.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod common;

use common::{GgufWriter, golden_dir};
use nuthatch_model::{
    Gguf, ModelConfig, ModelFiles, SafetensorsError, SafetensorsHeader, parse_index,
};
use nuthatch_types::LayerIdx;
use proptest::prelude::*;

/// One change of a file.
#[derive(Clone, Debug)]
enum Damage {
    Set(prop::sample::Index, u8),
    /// Overwrites eight bytes, as a length or an offset.
    Length(prop::sample::Index, u64),
    Cut(prop::sample::Index),
    Remove(prop::sample::Index, usize),
    Repeat(prop::sample::Index, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<prop::sample::Index>;
    let lengths = prop_oneof![
        Just(u64::MAX),
        Just(u64::MAX / 8 + 1),
        Just(1 << 61),
        Just(1 << 32),
        0u64..4096,
        any::<u64>(),
    ];
    prop_oneof![
        4 => (index(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        4 => (index(), lengths).prop_map(|(at, value)| Damage::Length(at, value)),
        1 => index().prop_map(Damage::Cut),
        1 => (index(), 1usize..64).prop_map(|(at, n)| Damage::Remove(at, n)),
        1 => (index(), 1usize..64).prop_map(|(at, n)| Damage::Repeat(at, n)),
    ]
}

fn apply(bytes: &mut Vec<u8>, damages: &[Damage]) {
    for damage in damages {
        if bytes.is_empty() {
            return;
        }
        match damage {
            Damage::Set(at, byte) => {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            Damage::Length(at, value) => {
                let at = at.index(bytes.len());
                let end = bytes.len().min(at + 8);
                bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            Damage::Cut(at) => bytes.truncate(at.index(bytes.len())),
            Damage::Remove(at, n) => {
                let at = at.index(bytes.len());
                bytes.drain(at..bytes.len().min(at + n));
            }
            Damage::Repeat(at, n) => {
                let at = at.index(bytes.len());
                let part = bytes[at..bytes.len().min(at + n)].to_vec();
                bytes.splice(at..at, part);
            }
        }
    }
}

/// The header of the tiny model, where damage matters; its tensors are a few KB behind it.
fn gguf_seed() -> Vec<u8> {
    GgufWriter::tiny_llama().finish()
}

fn safetensors_seed() -> Vec<u8> {
    // A header with real names and little data.
    let header = r#"{"__metadata__":{"format":"pt"},
        "a.weight":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]},
        "b.weight":{"dtype":"BF16","shape":[16],"data_offsets":[64,96]},
        "c":{"dtype":"I64","shape":[],"data_offsets":[96,104]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([7; 104]);
    file
}

fn check_gguf(bytes: &[u8]) {
    let Ok(gguf) = Gguf::parse(bytes) else { return };
    for (name, tensor) in &gguf.tensors {
        assert!(tensor.start + tensor.len <= bytes.len(), "{name}");
        let cols = *tensor.shape.last().unwrap();
        let rows: usize = tensor.shape.iter().rev().skip(1).product();
        assert_eq!(tensor.dtype.row_bytes(cols).unwrap() * rows, tensor.len, "{name}");
    }
}

fn check_safetensors(bytes: &[u8]) {
    let _ = parse_index(bytes);
    let Ok(header) = SafetensorsHeader::parse(bytes) else { return };
    for name in header.names() {
        if let Ok(Some(tensor)) = header.tensor(bytes, &name) {
            let elements: usize = tensor.shape.iter().product();
            assert_eq!(tensor.dtype.row_bytes(elements), Some(tensor.bytes.len()), "{name}");
            assert_eq!(tensor.to_f32().unwrap().len(), elements, "{name}");
        }
    }
}

fn check_config(bytes: &[u8]) {
    let Ok(config) = ModelConfig::from_json(bytes, None) else { return };
    assert_eq!(config.windows.len(), config.n_layers as usize);
    assert_eq!(config.n_heads % config.n_kv_heads, 0);
    assert!((1..=config.n_layers).contains(&config.n_kv_layers()));
    let arena = |layer: u32| config.kv_layer(LayerIdx(layer)).0;
    assert!((0..config.n_layers).all(|layer| arena(layer) < config.n_kv_layers()));
    for context in [1, 64, 1 << 20] {
        let spec = config.rope_spec(context);
        assert_eq!(spec.inv_freq.len(), config.head_dim as usize / 2);
        assert!(spec.inv_freq.iter().all(|freq| freq.is_finite()), "{config:?}");
        assert!(spec.attention_factor.is_finite(), "{config:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn damaged_gguf_is_an_error_or_in_bounds(damages in prop::collection::vec(damage(), 1..6)) {
        let mut bytes = gguf_seed();
        apply(&mut bytes, &damages);
        check_gguf(&bytes);
    }

    #[test]
    fn damaged_gguf_header_is_an_error_or_in_bounds(at in 0usize..1200, value in any::<u64>()) {
        let mut bytes = gguf_seed();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        check_gguf(&bytes);
    }

    #[test]
    fn damaged_safetensors_is_an_error_or_in_bounds(
        damages in prop::collection::vec(damage(), 1..6),
    ) {
        let mut bytes = safetensors_seed();
        apply(&mut bytes, &damages);
        check_safetensors(&bytes);
    }

    #[test]
    fn random_bytes_are_errors(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        check_gguf(&bytes);
        check_gguf(&[b"GGUF\x03\0\0\0", &bytes[..]].concat());
        check_safetensors(&bytes);
        check_config(&bytes);
    }

    #[test]
    fn damaged_config_is_an_error_or_possible(
        name in prop::sample::select(vec!["qwen3", "yarn", "longrope", "dynamic", "llama3", "qwen2-window"]),
        damages in prop::collection::vec(damage(), 1..4),
    ) {
        let mut bytes = std::fs::read(golden_dir().join(name).join("config.json")).unwrap();
        apply(&mut bytes, &damages);
        check_config(&bytes);
    }

    /// Random bytes seldom stay JSON, so numbers are replaced as well.
    #[test]
    fn config_with_other_numbers_is_an_error_or_possible(
        name in prop::sample::select(vec!["qwen3", "yarn", "longrope", "dynamic", "llama3", "linear"]),
        which in any::<prop::sample::Index>(),
        number in prop::sample::select(vec![
            "0", "1", "2", "-1", "0.5", "1e-30", "1e30", "1e308", "4294967296", "512", "null", "true", "[]", "\"x\"",
        ]),
    ) {
        let text = std::fs::read_to_string(golden_dir().join(name).join("config.json")).unwrap();
        let numbers: Vec<&str> = text.lines().filter(|line| line.contains(": ")).collect();
        let line = numbers[which.index(numbers.len())];
        let (key, rest) = line.split_once(": ").unwrap();
        let comma = if rest.ends_with(',') { "," } else { "" };
        // Lines that open an object or an array stop being JSON, which is a case too.
        check_config(text.replacen(line, &format!("{key}: {number}{comma}"), 1).as_bytes());
    }
}

proptest! {
    // Each case writes a file.
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn damaged_gguf_model_opens_or_is_an_error(damages in prop::collection::vec(damage(), 1..3)) {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("model.gguf");
        let mut bytes = gguf_seed();
        apply(&mut bytes, &damages);
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(files) = ModelFiles::open(&path) {
            files.fingerprint().unwrap();
        }
    }
}

/// Story: the `safetensors` crate adds the length of the data to that of the header unchecked when it
/// holds them against the file, so offsets up to 2^64 overflowed there. Its parser is therefore called
/// for the header's JSON only, and the sum is ours.
#[test]
fn offsets_that_overflow_are_refused() {
    let step = 1u64 << 60;
    let mut entries = Vec::new();
    for i in 0..16u64 {
        let start = i * step;
        let len = if i == 15 { step - 8 } else { step };
        let end = start + len;
        entries.push(format!(
            r#""t{i}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{start},{end}]}}"#
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([0; 64]);
    let error = SafetensorsHeader::parse(&file).unwrap_err();
    assert!(matches!(error, SafetensorsError::Length { .. }), "{error}");
}
