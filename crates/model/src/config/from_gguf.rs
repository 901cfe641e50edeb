//! From the metadata and the tensors of a GGUF file.
//!
//! GGUF says some things by the presence of tensors: biases, tied embeddings, and the frequency
//! divisors that Llama 3's scaling was turned into.

use nuthatch_backend::RopeStyle;

use super::{
    Architecture, GenerationDefaults, ModelConfig, invalid, known_tokens, kv_owners, limits,
};
use crate::error::ConfigError;
use crate::gguf::{Gguf, GgufArray, GgufValue};
use crate::rope::{Rope, RopeScaling, Yarn};
use crate::source::GgufFiles;

/// Control tokens that end an answer whatever the file's end token is: files of chat models often
/// name only the end of a text.
const END_TOKENS: [&str; 5] =
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"];
/// GGUF's number for control tokens in `tokenizer.ggml.token_type`.
const CONTROL_TOKEN: i32 = 3;

impl ModelConfig {
    /// Reads the configuration of a GGUF model.
    pub fn from_gguf(files: &GgufFiles) -> Result<Self, ConfigError> {
        let gguf = files.header();
        let name =
            gguf.text("general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
        let architecture = match name {
            // Converters write Mistral as Llama; no GGUF file says mistral.
            "llama" | "qwen2" | "qwen3" => Architecture::from_name(name)?,
            _ => return Err(ConfigError::Architecture { found: name.to_owned() }),
        };
        let keys = Keys { gguf, arch: name };
        if let Some(experts) = keys.u32("expert_count")?.filter(|&experts| experts > 0) {
            return Err(ConfigError::Unsupported {
                key: keys.key("expert_count"),
                found: experts.to_string(),
                reason: "mixtures of experts are not run",
            });
        }

        let hidden = keys.require_u32("embedding_length")?;
        let n_heads = keys.same_number("attention.head_count")?;
        let n_heads = n_heads.ok_or_else(|| missing(&keys.key("attention.head_count")))?;
        let n_layers = keys.require_u32("block_count")?;
        if n_layers > limits::LAYERS {
            return Err(invalid(&keys.key("block_count"), n_layers, "1 to 1024"));
        }
        let vocab = vocab(&keys, files)?;
        let head_dim = head_dim(&keys, hidden, n_heads)?;
        let context = keys.require_u32("context_length")?;
        let style = match architecture {
            Architecture::Llama | Architecture::Mistral => RopeStyle::Pairs,
            Architecture::Qwen2 | Architecture::Qwen3 => RopeStyle::Halves,
        };
        let rope = Rope {
            theta: keys.f64("rope.freq_base")?.unwrap_or(10_000.0),
            dim: head_dim,
            style,
            divisors: factors(files, "rope_freqs.weight")?,
            scaling: scaling(&keys, files, context)?,
        };
        let window = keys.u32("attention.sliding_window")?.filter(|&window| window > 0);
        let eps = keys.f64("attention.layer_norm_rms_epsilon")?;
        let eps = eps.ok_or_else(|| missing(&keys.key("attention.layer_norm_rms_epsilon")))?;

        let config = ModelConfig {
            architecture,
            n_layers,
            hidden,
            n_heads,
            n_kv_heads: keys.same_number("attention.head_count_kv")?.unwrap_or(n_heads),
            head_dim,
            ff: keys
                .same_number("feed_forward_length")?
                .ok_or_else(|| missing(&keys.key("feed_forward_length")))?,
            vocab,
            norm_eps: eps as f32,
            tied_embeddings: !files.contains("output.weight"),
            qkv_bias: files.contains("blk.0.attn_q.bias"),
            o_bias: files.contains("blk.0.attn_output.bias"),
            qk_norm: architecture == Architecture::Qwen3,
            windows: vec![window; n_layers as usize],
            kv_owners: kv_owners::every_layer(n_layers),
            max_context: rope.scaling.context(context),
            rope,
            bos: known_tokens(gguf.u32("tokenizer.ggml.bos_token_id")?.map(i64::from), vocab)
                .first()
                .copied(),
            eos: known_tokens(end_tokens(gguf)?, vocab),
            generation: generation_defaults(gguf)?,
        };
        config.validate()?;
        Ok(config)
    }
}

/// The keys of one architecture.
struct Keys<'a> {
    gguf: &'a Gguf,
    arch: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn u32(&self, name: &str) -> Result<Option<u32>, ConfigError> {
        self.gguf.u32(&self.key(name))
    }

    fn require_u32(&self, name: &str) -> Result<u32, ConfigError> {
        self.u32(name)?.ok_or_else(|| missing(&self.key(name)))
    }

    fn f64(&self, name: &str) -> Result<Option<f64>, ConfigError> {
        self.gguf.f64(&self.key(name))
    }

    /// A number, or an array with one equal number for each layer.
    fn same_number(&self, name: &str) -> Result<Option<u32>, ConfigError> {
        let key = self.key(name);
        let Some(GgufValue::Array(array)) = self.gguf.metadata.get(&key) else {
            return self.u32(name);
        };
        let first = match array {
            GgufArray::Unsigned(values) if values.iter().all(|value| *value == values[0]) => {
                values.first().and_then(|&value| u32::try_from(value).ok())
            }
            GgufArray::Signed(values) if values.iter().all(|value| *value == values[0]) => {
                values.first().and_then(|&value| u32::try_from(value).ok())
            }
            GgufArray::Bool(_)
            | GgufArray::Unsigned(_)
            | GgufArray::Signed(_)
            | GgufArray::Float(_)
            | GgufArray::Text(_) => None,
        };
        let found = format!("an array of {} values", array.len());
        first.map(Some).ok_or_else(|| invalid(&key, found, "the same number for every layer"))
    }
}

fn missing(key: &str) -> ConfigError {
    ConfigError::Missing { key: key.to_owned() }
}

/// Rows of the embedding; a key that says otherwise is an error.
fn vocab(keys: &Keys<'_>, files: &GgufFiles) -> Result<u32, ConfigError> {
    let embedding =
        files.tensor("token_embd.weight").ok_or_else(|| missing("token_embd.weight"))?;
    let rows = match *embedding.shape {
        [rows, _] => u32::try_from(rows).ok(),
        _ => None,
    };
    let shape = format!("{:?}", embedding.shape);
    let rows = rows.ok_or_else(|| invalid("token_embd.weight", shape, "a matrix"))?;
    match keys.u32("vocab_size")? {
        Some(vocab) if vocab != rows => {
            let found = format!("{vocab}, and the embedding has {rows} rows");
            Err(invalid(&keys.key("vocab_size"), found, "that number"))
        }
        _ => Ok(rows),
    }
}

fn head_dim(keys: &Keys<'_>, hidden: u32, n_heads: u32) -> Result<u32, ConfigError> {
    let head_dim = match keys.u32("attention.key_length")? {
        Some(head_dim) => head_dim,
        None if n_heads > 0 && hidden.is_multiple_of(n_heads) => hidden / n_heads,
        None => {
            let found = format!("{hidden} for {n_heads} heads");
            let key = keys.key("embedding_length");
            return Err(invalid(&key, found, "a multiple of the number of heads"));
        }
    };
    for name in ["attention.value_length", "rope.dimension_count"] {
        if let Some(found) = keys.u32(name)?.filter(|&found| found != head_dim) {
            return Err(ConfigError::Unsupported {
                key: keys.key(name),
                found: found.to_string(),
                reason: "it must equal the width of a head",
            });
        }
    }
    Ok(head_dim)
}

/// Factors of the frequencies, stored as a small tensor.
fn factors(files: &GgufFiles, name: &str) -> Result<Option<Vec<f32>>, ConfigError> {
    let Some(tensor) = files.tensor(name) else { return Ok(None) };
    // Their number is checked with the rest of the rotation; this only bounds what is read.
    if tensor.shape.iter().product::<usize>() > limits::HEAD_DIM as usize {
        return Err(invalid(name, format!("{:?}", tensor.shape), "half as long as a head is wide"));
    }
    tensor.to_f32().map(Some).ok_or_else(|| invalid(name, tensor.dtype, "F32, F16 or BF16"))
}

/// The scaling by llama.cpp's meaning of the keys: the type is linear unless given, a factor of 0 is
/// 1, and the attention factor multiplies YaRN's own.
fn scaling(keys: &Keys<'_>, files: &GgufFiles, context: u32) -> Result<RopeScaling, ConfigError> {
    let original = keys.u32("rope.scaling.original_context_length")?.unwrap_or(context);
    let attention_factor = keys.f64("rope.scaling.attn_factor")?;
    let long = factors(files, "rope_factors_long.weight")?;
    let short = factors(files, "rope_factors_short.weight")?;
    if let (Some(long), Some(short)) = (long, short) {
        let factor = f64::from(context) / f64::from(original.max(1));
        let attention_factor = Some(attention_factor.unwrap_or(1.0));
        return Ok(RopeScaling::LongRope { factor, original, short, long, attention_factor });
    }
    let factor = match keys.f64("rope.scaling.factor")? {
        Some(factor) => factor,
        None => keys.f64("rope.scale_linear")?.unwrap_or(1.0),
    };
    let factor = if factor == 0.0 { 1.0 } else { factor };
    let key = keys.key("rope.scaling.type");
    match keys.gguf.text(&key)? {
        Some("none") => Ok(RopeScaling::None),
        None | Some("linear") if factor == 1.0 => Ok(RopeScaling::None),
        None | Some("linear") => Ok(RopeScaling::Linear { factor }),
        Some("yarn") => {
            let extension = keys.f64("rope.scaling.yarn_ext_factor")?;
            if let Some(extension) = extension.filter(|&ext| ext >= 0.0 && ext != 1.0) {
                return Err(ConfigError::Unsupported {
                    key: keys.key("rope.scaling.yarn_ext_factor"),
                    found: extension.to_string(),
                    reason: "only 1 is",
                });
            }
            let log_multiplier = keys.f64("rope.scaling.yarn_log_multiplier")?;
            let log_multiplier = log_multiplier.filter(|&multiplier| multiplier != 0.0);
            let mut yarn = Yarn {
                mscale: log_multiplier.map(|_| 1.0),
                mscale_all_dim: log_multiplier,
                ..Yarn::new(factor, original)
            };
            if let Some(beta) = keys.f64("rope.scaling.yarn_beta_fast")? {
                yarn.beta_fast = beta;
            }
            if let Some(beta) = keys.f64("rope.scaling.yarn_beta_slow")? {
                yarn.beta_slow = beta;
            }
            yarn.attention_factor = attention_factor.map(|given| given * yarn.attention_factor());
            Ok(RopeScaling::Yarn(yarn))
        }
        Some(other) => Err(ConfigError::Unsupported {
            key,
            found: other.chars().take(60).collect(),
            reason: "none, linear and yarn are",
        }),
    }
}

/// The end tokens that the file names, and the well-known ones of its vocabulary.
fn end_tokens(gguf: &Gguf) -> Result<Vec<i64>, ConfigError> {
    let mut ids = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ids.extend(gguf.u32(&format!("tokenizer.ggml.{name}_token_id"))?.map(i64::from));
    }
    let tokens = gguf.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
    let types = gguf.i32s("tokenizer.ggml.token_type")?.unwrap_or_default();
    for (id, (token, kind)) in tokens.iter().zip(types).enumerate() {
        if kind == CONTROL_TOKEN && END_TOKENS.contains(&token.as_str()) {
            ids.push(id as i64);
        }
    }
    Ok(ids)
}

fn generation_defaults(gguf: &Gguf) -> Result<GenerationDefaults, ConfigError> {
    let f32 = |name: &str| -> Result<Option<f32>, ConfigError> {
        Ok(gguf.f64(&format!("general.sampling.{name}"))?.map(|value| value as f32))
    };
    Ok(GenerationDefaults {
        do_sample: None,
        temperature: f32("temp")?,
        top_k: gguf.metadata.get("general.sampling.top_k").and_then(GgufValue::as_u32),
        top_p: f32("top_p")?,
        min_p: f32("min_p")?,
        repetition_penalty: f32("penalty_repeat")?,
    })
}
