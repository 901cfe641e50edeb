//! `POST /v1/embeddings`: texts to vectors.

use serde::{Deserialize, Serialize, Serializer};

use crate::fields::{Raw, name, number, object};
use crate::request::prompts;
use crate::{PromptInput, RequestError, caps};

/// Texts to embed.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingsRequest {
    /// The model that is asked for.
    pub model: Option<String>,
    /// The texts, at least one.
    pub inputs: Vec<PromptInput>,
    /// Whether vectors are sent as base64 of their bytes, which OpenAI's clients prefer.
    pub as_base64: bool,
    /// Numbers of a vector, if the client says how many it expects.
    pub dimensions: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawEmbeddings<'a> {
    #[serde(borrow)]
    model: Raw<'a>,
    #[serde(borrow)]
    input: Raw<'a>,
    #[serde(borrow)]
    encoding_format: Raw<'a>,
    #[serde(borrow)]
    dimensions: Raw<'a>,
}

impl EmbeddingsRequest {
    /// Reads and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        let raw: RawEmbeddings<'_> = object(body)?;
        let as_base64 = match name(raw.encoding_format, "encoding_format")?.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(_) => {
                return Err(RequestError::invalid("encoding_format", "must be float or base64"));
            }
        };
        Ok(EmbeddingsRequest {
            model: name(raw.model, "model")?,
            inputs: prompts::<{ caps::INPUTS }>(raw.input, "input")?,
            as_base64,
            dimensions: number(raw.dimensions, "dimensions", 1..=u32::MAX)?,
        })
    }
}

/// The answer to an [`EmbeddingsRequest`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Embeddings {
    /// `list`.
    pub object: &'static str,
    /// The vectors, in the order of the texts.
    pub data: Vec<Embedding>,
    /// The model that made them.
    pub model: String,
    /// What they used.
    pub usage: EmbeddingsUsage,
}

/// One vector.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Embedding {
    /// `embedding`.
    pub object: &'static str,
    /// Which of the texts, from 0.
    pub index: u32,
    /// The vector.
    pub embedding: Vector,
}

/// Tokens that were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EmbeddingsUsage {
    /// Of the texts.
    pub prompt_tokens: u32,
    /// The same.
    pub total_tokens: u32,
}

/// A vector on the wire.
#[derive(Clone, Debug, PartialEq)]
pub enum Vector {
    /// As a list of numbers.
    Floats(Vec<f32>),
    /// As base64 of its numbers' bytes, the lowest first.
    Base64(Vec<f32>),
}

impl Serialize for Vector {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Vector::Floats(floats) => floats.serialize(serializer),
            Vector::Base64(floats) => {
                let bytes: Vec<u8> = floats.iter().flat_map(|float| float.to_le_bytes()).collect();
                serializer.serialize_str(&base64(&bytes))
            }
        }
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for i in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * i)) as usize & 63];
            text.push(if i <= three.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_padded() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        let floats = vec![1.0, -0.5];
        let json = serde_json::to_string(&Vector::Base64(floats)).unwrap();
        assert_eq!(json, "\"AACAPwAAAL8=\"");
    }
}
