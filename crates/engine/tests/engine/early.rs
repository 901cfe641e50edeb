//! Real models that compute while their pages come, layer by layer: the same bits as without, on the CPU
//! and, where there is one, on a GPU; also when parts come late, wrong or not at all.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use nuthatch_backend::Backend;
use nuthatch_backend_cpu::{Cpu, CpuConfig};
use nuthatch_backend_cuda::{Cuda, CudaConfig, OpenError};
use nuthatch_engine::{
    DiskIo, DiskOptions, Engine, EngineOptions, Executor, LoadedModel, SlowOptions, StoreKey,
};
use nuthatch_store::disk::SystemFiles;
use nuthatch_store::fault::{FaultRates, FaultyFiles};
use nuthatch_types::{KvDtype, LayerSet, Sampling, TokenId};
use tempfile::TempDir;

use crate::disk::POOL;
use crate::echo::{Answer, HandClock, collect_all};
use crate::golden::{folder, golden, load_on, request};

type Loaded<B> = Engine<Executor<LoadedModel<B>>>;

fn load<B: Backend>(device: B, kv_dtype: KvDtype) -> Loaded<B> {
    // By a clock that stands still nothing is known to take any time, so that all is loaded, however fast
    // the device computes.
    let clock = Arc::new(HandClock::default());
    let options = EngineOptions::default();
    load_on((device, clock), &folder("llama3"), POOL, &options, (64, kv_dtype), None).unwrap()
}

fn answer<B: Backend>(engine: &mut Loaded<B>, prompt: &[TokenId]) -> Answer {
    let (outputs, news) = unbounded();
    let request = request(prompt, Sampling::greedy());
    engine.submit(request, outputs, Duration::ZERO).unwrap();
    while engine.step().unwrap() {
        engine.verify().unwrap();
    }
    collect_all(news.try_iter()).unwrap().remove(0).0
}

fn options(dir: &Path, key: Option<StoreKey>) -> SlowOptions {
    let (dir, io) = (dir.join("kv"), DiskIo::default());
    let disk = Some(DiskOptions { dir, bytes_max: 8 << 20, io });
    SlowOptions { disk, key, by_layers: Some(true), ..SlowOptions::default() }
}

/// Asks the same again and again, with nothing in memory and more and more that goes wrong. Says what
/// happened.
fn layers_that_come_change_nothing<B: Backend>(open: impl Fn() -> B) -> String {
    let (prompt, greedy) = golden("llama3");
    let prompt = [&prompt[..], &greedy, &prompt[..5]].concat();
    let slow = FaultRates { slow: 1000, ..FaultRates::default() };
    let all_rates = [
        FaultRates::default(),
        slow,
        FaultRates { flip: 150, ..slow },
        FaultRates { error: 150, ..slow },
        FaultRates { short: 300, ..slow },
    ];
    let (mut early, mut undone, mut n_loaded) = (0, 0, 0);
    for kv_dtype in [KvDtype::F16, KvDtype::F32, KvDtype::Int8(LayerSet::default())] {
        let truth = answer(&mut load(open(), kv_dtype), &prompt);
        for key in [None, Some(StoreKey::read(&[9; 32]).unwrap())] {
            let dir = TempDir::new().unwrap();
            let system = SystemFiles::new("threads".parse().unwrap()).unwrap();
            let files = FaultyFiles::new(Arc::new(system), FaultRates::default(), 3);
            let mut engine = load(open(), kv_dtype);
            let options = options(dir.path(), key);
            engine.keep_pages_in(&options, Arc::new(files.clone())).unwrap();
            for rates in all_rates.into_iter().flat_map(|rates| [rates; 4]) {
                files.set_rates(rates);
                let got = answer(&mut engine, &prompt);
                assert_eq!(got.tokens, truth.tokens, "{kv_dtype}, {rates:?}");
                assert_eq!(got.logprobs, truth.logprobs, "{kv_dtype}, {rates:?}");
                files.set_rates(FaultRates::default());
                engine.flush().unwrap();
                engine.forget_idle();
            }
            let counters = engine.stats().tier.unwrap().counters;
            early += counters.loads_early;
            undone += counters.loads_undone;
            n_loaded += counters.pages_loaded;
        }
    }
    let what = format!("{n_loaded} pages loaded, {early} loads early, {undone} of them undone");
    assert!(n_loaded > 50 && early > 20, "{what}");
    what
}

#[test]
fn on_the_cpu() {
    let open = || Cpu::new(CpuConfig { threads: 1, isa: None }).unwrap();
    println!("{}", layers_that_come_change_nothing(open));
}

/// Without a driver nothing is judged, and the output shows it.
#[test]
fn on_a_gpu() {
    let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
    let open =
        || Cuda::open(0, CudaConfig { cache_dir: cache_dir.clone(), ..CudaConfig::default() });
    if let Err(error @ (OpenError::NoDriver | OpenError::NoDevice { .. })) = open() {
        println!("SKIPPED: {error}");
        return;
    }
    println!("{}", layers_that_come_change_nothing(|| open().unwrap()));
}
