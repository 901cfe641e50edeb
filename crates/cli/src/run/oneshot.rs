//! One prompt: nothing but its answer, or its answers, on stdout.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use nuthatch_tokens::{Conversation, Words};
use nuthatch_types::TokenId;
use serde_json::json;

use super::History;
use super::answer::{Answer, AnswerToken, Answerer, Ending};
use super::stats::Speeds;
use crate::config::RunConfig;
use crate::interrupt::EXIT_INTERRUPTED;

/// Answers the prompt.
pub(super) fn run(
    config: &RunConfig,
    answerer: &Answerer<'_>,
    question: &str,
    mut history: History,
) -> anyhow::Result<ExitCode> {
    let prompt = encode(answerer.text, question, &history)?;
    let (text, as_json, is_many) = (answerer.text, config.as_json, answerer.n > 1);
    let with_logprobs = config.sampling.wants_logprobs() && !as_json;
    let answers = answerer.answers(prompt.clone(), |index, piece, token| {
        if let Some(token) = token.filter(|_| with_logprobs) {
            let mut line = describe(text, token);
            if is_many {
                line["answer"] = json!(index + 1);
            }
            writeln!(io::stderr(), "{line}")?;
        }
        // Several answers come at the same time, and are printed one after the other.
        if as_json || is_many || piece.is_empty() {
            return Ok(());
        }
        let mut out = io::stdout().lock();
        out.write_all(piece.as_bytes())?;
        out.flush()
    })?;
    if let [answer] = &answers[..]
        && answer.ending != Ending::Interrupted
    {
        history.answered(question, &answer.text)?;
    }
    if as_json {
        let whole = to_json(config, answerer, &prompt, &answers);
        writeln!(io::stdout(), "{whole}")?;
    } else {
        end_lines(&answers)?;
    }
    if config.with_stats || (io::stderr().is_terminal() && !as_json) {
        // A closed stderr is no reason to fail.
        let line = Speeds::of(&answers).line(config.sampling.seed);
        let _ = writeln!(io::stderr(), "{line}");
    }
    let is_interrupted = answers.iter().any(|answer| answer.ending == Ending::Interrupted);
    Ok(if is_interrupted { ExitCode::from(EXIT_INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// Ends the line of a single answer, which has been printed; prints several, numbered.
fn end_lines(answers: &[Answer]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let end = |answer: &Answer| if answer.text.ends_with('\n') { "" } else { "\n" };
    if let [answer] = answers {
        return write!(out, "{}", end(answer));
    }
    for (number, answer) in (1u32..).zip(answers) {
        let score = answer.score.map_or_else(String::new, |score| format!(", score {score:.4}"));
        write!(out, "[{number}{score}] {}{}", answer.text, end(answer))?;
    }
    Ok(())
}

/// The prompt's tokens: a conversation if the model has a template, else the text itself.
fn encode(text: &Words, prompt: &str, history: &History) -> anyhow::Result<Vec<TokenId>> {
    if text.template.is_some() {
        return Ok(text.conversation(&Conversation::Plain(history.asking(prompt)))?);
    }
    let said = history.messages.iter().map(|message| format!("{}\n\n", message.content));
    let before: String =
        history.system.iter().map(|system| format!("{system}\n\n")).chain(said).collect();
    Ok(text.raw(&format!("{before}{prompt}"))?)
}

/// One line of `--logprobs`.
fn describe(text: &Words, token: &AnswerToken) -> serde_json::Value {
    let one = |id: TokenId, logprob: Option<f32>| json!({ "id": id.0, "token": text.piece(id), "logprob": logprob });
    let mut line = one(token.id, token.logprob);
    line["top"] = token.top.iter().map(|&(id, logprob)| one(id, Some(logprob))).collect();
    line
}

/// Everything: a single answer's keys beside the rest, those of several in `answers`.
fn to_json(
    config: &RunConfig,
    answerer: &Answerer<'_>,
    prompt: &[TokenId],
    answers: &[Answer],
) -> serde_json::Value {
    let mut whole = json!({
        "model": config.model.to_string(),
        "seed": config.sampling.seed,
        "temperature": answerer.sampling.temperature,
        "prompt_ids": prompt.iter().map(|token| token.0).collect::<Vec<u32>>(),
        "stats": Speeds::of(answers),
    });
    let with_logprobs = config.sampling.wants_logprobs();
    if let [answer] = answers {
        let keys = answer_json(answer, with_logprobs);
        whole.as_object_mut().expect("made above").extend(keys);
    } else {
        whole["answers"] =
            answers.iter().map(|answer| json!(answer_json(answer, with_logprobs))).collect();
    }
    whole
}

/// One answer. `steps` holds each token's best candidates as pairs of id and logarithm.
fn answer_json(answer: &Answer, with_logprobs: bool) -> serde_json::Map<String, serde_json::Value> {
    let pairs = |token: &AnswerToken| -> Vec<(u32, f32)> {
        token.top.iter().map(|&(id, logprob)| (id.0, logprob)).collect()
    };
    let mut keys = serde_json::Map::new();
    let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id.0).collect();
    keys.insert("text".to_owned(), json!(answer.text));
    keys.insert("finish_reason".to_owned(), json!(answer.ending));
    keys.insert("ids".to_owned(), json!(ids));
    if let Some(score) = answer.score {
        keys.insert("score".to_owned(), json!(score));
    }
    if with_logprobs {
        let logprobs: Vec<Option<f32>> = answer.tokens.iter().map(|t| t.logprob).collect();
        let steps: Vec<Vec<(u32, f32)>> = answer.tokens.iter().map(pairs).collect();
        keys.insert("logprobs".to_owned(), json!(logprobs));
        keys.insert("steps".to_owned(), json!(steps));
    }
    keys
}
