//! Words: greedy answers of both engines to the same prompts, token by token.
//!
//! Two engines round differently, so where two tokens are almost equally likely their choices may
//! part, and after that the texts have nothing in common. A parting is a near tie when on both
//! sides the chosen token leads the other's by less than the tolerance; anything more is a failure.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::Bed;
use crate::args::Args;
use crate::shell;

/// Nats by which a choice may lead and still count as a tie.
///
/// Both engines round activations to eight bits. Against the same weights in f32 the log
/// probabilities of the best three tokens were off by 0.114 nats (llama.cpp) and 0.119 nats (here),
/// root mean square over these prompts (SmolLM2-135M Q4_1, `eval/peers/reference.py`). A lead is the
/// difference of two of them on each side, so two engines disagree about it by 0.23 nats as a rule;
/// this is twice that.
const TOLERANCE: f64 = 0.5;

/// One engine's answer.
#[derive(Debug, Default)]
struct Answer {
    /// Tokens of the prompt.
    prompt: Vec<u64>,
    /// Tokens of the answer.
    ids: Vec<u64>,
    /// For each step the likeliest tokens with their log probabilities, best first.
    steps: Vec<Vec<(u64, f64)>>,
}

/// How two answers compare.
#[derive(Debug, PartialEq)]
enum Verdict {
    Equal,
    /// The prompts were tokenised differently.
    Prompt,
    Parted {
        at: usize,
        /// Lead of our choice over theirs on our side, in nats; none when theirs was not listed.
        our_lead: Option<f64>,
        their_lead: Option<f64>,
    },
}

/// The chore.
pub(super) fn run(mut args: Args) -> Result<()> {
    let tokens: u32 = args.value("--tokens")?.unwrap_or(48);
    let tolerance: f64 = args.value("--tolerance")?.unwrap_or(TOLERANCE);
    let file: Option<PathBuf> = args.value("--json")?;
    let bed = Bed::prepare(&mut args)?;
    args.finish()?;
    let mut peer = shell::command(&bed.python);
    peer.arg("eval/peers/llama_greedy.py").arg("--model").arg(&bed.model);
    peer.args(["--prompts", "eval/peers/prompts.json", "--tokens", &tokens.to_string()]);
    let peer = shell::capture(peer.args(["--threads", &bed.threads.to_string()]))?;
    let peer: Value = serde_json::from_str(&peer).context("llama_greedy.py")?;

    let (mut equal, mut ties, mut failed) = (0, 0, 0);
    let mut pairs = Vec::new();
    for theirs in peer["answers"].as_array().context("llama_greedy.py gave no answers")? {
        let mode = theirs["mode"].as_str().context("an answer without a mode")?;
        let prompt = theirs["prompt"].as_str().context("an answer without a prompt")?;
        let ours = nuthatch(&bed, mode, prompt, tokens)?;
        let verdict = compare(&Answer::read(&ours)?, &Answer::read(theirs)?);
        pairs
            .push(json!({ "mode": mode, "prompt": prompt, "nuthatch": ours, "llama_cpp": theirs }));
        let count = match verdict {
            Verdict::Equal => &mut equal,
            Verdict::Parted { .. } if verdict.is_tie(tolerance) => &mut ties,
            Verdict::Prompt | Verdict::Parted { .. } => &mut failed,
        };
        *count += 1;
        let head: String =
            prompt.chars().map(|c| if c == '\n' { ' ' } else { c }).take(40).collect();
        println!("{mode:<6}{head:<42}{}", verdict.describe(tolerance));
    }
    if let Some(file) = file {
        std::fs::write(&file, Value::from(pairs).to_string())
            .with_context(|| file.display().to_string())?;
    }
    println!(
        "\n{equal} equal, {ties} part at a near tie (under {tolerance} nats), {failed} differ"
    );
    if failed > 0 {
        bail!("{failed} answers differ from llama.cpp's");
    }
    Ok(())
}

fn nuthatch(bed: &Bed, mode: &str, prompt: &str, tokens: u32) -> Result<Value> {
    let mut command = shell::command(&bed.nuthatch);
    command.args(["run", "--model"]).arg(&bed.model).args(["--prompt", prompt]);
    command.args(["--greedy", "--json", "--logprobs", "5", "--max-tokens", &tokens.to_string()]);
    command.args(["--threads", &bed.threads.to_string()]);
    if mode == "raw" {
        command.arg("--raw");
    }
    let text = shell::capture(&mut command)?;
    serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
}

impl Answer {
    fn read(value: &Value) -> Result<Self> {
        let ids = |field: &str| {
            let list =
                value[field].as_array().with_context(|| format!("an answer without {field}"))?;
            let ids: Option<Vec<u64>> = list.iter().map(Value::as_u64).collect();
            ids.with_context(|| format!("{field} holds something that is no token"))
        };
        let steps = value["steps"].as_array().context("an answer without steps")?;
        let pair = |pair: &Value| Some((pair[0].as_u64()?, pair[1].as_f64()?));
        let step = |step: &Value| step.as_array()?.iter().map(pair).collect::<Option<Vec<_>>>();
        let steps: Option<Vec<_>> = steps.iter().map(step).collect();
        Ok(Self {
            prompt: ids("prompt_ids")?,
            ids: ids("ids")?,
            steps: steps.context("a step without its candidates")?,
        })
    }

    /// How much likelier the chosen token of step `at` was than `other`, if `other` was listed.
    fn lead(&self, at: usize, other: Option<u64>) -> Option<f64> {
        let step = self.steps.get(at)?;
        let (_, best) = step.first()?;
        let (_, rival) = step.iter().find(|(id, _)| Some(*id) == other)?;
        Some(best - rival)
    }
}

impl Verdict {
    fn is_tie(&self, tolerance: f64) -> bool {
        let small = |lead: Option<f64>| lead.is_some_and(|lead| lead <= tolerance);
        match *self {
            Self::Equal => true,
            Self::Prompt => false,
            Self::Parted { our_lead, their_lead, .. } => small(our_lead) && small(their_lead),
        }
    }

    fn describe(&self, tolerance: f64) -> String {
        let lead =
            |lead: Option<f64>| lead.map_or("unlisted".to_owned(), |lead| format!("{lead:.3}"));
        match *self {
            Self::Equal => "equal".to_owned(),
            Self::Prompt => "DIFFERS: the prompt's tokens".to_owned(),
            Self::Parted { at, our_lead, their_lead } => format!(
                "{} at token {at}: lead {} here, {} there",
                if self.is_tie(tolerance) { "near tie" } else { "DIFFERS" },
                lead(our_lead),
                lead(their_lead)
            ),
        }
    }
}

fn compare(ours: &Answer, theirs: &Answer) -> Verdict {
    if ours.prompt != theirs.prompt {
        return Verdict::Prompt;
    }
    let longest = ours.ids.len().max(theirs.ids.len());
    match (0..longest).find(|&at| ours.ids.get(at) != theirs.ids.get(at)) {
        None => Verdict::Equal,
        Some(at) => Verdict::Parted {
            at,
            our_lead: ours.lead(at, theirs.ids.get(at).copied()),
            their_lead: theirs.lead(at, ours.ids.get(at).copied()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(ids: &[u64], last: &[(u64, f64)]) -> Answer {
        let mut steps: Vec<Vec<(u64, f64)>> = ids.iter().map(|id| vec![(*id, -0.1)]).collect();
        *steps.last_mut().unwrap() = last.to_vec();
        Answer { prompt: vec![1], ids: ids.to_vec(), steps }
    }

    #[test]
    fn a_parting_is_a_tie_only_when_both_sides_waver() {
        let ours = answer(&[5, 6], &[(6, -1.0), (7, -1.1)]);
        assert_eq!(compare(&ours, &ours), Verdict::Equal);
        let near = compare(&ours, &answer(&[5, 7], &[(7, -1.0), (6, -1.05)]));
        assert!(near.is_tie(0.25));
        let far = compare(&ours, &answer(&[5, 7], &[(7, -0.2), (6, -3.0)]));
        assert!(!far.is_tie(0.25));
        let unlisted = compare(&ours, &answer(&[5, 9], &[(9, -0.2)]));
        assert!(!unlisted.is_tie(0.25));
        let longer = compare(&ours, &answer(&[5, 6, 8], &[(8, -0.2)]));
        assert!(!longer.is_tie(0.25));
    }

    #[test]
    fn different_prompt_tokens_are_named() {
        let ours = answer(&[5], &[(5, -0.1)]);
        let theirs = Answer { prompt: vec![2], ..answer(&[5], &[(5, -0.1)]) };
        assert_eq!(compare(&ours, &theirs), Verdict::Prompt);
    }
}
