//! What a model is: its sizes, its attention, its rotation, its ends.
//!
//! The same [`ModelConfig`] comes from a Hugging Face `config.json` and from a GGUF file's metadata,
//! and every number in it has been checked, so that code behind it computes sizes without overflow
//! and divides without remainder. Not here: the weights, and which tensors hold them.

mod fields;
mod from_gguf;
mod from_json;
mod kv_owners;

use nuthatch_backend::RopeSpec;
use nuthatch_types::{LayerIdx, TokenId};

use crate::error::ConfigError;
use crate::rope::{Rope, RopeOverride};

pub(crate) use from_json::parse_scaling;

/// A family of models that the forward pass knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2, 3, 3.1 and later dense ones, SmolLM2, TinyLlama.
    Llama,
    /// Mistral 7B and its kin; a GGUF file calls it Llama.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
}

impl Architecture {
    /// All names, for messages.
    pub const LIST: &str = "llama, mistral, qwen2, qwen3";

    /// The architecture with this name, in a `config.json` or in a GGUF file.
    pub fn from_name(name: &str) -> Result<Self, ConfigError> {
        Ok(match name {
            "llama" => Architecture::Llama,
            "mistral" => Architecture::Mistral,
            "qwen2" => Architecture::Qwen2,
            "qwen3" => Architecture::Qwen3,
            _ => return Err(ConfigError::Architecture { found: name.to_owned() }),
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Mistral => "mistral",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
        }
    }
}

/// Everything about a model but its weights. Made by [`ModelConfig::from_json`] or
/// [`ModelConfig::from_gguf`], which check it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Layers, at least one.
    pub n_layers: u32,
    /// Width of the hidden state.
    pub hidden: u32,
    /// Query heads, a multiple of `n_kv_heads`.
    pub n_heads: u32,
    /// Key and value heads.
    pub n_kv_heads: u32,
    /// Width of one head, even; `n_heads * head_dim` need not be `hidden`.
    pub head_dim: u32,
    /// Width of the feed-forward layer.
    pub ff: u32,
    /// Rows of the embedding; every token is below it.
    pub vocab: u32,
    /// Added to the mean square under the root of every norm.
    pub norm_eps: f32,
    /// Whether the embedding also makes the logits.
    pub tied_embeddings: bool,
    /// Whether the projections to q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub o_bias: bool,
    /// Whether each head of q and k is normalised before it is rotated.
    pub qk_norm: bool,
    /// `[n_layers]` how many positions back a row of the layer sees, itself included.
    pub windows: Vec<Option<u32>>,
    /// `[n_layers]` the layer whose keys and values a layer reads: itself, or an earlier one that
    /// reads its own.
    pub kv_owners: Vec<u32>,
    /// Tokens that one sequence may have.
    pub max_context: u32,
    /// How positions rotate heads.
    pub rope: Rope,
    /// The token that begins a text, if the model has one.
    pub bos: Option<TokenId>,
    /// The tokens that end an answer, ascending, perhaps none.
    pub eos: Vec<TokenId>,
    /// What the model's makers recommend for sampling.
    pub generation: GenerationDefaults,
}

/// Sampling values that come with a model; `None` where its files say nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Whether to sample at all.
    pub do_sample: Option<bool>,
    /// See [`nuthatch_types::Sampling`], also for the next ones.
    pub temperature: Option<f32>,
    /// 0 means all.
    pub top_k: Option<u32>,
    /// At most 1.
    pub top_p: Option<f32>,
    /// At least 0.
    pub min_p: Option<f32>,
    /// 1 means none.
    pub repetition_penalty: Option<f32>,
}

/// Largest sizes that are accepted. They are far above real models, and low enough that products of
/// any three fit 64 bits.
mod limits {
    pub(super) const LAYERS: u32 = 1024;
    pub(super) const HIDDEN: u32 = 1 << 17;
    pub(super) const HEADS: u32 = 1024;
    pub(super) const HEAD_DIM: u32 = 512;
    pub(super) const FF: u32 = 1 << 20;
    pub(super) const VOCAB: u32 = 1 << 22;
    pub(super) const CONTEXT: u32 = 1 << 27;
}

impl ModelConfig {
    /// How many positions back a row of this layer sees, itself included; `None` is all.
    pub fn window(&self, layer: LayerIdx) -> Option<u32> {
        self.windows[layer.0 as usize]
    }

    /// How many positions back any row of any layer sees, itself included; `None` when some layer
    /// sees everything. Keys before it are never read again.
    pub fn widest_window(&self) -> Option<u32> {
        let windows = self.windows.iter().copied().collect::<Option<Vec<u32>>>()?;
        windows.into_iter().max()
    }

    /// The frequencies for an engine whose sequences have at most `max_context` tokens.
    ///
    /// Keys are cached after they were rotated, so the frequencies must not change while the engine
    /// lives: scalings that depend on the length take it from `max_context`, see [`Rope`].
    pub fn rope_spec(&self, max_context: usize) -> RopeSpec {
        self.rope.spec(max_context)
    }

    /// Replaces rotation and context by what a user asked for; an error changes nothing.
    pub fn override_rope(&mut self, wanted: &RopeOverride) -> Result<(), ConfigError> {
        let (rope, max_context) = wanted.apply(&self.rope, self.max_context)?;
        let changed = ModelConfig { rope, max_context, ..self.clone() };
        changed.validate()?;
        *self = changed;
        Ok(())
    }

    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.n_heads as usize * self.head_dim as usize
    }

    /// Width of all key heads together, and of all value heads.
    pub fn kv_width(&self) -> usize {
        self.n_kv_heads as usize * self.head_dim as usize
    }

    /// Checks every number against its range and against the others.
    fn validate(&self) -> Result<(), ConfigError> {
        within("the number of layers", self.n_layers, limits::LAYERS, "1 to 1024")?;
        within("the hidden size", self.hidden, limits::HIDDEN, "1 to 131072")?;
        within("the number of heads", self.n_heads, limits::HEADS, "1 to 1024")?;
        within("the number of key and value heads", self.n_kv_heads, limits::HEADS, "1 to 1024")?;
        within("the width of a head", self.head_dim, limits::HEAD_DIM, "2 to 512")?;
        within("the feed-forward width", self.ff, limits::FF, "1 to 1048576")?;
        within("the vocabulary", self.vocab, limits::VOCAB, "1 to 4194304")?;
        within("the context length", self.max_context, limits::CONTEXT, "1 to 134217728")?;
        if !self.head_dim.is_multiple_of(2) {
            return Err(invalid("the width of a head", self.head_dim, "even"));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let heads = format!("{} for {} key and value heads", self.n_heads, self.n_kv_heads);
            return Err(invalid("the number of heads", heads, "a multiple of theirs"));
        }
        // Comparisons with NaN are false, so NaN is refused.
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return Err(invalid("the epsilon of the norms", self.norm_eps, "between 0 and 1"));
        }
        if self.windows.len() != self.n_layers as usize {
            return Err(invalid("the number of windows", self.windows.len(), "that of the layers"));
        }
        if self.windows.contains(&Some(0)) {
            return Err(invalid("the sliding window", 0, "at least 1"));
        }
        kv_owners::validate(&self.kv_owners, self.n_layers)?;
        self.rope.validate(self.head_dim)
    }
}

fn within(key: &str, found: u32, max: u32, allowed: &'static str) -> Result<(), ConfigError> {
    if (1..=max).contains(&found) { Ok(()) } else { Err(invalid(key, found, allowed)) }
}

pub(crate) fn invalid(
    key: &str,
    found: impl std::fmt::Display,
    allowed: &'static str,
) -> ConfigError {
    ConfigError::Invalid { key: key.to_owned(), found: found.to_string(), allowed }
}

/// Keeps the tokens of the vocabulary, sorted and once each. An end that is not in the vocabulary
/// can never be sampled, so it does no harm to forget it.
fn known_tokens(ids: impl IntoIterator<Item = i64>, vocab: u32) -> Vec<TokenId> {
    let mut tokens: Vec<TokenId> = ids
        .into_iter()
        .filter_map(|id| u32::try_from(id).ok())
        .filter(|&id| id < vocab)
        .map(TokenId)
        .collect();
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}
