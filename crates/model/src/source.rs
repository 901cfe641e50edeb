//! Tensors by the names of their files, whichever format they come in.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use nuthatch_backend::WeightType;
use nuthatch_store::mapped::MappedFile;

use crate::error::{GgufError, ModelError};
use crate::gguf::Gguf;
use crate::random::RandomWeights;
use crate::safetensors::SafetensorsFiles;

/// Most bytes of a JSON file that is read whole.
const SMALL_FILE_BYTES_MAX: u64 = 64 << 20;

/// One tensor as its file has it.
#[derive(Clone, Copy, Debug)]
pub struct RawTensor<'a> {
    /// How its weights are stored.
    pub dtype: WeightType,
    /// Slowest dimension first, as `[rows, cols]`.
    pub shape: &'a [usize],
    /// The weights, little-endian, not necessarily aligned.
    pub bytes: &'a [u8],
}

impl RawTensor<'_> {
    /// The weights as floats, or `None` if they are quantised.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        Some(match self.dtype {
            WeightType::F32 => {
                let (values, _) = self.bytes.as_chunks::<4>();
                values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
            }
            WeightType::F16 => {
                let (values, _) = self.bytes.as_chunks::<2>();
                values.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect()
            }
            WeightType::BF16 => {
                let (values, _) = self.bytes.as_chunks::<2>();
                values.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect()
            }
            WeightType::Q4_0
            | WeightType::Q4_1
            | WeightType::Q5_0
            | WeightType::Q5_1
            | WeightType::Q8_0
            | WeightType::Q2_K
            | WeightType::Q3_K
            | WeightType::Q4_K
            | WeightType::Q5_K
            | WeightType::Q6_K => return None,
        })
    }
}

/// Where a model's tensors come from.
#[derive(Debug)]
pub(crate) enum Source {
    Safetensors { dir: PathBuf, files: SafetensorsFiles },
    Gguf(GgufFiles),
    Random(RandomWeights),
}

impl Source {
    pub(crate) fn contains(&self, name: &str) -> bool {
        match self {
            Source::Safetensors { files, .. } => files.contains(name),
            Source::Gguf(files) => files.contains(name),
            Source::Random(_) => true,
        }
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, ModelError> {
        match self {
            Source::Safetensors { dir, files } => files
                .tensor(name)
                .map_err(|source| ModelError::Safetensors { path: dir.clone(), source }),
            Source::Gguf(files) => Ok(files.tensor(name)),
            Source::Random(_) => Ok(None),
        }
    }

    /// Names of all tensors, in alphabetical order.
    pub(crate) fn names(&self) -> Vec<&str> {
        match self {
            Source::Safetensors { files, .. } => files.names().collect(),
            Source::Gguf(files) => files.names(),
            Source::Random(_) => Vec::new(),
        }
    }

    /// Bytes of all tensors.
    pub(crate) fn data_bytes(&self) -> u64 {
        match self {
            Source::Safetensors { files, .. } => files.data_bytes(),
            Source::Gguf(files) => files.data_bytes(),
            Source::Random(_) => 0,
        }
    }
}

/// A GGUF model of one or more parts.
#[derive(Debug)]
pub struct GgufFiles {
    /// At least one; the first has the metadata.
    parts: Vec<GgufPart>,
}

#[derive(Debug)]
struct GgufPart {
    map: MappedFile,
    header: Gguf,
}

impl GgufFiles {
    /// Opens a file, and the other parts if it is the first of a split model.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let first = open_part(path)?;
        let fail = |source, path: &Path| ModelError::Gguf { path: path.to_owned(), source };
        let count = split_key(&first.header, "split.count").unwrap_or(1);
        let mut files = GgufFiles { parts: vec![first] };
        if count <= 1 {
            return Ok(files);
        }
        check_split(&files.parts[0].header, 1, count).map_err(|e| fail(e, path))?;
        for number in 2..=count {
            let part_path = split_path(path, number, count).ok_or_else(|| {
                let reason = "its name does not end in -00001-of-NNNNN.gguf, but it is split";
                ModelError::NotAModel { path: path.to_owned(), reason }
            })?;
            let part = open_part(&part_path)?;
            check_split(&part.header, number, count).map_err(|e| fail(e, &part_path))?;
            if let Some(name) = part.header.tensors.keys().find(|name| files.contains(name)) {
                let name = name.clone();
                return Err(fail(GgufError::Duplicate { what: "tensor", name }, &part_path));
            }
            files.parts.push(part);
        }
        Ok(files)
    }

    /// The metadata and the tensors of the first part.
    pub fn header(&self) -> &Gguf {
        &self.parts[0].header
    }

    /// Whether any part has the tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.parts.iter().any(|part| part.header.tensors.contains_key(name))
    }

    /// The tensor, from whichever part has it.
    pub fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        self.parts.iter().find_map(|part| {
            let info = part.header.tensors.get(name)?;
            // The range was checked against the file when its header was parsed.
            let bytes = &part.map[info.start..info.start + info.len];
            Some(RawTensor { dtype: info.dtype, shape: &info.shape, bytes })
        })
    }

    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self
            .parts
            .iter()
            .flat_map(|part| part.header.tensors.keys().map(String::as_str))
            .collect();
        names.sort_unstable();
        names
    }

    fn data_bytes(&self) -> u64 {
        let tensors = self.parts.iter().flat_map(|part| part.header.tensors.values());
        tensors.map(|tensor| tensor.len as u64).sum()
    }
}

fn open_part(path: &Path) -> Result<GgufPart, ModelError> {
    let map = MappedFile::open(path)
        .map_err(|source| ModelError::Io { path: path.to_owned(), source })?;
    let header =
        Gguf::parse(&map).map_err(|source| ModelError::Gguf { path: path.to_owned(), source })?;
    Ok(GgufPart { map, header })
}

fn split_key(header: &Gguf, key: &str) -> Option<u32> {
    header.metadata.get(key)?.as_u32()
}

/// Checks that a part is the one that its place says; `number` counts from 1, the file from 0.
fn check_split(header: &Gguf, number: u32, count: u32) -> Result<(), GgufError> {
    for (key, expected) in [("split.no", number - 1), ("split.count", count)] {
        let found = split_key(header, key);
        if found != Some(expected) {
            let found = found.map_or_else(|| "missing".to_owned(), |found| found.to_string());
            let (part, expected) = (u64::from(number), expected.to_string());
            return Err(GgufError::Split { part, key, found, expected });
        }
    }
    Ok(())
}

/// The path of another part, given that of the first.
fn split_path(first: &Path, number: u32, count: u32) -> Option<PathBuf> {
    let name = first.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-00001-of-{count:05}.gguf"))?;
    Some(first.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf")))
}

/// Reads a small file whole; one that is too large is an error.
pub(crate) fn read_small(path: &Path) -> Result<Vec<u8>, ModelError> {
    let fail = |source| ModelError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(fail)?;
    let mut bytes = Vec::new();
    file.take(SMALL_FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > SMALL_FILE_BYTES_MAX {
        return Err(fail(std::io::Error::new(
            std::io::ErrorKind::FileTooLarge,
            "larger than any file of its kind",
        )));
    }
    Ok(bytes)
}
