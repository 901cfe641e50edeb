//! One line on its way: its request's answers as they grow, and where their news come from.

use crossbeam_channel::Receiver;
use nuthatch_engine::Output;
use nuthatch_server::Job;
use nuthatch_types::SeqId;

/// A line that is being answered.
#[derive(Debug)]
pub(super) struct LineJob {
    pub(super) line: u64,
    pub(super) custom_id: String,
    pub(super) job: Job,
    /// One for each prompt.
    pub(super) parts: Vec<Part>,
    /// Sequences that it has.
    pub(super) n_seqs: usize,
}

/// One prompt of a line.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) seq: SeqId,
    pub(super) outputs: Receiver<Output>,
}

impl LineJob {
    /// Takes in what the last step gave, and tells `end` of answers in which a stop string was found.
    pub(super) fn poll(&mut self, mut end: impl FnMut(SeqId, u32)) {
        for (prompt_idx, part) in self.parts.iter().enumerate() {
            while let Ok(output) = part.outputs.try_recv() {
                let (Output::Token { index, .. } | Output::Finished { index, .. }) = output;
                if self.job.take(prompt_idx, output).is_stopped {
                    end(part.seq, index);
                }
            }
        }
    }
}
