//! Opening models: what is read from them, and what is said of wrong ones.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic and print")]

mod common;

use std::path::Path;

use common::{GgufWriter, Golden, golden_dir};
use nuthatch_backend::WeightType;
use nuthatch_model::{
    Architecture, ConfigError, GgufError, ModelConfig, ModelError, ModelFiles, SafetensorsError,
    TensorName, TokenizerFiles, kv_shape,
};
use nuthatch_types::{KvDtype, LayerIdx, TokenId};
use tempfile::TempDir;

fn open(name: &str) -> ModelFiles {
    ModelFiles::open(&Golden::read(name).model).unwrap()
}

/// A copy of a golden's model that a test may damage.
fn copy_of(name: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    for entry in std::fs::read_dir(golden_dir().join(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

/// Replaces text in a file that must have it.
fn edit(path: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} is not in {text}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

fn write_gguf(bytes: &[u8]) -> (TempDir, std::path::PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

#[test]
fn every_golden_opens_and_gives_all_its_tensors() {
    for golden in Golden::all() {
        let files = ModelFiles::open(&golden.model).unwrap();
        let config = files.config();
        assert_eq!(config.vocab, 163, "{}", golden.name);
        assert_eq!(config.bos, Some(TokenId(1)), "{}", golden.name);
        assert_eq!(config.eos, [TokenId(2)], "{}", golden.name);
        let (mut bytes, mut elsewhere) = (0, 0);
        for name in TensorName::all(config) {
            assert!(files.has(name), "{} {name:?}", golden.name);
            let tensor = files.tensor(name).unwrap();
            bytes += tensor.bytes.len() as u64;
            // A device that pads rows to 64 and takes three bytes for each of their weights.
            elsewhere += match tensor.shape[..] {
                [rows, cols] => 3 * (rows * cols.next_multiple_of(64)) as u64,
                [n] => 4 * n as u64,
                _ => unreachable!("a matrix or a vector"),
            };
        }
        assert_eq!(bytes, files.weight_bytes(), "{}", golden.name);
        let padded = |_, rows: usize, cols: usize| 3 * rows * cols.next_multiple_of(64);
        assert_eq!(elsewhere, files.weight_bytes_as(padded).unwrap(), "{}", golden.name);
        assert_eq!(files.fingerprint().unwrap(), files.fingerprint().unwrap());
    }
}

#[test]
fn architectures_are_told_apart() {
    let qwen3 = open("qwen3");
    let config = qwen3.config();
    assert_eq!(config.architecture, Architecture::Qwen3);
    assert_eq!((config.head_dim, config.hidden, config.q_width()), (32, 64, 128));
    assert!(config.qk_norm && !config.qkv_bias && config.tied_embeddings);
    assert_eq!(qwen3.vector(TensorName::QNorm(1)).unwrap().len(), 32);
    assert!(!qwen3.has(TensorName::Output));

    let qwen2 = open("qwen2");
    assert!(qwen2.config().qkv_bias && !qwen2.config().o_bias && !qwen2.config().qk_norm);
    assert_eq!(qwen2.vector(TensorName::KBias(0)).unwrap().len(), 32);

    let bias = open("llama-bias");
    assert!(bias.config().qkv_bias && bias.config().o_bias);
    assert_eq!(bias.tensor(TensorName::O(0)).unwrap().dtype, WeightType::F16);

    let mistral = open("mistral-window");
    assert_eq!(mistral.config().architecture, Architecture::Mistral);
    assert_eq!(mistral.config().windows, [Some(21); 2]);
    let window = open("qwen2-window");
    assert_eq!(window.config().windows, [None, Some(13), Some(13)]);
    assert_eq!(window.config().window(LayerIdx(1)), Some(13));
    assert_eq!(mistral.config().widest_window(), Some(21));
    assert_eq!(window.config().widest_window(), None);

    let quantised = open("gguf-qwen2-q4_0");
    assert!(quantised.config().qkv_bias && !quantised.config().tied_embeddings);
    let q = quantised.tensor(TensorName::Q(0)).unwrap();
    assert_eq!((q.dtype, &q.shape[..], q.bytes.len()), (WeightType::Q4_0, &[32, 32][..], 32 * 18));
}

#[test]
fn layers_that_share_own_no_kv() {
    let open_at = |name: &str| {
        let files = open(name);
        let config = files.config();
        let shape = kv_shape(config, KvDtype::F16);
        let arena = (0..config.n_layers).map(|l| config.kv_layer(LayerIdx(l)).0).collect();
        (config.kv_owners.clone(), arena, shape.n_layers)
    };
    assert_eq!(open_at("kv-shared"), (vec![0, 1, 1, 1], vec![0, 1, 1, 1], 2));
    assert_eq!(open_at("kv-shared-window"), (vec![0, 1, 2, 1, 2], vec![0, 1, 2, 1, 2], 3));
    assert_eq!(open_at("kv-shared-map"), (vec![0, 0, 2, 0], vec![0, 0, 1, 0], 2));
    assert_eq!(open_at("llama3"), (vec![0, 1], vec![0, 1], 2));
    let shared = open("kv-shared-map");
    assert!(!shared.has(TensorName::K(1)) && shared.has(TensorName::K(2)));
    assert!(!TensorName::all(shared.config()).contains(&TensorName::KNorm(1)));
}

#[test]
fn shards_are_one_model() {
    let sharded = open("llama2-mha");
    let dir = copy_of("llama2-mha");
    let path = dir.path().join("model.safetensors.index.json");
    assert!(sharded.names_in_files().contains(&"model.layers.1.mlp.down_proj.weight"));

    let index = std::fs::read_to_string(&path).unwrap();
    for hostile in ["../model.safetensors", "/etc/x.safetensors", "a\\\\b.safetensors", "shard.bin"]
    {
        let hostile = index.replace("model-00001-of-00002.safetensors", hostile);
        std::fs::write(&path, hostile).unwrap();
        let error = ModelFiles::open(dir.path()).unwrap_err();
        let is_name = matches!(
            error,
            ModelError::Safetensors { source: SafetensorsError::ShardName { .. }, .. }
        );
        assert!(is_name, "{error}");
    }
    std::fs::write(&path, index.replace("00001-of-00002", "00002-of-00002")).unwrap();
    let error = ModelFiles::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("is not in model-00002-of-00002.safetensors"), "{error}");
    std::fs::write(&path, "{}").unwrap();
    let error = ModelFiles::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("weight_map"), "{error}");
}

#[test]
fn wrong_directories_are_explained() {
    let check = |name: &str, damage: &dyn Fn(&Path), expected: &str| {
        let dir = copy_of(name);
        damage(dir.path());
        let error = ModelFiles::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\ndoes not say\n{expected}");
    };
    let config = |from: &'static str, to: &'static str| {
        move |dir: &Path| edit(&dir.join("config.json"), from, to)
    };
    check(
        "llama-tied",
        &config(r#""model_type": "llama""#, r#""model_type": "mamba""#),
        "architecture mamba is not supported; supported are llama, mistral, qwen2, qwen3",
    );
    check(
        "llama-tied",
        &config(r#""intermediate_size": 64"#, r#""intermediate_size": 65"#),
        "tensor model.layers.0.mlp.gate_proj.weight has shape [64, 32], but the configuration asks \
         for [65, 32]",
    );
    check(
        "llama-tied",
        &config(r#""num_hidden_layers": 2"#, r#""num_hidden_layers": 3"#),
        "tensor model.layers.2.input_layernorm.weight is missing",
    );
    check("llama-tied", &config(r#""vocab_size": 163"#, r#""vocab_size": -1"#), "vocab_size is -1");
    check("llama-tied", &config("silu", "gelu"), "hidden_act is gelu, which is not supported");
    check(
        "llama-tied",
        &|dir| std::fs::remove_file(dir.join("config.json")).unwrap(),
        "config.json",
    );
    check(
        "llama-tied",
        &|dir| std::fs::remove_file(dir.join("model.safetensors")).unwrap(),
        "neither model.safetensors nor",
    );
    check(
        "llama-tied",
        &|dir| {
            let path = dir.join("model.safetensors");
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        },
        "truncated",
    );
    let error = ModelFiles::open(Path::new("no/such/model")).unwrap_err();
    assert!(matches!(error, ModelError::Io { .. }));
}

#[test]
fn fused_weights_are_named() {
    let mut writer = GgufWriter::default();
    writer
        .tiny_llama_keys()
        .floats("token_embd.weight", &[8, 8])
        .floats("output_norm.weight", &[8])
        .floats("blk.0.attn_norm.weight", &[8])
        .floats("blk.0.attn_qkv.weight", &[16, 8]);
    let (_dir, path) = write_gguf(&writer.finish());
    let error = ModelFiles::open(&path).unwrap_err();
    let ModelError::FusedTensor { name, fused } = error else { panic!("{error}") };
    assert_eq!((&name[..], &fused[..]), ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight"));
}

#[test]
fn a_tiny_gguf_is_read_whole() {
    let bytes = GgufWriter::tiny_llama().finish();
    let (_dir, path) = write_gguf(&bytes);
    let files = ModelFiles::open(&path).unwrap();
    let config = files.config();
    assert_eq!((config.head_dim, config.n_kv_heads, config.vocab), (4, 1, 8));
    // The end that the file names and the one that its vocabulary has; an ordinary token that looks
    // like an end is none.
    assert_eq!(config.eos, [TokenId(1), TokenId(3)]);
    assert!(config.tied_embeddings);
    assert_eq!(files.vector(TensorName::OutputNorm).unwrap()[3], 1.0 + 3.0 / 64.0);
    let TokenizerFiles::Gguf(gguf) = files.tokenizer() else { panic!("not a GGUF") };
    assert_eq!(gguf.texts("tokenizer.ggml.tokens").unwrap().unwrap().len(), 4);
    assert_eq!(gguf.i32s("tokenizer.ggml.token_type").unwrap().unwrap(), [1, 3, 1, 1]);
    assert!(gguf.u32("tokenizer.ggml.tokens").is_err());

    let other = write_gguf(&{
        let mut other = bytes.clone();
        let last = other.len() - 33;
        other[last] ^= 1;
        other
    });
    let other = ModelFiles::open(&other.1).unwrap();
    assert_ne!(files.fingerprint().unwrap(), other.fingerprint().unwrap());
}

#[test]
fn gguf_keys_of_rotation_mean_what_llama_cpp_means() {
    let spec = |add: &dyn Fn(&mut GgufWriter)| {
        let mut writer = GgufWriter::tiny_llama();
        add(&mut writer);
        let (_dir, path) = write_gguf(&writer.finish());
        let files = ModelFiles::open(&path).unwrap();
        let context = files.config().max_context;
        (files.config().rope_spec(context as usize), context)
    };
    let (plain, context) = spec(&|_| {});
    assert_eq!((context, plain.attention_factor), (64, 1.0));
    let (linear, _) = spec(&|w| {
        w.f32("llama.rope.scaling.factor", 2.0);
    });
    assert_eq!(linear.inv_freq[1], plain.inv_freq[1] / 2.0);
    let (yarn, context) = spec(&|w| {
        w.text("llama.rope.scaling.type", "yarn")
            .f32("llama.rope.scaling.factor", 4.0)
            .u32("llama.rope.scaling.original_context_length", 32)
            .f32("llama.rope.scaling.attn_factor", 0.5);
    });
    assert_eq!(context, 128);
    let expected = 0.5 * (1.0 + 0.1 * 4f32.ln());
    assert!((yarn.attention_factor - expected).abs() < 1e-6, "{}", yarn.attention_factor);
    let (freqs, _) = spec(&|w| {
        w.floats("rope_freqs.weight", &[2]);
    });
    assert_eq!(freqs.inv_freq[1], (f64::from(plain.inv_freq[1]) / (1.0 + 1.0 / 64.0)) as f32);
    let (long, _) = spec(&|w| {
        w.floats("rope_factors_long.weight", &[2])
            .floats("rope_factors_short.weight", &[2])
            .u32("llama.rope.scaling.original_context_length", 32)
            .f32("llama.rope.scaling.attn_factor", 1.25);
    });
    assert_eq!(long.attention_factor, 1.25);
}

#[test]
fn split_gguf_files_are_one_model() {
    let (dir, _) = write_gguf(b"x");
    let part = |number: u32| dir.path().join(format!("m-{number:05}-of-00002.gguf"));
    let mut first = GgufWriter::default();
    first.tiny_llama_keys().u32("split.no", 0).u32("split.count", 2);
    let mut second = GgufWriter::default();
    second.u32("split.no", 1).u32("split.count", 2).tiny_llama_tensors();
    std::fs::write(part(1), first.finish()).unwrap();
    let error = ModelFiles::open(&part(1)).unwrap_err();
    assert!(matches!(error, ModelError::Io { .. }), "{error}");
    std::fs::write(part(2), second.finish()).unwrap();
    let files = ModelFiles::open(&part(1)).unwrap();
    assert_eq!(files.names_in_files().len(), 11);
    let error = ModelFiles::open(&part(2)).unwrap_err().to_string();
    assert!(error.contains("split.no is 1, but 0 was expected"), "{error}");
}

#[test]
fn wrong_gguf_files_are_explained() {
    let check = |writer: &GgufWriter, expected: &str| {
        let (_dir, path) = write_gguf(&writer.finish());
        let error = ModelFiles::open(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\ndoes not say\n{expected}");
    };
    let tiny = GgufWriter::tiny_llama();
    check(tiny.clone().describe("x", 16, &[256], 0), "tensor x has type IQ2_XXS, which is not");
    check(tiny.clone().describe("x", 99, &[256], 0), "tensor x has type number 99 (unknown)");
    check(
        tiny.clone().describe("x", 2, &[33], 0),
        "tensor x of type Q4_0 cannot have dimensions [33]",
    );
    check(tiny.clone().describe("x", 0, &[0], 0), "cannot have dimensions [0]");
    check(tiny.clone().describe("x", 0, &[1 << 40, 1 << 40], 0), "cannot have dimensions");
    check(tiny.clone().describe("x", 0, &[1, 1, 1, 1, 1], 0), "number of dimensions is 5");
    check(tiny.clone().describe("x", 0, &[8], 4), "begins at 4, which is not a multiple of 32");
    check(
        tiny.clone().describe("x", 0, &[8], u64::MAX - 31),
        "truncated: 18446744073709551615 bytes",
    );
    check(
        tiny.clone().describe("token_embd.weight", 0, &[8], 0),
        "tensor token_embd.weight appears twice",
    );
    check(tiny.clone().u32("llama.block_count", 1), "metadata key llama.block_count appears twice");
    check(tiny.clone().u32("general.alignment", 48), "general.alignment is 48");
    check(tiny.clone().raw("k", 13, &[]), "metadata k has value type 13");
    // An array of arrays.
    check(tiny.clone().raw("k", 9, &[9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]), "value type 9");
    check(tiny.clone().raw("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]), "metadata k is not UTF-8");
    check(tiny.clone().raw("k", 8, &[0xff; 8]), "a string needs 18446744073709551615 bytes");
    check(
        tiny.clone().u32("llama.expert_count", 8),
        "llama.expert_count is 8, which is not supported",
    );
    check(tiny.clone().u32("llama.rope.dimension_count", 2), "must equal the width of a head");
    check(tiny.clone().text("llama.rope.scaling.type", "spiral"), "rope.scaling.type is spiral");

    let mut other = GgufWriter::default();
    check(other.text("general.architecture", "gemma3"), "architecture gemma3 is not supported");
}

#[test]
fn truncated_and_foreign_gguf_files_are_told_apart() {
    let whole = GgufWriter::tiny_llama().finish();
    let parse = nuthatch_model::Gguf::parse;
    assert!(parse(&whole).is_ok());
    let error = parse(&whole[..whole.len() - 40]).unwrap_err();
    let GgufError::Truncated { expected, actual } = error else { panic!("{error}") };
    assert!(expected <= whole.len() as u64);
    assert_eq!(actual, whole.len() as u64 - 40);
    for end in 0..whole.len() - 40 {
        assert!(parse(&whole[..end]).is_err(), "{end}");
    }
    let mut big_endian = whole.clone();
    big_endian[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(matches!(parse(&big_endian), Err(GgufError::BigEndian)));
    let mut old = whole.clone();
    old[4] = 1;
    assert!(matches!(parse(&old), Err(GgufError::Version(1))));
    assert!(matches!(parse(b"PK\x03\x04zip"), Err(GgufError::Magic { .. })));
    assert!(matches!(parse(b""), Err(GgufError::Magic { .. })));
}

#[test]
fn configurations_with_impossible_numbers_are_refused() {
    const GOOD: &str = r#"{"model_type": "qwen3", "vocab_size": 32, "hidden_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "sliding_window": 8, "eos_token_id": [3, 900]}"#;
    let config = ModelConfig::from_json(GOOD.as_bytes(), None).unwrap();
    assert_eq!(config.eos, [TokenId(3)]);
    for (from, to) in [
        (r#""vocab_size": 32"#, r#""vocab_size": 99999999999"#),
        (r#""vocab_size": 32"#, r#""vocab_size": 0"#),
        (r#""hidden_size": 48"#, r#""hidden_size": 4294967295"#),
        (r#""num_hidden_layers": 2"#, r#""num_hidden_layers": 4000000000"#),
        (r#""num_attention_heads": 4"#, r#""num_attention_heads": 0"#),
        (r#""num_attention_heads": 4"#, r#""num_attention_heads": 5"#),
        (r#""num_key_value_heads": 2"#, r#""num_key_value_heads": 0"#),
        (r#""head_dim": 16"#, r#""head_dim": 15"#),
        (r#""head_dim": 16"#, r#""head_dim": 1024"#),
        (r#""rms_norm_eps": 1e-6"#, r#""rms_norm_eps": -1"#),
        (r#""rms_norm_eps": 1e-6"#, r#""rms_norm_eps": 1e999"#),
        (r#""rope_theta": 10000"#, r#""rope_theta": 1"#),
        (r#""rope_theta": 10000"#, r#""rope_theta": "10000""#),
        (
            r#""sliding_window": 8"#,
            r#""sliding_window": 0, "use_sliding_window": true, "max_window_layers": 0"#,
        ),
        (
            r#""sliding_window": 8"#,
            r#""use_sliding_window": true, "layer_types": ["full_attention"]"#,
        ),
        (r#""sliding_window": 8"#, r#""mlp_bias": true"#),
        (r#""sliding_window": 8"#, r#""partial_rotary_factor": 0.5"#),
        (r#""sliding_window": 8"#, r#""quantization_config": {"quant_method": "gptq"}"#),
        (
            r#""sliding_window": 8"#,
            r#""rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}"#,
        ),
        (r#""sliding_window": 8"#, r#""rope_scaling": {"type": "linear"}"#),
        (r#""sliding_window": 8"#, r#""rope_scaling": {"type": "twist", "factor": 2}"#),
        (r#""sliding_window": 8"#, r#""rope_scaling": {"type": "yarn", "factor": 1e300}"#),
        (r#""sliding_window": 8"#, r#""rope_scaling": {"type": "yarn", "factor": 0.5}"#),
    ] {
        assert!(GOOD.contains(from));
        let bad = GOOD.replace(from, to);
        let error = ModelConfig::from_json(bad.as_bytes(), None).unwrap_err();
        assert!(!error.to_string().ends_with('.'), "{error}");
    }
    let error = ModelConfig::from_json(b"[]", None).unwrap_err();
    assert!(matches!(error, ConfigError::Invalid { .. }), "{error}");
}

#[test]
fn generation_defaults_come_along() {
    const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 32, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
        "eos_token_id": 5}"#;
    let generation = br#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
        "eos_token_id": [7, 5], "bos_token_id": 3}"#;
    let config = ModelConfig::from_json(CONFIG.as_bytes(), Some(generation)).unwrap();
    assert_eq!(config.eos, [TokenId(5), TokenId(7)]);
    assert_eq!(config.bos, Some(TokenId(3)));
    assert_eq!(config.generation.temperature, Some(0.6));
    assert_eq!((config.generation.top_k, config.generation.top_p), (Some(20), Some(0.95)));
    assert_eq!(config.generation.min_p, None);
    assert_eq!(config.max_context, 2048);
}
