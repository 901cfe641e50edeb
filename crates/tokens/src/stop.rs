//! Stop strings over a stream of text.
//!
//! ```text
//! text so far   ......................[ held ]
//!               already given out      could be the begin of a stop string
//! ```
//!
//! The stop string that is complete first wins; if two are complete at the same byte, the longer
//! one. So the result does not depend on how the text was cut into pieces.

/// Looks for stop strings across the borders of pieces, and holds back what could be the begin of
/// one.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    include_match: bool,
    /// Text that was not given out yet: the longest begin of a stop string that ends it.
    held: String,
    stopped: bool,
}

/// What a piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutput {
    /// Text that may be shown.
    pub text: String,
    /// Index of the stop string that was found, in the order given; text after it is dropped.
    pub found: Option<usize>,
}

impl StopMatcher {
    /// A matcher for `stops`. Empty strings never match. With `include_match` the stop string
    /// itself is given out too.
    pub fn new<S: AsRef<str>>(stops: &[S], include_match: bool) -> Self {
        StopMatcher {
            patterns: stops.iter().map(|stop| Pattern::new(stop.as_ref())).collect(),
            include_match,
            held: String::new(),
            stopped: false,
        }
    }

    /// Takes the next text. After a match everything is dropped.
    pub fn push(&mut self, text: &str) -> StopOutput {
        if self.stopped {
            return StopOutput::default();
        }
        let n_before = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            let Some(idx) = self.advance(byte) else { continue };
            self.stopped = true;
            let end = n_before + i + 1;
            let kept = if self.include_match { end } else { end - self.patterns[idx].bytes.len() };
            self.held.truncate(kept);
            return StopOutput { text: std::mem::take(&mut self.held), found: Some(idx) };
        }
        let n_held = self.patterns.iter().map(|p| p.n_matched).max().unwrap_or(0);
        let tail = self.held.split_off(self.held.len() - n_held);
        StopOutput { text: std::mem::replace(&mut self.held, tail), found: None }
    }

    /// Ends the text: what was held back is no stop string after all. The matcher starts anew.
    pub fn flush(&mut self) -> String {
        for pattern in &mut self.patterns {
            pattern.n_matched = 0;
        }
        self.stopped = false;
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Takes one byte; gives the longest stop string that it completes.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut found: Option<usize> = None;
        for idx in 0..self.patterns.len() {
            let longer = found.is_none_or(|best| {
                self.patterns[idx].bytes.len() > self.patterns[best].bytes.len()
            });
            if self.patterns[idx].advance(byte) && longer {
                found = Some(idx);
            }
        }
        found
    }
}

/// One stop string and how much of it the text ends with (Knuth, Morris, Pratt).
///
/// Bytes serve as well as characters: a begin of a stop string starts with a character's first
/// byte, so that what is held back always starts at a character.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `borders[i]`: length of the longest proper begin of `bytes[..=i]` that also ends it.
    borders: Vec<usize>,
    n_matched: usize,
}

impl Pattern {
    fn new(stop: &str) -> Self {
        let bytes = stop.as_bytes().to_vec();
        let mut borders = vec![0; bytes.len()];
        for i in 1..bytes.len() {
            let mut n = borders[i - 1];
            while n > 0 && bytes[n] != bytes[i] {
                n = borders[n - 1];
            }
            borders[i] = if bytes[n] == bytes[i] { n + 1 } else { 0 };
        }
        Pattern { bytes, borders, n_matched: 0 }
    }

    /// Whether `byte` completes the string.
    fn advance(&mut self, byte: u8) -> bool {
        if self.bytes.is_empty() {
            return false;
        }
        if self.n_matched == self.bytes.len() {
            self.n_matched = self.borders[self.n_matched - 1];
        }
        while self.n_matched > 0 && self.bytes[self.n_matched] != byte {
            self.n_matched = self.borders[self.n_matched - 1];
        }
        if self.bytes[self.n_matched] == byte {
            self.n_matched += 1;
        }
        self.n_matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the rule says, over the whole text at once.
    fn naive(text: &str, stops: &[String], include: bool) -> (String, Option<usize>) {
        for end in 1..=text.len() {
            let best = stops
                .iter()
                .enumerate()
                .filter(|(_, s)| !s.is_empty() && text.as_bytes()[..end].ends_with(s.as_bytes()))
                .max_by_key(|(idx, s)| (s.len(), usize::MAX - idx));
            if let Some((idx, stop)) = best {
                let kept = if include { end } else { end - stop.len() };
                return (text[..kept].to_owned(), Some(idx));
            }
        }
        (text.to_owned(), None)
    }

    fn run(pieces: &[String], stops: &[String], include: bool) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops, include);
        let mut text = String::new();
        let mut found = None;
        for piece in pieces {
            let output = matcher.push(piece);
            text.push_str(&output.text);
            found = found.or(output.found);
            assert_eq!(matcher.is_stopped(), found.is_some());
        }
        text.push_str(&matcher.flush());
        (text, found)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn agrees_with_a_search_over_the_whole_text(
            pieces in prop::collection::vec("[ab\u{e9}\u{20ac}]{0,4}", 0..12),
            stops in prop::collection::vec("[ab\u{e9}\u{20ac}]{0,5}", 0..4),
            include: bool,
        ) {
            let whole = pieces.concat();
            prop_assert_eq!(run(&pieces, &stops, include), naive(&whole, &stops, include));
        }
    }

    #[test]
    fn text_is_held_back_only_while_it_could_become_a_stop_string() {
        let mut matcher = StopMatcher::new(&["\nUser:"], false);
        assert_eq!(matcher.push("Hello\nUs").text, "Hello");
        assert_eq!(matcher.push("ual\nUser").text, "\nUsual");
        let last = matcher.push(": and more");
        assert_eq!(last, StopOutput { text: String::new(), found: Some(0) });
        assert_eq!(matcher.push("nothing"), StopOutput::default());
    }
}
