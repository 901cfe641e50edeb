//! One request to a server, and when its answer came.

use std::io::{BufRead as _, BufReader, Read as _};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use nuthatch_types::{Clock as _, SystemClock};
use serde_json::Value;

use super::dataset::Request;
use crate::args::BenchServeArgs;

/// Bytes of an error that are told.
const ERROR_BYTES: u64 = 2000;
/// Time for a connection, and between two pieces of an answer.
const PATIENCE: Duration = Duration::from_secs(600);

/// What sends requests, from any thread.
pub(crate) struct Client {
    agent: ureq::Agent,
    base: String,
    key: Option<String>,
    model: String,
    clock: Arc<SystemClock>,
}

/// How a request went.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Why there is no answer.
    pub(crate) error: Option<String>,
    /// Until the first chunk with a token.
    pub(crate) first: Duration,
    /// Until the last.
    pub(crate) last: Duration,
    /// Between two of them.
    pub(crate) gaps: Vec<Duration>,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) output_tokens: u64,
}

impl Client {
    /// A client of the server that the arguments name; asks it for its model if they name none.
    pub(crate) fn new(args: &BenchServeArgs, clock: Arc<SystemClock>) -> anyhow::Result<Self> {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // The server is meant, and not what stands between.
            .proxy(None)
            .max_idle_connections(4096)
            .max_idle_connections_per_host(4096)
            .timeout_per_read(Some(PATIENCE))
            .build()
            .into();
        let base = args.base_url.trim_end_matches('/').to_owned();
        let mut client =
            Client { agent, base, key: args.api_key.clone(), model: String::new(), clock };
        client.model = match &args.model {
            Some(model) => model.clone(),
            None => client.first_model()?,
        };
        Ok(client)
    }

    /// The model's name.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    fn first_model(&self) -> anyhow::Result<String> {
        let url = format!("{}/v1/models", self.base);
        let mut get = self.agent.get(&url);
        if let Some(key) = &self.key {
            get = get.header("authorization", format!("Bearer {key}"));
        }
        let text = get
            .call()
            .and_then(|mut response| response.body_mut().read_to_string())
            .with_context(|| format!("cannot ask {url}"))?;
        let models: Value =
            serde_json::from_str(&text).with_context(|| format!("{url}: {text}"))?;
        let name = models["data"][0]["id"].as_str();
        Ok(name.with_context(|| format!("{url} names no model: {text}"))?.to_owned())
    }

    /// Sends a request and takes its answer.
    pub(crate) fn ask(&self, request: &Request) -> Outcome {
        let mut outcome = Outcome::default();
        if let Err(error) = self.try_ask(request, &mut outcome) {
            outcome.error = Some(crate::chain(&error));
        } else if outcome.last.is_zero() {
            outcome.error = Some("the answer is empty".to_owned());
        }
        outcome
    }

    fn try_ask(&self, request: &Request, outcome: &mut Outcome) -> anyhow::Result<()> {
        let begin = self.clock.now();
        let mut post = self
            .agent
            .post(format!("{}{}", self.base, request.path))
            .header("content-type", "application/json");
        if let Some(key) = &self.key {
            post = post.header("authorization", format!("Bearer {key}"));
        }
        let response = post.send(request.body.as_bytes())?;
        let status = response.status().as_u16();
        let mut reader = BufReader::new(response.into_body().into_reader());
        if status != 200 {
            let mut text = String::new();
            let _ = reader.take(ERROR_BYTES).read_to_string(&mut text);
            anyhow::bail!("status {status}: {text}");
        }
        let mut line = String::new();
        let mut n_chunks = 0;
        loop {
            line.clear();
            anyhow::ensure!(reader.read_line(&mut line)? > 0, "the stream ends without [DONE]");
            let Some(data) = line.trim_end().strip_prefix("data:").map(str::trim_start) else {
                continue;
            };
            if data == "[DONE]" {
                break;
            }
            let now = self.clock.now() - begin;
            let chunk: Value = serde_json::from_str(data).context("a chunk is not JSON")?;
            if let Some(error) = chunk.get("error") {
                anyhow::bail!("{error}");
            }
            if has_token(&chunk) {
                match n_chunks {
                    0 => outcome.first = now,
                    _ => outcome.gaps.push(now - outcome.last),
                }
                outcome.last = now;
                n_chunks += 1;
            } else if n_chunks == 0 && chunk["choices"][0].is_object() {
                // Tokens without a text of their own may be told with the end only.
                (outcome.first, outcome.last) = (now, now);
            }
            if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
                let count = |value: &Value| value.as_u64().unwrap_or(0);
                outcome.prompt_tokens = count(&usage["prompt_tokens"]);
                outcome.output_tokens = count(&usage["completion_tokens"]);
                let cached = &usage["prompt_tokens_details"]["cached_tokens"];
                outcome.cached_tokens = count(cached);
            }
        }
        if outcome.output_tokens == 0 {
            // A server that does not count: most send a chunk a token.
            outcome.output_tokens = n_chunks;
        }
        // The connection is used again only when its answer was read to the end.
        std::io::copy(&mut reader, &mut std::io::sink())?;
        Ok(())
    }
}

/// Whether a chunk stands for a token, in either of the two APIs: it has text, or it is neither the
/// beginning, which names the role, nor the end, which gives the reason.
fn has_token(chunk: &Value) -> bool {
    let choice = &chunk["choices"][0];
    let text = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
    let is_edge = !choice["finish_reason"].is_null() || choice["delta"]["role"].is_string();
    text.is_some_and(|text| !text.is_empty() || !is_edge)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_count_and_beginnings_and_ends_do_not() {
        let check = |choice: Value, expect| {
            let chunk = json!({ "choices": [choice] });
            assert_eq!(has_token(&chunk), expect, "{chunk}");
        };
        check(json!({"text": " a", "finish_reason": null}), true);
        check(json!({"text": "", "finish_reason": null}), true);
        check(json!({"text": "", "finish_reason": "length"}), false);
        check(json!({"text": "a", "finish_reason": "length"}), true);
        check(json!({"delta": {"role": "assistant", "content": ""}}), false);
        check(json!({"delta": {"role": "assistant", "content": "Hi"}}), true);
        check(json!({"delta": {"content": "Hi"}, "finish_reason": null}), true);
        check(json!({"delta": {}, "finish_reason": "stop"}), false);
        assert!(!has_token(&json!({"choices": [], "usage": {}})));
    }
}
