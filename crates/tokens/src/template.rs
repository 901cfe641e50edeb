//! Chat templates: messages to the text that a model expects.
//!
//! Templates are Jinja, written for the sandbox of Hugging Face's transformers; the environment
//! here gives them the same whitespace rules, functions, filters and Python methods. A template
//! comes with a model file and is not trusted: instructions, recursion and output are bounded, and
//! it can reach nothing but its arguments. What it does not bound is the size of strings that a
//! template builds for itself without printing them.

mod functions;
mod json;

use std::fmt;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};
use regex::Regex;
use serde_json::{Map, Value as Json};

use self::functions::Raised;
use crate::guard::catch;

/// Instructions that one rendering may run; the largest real templates use some thousands for each
/// message.
const FUEL: u64 = 10_000_000;
/// Longest template source, in bytes.
const SOURCE_LEN_MAX: usize = 1 << 20;
/// Longest rendered text, in bytes: what the tokenizer takes in one call.
const OUTPUT_LEN_MAX: usize = crate::tokenizer::TEXT_LEN_MAX;
/// Name of the one template in its environment. No extension, so that nothing is escaped.
const NAME: &str = "chat_template";

/// A compiled chat template.
#[derive(Clone)]
pub struct ChatTemplate {
    env: Environment<'static>,
}

/// One message of a chat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: content.into() }
    }
}

/// What a template is given besides the messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RenderOptions {
    /// Ends the text with the begin of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Spelling of the begin token; empty if there is none.
    pub bos_token: String,
    /// Spelling of the end token; empty if there is none.
    pub eos_token: String,
    /// Tools that the model may call, as JSON schemas.
    pub tools: Option<Vec<Json>>,
    /// Seconds since 1970 of the user's wall clock, for templates that print the date. Without it
    /// a template finds no clock, and most print a fixed date.
    pub now: Option<i64>,
    /// Further variables, such as `enable_thinking`. They win over the ones above.
    pub vars: Map<String, Json>,
}

/// Why a template does not compile or render.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The source is too long.
    #[error("the chat template has {len} bytes, at most {max} are supported")]
    SourceTooLong {
        /// Bytes of the source.
        len: usize,
        /// The most that is supported.
        max: usize,
    },
    /// The source is no Jinja.
    #[error("the chat template does not parse, line {line}: {detail}")]
    Syntax {
        /// Where; 0 if not known.
        line: usize,
        /// What is wrong.
        detail: String,
    },
    /// The template itself refuses the messages.
    #[error("the chat template refuses the messages: {message}")]
    Raised {
        /// Its words.
        message: String,
    },
    /// The template failed.
    #[error("the chat template failed, line {line}: {detail}")]
    Render {
        /// Where; 0 if not known.
        line: usize,
        /// What went wrong.
        detail: String,
    },
    /// The template runs too long.
    #[error("the chat template runs more than {fuel} instructions")]
    OutOfFuel {
        /// The limit.
        fuel: u64,
    },
    /// The template prints too much.
    #[error("the chat template gives more than {max} bytes")]
    OutputTooLong {
        /// The limit.
        max: usize,
    },
    /// An argument is nested too deeply.
    #[error("{argument} are nested more than {max} levels deep")]
    TooDeep {
        /// Which argument.
        argument: &'static str,
        /// The limit.
        max: usize,
    },
}

impl ChatTemplate {
    /// Compiles a template from its Jinja source: a `chat_template.jinja`, one of
    /// [`TokenizerConfig::chat_templates`](crate::TokenizerConfig::chat_templates), or GGUF's
    /// `tokenizer.chat_template`.
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        if source.len() > SOURCE_LEN_MAX {
            return Err(TemplateError::SourceTooLong { len: source.len(), max: SOURCE_LEN_MAX });
        }
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.expect("the default delimiters are valid"));
        env.set_undefined_behavior(UndefinedBehavior::Lenient);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_unknown_method_callback(functions::python_method);
        env.set_fuel(Some(FUEL));
        env.add_filter("tojson", json::tojson);
        env.add_function("raise_exception", functions::raise_exception);
        env.add_test("iterable", functions::is_iterable);
        let source = without_generation_tags(source);
        catch(|| env.add_template_owned(NAME, source))
            .map_err(|detail| TemplateError::Syntax { line: 0, detail })?
            .map_err(|error| TemplateError::Syntax {
                line: error.line().unwrap_or(0),
                detail: detail(&error),
            })?;
        Ok(ChatTemplate { env })
    }

    /// Renders messages.
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let messages = messages.iter().map(|message| {
            Value::from_pairs([("role", &message.role), ("content", &message.content)])
        });
        self.render_value(messages.collect(), options)
    }

    /// Renders messages with more than a role and a content: tool calls, reasoning, parts.
    pub fn render_json(
        &self,
        messages: &[Json],
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        self.render_value(json::list(messages, "messages")?, options)
    }

    fn render_value(
        &self,
        messages: Value,
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        // Templates ask `tools is not none` as often as `tools is defined`: absent ones are none.
        let tools = match &options.tools {
            Some(tools) => json::list(tools, "tools")?,
            None => Value::from(()),
        };
        let mut vars = vec![
            ("messages", messages),
            ("tools", tools),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(options.add_generation_prompt)),
            ("bos_token", Value::from(options.bos_token.as_str())),
            ("eos_token", Value::from(options.eos_token.as_str())),
        ];
        if let Some(now) = options.now {
            vars.push(("strftime_now", functions::strftime_now(now)));
        }
        for (name, value) in &options.vars {
            vars.push((name, json::value(value, "variables")?));
        }
        let template = self.env.get_template(NAME).expect("added when compiled");
        let mut output = Output::default();
        // The library panics on some templates, such as one that reverses an empty list by a slice.
        let rendered =
            catch(|| template.render_captured_to(Value::from_pairs(vars), &mut output).map(drop))
                .map_err(|detail| TemplateError::Render { line: 0, detail })?;
        if output.overflowed {
            return Err(TemplateError::OutputTooLong { max: OUTPUT_LEN_MAX });
        }
        rendered.map_err(render_error)?;
        Ok(String::from_utf8(output.bytes).expect("templates write strings"))
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

/// Replaces `{% generation %}`, which marks the assistant's words for training, by a condition that
/// always holds: so that the tag's effect on whitespace stays.
fn without_generation_tags(source: &str) -> String {
    let tag = |name| {
        let pattern = format!(r"\{{%([-+]?)\s*{name}\s*([-+]?)%\}}");
        Regex::new(&pattern).expect("the pattern is ours")
    };
    let begun = tag("generation").replace_all(source, "{%${1} if true ${2}%}");
    tag("endgeneration").replace_all(&begun, "{%${1} endif ${2}%}").into_owned()
}

fn render_error(error: minijinja::Error) -> TemplateError {
    if let Some(raised) = Raised::find(&error) {
        return TemplateError::Raised { message: raised.0.clone() };
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::OutOfFuel { fuel: FUEL };
    }
    TemplateError::Render { line: error.line().unwrap_or(0), detail: detail(&error) }
}

fn detail(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// Takes rendered text up to the limit.
#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    overflowed: bool,
}

impl io::Write for &mut Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > OUTPUT_LEN_MAX {
            self.overflowed = true;
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
