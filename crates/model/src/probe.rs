//! Measuring a model's heads: sums over queries and keys, and what happens when a head sees less.

use nuthatch_attention::topk::Witness;
use nuthatch_backend::{Backend, BatchLayout, DeviceError, Pick};
use nuthatch_store::KvStore;

use crate::Model;

/// What a head that is tried out still sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restriction {
    /// First tokens.
    pub sinks: u32,
    /// Last tokens.
    pub recent: u32,
}

impl<B: Backend> Model<B> {
    /// Computes the next tokens of a text, the only sequence of the batch, and shows their queries and
    /// keys to a witness. The store keeps digests, perhaps none.
    pub fn calibrate(
        &mut self,
        store: &mut KvStore<B>,
        tables: &B::Tables,
        layout: &BatchLayout,
        witness: &mut dyn Witness,
    ) -> Result<(), DeviceError> {
        let n_heads = self.config().n_kv_heads;
        let (q_width, kv_width) = (self.config().q_width(), self.config().kv_width());
        let (n, kv_len) = (layout.n_rows(), layout.kv_len[0]);
        let start = kv_len as usize - n;
        self.begin(tables, layout)?;
        for idx in 0..self.weights.layers.len() {
            self.project(idx, store, layout)?;
            let dense = &self.weights.layers[idx].attention;
            let (layer, owns_kv) = (dense.layer, dense.owns_kv);
            let width = q_width + if owns_kv { 2 * kv_width } else { 0 };
            let mut rows = vec![0.0; n * width];
            self.backend().read(&self.acts.qkv, &mut rows)?;
            let queries: Vec<f32> =
                rows.chunks_exact(width).flat_map(|row| &row[..q_width]).copied().collect();
            witness.queries(idx, layer.0 as usize, &queries, start);
            for head in 0..if owns_kv { n_heads } else { 0 } {
                let of = (0, head, kv_len);
                let keys = self.backend().read_keys(&self.plan, layer, store.device(), of)?;
                let (_, keys) = keys.split_at(start * keys.len() / kv_len as usize);
                witness.keys(layer.0 as usize, head as usize, keys, start);
            }
            self.attend_exactly(idx, store)?;
            self.finish_layer(idx, layout)?;
        }
        Ok(())
    }

    /// Computes the only row of a sequence whose other tokens are in the store, once exactly and
    /// once for each query head of each layer with that head restricted, and returns how far the
    /// residual stream after the last layer moves, `[layer][H]`: the square of the distance as a
    /// share of the stream's length, less what a disturbance without meaning at the same place
    /// gives. Where weights meet rounded activations, that is most of what any change gives; so
    /// numbers below 0 are noise, and stay, for averages.
    ///
    /// Only layers from the restricted one on are computed again. In the end the row's own keys and
    /// values are those of the exact pass.
    pub fn probe(
        &mut self,
        store: &mut KvStore<B>,
        tables: &B::Tables,
        layout: &BatchLayout,
        restriction: Restriction,
    ) -> Result<Vec<f32>, DeviceError> {
        assert_eq!(layout.n_rows(), 1, "one row of one sequence");
        let (n_layers, d) = (self.weights.layers.len(), self.config().hidden as usize);
        let n_heads = self.config().n_heads as usize;
        self.begin(tables, layout)?;
        let mut streams = Vec::with_capacity(n_layers + 1);
        for idx in 0..n_layers {
            streams.push(self.stream(d)?);
            self.project(idx, store, layout)?;
            self.attend_exactly(idx, store)?;
            self.finish_layer(idx, layout)?;
        }
        let exact = self.stream(d)?;
        let mut moved = vec![0.0; n_layers * n_heads];
        for (first, stream) in streams.iter().enumerate() {
            let mut changed = |model: &mut Self, head: Option<usize>| {
                model.set_stream(stream)?;
                for idx in first..n_layers {
                    model.project(idx, store, layout)?;
                    model.attend_exactly(idx, store)?;
                    match head {
                        Some(head) if idx == first => {
                            model.restrict(idx, store, layout, (head, restriction))?;
                        }
                        None if idx == first => model.disturb()?,
                        _ => {}
                    }
                    model.finish_layer(idx, layout)?;
                }
                Ok(distance(&model.stream(d)?, &exact))
            };
            let noise = changed(self, None)?;
            for head in 0..n_heads {
                moved[first * n_heads + head] = changed(self, Some(head))? - noise;
            }
        }
        // Later layers of the last pass wrote other keys and values.
        self.set_stream(&streams[0])?;
        for idx in 0..n_layers {
            self.project(idx, store, layout)?;
            self.attend_exactly(idx, store)?;
            self.finish_layer(idx, layout)?;
        }
        Ok(moved)
    }

    fn stream(&self, d: usize) -> Result<Vec<f32>, DeviceError> {
        let mut stream = vec![0.0; d];
        self.backend().read(&self.acts.x, &mut stream)?;
        Ok(stream)
    }

    fn set_stream(&mut self, stream: &[f32]) -> Result<(), DeviceError> {
        let backend = self.shared_backend();
        backend.write(&mut self.acts.x, stream)
    }

    fn attend_exactly(&mut self, idx: usize, store: &KvStore<B>) -> Result<(), DeviceError> {
        let backend = self.shared_backend();
        let dense = &self.weights.layers[idx].attention;
        let (spec, kv, acts) = (dense.spec(), store.device(), &mut self.acts);
        backend.attend(&self.plan, dense.layer, &spec, &acts.qkv, kv, &mut acts.attended)
    }

    /// Changes the heads' outputs by a thousandth, up and down in turn.
    fn disturb(&mut self) -> Result<(), DeviceError> {
        let backend = self.shared_backend();
        let mut outputs = vec![0.0; self.config().q_width()];
        backend.read(&self.acts.attended, &mut outputs)?;
        for pair in outputs.chunks_mut(2) {
            pair.iter_mut().zip([1.001, 0.999]).for_each(|(x, share)| *x *= share);
        }
        backend.write(&mut self.acts.attended, &outputs)
    }

    /// Replaces one head's output by what it is when the head sees only sinks and recent tokens.
    fn restrict(
        &mut self,
        idx: usize,
        store: &KvStore<B>,
        layout: &BatchLayout,
        (head, Restriction { sinks, recent }): (usize, Restriction),
    ) -> Result<(), DeviceError> {
        let backend = self.shared_backend();
        let (q_width, d) = (self.config().q_width(), self.config().head_dim as usize);
        let n_kv_heads = self.config().n_kv_heads;
        let dense = &self.weights.layers[idx].attention;
        let acts = &mut self.acts;
        let mut exact = vec![0.0; q_width];
        backend.read(&acts.attended, &mut exact)?;
        let kv_len = layout.kv_len[0];
        let tail = kv_len.saturating_sub(recent);
        let pick =
            |head| Pick { seq: 0, head, n_first: sinks.min(tail), places: &[], tail, rows: &[] };
        let picks: Vec<Pick<'_>> = (0..n_kv_heads).map(pick).collect();
        let (spec, kv) = (dense.spec(), store.device());
        let (plan, layer) = (&self.plan, dense.layer);
        backend.attend_picks(plan, layer, &spec, &acts.qkv, kv, &picks, &mut acts.attended)?;
        let mut restricted = vec![0.0; q_width];
        backend.read(&acts.attended, &mut restricted)?;
        exact[head * d..(head + 1) * d].copy_from_slice(&restricted[head * d..(head + 1) * d]);
        backend.write(&mut acts.attended, &exact)
    }
}

/// The square of the distance, as a share of the square of the length.
fn distance(a: &[f32], exact: &[f32]) -> f32 {
    let off: f32 = a.iter().zip(exact).map(|(a, b)| (a - b) * (a - b)).sum();
    let length: f32 = exact.iter().map(|x| x * x).sum();
    off / length.max(f32::MIN_POSITIVE)
}
