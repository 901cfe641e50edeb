//! The most probable token.

use nuthatch_types::TokenId;

/// The token with the logit `max`; among equals the one with the lowest id.
///
/// `max` must be the largest of `logits`.
pub(super) fn first_of(logits: &[f32], max: f32) -> TokenId {
    let id = logits.iter().position(|&x| x == max).expect("the maximum was taken from the logits");
    TokenId(u32::try_from(id).expect("token ids have 32 bits"))
}
