//! How a device chooses a token from a row of logits.

use std::sync::Arc;

/// How one row's token is chosen.
///
/// The logits of some tokens are moved first. Then, with temperature 0, it is the best token, and of
/// equals the one with the lowest id. Otherwise tokens weigh `exp((x - max) / temperature)`, and are
/// kept, best first and of equals the lower id first: `top_k` of them; of these, those before which
/// there is less than `top_p` of their weight; of these, those that weigh at least `min_p`. The draw
/// goes through the kept tokens by id, and takes the one in whose share of their weight `uniform`
/// falls.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// 0 takes the best token.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// Above 0; 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// In `[0, 1)`.
    pub uniform: f64,
    /// Tokens whose logits are moved; each at most once.
    pub moved: Arc<Vec<Moved>>,
}

/// A token whose logit is moved: divided by `factor` if it is positive, or else multiplied by it;
/// then less `minus`; then more by `plus`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moved {
    /// The token; one outside the vocabulary is ignored.
    pub token: u32,
    /// Above 0; 1 changes nothing.
    pub factor: f32,
    /// What is taken away.
    pub minus: f32,
    /// What is added.
    pub plus: f32,
}

impl Moved {
    /// A token that stays where it is.
    pub fn nothing(token: u32) -> Self {
        Moved { token, factor: 1.0, minus: 0.0, plus: 0.0 }
    }

    /// The logit where it belongs.
    pub fn apply(&self, logit: f32) -> f32 {
        let logit = if logit > 0.0 { logit / self.factor } else { logit * self.factor };
        logit - self.minus + self.plus
    }
}
