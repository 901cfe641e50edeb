//! A Rust file seen as code and as comments, line for line.
//!
//! This is a lexer, not a parser: it knows strings, characters, lifetimes and nested comments, so
//! that a rule about code does not trip over a word in a string. Both views have the lines of the
//! file; what belongs to neither (the insides of strings) is blank in both.

/// The two views of one file.
pub(crate) struct View {
    /// Code; comments and the insides of literals are blank.
    pub(crate) code: String,
    /// Comments; everything else is blank.
    pub(crate) comments: String,
}

#[derive(Clone, Copy)]
enum State {
    Code,
    LineComment,
    BlockComment { depth: u32 },
    Str,
    RawStr { hashes: usize },
}

impl View {
    /// Splits `text`.
    pub(crate) fn new(text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let mut view = Self { code: String::new(), comments: String::new() };
        let mut state = State::Code;
        let mut at = 0;
        while at < chars.len() {
            let (len, next) = advance(state, &chars, at);
            for &symbol in &chars[at..at + len] {
                view.push(symbol, state, next);
            }
            state = next;
            at += len;
        }
        view
    }

    /// Adds one symbol; opening and closing marks belong to what they open and close.
    fn push(&mut self, symbol: char, state: State, next: State) {
        let comment = matches!(
            (state, next),
            (State::LineComment | State::BlockComment { .. }, _)
                | (_, State::LineComment | State::BlockComment { .. })
        );
        let code = matches!((state, next), (State::Code, State::Code));
        let keep = symbol == '\n';
        self.code.push(if keep || code { symbol } else { ' ' });
        self.comments.push(if keep || comment { symbol } else { ' ' });
    }
}

/// How many symbols belong together at `at`, and the state after them.
fn advance(state: State, chars: &[char], at: usize) -> (usize, State) {
    let rest = &chars[at..];
    match state {
        State::Code => advance_code(chars, at),
        State::LineComment if rest[0] == '\n' => (1, State::Code),
        State::LineComment => (1, state),
        State::BlockComment { depth } if rest.starts_with(&['/', '*']) => {
            (2, State::BlockComment { depth: depth + 1 })
        }
        State::BlockComment { depth } if rest.starts_with(&['*', '/']) => {
            (2, if depth == 1 { State::Code } else { State::BlockComment { depth: depth - 1 } })
        }
        State::Str if rest[0] == '\\' => (rest.len().min(2), state),
        State::Str if rest[0] == '"' => (1, State::Code),
        State::RawStr { hashes }
            if rest[0] == '"'
                && rest.len() > hashes
                && rest[1..=hashes].iter().all(|&symbol| symbol == '#') =>
        {
            (1 + hashes, State::Code)
        }
        State::BlockComment { .. } | State::Str | State::RawStr { .. } => (1, state),
    }
}

fn advance_code(chars: &[char], at: usize) -> (usize, State) {
    let rest = &chars[at..];
    if rest.starts_with(&['/', '/']) {
        return (2, State::LineComment);
    }
    if rest.starts_with(&['/', '*']) {
        return (2, State::BlockComment { depth: 1 });
    }
    if rest[0] == '"' {
        return (1, State::Str);
    }
    let in_word = at > 0 && is_word(chars[at - 1]);
    if rest[0] == 'r' && (!in_word || matches!(chars[at - 1], 'b' | 'c')) {
        let hashes = rest[1..].iter().take_while(|&&symbol| symbol == '#').count();
        if rest.get(1 + hashes) == Some(&'"') {
            return (2 + hashes, State::RawStr { hashes });
        }
    }
    if rest[0] == '\'' {
        return (char_literal_len(rest), State::Code);
    }
    (1, State::Code)
}

/// A character literal is taken whole (it may be a quote); a lifetime's mark alone.
fn char_literal_len(rest: &[char]) -> usize {
    match rest {
        ['\'', '\\', ..] => {
            let close = rest.iter().skip(3).position(|&symbol| symbol == '\'');
            close.map_or(1, |at| at + 4)
        }
        ['\'', _, '\'', ..] => 3,
        _ => 1,
    }
}

/// Whether `symbol` can be part of a name.
pub(crate) fn is_word(symbol: char) -> bool {
    symbol.is_alphanumeric() || symbol == '_'
}

/// Whether `line` holds `word` with no name's symbols around it.
pub(crate) fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        !line[..at].chars().next_back().is_some_and(is_word)
            && !line[at + word.len()..].chars().next().is_some_and(is_word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separates_code_from_comments_and_strings() {
        let check = |text: &str, code: &str, comments: &str| {
            let view = View::new(text);
            assert_eq!(view.code.split_whitespace().collect::<Vec<_>>().join(" "), code, "{text}");
            assert_eq!(view.comments.trim(), comments, "{text}");
            assert_eq!(view.code.lines().count(), text.lines().count());
        };
        check("let a = 1; // unsafe", "let a = 1;", "// unsafe");
        check("let a = \"// no\"; b", "let a = ; b", "");
        check("let a = r#\"x \" // y\"#; b", "let a = ; b", "");
        check("f(b\"\\\"\") /* a /* b */ c */ g", "f(b ) g", "/* a /* b */ c */");
        check("fn f<'a>(x: &'a str) // y", "fn f<'a>(x: &'a str)", "// y");
        check("let q = '\"'; // z", "let q = '\"';", "// z");
        check("let q = '\\''; // z", "let q = '\\'';", "// z");
    }

    #[test]
    fn words_are_whole() {
        assert!(has_word("an unsafe block", "unsafe"));
        assert!(!has_word("unsafe_code", "unsafe"));
    }
}
