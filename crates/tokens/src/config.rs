//! What `tokenizer_config.json` says that `tokenizer.json` does not: the roles of tokens, and the
//! chat templates. Everything else in the file is ignored.

use serde_json::Value as Json;

use crate::tokenizer::TokenizerError;

/// The parts of a `tokenizer_config.json` that matter here. All are optional.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// Spelling of the token that begins a sequence.
    pub bos_token: Option<String>,
    /// Spelling of the token that ends a sequence.
    pub eos_token: Option<String>,
    /// Whether the begin token goes before a plain text.
    pub add_bos_token: Option<bool>,
    /// Whether the end token goes after a plain text.
    pub add_eos_token: Option<bool>,
    /// Sources of the chat templates with their names; a single one is called `default`.
    pub chat_templates: Vec<(String, String)>,
}

impl TokenizerConfig {
    /// Reads a `tokenizer_config.json`. Fields of an unexpected type count as absent.
    pub fn from_json(json: impl AsRef<[u8]>) -> Result<Self, TokenizerError> {
        let config: Json = serde_json::from_slice(json.as_ref())
            .map_err(|e| TokenizerError::Config { detail: e.to_string() })?;
        Ok(TokenizerConfig {
            bos_token: token(&config["bos_token"]),
            eos_token: token(&config["eos_token"]),
            add_bos_token: config["add_bos_token"].as_bool(),
            add_eos_token: config["add_eos_token"].as_bool(),
            chat_templates: chat_templates(&config["chat_template"]),
        })
    }

    /// Source of the chat template with this name.
    pub fn chat_template(&self, name: &str) -> Option<&str> {
        let found = self.chat_templates.iter().find(|(known, _)| known == name);
        found.map(|(_, source)| source.as_str())
    }
}

/// A token is written as its spelling, or as an object with the spelling as `content`.
fn token(json: &Json) -> Option<String> {
    let text = json.as_str().or_else(|| json["content"].as_str())?;
    Some(text.to_owned())
}

/// Templates are one source, a list of names and sources, or a map from name to source.
fn chat_templates(json: &Json) -> Vec<(String, String)> {
    let named = |name: &str, source: &str| (name.to_owned(), source.to_owned());
    match json {
        Json::String(source) => vec![named("default", source)],
        Json::Array(list) => list
            .iter()
            .filter_map(|entry| Some(named(entry["name"].as_str()?, entry["template"].as_str()?)))
            .collect(),
        Json::Object(map) => {
            map.iter().filter_map(|(name, source)| Some(named(name, source.as_str()?))).collect()
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_templates_are_read_in_each_form() {
        let config = TokenizerConfig::from_json(
            r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>",
                "add_bos_token": true, "chat_template": [
                {"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}"#,
        )
        .unwrap();
        assert_eq!(config.bos_token.as_deref(), Some("<s>"));
        assert_eq!(config.eos_token.as_deref(), Some("</s>"));
        assert_eq!((config.add_bos_token, config.add_eos_token), (Some(true), None));
        assert_eq!(config.chat_template("tool_use"), Some("B"));

        let single = TokenizerConfig::from_json(r#"{"chat_template": "A"}"#).unwrap();
        assert_eq!(single.chat_template("default"), Some("A"));
        assert_eq!(TokenizerConfig::from_json("[1]").unwrap(), TokenizerConfig::default());
        assert!(TokenizerConfig::from_json("{").is_err());
    }
}
