//! JSON into template values, and back by `tojson` as Python's `json.dumps` writes it.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

use super::TemplateError;

/// Deepest nesting of arguments and of what `tojson` writes; as deep as the JSON parser goes.
const DEPTH_MAX: usize = 128;

/// A JSON value for a template.
pub(super) fn value(json: &Json, argument: &'static str) -> Result<Value, TemplateError> {
    convert(json, 0).ok_or(TemplateError::TooDeep { argument, max: DEPTH_MAX })
}

/// A list of JSON values for a template.
pub(super) fn list(json: &[Json], argument: &'static str) -> Result<Value, TemplateError> {
    json.iter().map(|entry| value(entry, argument)).collect()
}

/// `None` where the nesting is too deep.
fn convert(json: &Json, depth: usize) -> Option<Value> {
    if depth > DEPTH_MAX {
        return None;
    }
    Some(match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(n), _) => Value::from(n),
            (None, Some(n)) => Value::from(n),
            (None, None) => Value::from(number.as_f64()?),
        },
        Json::String(text) => Value::from(text),
        Json::Array(entries) => {
            entries.iter().map(|entry| convert(entry, depth + 1)).collect::<Option<Value>>()?
        }
        Json::Object(entries) => {
            let mut pairs = Vec::with_capacity(entries.len());
            for (key, entry) in entries {
                pairs.push((key.as_str(), convert(entry, depth + 1)?));
            }
            Value::from_pairs(pairs)
        }
    })
}

/// The filter `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
pub(super) fn tojson(
    value: Value,
    ensure_ascii: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let named_ascii: Option<Value> = options.get("ensure_ascii")?;
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Value> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;

    let indent = indent.filter(|indent| !indent.is_none()).map(indent_text).transpose()?;
    let (item, key) = match separators.filter(|separators| !separators.is_none()) {
        Some(pair) => (separator(&pair, 0)?, separator(&pair, 1)?),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer {
        out: String::new(),
        ensure_ascii: ensure_ascii.or(named_ascii).is_some_and(|value| value.is_true()),
        sort_keys: sort_keys.unwrap_or(false),
        indent,
        item_separator: item,
        key_separator: key,
        depth: 0,
    };
    writer.write(&value)?;
    Ok(writer.out)
}

/// The text of one level: so many spaces, or the text itself.
fn indent_text(indent: Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        return Ok(text.to_owned());
    }
    match indent.as_usize() {
        Some(n) if n <= 16 => Ok(" ".repeat(n)),
        _ => Err(invalid("tojson: indent must be a text or a number up to 16")),
    }
}

fn separator(pair: &Value, idx: usize) -> Result<String, Error> {
    let text = pair.get_item_by_index(idx)?;
    let text = text.as_str().ok_or_else(|| invalid("tojson: separators must be two texts"))?;
    Ok(text.to_owned())
}

fn invalid(detail: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

#[derive(Default)]
struct Writer {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    depth: usize,
}

impl Writer {
    fn write(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.write_number(value),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let entries: Vec<Value> = value.try_iter()?.collect();
                self.write_entries('[', ']', &entries, |writer, entry| writer.write(entry))?;
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    let entry = value.get_item(&key)?;
                    pairs.push((key_text(&key)?, entry));
                }
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.write_entries('{', '}', &pairs, |writer, (key, entry)| {
                    writer.write_string(key);
                    let separator = writer.key_separator.clone();
                    writer.out.push_str(&separator);
                    writer.write(entry)
                })?;
            }
            ValueKind::Undefined | ValueKind::Bytes | ValueKind::Plain | ValueKind::Invalid | _ => {
                let kind = value.kind();
                let detail = format!("tojson: {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::BadSerialization, detail));
            }
        }
        Ok(())
    }

    fn write_entries<T>(
        &mut self,
        open: char,
        close: char,
        entries: &[T],
        mut write: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(invalid("tojson: nested too deeply"));
        }
        for (i, entry) in entries.iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.item_separator);
            }
            self.line_break();
            write(self, entry)?;
        }
        self.depth -= 1;
        if !entries.is_empty() {
            self.line_break();
        }
        self.out.push(close);
        Ok(())
    }

    fn line_break(&mut self) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..self.depth {
                self.out.push_str(indent);
            }
        }
    }

    fn write_number(&mut self, value: &Value) {
        match f64::try_from(value.clone()) {
            Ok(number) if !value.is_integer() => self.out.push_str(&python_float(number)),
            _ => {
                let _ = write!(self.out, "{value}");
            }
        }
    }

    fn write_string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && !c.is_ascii() => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// The text of a key. Python writes numbers, truth values and none as they look in JSON.
fn key_text(key: &Value) -> Result<String, Error> {
    if let Some(text) = key.as_str() {
        return Ok(text.to_owned());
    }
    let kind = key.kind();
    if !matches!(kind, ValueKind::None | ValueKind::Bool | ValueKind::Number) {
        return Err(Error::new(ErrorKind::NonKey, format!("tojson: {kind} is no key")));
    }
    let mut writer = Writer::default();
    writer.write(key)?;
    Ok(writer.out)
}

/// A float as Python's `repr` writes it: the shortest digits, with an exponent from 1e16 and below
/// 1e-4.
fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{number:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_look_as_in_python() {
        for (number, expect) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(python_float(number), expect);
        }
    }
}
