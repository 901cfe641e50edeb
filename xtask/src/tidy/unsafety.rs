//! Rule: `unsafe` lives in the crates that cannot do without it.

use super::view::has_word;
use super::{Complaint, Source};

/// SIMD, the CUDA interface, mapped and pinned memory.
const HOMES: [&str; 3] = ["crates/backend-cpu/", "crates/backend-cuda/", "crates/store/"];

/// Checks one file.
pub(crate) fn check(source: &Source, found: &mut Vec<Complaint>) {
    let Some(view) = &source.view else { return };
    if HOMES.iter().any(|home| source.path.starts_with(home)) {
        return;
    }
    for (at, line) in view.code.lines().enumerate() {
        if has_word(line, "unsafe") {
            found.push(
                source.complain(at + 1, "unsafe outside backend-cpu, backend-cuda and store"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        let mut found = Vec::new();
        check(&Source::new(path, text.to_owned()), &mut found);
        found.len()
    }

    #[test]
    fn unsafe_stays_at_home() {
        assert_eq!(count("crates/store/src/host.rs", "unsafe { f() }\n"), 0);
        assert_eq!(
            count("crates/cache/src/pool.rs", "// never unsafe\n#![forbid(unsafe_code)]\n"),
            0
        );
        assert_eq!(count("crates/cache/src/pool.rs", "unsafe { f() }\n"), 1);
    }
}
