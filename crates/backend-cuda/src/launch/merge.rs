//! `attend_merge.cu`: what chunks gave becomes a row's attention.

use nuthatch_backend::DeviceError;

use super::attend::Attention;
use super::attend_shape::{AttendShape, Cuts, PacedShape};
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

    /// Chunks that are weighed at once; `MERGE_SPAN` of the kernel.
    const SPAN: usize = 256;

    /// From those for few heads, which are cut to fill the device, to that for many. A block finds room
    /// beside one of the splits, so that it is there when they end.
    pub(crate) const ALL: [Self; 4] = [
        MergeShape { name: "merge_16", columns: 16, depth: 3 },
        MergeShape { name: "merge_32", columns: 32, depth: 3 },
        MergeShape { name: "merge_64", columns: 64, depth: 3 },
        MergeShape { name: "merge_128", columns: 128, depth: 3 },
    ];

    /// Which of them it is, by the blocks that each would be, on so many multiprocessors: the first of
    /// which each finds room beside a split; for more rows than that, wider ones.
    pub(crate) fn choose(n_blocks: [u32; 4], n_multiprocessors: u32) -> usize {
        let fits = n_blocks.iter().position(|&n| n <= n_multiprocessors);
        fits.unwrap_or(if n_blocks[2] <= 4 * n_multiprocessors { 2 } else { 3 })
    }

    /// The kernel, for the compiler.
    pub(crate) fn entry(self) -> String {
        let MergeShape { name, columns, depth } = self;
        format!("MERGE({name}, {columns}, {depth}, {})", self.shared_bytes())
    }

    /// Dynamic shared memory of a block.
    pub(crate) fn shared_bytes(self) -> usize {
        (self.depth * Self::BATCH_FLOATS + 3 * Self::SPAN) * 4 + Self::SPAN / 8
    }
}

/// A block of `attend_turns.cu`: columns of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TurnShape {
    pub(crate) name: &'static str,
    columns: u32,
    /// Whether it has room for weights in registers: that of two blocks.
    owns: bool,
}

impl TurnShape {
    /// From that for few heads, which are cut to fill the device, to that for many.
    pub(crate) const ALL: [Self; 4] = [
        TurnShape { name: "turns_few", columns: 32, owns: true },
        TurnShape { name: "turns_32", columns: 32, owns: false },
        TurnShape { name: "turns_64", columns: 64, owns: false },
        TurnShape { name: "turns_128", columns: 128, owns: false },
    ];

    /// Which of them it is, by the blocks that each would be, of which two find room beside each block of the
    /// splits, or one that owns its weights: the first of which all find it; for more rows than that, the last.
    fn choose(n_blocks: [u32; 4], n_multiprocessors: u32) -> usize {
        let room = |of: Self| if of.owns { n_multiprocessors } else { 2 * n_multiprocessors };
        let fits = |(n, of): (u32, Self)| n <= room(of);
        n_blocks.into_iter().zip(Self::ALL).position(fits).unwrap_or(3)
    }

    /// The kernels, for the compiler.
    pub(crate) fn entries(attend: AttendShape) -> String {
        let entry = |TurnShape { name, columns, owns }| format!("TURN({name}, {columns}, {owns})");
        match PacedShape::is_for(attend) {
            true => Self::ALL.map(entry).join(" "),
            false => String::new(),
        }
    }
}

impl Attention<'_> {
    /// Brings the splits of each row together.
    pub(super) fn merge(
        &self,
        merges: &[Kernel; 4],
        (splits, n_splits): (Address, u32),
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let width = count(self.kv.page.width());
        let heads = MergeShape::ALL.map(|of| self.spec.n_heads * width.div_ceil(of.columns));
        let n_blocks = heads.map(|heads| n_splits * heads);
        let chosen = MergeShape::choose(n_blocks, self.cuda.device.n_multiprocessors());
        self.launch_merge(&merges[chosen], (splits, n_splits), heads[chosen], out)
    }

    /// The same after splits of `attend_paced`.
    pub(super) fn merge_turns(
        &self,
        merges: &[Kernel; 4],
        (splits, n_splits): (Address, u32),
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let width = count(self.kv.page.width());
        let heads = TurnShape::ALL.map(|of| self.spec.n_heads * width.div_ceil(of.columns));
        let n_blocks = heads.map(|heads| n_splits * heads);
        let chosen = TurnShape::choose(n_blocks, self.cuda.device.n_multiprocessors());
        self.launch_merge(&merges[chosen], (splits, n_splits), heads[chosen], out)
    }

    fn launch_merge(
        &self,
        kernel: &Kernel,
        (splits, n_splits): (Address, u32),
        n_heads: u32,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let params = MergeParams {
            partials: self.plan.partials.address(),
            sums: self.plan.sums.address(),
            splits,
            out: out.floats.address(),
            rounded: out.rounded.address(),
            n_taken: self.tasks.counts + 4,
            n_kv_heads: self.kv.shape.n_kv_heads,
            group: self.group(),
            window: self.window(),
            cuts: self.plan.cuts(),
        };
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: splits are rows of the batch, asserted to fit out, and partial results that the
        // splits have written.
        unsafe {
            self.cuda.device.launch(kernel, (n_splits, n_heads), THREADS, &params)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_find_room_beside_paced_splits_as_long_as_there_is_some() {
        let chosen = |n_rows_heads: u32| {
            let n_blocks = TurnShape::ALL.map(|of| n_rows_heads * 128 / of.columns);
            TurnShape::ALL[TurnShape::choose(n_blocks, 132)].name
        };
        assert_eq!(chosen(32), "turns_few");
        assert_eq!(chosen(40), "turns_32");
        assert_eq!(chosen(128), "turns_64");
        assert_eq!(chosen(256), "turns_128");
        assert_eq!(chosen(1024), "turns_128");
    }
}
