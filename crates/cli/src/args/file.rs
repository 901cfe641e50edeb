//! `--config FILE`: flags from a file, put before those that were typed.
//!
//! The file is the part of YAML that flags need: `name: value` lines, lists in brackets or one entry
//! a line after a dash, quotes, comments. A name that was typed too is left out.

use std::ffi::OsString;
use std::path::PathBuf;

use super::peers::in_our_words;
use crate::config::ConfigError;

/// Largest file that is read.
const BYTES_MAX: u64 = 1 << 20;

/// Why a file of flags cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    /// It cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// It is longer than any list of flags.
    #[error("{}: {bytes} bytes are too many", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Bytes of the file.
        bytes: u64,
    },
    /// A flag of another server cannot be used.
    #[error(transparent)]
    Peer(#[from] ConfigError),
    /// A line is not understood.
    #[error("{}, line {line}: {detail}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        detail: &'static str,
    },
}

/// The words of a command line in our own terms, with those of the file that `serve --config FILE` names
/// put in.
pub(crate) fn with_config_file(words: Vec<OsString>) -> Result<Vec<OsString>, FileError> {
    let words = in_our_words(words)?;
    if words.get(1).is_none_or(|command| command != "serve") {
        return Ok(words);
    }
    let Some(path) = config_path(&words[2..]) else { return Ok(words) };
    let read = |error| FileError::Read { path: path.clone(), error };
    let bytes = std::fs::metadata(&path).map_err(read)?.len();
    if bytes > BYTES_MAX {
        return Err(FileError::TooLong { path, bytes });
    }
    let text = std::fs::read_to_string(&path).map_err(read)?;
    let flags = parse(&text).map_err(|(line, detail)| FileError::Line {
        path: path.clone(),
        line,
        detail,
    })?;
    let typed = |flag: &str| {
        let equals = format!("{flag}=");
        words[2..]
            .iter()
            .filter_map(|word| word.to_str())
            .any(|w| w == flag || w.starts_with(&equals))
    };
    let is_model_typed = words.get(2).is_some_and(|word| !word.to_string_lossy().starts_with('-'));
    let mut written = words[..2].to_vec();
    for (name, values) in &flags {
        let flag = format!("--{}", name.replace('_', "-"));
        match values {
            Values::Switch(true) => written.push(flag.into()),
            Values::Switch(false) => {}
            Values::List(values) => {
                written.extend(values.iter().map(|value| format!("{flag}={value}").into()));
            }
        }
    }
    // What is typed goes before it, whoever's name for it either is.
    let is_left = |word: &OsString| {
        let word = word.to_string_lossy();
        let flag = word.split_once('=').map_or(&word[..], |(flag, _)| flag);
        !typed(flag) && (flag != "--model" || !is_model_typed)
    };
    let mut all = words[..2].to_vec();
    all.extend(in_our_words(written)?.into_iter().skip(2).filter(is_left));
    all.extend_from_slice(&words[2..]);
    Ok(all)
}

fn config_path(words: &[OsString]) -> Option<PathBuf> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "--config" {
            return words.next().map(PathBuf::from);
        }
        if let Some(path) = word.to_str().and_then(|word| word.strip_prefix("--config=")) {
            return Some(PathBuf::from(path));
        }
    }
    None
}

/// What a file says of one flag.
#[derive(Debug, PartialEq, Eq)]
enum Values {
    Switch(bool),
    List(Vec<String>),
}

fn parse(text: &str) -> Result<Vec<(String, Values)>, (usize, &'static str)> {
    let mut flags: Vec<(String, Values)> = Vec::new();
    let mut is_list = false;
    for (line, content) in (1..).zip(text.lines()) {
        let content = without_comment(content);
        let trimmed = content.trim();
        if trimmed.is_empty() || trimmed == "---" {
            continue;
        }
        if let Some(entry) = trimmed.strip_prefix("- ") {
            match flags.last_mut() {
                Some((_, Values::List(values))) if is_list => values.push(unquoted(entry)),
                _ => return Err((line, "an entry of no list")),
            }
            continue;
        }
        if content.starts_with([' ', '\t']) {
            return Err((line, "flags are not nested"));
        }
        let (name, value) = trimmed.split_once(':').ok_or((line, "is not `name: value`"))?;
        is_list = value.trim().is_empty();
        flags.push((unquoted(name), values(value.trim())));
    }
    Ok(flags)
}

fn values(value: &str) -> Values {
    match value {
        "true" => Values::Switch(true),
        "false" | "null" | "~" => Values::Switch(false),
        "" => Values::List(Vec::new()),
        _ => match value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(list) => {
                let entries = list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
                Values::List(entries.map(unquoted).collect())
            }
            None => Values::List(vec![unquoted(value)]),
        },
    }
}

fn without_comment(line: &str) -> &str {
    let mut quote = None;
    for (at, letter) in line.char_indices() {
        match (quote, letter) {
            (None, '"' | '\'') => quote = Some(letter),
            (Some(open), _) if open == letter => quote = None,
            (None, '#') if at == 0 || line[..at].ends_with([' ', '\t']) => return &line[..at],
            _ => {}
        }
    }
    line
}

fn unquoted(text: &str) -> String {
    let text = text.trim();
    let inside = |quote| text.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    inside('"').or_else(|| inside('\'')).unwrap_or(text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_the_part_of_yaml_that_flags_need() {
        let text = "# a comment\n---\nmodel: org/name # which\nport: 8001\nisolate_tenants: true\n\
                    exact-activations: false\nserved-model-name: [a, 'b c']\napi-key:\n  - \"x#y\"\n  - z\n";
        let list = |values: &[&str]| Values::List(values.iter().map(|&v| v.to_owned()).collect());
        let flags = parse(text).unwrap();
        let expect = [
            ("model", list(&["org/name"])),
            ("port", list(&["8001"])),
            ("isolate_tenants", Values::Switch(true)),
            ("exact-activations", Values::Switch(false)),
            ("served-model-name", list(&["a", "b c"])),
            ("api-key", list(&["x#y", "z"])),
        ];
        assert_eq!(flags, expect.map(|(name, values)| (name.to_owned(), values)));
        for (text, line) in [("port 1", 1), ("a: 1\n- b", 2), ("a:\n  b: c", 2), ("- a", 1)] {
            assert_eq!(parse(text).unwrap_err().0, line, "{text}");
        }
    }

    #[test]
    fn what_is_typed_goes_before_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("flags.yaml");
        std::fs::write(&path, "model: m\nport: 1\nhost: h\nisolate-tenants: true\ndtype: auto\n")
            .unwrap();
        let config = format!("--config={}", path.display());
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let all = with_config_file(words(&["nuthatch", "serve", "x", "--port", "2", &config]));
        let expect = words(&[
            "nuthatch",
            "serve",
            "--host=h",
            "--isolate-tenants",
            "x",
            "--port",
            "2",
            &config,
        ]);
        assert_eq!(all.unwrap(), expect);
        let others = words(&["nuthatch", "run", &config]);
        assert_eq!(with_config_file(others.clone()).unwrap(), others);
        assert!(with_config_file(words(&["nuthatch", "serve", "--config", "/nowhere"])).is_err());
    }
}
