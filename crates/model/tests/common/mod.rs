//! Goldens and small files for the tests of this crate.

#![expect(dead_code, reason = "each test file uses its part")]
#![expect(clippy::unwrap_used, reason = "these are tests, which may panic")]

use std::path::PathBuf;

use safetensors::{Dtype, SafeTensors};

/// What transformers computed on one tiny model; `eval/golden/make.py` says how.
pub(crate) struct Golden {
    pub(crate) name: String,
    /// The directory or file to open.
    pub(crate) model: PathBuf,
    pub(crate) prompt: Vec<u32>,
    pub(crate) greedy: Vec<u32>,
    /// Positions whose logits are stored, ascending.
    pub(crate) rows: Vec<u32>,
    /// `[rows][vocab]`
    pub(crate) logits: Vec<Vec<f32>>,
    pub(crate) inv_freq: Vec<f32>,
    pub(crate) attention_factor: f64,
    /// The context that the engine must be started with.
    pub(crate) max_context: usize,
}

/// Where the goldens are.
pub(crate) fn golden_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

impl Golden {
    pub(crate) fn read(name: &str) -> Golden {
        let folder = golden_dir().join(name);
        let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let facts = &metadata.metadata().as_ref().unwrap()["golden"];
        let facts: serde_json::Value = serde_json::from_str(facts).unwrap();
        let words = |name: &str, dtype: Dtype| -> Vec<[u8; 4]> {
            let tensor = tensors.tensor(name).unwrap();
            assert_eq!(tensor.dtype(), dtype);
            tensor.data().as_chunks::<4>().0.to_vec()
        };
        let ints = |name| words(name, Dtype::I32).into_iter().map(u32::from_le_bytes).collect();
        let floats =
            |name| words(name, Dtype::F32).into_iter().map(f32::from_le_bytes).collect::<Vec<_>>();
        let rows: Vec<u32> = ints("rows");
        let logits = floats("logits");
        let vocab = logits.len() / rows.len();
        let gguf = folder.join("model.gguf");
        Golden {
            name: name.to_owned(),
            model: if gguf.is_file() { gguf } else { folder },
            prompt: ints("prompt"),
            greedy: ints("greedy"),
            rows,
            logits: logits.chunks(vocab).map(<[f32]>::to_vec).collect(),
            inv_freq: floats("inv_freq"),
            attention_factor: facts["attention_factor"].as_f64().unwrap(),
            max_context: usize::try_from(facts["max_context"].as_u64().unwrap()).unwrap(),
        }
    }

    /// Every golden there is, in alphabetical order.
    pub(crate) fn all() -> Vec<Golden> {
        let mut names: Vec<String> = std::fs::read_dir(golden_dir())
            .unwrap()
            .map(|entry| entry.unwrap())
            .filter(|entry| entry.file_type().unwrap().is_dir())
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert!(names.len() >= 20, "goldens are missing: {names:?}");
        names.iter().map(|name| Golden::read(name)).collect()
    }

    /// Prompt and greedy tokens.
    pub(crate) fn tokens(&self) -> Vec<u32> {
        [&self.prompt[..], &self.greedy[..]].concat()
    }
}

/// Writes GGUF files, right and wrong ones.
#[derive(Clone, Default)]
pub(crate) struct GgufWriter {
    metadata: Vec<u8>,
    n_metadata: u64,
    tensors: Vec<u8>,
    n_tensors: u64,
    data: Vec<u8>,
}

impl GgufWriter {
    fn key(&mut self, key: &str, kind: u32) {
        self.metadata.extend((key.len() as u64).to_le_bytes());
        self.metadata.extend(key.as_bytes());
        self.metadata.extend(kind.to_le_bytes());
        self.n_metadata += 1;
    }

    pub(crate) fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.key(key, 4);
        self.metadata.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.key(key, 6);
        self.metadata.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn text(&mut self, key: &str, value: &str) -> &mut Self {
        self.key(key, 8);
        self.metadata.extend((value.len() as u64).to_le_bytes());
        self.metadata.extend(value.as_bytes());
        self
    }

    pub(crate) fn texts(&mut self, key: &str, values: &[&str]) -> &mut Self {
        self.key(key, 9);
        self.metadata.extend(8u32.to_le_bytes());
        self.metadata.extend((values.len() as u64).to_le_bytes());
        for value in values {
            self.metadata.extend((value.len() as u64).to_le_bytes());
            self.metadata.extend(value.as_bytes());
        }
        self
    }

    pub(crate) fn i32s(&mut self, key: &str, values: &[i32]) -> &mut Self {
        self.key(key, 9);
        self.metadata.extend(5u32.to_le_bytes());
        self.metadata.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| self.metadata.extend(value.to_le_bytes()));
        self
    }

    /// A value of any kind, given by its bytes.
    pub(crate) fn raw(&mut self, key: &str, kind: u32, bytes: &[u8]) -> &mut Self {
        self.key(key, kind);
        self.metadata.extend(bytes);
        self
    }

    /// A tensor whose dimensions are given fastest first, as the file has them.
    pub(crate) fn tensor(
        &mut self,
        name: &str,
        kind: u32,
        dims: &[u64],
        bytes: &[u8],
    ) -> &mut Self {
        self.describe(name, kind, dims, self.data.len() as u64);
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self
    }

    /// A tensor's description only.
    pub(crate) fn describe(
        &mut self,
        name: &str,
        kind: u32,
        dims: &[u64],
        offset: u64,
    ) -> &mut Self {
        self.tensors.extend((name.len() as u64).to_le_bytes());
        self.tensors.extend(name.as_bytes());
        self.tensors.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| self.tensors.extend(dim.to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self.n_tensors += 1;
        self
    }

    /// A matrix or vector of floats, with the slowest dimension first.
    pub(crate) fn floats(&mut self, name: &str, shape: &[usize]) -> &mut Self {
        let dims: Vec<u64> = shape.iter().rev().map(|&dim| dim as u64).collect();
        let n: usize = shape.iter().product();
        let bytes: Vec<u8> = (0..n).flat_map(|i| (1.0 + i as f32 / 64.0).to_le_bytes()).collect();
        self.tensor(name, 0, &dims, &bytes)
    }

    pub(crate) fn finish(&self) -> Vec<u8> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(self.n_tensors.to_le_bytes());
        file.extend(self.n_metadata.to_le_bytes());
        file.extend(&self.metadata);
        file.extend(&self.tensors);
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(&self.data);
        file
    }

    /// The description of a one-layer Llama with vocabulary 8, width 8 and two heads of 4.
    pub(crate) fn tiny_llama_keys(&mut self) -> &mut Self {
        self.text("general.architecture", "llama")
            .u32("llama.block_count", 1)
            .u32("llama.context_length", 64)
            .u32("llama.embedding_length", 8)
            .u32("llama.feed_forward_length", 12)
            .u32("llama.attention.head_count", 2)
            .u32("llama.attention.head_count_kv", 1)
            .f32("llama.rope.freq_base", 10000.0)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .texts("tokenizer.ggml.tokens", &["a", "<|im_end|>", "<|eot_id|>", "b"])
            .i32s("tokenizer.ggml.token_type", &[1, 3, 1, 1])
            .u32("tokenizer.ggml.eos_token_id", 3)
    }

    /// Its tensors.
    pub(crate) fn tiny_llama_tensors(&mut self) -> &mut Self {
        self.floats("token_embd.weight", &[8, 8]).floats("output_norm.weight", &[8]);
        for (name, shape) in [
            ("attn_norm", &[8][..]),
            ("attn_q", &[8, 8]),
            ("attn_k", &[4, 8]),
            ("attn_v", &[4, 8]),
            ("attn_output", &[8, 8]),
            ("ffn_norm", &[8]),
            ("ffn_gate", &[12, 8]),
            ("ffn_up", &[12, 8]),
            ("ffn_down", &[8, 12]),
        ] {
            self.floats(&format!("blk.0.{name}.weight"), shape);
        }
        self
    }

    pub(crate) fn tiny_llama() -> GgufWriter {
        let mut writer = GgufWriter::default();
        writer.tiny_llama_keys().tiny_llama_tensors();
        writer
    }
}
