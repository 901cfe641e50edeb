//! The environment variables that Nuthatch reads, all of them, and the only place that reads them.
//!
//! They are few and only say where things are. Names that begin with `HF_` follow the conventions
//! of the Hugging Face tools, so that their caches and tokens are shared.

use std::ffi::OsString;
use std::path::PathBuf;

/// Where Nuthatch keeps fetched models.
const NUTHATCH_CACHE: &str = "NUTHATCH_CACHE";
/// Base of the user's caches.
const XDG_CACHE_HOME: &str = "XDG_CACHE_HOME";
/// Base of the user's data, where the chat history is kept.
const XDG_DATA_HOME: &str = "XDG_DATA_HOME";
/// The user's home, on Unix and on Windows.
const HOME: [&str; 2] = ["HOME", "USERPROFILE"];
/// Base of the hub's caches and token.
const HF_HOME: &str = "HF_HOME";
/// The hub's cache of repositories, if it is not below `HF_HOME`.
const HF_HUB_CACHE: &str = "HF_HUB_CACHE";
/// Token that is sent to the hub.
const HF_TOKEN: &str = "HF_TOKEN";
/// File that holds the token, if it is not below `HF_HOME`.
const HF_TOKEN_PATH: &str = "HF_TOKEN_PATH";
/// Address of the hub.
const HF_ENDPOINT: &str = "HF_ENDPOINT";
/// Whether the hub must not be asked.
const HF_HUB_OFFLINE: &str = "HF_HUB_OFFLINE";

/// A variable that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EnvError {
    /// The value is not one of the allowed ones.
    #[error("{name} is `{value}`, but must be one of {allowed}")]
    Value {
        /// Name of the variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The value is not text.
    #[error("{0} is not valid UTF-8")]
    NotText(&'static str),
    /// There is no home directory and nothing that says where to keep things.
    #[error("no home directory: set {0} to a directory")]
    NoHome(&'static str),
}

/// What the environment says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Env {
    cache: Option<PathBuf>,
    kernels: Option<PathBuf>,
    pages: Option<PathBuf>,
    data: Option<PathBuf>,
    hub_cache: Option<PathBuf>,
    hub_token_path: Option<PathBuf>,
    hub_token: Option<String>,
    hub_endpoint: Option<String>,
    hub_offline: bool,
}

impl Env {
    /// Reads the process environment.
    pub(crate) fn read() -> Result<Self, EnvError> {
        Env::from_lookup(|name| std::env::var_os(name))
    }

    /// Reads an environment given as a function from names to values.
    fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, EnvError> {
        // An empty variable is as good as none.
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let path = |name: &str| get(name).map(PathBuf::from);
        let text = |name: &'static str| {
            get(name).map(|v| v.into_string().map_err(|_| EnvError::NotText(name))).transpose()
        };
        let home = HOME.iter().find_map(|name| path(name));
        let caches = path(XDG_CACHE_HOME).or_else(|| home.as_ref().map(|home| home.join(".cache")));
        let data = path(XDG_DATA_HOME)
            .or_else(|| home.as_ref().map(|home| home.join(".local").join("share")));
        let hub_home = path(HF_HOME).or_else(|| caches.as_ref().map(|c| c.join("huggingface")));
        Ok(Env {
            cache: path(NUTHATCH_CACHE)
                .or_else(|| caches.as_ref().map(|c| c.join("nuthatch").join("models"))),
            kernels: caches.as_ref().map(|c| c.join("nuthatch").join("kernels")),
            pages: caches.as_ref().map(|c| c.join("nuthatch").join("pages")),
            data: data.map(|data| data.join("nuthatch")),
            hub_cache: path(HF_HUB_CACHE).or_else(|| hub_home.as_ref().map(|h| h.join("hub"))),
            hub_token_path: path(HF_TOKEN_PATH)
                .or_else(|| hub_home.as_ref().map(|h| h.join("token"))),
            hub_token: text(HF_TOKEN)?.map(|token| token.trim().to_owned()),
            hub_endpoint: text(HF_ENDPOINT)?.map(|url| url.trim_end_matches('/').to_owned()),
            hub_offline: match text(HF_HUB_OFFLINE)? {
                None => false,
                Some(value) => truth(HF_HUB_OFFLINE, &value)?,
            },
        })
    }

    /// Directory of models that Nuthatch fetched itself.
    pub(crate) fn cache_dir(&self) -> Result<PathBuf, EnvError> {
        self.cache.clone().ok_or(EnvError::NoHome(NUTHATCH_CACHE))
    }

    /// Directory of compiled GPU kernels, if there is a place for them.
    pub(crate) fn kernel_dir(&self) -> Option<PathBuf> {
        self.kernels.clone()
    }

    /// Directory of the head profiles that were made here, if there is a place for them.
    pub(crate) fn profile_dir(&self) -> Option<PathBuf> {
        self.data.as_ref().map(|data| data.join("profiles"))
    }

    /// Directory of the conversations that are kept.
    pub(crate) fn session_dir(&self) -> Result<PathBuf, EnvError> {
        let data = self.data.as_ref().ok_or(EnvError::NoHome(XDG_DATA_HOME))?;
        Ok(data.join("sessions"))
    }

    /// Directory of KV pages that are kept, if there is a place for them.
    pub(crate) fn page_dir(&self) -> Option<PathBuf> {
        self.pages.clone()
    }

    /// File of the chat's input history, if there is a place for it.
    pub(crate) fn history_file(&self) -> Option<PathBuf> {
        self.data.as_ref().map(|data| data.join("history"))
    }

    /// Where the hub is, and what it keeps here.
    pub(crate) fn hub(&self) -> Result<HubEnv, EnvError> {
        Ok(HubEnv {
            cache: self.hub_cache.clone().ok_or(EnvError::NoHome(HF_HOME))?,
            token_path: self.hub_token_path.clone(),
            token: self.hub_token.clone(),
            endpoint: self.hub_endpoint.clone(),
            offline: self.hub_offline,
        })
    }
}

/// Where the hub is, and what it keeps here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubEnv {
    /// Directory of cached repositories.
    pub(crate) cache: PathBuf,
    /// File that holds a token.
    pub(crate) token_path: Option<PathBuf>,
    /// Token that goes before the file's.
    pub(crate) token: Option<String>,
    /// Address, if it is not the public hub's.
    pub(crate) endpoint: Option<String>,
    /// Whether the hub must not be asked.
    pub(crate) offline: bool,
}

fn truth(name: &'static str, value: &str) -> Result<bool, EnvError> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "on" | "yes" | "true" => Ok(true),
        "0" | "off" | "no" | "false" => Ok(false),
        _ => Err(EnvError::Value { name, value: value.to_owned(), allowed: "1, 0, true or false" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Result<Env, EnvError> {
        Env::from_lookup(|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn everything_has_a_place_below_home() {
        let env = env(&[("HOME", "/h")]).unwrap();
        assert_eq!(env.cache_dir().unwrap(), PathBuf::from("/h/.cache/nuthatch/models"));
        assert_eq!(env.history_file().unwrap(), PathBuf::from("/h/.local/share/nuthatch/history"));
        let hub = env.hub().unwrap();
        assert_eq!(hub.cache, PathBuf::from("/h/.cache/huggingface/hub"));
        assert_eq!(hub.token_path, Some(PathBuf::from("/h/.cache/huggingface/token")));
        assert!(!hub.offline);
    }

    #[test]
    fn the_narrower_variable_wins() {
        let all = env(&[
            ("HOME", "/h"),
            ("XDG_CACHE_HOME", "/x"),
            ("NUTHATCH_CACHE", "/n"),
            ("HF_HOME", "/f"),
            ("HF_HUB_CACHE", "/c"),
            ("HF_TOKEN", " abc\n"),
            ("HF_ENDPOINT", "http://hub.example/"),
            ("HF_HUB_OFFLINE", "TRUE"),
        ])
        .unwrap();
        assert_eq!(all.cache_dir().unwrap(), PathBuf::from("/n"));
        let hub = all.hub().unwrap();
        assert_eq!(hub.cache, PathBuf::from("/c"));
        assert_eq!(hub.token_path, Some(PathBuf::from("/f/token")));
        assert_eq!(hub.token.as_deref(), Some("abc"));
        assert_eq!(hub.endpoint.as_deref(), Some("http://hub.example"));
        assert!(hub.offline);
        let xdg = env(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("NUTHATCH_CACHE", "")]).unwrap();
        assert_eq!(xdg.cache_dir().unwrap(), PathBuf::from("/x/nuthatch/models"));
    }

    #[test]
    fn nonsense_is_an_error_and_no_home_says_what_to_set() {
        assert_eq!(
            env(&[("HF_HUB_OFFLINE", "maybe")]).unwrap_err().to_string(),
            "HF_HUB_OFFLINE is `maybe`, but must be one of 1, 0, true or false"
        );
        let none = env(&[]).unwrap();
        assert!(none.cache_dir().unwrap_err().to_string().contains("NUTHATCH_CACHE"));
        assert_eq!(none.history_file(), None);
    }
}
