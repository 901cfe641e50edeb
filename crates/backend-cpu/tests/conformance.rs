//! The conformance suite on every instruction set that this machine has.
//!
//! An instruction set that is absent is skipped with a line on standard output.

use nuthatch_backend::conformance::{self, Check, checks};
use nuthatch_backend_cpu::{Cpu, CpuConfig, Isa};

/// More threads than one, and not a power of two, so that work is split unevenly.
const THREADS: usize = 3;

#[expect(clippy::print_stdout, reason = "a skip must be seen")]
fn on_every_isa(name: &str, check: Check<Cpu>) {
    for isa in Isa::ALL {
        match Cpu::new(CpuConfig { threads: THREADS, isa: Some(isa) }) {
            Ok(cpu) => {
                println!("{name} on {isa}");
                check(&cpu);
            }
            Err(error) => println!("SKIPPED: {name} on {isa}: {error}"),
        }
    }
}

macro_rules! judged {
    ($($check:ident,)*) => {
        const JUDGED: &[&str] = &[$(stringify!($check)),*];
        $(
            #[test]
            fn $check() {
                on_every_isa(stringify!($check), conformance::$check);
            }
        )*
    };
}

judged! {
    buffers_match,
    embed_matches,
    gather_rows_matches,
    norm_matches,
    norm_rows_agree,
    swiglu_matches,
    swiglu_rows_agree,
    load_refuses_wrong_sizes,
    matmul_matches,
    matmul_stacks_match,
    matmul_rows_agree,
    gated_matmul_agrees,
    norm_matmul_agrees,
    draw_matches,
    rope_matches,
    rope_rows_agree,
    copy_pages_matches,
    copy_tiers_match,
    page_images_match,
    page_layouts_match,
    host_slots_agree,
    shift_pages_matches,
    layers_match,
    shared_layers_agree,
    attend_reads_queries_only,
    attend_decode_matches,
    attend_prefill_matches,
    attend_far_matches,
    attend_long_matches,
    attend_many_agree,
    attend_cuts_agree,
    attend_neighbours_agree,
    attend_places_agree,
    attend_past_agrees,
    attend_freed_agrees,
    attend_places_are_not_positions,
    rope_attend_agrees,
}

/// Top-k attention, which not every device has.
macro_rules! judged_topk {
    ($($check:ident,)*) => {
        $(
            #[test]
            fn $check() {
                on_every_isa(stringify!($check), conformance::$check);
            }
        )*
    };
}

judged_topk! {
    row_pages_agree,
    scores_match,
    picks_match,
    picks_rows_agree,
    choosing_agrees,
}

#[test]
fn the_whole_suite_is_judged_here() {
    let all: Vec<&str> = checks::<Cpu>().into_iter().map(|(name, _)| name).collect();
    assert_eq!(JUDGED, all);
}

#[test]
fn the_best_instructions_of_this_machine_are_among_the_judged() {
    let cpu = Cpu::new(CpuConfig::default()).unwrap();
    assert_eq!(cpu.isa(), Isa::detect());
    assert!(Isa::ALL.contains(&cpu.isa()));
    println!("best here: {}", cpu.isa());
}
