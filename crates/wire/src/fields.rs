//! Reading single fields, with their names in the errors, and lists that end at their cap.
//!
//! An object is first cut into the raw text of its known fields, which copies nothing and has no
//! depth; each field is then read by its own type. So an error can say which field it is about, and
//! nothing is stored of what nobody asked for.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{
    Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor,
};
use serde_json::value::RawValue;

use crate::RequestError;
use crate::caps;

/// A field that is absent, null, or some JSON.
pub(crate) type Raw<'a> = Option<&'a RawValue>;

/// Cuts a body into its fields.
pub(crate) fn object<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, RequestError> {
    if body.len() > caps::BODY_BYTES {
        return Err(RequestError::BodyTooLong { len: body.len(), max: caps::BODY_BYTES });
    }
    // A list would be taken for the fields in their order.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(RequestError::Json { detail: "it is no JSON object".to_owned() });
    }
    serde_json::from_slice(body).map_err(|error| RequestError::Json { detail: error.to_string() })
}

/// Reads a field; absent and null are `None`.
pub(crate) fn field<T: DeserializeOwned>(
    raw: Raw<'_>,
    param: &'static str,
) -> Result<Option<T>, RequestError> {
    let Some(raw) = raw else { return Ok(None) };
    serde_json::from_str(raw.get())
        .map(Some)
        .map_err(|error| RequestError::invalid(param, without_place(&error)))
}

/// Cuts an object inside a field into its own fields.
pub(crate) fn borrowed<'a, T: Deserialize<'a>>(
    raw: &'a RawValue,
    param: &'static str,
) -> Result<T, RequestError> {
    if kind_of(raw) != b'{' {
        return Err(RequestError::invalid(param, "is no JSON object"));
    }
    serde_json::from_str(raw.get())
        .map_err(|error| RequestError::invalid(param, without_place(&error)))
}

/// What is wrong, without the position, which is that inside the field and helps nobody.
fn without_place(error: &serde_json::Error) -> String {
    let mut detail = error.to_string();
    let end = detail.rfind(" at line ").unwrap_or(detail.len());
    detail.truncate(end);
    detail
}

/// A number within a range.
pub(crate) fn number<T>(
    raw: Raw<'_>,
    param: &'static str,
    range: std::ops::RangeInclusive<T>,
) -> Result<Option<T>, RequestError>
where
    T: DeserializeOwned + PartialOrd + fmt::Display,
{
    let value: Option<T> = field(raw, param)?;
    match value {
        Some(value) if !range.contains(&value) => {
            let (low, high) = (range.start(), range.end());
            let detail = format!("{value} is out of range, it must be from {low} to {high}");
            Err(RequestError::invalid(param, detail))
        }
        value => Ok(value),
    }
}

/// A short text.
pub(crate) fn name(raw: Raw<'_>, param: &'static str) -> Result<Option<String>, RequestError> {
    let text: Option<String> = field(raw, param)?;
    if let Some(text) = &text {
        check_len(text, caps::NAME_BYTES, param)?;
    }
    Ok(text)
}

/// Checks the bytes of a text.
pub(crate) fn check_len(text: &str, max: usize, param: &'static str) -> Result<(), RequestError> {
    if text.len() <= max {
        return Ok(());
    }
    let detail = format!("{} bytes, but at most {max} are allowed", text.len());
    Err(RequestError::invalid(param, detail))
}

/// The first character of a field's JSON: what kind of value it is.
pub(crate) fn kind_of(raw: &RawValue) -> u8 {
    raw.get().trim_start().bytes().next().unwrap_or(b' ')
}

/// A list that is refused when it has more than `MAX` entries, before they are stored.
#[derive(Debug)]
pub(crate) struct List<T, const MAX: usize>(pub(crate) Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for ListVisitor<T, MAX> {
            type Value = List<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX} entries")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = seq.next_element()? {
                    if list.len() == MAX {
                        return Err(A::Error::custom(format_args!("more than {MAX} entries")));
                    }
                    list.push(entry);
                }
                Ok(List(list))
            }
        }
        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

/// An object as a list of pairs, refused when it has more than `MAX`.
#[derive(Debug)]
pub(crate) struct Pairs<T, const MAX: usize>(pub(crate) Vec<(String, T)>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Pairs<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for PairsVisitor<T, MAX> {
            type Value = Pairs<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an object of at most {MAX} entries")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    if pairs.len() == MAX {
                        return Err(A::Error::custom(format_args!("more than {MAX} entries")));
                    }
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(PairsVisitor(PhantomData))
    }
}
