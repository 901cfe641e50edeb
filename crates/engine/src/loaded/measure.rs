//! What a model's heads are like: sums over a text, some of its keys and queries, and what happens when
//! a head sees less.

use nuthatch_attention::topk::{Calibration, KeptRows, Witness};
use nuthatch_backend::{Backend, BatchLayout, DeviceError};
use nuthatch_model::{Restriction, topk_shape};
use nuthatch_types::{Slot, TokenId};

use super::LoadedModel;
use crate::Forward as _;

impl<B: Backend> LoadedModel<B> {
    /// Sums over the queries and keys of a text's beginning. Without a text, tokens from all over the
    /// vocabulary stand for one. Writes to the arena, which keeps rows from then on.
    pub fn calibrate(&mut self, text: &[TokenId]) -> Result<Calibration, DeviceError> {
        /// Enough for averages of a few digits.
        const TOKENS_MAX: u32 = 1024;
        let mut calibration = Calibration::new(topk_shape(self.model.config()));
        self.show(text, TOKENS_MAX, &mut calibration)?;
        Ok(calibration)
    }

    /// Some of the queries and keys of a text, as much of it as there is room for; writes to the arena
    /// as [`LoadedModel::calibrate`] does.
    pub fn keep_rows(&mut self, text: &[TokenId]) -> Result<KeptRows, DeviceError> {
        let mut kept = KeptRows::new(topk_shape(self.model.config()), text.len());
        self.show(text, u32::MAX, &mut kept)?;
        Ok(kept)
    }

    fn show(
        &mut self,
        text: &[TokenId],
        tokens_max: u32,
        witness: &mut dyn Witness,
    ) -> Result<(), DeviceError> {
        let page_len = self.store.shape().page_len;
        let room = self.store.slots().device.saturating_mul(page_len).min(self.max_context);
        let n = tokens_max.min(room);
        let vocab = self.vocab();
        let tokens: Vec<u32> = if text.is_empty() {
            (0..n).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect()
        } else {
            text.iter().take(n as usize).map(|token| token.0.min(vocab - 1)).collect()
        };
        self.backend.keep_digests(self.store.device_mut(), &[])?;
        let slots: Vec<Slot> = (0..(tokens.len() as u32).div_ceil(page_len)).map(Slot).collect();
        self.write_table(0, 0, &slots)?;
        let mut start = 0;
        // What comes out does not depend on how the text is cut.
        for chunk in tokens.chunks(self.max_rows as usize) {
            let end = start + chunk.len() as u32;
            let layout = BatchLayout {
                tokens: chunk.to_vec(),
                positions: (start..end).collect(),
                query_start: vec![0, end - start],
                kv_len: vec![end],
                table_row: vec![0],
                output_rows: Vec::new(),
            };
            self.model.calibrate(&mut self.store, &self.tables, &layout, witness)?;
            start = end;
        }
        Ok(())
    }

    /// How far the model's output at the only row of a batch moves when a query head is restricted,
    /// for each head: see [`nuthatch_model::Model::probe`].
    pub fn probe(
        &mut self,
        layout: &BatchLayout,
        restriction: Restriction,
    ) -> Result<Vec<f32>, DeviceError> {
        self.model.probe(&mut self.store, &self.tables, layout, restriction)
    }
}
