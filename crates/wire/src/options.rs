//! What both kinds of request say besides their prompt.

use nuthatch_types::{BeamParams, EarlyStopping, Sampling, SamplingError, Streaming, TokenId};
use serde::Deserialize;

use crate::fields::{List, Pairs, Raw, check_len, field, kind_of, name, number};
use crate::{Format, RequestError, caps};

/// What both kinds of request say besides their prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The model that is asked for.
    pub model: Option<String>,
    /// Answers to each prompt.
    pub n: u32,
    /// Answers that are computed for each prompt, of which the `n` best are given; at least `n`.
    pub best_of: u32,
    /// Searches for the best answers instead of sampling; the width is `best_of`.
    pub beam: Option<BeamParams>,
    /// Most tokens of an answer; 0 only where its prompt is repeated.
    pub max_tokens: Option<u32>,
    /// Tokens before which no stop token ends an answer.
    pub min_tokens: u32,
    /// Whether the model's own end tokens are ignored.
    pub ignore_eos: bool,
    /// How tokens are chosen.
    pub sampling: SamplingFields,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// Whether the text that ended an answer is part of it.
    pub include_stop: bool,
    /// Further tokens that end an answer.
    pub stop_tokens: Vec<TokenId>,
    /// Whether special tokens are left out of the text.
    pub skip_special: bool,
    /// Alternatives that are reported with each token; `None` reports nothing.
    pub logprobs: Option<u32>,
    /// Whether the answer is sent as it grows.
    pub stream: bool,
    /// Whether a streamed answer ends with its usage.
    pub include_usage: bool,
    /// Whether each piece of a streamed answer comes with the usage so far.
    pub continuous_usage: bool,
    /// What form an answer must have.
    pub format: Format,
    /// Only requests with the same salt share cached pages.
    pub cache_salt: Option<String>,
    /// How long cached pages should stay when the request is gone.
    pub retention: Option<RetentionFields>,
    /// As in vLLM: lower is served earlier, 0 is ordinary.
    pub priority: i64,
    /// Who asks.
    pub user: Option<String>,
    /// The conversation that this belongs to.
    pub session: Option<String>,
    /// Keeps only the first and the last tokens, so that an answer may go on for ever.
    pub streaming: Option<Streaming>,
}

impl Options {
    /// The priority as the scheduler counts it: higher is more urgent, 128 is ordinary.
    pub fn urgency(&self) -> u8 {
        u8::try_from(128i64.saturating_sub(self.priority).clamp(0, 255)).unwrap_or(u8::MAX)
    }
}

/// How long cached pages should stay when the request is gone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetentionFields {
    /// 0 is ordinary; higher stays longer.
    pub priority: u8,
    /// Seconds from now until the priority runs out; `None` is never.
    pub seconds: Option<f64>,
}

/// How long the pages of a session should stay, if the client does not say it.
const SESSION_SECONDS: f64 = 3600.0;

/// How tokens are chosen, as far as the client says; what it leaves open is the model's or ours.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingFields {
    /// See [`Sampling::temperature`].
    pub temperature: Option<f32>,
    /// See [`Sampling::top_k`]; -1 on the wire is 0 here.
    pub top_k: Option<u32>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f32>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f32>,
    /// See [`Sampling::repetition_penalty`].
    pub repetition_penalty: Option<f32>,
    /// See [`Sampling::frequency_penalty`].
    pub frequency_penalty: Option<f32>,
    /// See [`Sampling::presence_penalty`].
    pub presence_penalty: Option<f32>,
    /// See [`Sampling::logit_bias`].
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Seed of the first answer; the next ones count up from it.
    pub seed: Option<u64>,
}

impl SamplingFields {
    /// `base` with everything that the client says.
    pub fn apply(&self, base: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_k: self.top_k.unwrap_or(base.top_k),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            logit_bias: self.logit_bias.clone(),
            seed: self.seed.unwrap_or(base.seed),
            ..base
        }
    }
}

/// The common fields as they come.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RawOptions<'a> {
    #[serde(borrow)]
    model: Raw<'a>,
    #[serde(borrow)]
    n: Raw<'a>,
    #[serde(borrow)]
    best_of: Raw<'a>,
    #[serde(borrow)]
    use_beam_search: Raw<'a>,
    #[serde(borrow)]
    length_penalty: Raw<'a>,
    #[serde(borrow)]
    early_stopping: Raw<'a>,
    #[serde(borrow)]
    max_tokens: Raw<'a>,
    #[serde(borrow)]
    max_completion_tokens: Raw<'a>,
    #[serde(borrow)]
    min_tokens: Raw<'a>,
    #[serde(borrow)]
    ignore_eos: Raw<'a>,
    #[serde(borrow)]
    temperature: Raw<'a>,
    #[serde(borrow)]
    top_k: Raw<'a>,
    #[serde(borrow)]
    top_p: Raw<'a>,
    #[serde(borrow)]
    min_p: Raw<'a>,
    #[serde(borrow)]
    repetition_penalty: Raw<'a>,
    #[serde(borrow)]
    frequency_penalty: Raw<'a>,
    #[serde(borrow)]
    presence_penalty: Raw<'a>,
    #[serde(borrow)]
    logit_bias: Raw<'a>,
    #[serde(borrow)]
    seed: Raw<'a>,
    #[serde(borrow)]
    stop: Raw<'a>,
    #[serde(borrow)]
    include_stop_str_in_output: Raw<'a>,
    #[serde(borrow)]
    stop_token_ids: Raw<'a>,
    #[serde(borrow)]
    skip_special_tokens: Raw<'a>,
    #[serde(borrow)]
    stream: Raw<'a>,
    #[serde(borrow)]
    stream_options: Raw<'a>,
    #[serde(borrow)]
    cache_salt: Raw<'a>,
    #[serde(borrow)]
    priority: Raw<'a>,
    #[serde(borrow)]
    user: Raw<'a>,
    /// Each kind of request reads it in its own way.
    #[serde(borrow)]
    pub(crate) logprobs: Raw<'a>,
    #[serde(borrow)]
    pub(crate) top_logprobs: Raw<'a>,
    #[serde(borrow)]
    prompt_logprobs: Raw<'a>,
    #[serde(borrow)]
    retention: Raw<'a>,
    #[serde(borrow)]
    session_id: Raw<'a>,
    #[serde(borrow)]
    streaming: Raw<'a>,
}

#[derive(Debug, Deserialize)]
struct RawStreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
    #[serde(default)]
    continuous_usage_stats: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct RawRetention {
    #[serde(default)]
    priority: Option<u8>,
    #[serde(default)]
    ttl: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct RawStreaming {
    window: u32,
    #[serde(default)]
    sinks: Option<u32>,
}

impl RawOptions<'_> {
    /// Reads every field but the prompt's, `logprobs` and those of the form.
    /// An answer may be limited to `least` tokens, and not to fewer.
    pub(crate) fn read(&self, least: u32) -> Result<Options, RequestError> {
        let max_tokens = number(self.max_tokens, "max_tokens", least..=u32::MAX)?;
        let max_completion =
            number(self.max_completion_tokens, "max_completion_tokens", least..=u32::MAX)?;
        let stream_options: Option<RawStreamOptions> =
            field(self.stream_options, "stream_options")?;
        let salt = name(self.cache_salt, "cache_salt")?;
        if salt.as_deref() == Some("") {
            return Err(RequestError::invalid("cache_salt", "is empty"));
        }
        if number(self.prompt_logprobs, "prompt_logprobs", 0..=u32::MAX)?.is_some() {
            let what = "probabilities of the prompt".to_owned();
            return Err(RequestError::Unsupported { param: "prompt_logprobs", what });
        }
        let n = number(self.n, "n", 1..=caps::N)?.unwrap_or(1);
        let best_of = self.best_of(n)?;
        let stream_options = stream_options.as_ref();
        let stream = field(self.stream, "stream")?.unwrap_or(false);
        if stream && best_of > n {
            let detail = "answers that are compared when they have ended cannot be streamed";
            return Err(RequestError::invalid("best_of", detail));
        }
        Ok(Options {
            model: name(self.model, "model")?,
            n,
            best_of,
            beam: self.beam(best_of)?,
            max_tokens: max_completion.or(max_tokens),
            min_tokens: field(self.min_tokens, "min_tokens")?.unwrap_or(0),
            ignore_eos: field(self.ignore_eos, "ignore_eos")?.unwrap_or(false),
            sampling: self.sampling()?,
            stop: self.stop()?,
            include_stop: field(self.include_stop_str_in_output, "include_stop_str_in_output")?
                .unwrap_or(false),
            stop_tokens: self.stop_tokens()?,
            skip_special: field(self.skip_special_tokens, "skip_special_tokens")?.unwrap_or(true),
            logprobs: None,
            stream,
            include_usage: stream_options.and_then(|o| o.include_usage).unwrap_or(false),
            continuous_usage: stream_options
                .and_then(|o| o.continuous_usage_stats)
                .unwrap_or(false),
            format: Format::Text,
            retention: self.retention()?,
            cache_salt: salt,
            priority: field(self.priority, "priority")?.unwrap_or(0),
            user: name(self.user, "user")?,
            session: name(self.session_id, "session_id")?,
            streaming: self.streaming()?,
        })
    }

    /// Answers that are computed for each prompt.
    fn best_of(&self, n: u32) -> Result<u32, RequestError> {
        const PARAM: &str = "best_of";
        match number(self.best_of, PARAM, 1..=caps::N)? {
            Some(best_of) if best_of < n => {
                Err(RequestError::invalid(PARAM, format!("{best_of} is less than n, which is {n}")))
            }
            best_of => Ok(best_of.unwrap_or(n)),
        }
    }

    fn beam(&self, width: u32) -> Result<Option<BeamParams>, RequestError> {
        const STOPPING: &str = "early_stopping";
        let length_penalty: Option<f32> = field(self.length_penalty, "length_penalty")?;
        let early_stopping = match self.early_stopping {
            None => EarlyStopping::No,
            Some(raw) if kind_of(raw) == b'"' => {
                match name(self.early_stopping, STOPPING)?.as_deref() {
                    Some("never") => EarlyStopping::Never,
                    _ => return Err(RequestError::invalid(STOPPING, "is not a bool or \"never\"")),
                }
            }
            Some(_) => match field(self.early_stopping, STOPPING)? {
                Some(true) => EarlyStopping::Yes,
                Some(false) | None => EarlyStopping::No,
            },
        };
        if !field(self.use_beam_search, "use_beam_search")?.unwrap_or(false) {
            return Ok(None);
        }
        let length_penalty = length_penalty.unwrap_or(1.0);
        let beam = BeamParams { width, length_penalty, early_stopping };
        beam.validate().map_err(out_of_range)?;
        Ok(Some(beam))
    }

    fn streaming(&self) -> Result<Option<Streaming>, RequestError> {
        const PARAM: &str = "streaming";
        let raw: Option<RawStreaming> = field(self.streaming, PARAM)?;
        let Some(RawStreaming { window, sinks }) = raw else { return Ok(None) };
        if window == 0 {
            return Err(RequestError::invalid(PARAM, "window must be at least 1"));
        }
        if field(self.use_beam_search, "use_beam_search")?.unwrap_or(false) {
            return Err(RequestError::invalid(PARAM, "a search shares what this drops"));
        }
        Ok(Some(Streaming { n_sinks: sinks.unwrap_or(4), window }))
    }

    fn retention(&self) -> Result<Option<RetentionFields>, RequestError> {
        const PARAM: &str = "retention";
        let raw: Option<RawRetention> = field(self.retention, PARAM)?;
        // Somebody who names a session will come back to it.
        let in_session = name(self.session_id, "session_id")?.is_some();
        let session = RetentionFields { priority: 1, seconds: Some(SESSION_SECONDS) };
        let Some(RawRetention { priority, ttl }) = raw else {
            return Ok(in_session.then_some(session));
        };
        if ttl.is_some_and(|ttl| !(0.0..=caps::RETENTION_SECONDS).contains(&ttl)) {
            let detail = format!("ttl must be 0 to {} seconds", caps::RETENTION_SECONDS);
            return Err(RequestError::invalid(PARAM, detail));
        }
        Ok(Some(RetentionFields { priority: priority.unwrap_or(1), seconds: ttl }))
    }

    fn sampling(&self) -> Result<SamplingFields, RequestError> {
        let fields = SamplingFields {
            temperature: field(self.temperature, "temperature")?,
            top_k: number(self.top_k, "top_k", -1..=i64::from(u32::MAX))?
                .map(|k| u32::try_from(k).unwrap_or(0)),
            top_p: field(self.top_p, "top_p")?,
            min_p: field(self.min_p, "min_p")?,
            repetition_penalty: field(self.repetition_penalty, "repetition_penalty")?,
            frequency_penalty: field(self.frequency_penalty, "frequency_penalty")?,
            presence_penalty: field(self.presence_penalty, "presence_penalty")?,
            logit_bias: self.logit_bias()?,
            // OpenAI's seeds are signed, ours are not: the bits are kept.
            seed: number(self.seed, "seed", i128::from(i64::MIN)..=i128::from(u64::MAX))?
                .map(|seed| seed as u64),
        };
        fields.apply(Sampling::default()).validate().map_err(out_of_range)?;
        Ok(fields)
    }

    fn logit_bias(&self) -> Result<Vec<(TokenId, f32)>, RequestError> {
        const PARAM: &str = "logit_bias";
        let pairs: Option<Pairs<f32, { caps::LOGIT_BIASES }>> = field(self.logit_bias, PARAM)?;
        let token = |(key, bias): (String, f32)| {
            let id = key.trim().parse::<u32>();
            let id = id.map_err(|_| {
                let short: String = key.chars().take(32).collect();
                RequestError::invalid(PARAM, format!("`{short}` is not the number of a token"))
            })?;
            Ok((TokenId(id), bias))
        };
        pairs.map_or_else(Vec::new, |pairs| pairs.0).into_iter().map(token).collect()
    }

    fn stop(&self) -> Result<Vec<String>, RequestError> {
        const PARAM: &str = "stop";
        let Some(raw) = self.stop else { return Ok(Vec::new()) };
        let stops = if kind_of(raw) == b'"' {
            field(self.stop, PARAM)?.into_iter().collect()
        } else {
            field::<List<String, { caps::STOPS }>>(self.stop, PARAM)?.map_or_else(Vec::new, |l| l.0)
        };
        for stop in &stops {
            check_len(stop, caps::STOP_BYTES, PARAM)?;
        }
        Ok(stops)
    }

    fn stop_tokens(&self) -> Result<Vec<TokenId>, RequestError> {
        let ids: Option<List<u32, { caps::STOP_TOKENS }>> =
            field(self.stop_token_ids, "stop_token_ids")?;
        Ok(ids.map_or_else(Vec::new, |ids| ids.0.into_iter().map(TokenId).collect()))
    }
}

fn out_of_range(error: SamplingError) -> RequestError {
    RequestError::invalid(error.field, format!("{} must be {}", error.value, error.allowed))
}
