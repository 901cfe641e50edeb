//! Choosing on the threads that compute.

use nuthatch_backend::{Ask, AttnSpec, Best, Chooser, Choosing, DeviceError, WorkingSet};
use nuthatch_types::LayerIdx;

use crate::kv::CpuKv;
use crate::mem::{Region, fetch_line};
use crate::plan::CpuPlan;
use crate::{Cpu, topk};

/// Places that are scored while one row is attended, about: measured on two cores of a Sapphire Rapids with heads
/// of width 64 and 32 channels of four bits (eval/results/2026-11-17-choose4-2core.json).
const ROW_PLACES: usize = 10;

impl Chooser for Cpu {
    fn cosine(&self, a: &[f32], b: &[f32]) -> f32 {
        topk::cosine(self.isa, a, b)
    }

    fn select(&self, scores: &[u32], best: Best, chosen: &mut Vec<u32>) {
        topk::select(self.isa, scores, best, chosen);
    }

    fn fetch<T>(&self, values: &[T]) {
        // What a head remembers is far from the processor, and too short for it to see that it is read from end to
        // end.
        for line in (0..size_of_val(values)).step_by(64) {
            fetch_line::<true>(values.as_ptr().cast::<u8>().wrapping_add(line));
        }
    }

    fn admit(&self, set: &mut WorkingSet, wanted: &[u32], capacity: usize) -> usize {
        topk::admit(self.isa, set, wanted, capacity)
    }

    fn each<T: Send>(&self, items: &mut [T], body: impl Fn(&mut T) + Sync) {
        self.pool.each(items, body);
    }

    fn n_threads(&self) -> usize {
        self.threads()
    }

    fn scores_beside(&self, asks: &[Ask], n_rows: usize) -> bool {
        let (n_threads, n) = (self.threads(), asks.iter().map(|ask| ask.n as usize));
        let (all, most) = (n.clone().sum::<usize>(), n.max().unwrap_or(0));
        // No thread should be at its heads for longer than all threads are at everything.
        asks.len().div_ceil(n_threads) * most * n_threads <= all + ROW_PLACES * n_rows
    }

    fn attend_choosing<C: Choosing>(
        &self,
        plan: &CpuPlan,
        layer: LayerIdx,
        spec: &AttnSpec<'_, Self>,
        qkv: &Region<f32>,
        kv: &CpuKv,
        (choosing, heads): (&C, &mut [C::Head]),
        out: &mut Region<f32>,
    ) -> Result<(), DeviceError> {
        if let Some(worker) = &kv.worker {
            worker.finish(kv, layer.0 as usize)?;
        }
        self.attention(plan, layer, spec, qkv, kv).run(&self.pool, choosing, heads, out);
        kv.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn every_instruction_set_has_the_same_cosines() {
        let mut state = 3u32;
        let mut next = |n: usize| {
            let mut x = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            (0..n).map(|_| x()).collect::<Vec<f32>>()
        };
        for n in [1, 31, 32, 64, 80, 128, 257] {
            let (a, b) = (next(n), next(n));
            let expected = nuthatch_backend::topk::cosine(&a, &b).to_bits();
            for isa in Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()) {
                assert_eq!(topk::cosine(isa, &a, &b).to_bits(), expected, "{isa}, {n}");
            }
        }
    }
}
