//! A model on disk: a directory in Hugging Face's layout, or a GGUF file.
//!
//! Opening reads the description and checks every tensor's presence and shape, so that a file which
//! does not fit is refused before a device allocates anything. The weights stay in the mapped files;
//! only small vectors are copied.

use std::path::{Path, PathBuf};

use nuthatch_backend::WeightType;
use sha2::{Digest, Sha256};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::gguf::Gguf;
use crate::names::{Naming, TensorName};
use crate::narrow::narrow_bytes;
use crate::random::RandomWeights;
use crate::rope::RopeOverride;
use crate::safetensors::SafetensorsFiles;
use crate::source::{Source, read_small};

pub use crate::safetensors::{SafetensorsHeader, parse_index};
pub use crate::source::{GgufFiles, RawTensor};

/// Bytes of each of the three samples that the fingerprint takes of a tensor.
const SAMPLE_BYTES: usize = 256;

/// The files of one model, open and checked.
#[derive(Debug)]
pub struct ModelFiles {
    config: ModelConfig,
    source: Source,
    path: PathBuf,
}

/// One tensor, in the file's own bytes.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    /// How its weights are stored.
    pub dtype: WeightType,
    /// Slowest dimension first, as `[rows, cols]`.
    pub shape: Vec<usize>,
    /// The weights, little-endian, not necessarily aligned.
    pub bytes: &'a [u8],
}

/// Where a model's tokenizer is.
#[derive(Debug)]
pub enum TokenizerFiles<'a> {
    /// In the metadata of the GGUF file, under `tokenizer.`.
    Gguf(&'a Gguf),
    /// In files of the model's directory; `None` where there is no such file.
    Directory {
        /// `tokenizer.json`
        tokenizer: Option<PathBuf>,
        /// `tokenizer_config.json`
        tokenizer_config: Option<PathBuf>,
        /// `chat_template.jinja`
        chat_template: Option<PathBuf>,
        /// `generation_config.json`
        generation_config: Option<PathBuf>,
    },
}

impl ModelFiles {
    /// Opens a model directory, or a GGUF file (the first part of a split one opens them all).
    ///
    /// Every tensor that the configuration asks for is there and has its shape, or it is an error.
    pub fn open(path: &Path) -> Result<ModelFiles, ModelError> {
        let path = path.to_owned();
        let metadata = std::fs::metadata(&path)
            .map_err(|source| ModelError::Io { path: path.clone(), source })?;
        let (config, source) =
            if metadata.is_dir() { open_directory(&path)? } else { open_gguf(&path)? };
        let files = ModelFiles { config, source, path };
        for name in TensorName::all(&files.config) {
            files.tensor(name)?;
        }
        Ok(files)
    }

    /// A model of this shape with random weights, for measuring speed. `path` is only a name.
    pub fn random(config: ModelConfig, path: &Path) -> ModelFiles {
        let shapes = || TensorName::all(&config).into_iter().map(|name| name.shape(&config));
        let largest = |dims: usize| {
            let sizes =
                shapes().filter(|shape| shape.len() == dims).map(|shape| shape.iter().product());
            sizes.max().unwrap_or(0)
        };
        let source = Source::Random(RandomWeights::new(largest(2), largest(1)));
        ModelFiles { config, source, path: path.to_owned() }
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Replaces the model's rotation by what a user asked for; see
    /// [`ModelConfig::override_rope`].
    pub fn override_rope(&mut self, wanted: &RopeOverride) -> Result<(), ModelError> {
        self.config
            .override_rope(wanted)
            .map_err(|source| ModelError::Config { path: self.path.clone(), source })
    }

    /// The directory or file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the files have this tensor.
    pub fn has(&self, name: TensorName) -> bool {
        self.source.contains(&name.in_file(self.naming()))
    }

    /// A tensor, whose shape is the one that the configuration asks for.
    pub fn tensor(&self, name: TensorName) -> Result<TensorView<'_>, ModelError> {
        if let Source::Random(weights) = &self.source {
            return Ok(weights.tensor(name.shape(&self.config)));
        }
        let in_file = name.in_file(self.naming());
        let Some(raw) = self.source.tensor(&in_file)? else {
            return Err(match name.fused_in_file(self.naming()) {
                Some(fused) if self.source.contains(&fused) => {
                    ModelError::FusedTensor { name: in_file, fused }
                }
                _ => ModelError::MissingTensor { name: in_file },
            });
        };
        let RawTensor { dtype, shape, bytes } = raw;
        let expected = name.shape(&self.config);
        if *shape != *expected {
            return Err(ModelError::TensorShape { name: in_file, expected, found: shape.to_vec() });
        }
        let is_float = matches!(dtype, WeightType::F32 | WeightType::F16 | WeightType::BF16);
        if expected.len() == 1 && !is_float {
            return Err(ModelError::VectorType { name: in_file, dtype });
        }
        Ok(TensorView { dtype, shape: expected, bytes })
    }

    /// The weights of a norm, or a bias, as floats.
    pub fn vector(&self, name: TensorName) -> Result<Vec<f32>, ModelError> {
        let TensorView { dtype, shape, bytes } = self.tensor(name)?;
        RawTensor { dtype, shape: &shape, bytes }
            .to_f32()
            .ok_or_else(|| ModelError::VectorType { name: name.in_file(self.naming()), dtype })
    }

    /// Bytes of all tensors in the files.
    pub fn weight_bytes(&self) -> u64 {
        if let Source::Random(_) = &self.source {
            let names = TensorName::all(&self.config).into_iter();
            return names
                .map(|name| 2 * name.shape(&self.config).iter().product::<usize>() as u64)
                .sum();
        }
        self.source.data_bytes()
    }

    /// Bytes of the weights where a matrix takes `bytes_of` its type, rows and columns, and where vectors
    /// are floats.
    pub fn weight_bytes_as(
        &self,
        bytes_of: impl Fn(WeightType, usize, usize) -> usize,
    ) -> Result<u64, ModelError> {
        let bytes = |name| {
            let TensorView { dtype, shape, .. } = self.tensor(name)?;
            Ok(match shape[..] {
                [rows, cols] => bytes_of(dtype, rows, cols) as u64,
                _ => 4 * shape.iter().product::<usize>() as u64,
            })
        };
        TensorName::all(&self.config).into_iter().map(bytes).sum()
    }

    /// Bytes of what `Model::narrow_deciding` makes, likewise.
    pub fn deciding_bytes_as(
        &self,
        least: usize,
        bytes_of: impl Fn(WeightType, usize, usize) -> usize,
    ) -> Result<u64, ModelError> {
        narrow_bytes(self, least, bytes_of)
    }

    /// Where the tokenizer is.
    pub fn tokenizer(&self) -> TokenizerFiles<'_> {
        match &self.source {
            Source::Gguf(files) => TokenizerFiles::Gguf(files.header()),
            Source::Random(_) => TokenizerFiles::Directory {
                tokenizer: None,
                tokenizer_config: None,
                chat_template: None,
                generation_config: None,
            },
            Source::Safetensors { dir, .. } => {
                let file = |name: &str| Some(dir.join(name)).filter(|path| path.is_file());
                TokenizerFiles::Directory {
                    tokenizer: file("tokenizer.json"),
                    tokenizer_config: file("tokenizer_config.json"),
                    chat_template: file("chat_template.jinja"),
                    generation_config: file("generation_config.json"),
                }
            }
        }
    }

    /// A hash of the configuration, of every tensor's name, type and shape, and of a sample of its
    /// bytes: equal for copies of the same files, different for another model or another rotation.
    ///
    /// The sample is a few hundred bytes of each tensor, so that it costs no whole read of the files.
    pub fn fingerprint(&self) -> Result<[u8; 32], ModelError> {
        let mut hash = Sha256::new();
        let mut put = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        put(b"nuthatch model 1");
        put(format!("{:?}", self.config).as_bytes());
        let naming = self.naming();
        for name in TensorName::all(&self.config) {
            let TensorView { dtype, shape, bytes } = self.tensor(name)?;
            put(name.in_file(naming).as_bytes());
            put(format!("{dtype} {shape:?}").as_bytes());
            let last = bytes.len().saturating_sub(SAMPLE_BYTES);
            for start in [0, last / 2, last] {
                put(&bytes[start..bytes.len().min(start + SAMPLE_BYTES)]);
            }
        }
        Ok(hash.finalize().into())
    }

    /// Names of all tensors in the files, also of those that the forward pass does not need.
    pub fn names_in_files(&self) -> Vec<&str> {
        self.source.names()
    }

    fn naming(&self) -> Naming {
        match self.source {
            Source::Safetensors { .. } | Source::Random(_) => Naming::HuggingFace,
            Source::Gguf(_) => Naming::Gguf,
        }
    }
}

fn open_directory(dir: &Path) -> Result<(ModelConfig, Source), ModelError> {
    let config_path = dir.join("config.json");
    if !config_path.is_file() {
        let reason = "the directory has no config.json";
        return Err(ModelError::NotAModel { path: dir.to_owned(), reason });
    }
    let generation_path = dir.join("generation_config.json");
    let generation = match generation_path.is_file() {
        true => Some(read_small(&generation_path)?),
        false => None,
    };
    let config = ModelConfig::from_json(&read_small(&config_path)?, generation.as_deref())
        .map_err(|source| ModelError::Config { path: config_path, source })?;
    let files = SafetensorsFiles::open(dir)?;
    Ok((config, Source::Safetensors { dir: dir.to_owned(), files }))
}

fn open_gguf(path: &Path) -> Result<(ModelConfig, Source), ModelError> {
    let files = GgufFiles::open(path)?;
    let config = ModelConfig::from_gguf(&files)
        .map_err(|source| ModelError::Config { path: path.to_owned(), source })?;
    Ok((config, Source::Gguf(files)))
}
