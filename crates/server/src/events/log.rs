//! The last batches, for those who missed some.

use std::collections::VecDeque;

use super::Batch;

/// Bytes of all batches together; beyond them the oldest go, however few they are.
const BYTES_MAX: usize = 256 << 20;

/// The last batches, in order.
#[derive(Debug)]
pub(crate) struct Log {
    batches: VecDeque<Batch>,
    n_max: usize,
    n_bytes: usize,
}

impl Log {
    pub(crate) fn new(n_max: usize) -> Self {
        Log { batches: VecDeque::new(), n_max, n_bytes: 0 }
    }

    pub(crate) fn push(&mut self, batch: Batch) {
        self.n_bytes += batch.payload.len();
        self.batches.push_back(batch);
        while self.batches.len() > self.n_max || self.n_bytes > BYTES_MAX {
            let Some(oldest) = self.batches.pop_front() else { return };
            self.n_bytes -= oldest.payload.len();
        }
    }

    /// What is kept from a number on.
    pub(crate) fn since(&self, seq: u64) -> Vec<Batch> {
        let start = self.batches.partition_point(|batch| batch.seq < seq);
        self.batches.range(start..).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn the_last_ones_are_kept() {
        let mut log = Log::new(3);
        // Number 4 was dropped before it came here.
        for seq in [0, 1, 2, 3, 5] {
            log.push(Batch { seq, payload: Bytes::from_static(b"x") });
        }
        let since = |seq| log.since(seq).iter().map(|batch| batch.seq).collect::<Vec<_>>();
        assert_eq!(since(0), [2, 3, 5]);
        assert_eq!(since(4), [5]);
        assert_eq!(since(6), [0; 0]);
    }
}
