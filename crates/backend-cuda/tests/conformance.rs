//! The suite that judges every device, on this machine's first GPU.
//!
//! Without a driver the tests say so and pass: nothing was judged, and the output shows it.
//!
//! Under `compute-sanitizer` loading kernels takes most of the time, and few cases are enough: with
//! `FEW_CASES=1` checks take few of theirs, with `ONE_DEVICE=1` and `--test-threads 1` tests share devices
//! and their kernels, and with `PART=n` a test opens the device in its `n`-th way only, so that parts can be
//! judged at once.

#![expect(clippy::print_stdout, reason = "a skip must be seen")]

use std::ops::Range;
use std::sync::OnceLock;

use nuthatch_backend::conformance::{self, Check, checks};
use nuthatch_backend::{Backend as _, DeviceError, HostMatrix, WeightType, quant};
use nuthatch_backend_cuda::{Cuda, CudaConfig, FarPages, OpenError};
use nuthatch_types::{HeadSet, LayerSet};

/// The ways to open the device: whether it is exact, and which pages are far.
const WAYS: [(bool, Option<FarPages>); 4] = [
    (false, None),
    (true, None),
    (
        false,
        Some(FarPages {
            n_near: 2,
            resident: LayerSet::NONE,
            n_threads: 0,
            code: None,
            coded_here: HeadSet::NONE,
            fails_after: None,
        }),
    ),
    (
        false,
        Some(FarPages {
            n_near: 7,
            resident: LayerSet::first(1),
            n_threads: 0,
            code: None,
            coded_here: HeadSet::NONE,
            fails_after: None,
        }),
    ),
];

/// The first GPU, or none where there is no driver. Anything else that is wrong is a failure.
fn gpu((is_exact, far): (bool, Option<FarPages>)) -> Option<Cuda> {
    if std::env::var_os("FEW_CASES").is_some() {
        conformance::take_few_cases();
    }
    let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
    match Cuda::open(0, CudaConfig { cache_dir, is_exact, far, ..CudaConfig::default() }) {
        Ok(cuda) => Some(cuda),
        Err(error @ (OpenError::NoDriver | OpenError::NoDevice { .. })) => {
            println!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Judges the device, opened in each of some ways.
fn on_the_gpu(name: &str, ways: Range<usize>, check: Check<Cuda>) {
    static SHARED: [OnceLock<Option<Cuda>>; 4] = [const { OnceLock::new() }; 4];
    let part = std::env::var_os("PART");
    for n in ways.filter(|n| part.as_ref().is_none_or(|part| *part == *n.to_string())) {
        let own = OnceLock::new();
        let is_shared = std::env::var_os("ONE_DEVICE").is_some();
        let place = if is_shared { &SHARED[n] } else { &own };
        let Some(cuda) = place.get_or_init(|| gpu(WAYS[n])) else { return };
        println!("{name} on {}, exact, far: {:?}", cuda.name(), WAYS[n]);
        check(cuda);
    }
}

macro_rules! judged {
    ($($check:ident,)*) => {
        const JUDGED: &[&str] = &[$(stringify!($check)),*];
        $(
            #[test]
            fn $check() {
                on_the_gpu(stringify!($check), 0..2, conformance::$check);
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
                on_the_gpu(stringify!($check), 0..4, conformance::$check);
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
    let Some(cuda) = gpu(WAYS[0]) else { return };
    let (_, total) = cuda.memory().unwrap();
    let error = cuda.alloc(total).err().unwrap();
    assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
    cuda.alloc(100).unwrap();
    cuda.wait().unwrap();
}

/// Products that fill the device have kernels of their own; the suite's are too small for them.
#[test]
fn large_products_have_the_bits_of_small_ones() {
    const COLS: usize = 192;
    /// Sixteen more than whole tiles, and more than one round of small ones on an H200.
    const OUT: usize = 4240;
    for is_exact in [false, true] {
        let Some(cuda) = gpu((is_exact, None)) else { return };
        let mut bytes = Vec::new();
        for row in numbers(OUT * COLS).chunks_exact(COLS) {
            quant::quantize_row(WeightType::BF16, row, &mut bytes);
        }
        let bias = numbers(OUT);
        let half = |part: usize| HostMatrix {
            dtype: WeightType::BF16,
            rows: OUT / 2,
            cols: COLS,
            bytes: &bytes[part * bytes.len() / 2..(part + 1) * bytes.len() / 2],
            bias: Some(&bias[part * OUT / 2..(part + 1) * OUT / 2]),
        };
        let plain =
            cuda.load(&[HostMatrix { rows: OUT, bytes: &bytes, bias: Some(&bias), ..half(0) }]);
        let (plain, gated) = (plain.unwrap(), cuda.load_gated(half(0), half(1)).unwrap());
        let is_little = std::env::var_os("FEW_CASES").is_some();
        for rows in [384, 700, 1537].into_iter().take(if is_little { 1 } else { 3 }) {
            let (x, before) = (numbers(rows * COLS), numbers(rows * OUT));
            let products = |range: std::ops::Range<usize>| {
                let n = range.len();
                let upload = |values: &[f32]| {
                    let mut buf = cuda.alloc(values.len()).unwrap();
                    cuda.write(&mut buf, values).unwrap();
                    buf
                };
                let x = upload(&x[range.start * COLS..range.end * COLS]);
                let mut outs = [
                    upload(&vec![f32::NAN; n * OUT]),
                    upload(&before[range.start * OUT..range.end * OUT]),
                    upload(&vec![f32::NAN; n * OUT / 2]),
                ];
                let mut scratch = upload(&vec![f32::NAN; n * OUT]);
                cuda.matmul(&plain, &x, n, &mut outs[0]).unwrap();
                cuda.matmul_add(&plain, &x, n, &mut outs[1]).unwrap();
                cuda.gated_matmul(&gated, &x, OUT / 2, n, &mut scratch, &mut outs[2]).unwrap();
                [(0, OUT), (1, OUT), (2, OUT / 2)].map(|(i, width)| {
                    let mut values = vec![0.0; n * width];
                    cuda.read(&outs[i], &mut values).unwrap();
                    values.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
                })
            };
            let whole = products(0..rows);
            let parts = [60, 27].into_iter().flat_map(|size| {
                (0..rows).step_by(size).map(move |start| (start, rows.min(start + size)))
            });
            for (start, end) in parts {
                for (whole, part) in whole.iter().zip(products(start..end)) {
                    let width = part.len() / (end - start);
                    assert!(
                        whole[start * width..end * width] == part,
                        "rows {start}..{end} of {rows}, exact: {is_exact}"
                    );
                }
            }
        }
    }
}

/// Numbers between -1 and 1 that repeat.
fn numbers(n: usize) -> Vec<f32> {
    let mut state = 9u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}
