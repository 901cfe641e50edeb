//! The conformance suite, judged itself: the plainest device passes, broken ones are caught.

mod broken;
mod plain;

use std::panic::catch_unwind;

use nuthatch_backend::conformance::{all, checks};

use broken::{Broken, Mistake};
use plain::Plain;

#[test]
fn the_plainest_device_passes() {
    all(&Plain);
}

/// Each mistake, and the checks that must see it.
const CAUGHT_BY: &[(Mistake, &[&str])] = &[
    (Mistake::DirtyBuffers, &["buffers_match"]),
    (Mistake::WrongToken, &["embed_matches"]),
    (Mistake::GatherFirst, &["gather_rows_matches"]),
    (Mistake::NoEps, &["norm_matches"]),
    (Mistake::SwappedGate, &["swiglu_matches"]),
    (Mistake::NoBias, &["matmul_stacks_match"]),
    (Mistake::WrongCode, &["matmul_matches", "embed_matches", "matmul_stacks_match"]),
    (Mistake::AnySize, &["load_refuses_wrong_sizes"]),
    (Mistake::AddReplaces, &["matmul_matches", "matmul_stacks_match"]),
    (Mistake::BatchSums, &["matmul_rows_agree", "norm_rows_agree", "swiglu_rows_agree"]),
    (Mistake::SpoiledNeighbour, &["matmul_rows_agree"]),
    (Mistake::CoarseActivations, &["matmul_matches", "matmul_stacks_match"]),
    (Mistake::SwappedRope, &["rope_matches", "attend_far_matches", "attend_prefill_matches"]),
    (Mistake::NoAttentionFactor, &["rope_matches"]),
    (Mistake::LatePositions, &["rope_matches", "attend_prefill_matches"]),
    (Mistake::NoHeadNorm, &["rope_matches", "attend_decode_matches", "attend_prefill_matches"]),
    (
        Mistake::WideWindow,
        &["attend_decode_matches", "attend_prefill_matches", "attend_far_matches"],
    ),
    (Mistake::NarrowWindow, &["attend_decode_matches", "attend_prefill_matches"]),
    (Mistake::NoWindow, &["attend_decode_matches", "attend_prefill_matches", "attend_far_matches"]),
    (Mistake::Scale, &["attend_decode_matches", "attend_prefill_matches", "layers_match"]),
    (Mistake::OneLayer, &["layers_match"]),
    (Mistake::OneDtype, &["layers_match"]),
    (Mistake::TableStart, &["copy_pages_matches"]),
    (Mistake::LostSlot, &["attend_decode_matches", "attend_cuts_agree"]),
    (Mistake::CopiesReversed, &["copy_pages_matches"]),
    (Mistake::NoCopy, &["copy_pages_matches", "copy_tiers_match"]),
    (Mistake::OneHostSlot, &["copy_tiers_match"]),
    (Mistake::HalfImage, &["page_images_match"]),
    (Mistake::OneHostEntry, &["host_slots_agree"]),
    (Mistake::FirstTable, &["attend_neighbours_agree", "attend_decode_matches"]),
    (Mistake::DecodeKernel, &["attend_cuts_agree"]),
    (Mistake::NoShift, &["shift_pages_matches"]),
    (Mistake::ShiftBack, &["shift_pages_matches"]),
    (Mistake::CoarseShift, &["shift_pages_matches"]),
    (Mistake::ShiftScales, &["shift_pages_matches"]),
    (Mistake::ShiftsReversed, &["shift_pages_matches"]),
    (Mistake::PlaceByPosition, &["attend_places_are_not_positions"]),
    (Mistake::TouchesAll, &["attend_freed_agrees"]),
    (Mistake::SharedWrites, &["shared_layers_agree"]),
    (Mistake::SharedWidth, &["shared_layers_agree"]),
    (Mistake::AtOnce, &["rope_attend_agrees"]),
];

#[test]
fn broken_devices_are_caught() {
    for (mistake, names) in CAUGHT_BY {
        for name in *names {
            let (_, check) =
                checks::<Broken>().into_iter().find(|(found, _)| found == name).unwrap();
            let passed = catch_unwind(|| check(&Broken(*mistake))).is_ok();
            assert!(!passed, "{name} does not see {mistake:?}");
        }
    }
}
