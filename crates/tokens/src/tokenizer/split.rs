//! How byte-level BPE vocabularies cut text into words before the merges.
//!
//! A rule is a list of regular expressions. Each cuts the pieces that the one before left; what it
//! does not match stays a piece of its own. All run in linear time: the one look-ahead that these
//! vocabularies use (the last space of a run belongs to the word after it) is done by hand.

use std::ops::Range;

use regex::Regex;

use super::TokenizerError;

/// Cuts text into words.
#[derive(Debug)]
pub(super) struct Splitter {
    steps: Vec<(Regex, SpaceRule)>,
}

/// What becomes of the last character of a run of white space that has text after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpaceRule {
    /// Nothing special.
    Keep,
    /// It goes to what comes next.
    Give,
    /// It goes to what comes next, except a line end: runs that end a line are pieces already.
    GiveUnlessLineEnd,
}

type Step = (&'static str, SpaceRule);

/// How a family of vocabularies cuts text.
pub(super) struct Rule {
    /// Values of `tokenizer.ggml.pre` that mean this rule.
    names: &'static [&'static str],
    steps: &'static [Step],
    /// A word that is a token is taken whole, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Whether models of the family want a begin token when their file does not say.
    pub(super) add_bos: bool,
}

impl Rule {
    /// The rule with this name.
    pub(super) fn find(name: &str) -> Result<&'static Rule, TokenizerError> {
        let name = if name.is_empty() { "default" } else { name };
        RULES.iter().find(|rule| rule.names.contains(&name)).ok_or_else(|| {
            TokenizerError::UnknownPreTokenizer {
                name: name.to_owned(),
                known: RULES.iter().flat_map(|rule| rule.names).copied().collect(),
            }
        })
    }

    pub(super) fn splitter(&self) -> Splitter {
        let compile = |&(pattern, space): &Step| {
            (Regex::new(pattern).expect("the patterns are ours and a test compiles each"), space)
        };
        Splitter { steps: self.steps.iter().map(compile).collect() }
    }
}

impl Splitter {
    /// The words of `text`, in order and without gaps.
    pub(super) fn split(&self, text: &str) -> Vec<Range<usize>> {
        let whole = 0..text.len();
        let mut words = Vec::new();
        if !text.is_empty() {
            words.push(whole);
        }
        let mut finer = Vec::new();
        for (regex, space) in &self.steps {
            for word in words.drain(..) {
                split_word(regex, *space, &text[word.clone()], word.start, &mut finer);
            }
            std::mem::swap(&mut words, &mut finer);
        }
        words
    }
}

fn split_word(
    regex: &Regex,
    space: SpaceRule,
    word: &str,
    offset: usize,
    out: &mut Vec<Range<usize>>,
) {
    let mut done = 0;
    while done < word.len() {
        let Some(found) = regex.find_at(word, done) else { break };
        let end = match_end(word, found.range(), space);
        if done < found.start() {
            out.push(offset + done..offset + found.start());
        }
        // No pattern matches the empty string, and `match_end` keeps at least one character.
        out.push(offset + found.start()..offset + end);
        done = end;
    }
    if done < word.len() {
        out.push(offset + done..offset + word.len());
    }
}

/// Where a match ends once the space rule has been applied.
fn match_end(word: &str, found: Range<usize>, space: SpaceRule) -> usize {
    let last = word[found.clone()].chars().next_back();
    let Some(last) = last.filter(|c| c.is_whitespace()) else { return found.end };
    let gives = match space {
        SpaceRule::Keep => false,
        SpaceRule::Give => true,
        SpaceRule::GiveUnlessLineEnd => !matches!(last, '\r' | '\n'),
    };
    // A match that ends in white space is a run of it, and has no white space after it.
    let shorter = found.end - last.len_utf8();
    if gives && found.end < word.len() && shorter > found.start { shorter } else { found.end }
}

const GPT2: Step =
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+", SpaceRule::Give);

const LLAMA3: Step = (
    r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    SpaceRule::GiveUnlessLineEnd,
);

const QWEN2: Step = (
    r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    SpaceRule::GiveUnlessLineEnd,
);

const QWEN35: Step = (
    r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    SpaceRule::GiveUnlessLineEnd,
);

const TEKKEN: Step = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    SpaceRule::GiveUnlessLineEnd,
);

const GPT4O: Step = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    SpaceRule::GiveUnlessLineEnd,
);

/// The cased letters that DeepSeek's first vocabularies count as one class.
const DEEPSEEK_LETTERS: Step = (
    r"(?x) \s?[
        A-Z a-z \u{B5} \u{C0}-\u{D6} \u{D8}-\u{F6} \u{F8}-\u{1BA} \u{1BC}-\u{1BF}
        \u{1C4}-\u{293} \u{295}-\u{2AF} \u{370}-\u{373} \u{376} \u{377} \u{37B}-\u{37D} \u{37F}
        \u{386} \u{388}-\u{38A} \u{38C} \u{38E}-\u{3A1} \u{3A3}-\u{3F5} \u{3F7}-\u{481}
        \u{48A}-\u{52F} \u{531}-\u{556} \u{10A0}-\u{10C5} \u{13A0}-\u{13F5} \u{13F8}-\u{13FD}
        \u{1C90}-\u{1CBA} \u{1CBD}-\u{1CBF} \u{1D00}-\u{1D2B} \u{1D6B}-\u{1D77}
        \u{1D79}-\u{1D9A} \u{1E00}-\u{1F15} \u{1F18}-\u{1F1D} \u{1F20}-\u{1F45}
        \u{1F48}-\u{1F4D} \u{1F50}-\u{1F57} \u{1F59} \u{1F5B} \u{1F5D} \u{1F5F}-\u{1F7D}
        \u{1F80}-\u{1FB4} \u{1FB6}-\u{1FBC} \u{1FBE} \u{1FC2}-\u{1FC4} \u{1FC6}-\u{1FCC}
        \u{1FD0}-\u{1FD3} \u{1FD6}-\u{1FDB} \u{1FE0}-\u{1FEC} \u{1FF2}-\u{1FF4}
        \u{1FF6}-\u{1FFC} \u{2102} \u{2107} \u{210A}-\u{2113} \u{2115} \u{2119}-\u{211D}
        \u{2124} \u{2126} \u{2128} \u{212A}-\u{212D} \u{212F}-\u{2134} \u{2139}
        \u{213C}-\u{213F} \u{2145}-\u{2149} \u{214E} \u{2183} \u{2184} \u{2C00}-\u{2C7B}
        \u{2C7E}-\u{2CE4} \u{2CEB}-\u{2CEE} \u{2CF2} \u{2CF3} \u{A640}-\u{A66D}
        \u{A680}-\u{A69B} \u{A722}-\u{A76F} \u{A771}-\u{A787} \u{A78B}-\u{A78E}
        \u{AB70}-\u{ABBF} \u{FB00}-\u{FB06} \u{FB13}-\u{FB17} \u{FF21}-\u{FF3A}
        \u{FF41}-\u{FF5A} \u{10400}-\u{1044F} \u{104B0}-\u{104D3} \u{104D8}-\u{104FB}
        \u{10C80}-\u{10CB2} \u{10CC0}-\u{10CF2} \u{118A0}-\u{118DF} \u{1E900}-\u{1E943}
    ]+",
    SpaceRule::Keep,
);

const DEEPSEEK3_WORDS: Step = (
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##,
    SpaceRule::GiveUnlessLineEnd,
);

const BLOOM: Step =
    (r" ?[^(\s|.,!?\u{2026}\u{3002}\u{FF0C}\u{3001}\u{964}\u{6D4}\u{60C})]+", SpaceRule::Keep);
const DIGIT: Step = (r"\p{N}", SpaceRule::Keep);
const LINE_END: Step = (r"[\r\n]", SpaceRule::Keep);
const THREE_DIGITS: Step = (r"[0-9][0-9][0-9]", SpaceRule::Keep);
const CJK: Step = (r"[\u{4E00}-\u{9FA5}\u{800}-\u{4E00}\u{AC00}-\u{D7FF}]+", SpaceRule::Keep);

static RULES: &[Rule] = &[
    Rule {
        names: &["default"],
        steps: &[
            (r"[\p{P}$+<=>^~|]+", SpaceRule::Keep),
            GPT2,
            (r"\p{N}+", SpaceRule::Keep),
            THREE_DIGITS,
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "gigachat",
            "exaone4",
            "mellum",
            "a.x-4.0",
        ],
        steps: &[GPT2],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        steps: &[DIGIT, GPT2],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ],
        steps: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    Rule { names: &["glm4", "glm5"], steps: &[LLAMA3], ignore_merges: true, add_bos: false },
    Rule {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe"],
        steps: &[LLAMA3],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "megrez",
            "stablelm2",
            "hunyuan",
            "kormo",
            "solar-open",
            "grok-2",
        ],
        steps: &[QWEN2],
        ignore_merges: false,
        add_bos: false,
    },
    Rule { names: &["qwen35"], steps: &[QWEN35], ignore_merges: false, add_bos: false },
    Rule { names: &["tekken"], steps: &[TEKKEN], ignore_merges: true, add_bos: true },
    Rule {
        names: &["gpt-4o", "llama4", "kanana2", "minimax-m2"],
        steps: &[GPT4O],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["falcon"],
        steps: &[(r"[\p{P}$+<=>^~|`]+", SpaceRule::Keep), GPT2, THREE_DIGITS],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["deepseek-llm"],
        steps: &[
            LINE_END,
            DEEPSEEK_LETTERS,
            (
                r"\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+",
                SpaceRule::Keep,
            ),
            (r"\s+$", SpaceRule::Keep),
            CJK,
            (r"\p{N}+", SpaceRule::Keep),
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["deepseek-coder"],
        steps: &[
            LINE_END,
            (r"\s?\p{L}+", SpaceRule::Keep),
            (r"\s?\p{P}+", SpaceRule::Keep),
            CJK,
            DIGIT,
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["deepseek-v3", "hunyuan-dense"],
        steps: &[
            (r"\p{N}{1,3}", SpaceRule::Keep),
            (r"[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+", SpaceRule::Keep),
            DEEPSEEK3_WORDS,
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Rule {
        names: &["bloom", "poro-chat", "gpt3-finnish"],
        steps: &[BLOOM],
        ignore_merges: false,
        add_bos: false,
    },
    Rule { names: &["viking"], steps: &[BLOOM, DIGIT], ignore_merges: false, add_bos: false },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, text: &str, expect: &[&str]) {
        let words = Rule::find(name).unwrap().splitter().split(text);
        let words: Vec<&str> = words.into_iter().map(|word| &text[word]).collect();
        assert_eq!(words, expect);
    }

    #[test]
    fn every_rule_compiles_and_loses_nothing() {
        let text = "It's  \u{4e2d}\u{6587} 12345\r\n\n\t x=1; caf\u{e9}'LL \u{a0} end  ";
        for rule in RULES {
            let words = rule.splitter().split(text);
            let joined: String = words.iter().map(|word| &text[word.clone()]).collect();
            assert_eq!(joined, text, "{:?}", rule.names);
            assert!(words.iter().all(|word| !word.is_empty()), "{:?}", rule.names);
        }
    }

    #[test]
    fn the_last_space_of_a_run_goes_to_the_next_word() {
        check("gpt-2", "a   b", &["a", "  ", " b"]);
        check("gpt-2", "a\n\nb", &["a", "\n", "\n", "b"]);
        check("gpt-2", "a   ", &["a", "   "]);
        check("llama-bpe", "a \n\n  b", &["a", " \n\n", " ", " b"]);
        check("llama-bpe", "x !\n\ny", &["x", " !\n\n", "y"]);
    }

    #[test]
    fn digits_are_cut_as_each_family_does() {
        check("smollm", "in 2024", &["in", " ", "2", "0", "2", "4"]);
        check("llama-bpe", "in 20241", &["in", " ", "202", "41"]);
        check("gpt-2", "in 2024", &["in", " 2024"]);
        check("qwen2", "a12", &["a", "1", "2"]);
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_known() {
        let error = Rule::find("klingon").err().unwrap().to_string();
        assert!(error.contains("klingon"), "{error}");
        assert!(error.contains("llama-bpe"), "{error}");
    }
}
