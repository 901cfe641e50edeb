//! What a forward pass needs of a device.

use nuthatch_backend::{BatchLayout, DeviceError, Draw};
use nuthatch_types::{PageCopy, PageShift, Slot};

use crate::{Arrivals, Pages, TopKStats};

/// A model with its KV arena and tables: what a forward pass needs of a device.
pub trait Forward: Pages {
    /// Tokens of the vocabulary.
    fn vocab(&self) -> u32;
    /// A sequence whose first `n_prompt` tokens are its prompt takes the table `row`.
    fn begin(&mut self, row: u32, n_prompt: u32) {
        let _ = (row, n_prompt);
    }
    /// Writes `slots` to the table `row`, from entry `start` on.
    fn write_table(&mut self, row: u32, start: u32, slots: &[Slot]) -> Result<(), DeviceError>;
    /// Copies whole pages inside a tier and between tiers, in order, and waits for the end.
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), DeviceError>;
    /// Writes whole pages from others inside the arena with their keys at other positions, in order.
    fn shift_pages(&mut self, shifts: &[PageShift]) -> Result<(), DeviceError>;
    /// Computes the batch, and writes the logits of `layout.output_rows` to `logits`, which is
    /// `[n_outputs, V]`.
    fn forward(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError>;
    /// The same while keys and values of earlier tokens still come, layer by layer; only where
    /// [`Pages::page_image`] has layers. False if they do not come: then nothing was computed.
    fn forward_awaiting(
        &mut self,
        layout: &BatchLayout,
        logits: &mut [f32],
        arrivals: &mut dyn Arrivals,
    ) -> Result<bool, DeviceError> {
        let _ = (layout, logits, arrivals);
        Err(DeviceError::Fault("pages do not come layer by layer here".to_owned()))
    }
    /// What top-k attention did so far, if there is such.
    fn topk(&self) -> Option<TopKStats> {
        None
    }
    /// Floats of a hidden state.
    fn hidden_len(&self) -> usize;
    /// The hidden states of the first output rows of the last forward pass, after the last norm:
    /// as many as fit `hidden`, which is `[rows, hidden_len]`.
    fn hidden(&mut self, hidden: &mut [f32]) -> Result<(), DeviceError>;
    /// Looks back on the last forward pass: `layout` is its own but for `output_rows`, of which there
    /// are no more than a pass may have. Afterwards [`Forward::hidden`] is about those. Writes their
    /// logits to `logits`, which is `[n_outputs, V]`, or empty if nobody wants them.
    fn look_back(&mut self, layout: &BatchLayout, logits: &mut [f32]) -> Result<(), DeviceError>;
    /// Whether the device chooses tokens: whether there is a [`Forward::queue`].
    fn draws(&self) -> bool {
        false
    }
    /// Whether a batch may be queued before the tokens of the one before it are known.
    fn runs_ahead(&self) -> bool {
        false
    }
    /// Queues the batch, and the choice of a token for each of `layout.output_rows`. If it `follows`,
    /// its rows are the output rows of the batch queued before, and its tokens those that are chosen
    /// there: `layout.tokens` says nothing.
    fn queue(
        &mut self,
        layout: &BatchLayout,
        draws: &[Draw],
        follows: bool,
    ) -> Result<(), DeviceError> {
        let _ = (layout, draws, follows);
        Err(DeviceError::Fault("this device does not choose tokens".to_owned()))
    }
    /// Waits for the first batch that was queued and not asked for, and gives its tokens; none where
    /// logits are no numbers to choose by.
    fn drawn(&mut self, tokens: &mut [Option<u32>]) -> Result<(), DeviceError> {
        let _ = tokens;
        Err(DeviceError::Fault("this device does not choose tokens".to_owned()))
    }
}
