//! Answers that keep a form: JSON of a schema, a regular expression, a grammar.
//!
//! ```text
//!   engine's thread   accept(token) . . . next forward pass . . . restrict(logits)
//!                        |                                            ^
//!   a guide's thread     +--> consume the token, compute the mask ----+
//! ```
//!
//! So a mask costs the engine nothing as long as it is computed faster than a step. The library's own
//! limits bound what a grammar may cost, and a mask that does not come in time ends its answer.

use std::fmt;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use nuthatch_engine::{Constraint, ConstraintError, Form};
use nuthatch_tokens::Words;
use nuthatch_types::TokenId;
use nuthatch_wire::{ApiError, ChatRequest, ErrorKind, Format, Request, Tool, ToolChoice};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use super::ToolFormat;

/// Longest time that a mask may take.
const MASK_TIME: Duration = Duration::from_secs(5);
/// Threads that compute masks.
const N_THREADS: usize = 2;
/// White space that JSON may have between its parts: what pretty printers write. Where it is free,
/// small models write it without end; where there is none, they answer worse.
const WHITE_SPACE: &str = "\\n? {0,12}";

/// Makes constraints for one vocabulary. Clones share everything.
#[derive(Clone)]
pub(super) struct Guide {
    factory: Arc<ParserFactory>,
    jobs: Sender<Job>,
    /// Tokens that end an answer, wherever one may end.
    ends: Arc<[TokenId]>,
}

type Job = Box<dyn FnOnce() + Send>;

/// Why answers cannot be guided.
#[derive(Debug, thiserror::Error)]
pub(super) enum GuideError {
    /// The vocabulary has no token that ends an answer.
    #[error("the vocabulary has no end token")]
    NoEnd,
    /// The library refuses the vocabulary.
    #[error("the vocabulary cannot be guided: {0}")]
    Vocabulary(String),
    /// The system gives no threads.
    #[error("no thread for masks: {0}")]
    Thread(#[from] std::io::Error),
}

impl Guide {
    /// A guide for a model's words.
    pub(super) fn new(words: &Words) -> Result<Self, GuideError> {
        let tokenizer = &words.tokenizer;
        let end = tokenizer.eos().or_else(|| words.ends.first().copied());
        let end = end.ok_or(GuideError::NoEnd)?;
        let n_tokens = tokenizer.vocab_size() as u32;
        let bytes = |id: u32| {
            let bytes = tokenizer.token_bytes(TokenId(id)).unwrap_or_default();
            // The library takes what this byte begins for a special token, which is no text.
            let marker = tokenizer.is_special(TokenId(id)).then_some(TokTrie::SPECIAL_TOKEN_MARKER);
            marker.into_iter().chain(bytes.iter().copied()).collect::<Vec<u8>>()
        };
        let all: Vec<Vec<u8>> = (0..n_tokens).map(bytes).collect();
        let trie = TokTrie::from(&TokRxInfo::new(n_tokens, end.0), &all);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env)
            .map_err(|error| GuideError::Vocabulary(error.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        let ends = words.ends.iter().copied().chain([end]).collect();
        Ok(Guide { factory: Arc::new(factory), jobs: workers()?, ends })
    }

    /// The form that a request asks for, if it does.
    pub(super) fn form(
        &self,
        request: &Request,
        tools: ToolFormat,
    ) -> Result<Option<Form>, ApiError> {
        let grammar = match request {
            Request::Chat(chat) if chat.tool_choice.is_forced() => Some(forced_call(chat, tools)?),
            Request::Chat(_) | Request::Completion(_) => grammar(&request.options().format)?,
        };
        let Some(grammar) = grammar else { return Ok(None) };
        let refused = |error: &dyn fmt::Display| {
            let mut message = format!("the form of the answer is not usable: {error}");
            message.truncate(message.floor_char_boundary(2000));
            let error = ApiError::new(ErrorKind::InvalidRequest, message);
            error.about("response_format").with_code("invalid_format")
        };
        let parser = self.factory.create_parser(grammar).map_err(|error| refused(&error))?;
        let mut matcher = Matcher::new(Ok(parser));
        // What no text can satisfy is known here, and not after the prompt.
        matcher.compute_mask_or_eos().map_err(|error| refused(&error))?;
        let (guide, start) = (self.clone(), Mutex::new(matcher));
        Ok(Some(Form::new(move || Box::new(Guided::new(guide.clone(), &start)))))
    }
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guide")
    }
}

/// Threads that take jobs until nobody can give any.
fn workers() -> std::io::Result<Sender<Job>> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let jobs = Arc::new(Mutex::new(jobs));
    for _ in 0..N_THREADS {
        let jobs = Arc::clone(&jobs);
        std::thread::Builder::new().name("nuthatch-guide".to_owned()).spawn(move || {
            loop {
                let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(job) = job else { return };
                // A panic of one grammar leaves its answer without a mask, which ends it.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            }
        })?;
    }
    Ok(sender)
}

/// One answer's constraint.
struct Guided {
    guide: Guide,
    state: State,
}

/// Where the matcher is.
enum State {
    /// With a worker, which gives it back with the mask.
    Away(Receiver<(Matcher, Result<SimpleVob, String>)>),
    /// Here, and the next token has not been told.
    Here(Box<Matcher>),
    Lost,
}

impl Guided {
    /// A constraint that begins where `start` is, and thinks about the first token at once.
    fn new(guide: Guide, start: &Mutex<Matcher>) -> Self {
        let matcher = start.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        let mut guided = Guided { guide, state: State::Lost };
        guided.send(matcher, None);
        guided
    }

    /// Gives the matcher to a worker, with the token that was chosen.
    fn send(&mut self, mut matcher: Matcher, token: Option<TokenId>) {
        let (sender, receiver) = mpsc::channel();
        let job: Job = Box::new(move || {
            let consumed = match token {
                Some(token) if !matcher.is_stopped() => matcher.consume_token(token.0),
                _ => Ok(()),
            };
            let mask = consumed.and_then(|()| matcher.compute_mask_or_eos());
            // The answer may have ended meanwhile.
            let _ = sender.send((matcher, mask.map_err(|error| error.to_string())));
        });
        // Without workers the mask never comes, which ends the answer.
        let _ = self.guide.jobs.send(job);
        self.state = State::Away(receiver);
    }
}

impl Constraint for Guided {
    fn restrict(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        let state = std::mem::replace(&mut self.state, State::Lost);
        let State::Away(receiver) = state else {
            return Err(ConstraintError("no token was chosen since".to_owned()));
        };
        let late = |_| ConstraintError(format!("no mask within {MASK_TIME:?}"));
        let (matcher, mask) = receiver.recv_timeout(MASK_TIME).map_err(late)?;
        let mask = mask.map_err(ConstraintError)?;
        let is_allowed = |id: usize| id < mask.len() && mask.is_allowed(id as u32);
        let may_end = self.guide.ends.iter().any(|end| is_allowed(end.0 as usize));
        let kept: Vec<(usize, f32)> = if may_end {
            let ends = self.guide.ends.iter().map(|end| end.0 as usize);
            ends.filter_map(|id| Some((id, *logits.get(id)?))).collect()
        } else {
            Vec::new()
        };
        for (id, logit) in logits.iter_mut().enumerate() {
            if !is_allowed(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        for (id, logit) in kept {
            logits[id] = logit;
        }
        self.state = State::Here(Box::new(matcher));
        Ok(())
    }

    fn accept(&mut self, token: TokenId) {
        match std::mem::replace(&mut self.state, State::Lost) {
            State::Here(matcher) => self.send(*matcher, Some(token)),
            state @ (State::Away(_) | State::Lost) => self.state = state,
        }
    }
}

impl fmt::Debug for Guided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guided")
    }
}

/// The grammar of a form.
fn grammar(format: &Format) -> Result<Option<TopLevelGrammar>, ApiError> {
    Ok(match format {
        Format::Text => None,
        Format::JsonObject => {
            Some(TopLevelGrammar::from_json_schema(bounded(json!({ "type": "object" }))))
        }
        Format::JsonSchema(schema) => {
            let schema: Value = serde_json::from_str(schema).map_err(|error| {
                let message = format!("the schema is no JSON: {error}");
                let error = ApiError::new(ErrorKind::InvalidRequest, message);
                error.about("response_format").with_code("invalid_format")
            })?;
            Some(TopLevelGrammar::from_json_schema(bounded(schema)))
        }
        Format::Regex(regex) => Some(TopLevelGrammar::from_regex(regex)),
        Format::Grammar(lark) => Some(TopLevelGrammar::from_lark(lark.clone())),
        Format::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            Some(TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | "))))
        }
    })
}

/// The schema, with bounded white space unless it says something about that itself.
fn bounded(mut schema: Value) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        fields.entry("x-guidance").or_insert(json!({ "whitespace_pattern": WHITE_SPACE }));
    }
    schema
}

/// The grammar of a call that must be made, in the words of the model.
fn forced_call(chat: &ChatRequest, format: ToolFormat) -> Result<TopLevelGrammar, ApiError> {
    let arguments = match format {
        ToolFormat::Hermes => "arguments",
        ToolFormat::Llama => "parameters",
        ToolFormat::None => {
            let message = "the model was not taught to call tools (--tool-call-parser says how)";
            let error = ApiError::new(ErrorKind::InvalidRequest, message);
            return Err(error.about("tool_choice").with_code("unsupported_value"));
        }
    };
    let is_meant = |tool: &&Tool| match &chat.tool_choice {
        ToolChoice::Named(name) => tool.name == *name,
        ToolChoice::None | ToolChoice::Auto | ToolChoice::Required => true,
    };
    let schema = |tool: &Tool| {
        let parameters = tool.parameters.clone().unwrap_or_else(|| json!({ "type": "object" }));
        json!({
            "type": "object",
            "properties": { "name": { "const": tool.name }, arguments: parameters },
            "required": ["name", arguments],
            "additionalProperties": false,
        })
    };
    let schemas: Vec<Value> = chat.tools.iter().filter(is_meant).map(schema).collect();
    let schema = bounded(json!({ "anyOf": schemas }));
    Ok(match format {
        ToolFormat::Hermes => TopLevelGrammar::from_lark(format!(
            "start: \"<tool_call>\\n\" call \"\\n</tool_call>\"\ncall: %json {schema}"
        )),
        ToolFormat::Llama | ToolFormat::None => TopLevelGrammar::from_json_schema(schema),
    })
}
