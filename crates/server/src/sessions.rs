//! Conversations that outlive the program: one file for each, private to the user.
//!
//! A file holds what was said, not how the model remembers it: with a disk tier, what the model made of
//! the words is found there by the words themselves, and without one it is computed again.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nuthatch_engine::Tenant;
use nuthatch_tokens::Message;
use serde::{Deserialize, Serialize};

/// Most bytes of a session's file.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Most characters of a name.
const NAME_LEN_MAX: usize = 64;

/// A session that there is not, or that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Names become names of files.
    #[error("`{0}` is no name for a session: use up to 64 letters, digits, `-`, `_` and `.`")]
    Name(String),
    /// There is none.
    #[error("there is no session `{0}`")]
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
    /// It is not what such a file is.
    #[error("this is no session: {0}")]
    Broken(#[from] serde_json::Error),
    /// The file cannot be read or written.
    #[error("cannot {what} {}: {error}", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why not.
        error: Box<SessionError>,
    },
    /// The system's word.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl SessionError {
    fn with(self, what: &'static str, path: &Path) -> Self {
        SessionError::File { what, path: path.to_owned(), error: Box::new(self) }
    }
}

type Result<T> = std::result::Result<T, SessionError>;

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    version: u32,
    /// The model that it was held with last.
    pub model: String,
    /// What the model was told before everything else.
    pub system: Option<String>,
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
    pub fn new(model: &str) -> Self {
        Session { version: Self::VERSION, model: model.to_owned(), ..Session::default() }
    }

    /// What was said.
    pub fn messages(&self) -> Vec<Message> {
        self.messages.iter().map(|said| Message::new(&said.role, &said.content)).collect()
    }

    /// Replaces what was said.
    pub fn set_messages(&mut self, messages: &[Message]) {
        let said = |m: &Message| Said { role: m.role.clone(), content: m.content.clone() };
        self.messages = messages.iter().map(said).collect();
    }

    /// Messages that were said.
    pub fn n_messages(&self) -> usize {
        self.messages.len()
    }

    /// Reads what [`Sessions::export`] gave.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(SessionError::TooLong);
        }
        let session: Session = serde_json::from_slice(bytes)?;
        if session.version != Self::VERSION {
            return Err(SessionError::Version(session.version));
        }
        Ok(session)
    }
}

/// Where sessions are kept.
#[derive(Clone, Debug)]
pub struct Sessions {
    dir: PathBuf,
}

impl Sessions {
    /// Those of a directory, which need not be there.
    pub fn new(dir: PathBuf) -> Self {
        Sessions { dir }
    }

    /// Those of one of several who do not see each other's.
    pub(crate) fn of(&self, tenant: Tenant) -> Self {
        match tenant.0 {
            0 => self.clone(),
            number => Sessions { dir: self.dir.join(format!("tenant-{number:016x}")) },
        }
    }

    /// All names, in order.
    pub fn names(&self) -> Result<Vec<String>> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => {
                entries.map_err(|error| SessionError::from(error).with("read", &self.dir))?
            }
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
    pub fn load(&self, name: &str) -> Result<Option<Session>> {
        let path = self.path(name)?;
        if !path.exists() {
            return Ok(None);
        }
        read(&path).map(Some)
    }

    /// The same; an error when there is none.
    pub fn get(&self, name: &str) -> Result<Session> {
        let session = self.load(name)?;
        session.ok_or_else(|| SessionError::Unknown(name.to_owned()))
    }

    /// Keeps a session, in place of the one before it: either is there whole, whatever happens.
    pub fn save(&self, name: &str, session: &Session) -> Result<()> {
        let path = self.path(name)?;
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        let create = builder.create(&self.dir);
        create.map_err(|error| SessionError::from(error).with("create", &self.dir))?;
        write(&path, session).map_err(|error| error.with("save", &path))
    }

    /// Forgets a session.
    pub fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(SessionError::Unknown(name.to_owned()))
            }
            result => result.map_err(|error| SessionError::from(error).with("remove", &path)),
        }
    }

    /// Takes a session from a file that [`Sessions::export`] wrote.
    pub fn import(&self, name: &str, file: &Path) -> Result<Session> {
        let session = read(file)?;
        self.add(name, &session)?;
        Ok(session)
    }

    /// Takes a session; an error if there is one of this name.
    pub fn add(&self, name: &str, session: &Session) -> Result<()> {
        if self.load(name)?.is_some() {
            return Err(SessionError::Exists(name.to_owned()));
        }
        self.save(name, session)
    }

    /// The text of a session, to be kept elsewhere.
    pub fn export(&self, name: &str) -> Result<String> {
        Ok(serde_json::to_string_pretty(&self.get(name)?)?)
    }

    fn path(&self, name: &str) -> Result<PathBuf> {
        check_name(name)?;
        Ok(self.dir.join(format!("{name}.json")))
    }
}

/// Checks that a name can be one of a file, and of nothing else.
pub fn check_name(name: &str) -> Result<()> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let is_name = !name.is_empty()
        && name.len() <= NAME_LEN_MAX
        && !name.starts_with('.')
        && name.chars().all(is_allowed);
    if is_name { Ok(()) } else { Err(SessionError::Name(name.to_owned())) }
}

fn read(path: &Path) -> Result<Session> {
    let read = || {
        let mut bytes = Vec::new();
        fs::File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        Session::parse(&bytes)
    };
    read().map_err(|error| error.with("read", path))
}

fn write(path: &Path, session: &Session) -> Result<()> {
    // Beside it, so that renaming is one step.
    static N_WRITES: AtomicU64 = AtomicU64::new(0);
    let number = N_WRITES.fetch_add(1, Ordering::Relaxed);
    let new = path.with_extension(format!("{}-{number}.new", std::process::id()));
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
