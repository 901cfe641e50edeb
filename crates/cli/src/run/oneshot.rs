//! One prompt, one answer: nothing but the answer on stdout.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use nuthatch_tokens::Message;
use nuthatch_types::TokenId;
use serde_json::json;

use super::answer::{Answer, AnswerToken, Answerer, Ending};
use super::stats::Speeds;
use crate::config::RunConfig;
use crate::interrupt::EXIT_INTERRUPTED;
use crate::text::Text;

/// Answers the prompt.
pub(super) fn run(
    config: &RunConfig,
    answerer: &Answerer<'_>,
    prompt: &str,
) -> anyhow::Result<ExitCode> {
    let prompt = encode(config, answerer.text, prompt)?;
    let (text, as_json) = (answerer.text, config.as_json);
    let with_logprobs = config.sampling.wants_logprobs() && !as_json;
    let answer = answerer.answer(prompt.clone(), |piece, token| {
        if let Some(token) = token.filter(|_| with_logprobs) {
            let line = describe(text, token);
            writeln!(io::stderr(), "{line}")?;
        }
        if as_json || piece.is_empty() {
            return Ok(());
        }
        let mut out = io::stdout().lock();
        out.write_all(piece.as_bytes())?;
        out.flush()
    })?;
    if as_json {
        let whole = to_json(config, answerer, &prompt, &answer);
        writeln!(io::stdout(), "{whole}")?;
    } else if !answer.text.ends_with('\n') {
        writeln!(io::stdout())?;
    }
    if config.with_stats || (io::stderr().is_terminal() && !as_json) {
        // A closed stderr is no reason to fail.
        let line = Speeds::of(&answer).line(config.sampling.seed);
        let _ = writeln!(io::stderr(), "{line}");
    }
    match answer.ending {
        Ending::Interrupted => Ok(ExitCode::from(EXIT_INTERRUPTED)),
        Ending::Stop | Ending::Length | Ending::Context => Ok(ExitCode::SUCCESS),
    }
}

/// The prompt's tokens: a conversation if the model has a template, else the text itself.
fn encode(config: &RunConfig, text: &Text, prompt: &str) -> anyhow::Result<Vec<TokenId>> {
    let system = config.system.iter().map(|system| Message::new("system", system));
    let messages: Vec<Message> = system.chain([Message::new("user", prompt)]).collect();
    match text.conversation(&messages) {
        Some(tokens) => tokens,
        None => {
            let system = config.system.as_ref().map(|system| format!("{system}\n\n"));
            text.raw(&format!("{}{prompt}", system.unwrap_or_default()))
        }
    }
}

/// One line of `--logprobs`.
fn describe(text: &Text, token: &AnswerToken) -> serde_json::Value {
    let one = |id: TokenId, logprob: f32| json!({ "id": id.0, "token": text.piece(id), "logprob": logprob });
    let mut line = one(token.id, token.logprob);
    line["top"] = token.top.iter().map(|&(id, logprob)| one(id, logprob)).collect();
    line
}

/// The whole answer. `steps` holds each token's best candidates as pairs of id and logarithm.
fn to_json(
    config: &RunConfig,
    answerer: &Answerer<'_>,
    prompt: &[TokenId],
    answer: &Answer,
) -> serde_json::Value {
    let ids = |tokens: &[TokenId]| tokens.iter().map(|token| token.0).collect::<Vec<u32>>();
    let chosen: Vec<TokenId> = answer.tokens.iter().map(|token| token.id).collect();
    let pairs = |token: &AnswerToken| -> Vec<(u32, f32)> {
        token.top.iter().map(|&(id, logprob)| (id.0, logprob)).collect()
    };
    let mut whole = json!({
        "model": config.model.to_string(),
        "text": answer.text,
        "finish_reason": answer.ending,
        "seed": config.sampling.seed,
        "temperature": answerer.sampling.temperature,
        "prompt_ids": ids(prompt),
        "ids": ids(&chosen),
        "stats": Speeds::of(answer),
    });
    if config.sampling.wants_logprobs() {
        let logprobs: Vec<f32> = answer.tokens.iter().map(|token| token.logprob).collect();
        whole["logprobs"] = json!(logprobs);
        whole["steps"] = json!(answer.tokens.iter().map(pairs).collect::<Vec<_>>());
    }
    whole
}
