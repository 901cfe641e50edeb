//! GGUF: one file with metadata, tokenizer and tensors.
//!
//! ```text
//! magic version n_tensors n_metadata | metadata ... | tensor descriptions ... | pad | tensor data
//! ```
//!
//! A file may come from anywhere, so nothing that it claims is believed: every count is held against
//! the bytes that are left before anything is allocated, every offset against the file's length.
//! Versions 2 and 3 in little-endian order are read. Not here: what the values mean
//! ([`crate::config`]) and writing.

mod parse;
mod types;

use std::collections::BTreeMap;

use nuthatch_backend::WeightType;

use crate::error::{ConfigError, GgufError};

/// The parsed header of one GGUF file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gguf {
    /// Version of the format, 2 or 3.
    pub version: u32,
    /// Metadata by key.
    pub metadata: BTreeMap<String, GgufValue>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, GgufTensor>,
}

/// One metadata value. Numbers of all widths become the widest of their kind.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// A truth value.
    Bool(bool),
    /// A number without a sign.
    Unsigned(u64),
    /// A number with a sign.
    Signed(i64),
    /// A real number.
    Float(f64),
    /// Text.
    Text(String),
    /// An array.
    Array(GgufArray),
}

/// An array of metadata values of one kind.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the variants say it")]
pub enum GgufArray {
    Bool(Vec<bool>),
    Unsigned(Vec<u64>),
    Signed(Vec<i64>),
    Float(Vec<f64>),
    Text(Vec<String>),
}

/// Where one tensor is and how it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// How its weights are stored.
    pub dtype: WeightType,
    /// Its shape with the slowest dimension first, as `[rows, cols]`: the reverse of the file's order.
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub start: usize,
    /// Bytes of it; `start + len` is inside the file.
    pub len: usize,
}

impl Gguf {
    /// Parses the header of a whole file, and checks that every tensor is inside it.
    ///
    /// Allocates at most a few times the size of the header.
    pub fn parse(file: &[u8]) -> Result<Gguf, GgufError> {
        parse::parse(file)
    }

    /// The text of a key, or `None` if it is not there.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(GgufValue::Text(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(key, other, "a string")),
        }
    }

    /// The truth value of a key, or `None` if it is not there.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(GgufValue::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(key, other, "true or false")),
        }
    }

    /// The number of a key, which must fit 32 bits without a sign, or `None` if it is not there.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        value.as_u32().map(Some).ok_or_else(|| wrong_type(key, value, "a whole number of 32 bits"))
    }

    /// The real number of a key (a whole one is accepted), or `None` if it is not there.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(GgufValue::Float(value)) => Ok(Some(*value)),
            Some(GgufValue::Unsigned(value)) => Ok(Some(*value as f64)),
            Some(GgufValue::Signed(value)) => Ok(Some(*value as f64)),
            Some(other) => Err(wrong_type(key, other, "a number")),
        }
    }

    /// The strings of a key, or `None` if it is not there.
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>, ConfigError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(GgufArray::Text(values))) => Ok(Some(values)),
            // Writers give an empty array any element type.
            Some(GgufValue::Array(array)) if array.is_empty() => Ok(Some(&[])),
            Some(other) => Err(wrong_type(key, other, "an array of strings")),
        }
    }

    /// The numbers of a key, each of which must fit 32 bits with a sign, or `None`.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, ConfigError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let numbers = match value {
            GgufValue::Array(GgufArray::Signed(values)) => {
                values.iter().map(|&v| i32::try_from(v).ok()).collect()
            }
            GgufValue::Array(GgufArray::Unsigned(values)) => {
                values.iter().map(|&v| i32::try_from(v).ok()).collect()
            }
            GgufValue::Array(array) if array.is_empty() => Some(Vec::new()),
            GgufValue::Bool(_)
            | GgufValue::Unsigned(_)
            | GgufValue::Signed(_)
            | GgufValue::Float(_)
            | GgufValue::Text(_)
            | GgufValue::Array(_) => None,
        };
        numbers.map(Some).ok_or_else(|| wrong_type(key, value, "an array of 32-bit numbers"))
    }

    /// The real numbers of a key, or `None` if it is not there.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, ConfigError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(GgufArray::Float(values))) => {
                Ok(Some(values.iter().map(|&v| v as f32).collect()))
            }
            Some(GgufValue::Array(array)) if array.is_empty() => Ok(Some(Vec::new())),
            Some(other) => Err(wrong_type(key, other, "an array of numbers")),
        }
    }
}

impl GgufValue {
    /// The value as a whole number, if it is one and fits.
    pub fn as_u32(&self) -> Option<u32> {
        match self {
            GgufValue::Unsigned(value) => u32::try_from(*value).ok(),
            GgufValue::Signed(value) => u32::try_from(*value).ok(),
            GgufValue::Bool(_) | GgufValue::Float(_) | GgufValue::Text(_) | GgufValue::Array(_) => {
                None
            }
        }
    }
}

impl GgufArray {
    /// Elements of the array.
    pub fn len(&self) -> usize {
        match self {
            GgufArray::Bool(values) => values.len(),
            GgufArray::Unsigned(values) => values.len(),
            GgufArray::Signed(values) => values.len(),
            GgufArray::Float(values) => values.len(),
            GgufArray::Text(values) => values.len(),
        }
    }

    /// Whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn wrong_type(key: &str, found: &GgufValue, allowed: &'static str) -> ConfigError {
    let found = match found {
        GgufValue::Bool(value) => value.to_string(),
        GgufValue::Unsigned(value) => value.to_string(),
        GgufValue::Signed(value) => value.to_string(),
        GgufValue::Float(value) => value.to_string(),
        GgufValue::Text(text) => format!("{:?}", text.chars().take(40).collect::<String>()),
        GgufValue::Array(array) => format!("an array of {} values", array.len()),
    };
    ConfigError::Invalid { key: key.to_owned(), found, allowed }
}
