//! Repositories of the Hugging Face hub, through its own cache.
//!
//! What is complete in the cache is used without asking the hub. Small files come first and
//! weights last, so that weights in the cache mean that the rest is there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use super::progress::Progress;
use crate::env::HubEnv;
use crate::resolve::HubModel;

/// Why the hub could not give a model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    /// The hub refused or could not be reached.
    #[error("{what}{}", hint(source))]
    Api {
        /// What was asked.
        what: String,
        /// What the hub or the network said.
        source: Box<ApiError>,
    },
    /// The hub must not be asked, and the cache has not everything.
    #[error("it is not complete in {}, and HF_HUB_OFFLINE forbids to ask the hub", .0.display())]
    Offline(PathBuf),
    /// The repository has nothing that can run.
    #[error("the repository has neither safetensors with a config.json nor GGUF files")]
    NoWeights,
    /// The named file is not in the repository.
    #[error("no GGUF file matches `{pick}`, there are: {}", files.join(", "))]
    NoMatch {
        /// What was asked for.
        pick: String,
        /// What there is.
        files: Vec<String>,
    },
    /// More than one file could be meant.
    #[error("say which GGUF file, as org/name:FILE; there are: {}", .0.join(", "))]
    Ambiguous(Vec<String>),
    /// The list of shards is no list of shards.
    #[error("model.safetensors.index.json does not list its files: {0}")]
    Index(String),
    /// The cache cannot be read.
    #[error("cannot read the hub's cache")]
    Cache(#[source] std::io::Error),
}

fn hint(error: &ApiError) -> &'static str {
    // The client's own error type is not exported, so its words have to do.
    let text = error.to_string();
    if text.contains("status: 401") || text.contains("status: 403") {
        " (the repository is private, gated or not there: check the name, accept its licence on \
         the hub, set HF_TOKEN)"
    } else if text.contains("status: 404") {
        " (there is no such repository, revision or file)"
    } else {
        " (check the network, or HF_ENDPOINT if the hub is elsewhere)"
    }
}

/// Files of a Hugging Face directory that are worth having, besides the weights.
const SMALL_FILES: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
];
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Quantisations in the order in which one is taken when the user names none.
const GGUF_ORDER: [&str; 10] =
    ["Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_1", "Q4_0", "Q6_K", "Q8_0", "Q3_K_M", "BF16", "F16"];

/// The path of the model's GGUF file or snapshot directory.
pub(super) fn fetch(model: &HubModel, env: &HubEnv, refresh: bool) -> Result<PathBuf, HubError> {
    let repo = Repo::with_revision(model.repo.clone(), RepoType::Model, model.revision.clone());
    let cache = Cache::new(env.cache.clone());
    if (!refresh || env.offline)
        && let Some(path) = cached(model, &cache.repo(repo.clone()))?
    {
        return Ok(path);
    }
    if env.offline {
        return Err(HubError::Offline(env.cache.clone()));
    }
    let api = build_api(env, cache.clone())?;
    download(model, &api.repo(repo.clone()), &cache.repo(repo))
}

/// The path of the repository's `config.json`, without its weights.
pub(super) fn fetch_config(model: &HubModel, env: &HubEnv) -> Result<PathBuf, HubError> {
    const CONFIG: &str = "config.json";
    let repo = Repo::with_revision(model.repo.clone(), RepoType::Model, model.revision.clone());
    let cache = Cache::new(env.cache.clone());
    if let Some(path) = cache.repo(repo.clone()).get(CONFIG) {
        return Ok(path);
    }
    if env.offline {
        return Err(HubError::Offline(env.cache.clone()));
    }
    let api = build_api(env, cache)?;
    api.repo(repo).get(CONFIG).map_err(|e| api_error(format!("cannot download {CONFIG}"), e))
}

fn build_api(env: &HubEnv, cache: Cache) -> Result<Api, HubError> {
    let from_file = || {
        let text = std::fs::read_to_string(env.token_path.as_ref()?).ok()?;
        Some(text.trim().to_owned()).filter(|token| !token.is_empty())
    };
    let mut builder = ApiBuilder::from_cache(cache)
        .with_token(env.token.clone().or_else(from_file))
        .with_retries(3)
        .with_user_agent("nuthatch", env!("CARGO_PKG_VERSION"));
    if let Some(endpoint) = &env.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    builder.build().map_err(|e| api_error("cannot start a client".to_owned(), e))
}

fn api_error(what: String, error: ApiError) -> HubError {
    HubError::Api { what, source: Box::new(error) }
}

/// What of a repository is the model.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    /// One GGUF file, or all parts of a split one.
    Gguf(Vec<String>),
    /// A directory: small files, then one file of weights or an index of shards.
    Directory { small: Vec<String>, weights: Vec<String> },
}

/// The model's path in the cache, if all of it is there.
fn cached(model: &HubModel, cache: &CacheRepo) -> Result<Option<PathBuf>, HubError> {
    // The crate finds a snapshot by any entry in it; "." is always one.
    let folder: Option<PathBuf> = cache.get(".").map(|path| path.components().collect());
    let Some(folder) = folder else { return Ok(None) };
    let files = list(&folder)?;
    // A partial snapshot makes no choice; the hub will.
    let Ok(choice) = choose(&files, model.pick.as_deref()) else { return Ok(None) };
    match choice {
        Choice::Gguf(parts) => {
            let whole = parts.iter().all(|part| files.contains(part));
            Ok(whole.then(|| folder.join(&parts[0])))
        }
        Choice::Directory { weights, .. } => {
            let shards =
                if weights == [INDEX] { read_index(&folder.join(INDEX))? } else { weights };
            let whole = shards.iter().all(|shard| files.contains(shard));
            Ok(whole.then_some(folder))
        }
    }
}

/// Files below the folder, by their path in the repository.
fn list(folder: &Path) -> Result<BTreeSet<String>, HubError> {
    let mut files = BTreeSet::new();
    let mut folders = vec![(folder.to_owned(), String::new())];
    while let Some((path, prefix)) = folders.pop() {
        for entry in std::fs::read_dir(&path).map_err(HubError::Cache)? {
            let entry = entry.map_err(HubError::Cache)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let file = format!("{prefix}{name}");
            // Files are links into the blobs; a link that leads nowhere is no file.
            match std::fs::metadata(entry.path()) {
                Ok(meta) if meta.is_dir() => folders.push((entry.path(), format!("{file}/"))),
                Ok(_) => drop(files.insert(file)),
                Err(_) => {}
            }
        }
    }
    Ok(files)
}

/// Decides which of the files are the model.
fn choose(files: &BTreeSet<String>, pick: Option<&str>) -> Result<Choice, HubError> {
    if pick.is_none() && files.contains("config.json") {
        let weights = if files.contains(SINGLE) {
            vec![SINGLE.to_owned()]
        } else if files.contains(INDEX) {
            vec![INDEX.to_owned()]
        } else {
            Vec::new()
        };
        if !weights.is_empty() {
            let small = SMALL_FILES.iter().filter(|file| files.contains(**file));
            return Ok(Choice::Directory {
                small: small.map(|f| (*f).to_owned()).collect(),
                weights,
            });
        }
    }
    let ggufs: Vec<String> = files
        .iter()
        .filter(|file| file.to_ascii_lowercase().ends_with(".gguf"))
        .filter(|file| !file.to_ascii_lowercase().contains("mmproj"))
        .filter(|file| split_of(file).is_none_or(|(_, number, _)| number == 1))
        .cloned()
        .collect();
    let file = choose_gguf(&ggufs, pick)?;
    Ok(Choice::Gguf(match split_of(&file) {
        None => vec![file],
        Some((stem, _, count)) => {
            (1..=count).map(|n| format!("{stem}-{n:05}-of-{count:05}.gguf")).collect()
        }
    }))
}

/// Reads `stem-00002-of-00003.gguf` as its stem, 2 and 3.
fn split_of(file: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let count = count.parse().ok().filter(|&count| count <= 1000)?;
    Some((stem, number.parse().ok()?, count))
}

fn choose_gguf(files: &[String], pick: Option<&str>) -> Result<String, HubError> {
    // The quantisation ends the name, so that `Q4_K` does not match `Q4_K_M`.
    let stem = |file: &str| {
        let stem = split_of(file).map_or(file, |(stem, _, _)| stem).to_ascii_lowercase();
        stem.trim_end_matches(".gguf").to_owned()
    };
    let matching = |part: &str| -> Vec<String> {
        let part = part.to_ascii_lowercase();
        files.iter().filter(|file| stem(file).ends_with(&part)).cloned().collect()
    };
    let candidates = match pick {
        _ if files.is_empty() => return Err(HubError::NoWeights),
        Some(pick) if files.iter().any(|file| file == pick) => return Ok(pick.to_owned()),
        Some(pick) => {
            let found = matching(pick.trim_end_matches(".gguf"));
            if found.is_empty() {
                return Err(HubError::NoMatch { pick: pick.to_owned(), files: files.to_vec() });
            }
            found
        }
        None if files.len() == 1 => return Ok(files[0].clone()),
        None => GGUF_ORDER
            .iter()
            .map(|quantisation| matching(quantisation))
            .find(|found| !found.is_empty())
            .unwrap_or_else(|| files.to_vec()),
    };
    match candidates.as_slice() {
        [file] => Ok(file.clone()),
        _ => Err(HubError::Ambiguous(candidates)),
    }
}

/// The shards that an index names, each once.
fn read_index(path: &Path) -> Result<Vec<String>, HubError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let text = std::fs::read_to_string(path).map_err(HubError::Cache)?;
    let index: Index = serde_json::from_str(&text).map_err(|e| HubError::Index(e.to_string()))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    let is_plain = |name: &String| !name.contains(['/', '\\']) && name.ends_with(".safetensors");
    if shards.is_empty() || !shards.iter().all(is_plain) {
        return Err(HubError::Index("its files are not safetensors".to_owned()));
    }
    Ok(shards.into_iter().collect())
}

fn download(model: &HubModel, repo: &ApiRepo, cache: &CacheRepo) -> Result<PathBuf, HubError> {
    let listing = repo.info().map_err(|e| api_error("cannot list its files".to_owned(), e))?;
    let files = listing.siblings.into_iter().map(|file| file.rfilename).collect();
    let snapshot = cache.pointer_path(&listing.sha);
    let get = |file: &str| get(repo, &snapshot, file);
    let path = match choose(&files, model.pick.as_deref())? {
        Choice::Gguf(parts) => {
            for part in &parts {
                get(part)?;
            }
            snapshot.join(&parts[0])
        }
        Choice::Directory { small, weights } => {
            for file in small.iter().chain(&weights) {
                get(file)?;
            }
            if weights == [INDEX] {
                for shard in read_index(&snapshot.join(INDEX))? {
                    get(&shard)?;
                }
            }
            snapshot.clone()
        }
    };
    cache.create_ref(&listing.sha).map_err(HubError::Cache)?;
    Ok(path)
}

/// One file's path, downloaded if the snapshot does not have it.
fn get(repo: &ApiRepo, snapshot: &Path, file: &str) -> Result<PathBuf, HubError> {
    let path = snapshot.join(file);
    if path.exists() {
        return Ok(path);
    }
    let progress = Progress::start(&format!("fetching {file}"), None);
    repo.download_with_progress(file, &progress)
        .map_err(|e| api_error(format!("cannot download {file}"), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(files: &[&str]) -> BTreeSet<String> {
        files.iter().map(|file| (*file).to_owned()).collect()
    }

    #[test]
    fn directories_go_before_gguf_unless_a_file_is_picked() {
        let files = set(&["config.json", "tokenizer.json", SINGLE, "m-Q8_0.gguf", "README.md"]);
        let small = vec!["config.json".to_owned(), "tokenizer.json".to_owned()];
        let expect = Choice::Directory { small, weights: vec![SINGLE.to_owned()] };
        assert_eq!(choose(&files, None).unwrap(), expect);
        let gguf = Choice::Gguf(vec!["m-Q8_0.gguf".to_owned()]);
        assert_eq!(choose(&files, Some("Q8_0")).unwrap(), gguf);
        assert_eq!(choose(&files, Some("q8_0.gguf")).unwrap(), gguf);
        let sharded = set(&["config.json", INDEX, "model-00001-of-00002.safetensors"]);
        let Choice::Directory { weights, .. } = choose(&sharded, None).unwrap() else { panic!() };
        assert_eq!(weights, [INDEX]);
    }

    #[test]
    fn a_gguf_is_chosen_by_name_by_quantisation_or_by_order() {
        let files: Vec<String> =
            ["m.Q4_K.gguf", "m.Q4_K_M.gguf", "m.Q8_0.gguf", "m.f16.gguf"].map(String::from).into();
        let choose = |pick| choose_gguf(&files, pick).map_err(|e| e.to_string());
        assert_eq!(choose(None).unwrap(), "m.Q4_K_M.gguf");
        assert_eq!(choose(Some("Q4_K")).unwrap(), "m.Q4_K.gguf");
        assert_eq!(choose(Some("m.f16.gguf")).unwrap(), "m.f16.gguf");
        assert_eq!(choose(Some("f16")).unwrap(), "m.f16.gguf");
        assert!(choose(Some("Q2_K")).unwrap_err().contains("m.Q8_0.gguf"));
        let two: Vec<String> = ["a-Q8_0.gguf", "b-Q8_0.gguf"].map(String::from).into();
        assert!(matches!(choose_gguf(&two, None), Err(HubError::Ambiguous(_))));
        assert!(matches!(choose_gguf(&[], None), Err(HubError::NoWeights)));
    }

    #[test]
    fn what_cannot_run_is_refused() {
        let bins = set(&["config.json", "pytorch_model.bin"]);
        assert!(matches!(choose(&bins, None), Err(HubError::NoWeights)));
    }

    #[test]
    fn all_parts_of_a_split_file_are_wanted() {
        let files = set(&[
            "q/m-Q4_K_M-00001-of-00002.gguf",
            "q/m-Q4_K_M-00002-of-00002.gguf",
            "m-Q8_0.gguf",
        ]);
        let parts = ["q/m-Q4_K_M-00001-of-00002.gguf", "q/m-Q4_K_M-00002-of-00002.gguf"];
        let expect = Choice::Gguf(parts.map(String::from).into());
        assert_eq!(choose(&files, Some("Q4_K_M")).unwrap(), expect);
        assert_eq!(choose(&files, None).unwrap(), expect);
        assert_eq!(split_of("a-of-b.gguf"), None);
        assert_eq!(split_of("m-1-of-4000000000.gguf"), None);
    }

    #[test]
    fn an_index_names_plain_safetensors_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(INDEX);
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_index(&path).map_err(|e| e.to_string())
        };
        let good =
            r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"1.safetensors"}}"#;
        assert_eq!(read(good).unwrap(), ["1.safetensors", "2.safetensors"]);
        for bad in ["", "{}", r#"{"weight_map":{}}"#, r#"{"weight_map":{"a":"../x.safetensors"}}"#]
        {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
