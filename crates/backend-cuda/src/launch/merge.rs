//! `attend_merge.cu`: what chunks gave becomes a row's attention.

use nuthatch_backend::DeviceError;

use super::attend::Attention;
use super::attend_shape::Cuts;
use super::{Address, count, params};
use crate::buf::CudaBuf;
use crate::device::Kernel;

/// Threads of a block.
const THREADS: u32 = 128;

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
        cuts: Cuts,
    }
}

/// A block of `merge`: columns of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MergeShape {
    pub(crate) name: &'static str,
    columns: u32,
    /// Whether it has room for weights in registers: that of two blocks.
    owns: bool,
}

impl MergeShape {
    /// From that for few heads, which are cut to fill the device, to that for many. Blocks find room
    /// beside those of the splits, so that they are there when these end.
    pub(crate) const ALL: [Self; 4] = [
        MergeShape { name: "merge_few", columns: 32, owns: true },
        MergeShape { name: "merge_32", columns: 32, owns: false },
        MergeShape { name: "merge_64", columns: 64, owns: false },
        MergeShape { name: "merge_128", columns: 128, owns: false },
    ];

    /// Which of them it is, by the blocks that each would be, where there is room for so many beside the
    /// splits: the first of which all find it; for more rows than that, the last one.
    fn choose(n_blocks: [u32; 4], room: u32) -> usize {
        let fits = |(n, of): (u32, Self)| n * if of.owns { 2 } else { 1 } <= room;
        n_blocks.into_iter().zip(Self::ALL).position(fits).unwrap_or(3)
    }

    /// The kernel, for the compiler.
    pub(crate) fn entry(self) -> String {
        format!("MERGE({}, {}, {})", self.name, self.columns, self.owns)
    }
}

impl Attention<'_> {
    /// Brings the splits of each row together; there is room for `n_beside` blocks on a multiprocessor.
    pub(super) fn merge(
        &self,
        (merges, n_beside): (&[Kernel; 4], u32),
        (splits, n_splits): (Address, u32),
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let width = count(self.kv.page.width());
        let heads = MergeShape::ALL.map(|of| self.spec.n_heads * width.div_ceil(of.columns));
        let n_blocks = heads.map(|heads| n_splits * heads);
        let chosen = MergeShape::choose(n_blocks, n_beside * self.device.n_multiprocessors());
        let params = MergeParams {
            partials: self.plan.partials.address(),
            sums: self.plan.sums.address(),
            splits,
            out: out.floats.address(),
            rounded: out.rounded.address(),
            n_taken: self.plan.n_split_parts() + 4,
            n_kv_heads: self.kv.shape.n_kv_heads,
            group: self.group(),
            window: self.window(),
            cuts: self.plan.cuts(),
        };
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: splits are rows of the batch, asserted to fit out, and partial results that the
        // splits have written.
        unsafe {
            self.device.launch(&merges[chosen], (n_splits, heads[chosen]), THREADS, &params)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_find_room_beside_splits_as_long_as_there_is_some() {
        let chosen = |n_rows_heads: u32, room| {
            let n_blocks = MergeShape::ALL.map(|of| n_rows_heads * 128 / of.columns);
            MergeShape::ALL[MergeShape::choose(n_blocks, room)].name
        };
        assert_eq!(chosen(32, 264), "merge_few");
        assert_eq!(chosen(40, 264), "merge_32");
        assert_eq!(chosen(32, 132), "merge_32", "where there is room for one block");
        assert_eq!(chosen(128, 264), "merge_64");
        assert_eq!(chosen(256, 264), "merge_128");
        assert_eq!(chosen(1024, 264), "merge_128");
    }
}
