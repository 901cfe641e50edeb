//! The suite that judges a device: every operation against an `f64` truth, and the promise that
//! rows do not see each other, bit for bit.
//!
//! A device's tests call [`all`], or take [`checks`] to run and name them one by one. A check
//! panics with the case, the element, what was expected and how far it may be off. It does not
//! measure speed, and it does not test what a device does with wrong arguments beyond refusing
//! weights of the wrong size.
//!
//! Inputs come from a fixed generator, so a failure repeats. They contain outliers, because a
//! mistake in a maximum, a scale or a sum order hides in well-behaved numbers. Combinations of
//! shapes are sampled, not multiplied out.
//!
//! The inner layout of a KV arena is the device's own, so the suite writes keys and values as the
//! model does, through `rope_append`, and reads them through `attend`. Arenas are first filled with
//! NaN and infinities, so that whatever is read but does not belong to a sequence shows.

mod at_once;
mod attend;
mod attend_bits;
mod compare;
mod copy;
mod draw;
mod embed;
mod inputs;
mod kept;
mod matmul;
mod matmul_bits;
mod norm;
mod rig;
mod rope;
mod rows;
mod shared;
mod shift;
mod swiglu;
mod topk;
mod truth;

use std::sync::atomic::{AtomicBool, Ordering};

use crate::Backend;

pub use at_once::rope_attend_agrees;
pub use attend::{
    attend_decode_matches, attend_far_matches, attend_long_matches, attend_many_agree,
    attend_prefill_matches, attend_reads_queries_only,
};
pub use attend_bits::{
    attend_cuts_agree, attend_neighbours_agree, attend_past_agrees, attend_places_agree,
};
pub use copy::{
    buffers_match, copy_pages_matches, copy_tiers_match, host_slots_agree, layers_match,
    page_images_match, page_layouts_match,
};
pub use draw::draw_matches;
pub use embed::embed_matches;
pub use kept::{attend_freed_agrees, attend_places_are_not_positions};
pub use matmul::{load_refuses_wrong_sizes, matmul_matches, matmul_stacks_match};
pub use matmul_bits::matmul_rows_agree;
pub use norm::{norm_matches, norm_rows_agree};
pub use rope::{rope_matches, rope_rows_agree};
pub use rows::gather_rows_matches;
pub use shared::shared_layers_agree;
pub use shift::shift_pages_matches;
pub use swiglu::{gated_matmul_agrees, norm_matmul_agrees, swiglu_matches, swiglu_rows_agree};
pub use topk::{choosing_agrees, picks_match, picks_rows_agree, row_pages_agree, scores_match};

/// One check: it returns if the device conforms, and panics if not.
pub type Check<B> = fn(&B);

/// Every check with its name, cheap ones first.
pub fn checks<B: Backend>() -> Vec<(&'static str, Check<B>)> {
    vec![
        ("buffers_match", buffers_match::<B>),
        ("embed_matches", embed_matches::<B>),
        ("gather_rows_matches", gather_rows_matches::<B>),
        ("norm_matches", norm_matches::<B>),
        ("norm_rows_agree", norm_rows_agree::<B>),
        ("swiglu_matches", swiglu_matches::<B>),
        ("swiglu_rows_agree", swiglu_rows_agree::<B>),
        ("load_refuses_wrong_sizes", load_refuses_wrong_sizes::<B>),
        ("matmul_matches", matmul_matches::<B>),
        ("matmul_stacks_match", matmul_stacks_match::<B>),
        ("matmul_rows_agree", matmul_rows_agree::<B>),
        ("gated_matmul_agrees", gated_matmul_agrees::<B>),
        ("norm_matmul_agrees", norm_matmul_agrees::<B>),
        ("draw_matches", draw_matches::<B>),
        ("rope_matches", rope_matches::<B>),
        ("rope_rows_agree", rope_rows_agree::<B>),
        ("copy_pages_matches", copy_pages_matches::<B>),
        ("copy_tiers_match", copy_tiers_match::<B>),
        ("page_images_match", page_images_match::<B>),
        ("page_layouts_match", page_layouts_match::<B>),
        ("host_slots_agree", host_slots_agree::<B>),
        ("shift_pages_matches", shift_pages_matches::<B>),
        ("layers_match", layers_match::<B>),
        ("shared_layers_agree", shared_layers_agree::<B>),
        ("attend_reads_queries_only", attend_reads_queries_only::<B>),
        ("attend_decode_matches", attend_decode_matches::<B>),
        ("attend_prefill_matches", attend_prefill_matches::<B>),
        ("attend_far_matches", attend_far_matches::<B>),
        ("attend_long_matches", attend_long_matches::<B>),
        ("attend_many_agree", attend_many_agree::<B>),
        ("attend_cuts_agree", attend_cuts_agree::<B>),
        ("attend_neighbours_agree", attend_neighbours_agree::<B>),
        ("attend_places_agree", attend_places_agree::<B>),
        ("attend_past_agrees", attend_past_agrees::<B>),
        ("attend_freed_agrees", attend_freed_agrees::<B>),
        ("attend_places_are_not_positions", attend_places_are_not_positions::<B>),
        ("rope_attend_agrees", rope_attend_agrees::<B>),
    ]
}

static TAKES_FEW: AtomicBool = AtomicBool::new(false);

/// Has all checks take few of their cases from now on.
///
/// Tools that watch every access to a device's memory make it hundreds of times slower. They need
/// every kernel, not every size.
pub fn take_few_cases() {
    TAKES_FEW.store(true, Ordering::Relaxed);
}

/// How many of a check's cases run.
fn at_most(few: usize, all: usize) -> usize {
    if TAKES_FEW.load(Ordering::Relaxed) { few } else { all }
}

/// Runs every check.
///
/// # Panics
///
/// If the device does not conform.
pub fn all<B: Backend>(b: &B) {
    for (_, check) in checks::<B>() {
        check(b);
    }
}
