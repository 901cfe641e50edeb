//! Who waits for the tokens of which sequence.
//!
//! ```text
//!   request 7   n = 3 samples   sequences 7, 8, 9: one for each answer
//!   request 10  beam search     sequence 10, then whichever its beams are
//! ```
//!
//! A request is named by its first sequence. It gets the news of all its answers through one
//! channel, and exactly one [`Output::Finished`] for each of them.

use std::time::Duration;

use nuthatch_scheduler::Usage;
use nuthatch_types::{FastMap, FinishReason, SeqId, TokenId};

use crate::beam::{BeamSearch, Hypothesis};
use crate::output::Milestones;
use crate::{Output, Sink};

/// Every request that has not ended, and its sequences.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    requests: FastMap<SeqId, Request>,
    members: FastMap<SeqId, Member>,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Request {
    outputs: Sink,
    /// Answers that were asked for.
    n: u32,
    /// Answers that have not ended.
    n_open: u32,
    /// `[n]`; beams have the first in common.
    milestones: Vec<Milestones>,
    /// If it is a beam search.
    pub(crate) search: Option<BeamSearch>,
    /// What the prompt of a beam search used.
    prompt: Usage,
}

/// A sequence of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// The request's first sequence.
    pub(crate) request: SeqId,
    /// Which of its answers it is; 0 for all beams.
    index: u32,
}

/// Nobody listens to a request any more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gone(pub(crate) SeqId);

impl Request {
    /// A request for `n` answers, submitted at `submitted`.
    pub(crate) fn new(
        outputs: Sink,
        n: u32,
        submitted: Duration,
        search: Option<BeamSearch>,
    ) -> Self {
        let milestones = vec![Milestones::submitted(submitted); n as usize];
        Request { outputs, n, n_open: n, milestones, search, prompt: Usage::default() }
    }

    fn finish(
        &mut self,
        index: u32,
        (reason, usage, score): (FinishReason, Usage, Option<f32>),
        now: Duration,
    ) {
        let timeline = if self.search.is_some() { 0 } else { index };
        let timings = self.milestones[timeline as usize].timings(now);
        self.n_open -= 1;
        // Nobody may be listening any more, and nobody needs to.
        self.outputs.send(Output::Finished { index, reason, usage, timings, score });
    }
}

impl Requests {
    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.members.is_empty()
    }

    /// All requests, in the order in which they came.
    pub(crate) fn all(&self) -> Vec<SeqId> {
        let mut all: Vec<SeqId> = self.requests.keys().copied().collect();
        all.sort_unstable();
        all
    }

    /// Adds a request whose first sequence is `first`.
    pub(crate) fn insert(&mut self, first: SeqId, request: Request) {
        let n_members = if request.search.is_some() { 1 } else { request.n };
        for index in 0..n_members {
            self.join(SeqId(first.0 + u64::from(index)), Member { request: first, index });
        }
        self.requests.insert(first, request);
    }

    /// Adds a sequence to a request.
    pub(crate) fn join(&mut self, seq: SeqId, member: Member) {
        let before = self.members.insert(seq, member);
        assert!(before.is_none(), "a sequence belongs to one request");
    }

    /// Takes a sequence out of its request.
    pub(crate) fn leave(&mut self, seq: SeqId) -> Option<Member> {
        self.members.remove(&seq)
    }

    /// The request to which a sequence belongs.
    pub(crate) fn member(&self, seq: SeqId) -> Option<Member> {
        self.members.get(&seq).copied()
    }

    pub(crate) fn get_mut(&mut self, request: SeqId) -> Option<&mut Request> {
        self.requests.get_mut(&request)
    }

    /// The sequences that a request may still have.
    pub(crate) fn seqs(&self, request: SeqId) -> Vec<SeqId> {
        match self.requests.get(&request) {
            None => Vec::new(),
            Some(Request { search: Some(search), .. }) => search.seqs().collect(),
            Some(Request { n, .. }) => {
                (0..u64::from(*n)).map(|index| SeqId(request.0 + index)).collect()
            }
        }
    }

    /// The sequence of one answer of a request, if it is sampled and may still be there.
    pub(crate) fn seq_of(&self, request: SeqId, index: u32) -> Option<SeqId> {
        let found = self.requests.get(&request)?;
        let is_answer = found.search.is_none() && index < found.n;
        is_answer.then(|| SeqId(request.0 + u64::from(index)))
    }

    /// Records that something is computed for a sequence from now on.
    pub(crate) fn start(&mut self, seq: SeqId, now: Duration) {
        if let Some(milestones) = self.milestones(seq) {
            milestones.started.get_or_insert(now);
        }
    }

    /// Records that a beam search has made its first step, and what its prompt used.
    pub(crate) fn first_step(&mut self, seq: SeqId, prompt: Usage, now: Duration) {
        let Some(milestones) = self.milestones(seq).filter(|m| m.first_token.is_none()) else {
            return;
        };
        milestones.first_token = Some(now);
        let request = self.members[&seq].request;
        if let Some(request) = self.requests.get_mut(&request) {
            request.prompt = Usage { completion_tokens: 0, ..prompt };
        }
    }

    /// Sends a token of a sampled answer.
    pub(crate) fn send(
        &mut self,
        seq: SeqId,
        (token, logprob, top): (TokenId, Option<f32>, Vec<(TokenId, f32)>),
        now: Duration,
    ) -> Result<(), Gone> {
        let Some(Member { request, index }) = self.member(seq) else { return Ok(()) };
        if let Some(milestones) = self.milestones(seq) {
            milestones.first_token.get_or_insert(now);
        }
        let Some(found) = self.requests.get_mut(&request) else { return Ok(()) };
        let is_heard = found.outputs.send(Output::Token { index, token, logprob, top });
        if is_heard { Ok(()) } else { Err(Gone(request)) }
    }

    /// Ends a sampled answer, whose sequence has left its request. The prompt is counted with the
    /// first one.
    pub(crate) fn finish(
        &mut self,
        Member { request: id, index }: Member,
        reason: FinishReason,
        usage: Usage,
        now: Duration,
    ) {
        // A request whose receiver is gone was removed when that was seen.
        let Some(request) = self.requests.get_mut(&id) else { return };
        let usage = if index == 0 { usage } else { usage.without_prompt() };
        request.finish(index, (reason, usage, None), now);
        if request.n_open == 0 {
            self.requests.remove(&id);
        }
    }

    /// Ends a beam search: sends the best answers, best first. What is missing to the number asked
    /// for has ended for `reason` without a token.
    pub(crate) fn finish_search(&mut self, id: SeqId, reason: FinishReason, now: Duration) {
        let Some(mut request) = self.requests.remove(&id) else { return };
        let search = request.search.clone().filter(|search| search.seqs().next().is_none());
        let best = search.map_or_else(Vec::new, |search| search.into_best(request.n));
        let mut usage = request.prompt;
        let n_best = best.len() as u32;
        for (index, Hypothesis { tokens, score, reason }) in (0u32..).zip(best) {
            usage.completion_tokens = tokens.len() as u32;
            for (token, logprob) in tokens {
                let (logprob, top) = (Some(logprob), Vec::new());
                // Nobody may be listening any more, and nobody needs to.
                request.outputs.send(Output::Token { index, token, logprob, top });
            }
            request.finish(index, (reason, usage, Some(score as f32)), now);
            usage = Usage::default();
        }
        for index in n_best..request.n {
            request.finish(index, (reason, std::mem::take(&mut usage), None), now);
        }
    }

    /// Forgets a request to which nobody listens.
    pub(crate) fn remove(&mut self, request: SeqId) {
        self.requests.remove(&request);
    }

    fn milestones(&mut self, seq: SeqId) -> Option<&mut Milestones> {
        let Member { request, index } = self.member(seq)?;
        self.requests.get_mut(&request)?.milestones.get_mut(index as usize)
    }
}
