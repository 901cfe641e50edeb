//! Where the rows of a batch are, and how attention reads them.

use nuthatch_types::KvShape;

use crate::Backend;

/// One step's batch, as the executor sees it: which rows belong to which sequence and table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchLayout {
    /// `[T]` tokens, sequence after sequence.
    pub tokens: Vec<u32>,
    /// `[T]` positions of those tokens.
    pub positions: Vec<u32>,
    /// `[B + 1]` first row of each sequence, then `T`.
    pub query_start: Vec<u32>,
    /// `[B]` tokens in the cache after this step; the sequence's last row is at `kv_len - 1`.
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

/// One layer's attention.
#[derive(Debug)]
pub struct AttnSpec<'a, B: Backend> {
    /// Query heads.
    pub n_heads: u32,
    /// Scores are multiplied by this before the softmax.
    pub scale: f32,
    /// A row at position `p` sees positions above `p - window` only.
    pub window: Option<u32>,
    /// `[D]` weights that normalise each query head, and each key head.
    pub head_norms: Option<(&'a B::Buf, &'a B::Buf)>,
    /// Added to the mean square under the root of a head's norm.
    pub eps: f32,
}
