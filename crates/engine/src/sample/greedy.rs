//! The most probable token.

use nuthatch_types::TokenId;

/// The token with the logit `max`; among equals the one with the lowest id.
///
/// `max` must be the largest of `logits`.
pub(super) fn first_of(logits: &[f32], max: f32) -> TokenId {
    // A whole chunk is compared without leaving it early, which vector code can do.
    const CHUNK: usize = 64;
    let has_max = |chunk: &[f32]| chunk.iter().fold(false, |found, &x| found | (x == max));
    let chunk = logits.chunks(CHUNK).position(has_max).unwrap_or(0) * CHUNK;
    let within = logits[chunk..].iter().position(|&x| x == max);
    let id = chunk + within.expect("the maximum was taken from the logits");
    TokenId(u32::try_from(id).expect("token ids have 32 bits"))
}
