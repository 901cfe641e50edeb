//! The suite that judges every device, on this machine's first GPU.
//!
//! Without a driver the tests say so and pass: nothing was judged, and the output shows it.

#![expect(clippy::print_stdout, reason = "a skip must be seen")]

use nuthatch_backend::conformance::{self, Check, checks};
use nuthatch_backend::{Backend as _, DeviceError};
use nuthatch_backend_cuda::{Cuda, CudaConfig, OpenError};

/// The first GPU, or none where there is no driver. Anything else that is wrong is a failure.
fn gpu(is_exact: bool) -> Option<Cuda> {
    let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
    match Cuda::open(0, CudaConfig { cache_dir, is_exact, ..CudaConfig::default() }) {
        Ok(cuda) => Some(cuda),
        Err(error @ (OpenError::NoDriver | OpenError::NoDevice { .. })) => {
            println!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn on_the_gpu(name: &str, check: Check<Cuda>) {
    for is_exact in [false, true] {
        let Some(cuda) = gpu(is_exact) else { return };
        println!("{name} on {}, exact: {is_exact}", cuda.name());
        check(&cuda);
    }
}

macro_rules! judged {
    ($($check:ident,)*) => {
        const JUDGED: &[&str] = &[$(stringify!($check)),*];
        $(
            #[test]
            fn $check() {
                on_the_gpu(stringify!($check), conformance::$check);
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
    host_slots_agree,
    shift_pages_matches,
    layers_match,
    shared_layers_agree,
    attend_reads_queries_only,
    attend_decode_matches,
    attend_prefill_matches,
    attend_far_matches,
    attend_cuts_agree,
    attend_neighbours_agree,
    attend_places_agree,
    attend_past_agrees,
    attend_freed_agrees,
    attend_places_are_not_positions,
}

/// Top-k attention, which not every device has.
macro_rules! judged_topk {
    ($($check:ident,)*) => {
        $(
            #[test]
            fn $check() {
                on_the_gpu(stringify!($check), conformance::$check);
            }
        )*
    };
}

judged_topk! {
    row_pages_agree,
    scores_match,
    picks_match,
    picks_rows_agree,
}

#[test]
fn the_whole_suite_is_judged_here() {
    let all: Vec<&str> = checks::<Cuda>().into_iter().map(|(name, _)| name).collect();
    assert_eq!(JUDGED, all);
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let Err(error) = Cuda::open(1000, CudaConfig::default()) else { panic!("1001 devices") };
    println!("{error}");
    assert!(matches!(error, OpenError::NoDriver | OpenError::NoDevice { .. }));
}

#[test]
fn more_memory_than_there_is_is_an_error_and_no_fault() {
    let Some(cuda) = gpu(false) else { return };
    let (_, total) = cuda.memory().unwrap();
    let error = cuda.alloc(total).err().unwrap();
    assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
    cuda.alloc(100).unwrap();
    cuda.wait().unwrap();
}
