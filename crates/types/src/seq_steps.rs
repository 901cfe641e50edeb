//! What the sequences of a batch do in one step.

use crate::{SeqId, Slot, TokenId};

/// What each sequence does in one step, in order.
///
/// All tokens lie in one row and all slots in another, so that thousands of sequences are three
/// pieces of memory and a decoded token is a few plain stores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeqSteps {
    rows: Vec<Row>,
    tokens: Vec<TokenId>,
    slots: Vec<Slot>,
}

/// What one sequence does in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqStep<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Place of the first of `tokens` in the table; everything before it is in the cache.
    pub start: u32,
    /// Tokens that were dropped from the table. The first of `tokens` is at `start + shift` of the
    /// sequence, and is rotated by that.
    pub shift: u32,
    /// The tokens to compute, at least one.
    pub tokens: &'a [TokenId],
    /// How the sequence's table of slots changes before the pass.
    pub table: TableChange<'a>,
    /// Whether a token is sampled after the last of `tokens`.
    pub sample: bool,
}

/// A change of a sequence's table: the first `keep` entries stay, the rest is replaced by `push`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableChange<'a> {
    /// Entries that stay.
    pub keep: u32,
    /// Slots that follow them. An entry before the window is any slot: nobody reads it.
    pub push: &'a [Slot],
}

/// A [`SeqStep`] without its tokens and slots, which end at these places and begin where those of the
/// row before end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    seq: SeqId,
    start: u32,
    shift: u32,
    keep: u32,
    tokens_end: u32,
    slots_end: u32,
    sample: bool,
}

impl SeqSteps {
    /// Room for one token of each of `n_seqs` sequences.
    pub fn with_capacity(n_seqs: usize) -> Self {
        let (rows, tokens) = (Vec::with_capacity(n_seqs), Vec::with_capacity(n_seqs));
        SeqSteps { rows, tokens, slots: Vec::new() }
    }

    /// Sequences.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether no sequence does anything.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Tokens of all sequences.
    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Adds what one more sequence does.
    // Inlined for the usual case of one token and no slot.
    #[inline]
    pub fn push(&mut self, step: SeqStep<'_>) {
        let SeqStep { seq, start, shift, tokens, table, sample } = step;
        self.tokens.extend_from_slice(tokens);
        self.slots.extend_from_slice(table.push);
        let (tokens_end, slots_end) = (self.tokens.len() as u32, self.slots.len() as u32);
        let keep = table.keep;
        self.rows.push(Row { seq, start, shift, keep, tokens_end, slots_end, sample });
    }

    /// Adds slots to the table of the sequence that was added last.
    pub fn push_slots(&mut self, slots: impl Iterator<Item = Slot>) {
        self.slots.extend(slots);
        let last = self.rows.last_mut().expect("a sequence was added");
        last.slots_end = self.slots.len() as u32;
    }

    /// What the `i`-th sequence does.
    pub fn get(&self, i: usize) -> SeqStep<'_> {
        let row = self.rows[i];
        let (tokens_start, slots_start) = match i {
            0 => (0, 0),
            _ => (self.rows[i - 1].tokens_end, self.rows[i - 1].slots_end),
        };
        SeqStep {
            seq: row.seq,
            start: row.start,
            shift: row.shift,
            tokens: &self.tokens[tokens_start as usize..row.tokens_end as usize],
            table: TableChange {
                keep: row.keep,
                push: &self.slots[slots_start as usize..row.slots_end as usize],
            },
            sample: row.sample,
        }
    }

    /// What each sequence does.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = SeqStep<'_>> {
        (0..self.len()).map(|i| self.get(i))
    }

    /// What each sequence does that asks for a sample.
    pub fn sampled(&self) -> impl Iterator<Item = SeqStep<'_>> {
        self.iter().filter(|step| step.sample)
    }
}

impl<'a> FromIterator<SeqStep<'a>> for SeqSteps {
    fn from_iter<I: IntoIterator<Item = SeqStep<'a>>>(steps: I) -> Self {
        let mut all = SeqSteps::default();
        steps.into_iter().for_each(|step| all.push(step));
        all
    }
}

impl<const N: usize> From<[SeqStep<'_>; N]> for SeqSteps {
    fn from(steps: [SeqStep<'_>; N]) -> Self {
        steps.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_pushed_is_there() {
        let step = |seq, tokens, push| SeqStep {
            seq: SeqId(seq),
            start: 3,
            shift: 1,
            tokens,
            table: TableChange { keep: 2, push },
            sample: seq != 8,
        };
        let (tokens, slots) = ([5, 6, 7].map(TokenId), [1, 2].map(Slot));
        let steps = [
            step(9, &tokens[..1], &[]),
            step(8, &tokens, &slots),
            step(7, &tokens[1..], &slots[1..]),
        ];
        let mut all = SeqSteps::from(steps);
        assert!(all.iter().eq(steps));
        assert_eq!((all.len(), all.n_tokens(), all.get(1)), (3, 6, steps[1]));
        assert!(all.sampled().map(|step| step.seq.0).eq([9, 7]));
        all.push_slots([4, 5].map(Slot).into_iter());
        assert_eq!(all.get(2).table.push, [2, 4, 5].map(Slot));
        assert_eq!(all.get(1), steps[1]);
    }
}
