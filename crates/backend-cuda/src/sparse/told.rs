//! What the device has decided, for those who ask.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaEvent;
use nuthatch_backend::topk::Found;
use nuthatch_backend::{Decided, DecidedPlaces, DeviceError};

use crate::Cuda;
use crate::device::{Device, Memory};
use crate::host_memory::HostMemory;
use crate::kv::CudaKv;
use crate::launch::sparse::HeadState;

use super::decide::{WHAT, decider_of};

/// Passes of which is told: the last, and one that was queued behind it.
const N_TOLD: usize = 2;

/// What is remembered of heads, and copies of it on their way to the host, so that the next pass may be queued
/// before somebody asks what this one has decided.
pub(crate) struct Told {
    /// `[table][layer][G]`
    pub(super) states: Memory,
    /// Bytes of a table.
    row: usize,
    passes: Mutex<Passes>,
}

struct Passes {
    /// `[N_TOLD][row][layer][G]`, of passes in turn.
    copies: HostMemory,
    /// Bytes of a pass.
    stride: usize,
    /// How many rows were decided about in passes that nobody has asked for, and the moment when the copy is there.
    unasked: VecDeque<(usize, CudaEvent)>,
    n: usize,
}

impl Told {
    pub(super) fn new(
        device: &Device,
        (n_tables, n_rows): (usize, usize),
        row: usize,
    ) -> Result<Self, DeviceError> {
        let stride = n_rows * row;
        let copies = HostMemory::new(device, N_TOLD * stride)?;
        let passes = Passes { copies, stride, unasked: VecDeque::new(), n: 0 };
        let states = device.alloc(n_tables * row, WHAT)?;
        Ok(Told { states, row, passes: Mutex::new(passes) })
    }

    fn passes(&self) -> MutexGuard<'_, Passes> {
        self.passes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pass is queued that has decided about the sequences of these tables.
    pub(crate) fn end_pass(&self, device: &Device, tables: &[u32]) -> Result<(), DeviceError> {
        let Passes { copies, stride, unasked, n } = &mut *self.passes();
        let mut start = *n % N_TOLD * *stride;
        for neighbours in tables.chunk_by(|a, b| a + 1 == *b) {
            let bytes = neighbours.len() * self.row;
            copies.fetch(
                device,
                (&self.states, neighbours[0] as usize * self.row),
                start,
                bytes,
            )?;
            start += bytes;
        }
        let event = device.check(device.main_stream().record_event(None))?;
        if unasked.len() == N_TOLD {
            unasked.pop_front();
        }
        unasked.push_back((tables.len(), event));
        *n += 1;
        Ok(())
    }

    /// What the first pass has decided that nobody has asked for.
    fn first(&self, device: &Device) -> Result<Vec<Decided>, DeviceError> {
        let Passes { copies, stride, unasked, n } = &mut *self.passes();
        let place = *n - unasked.len();
        let (n_rows, event) = unasked.pop_front().expect("a pass that has decided");
        device.enter()?;
        device.check(event.synchronize())?;
        let mut states = vec![HeadState::empty(0, 0); n_rows * self.row / size_of::<HeadState>()];
        copies.read(place % N_TOLD * *stride, &mut states);
        Ok(states.iter().map(decided).collect())
    }
}

impl Cuda {
    /// What was decided about the rows of the first pass that nobody has asked for.
    pub(crate) fn told_first(&self, kv: &CudaKv) -> Result<Vec<Decided>, DeviceError> {
        decider_of(kv).told.first(&self.device)
    }

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
        self.device.download_from(&decider.told.states, start, &mut states)?;
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
        self.device.download_from(&decider.told.states, start, &mut state)?;
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
