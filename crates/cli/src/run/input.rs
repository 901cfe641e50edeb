//! What a person types in a chat: messages over several lines, and commands.

/// A line of the chat, complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// Nothing.
    Empty,
    /// Something for the model.
    Message(String),
    /// `/help`
    Help,
    /// `/reset`
    Reset,
    /// `/stats`
    Stats,
    /// `/system TEXT`; without a text the system message is shown.
    System(Option<String>),
    /// `/exit`
    Exit,
    /// A command that there is not.
    Unknown(String),
}

/// What `/help` prints.
pub(super) const HELP: &str = "\
/help          this text
/reset         begin a new conversation
/stats         tokens and speed of the last answer, and the cache
/system TEXT   set the system message
/exit          leave (also Ctrl-D, or Ctrl-C at the prompt)
A line that ends in \\ goes on in the next one; \"\"\" begins and ends a text of several lines.
Ctrl-C ends an answer.
";

/// Puts lines together until a message is complete.
///
/// ```text
///   line \         joined with the next one by a newline
///   """ ... """    everything between, newlines included
/// ```
#[derive(Debug, Default)]
pub(super) struct Lines {
    text: String,
    is_quoted: bool,
}

const QUOTE: &str = "\"\"\"";

impl Lines {
    /// Whether more lines are needed.
    pub(super) fn is_open(&self) -> bool {
        self.is_quoted || !self.text.is_empty()
    }

    /// Takes a line; gives the input when it is complete.
    pub(super) fn push(&mut self, line: &str) -> Option<Input> {
        if self.is_quoted {
            return self.push_quoted(line);
        }
        if self.text.is_empty()
            && let Some(rest) = line.trim_start().strip_prefix(QUOTE)
        {
            self.is_quoted = true;
            return if rest.is_empty() { None } else { self.push_quoted(rest) };
        }
        if let Some(begin) = line.strip_suffix('\\') {
            self.text.push_str(begin);
            self.text.push('\n');
            return None;
        }
        self.text.push_str(line);
        let is_one_line = !self.text.contains('\n');
        let text = std::mem::take(&mut self.text);
        Some(if is_one_line { parse(&text) } else { message(&text) })
    }

    fn push_quoted(&mut self, line: &str) -> Option<Input> {
        match line.trim_end().strip_suffix(QUOTE) {
            None => {
                self.text.push_str(line);
                self.text.push('\n');
                None
            }
            Some(end) => {
                self.text.push_str(end);
                self.is_quoted = false;
                Some(message(&std::mem::take(&mut self.text)))
            }
        }
    }
}

fn message(text: &str) -> Input {
    if text.trim().is_empty() { Input::Empty } else { Input::Message(text.trim().to_owned()) }
}

fn parse(line: &str) -> Input {
    let line = line.trim();
    if !line.starts_with('/') {
        return message(line);
    }
    let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim();
    match command {
        "/help" | "/?" => Input::Help,
        "/reset" | "/clear" => Input::Reset,
        "/stats" => Input::Stats,
        "/system" => Input::System((!rest.is_empty()).then(|| rest.to_owned())),
        "/exit" | "/quit" | "/bye" => Input::Exit,
        _ => Input::Unknown(command.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(lines: &[&str]) -> Vec<Input> {
        let mut open = Lines::default();
        lines.iter().filter_map(|line| open.push(line)).collect()
    }

    fn said(text: &str) -> Input {
        Input::Message(text.to_owned())
    }

    #[test]
    fn commands_and_messages_are_told_apart() {
        assert_eq!(feed(&["hello", "", "  /reset  "]), [said("hello"), Input::Empty, Input::Reset]);
        assert_eq!(feed(&["/system Be brief."]), [Input::System(Some("Be brief.".to_owned()))]);
        assert_eq!(feed(&["/system", "/stats"]), [Input::System(None), Input::Stats]);
        assert_eq!(feed(&["/exit", "/help"]), [Input::Exit, Input::Help]);
        assert_eq!(feed(&["/nope x"]), [Input::Unknown("/nope".to_owned())]);
    }

    #[test]
    fn lines_go_on_after_a_backslash() {
        assert_eq!(feed(&["one\\", "two\\", "three"]), [said("one\ntwo\nthree")]);
        // What follows a backslash is text, even if it looks like a command.
        assert_eq!(feed(&["one\\", "/reset"]), [said("one\n/reset")]);
    }

    #[test]
    fn quotes_hold_several_lines() {
        assert_eq!(feed(&["\"\"\"", "a", "", "  b\\", "\"\"\""]), [said("a\n\n  b\\")]);
        assert_eq!(feed(&["\"\"\"a\"\"\""]), [said("a")]);
        assert_eq!(feed(&["\"\"\"a", "b\"\"\"", "c"]), [said("a\nb"), said("c")]);
        let mut open = Lines::default();
        assert_eq!(open.push("\"\"\""), None);
        assert!(open.is_open());
        assert_eq!(open.push("\"\"\""), Some(Input::Empty));
        assert!(!open.is_open());
    }
}
