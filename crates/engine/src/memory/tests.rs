//! Sizes of a made-up machine.

use super::*;

pub(super) const GIB: u64 = 1 << 30;

/// Llama-3-8B: 128 KiB of KV a token, 2 MiB a page.
pub(super) fn request() -> SizeRequest {
    SizeRequest {
        kv: KvShape {
            n_layers: 32,
            n_kv_heads: 8,
            head_dim: 128,
            page_len: 16,
            dtype: KvDtype::F16,
        },
        digest_page_bytes: 0,
        deciding: 0,
        weights: 16 * GIB,
        vocab: 128_256,
        row_floats: 50_000,
        window: None,
        model_context: 8192,
        max_context: None,
        max_seqs: 8,
        max_rows: 512,
        available: 32 * GIB,
        budget: Budget::Share(0.9),
        host_bytes: 0,
        host_reads: HostReads::Never,
        far: None,
    }
}

#[test]
fn pages_fill_the_budget_and_no_more_than_can_be_used() {
    let sizes = Sizes::compute(&request()).unwrap();
    assert_eq!(sizes.max_context, 8192);
    // Eight full sequences are 8 GiB, less than the 12 GiB that are left.
    assert_eq!(sizes.n_pages, 8 * 512);
    assert_eq!(sizes.kv, 8 * GIB);
    assert!(sizes.total() <= 29 * GIB);
    let sizes = Sizes::compute(&SizeRequest { max_seqs: 64, ..request() }).unwrap();
    assert!(sizes.total() <= (32.0 * 0.9 * GIB as f64) as u64);
    assert!(sizes.total() + 2 * (1 << 20) > (32.0 * 0.9 * GIB as f64) as u64);
    let kv = Budget::KvBytes(GIB + 5);
    let sizes = Sizes::compute(&SizeRequest { budget: kv, ..request() }).unwrap();
    assert_eq!(sizes.kv, GIB);
    assert_eq!(sizes.cache().capacity(), 8192);
    assert_eq!(sizes.scheduler().validate(), Ok(()));
    assert_eq!(sizes.capacity().table_len(), 512);
}

#[test]
fn host_pages_are_counted_and_taken_from_the_same_memory() {
    let swap = SizeRequest { host_bytes: 3 * GIB + 5, max_seqs: 64, ..request() };
    let sizes = Sizes::compute(&swap).unwrap();
    assert_eq!((sizes.n_host_pages, sizes.host_kv), (3 * 512, 3 * GIB));
    assert_eq!(sizes.capacity().n_slots, sizes.n_pages + 3 * 512);
    assert_eq!(sizes.cache().slots().host, 3 * 512);
    let without = Sizes::compute(&SizeRequest { host_bytes: 0, ..swap }).unwrap();
    assert!(without.n_pages - sizes.n_pages >= 3 * 512);
    assert!(sizes.total() <= (32.0 * 0.9 * GIB as f64) as u64);
    let greedy = SizeRequest { host_bytes: 20 * GIB, ..request() };
    let error = Sizes::compute(&greedy).unwrap_err();
    assert!(matches!(error, MemoryError::Weights { host_bytes, .. } if host_bytes == 20 * GIB));
    let greedy = SizeRequest { budget: Budget::KvBytes(GIB), host_bytes: u64::MAX, ..request() };
    assert!(matches!(Sizes::compute(&greedy), Err(MemoryError::Weights { .. })));
    let greedy = SizeRequest { budget: Budget::KvBytes(GIB), host_bytes: 15 * GIB, ..request() };
    assert!(matches!(Sizes::compute(&greedy), Err(MemoryError::Kv { .. })));
}

#[test]
fn a_context_that_was_not_asked_for_is_cut_down() {
    let long = SizeRequest { model_context: 1 << 20, budget: Budget::KvBytes(GIB), ..request() };
    assert_eq!(Sizes::compute(&long).unwrap().max_context, 8192);
    let huge = SizeRequest { available: u64::MAX / 2, max_seqs: 512, ..long };
    let huge = SizeRequest { budget: Budget::Share(1.0), max_rows: 512, ..huge };
    let sizes = Sizes::compute(&huge).unwrap();
    assert_eq!(sizes.max_context, 1 << 20);
    assert!(sizes.cache().validate().is_ok());
}

#[test]
fn a_sequence_that_may_spill_has_the_pages_of_both_tiers() {
    let long = SizeRequest {
        max_context: Some(32_768),
        budget: Budget::KvBytes(GIB),
        host_bytes: 3 * GIB,
        host_reads: HostReads::Far,
        ..request()
    };
    let sizes = Sizes::compute(&long).unwrap();
    assert_eq!((sizes.n_pages, sizes.n_host_pages), (512, 3 * 512));
    let error = Sizes::compute(&SizeRequest { host_reads: HostReads::Never, ..long }).unwrap_err();
    assert!(matches!(error, MemoryError::Context { fits: 8192, .. }));
    let error = Sizes::compute(&SizeRequest { max_context: Some(32_769), ..long }).unwrap_err();
    assert!(matches!(error, MemoryError::Context { fits: 32_768, .. }));
    let cut = SizeRequest { max_context: None, model_context: 1 << 20, ..long };
    assert_eq!(Sizes::compute(&cut).unwrap().max_context, 32_768);
    // Without a page on the device there is no engine.
    let none = SizeRequest { budget: Budget::KvBytes(0), ..long };
    assert!(matches!(Sizes::compute(&none), Err(MemoryError::Context { .. })));
}

#[test]
fn a_window_needs_its_own_pages_however_long_the_context() {
    let windowed = SizeRequest { window: Some(4096), model_context: 32_768, ..request() };
    let sizes = Sizes::compute(&windowed).unwrap();
    assert_eq!((sizes.max_context, sizes.window), (32_768, Some(4096)));
    // The window and a step of 512 tokens, with a page that is half seen at either end.
    assert_eq!(sizes.n_pages, 8 * (256 + 32 + 1));
    let one = SizeRequest { max_context: Some(32_768), ..windowed };
    let one = SizeRequest { budget: Budget::KvBytes(289 << 21), ..one };
    assert_eq!(Sizes::compute(&one).unwrap().n_pages, 289);
    let less = SizeRequest { budget: Budget::KvBytes(288 << 21), ..one };
    let error = Sizes::compute(&less).unwrap_err();
    assert!(matches!(error, MemoryError::Context { kv_needed, .. } if kv_needed == 289 << 21));
    // Not asked for, the context is cut down to what the pages hold without a window.
    let less = SizeRequest { max_context: None, ..less };
    assert_eq!(Sizes::compute(&less).unwrap().max_context, 288 * 16);
}

#[test]
fn what_the_device_decides_by_is_counted() {
    let plain = SizeRequest { max_seqs: 64, max_rows: 64, model_context: 1 << 20, ..request() };
    let request = SizeRequest { deciding: 10 * GIB, ..plain };
    let (plain, sizes) = (Sizes::compute(&plain).unwrap(), Sizes::compute(&request).unwrap());
    assert_eq!(plain.kv - sizes.kv, 10 * GIB);
    assert_eq!(plain.total(), sizes.total());
    let error = Sizes::compute(&SizeRequest { deciding: 90 * GIB, ..request }).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(", top-k attention of 64 sequences 90.0 GiB, but only"), "{text}");
}

#[test]
fn what_does_not_fit_is_told_with_numbers() {
    let asked =
        SizeRequest { max_context: Some(131_072), budget: Budget::KvBytes(4 * GIB), ..request() };
    let error = Sizes::compute(&asked).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a sequence of 131072 tokens needs 16.0 GiB of KV, but the budget has room for 4.0 \
         GiB (32768 tokens)"
    );
    let small = SizeRequest { available: 10 * GIB, ..request() };
    let error = Sizes::compute(&small).unwrap_err();
    assert!(matches!(error, MemoryError::Weights { weights, .. } if weights == 16 * GIB));
    assert!(error.to_string().starts_with("the weights need 16.0 GiB"));
    assert!(!error.to_string().contains("swap space"), "there is none: {error}");
    let small = SizeRequest { host_bytes: 2 * GIB, ..small };
    let error = Sizes::compute(&small).unwrap_err().to_string();
    assert!(error.contains(" and swap space 2.0 GiB, but only"), "{error}");
    let greedy = SizeRequest { budget: Budget::KvBytes(20 * GIB), ..request() };
    assert!(matches!(Sizes::compute(&greedy), Err(MemoryError::Kv { .. })));
    let bad = SizeRequest { budget: Budget::Share(f64::NAN), ..request() };
    assert!(matches!(Sizes::compute(&bad), Err(MemoryError::Weights { usable: 0, .. })));
    let narrow = SizeRequest { max_rows: 4, ..request() };
    assert!(matches!(Sizes::compute(&narrow), Err(MemoryError::Invalid { .. })));
}
