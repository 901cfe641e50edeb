//! A progress bar on a terminal, one line elsewhere.

use std::io::{IsTerminal as _, Write as _};

use indicatif::{ProgressBar, ProgressStyle};

use crate::size::Bytes;

/// Shows how far a transfer of a known size is.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Starts a bar, its length to be told later if need be; without a terminal, says once what begins.
    pub(super) fn start(label: &str, bytes: Option<u64>) -> Self {
        if !std::io::stderr().is_terminal() {
            // A closed stderr is no reason to stop.
            let size = bytes.map(|bytes| format!(" ({})", Bytes(bytes))).unwrap_or_default();
            let _ = writeln!(std::io::stderr(), "{label}{size}");
            return Progress { bar: ProgressBar::hidden() };
        }
        let bar = ProgressBar::new(bytes.unwrap_or(0));
        let template = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec}";
        let style = ProgressStyle::with_template(template).expect("the template is constant");
        bar.set_style(style.progress_chars("=> "));
        bar.set_message(label.to_owned());
        Progress { bar }
    }

    /// Shows `bytes` as done; a bar never goes back.
    pub(super) fn set(&self, bytes: u64) {
        self.bar.set_position(bytes.max(self.bar.position()));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl hf_hub::api::Progress for &Progress {
    fn init(&mut self, size: usize, _filename: &str) {
        self.bar.set_length(size as u64);
    }

    fn update(&mut self, size: usize) {
        self.bar.inc(size as u64);
    }

    fn finish(&mut self) {}
}
