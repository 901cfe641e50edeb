//! Selections that are made late: what a head has serves once more, and the next selection is made, and its
//! rows are brought, beside the layers that follow.

use std::sync::PoisonError;

use nuthatch_backend::{Deciding, DeviceError};

use crate::Cuda;
use crate::launch::count;
use crate::plan::CudaPlan;

use super::SparseLayer;
use super::decide::{Decider, Place, Turn};

impl Decider {
    /// Whether a row, now of so many tokens, is served by what its heads have, whatever they ask.
    pub(super) fn serves(&self, row: &Deciding, kv_len: u32) -> bool {
        let rules = &self.rules[row.rules as usize];
        let mut seats = self.seats.lock().unwrap_or_else(PoisonError::into_inner);
        seats.choose(row.table_row as usize, rules.has_choice_at(kv_len)) && rules.serves_all
    }

    /// Whether some row of the batch may choose late.
    pub(super) fn is_soft(&self, plan: &CudaPlan) -> bool {
        plan.deciding.iter().any(|&(rules, _)| self.rules[rules].rules.is_soft())
    }

    /// Where queries of a layer are kept until their selection is made late, and floats between rows.
    pub(super) fn asked(&self, at: &SparseLayer<'_>, idx: usize) -> (u64, u32) {
        let head = self.group * at.kv.page.head_dim as usize;
        let start = idx * at.n_kv_heads() * head * 4;
        (self.asked.address() + start as u64, count(self.n_all * head))
    }
}

impl Cuda {
    /// Makes the selections that attention did not wait for, and brings their rows, while other layers are
    /// computed. Nothing of this layer is read before the next pass.
    pub(super) fn decide_late(
        &self,
        at: &SparseLayer<'_>,
        (decider, idx): (&Decider, usize),
        turn: Turn,
    ) -> Result<(), DeviceError> {
        let is_soft = decider.rules[turn.rules].rules.is_soft();
        let Some(late) = decider.late.as_ref().filter(|_| is_soft) else { return Ok(()) };
        let at = &SparseLayer { is_late: true, ..*at };
        let (set, choosing) = late.fork(&self.device)?;
        let place = Place { set, branch: Some(choosing), is_late: true, is_sole: false, done: 0 };
        self.decide_turn(at, (decider, idx), turn, place)?;
        let bringing = late.pass_on(&self.device)?;
        let place = Place { branch: Some(bringing), ..place };
        self.bring_turn(at, (decider, idx), turn, place)?;
        late.end(&self.device)
    }
}
