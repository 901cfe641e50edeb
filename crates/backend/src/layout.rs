//! Where the rows of a batch are, and how attention reads them.

use nuthatch_types::KvShape;

use crate::Backend;

/// One step's batch, as the executor sees it: which rows belong to which sequence and table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchLayout {
    /// `[T]` tokens, sequence after sequence.
    pub tokens: Vec<u32>,
    /// `[T]` positions that those tokens are rotated to. Which keys a row sees does not depend on
    /// them, but on its place: the sequence's rows are the last ones of its `kv_len` tokens.
    pub positions: Vec<u32>,
    /// `[B + 1]` first row of each sequence, then `T`.
    pub query_start: Vec<u32>,
    /// `[B]` places of the sequence's table that are used after this step; its last row is at place
    /// `kv_len - 1`.
    pub kv_len: Vec<u32>,
    /// `[B]` row of the sequence's table.
    pub table_row: Vec<u32>,
    /// Rows whose logits are wanted, ascending.
    pub output_rows: Vec<u32>,
}

impl BatchLayout {
    /// Rows of the batch.
    pub fn n_rows(&self) -> usize {
        self.tokens.len()
    }

    /// Sequences of the batch.
    pub fn n_seqs(&self) -> usize {
        self.kv_len.len()
    }

    /// Empties the layout, keeping its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.query_start.clear();
        self.kv_len.clear();
        self.table_row.clear();
        self.output_rows.clear();
    }
}

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Element `i` with the one half the rotated width on: Hugging Face's files, GGUF's Qwen.
    Halves,
    /// Element `2 i` with element `2 i + 1`: GGUF's Llama.
    Pairs,
}

/// Rotary position embedding, with its scaling already worked into the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// `[rotated width / 2]` radians per position.
    pub inv_freq: Vec<f32>,
    /// Cosine and sine are multiplied by this (YaRN, longrope).
    pub attention_factor: f32,
    /// Which elements are rotated together.
    pub style: RopeStyle,
}

/// The largest batch that a plan must hold.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanShape {
    /// Rows of a batch.
    pub max_rows: usize,
    /// Sequences of a batch.
    pub max_seqs: usize,
    /// Tokens of one sequence.
    pub max_context: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Shape of the KV that is attended.
    pub kv: KvShape,
    /// How positions rotate heads.
    pub rope: RopeSpec,
}

/// Whether the operations of a pass are to be queued one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// They are.
    Needed,
    /// The device has queued all of them already.
    Queued,
}

/// What [`Backend::norm`] is of.
#[derive(Debug)]
pub struct Norm<'a, B: Backend> {
    /// `[rows, d]`
    pub x: &'a B::Buf,
    /// `[d]`
    pub weight: &'a B::Buf,
    /// Added to the mean square under the root.
    pub eps: f32,
}

/// One layer's attention.
#[derive(Debug)]
pub struct AttnSpec<'a, B: Backend> {
    /// Query heads.
    pub n_heads: u32,
    /// Scores are multiplied by this before the softmax.
    pub scale: f32,
    /// A row at place `p` sees places above `p - window` only.
    pub window: Option<u32>,
    /// Whether the layer writes keys and values. One that does not reads those of the layer that it
    /// is given, and its rows have queries only.
    pub owns_kv: bool,
    /// `[D]` weights that normalise each query head, and each key head; the latter are not looked at
    /// where there are no keys.
    pub head_norms: Option<(&'a B::Buf, &'a B::Buf)>,
    /// Added to the mean square under the root of a head's norm.
    pub eps: f32,
}
