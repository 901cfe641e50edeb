//! Rows kept near: of each running sequence a few rows lie in memory of their own, while its pages
//! lie in a larger and slower one.
//!
//! ```text
//!   far    [ pages: everything that was ever written ]
//!   near   for each table and key/value head
//!          [ first places | last places, place p at p % n_last | chosen places, where they are put ]
//! ```
//!
//! First and last places are written near when they are written at all; a device fills in by itself
//! what it finds missing there, such as after a prefix hit. Chosen places come by
//! [`Backend::bring`](crate::Backend::bring). Near memory never grows.

/// Rows of one key/value head of a running sequence that are kept near.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NearHead {
    /// First places.
    pub n_first: u32,
    /// Last places; as many as the context has, if the whole head stays near.
    pub n_last: u32,
    /// Room for chosen places.
    pub n_chosen: u32,
}

impl NearHead {
    /// Rows of one sequence.
    pub fn n_rows(&self) -> u32 {
        self.n_first + self.n_last + self.n_chosen
    }

    /// Bytes of one sequence, with four for each first and last row to know its place by.
    pub fn bytes(&self, row_bytes: usize) -> u64 {
        u64::from(self.n_rows()) * row_bytes as u64 + 4 * u64::from(self.n_first + self.n_last)
    }
}

/// What is kept near.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Near {
    /// Tables of sequences.
    pub n_tables: u32,
    /// `[layer][G]`, of layers that own KV.
    pub heads: Vec<NearHead>,
}

impl Near {
    /// Bytes of all of it.
    pub fn bytes(&self, row_bytes: usize) -> u64 {
        let table: u64 = self.heads.iter().map(|head| head.bytes(row_bytes)).sum();
        table * u64::from(self.n_tables)
    }
}

/// Rows of one head that are to come near.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bring<'a> {
    /// The sequence's number in the batch.
    pub seq: u32,
    /// The key/value head.
    pub head: u32,
    /// Places, ascending, none of which is written in this step.
    pub places: &'a [u32],
    /// The row of the head's chosen part that each goes to.
    pub rows: &'a [u32],
}

/// Rows that came from far so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NearCounts {
    /// By [`Backend::bring`](crate::Backend::bring).
    pub n_brought: u64,
    /// First and last rows, and rows of heads that stay near, that were found missing.
    pub n_filled: u64,
    /// Bytes of a row as [`Backend::bring`](crate::Backend::bring), or the device by itself, has it come; 0 if
    /// it comes as it is.
    pub coded_row_bytes: u64,
    /// Bytes that were read from the file that pages are in, whatever for; 0 where there is none.
    pub file_bytes: u64,
    /// Bytes that came over the link in a second when nothing else did, measured at the start; 0 where
    /// there is none.
    pub link_rate: u64,
}
