//! How much of a sequence the cache keeps: everything, the model's window, or sinks and a window.

use nuthatch_types::{SeqId, Streaming, Window};

use crate::sequence::Sequence;
use crate::step::Step;
use crate::{Hints, Scheduler, SubmitError};

/// The longest sequence that drops what it does not keep: positions fit 31 bits.
const STREAM_LEN_MAX: u32 = i32::MAX as u32;

/// What a streaming sequence keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// Pages of the sinks.
    pub(crate) n_sinks: u32,
    /// Most tokens of the table, whole pages.
    pub(crate) max_len: u32,
}

impl Stream {
    pub(crate) fn new(streaming: Streaming, page_len: u32) -> Self {
        Stream { n_sinks: streaming.sink_pages(page_len), max_len: streaming.max_len(page_len) }
    }
}

impl Scheduler {
    /// How far back the model sees, if that is not everything, for a sequence that does not stream.
    pub(crate) fn window(&self, hints: &Hints) -> Option<Window> {
        let n_tokens = self.config.window.filter(|_| hints.streaming.is_none())?;
        Some(Window { n_tokens, max_chunk: self.config.max_batched_tokens })
    }

    /// The most tokens that a sequence may have, or why this prompt is too long for any answer.
    pub(crate) fn max_len(&self, prompt: u32, hints: &Hints) -> Result<u32, SubmitError> {
        if let Some(streaming) = hints.streaming {
            return self.max_len_streaming(prompt, streaming);
        }
        let max_context = self.config.max_context;
        if prompt >= max_context {
            return Err(SubmitError::ExceedsContext { prompt, max_context });
        }
        let page_len = self.cache.config().page_len;
        let n_pages = self.cache.capacity() / page_len;
        let needed = |n_tokens: u32| match self.window(hints) {
            Some(window) => window.pages_max(n_tokens, page_len),
            None => n_tokens.div_ceil(page_len),
        };
        if needed(prompt + 1) > n_pages {
            let needed = needed(prompt + 1);
            return Err(SubmitError::ExceedsCache { prompt, needed, n_pages, page_len });
        }
        let fits = needed(max_context) <= n_pages;
        Ok(if fits { max_context } else { max_context.min(self.cache.capacity()) })
    }

    fn max_len_streaming(&self, prompt: u32, streaming: Streaming) -> Result<u32, SubmitError> {
        let max_context = self.config.max_context;
        let page_len = self.cache.config().page_len;
        let n_pages = self.cache.device_capacity() / page_len;
        let (kept, needed) = (streaming.max_len(page_len), streaming.pages_max(page_len));
        if streaming.window == 0 {
            return Err(SubmitError::NoStreamingWindow);
        }
        if kept > max_context || needed > n_pages {
            return Err(SubmitError::StreamingExceeds { kept, max_context, needed, n_pages });
        }
        if prompt >= STREAM_LEN_MAX {
            return Err(SubmitError::ExceedsContext { prompt, max_context: STREAM_LEN_MAX });
        }
        Ok(STREAM_LEN_MAX)
    }

    /// How many of the next `n_tokens` of a running sequence find room in its table. A streaming
    /// sequence whose table is full drops a page for it, and room and pages are then there; `None`
    /// when there are no pages for that.
    ///
    /// A table is filled to its end before anything is dropped, so that what a token sees depends on
    /// its place in the sequence alone, and not on how the sequence was cut into steps.
    pub(crate) fn make_way(&mut self, seq: SeqId, n_tokens: u32, step: &mut Step) -> Option<u32> {
        let sequence = self.seqs.get_mut(&seq).expect("a queued sequence has not ended");
        let Some(Stream { n_sinks, max_len }) = sequence.stream else { return Some(n_tokens) };
        if sequence.computed - sequence.dropped == max_len {
            let shifts = self.cache.roll(seq, n_sinks).ok()?;
            step.surplus = None;
            step.plan.shifts.extend(shifts);
            // The sinks get pages of their own with the first page that is dropped; later they stay.
            let n_stay = if sequence.dropped == 0 { 0 } else { n_sinks };
            sequence.table_known = sequence.table_known.min(n_stay);
            sequence.dropped = self.cache.n_dropped(seq);
        }
        Some(n_tokens.min(max_len - (sequence.computed - sequence.dropped)))
    }

    /// Pages that a running sequence still needs for the tokens it has.
    pub(crate) fn pages_outstanding(&self, seq: SeqId) -> u32 {
        let sequence = self.seq(seq);
        let n_tokens = sequence.tokens.len() - sequence.dropped;
        let n_kept = sequence.stream.map_or(n_tokens, |stream| n_tokens.min(stream.max_len));
        let n_pages = self.cache.n_outstanding(seq, n_kept) + sequence.n_roll_pages();
        n_pages.saturating_sub(sequence.n_loading)
    }

    /// Whether a running sequence holds everything that was computed for it.
    pub(crate) fn keeps_all(&self, seq: SeqId) -> bool {
        self.seq(seq).dropped == 0 && self.config.window.is_none()
    }
}

impl Sequence {
    /// Pages beyond its table that it needs for the tokens it has: for copies of the sinks, and for
    /// a token whose place a page still takes that others hold.
    pub(crate) fn n_roll_pages(&self) -> u32 {
        let Some(stream) = self.stream else { return 0 };
        if self.tokens.len() - self.dropped <= stream.max_len {
            return 0;
        }
        if self.dropped == 0 { stream.n_sinks + 1 } else { 1 }
    }

    /// The most of its tokens that other sequences' pages can serve for.
    pub(crate) fn n_sharable(&self) -> usize {
        self.stream
            .map_or(usize::MAX, |stream| stream.max_len as usize)
            .min(self.tokens.len() as usize)
    }
}
