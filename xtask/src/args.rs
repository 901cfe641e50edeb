//! The words of a command line, taken out one after another.
//!
//! Chores have few options, so this replaces a parser: a chore takes what it knows, then calls
//! [`Args::finish`], which refuses what is left.

use std::str::FromStr;

use anyhow::{Context, Result, bail};

/// Words not taken yet, in order.
#[derive(Debug, Default)]
pub(crate) struct Args {
    words: Vec<String>,
}

impl Args {
    /// The words after the program's name.
    pub(crate) fn from_env() -> Self {
        Self { words: std::env::args().skip(1).collect() }
    }

    /// Takes the next word that is not an option.
    pub(crate) fn word(&mut self) -> Option<String> {
        match self.words.first() {
            Some(first) if !first.starts_with("--") => Some(self.words.remove(0)),
            _ => None,
        }
    }

    /// Takes `name`, and says whether it was there.
    pub(crate) fn flag(&mut self, name: &str) -> bool {
        match self.words.iter().position(|word| word == name) {
            Some(at) => {
                self.words.remove(at);
                true
            }
            None => false,
        }
    }

    /// Takes `name VALUE` or `name=VALUE`.
    pub(crate) fn value<T>(&mut self, name: &str) -> Result<Option<T>>
    where
        T: FromStr,
        T::Err: std::error::Error + Send + Sync + 'static,
    {
        let Some(at) = self.words.iter().position(|word| {
            word.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        }) else {
            return Ok(None);
        };
        let word = self.words.remove(at);
        let text = match word.split_once('=') {
            Some((_, value)) => value.to_owned(),
            None if at < self.words.len() => self.words.remove(at),
            None => bail!("{name} needs a value"),
        };
        let value = text.parse().with_context(|| format!("{name} {text}"))?;
        Ok(Some(value))
    }

    /// Takes everything that is left.
    pub(crate) fn rest(self) -> Vec<String> {
        self.words
    }

    /// Refuses words that no one took.
    pub(crate) fn finish(self) -> Result<()> {
        if self.words.is_empty() {
            return Ok(());
        }
        bail!("unknown argument: {}", self.words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Args {
        Args { words: line.split_whitespace().map(str::to_owned).collect() }
    }

    #[test]
    fn takes_words_flags_and_values_in_any_order() {
        let mut args = args("peer llama-cpp --rounds 3 --json=out.json --quick");
        assert_eq!(args.word().as_deref(), Some("peer"));
        assert_eq!(args.word().as_deref(), Some("llama-cpp"));
        assert!(args.flag("--quick"));
        assert!(!args.flag("--quick"));
        assert_eq!(args.value::<String>("--json").unwrap().as_deref(), Some("out.json"));
        assert_eq!(args.value::<u32>("--rounds").unwrap(), Some(3));
        args.finish().unwrap();
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        assert!(args("--wat").finish().is_err());
        assert!(args("--rounds").value::<u32>("--rounds").is_err());
        assert!(args("--rounds three").value::<u32>("--rounds").is_err());
    }
}
