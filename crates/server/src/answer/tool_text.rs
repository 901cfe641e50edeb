//! Tool calls in a model's text.
//!
//! ```text
//!   Hermes, Qwen   some text <tool_call> {"name": ..., "arguments": {...}} </tool_call> ...
//!   Llama          {"name": ..., "parameters": {...}}; {...}          and nothing else
//! ```
//!
//! What could be the begin of a call is held back. What turns out to be none is text.

use std::hash::{BuildHasher as _, Hasher as _};

use nuthatch_wire::{ToolCall, ToolChoice};
use serde_json::Value;

/// How a model writes its calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolFormat {
    /// It was not taught to.
    #[default]
    None,
    /// Between tags, as Hermes and Qwen do.
    Hermes,
    /// As the whole answer, as Llama does.
    Llama,
}

impl ToolFormat {
    /// The format that a chat template teaches.
    pub fn of_template(source: &str) -> Self {
        if source.contains(BEGIN) {
            ToolFormat::Hermes
        } else if source.contains("tools") && source.contains("\"parameters\"") {
            ToolFormat::Llama
        } else {
            ToolFormat::None
        }
    }
}

const BEGIN: &str = "<tool_call>";
const END: &str = "</tool_call>";
/// Some Llama models put it before a call.
const PYTHON_TAG: &str = "<|python_tag|>";

/// Takes the calls out of a text as it grows.
#[derive(Clone, Debug)]
pub(super) struct ToolText {
    format: ToolFormat,
    /// What was not given out yet.
    held: String,
    /// Bytes of `held` in which the end of a call was looked for.
    n_searched: usize,
    place: Place,
    n_calls: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nothing but white space was seen.
    Start,
    Text,
    Call,
}

impl ToolText {
    /// For a model that writes its calls like this; `None` if there is nothing to look for.
    pub(super) fn new(format: ToolFormat, choice: &ToolChoice) -> Option<Self> {
        let is_wanted = format != ToolFormat::None && *choice != ToolChoice::None;
        is_wanted.then(|| ToolText {
            format,
            held: String::new(),
            n_searched: 0,
            place: Place::Start,
            n_calls: 0,
        })
    }

    /// Takes the next text, and gives what is certainly text and the calls that are whole.
    pub(super) fn push(&mut self, text: &str) -> (String, Vec<ToolCall>) {
        self.held.push_str(text);
        match self.format {
            ToolFormat::None => (std::mem::take(&mut self.held), Vec::new()),
            ToolFormat::Hermes => self.tagged(),
            ToolFormat::Llama => (self.whole(), Vec::new()),
        }
    }

    /// Ends the text.
    pub(super) fn finish(&mut self) -> (String, Vec<ToolCall>) {
        let held = std::mem::take(&mut self.held);
        if self.place != Place::Call {
            return (held, Vec::new());
        }
        let calls = match self.format {
            // The answer may be cut off between a call and its tag.
            ToolFormat::Hermes => call(&held).map(|call| vec![call]),
            ToolFormat::Llama => calls(&held),
            ToolFormat::None => None,
        };
        match calls {
            Some(calls) => (String::new(), calls),
            None if self.format == ToolFormat::Hermes => (format!("{BEGIN}{held}"), Vec::new()),
            None => (held, Vec::new()),
        }
    }

    fn tagged(&mut self) -> (String, Vec<ToolCall>) {
        let (mut text, mut calls) = (String::new(), Vec::new());
        loop {
            if self.place != Place::Call {
                let Some(at) = self.held.find(BEGIN) else {
                    let n_kept = n_begun(&self.held, BEGIN);
                    let rest = self.held.split_off(self.held.len() - n_kept);
                    text += &std::mem::replace(&mut self.held, rest);
                    break;
                };
                text += &self.held[..at];
                self.held.drain(..at + BEGIN.len());
                (self.place, self.n_searched) = (Place::Call, 0);
            }
            let Some(at) = self.held[self.n_searched..].find(END) else {
                let end = self.held.len().saturating_sub(END.len());
                self.n_searched = self.held.floor_char_boundary(end);
                break;
            };
            let at = self.n_searched + at;
            match call(&self.held[..at]) {
                Some(call) => calls.push(call),
                None => text += &format!("{BEGIN}{}{END}", &self.held[..at]),
            }
            self.held.drain(..at + END.len());
            self.place = Place::Text;
        }
        self.n_calls += calls.len() as u32;
        // White space around calls is not something that the model says.
        if self.n_calls > 0 && text.trim().is_empty() {
            text.clear();
        }
        (text, calls)
    }

    fn whole(&mut self) -> String {
        if self.place == Place::Start {
            let seen = self.held.trim_start();
            if PYTHON_TAG.starts_with(seen) {
                return String::new();
            }
            let is_call = seen.starts_with('{') || seen.starts_with(PYTHON_TAG);
            self.place = if is_call { Place::Call } else { Place::Text };
        }
        if self.place == Place::Call { String::new() } else { std::mem::take(&mut self.held) }
    }
}

/// Bytes at the end of `text` that `marker` begins with.
fn n_begun(text: &str, marker: &str) -> usize {
    let most = text.len().min(marker.len() - 1);
    (1..=most).rev().find(|&n| text.as_bytes().ends_with(&marker.as_bytes()[..n])).unwrap_or(0)
}

/// One call.
fn call(text: &str) -> Option<ToolCall> {
    read(serde_json::from_str(text.trim()).ok()?)
}

/// Several calls, with semicolons or nothing between them, and nothing else.
fn calls(text: &str) -> Option<Vec<ToolCall>> {
    let text = text.trim();
    let text = text.strip_prefix(PYTHON_TAG).unwrap_or(text).replace("};", "} ");
    let values = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
    let calls: Option<Vec<ToolCall>> = values.map(|value| read(value.ok()?)).collect();
    calls.filter(|calls| !calls.is_empty())
}

fn read(value: Value) -> Option<ToolCall> {
    let name = value.get("name")?.as_str()?.to_owned();
    let arguments = match value.get("arguments").or_else(|| value.get("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(arguments) => arguments.to_string(),
    };
    Some(ToolCall { id: format!("call_{:016x}", unique()), name, arguments })
}

/// A number that nobody else has, and nobody can guess.
pub(crate) fn unique() -> u64 {
    // The standard library seeds its hash maps from the system's randomness, each one differently.
    std::hash::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds a text in pieces, and gives the text and the calls as (name, arguments).
    fn run(format: ToolFormat, pieces: &[&str]) -> (String, Vec<(String, String)>) {
        let mut tools = ToolText::new(format, &ToolChoice::Auto).unwrap();
        let (mut text, mut calls) = (String::new(), Vec::new());
        for piece in pieces {
            let (more, mut new) = tools.push(piece);
            text += &more;
            calls.append(&mut new);
        }
        let (more, mut new) = tools.finish();
        text += &more;
        calls.append(&mut new);
        (text, calls.into_iter().map(|call| (call.name, call.arguments)).collect())
    }

    fn check(format: ToolFormat, text: &str, shown: &str, calls: &[(&str, &str)]) {
        let calls: Vec<(String, String)> =
            calls.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect();
        assert_eq!(run(format, &[text]), (shown.to_owned(), calls.clone()), "{text}");
        // However the text is cut, the result is the same.
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(run(format, &letters), (shown.to_owned(), calls), "{text}");
    }

    #[test]
    fn calls_between_tags() {
        let hermes = |text: &str, shown: &str, calls: &[(&str, &str)]| {
            check(ToolFormat::Hermes, text, shown, calls);
        };
        hermes("just text", "just text", &[]);
        hermes("a < b <tool", "a < b <tool", &[]);
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
        hermes(one, "", &[("f", "{\"x\":1}")]);
        hermes(&format!("{one}\n{one}"), "", &[("f", "{\"x\":1}"), ("f", "{\"x\":1}")]);
        hermes(&format!("Well. {one}"), "Well. ", &[("f", "{\"x\":1}")]);
        hermes("<tool_call>{\"name\": \"f\"}", "", &[("f", "{}")]);
        hermes("<tool_call>no JSON</tool_call>.", "<tool_call>no JSON</tool_call>.", &[]);
        hermes("<tool_call>{\"name\": ", "<tool_call>{\"name\": ", &[]);
    }

    #[test]
    fn calls_as_the_whole_answer() {
        let llama = |text: &str, shown: &str, calls: &[(&str, &str)]| {
            check(ToolFormat::Llama, text, shown, calls);
        };
        llama("just text {\"name\": \"f\"}", "just text {\"name\": \"f\"}", &[]);
        llama(
            "{\"name\": \"f\", \"parameters\": {\"x\": \"\u{e9}\"}}",
            "",
            &[("f", "{\"x\":\"\u{e9}\"}")],
        );
        llama("<|python_tag|>{\"name\": \"f\"}", "", &[("f", "{}")]);
        llama("{\"name\": \"f\"}; {\"name\": \"g\"}", "", &[("f", "{}"), ("g", "{}")]);
        llama("{\"x\": 1}", "{\"x\": 1}", &[]);
        llama("{ not JSON", "{ not JSON", &[]);
    }

    #[test]
    fn templates_say_how_calls_are_written() {
        assert_eq!(ToolFormat::of_template("x <tool_call> y"), ToolFormat::Hermes);
        assert_eq!(ToolFormat::of_template("{{ tools }} \"parameters\""), ToolFormat::Llama);
        assert_eq!(ToolFormat::of_template("{{ messages }}"), ToolFormat::None);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_of_a_text_without_calls(
            pieces in prop::collection::vec("[<tol_ca/>x\u{e9} ]{0,6}", 0..12),
        ) {
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let whole = pieces.concat();
            prop_assume!(!whole.contains(BEGIN));
            let (text, calls) = run(ToolFormat::Hermes, &pieces);
            prop_assert_eq!((text, calls.len()), (whole, 0));
        }
    }
}
