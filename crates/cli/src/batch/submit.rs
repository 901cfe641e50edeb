//! From a request on the wire to what the engine takes.

use std::sync::Arc;

use nuthatch_engine::{Hints, Submission};
use nuthatch_model::GenerationDefaults;
use nuthatch_tokens::{AnswerText, DecodeOptions, Message};
use nuthatch_types::{Limits, Sampling, TokenId};
use nuthatch_wire::{ApiError, ChatMessage, ErrorKind, Options, PromptInput, Request};

use crate::text::Text;

/// Tokens of a completion unless the client says otherwise, as OpenAI has it.
const COMPLETION_TOKENS: u32 = 16;

/// What all requests of one batch share.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) text: Text,
    /// What the model's makers recommend.
    pub(super) defaults: GenerationDefaults,
    pub(super) max_context: u32,
}

/// A sequence to submit, and what turns its tokens into text.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) submission: Submission,
    pub(super) answer: AnswerText,
    /// Whether an earlier one of the same request has the same prompt.
    pub(super) is_repeat: bool,
}

impl Endpoint {
    /// The sequences of a request: `n` for each prompt, with seeds that count up. Without a seed of
    /// its own a request gets `seed`.
    pub(super) fn asks(&self, request: &Request, seed: u64) -> Result<Vec<Ask>, ApiError> {
        let options = request.options();
        if options.stream {
            let mut error = refuse("an answer in a file cannot be streamed");
            error.param = Some("stream");
            return Err(error);
        }
        let mut asks = Vec::new();
        for prompt in self.prompts(request)? {
            let limits = self.limits(request, prompt.len())?;
            for i in 0..options.n {
                asks.push(Ask {
                    submission: Submission {
                        prompt: prompt.clone(),
                        sampling: self.sampling(options, seed, i),
                        limits: limits.clone(),
                        hints: hints(options),
                        ..Submission::default()
                    },
                    answer: self.answer(request),
                    is_repeat: i > 0,
                });
            }
        }
        Ok(asks)
    }

    fn prompts(&self, request: &Request) -> Result<Vec<Vec<TokenId>>, ApiError> {
        let told = |error: anyhow::Error| refuse(crate::chain(&error));
        match request {
            Request::Chat(chat) => {
                let message = |m: &ChatMessage| Message::new(m.role.as_str(), m.content.as_str());
                let messages: Vec<Message> = chat.messages.iter().map(message).collect();
                let tokens = self.text.conversation(&messages);
                let tokens = tokens.ok_or_else(|| refuse("the model has no chat template"))?;
                Ok(vec![tokens.map_err(told)?])
            }
            Request::Completion(completion) => {
                let tokens = |prompt: &PromptInput| match prompt {
                    PromptInput::Text(text) => self.text.raw(text).map_err(told),
                    PromptInput::Tokens(tokens) => Ok(tokens.clone()),
                };
                completion.prompts.iter().map(tokens).collect()
            }
        }
    }

    fn limits(&self, request: &Request, n_prompt: usize) -> Result<Limits, ApiError> {
        let options = request.options();
        let max_context = self.max_context;
        let room = (max_context as usize).saturating_sub(n_prompt) as u32;
        if room == 0 {
            return Err(ApiError::context_length(max_context, n_prompt, None));
        }
        let max_tokens = match (options.max_tokens, request) {
            (Some(asked), _) if asked > room => {
                return Err(ApiError::context_length(max_context, n_prompt, Some(asked)));
            }
            (Some(asked), _) => asked,
            (None, Request::Chat(_)) => room,
            (None, Request::Completion(_)) => room.min(COMPLETION_TOKENS),
        };
        let ends: &[TokenId] = if options.ignore_eos { &[] } else { &self.text.ends };
        let stop_tokens = ends.iter().chain(&options.stop_tokens).copied().collect();
        Ok(Limits { max_tokens, stop_tokens, min_tokens: options.min_tokens })
    }

    /// What the client says, then what the model's makers recommend, then OpenAI's defaults.
    fn sampling(&self, options: &Options, seed: u64, index: u32) -> Sampling {
        let model = &self.defaults;
        let temperature = match model.do_sample {
            Some(false) => 0.0,
            Some(true) | None => model.temperature.unwrap_or(1.0),
        };
        let base = Sampling {
            temperature,
            top_k: model.top_k.unwrap_or(0),
            top_p: model.top_p.unwrap_or(1.0),
            min_p: model.min_p.unwrap_or(0.0),
            repetition_penalty: model.repetition_penalty.unwrap_or(1.0),
            seed,
            n_logprobs: options.logprobs,
            ..Sampling::default()
        };
        let sampling = options.sampling.apply(base);
        Sampling { seed: sampling.seed.wrapping_add(u64::from(index)), ..sampling }
    }

    fn answer(&self, request: &Request) -> AnswerText {
        let options = request.options();
        let continuing = matches!(request, Request::Completion(_));
        let decode = DecodeOptions { skip_special: options.skip_special, continuing };
        let tokenizer = Arc::clone(&self.text.tokenizer);
        AnswerText::new(tokenizer, decode, &options.stop, options.include_stop)
    }
}

fn hints(options: &Options) -> Hints {
    Hints {
        cache_salt: options.cache_salt.clone().unwrap_or_default().into_bytes(),
        priority: options.urgency(),
        ..Hints::default()
    }
}

pub(super) fn refuse(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorKind::InvalidRequest, message)
}
