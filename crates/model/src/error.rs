//! What can be wrong with a model's files.
//!
//! Every variant carries facts: which file, which key or tensor, what was found, what was expected.

use std::path::PathBuf;

use nuthatch_backend::WeightType;

use crate::config::Architecture;

/// A model that cannot be loaded, and why.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The path is neither a model directory nor a GGUF file.
    #[error("{path} is not a model: {reason}", path = path.display())]
    NotAModel {
        /// What was given.
        path: PathBuf,
        /// What is missing.
        reason: &'static str,
    },
    /// The model's description is wrong or not supported.
    #[error("{path}: {source}", path = path.display())]
    Config {
        /// The file that holds the description.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// A GGUF file is damaged or not supported.
    #[error("{path}: {source}", path = path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: GgufError,
    },
    /// A safetensors file or its index is damaged or not supported.
    #[error("{path}: {source}", path = path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: SafetensorsError,
    },
    /// A tensor that the model needs is in none of its files.
    #[error("tensor {name} is missing")]
    MissingTensor {
        /// The file's name of it.
        name: String,
    },
    /// The file stores several matrices as one, which is not supported.
    #[error("tensor {name} is missing, but the file has {fused}: fused weights are not supported")]
    FusedTensor {
        /// The tensor that was looked for.
        name: String,
        /// The one that the file has in its place.
        fused: String,
    },
    /// A tensor's shape is not what the configuration says.
    #[error("tensor {name} has shape {found:?}, but the configuration asks for {expected:?}")]
    TensorShape {
        /// The file's name of it.
        name: String,
        /// What the configuration says.
        expected: Vec<usize>,
        /// What the file has.
        found: Vec<usize>,
    },
    /// A vector of norm weights or biases is stored in a type that is for matrices only.
    #[error("tensor {name} has type {dtype}, but a vector must be F32, F16 or BF16")]
    VectorType {
        /// The file's name of it.
        name: String,
        /// Its type.
        dtype: WeightType,
    },
}

/// A model description that is wrong or not supported.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The description is not JSON.
    #[error("not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A value that has no default is not there.
    #[error("{key} is missing")]
    Missing {
        /// Its key.
        key: String,
    },
    /// A value of the wrong type or outside its range.
    #[error("{key} is {found}, but must be {allowed}")]
    Invalid {
        /// Its key.
        key: String,
        /// What was found.
        found: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// An architecture that this engine does not run.
    #[error("architecture {found} is not supported; supported are {}", Architecture::LIST)]
    Architecture {
        /// The file's name of it.
        found: String,
    },
    /// A property that this engine does not run.
    #[error("{key} is {found}, which is not supported: {reason}")]
    Unsupported {
        /// Its key.
        key: String,
        /// What was found.
        found: String,
        /// What would be supported.
        reason: &'static str,
    },
}

/// A GGUF file that is damaged or not supported.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file does not begin with GGUF's magic number.
    #[error("not a GGUF file: it begins with {found:02x?}")]
    Magic {
        /// The first bytes.
        found: Vec<u8>,
    },
    /// The file is written in big-endian order.
    #[error("a big-endian GGUF file is not supported")]
    BigEndian,
    /// A version of the format that is not known.
    #[error("GGUF version {0} is not supported, only 2 and 3")]
    Version(u32),
    /// The file ends inside its header.
    #[error("the file ends inside its header: {what} needs {need} bytes at {at}, {left} are left")]
    Header {
        /// What was being read.
        what: &'static str,
        /// Where.
        at: usize,
        /// Bytes that it needs.
        need: u64,
        /// Bytes that are there.
        left: usize,
    },
    /// The file is shorter than its header says.
    #[error("the file is truncated: {expected} bytes expected, {actual} found")]
    Truncated {
        /// Bytes that the tensors need.
        expected: u64,
        /// Bytes of the file.
        actual: u64,
    },
    /// A count or length above any sensible one.
    #[error("{what} is {found}, more than the {limit} that are accepted")]
    Limit {
        /// What was counted.
        what: &'static str,
        /// What the file claims.
        found: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// Text that is not UTF-8.
    #[error("{what} is not UTF-8")]
    Text {
        /// What was being read.
        what: String,
    },
    /// A metadata value of an unknown type, or an array of arrays.
    #[error("metadata {key} has value type {found}, which is not supported")]
    ValueType {
        /// The key.
        key: String,
        /// The number of the type.
        found: u32,
    },
    /// The same key or tensor twice.
    #[error("{what} {name} appears twice")]
    Duplicate {
        /// Key or tensor.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The alignment is not a power of two, or too large.
    #[error("general.alignment is {0}, but must be a power of two up to 1048576")]
    Alignment(u64),
    /// A storage type that this engine does not read.
    #[error("tensor {tensor} has type {type_name}, which is not supported")]
    TensorType {
        /// The tensor.
        tensor: String,
        /// GGML's name of the type, or its number.
        type_name: String,
    },
    /// A tensor's dimensions are zero, too many, overflow, or do not fill whole blocks.
    #[error("tensor {tensor} of type {dtype} cannot have dimensions {dims:?}")]
    TensorDims {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: WeightType,
        /// Its dimensions, fastest first.
        dims: Vec<u64>,
    },
    /// A tensor's place is not a multiple of the alignment.
    #[error("tensor {tensor} begins at {offset}, which is not a multiple of {alignment}")]
    TensorOffset {
        /// The tensor.
        tensor: String,
        /// Where it begins in the data part.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// The parts of a split model do not fit together.
    #[error("part {part} of a split model says {key} is {found}, but {expected} was expected")]
    Split {
        /// The part, counted from 1.
        part: u64,
        /// The metadata key.
        key: &'static str,
        /// What it says.
        found: String,
        /// What was expected.
        expected: String,
    },
}

/// A safetensors file or index that is damaged or not supported.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
    /// The file ends inside its header.
    #[error("the file is truncated: the header alone needs {expected} bytes, {actual} found")]
    Header {
        /// Bytes of the header, its length included.
        expected: u64,
        /// Bytes of the file.
        actual: u64,
    },
    /// The header is longer than any sensible one.
    #[error("the header claims {found} bytes, more than the {limit} that are accepted")]
    HeaderLimit {
        /// What the file claims.
        found: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// The header does not describe its tensors consistently.
    #[error("invalid header: {0}")]
    Metadata(#[from] serde_json::Error),
    /// The file's length is not what its header says.
    #[error("the file is truncated or has bytes to spare: {expected} expected, {actual} found")]
    Length {
        /// Bytes that header and tensors need.
        expected: u64,
        /// Bytes of the file.
        actual: u64,
    },
    /// A storage type that this engine does not read.
    #[error("tensor {tensor} has type {type_name}, but only F32, F16 and BF16 are supported")]
    TensorType {
        /// The tensor.
        tensor: String,
        /// The format's name of the type.
        type_name: String,
    },
    /// The index names a file that is not a plain name beside it.
    #[error("the index names {file:?}, which is not a .safetensors file beside it")]
    ShardName {
        /// What the index says.
        file: String,
    },
    /// The index has no map of tensors to files.
    #[error("the index has no weight_map")]
    NoWeightMap,
    /// The index says that a tensor is in a file which does not have it.
    #[error("tensor {tensor} is not in {file}, where the index says it is")]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
}
