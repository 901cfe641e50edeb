//! What the device has decided, for those who ask.

use nuthatch_backend::topk::Found;
use nuthatch_backend::{Decided, DecidedPlaces, DeviceError};

use crate::Cuda;
use crate::kv::CudaKv;
use crate::launch::sparse::HeadState;

use super::decide::decider_of;

impl Cuda {
    /// What was last decided about a table's sequence.
    pub(crate) fn decisions(
        &self,
        kv: &CudaKv,
        table_row: u32,
    ) -> Result<Vec<Decided>, DeviceError> {
        let decider = decider_of(kv);
        decider.late.as_ref().map_or(Ok(()), |late| late.join(&self.device))?;
        let mut states = vec![HeadState::empty(0, 0); decider.n_all];
        let start = table_row as usize * decider.room.states;
        self.device.download_from(&decider.states, start, &mut states)?;
        Ok(states.iter().map(decided).collect())
    }

    /// The places of one head of a table's sequence.
    pub(crate) fn places_of(
        &self,
        kv: &CudaKv,
        (table_row, head): (u32, usize),
    ) -> Result<DecidedPlaces, DeviceError> {
        let decider = decider_of(kv);
        decider.late.as_ref().map_or(Ok(()), |late| late.join(&self.device))?;
        let mut state = [HeadState::empty(0, 0)];
        let start = table_row as usize * decider.room.states + head * size_of::<HeadState>();
        self.device.download_from(&decider.states, start, &mut state)?;
        let mut places = DecidedPlaces::default();
        let mut marks = vec![[0u32; 2]; decider.room.stride];
        let start = table_row as usize * decider.room.marks + head * size_of_val(&marks[..]);
        self.device.download_from(&decider.marks, start, &mut marks)?;
        for (place, [stamp, _]) in (0..).zip(marks).filter(|(_, [stamp, _])| *stamp > 0) {
            places.members.push(place);
            if stamp == state[0].now {
                places.chosen.push(place);
            }
        }
        Ok(places)
    }
}

fn decided(state: &HeadState) -> Decided {
    let found = match state.lookup {
        0 => Found::Nothing,
        1 => Found::First,
        2 => Found::Hit,
        3 => Found::Turned,
        4 => Found::TurnedFar,
        5 => Found::Aged,
        7 => Found::Late,
        _ => Found::Always,
    };
    let seen = if found == Found::Late {
        (state.seen_members, state.seen_cut)
    } else {
        (state.n_members, state.cut)
    };
    Decided {
        found,
        similarity: state.similarity,
        n_chosen: state.n_chosen,
        n_moved: state.n_moved,
        n_members: state.n_members,
        n_first: state.n_first,
        tail: state.cut,
        seen,
    }
}
