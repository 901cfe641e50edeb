//! Tenants whose requests are salted do not find each other's pages, in whatever tier they are.

use std::sync::Arc;

use nuthatch_engine::{
    DiskIo, DiskOptions, EngineHandle, EngineOptions, Hints, Objects, SlowOptions, StoreKey,
    Submission,
};
use nuthatch_store::fault::MemoryObjects;
use nuthatch_types::{ColdDtype, ColdKv, Sampling, TokenId};
use tempfile::TempDir;

use crate::disk::ask;
use crate::golden::{Pool, folder, golden, load_topk, request};

const POOL: Pool = Pool { kv_pages: 12, host_pages: 0, spill: false, max_seqs: 2 };

fn salted(prompt: &[TokenId], salt: &[u8]) -> Submission {
    let hints = Hints { cache_salt: salt.to_vec(), ..Hints::default() };
    Submission { hints, ..request(prompt, Sampling::greedy()) }
}

fn spawn(pool: Pool, options: &SlowOptions) -> EngineHandle {
    let mut engine = load_topk(&folder("llama3"), pool, &EngineOptions::default(), 10, None);
    engine.keep_pages(options).unwrap();
    engine.spawn().unwrap()
}

/// One tenant has said something; others say the same, and then the first again. Only it finds it.
fn only_the_first_finds_it(handle: &EngineHandle, prompt: &[TokenId], tier: &str) {
    for salt in [&b"two"[..], b"", b"on", b"one\0"] {
        assert_eq!(ask(handle, &salted(prompt, salt)).1, 0, "{tier}: {salt:?}");
    }
    assert!(ask(handle, &salted(prompt, b"one")).1 > 0, "{tier}");
}

#[test]
fn in_memory_and_on_the_host() {
    let (prompt, _) = golden("llama3");
    let handle = spawn(Pool { kv_pages: 48, ..POOL }, &SlowOptions::default());
    ask(&handle, &salted(&prompt, b"one"));
    only_the_first_finds_it(&handle, &prompt, "memory");
    handle.shutdown().unwrap();

    let handle = spawn(Pool { host_pages: 64, ..POOL }, &SlowOptions::default());
    ask(&handle, &salted(&prompt, b"one"));
    // Others need the room, until nothing of it is on the device.
    for first in 0..6 {
        let other: Vec<TokenId> =
            prompt.iter().map(|token| TokenId((token.0 + first + 1) % 90)).collect();
        ask(&handle, &request(&other, Sampling::greedy()));
    }
    only_the_first_finds_it(&handle, &prompt, "host");
    let counters = handle.stats().unwrap().scheduler.cache.counters;
    assert!(counters.pages_demoted > 0 && counters.pages_promoted > 0, "{counters:?}");
    handle.shutdown().unwrap();
}

#[test]
fn on_a_disk_and_in_a_store() {
    let (prompt, _) = golden("llama3");
    let (dir, objects) = (TempDir::new().unwrap(), Arc::new(MemoryObjects::default()));
    let disk = |name: &str| {
        let (dir, io) = (dir.path().join(name), DiskIo::default());
        SlowOptions {
            disk: Some(DiskOptions { dir, bytes_max: 8 << 20, io }),
            ..SlowOptions::default()
        }
    };
    let store: Arc<dyn Objects> = Arc::<MemoryObjects>::clone(&objects);
    let key = Some(StoreKey::read(&[4; 32]).unwrap());
    let cold = Some(ColdKv { dtype: ColdDtype::Int8, exact_layers: Vec::new() });
    for (tier, options) in [
        ("disk", disk("plain")),
        ("disk, by layers", SlowOptions { by_layers: Some(true), ..disk("layers") }),
        ("disk, coded", SlowOptions { cold, ..disk("coded") }),
        ("disk, encrypted", SlowOptions { key, ..disk("encrypted") }),
        ("disk, moved", SlowOptions { reuse: Some(16), ..disk("moved") }),
        ("store", SlowOptions { remote: Some(store), ..SlowOptions::default() }),
    ] {
        let handle = spawn(POOL, &options);
        ask(&handle, &salted(&prompt, b"one"));
        handle.shutdown().unwrap();
        // In another engine, so that nothing is in memory.
        let handle = spawn(POOL, &options);
        only_the_first_finds_it(&handle, &prompt, tier);
        assert!(handle.stats().unwrap().tier.unwrap().counters.pages_loaded > 0, "{tier}");
        handle.shutdown().unwrap();
    }
}
