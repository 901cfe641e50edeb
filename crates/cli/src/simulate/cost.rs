//! What a step costs, without a model.

use std::fmt;
use std::time::Duration;

use nuthatch_types::{SeqStep, StepPlan};

/// Microseconds of a step's parts.
///
/// The default is SmolLM2-135M (Q4_1 weights, f16 KV) on two threads of a Sapphire Rapids machine;
/// docs/simulate.md says how it was measured.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Cost {
    /// Any step.
    step: f64,
    /// A token of a prompt.
    prefill: f64,
    /// A token of a prompt and one token before it.
    prefill_kv: f64,
    /// A token of an answer.
    decode: f64,
    /// A cached token that an answer's token reads.
    decode_kv: f64,
    /// A page that is copied.
    copy: f64,
    /// A page that a sequence reads on the host.
    host: f64,
}

impl Default for Cost {
    fn default() -> Self {
        Cost {
            step: 3600.0,
            prefill: 850.0,
            prefill_kv: 0.8,
            decode: 2200.0,
            decode_kv: 2.1,
            copy: 60.0,
            // On a CPU the host's pages are like any other.
            host: 0.0,
        }
    }
}

/// How long a step took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Took {
    pub(super) copies: Duration,
    pub(super) pass: Duration,
}

/// A cost that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CostError {
    /// No part of a step.
    #[error(
        "`{0}` is no part of a step; parts are step, prefill, prefill-kv, decode, decode-kv, copy \
         and host"
    )]
    Part(String),
    /// No number of microseconds.
    #[error("`{0}` is no number of microseconds from 0 to 1e9")]
    Number(String),
}

/// Reads `step=3000,prefill=900`; parts that are not named keep their default.
pub(crate) fn parse_cost(text: &str) -> Result<Cost, CostError> {
    let mut cost = Cost::default();
    for item in text.split(',').filter(|item| !item.trim().is_empty()) {
        let (part, number) = item.split_once('=').unwrap_or((item, ""));
        let place = match part.trim() {
            "step" => &mut cost.step,
            "prefill" => &mut cost.prefill,
            "prefill-kv" => &mut cost.prefill_kv,
            "decode" => &mut cost.decode,
            "decode-kv" => &mut cost.decode_kv,
            "copy" => &mut cost.copy,
            "host" => &mut cost.host,
            part => return Err(CostError::Part(part.to_owned())),
        };
        let micros = number.trim().parse().ok().filter(|micros| (0.0..=1e9).contains(micros));
        *place = micros.ok_or_else(|| CostError::Number(number.to_owned()))?;
    }
    Ok(cost)
}

impl Cost {
    /// How long a step takes. `n_prompt` says how long a sequence's prompt is, and `n_host` how many
    /// of its pages are on the host.
    pub(super) fn of(
        &self,
        plan: &StepPlan,
        n_prompt: impl Fn(SeqStep<'_>) -> u32,
        n_host: impl Fn(SeqStep<'_>) -> u32,
    ) -> Took {
        let mut micros = self.step;
        for step in plan.seqs.iter() {
            micros += self.host * f64::from(n_host(step));
            let (n, start) = (step.tokens.len() as f64, f64::from(step.start));
            if n == 1.0 && step.start >= n_prompt(step) {
                micros += self.decode + self.decode_kv * (start + 1.0);
            } else {
                let pairs = n * start + n * (n + 1.0) / 2.0;
                micros += self.prefill * n + self.prefill_kv * pairs;
            }
        }
        let nanos = |micros: f64| Duration::from_nanos((micros * 1e3).round() as u64);
        let copies = nanos(self.copy * plan.copies.len() as f64);
        // Time goes on, whatever the flags say.
        Took { copies, pass: nanos(micros).max(Duration::from_nanos(1)) }
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { step, prefill, prefill_kv, decode, decode_kv, copy, host } = self;
        write!(
            f,
            "step={step},prefill={prefill},prefill-kv={prefill_kv},decode={decode},\
             decode-kv={decode_kv},copy={copy}"
        )?;
        if *host > 0.0 { write!(f, ",host={host}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::{PageCopy, SeqId, Slot, TableChange, TokenId};

    use super::*;

    #[test]
    fn a_step_is_the_sum_of_its_parts() {
        let (tokens, table) = ([TokenId(0); 4], TableChange::default());
        let step = |start, n: usize| SeqStep {
            seq: SeqId(0),
            start,
            shift: 0,
            tokens: &tokens[..n],
            table,
            sample: true,
        };
        let cost =
            parse_cost("step=1000,prefill=100,prefill-kv=1,decode=10,decode-kv=2,copy=5,host=3");
        let cost = cost.unwrap();
        let copy = PageCopy { source: Slot(0), target: Slot(1) };
        let plan = StepPlan {
            seqs: [step(10, 1), step(0, 4), step(6, 1)].into(),
            copies: vec![copy, copy],
            ..StepPlan::default()
        };
        // Prompts of ten tokens: the first decodes, the others are prefill.
        let pass = Duration::from_micros(1000 + (10 + 2 * 11) + (400 + 10) + (100 + 7) + 3 * 6);
        assert_eq!(cost.of(&plan, |_| 10, |_| 2), Took { copies: Duration::from_micros(10), pass });
    }

    #[test]
    fn costs_are_read_and_written() {
        let cost = parse_cost("decode=1.5, copy=0, host=2").unwrap();
        assert_eq!((cost.decode, cost.copy, cost.step), (1.5, 0.0, Cost::default().step));
        assert_eq!(parse_cost(&cost.to_string()), Ok(cost));
        assert_eq!(parse_cost(""), Ok(Cost::default()));
        for text in ["steps=1", "step", "step=x", "step=-1", "step=nan", "step=inf"] {
            assert!(parse_cost(text).is_err(), "{text}");
        }
    }
}
