//! From bytes to [`Gguf`], believing nothing.

use std::collections::BTreeMap;

use super::{Gguf, GgufArray, GgufTensor, GgufValue, types};
use crate::error::GgufError;

/// Most bytes of everything before the tensor data; real files stay below 50 MB.
const HEADER_BYTES_MAX: usize = 1 << 29;
/// Most metadata entries; real files have some dozens.
const METADATA_MAX: u64 = 1 << 16;
/// Most tensors; real files have some thousands.
const TENSORS_MAX: u64 = 1 << 20;
/// Most elements of a metadata array; the largest vocabularies have 2^18.
const ARRAY_LEN_MAX: u64 = 1 << 24;
/// Most bytes of a key or of a tensor's name; the format says 65535 and 64.
const NAME_BYTES_MAX: u64 = u16::MAX as u64;
/// Most dimensions of a tensor.
const DIMS_MAX: u32 = 4;

const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;

pub(super) fn parse(file: &[u8]) -> Result<Gguf, GgufError> {
    let magic = file.get(..4).unwrap_or(file);
    if magic != b"GGUF" {
        return Err(GgufError::Magic { found: magic.to_vec() });
    }
    let mut cursor = Cursor { header: &file[..file.len().min(HEADER_BYTES_MAX)], at: 4 };
    let version = cursor.u32("the version")?;
    // Versions are small: one whose low half is empty was written in the other byte order.
    if version & 0xffff == 0 && version != 0 {
        return Err(GgufError::BigEndian);
    }
    if !(2..=3).contains(&version) {
        return Err(GgufError::Version(version));
    }
    let n_tensors = limit("the number of tensors", cursor.u64("the counts")?, TENSORS_MAX)?;
    let n_metadata = limit("the number of keys", cursor.u64("the counts")?, METADATA_MAX)?;

    let mut metadata = BTreeMap::new();
    for _ in 0..n_metadata {
        let key = cursor.name("a metadata key")?;
        let value = cursor.value(&key)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(GgufError::Duplicate { what: "metadata key", name: key });
        }
    }

    let alignment = alignment(&metadata)?;
    let mut raw = BTreeMap::new();
    for _ in 0..n_tensors {
        let name = cursor.name("a tensor's name")?;
        let tensor = cursor.tensor(&name)?;
        if raw.insert(name.clone(), tensor).is_some() {
            return Err(GgufError::Duplicate { what: "tensor", name });
        }
    }

    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    let mut tensors = BTreeMap::new();
    for (name, tensor) in raw {
        let info = tensor.place(&name, data_start, alignment, file.len() as u64)?;
        tensors.insert(name, info);
    }
    Ok(Gguf { version, metadata, tensors })
}

fn alignment(metadata: &BTreeMap<String, GgufValue>) -> Result<u64, GgufError> {
    let alignment = match metadata.get("general.alignment") {
        None => ALIGNMENT_DEFAULT,
        Some(value) => u64::from(value.as_u32().ok_or(GgufError::Alignment(0))?),
    };
    if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
        return Err(GgufError::Alignment(alignment));
    }
    Ok(alignment)
}

fn limit(what: &'static str, found: u64, limit: u64) -> Result<u64, GgufError> {
    if found > limit { Err(GgufError::Limit { what, found, limit }) } else { Ok(found) }
}

/// A tensor as the file describes it, before its place is checked.
struct RawTensor {
    /// Fastest dimension first.
    dims: Vec<u64>,
    type_id: u32,
    offset: u64,
}

impl RawTensor {
    fn place(
        self,
        name: &str,
        data_start: u64,
        alignment: u64,
        file_len: u64,
    ) -> Result<GgufTensor, GgufError> {
        let tensor = || name.to_owned();
        let dtype = types::weight_type(self.type_id)
            .map_err(|type_name| GgufError::TensorType { tensor: tensor(), type_name })?;
        let bad_dims =
            || GgufError::TensorDims { tensor: tensor(), dtype, dims: self.dims.clone() };

        let mut shape = Vec::with_capacity(self.dims.len());
        for &dim in self.dims.iter().rev() {
            shape.push(usize::try_from(dim).ok().filter(|&dim| dim > 0).ok_or_else(bad_dims)?);
        }
        let (&cols, outer) = shape.split_last().ok_or_else(bad_dims)?;
        let len = outer
            .iter()
            .try_fold(dtype.row_bytes(cols).ok_or_else(bad_dims)?, |len, &dim| len.checked_mul(dim))
            .ok_or_else(bad_dims)?;

        if !self.offset.is_multiple_of(alignment) {
            let offset = self.offset;
            return Err(GgufError::TensorOffset { tensor: tensor(), offset, alignment });
        }
        let start = data_start.saturating_add(self.offset);
        let end = start.saturating_add(len as u64);
        if end > file_len {
            return Err(GgufError::Truncated { expected: end, actual: file_len });
        }
        // Both fit `usize`: they are at most the length of a slice.
        Ok(GgufTensor { dtype, shape, start: start as usize, len })
    }
}

/// A place in the header that only moves forward.
struct Cursor<'a> {
    header: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, what: &'static str, need: u64) -> Result<&'a [u8], GgufError> {
        let left = self.header.len() - self.at;
        if need > left as u64 {
            return Err(GgufError::Header { what, at: self.at, need, left });
        }
        // It fits `usize`: it is at most the length of a slice.
        let end = self.at + need as usize;
        let bytes = &self.header[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let bytes = self.take(what, N as u64)?;
        Ok(bytes.try_into().expect("take gives as many bytes as asked for"))
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn name(&mut self, what: &'static str) -> Result<String, GgufError> {
        let len = limit("the length of a name", self.u64(what)?, NAME_BYTES_MAX)?;
        let bytes = self.take(what, len)?;
        let text = std::str::from_utf8(bytes);
        Ok(text.map_err(|_| GgufError::Text { what: what.to_owned() })?.to_owned())
    }

    fn text(&mut self, key: &str) -> Result<String, GgufError> {
        let len = self.u64("a string")?;
        let bytes = self.take("a string", len)?;
        let text = std::str::from_utf8(bytes);
        Ok(text.map_err(|_| GgufError::Text { what: format!("metadata {key}") })?.to_owned())
    }

    fn value(&mut self, key: &str) -> Result<GgufValue, GgufError> {
        const WHAT: &str = "a metadata value";
        let kind = self.u32(WHAT)?;
        Ok(match Kind::new(kind) {
            Some(Kind::Bool) => GgufValue::Bool(self.array::<1>(WHAT)? != [0]),
            Some(Kind::Unsigned(width)) => GgufValue::Unsigned(unsigned(self.take(WHAT, width)?)),
            Some(Kind::Signed(width)) => GgufValue::Signed(signed(self.take(WHAT, width)?)),
            Some(Kind::Float(width)) => GgufValue::Float(float(self.take(WHAT, width)?)),
            Some(Kind::Text) => GgufValue::Text(self.text(key)?),
            Some(Kind::Array) => GgufValue::Array(self.values(key)?),
            None => return Err(GgufError::ValueType { key: key.to_owned(), found: kind }),
        })
    }

    fn values(&mut self, key: &str) -> Result<GgufArray, GgufError> {
        const WHAT: &str = "a metadata array";
        let kind = self.u32(WHAT)?;
        let len = limit("the length of an array", self.u64(WHAT)?, ARRAY_LEN_MAX)?;
        Ok(match Kind::new(kind) {
            Some(Kind::Bool) => {
                GgufArray::Bool(self.take(WHAT, len)?.iter().map(|&byte| byte != 0).collect())
            }
            // Products cannot overflow: the length is below 2^24, the width at most 8.
            Some(Kind::Unsigned(width)) => {
                let bytes = self.take(WHAT, len * width)?;
                GgufArray::Unsigned(bytes.chunks_exact(width as usize).map(unsigned).collect())
            }
            Some(Kind::Signed(width)) => {
                let bytes = self.take(WHAT, len * width)?;
                GgufArray::Signed(bytes.chunks_exact(width as usize).map(signed).collect())
            }
            Some(Kind::Float(width)) => {
                let bytes = self.take(WHAT, len * width)?;
                GgufArray::Float(bytes.chunks_exact(width as usize).map(float).collect())
            }
            Some(Kind::Text) => {
                // Each string takes at least the eight bytes of its length.
                let left = self.header.len() - self.at;
                if len * 8 > left as u64 {
                    return Err(GgufError::Header { what: WHAT, at: self.at, need: len * 8, left });
                }
                GgufArray::Text((0..len).map(|_| self.text(key)).collect::<Result<_, _>>()?)
            }
            Some(Kind::Array) | None => {
                return Err(GgufError::ValueType { key: key.to_owned(), found: kind });
            }
        })
    }

    fn tensor(&mut self, name: &str) -> Result<RawTensor, GgufError> {
        const WHAT: &str = "a tensor's description";
        let n_dims = self.u32(WHAT)?;
        if n_dims > DIMS_MAX {
            let (found, limit) = (u64::from(n_dims), u64::from(DIMS_MAX));
            return Err(GgufError::Limit { what: "the number of dimensions", found, limit });
        }
        let dims = (0..n_dims).map(|_| self.u64(WHAT)).collect::<Result<Vec<_>, _>>()?;
        let type_id = self.u32(WHAT)?;
        let offset = self.u64(WHAT)?;
        if name.is_empty() {
            return Err(GgufError::Text { what: "an empty tensor name".to_owned() });
        }
        Ok(RawTensor { dims, type_id, offset })
    }
}

/// Kinds of metadata values, numbers with their width in bytes.
enum Kind {
    Bool,
    Unsigned(u64),
    Signed(u64),
    Float(u64),
    Text,
    Array,
}

impl Kind {
    fn new(id: u32) -> Option<Kind> {
        Some(match id {
            0 => Kind::Unsigned(1),
            1 => Kind::Signed(1),
            2 => Kind::Unsigned(2),
            3 => Kind::Signed(2),
            4 => Kind::Unsigned(4),
            5 => Kind::Signed(4),
            6 => Kind::Float(4),
            7 => Kind::Bool,
            8 => Kind::Text,
            9 => Kind::Array,
            10 => Kind::Unsigned(8),
            11 => Kind::Signed(8),
            12 => Kind::Float(8),
            _ => return None,
        })
    }
}

/// A little-endian number of up to eight bytes.
fn unsigned(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// The same, extended by its sign bit.
fn signed(bytes: &[u8]) -> i64 {
    let shift = 64 - 8 * bytes.len();
    (unsigned(bytes) << shift) as i64 >> shift
}

fn float(bytes: &[u8]) -> f64 {
    match bytes.len() {
        4 => f64::from(f32::from_bits(unsigned(bytes) as u32)),
        _ => f64::from_bits(unsigned(bytes)),
    }
}
