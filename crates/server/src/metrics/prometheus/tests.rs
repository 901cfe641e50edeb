//! Every metric is documented.

use std::time::Duration;

use nuthatch_engine::{NearSizes, TierCounters};
use nuthatch_types::{HostReads, KvDtype};

use super::*;
use crate::metrics::Metrics;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");

#[test]
fn the_document_has_every_metric() {
    let document = std::fs::read_to_string(DOCUMENT).unwrap();
    let has = |row: &str| document.lines().any(|line| line.starts_with(row));
    let types = everything();
    let types: Vec<_> = types.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    assert!(types.len() > 60, "{types:?}");
    for metric in types {
        let (name, kind) = metric.split_once(' ').unwrap();
        assert!(has(&format!("| `{name}` | {kind} |")), "docs/metrics.md has no {kind} {name}");
    }
    // `page` asks an engine and adds lines of its own, so its names are taken as they are written
    // in its file, where those of counters have no ending.
    let code = include_str!("../prometheus.rs");
    let is_ours = |word: &&str| word.starts_with("nuthatch:") || word.starts_with("vllm:");
    let is_part = |word: &str| word.ends_with([':', '_']) || word.contains('{');
    for name in code.split('"').filter(is_ours).filter(|word| !is_part(word)) {
        let rows = ["", "_total"].map(|end| format!("| `{name}{end}` |"));
        assert!(rows.iter().any(|row| has(row)), "docs/metrics.md has no {name}");
    }
}

/// The page of a server that has all that can be had.
fn everything() -> String {
    let stats = EngineStats {
        tier: Some(TierStats {
            disk: Some(DiskStats::default()),
            remote: Some(RemoteCounters::default()),
            counters: TierCounters::default(),
        }),
        topk: Some(TopKStats::default()),
        ..EngineStats::default()
    };
    let counts = Metrics::new("tiny", Duration::ZERO).counts();
    let mut page = Page::new("tiny");
    gauges(&mut page, &stats);
    counters(&mut page, &stats, &counts);
    histograms(&mut page, &counts);
    tiers(&mut page, &stats.scheduler);
    slow(&mut page, &stats.tier.unwrap(), 0);
    sparse(&mut page, &stats.topk.unwrap(), &sizes());
    service(&mut page, &stats, &counts);
    page.text
}

fn sizes() -> Sizes {
    let near = NearSizes {
        n_pages: 0,
        copies: 0,
        n_layers: 0,
        layers: 0,
        n_heads: 0,
        heads: 0,
        digests: 0,
        scales: 0,
        staged: 0,
        budget: 0,
    };
    Sizes {
        n_pages: 0,
        n_host_pages: 0,
        host_reads: HostReads::Never,
        page_len: 0,
        kv_dtype: KvDtype::F32,
        max_context: 0,
        window: None,
        max_seqs: 0,
        max_rows: 0,
        weights: 0,
        kv: 0,
        host_kv: 0,
        near: Some(near),
        working: 0,
        deciding: 0,
    }
}
