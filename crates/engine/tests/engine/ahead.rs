//! Passes that are queued before they are planned, where a GPU decides what they attend to.

use std::sync::Arc;

use nuthatch_backend_cuda::{Cuda, CudaConfig, FarPages, OpenError};
use nuthatch_engine::{EngineOptions, SharedClock, TopKOptions};
use nuthatch_types::KvDtype;

use crate::echo::{Answer, HandClock};
use crate::golden::{Pool, folder, load_on};
use crate::offload::{FAR, POLICIES, least, seeds, simulate, topk};

/// Key/value heads of the model, and more answers than a simulation cancels.
const N_HEADS: u64 = 4;
const N_CANCELLED: u64 = 28;

/// Requests that want logarithms are never ahead, so that both ways can be compared: tokens are the same, in
/// which decisions show, and no more was decided than for rows of who had ended. Without a driver nothing is judged, and the output shows it.
#[test]
fn passes_that_are_queued_early_decide_the_same_on_a_gpu() {
    let open = |far: Option<FarPages>| {
        let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
        Cuda::open(0, CudaConfig { cache_dir, far, is_exact: true, ..CudaConfig::default() })
    };
    if let Err(error @ (OpenError::NoDriver | OpenError::NoDevice { .. })) = open(None) {
        println!("SKIPPED: {error}");
        return;
    }
    let mut n_ahead = 0;
    for seed in seeds() {
        let policy = POLICIES[seed as usize % POLICIES.len()];
        let by_threads = FarPages { n_near: 5, n_threads: 3, ..FAR };
        for far in [None, Some(FarPages { n_near: 5, ..FAR }), Some(by_threads)] {
            let run = |n_logprobs| {
                simulate(seed, n_logprobs, |pool, max_rows| {
                    let (pool, clock) = (Pool { spill: false, ..pool }, HandClock::default());
                    let device = (open(far).unwrap(), Arc::new(clock) as SharedClock);
                    let steps = (max_rows, KvDtype::F32);
                    let topk = TopKOptions { offload: far.map(|_| least()), ..topk(policy) };
                    let (path, options) = (folder("llama3"), EngineOptions::default());
                    load_on(device, &path, pool, &options, steps, Some(&topk.on_link())).unwrap()
                })
            };
            let ((after, engine), (early, other)) = (run(Some(0)), run(None));
            let tokens = |answers: &[Vec<Answer>]| -> Vec<_> {
                answers.iter().flatten().map(|one| (one.tokens.clone(), one.reason)).collect()
            };
            let what = format!("seed {seed}, {policy}, {far:?}");
            assert_eq!(tokens(&early.answers), tokens(&after.answers), "{what}");
            let [decided, decided_early] = [&engine, &other]
                .map(|engine| engine.executor().forward().topk_stats().unwrap().policies[0]);
            if other.executor().n_ahead() == 0 {
                assert_eq!(decided_early, decided, "{what}");
            }
            // Who has ended with one pass has a row in the next, if that was queued early.
            let n_more =
                decided_early.heads.checked_sub(decided.heads).expect("no less is decided");
            let n_answers = early.answers.iter().flatten().count() as u64 + N_CANCELLED;
            assert!(n_more <= n_answers * N_HEADS, "{what}: {decided_early:?}, {decided:?}");
            assert_eq!(engine.executor().n_ahead(), 0, "{what}");
            // Copies of rows would wait behind those for the pass after.
            let has_threads = far.is_some_and(|far| far.n_threads > 0);
            assert!(!has_threads || other.executor().n_ahead() == 0, "{what}");
            n_ahead += other.executor().n_ahead();
        }
    }
    println!("{n_ahead} passes were queued early");
    assert!(n_ahead > 0);
}
