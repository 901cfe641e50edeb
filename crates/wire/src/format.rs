//! What form an answer must have: OpenAI's `response_format`, and vLLM's `structured_outputs` and
//! its older `guided_*`.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::fields::{List, Raw, borrowed, check_len, field, kind_of, object};
use crate::{RequestError, caps};

/// What form an answer must have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Format {
    /// Any.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that this schema allows; the schema is JSON, as it came.
    JsonSchema(String),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// A text of this grammar, in Lark's notation.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// The fields that say it, as they come.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct RawFormat<'a> {
    #[serde(borrow)]
    response_format: Raw<'a>,
    #[serde(borrow)]
    structured_outputs: Raw<'a>,
    #[serde(borrow)]
    guided_json: Raw<'a>,
    #[serde(borrow)]
    guided_regex: Raw<'a>,
    #[serde(borrow)]
    guided_grammar: Raw<'a>,
    #[serde(borrow)]
    guided_choice: Raw<'a>,
}

#[derive(Debug, Deserialize)]
struct RawResponseFormat<'a> {
    r#type: String,
    #[serde(default, borrow)]
    json_schema: Option<RawJsonSchema<'a>>,
}

#[derive(Debug, Deserialize)]
struct RawJsonSchema<'a> {
    #[serde(default, borrow)]
    schema: Raw<'a>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct RawStructured<'a> {
    #[serde(borrow)]
    json: Raw<'a>,
    #[serde(borrow)]
    regex: Raw<'a>,
    #[serde(borrow)]
    grammar: Raw<'a>,
    #[serde(borrow)]
    choice: Raw<'a>,
    #[serde(borrow)]
    json_object: Raw<'a>,
}

impl Format {
    /// Reads the form that a body asks for.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, RequestError> {
        object::<RawFormat<'_>>(body)?.read()
    }
}

impl RawFormat<'_> {
    /// The form; more than one is an error.
    fn read(&self) -> Result<Format, RequestError> {
        let mut formats = Vec::new();
        formats.extend(self.response_format()?);
        if let Some(raw) = self.structured_outputs {
            const PARAM: &str = "structured_outputs";
            let raw: RawStructured<'_> = borrowed(raw, PARAM)?;
            formats.extend(structured(raw, PARAM)?);
        }
        let guided = RawStructured {
            json: self.guided_json,
            regex: self.guided_regex,
            grammar: self.guided_grammar,
            choice: self.guided_choice,
            json_object: None,
        };
        formats.extend(structured(guided, "guided_json")?);
        match formats.len() {
            0 => Ok(Format::Text),
            1 => Ok(formats.remove(0)),
            _ => Err(RequestError::invalid("response_format", "only one form can be asked for")),
        }
    }

    fn response_format(&self) -> Result<Option<Format>, RequestError> {
        const PARAM: &str = "response_format";
        let Some(raw) = self.response_format else { return Ok(None) };
        let raw: RawResponseFormat<'_> = borrowed(raw, PARAM)?;
        match raw.r#type.as_str() {
            "text" => Ok(None),
            "json_object" => Ok(Some(Format::JsonObject)),
            "json_schema" => {
                let schema = raw.json_schema.and_then(|schema| schema.schema);
                let detail = "json_schema.schema is missing";
                let schema = schema.ok_or_else(|| RequestError::invalid(PARAM, detail))?;
                Ok(Some(Format::JsonSchema(self::schema(schema, PARAM)?)))
            }
            other => {
                let what = format!("`{}`", other.chars().take(32).collect::<String>());
                Err(RequestError::Unsupported { param: PARAM, what })
            }
        }
    }
}

fn structured(raw: RawStructured<'_>, param: &'static str) -> Result<Vec<Format>, RequestError> {
    let mut formats = Vec::new();
    let text = |raw| -> Result<Option<String>, RequestError> {
        let text: Option<String> = field(raw, param)?;
        if let Some(text) = &text {
            check_len(text, caps::SCHEMA_BYTES, param)?;
        }
        Ok(text)
    };
    if let Some(json) = raw.json {
        // Some clients send the schema as JSON inside a string.
        let schema = match kind_of(json) {
            b'"' => text(Some(json))?.unwrap_or_default(),
            _ => schema(json, param)?,
        };
        formats.push(Format::JsonSchema(schema));
    }
    formats.extend(text(raw.regex)?.map(Format::Regex));
    formats.extend(text(raw.grammar)?.map(Format::Grammar));
    if field(raw.json_object, param)?.unwrap_or(false) {
        formats.push(Format::JsonObject);
    }
    if let Some(List(choices)) = field::<List<String, { caps::ALTERNATIVES }>>(raw.choice, param)? {
        if choices.is_empty() {
            return Err(RequestError::invalid(param, "choice is empty"));
        }
        let n_bytes: usize = choices.iter().map(String::len).sum();
        if n_bytes > caps::SCHEMA_BYTES {
            return Err(RequestError::invalid(param, "choice is too long"));
        }
        formats.push(Format::Choice(choices));
    }
    Ok(formats)
}

/// A schema as it came.
fn schema(raw: &RawValue, param: &'static str) -> Result<String, RequestError> {
    check_len(raw.get(), caps::SCHEMA_BYTES, param)?;
    Ok(raw.get().to_owned())
}
