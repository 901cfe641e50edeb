//! Models by their sizes alone.

use nuthatch_model::ModelConfig;
use serde::Serialize;

/// A model whose memory is planned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct PlanModel {
    pub(super) name: String,
    pub(super) n_layers: u32,
    /// Layers that own keys and values; the others read theirs.
    pub(super) n_kv_layers: u32,
    pub(super) n_heads: u32,
    pub(super) n_kv_heads: u32,
    pub(super) head_dim: u32,
    /// Tokens that the model was made for.
    pub(super) context: u32,
    /// How far back every layer sees, if none sees everything.
    pub(super) window: Option<u32>,
    pub(super) n_params: u64,
    pub(super) weights: Weights,
}

/// What the weights cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Weights {
    pub(super) bytes: u64,
    /// Where the number comes from.
    pub(super) what: String,
}

impl PlanModel {
    /// A model from its configuration; weights that are not here are counted as bf16.
    pub(super) fn from_config(
        name: String,
        config: &ModelConfig,
        weights: Option<Weights>,
    ) -> Self {
        let n_params = count_params(&Sizes {
            n_layers: config.n_layers,
            n_kv_layers: config.n_kv_layers(),
            hidden: config.hidden,
            ff: config.ff,
            vocab: config.vocab,
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            tied: config.tied_embeddings,
            qkv_bias: config.qkv_bias,
            qk_norm: config.qk_norm,
        });
        PlanModel {
            name,
            n_layers: config.n_layers,
            n_kv_layers: config.n_kv_layers(),
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            context: config.max_context,
            window: config.widest_window(),
            n_params,
            weights: weights.unwrap_or_else(|| bf16_weights(n_params)),
        }
    }
}

fn bf16_weights(n_params: u64) -> Weights {
    Weights { bytes: 2 * n_params, what: "as bf16".to_owned() }
}

/// What decides the number of parameters.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    n_layers: u32,
    n_kv_layers: u32,
    hidden: u32,
    ff: u32,
    vocab: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    tied: bool,
    qkv_bias: bool,
    qk_norm: bool,
}

fn count_params(sizes: &Sizes) -> u64 {
    let [layers, d, ff, vocab] =
        [sizes.n_layers, sizes.hidden, sizes.ff, sizes.vocab].map(u64::from);
    let [h, g, head] = [sizes.n_heads, sizes.n_kv_heads, sizes.head_dim].map(u64::from);
    let (q, kv) = (h * head, 2 * g * head);
    let mut layer = d * q + q * d + 3 * d * ff + 2 * d;
    let mut kv_layer = d * kv;
    if sizes.qkv_bias {
        layer += q;
        kv_layer += kv;
    }
    if sizes.qk_norm {
        layer += head;
        kv_layer += head;
    }
    let embeddings = if sizes.tied { 1 } else { 2 };
    layers * layer + u64::from(sizes.n_kv_layers) * kv_layer + embeddings * vocab * d + d
}

/// A well-known model, planned without its files.
#[derive(Clone, Copy, Debug)]
pub(super) struct BuiltIn {
    pub(super) name: &'static str,
    sizes: Sizes,
    context: u32,
    window: Option<u32>,
}

impl BuiltIn {
    pub(super) fn into_plan_model(self) -> PlanModel {
        let n_params = count_params(&self.sizes);
        PlanModel {
            name: self.name.to_owned(),
            n_layers: self.sizes.n_layers,
            n_kv_layers: self.sizes.n_kv_layers,
            n_heads: self.sizes.n_heads,
            n_kv_heads: self.sizes.n_kv_heads,
            head_dim: self.sizes.head_dim,
            context: self.context,
            window: self.window,
            n_params,
            weights: bf16_weights(n_params),
        }
    }
}

impl BuiltIn {
    /// What a `config.json` of this shape says.
    pub(super) fn config_json(self) -> String {
        let Sizes { n_layers, hidden, ff, vocab, n_heads, n_kv_heads, head_dim, tied, .. } =
            self.sizes;
        let model_type = match (self.sizes.qkv_bias, self.sizes.qk_norm) {
            (true, _) => "qwen2",
            (false, true) => "qwen3",
            (false, false) => "llama",
        };
        let context = self.context;
        serde_json::json!({
            "model_type": model_type,
            "num_hidden_layers": n_layers,
            "hidden_size": hidden,
            "intermediate_size": ff,
            "vocab_size": vocab,
            "num_attention_heads": n_heads,
            "num_key_value_heads": n_kv_heads,
            "head_dim": head_dim,
            "tie_word_embeddings": tied,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "max_position_embeddings": context,
        })
        .to_string()
    }
}

/// The shape with this name, whatever its case.
pub(super) fn find(name: &str) -> Option<BuiltIn> {
    BUILT_IN.iter().copied().find(|model| model.name.eq_ignore_ascii_case(name))
}

/// `[layers, hidden, ff, vocab]`, `[heads, KV heads, head width]`, context; untied Llama.
const fn llama(
    name: &'static str,
    [n_layers, hidden, ff, vocab]: [u32; 4],
    [n_heads, n_kv_heads, head_dim]: [u32; 3],
    context: u32,
) -> BuiltIn {
    let (tied, qkv_bias, qk_norm) = (false, false, false);
    let sizes = Sizes {
        n_layers,
        n_kv_layers: n_layers,
        hidden,
        ff,
        vocab,
        n_heads,
        n_kv_heads,
        head_dim,
        tied,
        qkv_bias,
        qk_norm,
    };
    BuiltIn { name, sizes, context, window: None }
}

impl BuiltIn {
    const fn tied(mut self) -> Self {
        self.sizes.tied = true;
        self
    }

    const fn qkv_bias(mut self) -> Self {
        self.sizes.qkv_bias = true;
        self
    }

    const fn qk_norm(mut self) -> Self {
        self.sizes.qk_norm = true;
        self
    }

    const fn window(mut self, window: u32) -> Self {
        self.window = Some(window);
        self
    }
}

const K: u32 = 1024;

/// Sizes as their makers published them.
pub(super) const BUILT_IN: [BuiltIn; 15] = [
    llama("smollm2-135m", [30, 576, 1536, 49_152], [9, 3, 64], 8 * K).tied(),
    llama("llama2-7b", [32, 4096, 11_008, 32_000], [32, 32, 128], 4 * K),
    llama("llama2-13b", [40, 5120, 13_824, 32_000], [40, 40, 128], 4 * K),
    llama("llama2-70b", [80, 8192, 28_672, 32_000], [64, 8, 128], 4 * K),
    llama("llama3-8b", [32, 4096, 14_336, 128_256], [32, 8, 128], 8 * K),
    llama("llama3-70b", [80, 8192, 28_672, 128_256], [64, 8, 128], 8 * K),
    llama("llama3.1-8b", [32, 4096, 14_336, 128_256], [32, 8, 128], 128 * K),
    llama("llama3.1-70b", [80, 8192, 28_672, 128_256], [64, 8, 128], 128 * K),
    llama("mistral-7b", [32, 4096, 14_336, 32_000], [32, 8, 128], 32 * K).window(4 * K),
    llama("qwen2.5-0.5b", [24, 896, 4864, 151_936], [14, 2, 64], 32 * K).qkv_bias().tied(),
    llama("qwen2.5-7b", [28, 3584, 18_944, 152_064], [28, 4, 128], 32 * K).qkv_bias(),
    llama("qwen2.5-14b", [48, 5120, 13_824, 152_064], [40, 8, 128], 32 * K).qkv_bias(),
    llama("qwen2.5-72b", [80, 8192, 29_568, 152_064], [64, 8, 128], 32 * K).qkv_bias(),
    llama("qwen3-0.6b", [28, 1024, 3072, 151_936], [16, 8, 128], 40 * K).qk_norm().tied(),
    llama("qwen3-8b", [36, 4096, 12_288, 151_936], [32, 8, 128], 40 * K).qk_norm(),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_that_the_makers_published() {
        for (name, expect) in [
            ("smollm2-135m", 134_515_008),
            ("llama2-7b", 6_738_415_616),
            ("llama2-13b", 13_015_864_320),
            ("llama2-70b", 68_976_648_192),
            ("llama3-8b", 8_030_261_248),
            ("llama3.1-70b", 70_553_706_496),
            ("mistral-7b", 7_241_732_096),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen3-0.6b", 596_049_920),
            ("Qwen3-8B", 8_190_735_360),
        ] {
            assert_eq!(find(name).unwrap().into_plan_model().n_params, expect, "{name}");
        }
        assert!(find("llama9").is_none());
    }
}
