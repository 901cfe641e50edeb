//! How one request goes, told to the metrics as it goes.

use std::time::Duration;

use nuthatch_engine::{Output, Submission, Timings, Usage};
use nuthatch_types::FinishReason;

use super::Metrics;

/// How one request goes.
#[derive(Debug)]
pub(crate) struct Watch {
    submitted: Duration,
    /// When each answer's last token came, prompt by prompt.
    last: Vec<Vec<Option<Duration>>>,
}

/// An answer that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndedAnswer {
    pub(super) reason: FinishReason,
    pub(super) usage: Usage,
    pub(super) timings: Timings,
    pub(super) latency: Duration,
    /// Whether it is the first to its prompt, with which the prompt is counted.
    pub(super) is_first: bool,
}

impl Watch {
    /// A request that is submitted now.
    pub(crate) fn new(submissions: &[Submission], now: Duration) -> Self {
        let last = submissions.iter().map(|s| vec![None; s.n as usize]).collect();
        Watch { submitted: now, last }
    }

    /// Takes note of what is new.
    pub(crate) fn take(
        &mut self,
        prompt_idx: usize,
        output: &Output,
        now: Duration,
        metrics: &Metrics,
    ) {
        let (Output::Token { index, .. } | Output::Finished { index, .. }) = *output;
        let answers = self.last.get_mut(prompt_idx);
        let Some(last) = answers.and_then(|a| a.get_mut(index as usize)) else { return };
        match *output {
            Output::Token { .. } => match last.replace(now) {
                // All answers to a prompt begin when it is computed.
                None if index > 0 => {}
                None => metrics.first_token(now, now.saturating_sub(self.submitted)),
                Some(before) => metrics.next_token(now, now.saturating_sub(before)),
            },
            Output::Finished { reason, usage, timings, .. } => metrics.ended(&EndedAnswer {
                reason,
                usage,
                timings,
                latency: now.saturating_sub(self.submitted),
                is_first: index == 0,
            }),
        }
    }
}
