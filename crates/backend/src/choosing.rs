//! Heads that attend while others choose what they attend to.

use std::marker::PhantomData;

use nuthatch_types::LayerIdx;

use crate::{Ask, AttnSpec, Backend, Best, DeviceError, Pick, WorkingSet, topk};

/// What a host that chooses for a device leaves to it. Devices that are no part of the host need nothing
/// of their own here.
pub trait Chooser: Sized {
    /// See [`topk::cosine`], which this does in whatever way is fast here.
    fn cosine(&self, a: &[f32], b: &[f32]) -> f32 {
        topk::cosine(a, b)
    }

    /// See [`topk::select`], likewise.
    fn select(&self, scores: &[u32], best: Best, chosen: &mut Vec<u32>) {
        topk::select(scores, best, chosen);
    }

    /// Lets values come nearer, which will be needed soon.
    fn fetch<T>(&self, _values: &[T]) {}

    /// See [`WorkingSet::admit`], likewise.
    fn admit(&self, set: &mut WorkingSet, wanted: &[u32], capacity: usize) -> usize {
        set.admit(wanted, capacity)
    }

    /// Threads that share what is to be done, the calling one included.
    fn n_threads(&self) -> usize {
        1
    }

    /// Calls `body` for each item, on several threads where the device computes on this machine's.
    fn each<T: Send>(&self, items: &mut [T], body: impl Fn(&mut T) + Sync) {
        items.iter_mut().for_each(body);
    }

    /// Whether heads that ask had better be scored one by one in [`Chooser::attend_choosing`] than all of
    /// them before it; `n_rows` are the rows that are attended in all.
    fn scores_beside(&self, _asks: &[Ask], _n_rows: usize) -> bool {
        false
    }

    /// As [`Backend::attend_picks`], of heads some of which have yet to choose, which they do beside the
    /// attention of the others if the device can.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    fn attend_choosing<C: Choosing>(
        &self,
        plan: &Self::Plan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &Self::Buf,
        kv: &Self::Kv,
        (choosing, heads): (&C, &mut [C::Head]),
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>
    where
        Self: Backend,
    {
        for head in heads.iter_mut().filter(|head| choosing.open(head).is_some()) {
            let mut outcome = Ok(());
            choosing.choose(head, |ask, best, chosen| {
                let (ask, mut scores) = (Ask { at: 0, ..*ask }, vec![0; ask.n as usize]);
                outcome = self.score(plan, layer, spec, qkv, kv, &[ask], &mut scores);
                self.select(&scores, best, chosen);
            });
            outcome?;
        }
        let picks: Vec<Pick<'_>> = heads.iter().map(|head| choosing.pick(head)).collect();
        self.attend_picks(plan, layer, spec, qkv, kv, &picks, out)
    }
}

/// How the heads of one layer's attention come to their picks.
pub trait Choosing: Sync {
    /// One key/value head of one sequence.
    type Head: Send + Sync;

    /// The most rows that a head may attend to if it has yet to choose them; nothing if its pick is known.
    fn open(&self, head: &Self::Head) -> Option<usize>;

    /// Chooses. Called once for each head that is open, on any thread; `select` answers the head's question
    /// and selects by that, if nobody has answered it yet.
    fn choose(&self, head: &mut Self::Head, select: impl FnOnce(&Ask, Best, &mut Vec<u32>));

    /// What a head sees; of one that is open, the sequence and the head are right before it has chosen.
    fn pick<'a>(&'a self, head: &'a Self::Head) -> Pick<'a>;
}

/// All picks are known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known<'p>(PhantomData<Pick<'p>>);

impl<'p> Choosing for Known<'p> {
    type Head = Pick<'p>;

    fn open(&self, _head: &Pick<'p>) -> Option<usize> {
        None
    }

    fn choose(&self, _head: &mut Pick<'p>, _select: impl FnOnce(&Ask, Best, &mut Vec<u32>)) {}

    fn pick<'a>(&'a self, head: &'a Pick<'p>) -> Pick<'a> {
        *head
    }
}
