//! Conversations whose oldest turns were left out: what is stored of the others is used at its new
//! positions, by those who asked for it.

use std::path::Path;

use nuthatch_engine::{
    DiskError, DiskIo, DiskOptions, EngineHandle, EngineOptions, Hints, SlowOptions, StoreKey,
    Submission,
};
use nuthatch_types::{Sampling, TokenId};
use tempfile::TempDir;

use crate::disk::{POOL, ask, tier};
use crate::golden::{folder, load_topk, request};

/// The golden model with one layer, whose keys and values do not depend on what came before.
fn one_layer() -> TempDir {
    let dir = TempDir::new().unwrap();
    for entry in std::fs::read_dir(folder("llama3")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let path = dir.path().join("config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    let one = config.replace(r#""num_hidden_layers": 2"#, r#""num_hidden_layers": 1"#);
    assert_ne!(one, config);
    std::fs::write(&path, one).unwrap();
    dir
}

fn options(dir: &Path, reuse: Option<u32>) -> SlowOptions {
    let disk = Some(DiskOptions { dir: dir.join("kv"), bytes_max: 8 << 20, io: DiskIo::default() });
    SlowOptions { disk, reuse, ..SlowOptions::default() }
}

fn spawn(model: &Path, options: &SlowOptions) -> EngineHandle {
    let mut engine = load_topk(model, POOL, &EngineOptions::default(), 10, None);
    engine.keep_pages(options).unwrap();
    engine.spawn().unwrap()
}

/// A part of a conversation.
fn said(n: usize, seed: u32) -> Vec<TokenId> {
    (0..n as u32).map(|i| TokenId(3 + (i * i * 7 + i * seed + seed) % 150)).collect()
}

/// A conversation of a system prompt and three turns, and the same without its first turn, with a
/// question after it.
fn conversations() -> (Submission, Submission, usize) {
    let (system, turns) = (said(21, 1), [said(43, 2), said(50, 3), said(41, 4)]);
    let whole = [&system[..], &turns.concat()].concat();
    let cut = [&system[..], &turns[1], &turns[2]].concat();
    let n_known = cut.len();
    let asked = [&cut[..], &said(7, 5)].concat();
    (request(&whole, Sampling::greedy()), request(&asked, Sampling::greedy()), n_known)
}

/// With one layer it is exact but for rounding; nearly all of the prompt is brought.
#[test]
fn a_conversation_without_its_first_turn_finds_the_others() {
    let (model, dir) = (one_layer(), TempDir::new().unwrap());
    let (whole, cut, n_known) = conversations();
    let exact = spawn(model.path(), &options(&TempDir::new().unwrap().keep(), None));
    let (expected, _) = ask(&exact, &cut);
    exact.shutdown().unwrap();

    let handle = spawn(model.path(), &options(dir.path(), Some(16)));
    ask(&handle, &whole);
    // What is said by others is not found by those who do not share it.
    let hints = Hints { cache_salt: b"other".to_vec(), ..Hints::default() };
    assert_eq!(ask(&handle, &Submission { hints, ..cut.clone() }).1, 0);
    handle.shutdown().unwrap();

    // Also after a restart.
    let handle = spawn(model.path(), &options(dir.path(), Some(16)));
    let (answer, n_cached) = ask(&handle, &cut);
    assert_eq!(n_cached as usize, n_known / 16 * 16);
    let stats = tier(&handle).counters;
    // The first page is where it was.
    assert_eq!(stats.pages_moved, n_known as u64 / 16 - 1, "{stats:?}");
    let mut n_same = 0;
    for (i, (found, exact)) in answer.logprobs.iter().zip(&expected.logprobs).enumerate() {
        if answer.tokens[i] != expected.tokens[i] {
            break;
        }
        let far = (found.unwrap() - exact.unwrap()).abs();
        assert!(far < 1e-3, "token {i} is off by {far}");
        n_same += 1;
    }
    assert!(n_same >= 8, "{n_same} tokens are the same");
    // Now it is cached as it stands, and the same is answered.
    let (again, n_cached) = ask(&handle, &cut);
    assert_eq!(again.tokens, answer.tokens);
    assert!(n_cached as usize >= n_known / 16 * 16);
    handle.shutdown().unwrap();
}

/// What stands where it stood is exact, and who does not ask for more finds none of it.
#[test]
fn what_has_not_moved_is_exact_and_others_find_nothing() {
    let dir = TempDir::new().unwrap();
    let (whole, cut, _) = conversations();
    let handle = spawn(&folder("llama3"), &options(dir.path(), Some(16)));
    let (before, _) = ask(&handle, &whole);
    handle.shutdown().unwrap();
    let handle = spawn(&folder("llama3"), &options(dir.path(), Some(16)));
    let (after, n_cached) = ask(&handle, &whole);
    assert_eq!((after.tokens, after.logprobs), (before.tokens, before.logprobs));
    assert_eq!(n_cached as usize, (whole.prompt.len() - 1) / 16 * 16);
    assert_eq!(tier(&handle).counters.pages_moved, 0);
    handle.shutdown().unwrap();
    let handle = spawn(&folder("llama3"), &options(dir.path(), None));
    assert_eq!(ask(&handle, &whole).1, 0);
    handle.shutdown().unwrap();
    // Fewer tokens in a row than are worth it.
    let handle = spawn(&folder("llama3"), &options(dir.path(), Some(1000)));
    assert!(ask(&handle, &cut).1 <= 32);
    handle.shutdown().unwrap();
}

/// Records that are encrypted say nothing of themselves, so only what this engine stored is known.
#[test]
fn with_a_key_what_was_stored_before_a_restart_is_not_moved() {
    let dir = TempDir::new().unwrap();
    let (whole, cut, n_known) = conversations();
    let key = || Some(StoreKey::read(&[9; 32]).unwrap());
    let options = || SlowOptions { key: key(), ..options(dir.path(), Some(16)) };
    let handle = spawn(&folder("llama3"), &options());
    ask(&handle, &whole);
    handle.shutdown().unwrap();
    let handle = spawn(&folder("llama3"), &options());
    let n_cached = ask(&handle, &cut).1 as usize;
    assert!(n_cached < n_known / 16 * 16, "{n_cached}");
    handle.shutdown().unwrap();
}

#[test]
fn moving_needs_a_disk_and_attention_to_everything() {
    let mut engine = load_topk(&folder("llama3"), POOL, &EngineOptions::default(), 10, None);
    let dir = TempDir::new().unwrap();
    let slow = SlowOptions { disk: None, ..options(dir.path(), Some(16)) };
    assert!(matches!(engine.keep_pages(&slow), Err(DiskError::NoRows)));
    let policy = "hata:64,k=12,sinks=4,recent=8".parse().unwrap();
    let topk = nuthatch_engine::TopKOptions {
        policies: vec![policy],
        profile: None,
        text: (0..64).map(|i| TokenId(i * 7 % 90)).collect(),
        offload: None,
    };
    let mut engine = load_topk(&folder("llama3"), POOL, &EngineOptions::default(), 10, Some(&topk));
    let error = engine.keep_pages(&options(dir.path(), Some(16))).unwrap_err();
    assert!(matches!(error, DiskError::NoRows), "{error}");
}
