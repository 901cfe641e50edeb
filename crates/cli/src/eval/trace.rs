//! The file of `--record-trace`: a line for each decision.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use anyhow::Context as _;
use nuthatch_engine::topk::Decision;

/// Where decisions are written, if anywhere.
pub(super) struct Trace {
    file: Option<BufWriter<File>>,
}

impl Trace {
    /// A new file, or one that is gone on with where it had so many bytes: what comes after them is of a run that was
    /// killed before it kept its results.
    pub(super) fn open(path: Option<&Path>, goes_on_at: Option<u64>) -> anyhow::Result<Self> {
        let open = |path: &Path| {
            let mut options = File::options();
            let goes_on = goes_on_at.is_some();
            let options = options.create(true).write(true).append(goes_on).truncate(!goes_on);
            let file = options.open(path)?;
            if goes_on_at.is_some_and(|bytes| file.metadata().is_ok_and(|all| all.len() > bytes)) {
                file.set_len(goes_on_at.unwrap_or_default())?;
            }
            Ok::<_, io::Error>(BufWriter::new(file))
        };
        let named =
            |path: &Path| open(path).with_context(|| format!("cannot write {}", path.display()));
        Ok(Trace { file: path.map(named).transpose()? })
    }

    /// Writes decisions, and gives the bytes of the file.
    pub(super) fn write(&mut self, decisions: &[Decision]) -> anyhow::Result<Option<u64>> {
        let Some(file) = &mut self.file else { return Ok(None) };
        for decision in decisions {
            serde_json::to_writer(&mut *file, decision)?;
            file.write_all(b"\n")?;
        }
        file.flush()?;
        Ok(Some(file.get_ref().metadata()?.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_left_is_not_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        for (before, goes_on_at, after) in [
            ("{}\n{}\n{\"laye", Some(3), "{}\n"),
            ("{}\n", Some(3), "{}\n"),
            ("{}\n", Some(u64::MAX), "{}\n"),
            ("", Some(3), ""),
            ("{}\n", None, ""),
        ] {
            std::fs::write(&path, before).unwrap();
            let mut trace = Trace::open(Some(&path), goes_on_at).unwrap();
            assert_eq!(trace.write(&[]).unwrap(), Some(after.len() as u64));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after, "{before:?}");
        }
        assert!(Trace::open(Some(dir.path()), None).is_err(), "a folder is no file");
        assert_eq!(Trace::open(None, Some(7)).unwrap().write(&[]).unwrap(), None);
        Trace::open(Some(Path::new("/dev/null")), None).unwrap().write(&[]).unwrap();
    }
}
