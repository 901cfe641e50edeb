//! Rows that the host keeps on the device, where it decides layer by layer: it says which come and where
//! they go, and attention copies those of a selection from there.
//!
//! ```text
//!   [layer][kv head][table][page]    pages of rows, as many for each head of each table
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

use nuthatch_backend::{Bring, DeviceError};
use nuthatch_types::LayerIdx;

use crate::Cuda;
use crate::device::{Device, Memory};
use crate::kv::{CudaKv, PAGE_LEN};
use crate::launch::count;
use crate::launch::sparse::{HeadState, SparsePages, SparseRow};
use crate::plan::CudaPlan;

const WHAT: &str = "rows that the host keeps near";

/// Rows of all heads of all tables.
pub(crate) struct ChosenRows {
    pages: Memory,
    /// Pages by their numbers: there is nothing to look up.
    tables: Memory,
    n_tables: usize,
    /// Of one head of one table.
    n_pages: usize,
    n_brought: AtomicU64,
}

/// Rows that come to one layer, as the kernels take them.
pub(crate) struct Brought {
    pub(crate) rows: Vec<SparseRow>,
    /// `[row][G]`
    pub(crate) states: Vec<HeadState>,
    /// `[row][G][stride]`
    pub(crate) moves: Vec<[u32; 2]>,
    pub(crate) stride: usize,
}

impl ChosenRows {
    fn new(
        device: &Device,
        kv: &CudaKv,
        near: &nuthatch_backend::Near,
    ) -> Result<Self, DeviceError> {
        let n_rows = near.heads.iter().map(|head| head.n_chosen as usize).max().unwrap_or(0);
        let (n_tables, n_pages) = (near.n_tables as usize, n_rows.div_ceil(PAGE_LEN));
        let n = n_tables * n_pages;
        let bytes = kv.page.bytes().saturating_mul(n).saturating_mul(kv.n_heads());
        let tables = device.alloc(4 * n, WHAT)?;
        device.upload(&tables, 0, &(0..count(n)).collect::<Vec<u32>>())?;
        let (pages, n_brought) = (device.alloc(bytes, WHAT)?, AtomicU64::new(0));
        Ok(ChosenRows { pages, tables, n_tables, n_pages, n_brought })
    }

    /// Bytes of one head of all tables.
    fn head_bytes(&self, kv: &CudaKv) -> u64 {
        (kv.page.bytes() * self.n_tables * self.n_pages) as u64
    }

    /// Where rows of a layer are read.
    pub(crate) fn of_layer(&self, kv: &CudaKv, layer: LayerIdx) -> SparsePages {
        let first = u64::from(layer.0) * u64::from(kv.shape.n_kv_heads);
        SparsePages {
            layer: self.pages.address() + first * self.head_bytes(kv),
            tables: self.tables.address(),
            head_bytes: self.head_bytes(kv),
            near: crate::launch::NearPages::NONE,
            table_len: count(self.n_pages),
            padding: 0,
        }
    }

    pub(crate) fn n_brought(&self) -> u64 {
        self.n_brought.load(Ordering::Relaxed)
    }

    /// What is brought to a layer.
    pub(crate) fn brought(
        &self,
        (plan, layer, kv): (&CudaPlan, LayerIdx, &CudaKv),
        brings: &[Bring<'_>],
    ) -> Brought {
        let n_heads = kv.shape.n_kv_heads as usize;
        let mut seqs: Vec<u32> = brings.iter().map(|bring| bring.seq).collect();
        seqs.sort_unstable();
        seqs.dedup();
        let stride = brings.iter().map(|bring| bring.places.len()).max().unwrap_or(0).max(1);
        let first = |head: usize| head * self.n_tables * self.n_pages * kv.page.bytes();
        let base = self.of_layer(kv, layer).layer;
        let row = |(state_row, &number): (usize, &u32)| {
            let seq = &plan.seqs[number as usize];
            let before = seq.table_row as usize * self.n_pages * kv.page.bytes();
            SparseRow {
                row: count(seq.first_row),
                kv_len: count(seq.kv_len()),
                table_row: seq.table_row,
                state_row: count(state_row),
                marks: 0,
                pages: base + before as u64,
            }
        };
        let rows: Vec<SparseRow> = seqs.iter().enumerate().map(row).collect();
        let states =
            (0..seqs.len() * n_heads).map(|i| HeadState::empty(first(i % n_heads), self.n_pages));
        let mut states: Vec<HeadState> = states.collect();
        let mut moves = vec![[0; 2]; states.len() * stride];
        for bring in brings {
            let seq = seqs.binary_search(&bring.seq).expect("a sequence of the list");
            let at = seq * n_heads + bring.head as usize;
            let (n, kv_len) = (bring.places.len(), rows[seq].kv_len);
            assert!(bring.places.iter().all(|&place| place < kv_len), "places of the table");
            let room = count(self.n_pages * PAGE_LEN);
            assert!(bring.rows.iter().all(|&row| row < room), "rows that are kept");
            states[at].n_moves = count(n);
            states[at].n_gone = count(n);
            for (target, pair) in
                moves[at * stride..].iter_mut().zip(bring.places.iter().zip(bring.rows))
            {
                *target = [*pair.0, *pair.1];
            }
            self.n_brought.fetch_add(n as u64, Ordering::Relaxed);
        }
        Brought { rows, states, moves, stride }
    }
}

impl Cuda {
    /// Has rows stay on the device that the host chooses.
    pub(crate) fn keep_chosen(
        &self,
        kv: &mut CudaKv,
        near: &nuthatch_backend::Near,
    ) -> Result<(), DeviceError> {
        assert_eq!(near.heads.len(), kv.n_heads(), "something for each head");
        kv.chosen = None;
        kv.chosen = Some(ChosenRows::new(&self.device, kv, near)?);
        Ok(())
    }
}
