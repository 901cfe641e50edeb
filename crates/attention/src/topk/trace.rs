//! Decisions as they are recorded.

use super::head::Lookup;

/// What was decided about one head of one sequence in one layer and step: all that a device which
/// decides by itself must agree with.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Decision {
    /// The sequence's table.
    pub row: u32,
    /// The number of its policy.
    pub policy: usize,
    /// Of the model.
    pub layer: usize,
    /// The key/value head.
    pub head: usize,
    /// Tokens of the sequence, this step's included.
    pub kv_len: u32,
    /// Whether the last selection served.
    pub lookup: Lookup,
    /// The selection, if one was made.
    pub chosen: Option<Vec<u32>>,
    /// Rows that it moved.
    pub n_moved: usize,
    /// Places before this were attended,
    pub n_first: u32,
    /// and these,
    pub places: Vec<u32>,
    /// and those from here on.
    pub tail: u32,
}
