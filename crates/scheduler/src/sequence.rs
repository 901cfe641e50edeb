//! What is known of one request.
//!
//! ```text
//!   tokens   [0, n_prompt)   [n_prompt, tokens.len())
//!            the prompt      sampled so far
//!   cache    [0, computed)   [computed, tokens.len())
//!            in the cache    to be computed: the steps catch up
//! ```
//!
//! A sequence with a window, or one that streams, does not keep all that is computed: see `kept`.

use nuthatch_types::{Limits, Sampling, SeqId, TokenId};

use crate::kept::Stream;
use crate::policy::{Rank, Waiter};
use crate::tokens::Tokens;
use crate::{Hints, Usage};

/// What is known of one request.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SeqId,
    pub(crate) rank: Rank,
    /// Tokens computed since its rank changed last.
    pub(crate) n_since_rank: u64,
    pub(crate) place: Place,
    /// The step since which it waits, if it does.
    pub(crate) since: u64,
    /// The prompt, then what was sampled; changed by [`Sequence::push`] only.
    pub(crate) tokens: Tokens,
    /// The last of `tokens`.
    pub(crate) newest: TokenId,
    pub(crate) n_prompt: u32,
    /// Tokens whose KV is in the cache, or was before it was given back.
    pub(crate) computed: u32,
    /// Tokens of those that were dropped from the table; the places of the others are so many less.
    pub(crate) dropped: u32,
    /// Tokens of the prompt that the cache held when the sequence first got pages.
    pub(crate) cached: u32,
    /// The most that `computed` has been: what lies below is computed again after a preemption.
    pub(crate) computed_max: u32,
    /// Why it was computed less far than that, if it was.
    pub(crate) loss: Loss,
    /// Places that it has in the cache beyond the tokens that are computed or in a step: the rest of
    /// its last page. While there are some, a step need not ask the cache.
    pub(crate) n_spare: u32,
    /// Entries of the table that the executor has and that still stand.
    pub(crate) table_known: u32,
    /// Pages at its beginning that are being loaded. It is in no step meanwhile.
    pub(crate) n_loading: u32,
    /// Most tokens, prompt and answer together; already clipped to what can be computed.
    pub(crate) max_len: u32,
    pub(crate) limits: Limits,
    /// Boxed like `sampling`.
    pub(crate) hints: Box<Hints>,
    /// What it keeps if it streams.
    pub(crate) stream: Option<Stream>,
    /// Tokens that it has in common with the sequence that it forks.
    pub(crate) n_common: u32,
    /// How tokens are chosen. Boxed because it is large and needed only when the executor is told,
    /// where the rest is needed in every step.
    pub(crate) sampling: Box<Sampling>,
    /// Whether the executor knows it.
    pub(crate) is_started: bool,
    /// Whether the caller chooses its tokens.
    pub(crate) is_guided: bool,
    /// Whether its new pages are on the host where the device has no room beside what others need.
    pub(crate) is_spilled: bool,
    /// Whether the sequence was preempted and has sampled nothing since.
    pub(crate) protected: bool,
    /// The last step that gave it tokens to compute.
    pub(crate) last_step: u64,
}

/// Where a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// It waits for the sequence that it forks.
    Held,
    /// It waits for its turn, without pages.
    Waiting,
    /// It waits for its turn, and its pages are on the host.
    Swapped,
    /// It has its pages, on the device unless it is spilled.
    Running,
    /// It has given its pages up and waits for the caller to choose its next token.
    Parked,
}

/// Why a sequence has lost what was computed for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Another sequence needed its pages.
    PagesShort,
    /// One of a lower class took its place.
    Displaced,
    /// It was swapped, and another sequence could not have run without the pages that it held on
    /// the device.
    SwapDropped,
}

impl Sequence {
    /// What a queue knows of it.
    pub(crate) fn waiter(&self) -> Waiter {
        Waiter {
            seq: self.id,
            rank: self.rank,
            tenant: self.hints.tenant,
            is_started: self.is_started,
            since: self.since,
        }
    }

    /// Whether the executor has all of its table, when it has spare places, which end with a page.
    pub(crate) fn is_table_known(&self, page_len: u32) -> bool {
        self.table_known * page_len + self.dropped == self.computed + self.n_spare
    }

    /// Where the step after the one that ends at `end` would end, as far as is known now. The last
    /// token is never computed, and a table that closes up keeps what it has.
    pub(crate) fn end_ahead(&self, end: u32) -> u32 {
        let may_go_on = self.stream.is_none() && !self.is_guided && end + 1 < self.max_len;
        end + u32::from(may_go_on)
    }

    /// Tokens that are not computed.
    pub(crate) fn pending(&self) -> u32 {
        self.tokens.len() - self.computed
    }

    /// Whether it has pages and waits for the caller to choose its next token.
    pub(crate) fn is_paused(&self) -> bool {
        self.place == Place::Running && self.pending() == 0
    }

    /// Whether only the last sampled token is not computed.
    pub(crate) fn is_decoding(&self) -> bool {
        self.pending() == 1 && self.n_sampled() > 0
    }

    /// Whether its prompt has to be computed from the first token on, whatever the cache holds.
    pub(crate) fn computes_all(&self) -> bool {
        self.hints.computes_all && self.computed_max < self.n_prompt
    }

    /// Tokens sampled so far.
    pub(crate) fn n_sampled(&self) -> u32 {
        self.tokens.len() - self.n_prompt
    }

    /// Whether a sampled token ends the sequence and is not part of the answer.
    pub(crate) fn is_stop(&self, token: TokenId) -> bool {
        self.n_sampled() >= self.limits.min_tokens && self.limits.stop_tokens.contains(&token)
    }

    /// What the sequence used so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.n_prompt,
            cached_tokens: self.cached,
            completion_tokens: self.n_sampled(),
        }
    }

    /// Adds a sampled token.
    pub(crate) fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
        self.newest = token;
    }

    /// Forgets what is in the cache. The tokens stay.
    pub(crate) fn reset(&mut self, loss: Loss) {
        self.tokens.settle();
        self.computed = 0;
        self.dropped = 0;
        self.n_spare = 0;
        self.table_known = 0;
        self.n_loading = 0;
        self.is_spilled = false;
        self.loss = loss;
    }
}
