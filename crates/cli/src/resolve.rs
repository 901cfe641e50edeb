//! What a MODEL argument means: a place on this disk, a known short name, or a hub repository.
//!
//! Nothing here touches the network; `fetch` brings the files.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::known::{self, KnownModel};

/// A model as the user named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelSpec {
    /// A GGUF file or a Hugging Face directory on this disk.
    Local(PathBuf),
    /// A short name of the built-in list.
    Known(&'static KnownModel),
    /// A repository of the hub.
    Hub(HubModel),
}

/// A repository of the hub: `org/name[@revision][:file.gguf | :quantisation]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubModel {
    /// `org/name`.
    pub(crate) repo: String,
    /// Branch, tag or commit.
    pub(crate) revision: String,
    /// A file of the repository, or a part of its name such as `Q4_K_M`.
    pub(crate) pick: Option<String>,
}

/// A name that means nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
    /// A path that is not there.
    #[error("no such file or directory: {}", .0.display())]
    Missing(PathBuf),
    /// A file that is no model.
    #[error("{} is neither a .gguf file nor a Hugging Face directory (one with config.json)", .0.display())]
    NotAModel(PathBuf),
    /// A word that is no path, no short name and no hub id.
    #[error(
        "no model called `{name}`: there is no file or directory of that name, the short names \
         are {known}, and a hub id looks like org/name"
    )]
    Unknown {
        /// What was given.
        name: String,
        /// The short names.
        known: String,
    },
}

impl ModelSpec {
    /// The model that runs when none is named.
    pub(crate) fn default_model() -> Self {
        ModelSpec::Known(known::default_model())
    }

    /// Reads a MODEL argument and checks that a path is there.
    pub(crate) fn parse(text: &str) -> Result<Self, ResolveError> {
        let path = Path::new(text);
        if path.exists() {
            return local(path);
        }
        if let Some(model) = known::find(text) {
            return Ok(ModelSpec::Known(model));
        }
        if is_pathlike(text) {
            return Err(ResolveError::Missing(path.to_owned()));
        }
        if let Some(hub) = parse_hub(text) {
            return Ok(ModelSpec::Hub(hub));
        }
        Err(ResolveError::Unknown { name: text.to_owned(), known: known::names().join(", ") })
    }
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelSpec::Local(path) => path.display().fmt(f),
            ModelSpec::Known(model) => f.write_str(model.title),
            ModelSpec::Hub(hub) => {
                f.write_str(&hub.repo)?;
                if hub.revision != "main" {
                    write!(f, "@{}", hub.revision)?;
                }
                hub.pick.iter().try_for_each(|pick| write!(f, ":{pick}"))
            }
        }
    }
}

/// Whether a lone positional argument of `run` names a model; otherwise it is the prompt.
pub(crate) fn looks_like_model(text: &str) -> bool {
    if text.is_empty() || text.chars().any(|c| c == '\n') {
        return false;
    }
    if Path::new(text).exists() || known::find(text).is_some() {
        return true;
    }
    let one_word = !text.chars().any(char::is_whitespace);
    one_word && (is_pathlike(text) || parse_hub(text).is_some())
}

/// Whether the text can only be meant as a path, there or not. A hub id may end in `:file.gguf`.
fn is_pathlike(text: &str) -> bool {
    let is_gguf = Path::new(text).extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let is_anchored = ["/", "./", "../", "~/"].iter().any(|start| text.starts_with(start));
    is_anchored || (is_gguf && !(text.contains(':') && parse_hub(text).is_some()))
}

fn local(path: &Path) -> Result<ModelSpec, ResolveError> {
    let is_gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if is_gguf || (path.is_dir() && path.join("config.json").exists()) || has_gguf_magic(path) {
        return Ok(ModelSpec::Local(path.to_owned()));
    }
    // A directory that holds one GGUF file is as good as the file.
    if let Some(file) = only_gguf(path) {
        return Ok(ModelSpec::Local(file));
    }
    Err(ResolveError::NotAModel(path.to_owned()))
}

fn has_gguf_magic(path: &Path) -> bool {
    use std::io::Read as _;
    let mut magic = [0; 4];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && &magic == b"GGUF"
}

fn only_gguf(dir: &Path) -> Option<PathBuf> {
    let mut found = std::fs::read_dir(dir)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")));
    let file = found.next()?;
    found.next().is_none().then_some(file)
}

/// Reads `org/name[@revision][:pick]`.
fn parse_hub(text: &str) -> Option<HubModel> {
    let (id, pick) = match text.split_once(':') {
        Some((id, pick)) => (id, Some(pick)),
        None => (text, None),
    };
    let (repo, revision) = id.split_once('@').unwrap_or((id, "main"));
    let (org, name) = repo.split_once('/')?;
    let is_name = |s: &str| {
        !s.is_empty()
            && !s.starts_with(['.', '-'])
            && !s.contains("..")
            && s.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    // Picks and revisions may name folders; they must not climb out of the repository.
    let is_path = |s: &str| !s.is_empty() && s.split('/').all(is_name);
    let ok = is_name(org) && is_name(name) && is_path(revision) && pick.is_none_or(is_path);
    ok.then(|| HubModel {
        repo: repo.to_owned(),
        revision: revision.to_owned(),
        pick: pick.map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lone_argument_is_a_model_or_a_prompt() {
        let dir = tempfile::tempdir().unwrap();
        let present = dir.path().join("with space");
        std::fs::create_dir(&present).unwrap();
        for model in [
            present.to_str().unwrap(),
            "smollm2",
            "SmolLM2-135M-Instruct",
            "missing.gguf",
            "./missing",
            "/no/such/place",
            "Qwen/Qwen3-0.6B",
            "bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0",
        ] {
            assert!(looks_like_model(model), "{model}");
        }
        for prompt in [
            "",
            "Why do transformers cache keys and values?",
            "hello",
            "what is 3/4 of 12",
            "a/b/c",
            "file.gguf is what?",
            "x\ny.gguf",
            "12:30",
        ] {
            assert!(!looks_like_model(prompt), "{prompt}");
        }
    }

    #[test]
    fn hub_ids_may_name_revision_and_file() {
        let parse = |text| match ModelSpec::parse(text) {
            Ok(ModelSpec::Hub(hub)) => Some((hub.repo, hub.revision, hub.pick)),
            _ => None,
        };
        let hub = |repo: &str, revision: &str, pick: Option<&str>| {
            Some((repo.to_owned(), revision.to_owned(), pick.map(str::to_owned)))
        };
        assert_eq!(parse("org/name"), hub("org/name", "main", None));
        assert_eq!(parse("org/name:Q4_K_M"), hub("org/name", "main", Some("Q4_K_M")));
        assert_eq!(parse("o/n@v1.0:sub/f.gguf"), hub("o/n", "v1.0", Some("sub/f.gguf")));
        for bad in ["org/", "/name", "a/b/c", "org/na me", "org/..", "o/n:../x", "o/n@", "o/n:"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(ModelSpec::parse("o/n@v1:f.gguf").unwrap().to_string(), "o/n@v1:f.gguf");
    }

    #[test]
    fn errors_say_what_was_looked_for() {
        let missing = ModelSpec::parse("missing.gguf").unwrap_err();
        assert_eq!(missing.to_string(), "no such file or directory: missing.gguf");
        let unknown = ModelSpec::parse("gpt9").unwrap_err().to_string();
        assert!(unknown.contains("`gpt9`"), "{unknown}");
        assert!(unknown.contains("smollm2"), "{unknown}");
        let dir = tempfile::tempdir().unwrap();
        let empty = ModelSpec::parse(dir.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(empty.contains("config.json"), "{empty}");
    }

    #[test]
    fn a_directory_is_a_model_if_it_has_a_config_or_one_gguf() {
        let dir = tempfile::tempdir().unwrap();
        let gguf = dir.path().join("m.GGUF");
        std::fs::write(&gguf, b"").unwrap();
        let text = dir.path().to_str().unwrap();
        assert_eq!(ModelSpec::parse(text), Ok(ModelSpec::Local(gguf)));
        std::fs::write(dir.path().join("n.gguf"), b"").unwrap();
        assert!(ModelSpec::parse(text).is_err());
        std::fs::write(dir.path().join("config.json"), b"{}").unwrap();
        assert_eq!(ModelSpec::parse(text), Ok(ModelSpec::Local(dir.path().to_owned())));
        let blob = dir.path().join("blob");
        std::fs::write(&blob, b"GGUF....").unwrap();
        assert_eq!(ModelSpec::parse(blob.to_str().unwrap()), Ok(ModelSpec::Local(blob)));
    }
}
