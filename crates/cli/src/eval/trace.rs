//! The file of `--record-trace`: a line for each decision.

use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;

use anyhow::Context as _;
use nuthatch_engine::topk::Decision;

/// Where decisions are written, if anywhere.
pub(super) struct Trace {
    file: Option<BufWriter<File>>,
}

impl Trace {
    /// A new file, or the end of one where a run goes on.
    pub(super) fn open(path: Option<&Path>, goes_on: bool) -> anyhow::Result<Self> {
        let open = |path: &Path| {
            let mut options = File::options();
            let options = options.create(true).read(true).append(true);
            let file = options.open(path)?;
            file.set_len(if goes_on { whole_lines(&file)? } else { 0 })?;
            Ok::<_, std::io::Error>(BufWriter::new(file))
        };
        let named =
            |path: &Path| open(path).with_context(|| format!("cannot write {}", path.display()));
        Ok(Trace { file: path.map(named).transpose()? })
    }

    pub(super) fn write(&mut self, decisions: &[Decision]) -> anyhow::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        for decision in decisions {
            serde_json::to_writer(&mut *file, decision)?;
            file.write_all(b"\n")?;
        }
        Ok(file.flush()?)
    }
}

/// Bytes of the lines that have an end: a run that was killed may have left part of one.
fn whole_lines(file: &File) -> std::io::Result<u64> {
    let (mut reader, mut line, mut bytes) = (BufReader::new(file), Vec::new(), 0);
    while reader.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
        bytes += line.len() as u64;
        line.clear();
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_line_is_not_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        for (before, goes_on, after) in [
            ("", true, ""),
            ("{}\n{}\n", true, "{}\n{}\n"),
            ("{}\n{\"laye", true, "{}\n"),
            ("{\"laye", true, ""),
            ("{}\n", false, ""),
        ] {
            std::fs::write(&path, before).unwrap();
            Trace::open(Some(&path), goes_on).unwrap().write(&[]).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after, "{before:?}");
        }
        assert!(Trace::open(Some(dir.path()), false).is_err(), "a folder is no file");
        Trace::open(None, true).unwrap().write(&[]).unwrap();
    }
}
