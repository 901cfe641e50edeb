//! From a Hugging Face `config.json` and `generation_config.json`.
//!
//! Defaults are those of the transformers library, because its writers leave out what equals them.

use nuthatch_backend::RopeStyle;
use serde_json::Value;

use super::fields::Fields;
use super::{
    Architecture, GenerationDefaults, ModelConfig, invalid, known_tokens, kv_owners, limits,
};
use crate::error::ConfigError;
use crate::rope::{Rope, RopeScaling, Yarn};

impl ModelConfig {
    /// Parses `config.json` and, if there is one, `generation_config.json`.
    pub fn from_json(config: &[u8], generation: Option<&[u8]>) -> Result<Self, ConfigError> {
        let config: Value = serde_json::from_slice(config)?;
        let generation: Option<Value> = generation.map(serde_json::from_slice).transpose()?;
        let empty = serde_json::Map::new();
        let object = config.as_object().ok_or_else(|| invalid("the file", "no object", "one"))?;
        let generation = generation.as_ref().and_then(Value::as_object).unwrap_or(&empty);
        let generation = Fields { prefix: "generation_config ", object: generation };
        parse(Fields { prefix: "", object }, generation)
    }
}

fn parse(fields: Fields<'_>, generation: Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let name = match fields.text("model_type")? {
        Some(name) => name,
        None => fields
            .get("architectures")
            .and_then(|names| names.get(0)?.as_str())
            .ok_or_else(|| fields.missing("model_type"))?,
    };
    let architecture = Architecture::from_name(name)?;
    refuse_unsupported(fields)?;

    let hidden = fields.require_u32("hidden_size")?;
    let n_heads = fields.require_u32("num_attention_heads")?;
    let n_layers = fields.require_u32("num_hidden_layers")?;
    if n_layers > limits::LAYERS {
        return Err(invalid("num_hidden_layers", n_layers, "1 to 1024"));
    }
    let vocab = fields.require_u32("vocab_size")?;
    let attention_bias = fields.bool("attention_bias")?.unwrap_or(false);
    let position_limit = fields.u32("max_position_embeddings")?.unwrap_or(match architecture {
        Architecture::Llama => 2048,
        Architecture::Mistral => 131_072,
        Architecture::Qwen2 | Architecture::Qwen3 => 32_768,
    });
    let head_dim = head_dim(fields, architecture, hidden, n_heads)?;
    let (rope, max_context) = rope(fields, head_dim, position_limit)?;
    let windows = windows(fields, architecture, n_layers)?;
    let eos = fields.ids("eos_token_id")?.into_iter().chain(generation.ids("eos_token_id")?);
    let bos = fields.ids("bos_token_id")?.into_iter().chain(generation.ids("bos_token_id")?);

    let config = ModelConfig {
        architecture,
        n_layers,
        hidden,
        n_heads,
        n_kv_heads: fields.u32("num_key_value_heads")?.unwrap_or(n_heads),
        head_dim,
        ff: fields.require_u32("intermediate_size")?,
        vocab,
        norm_eps: fields.f32("rms_norm_eps")?.unwrap_or(1e-6),
        tied_embeddings: fields.bool("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: attention_bias || architecture == Architecture::Qwen2,
        o_bias: attention_bias,
        qk_norm: architecture == Architecture::Qwen3,
        kv_owners: kv_owners::from_json(fields, &windows)?,
        windows,
        max_context,
        rope,
        bos: known_tokens(bos.take(1), vocab).first().copied(),
        eos: known_tokens(eos, vocab),
        generation: generation_defaults(generation)?,
    };
    config.validate()?;
    Ok(config)
}

/// Refuses what would silently compute something else.
fn refuse_unsupported(fields: Fields<'_>) -> Result<(), ConfigError> {
    let refuse = |key: &str, found: &str, reason| ConfigError::Unsupported {
        key: key.to_owned(),
        found: found.to_owned(),
        reason,
    };
    if let Some(activation) = fields.text("hidden_act")?
        && activation != "silu"
    {
        return Err(refuse("hidden_act", activation, "only silu is"));
    }
    if fields.bool("mlp_bias")? == Some(true) {
        return Err(refuse("mlp_bias", "true", "feed-forward layers have no biases"));
    }
    if let Some(quantization) = fields.object("quantization_config", "quantization_config.")? {
        let method = quantization.text("quant_method")?.unwrap_or("unknown");
        return Err(refuse(
            "quantization_config.quant_method",
            method,
            "safetensors weights must be F32, F16 or BF16; use a GGUF file for quantised ones",
        ));
    }
    Ok(())
}

fn head_dim(
    fields: Fields<'_>,
    architecture: Architecture,
    hidden: u32,
    n_heads: u32,
) -> Result<u32, ConfigError> {
    if let Some(head_dim) = fields.u32("head_dim")? {
        return Ok(head_dim);
    }
    if architecture == Architecture::Qwen3 {
        return Ok(128);
    }
    if n_heads == 0 || !hidden.is_multiple_of(n_heads) {
        let found = format!("{hidden} for {n_heads} heads");
        return Err(invalid("hidden_size", found, "a multiple of the number of heads"));
    }
    Ok(hidden / n_heads)
}

/// The window of each layer.
fn windows(
    fields: Fields<'_>,
    architecture: Architecture,
    n_layers: u32,
) -> Result<Vec<Option<u32>>, ConfigError> {
    let every = |window| vec![window; n_layers as usize];
    let window = fields.u32("sliding_window")?;
    match architecture {
        Architecture::Llama => Ok(every(None)),
        Architecture::Mistral if fields.mentions("sliding_window") => Ok(every(window)),
        Architecture::Mistral => Ok(every(Some(4096))),
        Architecture::Qwen2 | Architecture::Qwen3 => {
            if fields.bool("use_sliding_window")? != Some(true) {
                return Ok(every(None));
            }
            let window = if fields.mentions("sliding_window") { window } else { Some(4096) };
            if let Some(types) = fields.get("layer_types") {
                return layer_windows(fields, types, n_layers, window);
            }
            let first = fields.u32("max_window_layers")?.unwrap_or(28);
            Ok((0..n_layers).map(|layer| window.filter(|_| layer >= first)).collect())
        }
    }
}

fn layer_windows(
    fields: Fields<'_>,
    types: &Value,
    n_layers: u32,
    window: Option<u32>,
) -> Result<Vec<Option<u32>>, ConfigError> {
    let list = types.as_array().filter(|list| list.len() == n_layers as usize);
    let list = list
        .ok_or_else(|| fields.invalid("layer_types", types, "an array with one entry per layer"))?;
    list.iter()
        .map(|kind| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => Ok(window),
            _ => Err(fields.invalid("layer_types", kind, "full_attention or sliding_attention")),
        })
        .collect()
}

/// The rotation, and the context that it carries.
fn rope(
    fields: Fields<'_>,
    head_dim: u32,
    position_limit: u32,
) -> Result<(Rope, u32), ConfigError> {
    let parameters = match fields.object("rope_parameters", "rope_parameters.")? {
        Some(parameters) => Some(parameters),
        None => fields.object("rope_scaling", "rope_scaling.")?,
    };
    let theta = match parameters.map(|p| p.f64("rope_theta")).transpose()?.flatten() {
        Some(theta) => theta,
        None => fields.f64("rope_theta")?.unwrap_or(10_000.0),
    };
    let partial = match parameters.map(|p| p.f64("partial_rotary_factor")).transpose()?.flatten() {
        Some(partial) => Some(partial),
        None => fields.f64("partial_rotary_factor")?,
    };
    if let Some(partial) = partial.filter(|&partial| partial != 1.0) {
        return Err(ConfigError::Unsupported {
            key: "partial_rotary_factor".to_owned(),
            found: partial.to_string(),
            reason: "heads are rotated as a whole",
        });
    }
    let scaling = match parameters {
        Some(parameters) => scaling(fields, parameters, position_limit)?,
        None => RopeScaling::None,
    };
    let rope = Rope { theta, dim: head_dim, style: RopeStyle::Halves, divisors: None, scaling };
    let max_context = rope.scaling.context(position_limit);
    Ok((rope, max_context))
}

/// The scaling that the text of a `rope_scaling` object describes for a model of `position_limit`
/// tokens, and the base of the frequencies if it is among the keys.
pub(crate) fn parse_scaling(
    text: &str,
    position_limit: u32,
) -> Result<(RopeScaling, Option<f64>), ConfigError> {
    let value: Value = serde_json::from_str(text)?;
    let object = value.as_object().ok_or_else(|| invalid("rope scaling", "no object", "one"))?;
    let beside = serde_json::Map::new();
    let rope = Fields { prefix: "rope_scaling.", object };
    let scaling = scaling(Fields { prefix: "", object: &beside }, rope, position_limit)?;
    Ok((scaling, rope.f64("rope_theta")?))
}

fn scaling(
    fields: Fields<'_>,
    rope: Fields<'_>,
    position_limit: u32,
) -> Result<RopeScaling, ConfigError> {
    let kind = match rope.text("rope_type")? {
        Some(kind) => Some(kind),
        None => rope.text("type")?,
    };
    // Some makers write the length of the training beside the rotation, not into it.
    let original = match fields.u32("original_max_position_embeddings")? {
        Some(original) => original,
        None => rope.u32("original_max_position_embeddings")?.unwrap_or(position_limit),
    };
    let ratio = f64::from(position_limit) / f64::from(original.max(1));
    Ok(match kind {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: rope.require_f64("factor")? },
        Some("dynamic") => {
            RopeScaling::Dynamic { factor: rope.require_f64("factor")?, original: position_limit }
        }
        Some("yarn") => RopeScaling::Yarn(Yarn {
            factor: rope.f64("factor")?.unwrap_or(ratio),
            original,
            beta_fast: rope.f64("beta_fast")?.filter(|&beta| beta != 0.0).unwrap_or(32.0),
            beta_slow: rope.f64("beta_slow")?.filter(|&beta| beta != 0.0).unwrap_or(1.0),
            attention_factor: rope.f64("attention_factor")?,
            mscale: rope.f64("mscale")?,
            mscale_all_dim: rope.f64("mscale_all_dim")?,
            truncate: rope.bool("truncate")?.unwrap_or(true),
        }),
        Some("llama3") => RopeScaling::Llama3 {
            factor: rope.require_f64("factor")?,
            original,
            low_freq_factor: rope.require_f64("low_freq_factor")?,
            high_freq_factor: rope.require_f64("high_freq_factor")?,
        },
        Some("longrope" | "su") => RopeScaling::LongRope {
            factor: rope.f64("factor")?.unwrap_or(ratio),
            original,
            short: rope.f32s("short_factor")?.ok_or_else(|| rope.missing("short_factor"))?,
            long: rope.f32s("long_factor")?.ok_or_else(|| rope.missing("long_factor"))?,
            attention_factor: rope.f64("attention_factor")?,
        },
        Some(other) => {
            return Err(ConfigError::Unsupported {
                key: format!("{}rope_type", rope.prefix),
                found: other.chars().take(60).collect(),
                reason: "default, linear, dynamic, yarn, llama3 and longrope are",
            });
        }
    })
}

fn generation_defaults(fields: Fields<'_>) -> Result<GenerationDefaults, ConfigError> {
    Ok(GenerationDefaults {
        do_sample: fields.bool("do_sample")?,
        temperature: fields.f32("temperature")?,
        top_k: fields.u32("top_k")?,
        top_p: fields.f32("top_p")?,
        min_p: fields.f32("min_p")?,
        repetition_penalty: fields.f32("repetition_penalty")?,
    })
}
