//! How beam search is asked for.

use crate::SamplingError;

/// Beam search: the most probable answers as a whole, instead of one token after the other.
///
/// The numbers mean what they mean in Hugging Face's `generate`. An answer's score is the sum of
/// its tokens' log probabilities, the stop token included, divided by their number to the power of
/// `length_penalty`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamParams {
    /// Answers that are followed at one time, at least 1.
    pub width: u32,
    /// Above 0 longer answers are preferred, below 0 shorter ones; 0 compares the plain sums.
    pub length_penalty: f32,
    /// When the search ends before the longest answers do.
    pub early_stopping: EarlyStopping,
}

/// When beam search ends, once `width` answers are complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyStopping {
    /// At once.
    Yes,
    /// When no answer in the making is better than the worst complete one at its present length.
    #[default]
    No,
    /// When no answer in the making can become better, at any length.
    Never,
}

impl BeamParams {
    /// The usual search of this width.
    pub fn new(width: u32) -> Self {
        BeamParams { width, length_penalty: 1.0, early_stopping: EarlyStopping::default() }
    }

    /// Checks every number against its range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        if self.width == 0 {
            return Err(SamplingError { field: "beam_width", value: 0.0, allowed: "at least 1" });
        }
        // Comparisons with NaN are false, so NaN is refused.
        let value = self.length_penalty;
        if !(-10.0..=10.0).contains(&value) {
            return Err(SamplingError { field: "length_penalty", value, allowed: "-10 to 10" });
        }
        Ok(())
    }

    /// Candidates that each answer in the making needs, so that `width` of them go on whatever
    /// `n_stop_tokens` stop tokens are among them.
    pub fn n_candidates(&self, n_stop_tokens: usize) -> u32 {
        let n_stop_tokens = u32::try_from(n_stop_tokens).unwrap_or(u32::MAX);
        self.width.saturating_mul(n_stop_tokens.saturating_add(1).max(2))
    }
}
