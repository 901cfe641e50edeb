//! From a request on the wire to what the engine takes.

use std::sync::OnceLock;
use std::time::Duration;

use nuthatch_engine::{
    Form, Hints, PromptScores, Refusal, Retention, Submission, SubmitError, Tenant,
};
use nuthatch_tokens::{Conversation, Message, Words, WordsError};
use nuthatch_types::{Limits, Sampling, TokenId};
use nuthatch_wire::{
    ApiError, ChatMessage, ChatRequest, ErrorKind, Format, Options, PromptInput, Request,
    ToolChoice,
};
use serde_json::{Value, json};

use super::ToolFormat;
use super::guide::Guide;

/// Tokens of a completion unless the client says otherwise, as OpenAI has it.
const COMPLETION_TOKENS: u32 = 16;
/// Contexts that prompt and answer have together if tokens are dropped on the way.
const STREAMED_CONTEXTS: u32 = 16;

/// What all requests to one model share.
#[derive(Debug)]
pub struct Endpoint {
    /// The model's words.
    pub words: Words,
    /// How tokens are chosen where a request says nothing.
    pub sampling: Sampling,
    /// Most tokens of prompt and answer together.
    pub max_context: u32,
    /// How the model writes calls of tools.
    pub tools: ToolFormat,
    /// Made when the first answer must have a form: a large vocabulary takes its time.
    guide: OnceLock<Result<Guide, String>>,
}

/// What the engine is told of a request besides what is in it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origin {
    /// The seed, if the request has none of its own.
    pub seed: u64,
    /// Who pays.
    pub tenant: Tenant,
    /// The time on the engine's clock.
    pub now: Duration,
}

impl Endpoint {
    /// For one model.
    pub fn new(words: Words, sampling: Sampling, max_context: u32, tools: ToolFormat) -> Self {
        Endpoint { words, sampling, max_context, tools, guide: OnceLock::new() }
    }

    /// The submissions of a request: one for each prompt, in order.
    pub fn submissions(
        &self,
        request: &Request,
        origin: &Origin,
    ) -> Result<Vec<Submission>, ApiError> {
        let options = request.options();
        let form = self.form(request)?;
        let is_echo = matches!(request, Request::Completion(completion) if completion.echo);
        let n_scores = options.logprobs.filter(|_| is_echo);
        let submission = |prompt: Vec<TokenId>| {
            Ok(Submission {
                limits: self.limits(request, prompt.len(), form.is_some())?,
                prompt,
                sampling: self.sampling(options, origin.seed),
                // A search gives its best answers itself; samples are compared when they have ended.
                n: if options.beam.is_some() { options.n } else { options.best_of },
                beam: options.beam,
                streaming: options.streaming,
                form: form.clone(),
                scores: n_scores.map(PromptScores::new),
                hints: hints(options, origin),
                ..Submission::default()
            })
        };
        self.prompts(request)?.into_iter().map(submission).collect()
    }

    /// The tokens of a conversation, up to where the answer begins.
    pub fn chat_prompt(&self, chat: &ChatRequest) -> Result<Vec<TokenId>, ApiError> {
        self.words.conversation(&conversation(chat)).map_err(|error| words_error(&error))
    }

    /// The tokens of a text that is to be continued.
    pub fn text_prompt(&self, text: &str) -> Result<Vec<TokenId>, ApiError> {
        self.words.raw(text).map_err(|error| words_error(&error))
    }

    fn prompts(&self, request: &Request) -> Result<Vec<Vec<TokenId>>, ApiError> {
        match request {
            Request::Chat(chat) => Ok(vec![self.chat_prompt(chat)?]),
            Request::Completion(completion) => {
                let tokens = |prompt: &PromptInput| match prompt {
                    PromptInput::Text(text) => self.text_prompt(text),
                    PromptInput::Tokens(tokens) => Ok(tokens.clone()),
                };
                completion.prompts.iter().map(tokens).collect()
            }
        }
    }

    /// The form that the answers must have, if they must.
    fn form(&self, request: &Request) -> Result<Option<Form>, ApiError> {
        let is_forced = matches!(request, Request::Chat(chat) if chat.tool_choice.is_forced());
        if request.options().format == Format::Text && !is_forced {
            return Ok(None);
        }
        let made = || Guide::new(&self.words).map_err(|error| error.to_string());
        match self.guide.get_or_init(made) {
            Ok(guide) => guide.form(request, self.tools),
            Err(error) => {
                let error = ApiError::new(ErrorKind::InvalidRequest, error);
                Err(error.about("response_format").with_code("unsupported_value"))
            }
        }
    }

    fn limits(
        &self,
        request: &Request,
        n_prompt: usize,
        has_form: bool,
    ) -> Result<Limits, ApiError> {
        let options = request.options();
        // What drops tokens needs no end, but its tokens are kept here until the client has them.
        let times = options.streaming.map_or(1, |_| STREAMED_CONTEXTS);
        let max_context = self.max_context.saturating_mul(times);
        let room = (max_context as usize).saturating_sub(n_prompt) as u32;
        if room == 0 {
            return Err(ApiError::context_length(max_context, n_prompt, None));
        }
        let max_tokens = match (options.max_tokens, request) {
            (Some(asked), _) if asked > room => {
                return Err(ApiError::context_length(max_context, n_prompt, Some(asked)));
            }
            // What is computed of an answer that nobody wants is told to nobody.
            (Some(0), _) => return Ok(Limits { max_tokens: 1, ..Limits::default() }),
            (Some(asked), _) => asked,
            (None, Request::Chat(_)) => room.min(self.max_context),
            (None, Request::Completion(_)) => room.min(COMPLETION_TOKENS),
        };
        // When its form is complete, an answer can only end.
        let ignores_ends = options.ignore_eos && !has_form;
        let ends: &[TokenId] = if ignores_ends { &[] } else { &self.words.ends };
        let stop_tokens = ends.iter().chain(&options.stop_tokens).copied().collect();
        Ok(Limits { max_tokens, stop_tokens, min_tokens: options.min_tokens })
    }

    /// What the client says, then what the endpoint has for all.
    fn sampling(&self, options: &Options, seed: u64) -> Sampling {
        let is_compared = options.best_of > options.n && options.beam.is_none();
        let n_logprobs = options.logprobs.or(is_compared.then_some(0));
        options.sampling.apply(Sampling { seed, n_logprobs, ..self.sampling.clone() })
    }
}

fn hints(options: &Options, origin: &Origin) -> Hints {
    let retention = options.retention.map_or_else(Retention::default, |fields| Retention {
        priority: fields.priority,
        until: fields.seconds.map(|seconds| origin.now + Duration::from_secs_f64(seconds)),
    });
    Hints {
        cache_salt: options.cache_salt.clone().unwrap_or_default().into_bytes(),
        retention,
        priority: options.urgency(),
        tenant: origin.tenant,
    }
}

/// A conversation as the model's template takes it.
fn conversation(chat: &ChatRequest) -> Conversation {
    let is_plain =
        |m: &ChatMessage| m.tool_calls.is_empty() && m.tool_call_id.is_none() && m.name.is_none();
    let has_tools = !chat.tools.is_empty() && chat.tool_choice != ToolChoice::None;
    if !has_tools && chat.template_vars.is_empty() && chat.messages.iter().all(is_plain) {
        let message = |m: &ChatMessage| Message::new(m.role.as_str(), m.content.as_str());
        return Conversation::Plain(chat.messages.iter().map(message).collect());
    }
    Conversation::Rich {
        messages: chat.messages.iter().map(rich_message).collect(),
        tools: has_tools.then(|| chat.tools.iter().map(|tool| tool.json.clone()).collect()),
        vars: chat.template_vars.clone(),
        add_generation_prompt: true,
    }
}

/// Templates take the arguments of calls as objects, where clients send them as text.
fn rich_message(message: &ChatMessage) -> Value {
    let mut json = json!({ "role": message.role, "content": message.content });
    if let Some(name) = &message.name {
        json["name"] = json!(name);
    }
    if let Some(id) = &message.tool_call_id {
        json["tool_call_id"] = json!(id);
    }
    if !message.tool_calls.is_empty() {
        let call = |call: &nuthatch_wire::ToolCall| {
            let arguments: Value = serde_json::from_str(&call.arguments)
                .unwrap_or_else(|_| Value::String(call.arguments.clone()));
            let function = json!({ "name": call.name, "arguments": arguments });
            json!({ "id": call.id, "type": "function", "function": function })
        };
        json["tool_calls"] = message.tool_calls.iter().map(call).collect();
    }
    json
}

fn words_error(error: &WordsError) -> ApiError {
    let code = match error {
        WordsError::NoTemplate => "no_chat_template",
        WordsError::Template(_) => "chat_template_error",
        WordsError::Tokenizer(_) => "tokenizer_error",
    };
    ApiError::new(ErrorKind::InvalidRequest, error.to_string()).with_code(code)
}

/// How a client is told that the engine refuses its request.
pub fn refusal(error: &SubmitError) -> ApiError {
    use Refusal as R;
    let (kind, code) = match error {
        SubmitError::Refused(R::QueueFull { .. })
        | SubmitError::TooManyAnswers { .. }
        | SubmitError::Busy => (ErrorKind::Overloaded, "queue_full"),
        SubmitError::Refused(R::ExceedsContext { .. }) => {
            (ErrorKind::InvalidRequest, "context_length_exceeded")
        }
        SubmitError::Refused(
            R::ExceedsCache { .. }
            | R::ExceedsCacheWide { .. }
            | R::TooWide { .. }
            | R::StreamingExceeds { .. },
        ) => (ErrorKind::InvalidRequest, "cache_exceeded"),
        SubmitError::UnknownToken { .. } => (ErrorKind::InvalidRequest, "unknown_token"),
        SubmitError::Refused(
            R::EmptyPrompt
            | R::NoAnswer
            | R::NoStreamingWindow
            | R::DuplicateSeq { .. }
            | R::Sampling(_),
        )
        | SubmitError::NoAnswers
        | SubmitError::NoSharing
        | SubmitError::StreamingBeams
        | SubmitError::FormOfBeams
        | SubmitError::PromptOfBeams
        | SubmitError::TooManyBeams { .. } => (ErrorKind::InvalidRequest, "invalid_value"),
        SubmitError::Failed { .. } | SubmitError::Stopped => {
            (ErrorKind::Unavailable, "engine_stopped")
        }
    };
    ApiError::new(kind, error.to_string()).with_code(code)
}
