//! Memory that questions and picks of one layer need, kept for the next.

use nuthatch_backend::DeviceError;

use crate::device::{Device, Memory};
use crate::launch::sparse_score::{PIECE, Question};

/// Memory that grows with what is asked for.
#[derive(Default)]
pub(super) struct Scratch {
    asks: Option<Memory>,
    raw: Option<Memory>,
    scores: Option<Memory>,
    score_sums: Option<Memory>,
    rows: Option<Memory>,
    states: Option<Memory>,
    moves: Option<Memory>,
    pages: Option<Memory>,
    partials: Option<Memory>,
    sums: Option<Memory>,
    tasks: Option<Memory>,
}

/// Where questions and their scores are.
pub(super) struct ScoreMemory<'a> {
    pub(super) asks: &'a Memory,
    pub(super) raw: &'a Memory,
    pub(super) scores: &'a Memory,
    pub(super) sums: &'a Memory,
}

/// Bytes of what picks need.
#[derive(Default)]
pub(super) struct PickedSizes {
    pub(super) rows: usize,
    pub(super) states: usize,
    pub(super) moves: usize,
    pub(super) pages: usize,
    pub(super) partials: usize,
    pub(super) sums: usize,
    pub(super) tasks: usize,
}

/// Where picks are, the rows that they name, and partial results.
pub(super) struct PickedMemory<'a> {
    pub(super) rows: &'a Memory,
    pub(super) states: &'a Memory,
    pub(super) moves: &'a Memory,
    pub(super) pages: &'a Memory,
    pub(super) partials: &'a Memory,
    pub(super) sums: &'a Memory,
    pub(super) tasks: &'a Memory,
}

impl Scratch {
    /// Room for questions about `stride` places each.
    pub(super) fn scores(
        &mut self,
        device: &Device,
        n: usize,
        group: usize,
        stride: usize,
    ) -> Result<ScoreMemory<'_>, DeviceError> {
        Ok(ScoreMemory {
            asks: grown(device, &mut self.asks, n * size_of::<Question>())?,
            raw: grown(device, &mut self.raw, n * group * stride * 4)?,
            scores: grown(device, &mut self.scores, n * stride * 4)?,
            sums: grown(device, &mut self.score_sums, n * stride / PIECE * group * 8)?,
        })
    }

    /// Room for picks.
    pub(super) fn picked(
        &mut self,
        device: &Device,
        sizes: &PickedSizes,
    ) -> Result<PickedMemory<'_>, DeviceError> {
        Ok(PickedMemory {
            rows: grown(device, &mut self.rows, sizes.rows)?,
            states: grown(device, &mut self.states, sizes.states)?,
            moves: grown(device, &mut self.moves, sizes.moves)?,
            pages: grown(device, &mut self.pages, sizes.pages)?,
            partials: grown(device, &mut self.partials, sizes.partials)?,
            sums: grown(device, &mut self.sums, sizes.sums)?,
            tasks: grown(device, &mut self.tasks, sizes.tasks)?,
        })
    }
}

/// Memory of at least `bytes`; what was in it is lost if it grows.
fn grown<'a>(
    device: &Device,
    memory: &'a mut Option<Memory>,
    bytes: usize,
) -> Result<&'a Memory, DeviceError> {
    if memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
        // What is freed first can be had again.
        *memory = None;
        *memory = Some(device.alloc(bytes + bytes / 4, "top-k attention")?);
    }
    Ok(memory.as_ref().expect("it is there now"))
}
