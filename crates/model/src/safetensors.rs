//! Safetensors: one file, or several with an index, mapped into memory.
//!
//! The header's JSON is parsed and its consistency (shapes, sizes, no gaps) checked by the
//! `safetensors` crate; lengths that could overflow are checked here before they are used. A type
//! that this engine does not read is an error only when the tensor is asked for, because files carry
//! tensors that nobody needs.

use std::collections::BTreeMap;
use std::path::Path;

use nuthatch_backend::WeightType;
use nuthatch_store::mapped::MappedFile;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use crate::error::{ModelError, SafetensorsError};
use crate::source::{RawTensor, read_small};

/// Most bytes of a header; a model of 1,000 layers stays below 10 MB.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The types that are read.
const TYPES: [(Dtype, WeightType); 3] =
    [(Dtype::F32, WeightType::F32), (Dtype::F16, WeightType::F16), (Dtype::BF16, WeightType::BF16)];

/// The parsed header of one safetensors file.
#[derive(Clone, Debug)]
pub struct SafetensorsHeader {
    metadata: Metadata,
    /// Where the tensors' data begins in the file.
    data_start: usize,
}

impl SafetensorsHeader {
    /// Parses the header of a whole file, and checks that the tensors fill the rest of it exactly.
    pub fn parse(file: &[u8]) -> Result<Self, SafetensorsError> {
        let actual = file.len() as u64;
        let Some(prefix) = file.first_chunk::<8>() else {
            return Err(SafetensorsError::Header { expected: 8, actual });
        };
        let header_len = u64::from_le_bytes(*prefix);
        if header_len > HEADER_BYTES_MAX {
            let (found, limit) = (header_len, HEADER_BYTES_MAX);
            return Err(SafetensorsError::HeaderLimit { found, limit });
        }
        let data_start = 8 + header_len as usize;
        let Some(json) = file.get(8..data_start) else {
            return Err(SafetensorsError::Header { expected: 8 + header_len, actual });
        };
        let metadata: Metadata = serde_json::from_slice(json)?;
        let expected = (metadata.data_len() as u64).saturating_add(data_start as u64);
        if expected != actual {
            return Err(SafetensorsError::Length { expected, actual });
        }
        Ok(SafetensorsHeader { metadata, data_start })
    }

    /// Names of all tensors, in the order of their data.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// A tensor of `file`, which must be the file that this header was parsed from.
    pub fn tensor<'a>(
        &'a self,
        file: &'a [u8],
        name: &str,
    ) -> Result<Option<RawTensor<'a>>, SafetensorsError> {
        let Some(info) = self.metadata.info(name) else { return Ok(None) };
        let Some(&(_, dtype)) = TYPES.iter().find(|(known, _)| *known == info.dtype) else {
            let type_name = format!("{:?}", info.dtype);
            return Err(SafetensorsError::TensorType { tensor: name.to_owned(), type_name });
        };
        // Offsets were checked against the length of the data when the header was parsed.
        let (start, end) = info.data_offsets;
        let bytes = &file[self.data_start + start..self.data_start + end];
        Ok(Some(RawTensor { dtype, shape: &info.shape, bytes }))
    }
}

/// The tensors of a model directory.
#[derive(Debug)]
pub(crate) struct SafetensorsFiles {
    shards: Vec<Shard>,
    /// For each tensor, the shard that has it.
    index: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct Shard {
    map: MappedFile,
    header: SafetensorsHeader,
}

impl Shard {
    fn open(path: &Path) -> Result<Shard, ModelError> {
        let map = MappedFile::open(path)
            .map_err(|source| ModelError::Io { path: path.to_owned(), source })?;
        let header = SafetensorsHeader::parse(&map)
            .map_err(|source| ModelError::Safetensors { path: path.to_owned(), source })?;
        Ok(Shard { map, header })
    }
}

impl SafetensorsFiles {
    /// Opens `model.safetensors`, or else the files of `model.safetensors.index.json`.
    pub(crate) fn open(dir: &Path) -> Result<Self, ModelError> {
        let single = dir.join("model.safetensors");
        if single.is_file() {
            let shard = Shard::open(&single)?;
            let index = shard.header.names().into_iter().map(|name| (name, 0)).collect();
            return Ok(SafetensorsFiles { shards: vec![shard], index });
        }
        let index_path = dir.join("model.safetensors.index.json");
        if !index_path.is_file() {
            let reason = "it has neither model.safetensors nor model.safetensors.index.json";
            return Err(ModelError::NotAModel { path: dir.to_owned(), reason });
        }
        Self::open_sharded(dir, &index_path)
    }

    fn open_sharded(dir: &Path, index_path: &Path) -> Result<Self, ModelError> {
        let fail = |source| ModelError::Safetensors { path: index_path.to_owned(), source };
        let weight_map = parse_index(&read_small(index_path)?).map_err(fail)?;
        let mut numbers = BTreeMap::new();
        let mut shards = Vec::new();
        let mut index = BTreeMap::new();
        for (tensor, file) in weight_map {
            let number = match numbers.get(&file) {
                Some(&number) => number,
                None => {
                    shards.push(Shard::open(&dir.join(&file))?);
                    numbers.insert(file.clone(), shards.len() - 1);
                    shards.len() - 1
                }
            };
            if shards[number].header.metadata.info(&tensor).is_none() {
                return Err(fail(SafetensorsError::NotInShard { tensor, file }));
            }
            index.insert(tensor, number);
        }
        Ok(SafetensorsFiles { shards, index })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, SafetensorsError> {
        let Some(&number) = self.index.get(name) else { return Ok(None) };
        let shard = &self.shards[number];
        shard.header.tensor(&shard.map, name)
    }

    /// Bytes of all tensors.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.header.metadata.data_len() as u64).sum()
    }
}

/// The map from tensors to files of an index; every file is a plain name beside the index.
pub fn parse_index(json: &[u8]) -> Result<BTreeMap<String, String>, SafetensorsError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: Option<BTreeMap<String, String>>,
    }
    let index: Index = serde_json::from_slice(json)?;
    let weight_map = index.weight_map.ok_or(SafetensorsError::NoWeightMap)?;
    match weight_map.values().find(|file| !is_plain_name(file)) {
        Some(file) => Err(SafetensorsError::ShardName { file: file.clone() }),
        None => Ok(weight_map),
    }
}

/// Whether a name can only mean a file in the directory itself, on any system.
fn is_plain_name(name: &str) -> bool {
    name.ends_with(".safetensors")
        && !name.starts_with('.')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
}
