//! `attend_merge.cu`: what chunks gave becomes a row's attention.

use super::attend::Cuts;
use super::{Address, params};

params! {
    /// Mirrors `MergeParams`.
    MergeParams {
        partials: Address,
        sums: Address,
        splits: Address,
        out: Address,
        rounded: Address,
        n_taken: Address,
        n_kv_heads: u32,
        group: u32,
        window: u32,
        padding: u32,
        cuts: Cuts,
    }
}

/// A block of `merge`: columns of a head, and batches of chunks on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MergeShape {
    pub(crate) name: &'static str,
    pub(crate) columns: u32,
    depth: usize,
}

impl MergeShape {
    /// Floats of a batch.
    pub(crate) const BATCH_FLOATS: usize = 2048;

    /// For few heads, which are cut to fill the device; and for many. A block finds room beside one of the
    /// splits, so that it is there when they end.
    pub(crate) const ALL: [Self; 2] = [
        MergeShape { name: "merge_few", columns: 32, depth: 3 },
        MergeShape { name: "merge_many", columns: 128, depth: 3 },
    ];

    /// The kernel, for the compiler.
    pub(crate) fn entry(self) -> String {
        let MergeShape { name, columns, depth } = self;
        format!("MERGE({name}, {columns}, {depth}, {})", self.shared_bytes())
    }

    /// Dynamic shared memory of a block.
    pub(crate) fn shared_bytes(self) -> usize {
        let chunks = Self::BATCH_FLOATS / self.columns as usize;
        self.depth * (Self::BATCH_FLOATS + 2 * chunks) * 4
    }
}
