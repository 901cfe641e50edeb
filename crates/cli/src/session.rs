//! Conversations that outlive the program: one file for each, private to the user.
//!
//! A file holds what was said, not how the model remembers it: with a disk tier, what the model made of
//! the words is found there by the words themselves, and without one it is computed again.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use nuthatch_tokens::Message;
use serde::{Deserialize, Serialize};

/// Most bytes of a session's file.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Most characters of a name.
const NAME_LEN_MAX: usize = 64;

/// A session that there is not, or that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SessionError {
    /// Names become names of files.
    #[error("`{0}` is no name for a session: use up to 64 letters, digits, `-`, `_` and `.`")]
    Name(String),
    /// There is none.
    #[error("there is no session `{0}`; `nuthatch sessions list` says which there are")]
    Unknown(String),
    /// There is one already.
    #[error("there is a session `{0}` already; delete it first, or choose another name")]
    Exists(String),
    /// The file was made by something else.
    #[error("the file is version {0} of sessions, but this program knows version 1")]
    Version(u32),
    /// It would have no end.
    #[error("the file has more than {} MiB", FILE_BYTES_MAX >> 20)]
    TooLong,
}

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Session {
    version: u32,
    /// The model that it was held with last.
    pub(crate) model: String,
    pub(crate) system: Option<String>,
    messages: Vec<Said>,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Said {
    role: String,
    content: String,
}

impl Session {
    /// The version of the files.
    const VERSION: u32 = 1;

    /// A conversation of which nothing was said.
    pub(crate) fn new(model: &str) -> Self {
        Session { version: Self::VERSION, model: model.to_owned(), ..Session::default() }
    }

    /// What was said.
    pub(crate) fn messages(&self) -> Vec<Message> {
        self.messages.iter().map(|said| Message::new(&said.role, &said.content)).collect()
    }

    /// Replaces what was said.
    pub(crate) fn set_messages(&mut self, messages: &[Message]) {
        let said = |m: &Message| Said { role: m.role.clone(), content: m.content.clone() };
        self.messages = messages.iter().map(said).collect();
    }

    /// Messages that were said.
    pub(crate) fn n_messages(&self) -> usize {
        self.messages.len()
    }

    fn parse(bytes: &[u8]) -> anyhow::Result<Self> {
        let session: Session = serde_json::from_slice(bytes)?;
        if session.version != Self::VERSION {
            return Err(SessionError::Version(session.version).into());
        }
        Ok(session)
    }
}

/// Where sessions are kept.
#[derive(Clone, Debug)]
pub(crate) struct Sessions {
    dir: PathBuf,
}

impl Sessions {
    /// Those of a directory, which need not be there.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Sessions { dir }
    }

    /// All names, in order.
    pub(crate) fn names(&self) -> anyhow::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| self.dir.display().to_string())?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(".json"));
            names.extend(name.filter(|name| check_name(name).is_ok()).map(str::to_owned));
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The session of a name; `None` when there is none.
    pub(crate) fn load(&self, name: &str) -> anyhow::Result<Option<Session>> {
        let path = self.path(name)?;
        if !path.exists() {
            return Ok(None);
        }
        read(&path).map(Some)
    }

    /// The same; an error when there is none.
    pub(crate) fn get(&self, name: &str) -> anyhow::Result<Session> {
        let session = self.load(name)?;
        Ok(session.ok_or_else(|| SessionError::Unknown(name.to_owned()))?)
    }

    /// Keeps a session, in place of the one before it: either is there whole, whatever happens.
    pub(crate) fn save(&self, name: &str, session: &Session) -> anyhow::Result<()> {
        let path = self.path(name)?;
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&self.dir).with_context(|| self.dir.display().to_string())?;
        write(&path, session).with_context(|| format!("cannot save {}", path.display()))
    }

    /// Forgets a session.
    pub(crate) fn delete(&self, name: &str) -> anyhow::Result<()> {
        let path = self.path(name)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(SessionError::Unknown(name.to_owned()).into())
            }
            result => result.with_context(|| path.display().to_string()),
        }
    }

    /// Takes a session from a file that [`Sessions::export`] wrote.
    pub(crate) fn import(&self, name: &str, file: &Path) -> anyhow::Result<Session> {
        let session = read(file)?;
        if self.load(name)?.is_some() {
            return Err(SessionError::Exists(name.to_owned()).into());
        }
        self.save(name, &session)?;
        Ok(session)
    }

    /// The text of a session, to be kept elsewhere.
    pub(crate) fn export(&self, name: &str) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(&self.get(name)?)?)
    }

    fn path(&self, name: &str) -> Result<PathBuf, SessionError> {
        check_name(name)?;
        Ok(self.dir.join(format!("{name}.json")))
    }
}

/// Checks that a name can be one of a file, and of nothing else.
pub(crate) fn check_name(name: &str) -> Result<(), SessionError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let is_name = !name.is_empty()
        && name.len() <= NAME_LEN_MAX
        && !name.starts_with('.')
        && name.chars().all(is_allowed);
    if is_name { Ok(()) } else { Err(SessionError::Name(name.to_owned())) }
}

fn read(path: &Path) -> anyhow::Result<Session> {
    let read = || -> anyhow::Result<Session> {
        let mut bytes = Vec::new();
        fs::File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(SessionError::TooLong.into());
        }
        Session::parse(&bytes)
    };
    read().with_context(|| format!("cannot read {}", path.display()))
}

fn write(path: &Path, session: &Session) -> anyhow::Result<()> {
    // Beside it, so that renaming is one step.
    let new = path.with_extension(format!("{}.new", std::process::id()));
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&new)?;
    serde_json::to_writer(&mut file, session)?;
    file.flush()?;
    file.sync_all()?;
    Ok(fs::rename(&new, path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_is_there_again() {
        let dir = tempfile::TempDir::new().unwrap();
        let sessions = Sessions::new(dir.path().join("deep").join("sessions"));
        assert!(sessions.names().unwrap().is_empty());
        assert_eq!(sessions.load("bird").unwrap(), None);
        let mut session = Session::new("smollm2");
        session.system = Some("Be brief.".to_owned());
        let messages = [Message::new("user", "Hi"), Message::new("assistant", "Hello\n")];
        session.set_messages(&messages);
        sessions.save("bird", &session).unwrap();
        sessions.save("bird", &session).unwrap();
        assert_eq!(sessions.get("bird").unwrap(), session);
        assert_eq!((session.messages(), session.n_messages()), (messages.to_vec(), 2));
        assert_eq!(sessions.names().unwrap(), ["bird"]);

        let file = dir.path().join("bird.json");
        fs::write(&file, sessions.export("bird").unwrap()).unwrap();
        assert!(sessions.import("bird", &file).is_err(), "it is there already");
        assert_eq!(sessions.import("other", &file).unwrap(), session);
        sessions.delete("bird").unwrap();
        assert!(sessions.delete("bird").is_err() && sessions.get("bird").is_err());
        assert_eq!(sessions.names().unwrap(), ["other"]);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&sessions.dir), 0o700);
            assert_eq!(mode(&sessions.dir.join("other.json")), 0o600);
        }
    }

    #[test]
    fn names_stay_in_their_directory_and_strange_files_are_errors() {
        let dir = tempfile::TempDir::new().unwrap();
        let sessions = Sessions::new(dir.path().to_owned());
        let long = "a".repeat(65);
        for name in ["", "..", ".a", "a/b", "../x", "a b", "\u{e4}", "a\0", &long] {
            assert!(sessions.load(name).is_err(), "{name:?}");
        }
        for text in ["", "{}", r#"{"version":2,"model":"m","messages":[]}"#, "[1]", "\0\0"] {
            fs::write(dir.path().join("odd.json"), text).unwrap();
            assert!(sessions.get("odd").is_err(), "{text:?}");
        }
    }
}
