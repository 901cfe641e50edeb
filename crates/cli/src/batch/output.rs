//! The file of answers: what it already holds, and one line more for each answer.
//!
//! ```text
//!   whole lines of earlier runs   [ half a line ]
//!   kept, and not computed again    cut off
//! ```

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{BufReader, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use nuthatch_wire::{BatchAnswered, BatchOutput, caps};
use serde::Serialize;

use super::input::{Line, Lines};

/// Most bytes of an answer that is read back: more than any answer to a request has.
const LINE_BYTES_MAX: usize = 8 * caps::BODY_BYTES;

/// What earlier runs answered.
#[derive(Debug, Default)]
pub(super) struct Answered {
    /// Names of lines.
    names: BTreeSet<String>,
    /// Numbers of lines without a name of their own.
    ids: BTreeSet<String>,
}

impl Answered {
    /// Whether a line of this name was answered.
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Whether the line of this id, which has no name, was answered.
    pub(super) fn has_id(&self, id: &str) -> bool {
        self.ids.contains(id)
    }
}

/// A file that answers are appended to.
#[derive(Debug)]
pub(super) struct OutputFile {
    file: File,
}

impl OutputFile {
    /// Opens or makes the file, and says what it holds. Half a line at its end, which an
    /// interrupted run leaves, is cut off; anything else that is no answer is an error, because the
    /// file may be someone else's.
    pub(super) fn open(path: &Path) -> anyhow::Result<(Self, Answered)> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(path)?;
        let len = file.metadata()?.len();
        let mut lines = Lines::new(BufReader::new(&file), LINE_BYTES_MAX);
        let mut answered = Answered::default();
        let mut end = 0;
        while let Some((number, line)) = lines.next()? {
            let Line::Text(text) = line else { bail!("line {number} is no answer: too long") };
            let next = end + text.len() as u64 + 1;
            if next > len {
                break;
            }
            let answer = BatchAnswered::parse(&text)
                .with_context(|| format!("line {number} is no answer; is this the right file?"))?;
            match answer.custom_id {
                Some(name) => answered.names.insert(name),
                None => answered.ids.insert(answer.id),
            };
            end = next;
        }
        file.set_len(end)?;
        file.seek(SeekFrom::Start(end))?;
        Ok((OutputFile { file }, answered))
    }

    /// Appends an answer. It is in the file when this returns.
    pub(super) fn push<B: Serialize>(&mut self, answer: &BatchOutput<'_, B>) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.file.flush().context("cannot write an answer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(bytes: &str) -> (Result<Answered, String>, String) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        std::fs::write(&path, bytes).unwrap();
        let opened = OutputFile::open(&path).map_err(|error| format!("{error:#}"));
        let opened = opened.map(|(mut file, answered)| {
            let error: Option<BatchOutput<'_, ()>> = None;
            assert!(error.is_none());
            let (id, custom_id) = ("n".to_owned(), Some("new"));
            file.push(&BatchOutput::<()> { id, custom_id, response: None, error: None }).unwrap();
            answered
        });
        (opened, std::fs::read_to_string(&path).unwrap())
    }

    const ONE: &str = "{\"id\":\"i\",\"custom_id\":\"a\",\"response\":{},\"error\":null}\n";
    const NAMELESS: &str = "{\"id\":\"batch_req_2\",\"custom_id\":null,\"response\":null}\n";
    const NEW: &str = "{\"id\":\"n\",\"custom_id\":\"new\",\"response\":null,\"error\":null}\n";

    #[test]
    fn half_a_line_is_cut_off_wherever_it_was_cut() {
        for cut in 1..=ONE.len() {
            let half = &ONE[..ONE.len() - cut];
            let (answered, bytes) = open(&format!("{ONE}{NAMELESS}{half}"));
            let answered = answered.unwrap();
            assert!(answered.has_name("a") && answered.has_id("batch_req_2"));
            assert!(!answered.has_name("batch_req_2") && !answered.has_id("i"));
            assert_eq!(bytes, format!("{ONE}{NAMELESS}{NEW}"), "{half:?}");
        }
    }

    #[test]
    fn a_file_of_something_else_is_left_alone() {
        for text in ["hello\n", "{}\n", "[1]\n{\"id\":\"i\"}\n"] {
            let (answered, bytes) = open(text);
            assert!(answered.unwrap_err().contains("line 1 is no answer"), "{text:?}");
            assert_eq!(bytes, text);
        }
    }
}
