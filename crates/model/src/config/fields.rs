//! Typed access to a JSON object; `null` counts as missing.

use serde_json::{Map, Value};

use crate::error::ConfigError;

/// The keys of one object, with a prefix for messages.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    pub(super) prefix: &'static str,
    pub(super) object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there, even as `null`.
    pub(super) fn mentions(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    pub(super) fn invalid(&self, key: &str, found: &Value, allowed: &'static str) -> ConfigError {
        // A hostile value may be megabytes long.
        let found = found.to_string().chars().take(60).collect();
        ConfigError::Invalid { key: format!("{}{key}", self.prefix), found, allowed }
    }

    pub(super) fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { key: format!("{}{key}", self.prefix) }
    }

    /// A number without a sign; `4096.0` is one too, as some writers have it so.
    pub(super) fn u32(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match value.as_u64() {
            Some(number) => u32::try_from(number).ok(),
            None => value
                .as_f64()
                .filter(|number| {
                    number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(number)
                })
                .map(|number| number as u32),
        };
        number.map(Some).ok_or_else(|| self.invalid(key, value, "a whole number of 32 bits"))
    }

    pub(super) fn require_u32(&self, key: &str) -> Result<u32, ConfigError> {
        self.u32(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.invalid(key, value, "a number"))
    }

    pub(super) fn f32(&self, key: &str) -> Result<Option<f32>, ConfigError> {
        Ok(self.f64(key)?.map(|number| number as f32))
    }

    pub(super) fn require_f64(&self, key: &str) -> Result<f64, ConfigError> {
        self.f64(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.invalid(key, value, "true or false"))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.invalid(key, value, "a string"))
    }

    pub(super) fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers = value.as_array().and_then(|values| {
            values.iter().map(|value| value.as_f64().map(|number| number as f32)).collect()
        });
        numbers.map(Some).ok_or_else(|| self.invalid(key, value, "an array of numbers"))
    }

    /// One number or an array of them.
    pub(super) fn ids(&self, key: &str) -> Result<Vec<i64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let ids = match value.as_array() {
            Some(values) => values.iter().map(Value::as_i64).collect::<Option<_>>(),
            None => value.as_i64().map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.invalid(key, value, "a token or an array of tokens"))
    }

    pub(super) fn object(
        &self,
        key: &str,
        prefix: &'static str,
    ) -> Result<Option<Fields<'a>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let object = value.as_object().ok_or_else(|| self.invalid(key, value, "an object"))?;
        Ok(Some(Fields { prefix, object }))
    }
}
