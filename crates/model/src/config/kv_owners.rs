//! Which layer's keys and values each layer reads.
//!
//! Most models have keys and values in every layer. Some share them between layers (YOCO, CLA, MLKV,
//! Gemma 3n): a layer that shares has no projections to k and v, and owns no part of the cache.
//!
//! Two keys of a `config.json` say so:
//!
//! - `num_kv_shared_layers: n`, as in Gemma 3n: each of the last `n` layers reads the last layer before
//!   them that is of its own type, windowed or not.
//! - `kv_share_map: [0, 0, 2, 2]`, nuthatch's own: one entry for each layer, the layer that it reads.

use nuthatch_types::LayerIdx;
use serde_json::Value;

use super::fields::Fields;
use super::{ModelConfig, invalid};
use crate::error::ConfigError;

impl ModelConfig {
    /// Whether a layer writes keys and values.
    pub fn owns_kv(&self, layer: LayerIdx) -> bool {
        self.kv_owners[layer.0 as usize] == layer.0
    }

    /// The layer of the KV arena that a layer reads: the arena has the layers that own KV only.
    pub fn kv_layer(&self, layer: LayerIdx) -> LayerIdx {
        let owner = self.kv_owners[layer.0 as usize];
        LayerIdx((0..owner).filter(|&before| self.owns_kv(LayerIdx(before))).count() as u32)
    }

    /// Layers that own KV.
    pub fn n_kv_layers(&self) -> u32 {
        (0..self.n_layers).filter(|&layer| self.owns_kv(LayerIdx(layer))).count() as u32
    }
}

/// Every layer reads its own.
pub(super) fn every_layer(n_layers: u32) -> Vec<u32> {
    (0..n_layers).collect()
}

/// What a `config.json` says.
pub(super) fn from_json(
    fields: Fields<'_>,
    windows: &[Option<u32>],
) -> Result<Vec<u32>, ConfigError> {
    let n_layers = windows.len() as u32;
    if let Some(map) = fields.get("kv_share_map") {
        return share_map(fields, map, n_layers);
    }
    let n_shared = fields.u32("num_kv_shared_layers")?.unwrap_or(0);
    if n_shared == 0 {
        return Ok(every_layer(n_layers));
    }
    let Some(first_shared) = n_layers.checked_sub(n_shared).filter(|&first| first > 0) else {
        let allowed = "less than the number of layers";
        return Err(invalid("num_kv_shared_layers", n_shared, allowed));
    };
    let owner = |layer: u32| {
        if layer < first_shared {
            return Ok(layer);
        }
        let kind = windows[layer as usize].is_some();
        let owner = (0..first_shared).rev().find(|&own| windows[own as usize].is_some() == kind);
        let found = format!("{n_shared}, and layer {layer} has no layer of its type before them");
        owner.ok_or_else(|| invalid("num_kv_shared_layers", found, "less"))
    };
    (0..n_layers).map(owner).collect()
}

fn share_map(fields: Fields<'_>, map: &Value, n_layers: u32) -> Result<Vec<u32>, ConfigError> {
    let entry = |value: &Value| value.as_u64().and_then(|owner| u32::try_from(owner).ok());
    let owners = map.as_array().filter(|list| list.len() == n_layers as usize);
    let owners = owners.and_then(|list| list.iter().map(entry).collect::<Option<Vec<u32>>>());
    let allowed = "an array with the number of a layer for each layer";
    owners.ok_or_else(|| fields.invalid("kv_share_map", map, allowed))
}

/// Checks that each layer reads an earlier one, or itself, that reads itself.
pub(super) fn validate(owners: &[u32], n_layers: u32) -> Result<(), ConfigError> {
    if owners.len() != n_layers as usize {
        return Err(invalid("the number of KV owners", owners.len(), "that of the layers"));
    }
    for (layer, &owner) in (0_u32..).zip(owners) {
        let found = || format!("{owner} for layer {layer}");
        if owner > layer {
            return Err(invalid("the owner of a layer's KV", found(), "no later layer"));
        }
        if owners[owner as usize] != owner {
            return Err(invalid("the owner of a layer's KV", found(), "a layer that owns its KV"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(keys: &str) -> Result<Vec<u32>, String> {
        let json = format!(
            r#"{{"model_type": "qwen2", "vocab_size": 32, "hidden_size": 32,
                "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64,
                "use_sliding_window": true, "sliding_window": 9, {keys}}}"#
        );
        let config = ModelConfig::from_json(json.as_bytes(), None);
        config.map(|config| config.kv_owners).map_err(|error| error.to_string())
    }

    #[test]
    fn owners_are_found_and_mistakes_are_told() {
        let full = r#""max_window_layers": 4"#;
        assert_eq!(owners(full), Ok(vec![0, 1, 2, 3]));
        assert_eq!(owners(&format!(r#"{full}, "num_kv_shared_layers": 0"#)), Ok(vec![0, 1, 2, 3]));
        assert_eq!(owners(&format!(r#"{full}, "num_kv_shared_layers": 3"#)), Ok(vec![0, 0, 0, 0]));
        // The first two see everything, the others a window.
        let mixed = r#""max_window_layers": 2"#;
        assert_eq!(owners(&format!(r#"{mixed}, "num_kv_shared_layers": 1"#)), Ok(vec![0, 1, 2, 2]));
        assert_eq!(owners(r#""kv_share_map": [0, 1, 0, 1]"#), Ok(vec![0, 1, 0, 1]));
        for (keys, expected) in [
            (r#""num_kv_shared_layers": 4"#, "num_kv_shared_layers is 4, but must be less than"),
            (r#""num_kv_shared_layers": 4000000000"#, "num_kv_shared_layers is 4000000000"),
            (
                r#""max_window_layers": 2, "num_kv_shared_layers": 2"#,
                "layer 2 has no layer of its type",
            ),
            (r#""kv_share_map": [0, 1, 0]"#, "an array with the number of a layer"),
            (r#""kv_share_map": [0, 1, 0, -1]"#, "an array with the number of a layer"),
            (r#""kv_share_map": 3"#, "an array with the number of a layer"),
            (r#""kv_share_map": [0, 2, 2, 3]"#, "2 for layer 1, but must be no later layer"),
            (r#""kv_share_map": [0, 0, 1, 3]"#, "1 for layer 2, but must be a layer that owns"),
            (r#""kv_share_map": [9, 0, 0, 0]"#, "9 for layer 0, but must be no later layer"),
        ] {
            let error = owners(keys).expect_err(keys);
            assert!(error.contains(expected), "{error}\ndoes not say\n{expected}");
        }
    }
}
