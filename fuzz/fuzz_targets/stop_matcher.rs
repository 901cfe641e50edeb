//! The stop matcher gives out the same text, however the text was cut into pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nuthatch_tokens::StopMatcher;

/// Everything that is given out for `pieces`, and the stop string that ended it.
fn run<'a>(stops: &[&str], pieces: impl Iterator<Item = &'a str>) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops, false);
    let mut text = String::new();
    for piece in pieces {
        let output = matcher.push(piece);
        text.push_str(&output.text);
        if output.found.is_some() {
            return (text, output.found);
        }
    }
    text.push_str(&matcher.flush());
    (text, None)
}

fuzz_target!(|input: &str| {
    // Two stop strings, then the text, one a line.
    let mut lines = input.splitn(3, '\n');
    let stops = [lines.next().unwrap_or_default(), lines.next().unwrap_or_default()];
    let text = lines.next().unwrap_or_default();
    let whole = run(&stops, std::iter::once(text));
    let letters = text.char_indices().map(|(at, letter)| &text[at..at + letter.len_utf8()]);
    assert_eq!(whole, run(&stops, letters));
    match whole {
        (shown, None) => assert_eq!(shown, text),
        (shown, Some(found)) => assert!(text[shown.len()..].starts_with(stops[found])),
    }
});
