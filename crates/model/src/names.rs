//! The tensors that the forward pass asks for, and what files call them.

use nuthatch_types::LayerIdx;

use crate::config::ModelConfig;

/// One tensor of a model, those of a layer with its number. Matrices are `[output, input]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorName {
    /// `[vocab, hidden]`
    Embedding,
    /// `[hidden]` weights of the last norm.
    OutputNorm,
    /// `[vocab, hidden]`; a model with tied embeddings has none.
    Output,
    /// `[hidden]` weights of the norm before attention.
    AttnNorm(u32),
    /// `[n_heads * head_dim, hidden]`
    Q(u32),
    /// `[n_kv_heads * head_dim, hidden]`
    K(u32),
    /// `[n_kv_heads * head_dim, hidden]`
    V(u32),
    /// `[n_heads * head_dim]`
    QBias(u32),
    /// `[n_kv_heads * head_dim]`
    KBias(u32),
    /// `[n_kv_heads * head_dim]`
    VBias(u32),
    /// `[hidden, n_heads * head_dim]`
    O(u32),
    /// `[hidden]`
    OBias(u32),
    /// `[head_dim]` weights of the norm of each query head.
    QNorm(u32),
    /// `[head_dim]` weights of the norm of each key head.
    KNorm(u32),
    /// `[hidden]` weights of the norm before the feed-forward layer.
    FfnNorm(u32),
    /// `[ffn, hidden]`
    Gate(u32),
    /// `[ffn, hidden]`
    Up(u32),
    /// `[hidden, ffn]`
    Down(u32),
}

/// Whose names a file uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    HuggingFace,
    Gguf,
}

impl TensorName {
    /// Every tensor that a model with this configuration needs.
    pub fn all(config: &ModelConfig) -> Vec<TensorName> {
        use TensorName as Name;
        let mut names = vec![Name::Embedding, Name::OutputNorm];
        if !config.tied_embeddings {
            names.push(Name::Output);
        }
        for layer in 0..config.n_layers {
            let owns_kv = config.owns_kv(LayerIdx(layer));
            names.extend([Name::AttnNorm(layer), Name::Q(layer)]);
            if owns_kv {
                names.extend([Name::K(layer), Name::V(layer)]);
            }
            if config.qkv_bias {
                names.push(Name::QBias(layer));
            }
            if config.qkv_bias && owns_kv {
                names.extend([Name::KBias(layer), Name::VBias(layer)]);
            }
            if config.qk_norm {
                names.push(Name::QNorm(layer));
            }
            if config.qk_norm && owns_kv {
                names.push(Name::KNorm(layer));
            }
            names.push(Name::O(layer));
            if config.o_bias {
                names.push(Name::OBias(layer));
            }
            names.extend([Name::FfnNorm(layer), Name::Gate(layer), Name::Up(layer)]);
            names.push(Name::Down(layer));
        }
        names
    }

    /// The shape that it must have.
    pub fn shape(self, config: &ModelConfig) -> Vec<usize> {
        use TensorName as Name;
        let (hidden, ffn) = (config.hidden as usize, config.ff as usize);
        let (q, kv) = (config.q_width(), config.kv_width());
        match self {
            Name::Embedding | Name::Output => vec![config.vocab as usize, hidden],
            Name::OutputNorm | Name::AttnNorm(_) | Name::FfnNorm(_) | Name::OBias(_) => {
                vec![hidden]
            }
            Name::Q(_) => vec![q, hidden],
            Name::K(_) | Name::V(_) => vec![kv, hidden],
            Name::QBias(_) => vec![q],
            Name::KBias(_) | Name::VBias(_) => vec![kv],
            Name::O(_) => vec![hidden, q],
            Name::QNorm(_) | Name::KNorm(_) => vec![config.head_dim as usize],
            Name::Gate(_) | Name::Up(_) => vec![ffn, hidden],
            Name::Down(_) => vec![hidden, ffn],
        }
    }

    /// The file's name of it.
    pub(crate) fn in_file(self, naming: Naming) -> String {
        let (layer, hugging_face, gguf) = self.names();
        prefixed(layer, hugging_face, gguf, naming)
    }

    /// The name of the fused matrix that some files have in its place and in its neighbours'.
    pub(crate) fn fused_in_file(self, naming: Naming) -> Option<String> {
        use TensorName as Name;
        let (layer, hugging_face, gguf) = match self {
            Name::Q(layer) | Name::K(layer) | Name::V(layer) => {
                (layer, "self_attn.qkv_proj.weight", "attn_qkv.weight")
            }
            Name::Gate(layer) | Name::Up(layer) => {
                (layer, "mlp.gate_up_proj.weight", "ffn_gate_up.weight")
            }
            Name::Embedding
            | Name::OutputNorm
            | Name::Output
            | Name::AttnNorm(_)
            | Name::QBias(_)
            | Name::KBias(_)
            | Name::VBias(_)
            | Name::O(_)
            | Name::OBias(_)
            | Name::QNorm(_)
            | Name::KNorm(_)
            | Name::FfnNorm(_)
            | Name::Down(_) => return None,
        };
        Some(prefixed(Some(layer), hugging_face, gguf, naming))
    }

    /// Its layer, then Hugging Face's and GGUF's names after the layer's prefix.
    fn names(self) -> (Option<u32>, &'static str, &'static str) {
        use TensorName as Name;
        match self {
            Name::Embedding => (None, "model.embed_tokens.weight", "token_embd.weight"),
            Name::OutputNorm => (None, "model.norm.weight", "output_norm.weight"),
            Name::Output => (None, "lm_head.weight", "output.weight"),
            Name::AttnNorm(l) => (Some(l), "input_layernorm.weight", "attn_norm.weight"),
            Name::Q(l) => (Some(l), "self_attn.q_proj.weight", "attn_q.weight"),
            Name::K(l) => (Some(l), "self_attn.k_proj.weight", "attn_k.weight"),
            Name::V(l) => (Some(l), "self_attn.v_proj.weight", "attn_v.weight"),
            Name::QBias(l) => (Some(l), "self_attn.q_proj.bias", "attn_q.bias"),
            Name::KBias(l) => (Some(l), "self_attn.k_proj.bias", "attn_k.bias"),
            Name::VBias(l) => (Some(l), "self_attn.v_proj.bias", "attn_v.bias"),
            Name::O(l) => (Some(l), "self_attn.o_proj.weight", "attn_output.weight"),
            Name::OBias(l) => (Some(l), "self_attn.o_proj.bias", "attn_output.bias"),
            Name::QNorm(l) => (Some(l), "self_attn.q_norm.weight", "attn_q_norm.weight"),
            Name::KNorm(l) => (Some(l), "self_attn.k_norm.weight", "attn_k_norm.weight"),
            Name::FfnNorm(l) => (Some(l), "post_attention_layernorm.weight", "ffn_norm.weight"),
            Name::Gate(l) => (Some(l), "mlp.gate_proj.weight", "ffn_gate.weight"),
            Name::Up(l) => (Some(l), "mlp.up_proj.weight", "ffn_up.weight"),
            Name::Down(l) => (Some(l), "mlp.down_proj.weight", "ffn_down.weight"),
        }
    }
}

fn prefixed(layer: Option<u32>, hugging_face: &str, gguf: &str, naming: Naming) -> String {
    match (layer, naming) {
        (None, Naming::HuggingFace) => hugging_face.to_owned(),
        (None, Naming::Gguf) => gguf.to_owned(),
        (Some(layer), Naming::HuggingFace) => format!("model.layers.{layer}.{hugging_face}"),
        (Some(layer), Naming::Gguf) => format!("blk.{layer}.{gguf}"),
    }
}
