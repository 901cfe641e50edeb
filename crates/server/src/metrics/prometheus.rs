//! `GET /metrics`: Prometheus's text format, under vLLM's names where there are such.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use nuthatch_engine::{
    CacheStats, DiskStats, EngineStats, RemoteCounters, SchedulerStats, Sizes, TierStats, TopKStats,
};

use super::{Counts, Histogram, REASONS};
use crate::app::App;
use crate::error::Handled;
use crate::events::FeedCounts;

/// `GET /metrics`.
pub(crate) async fn page(State(app): State<Arc<App>>) -> Handled<Response> {
    let stats = app.ask(|reply| app.engine.ask_stats(reply)).await?;
    let counts = app.metrics.counts();
    let mut page = Page::new(&app.metrics.model);
    gauges(&mut page, &stats);
    counters(&mut page, &stats, &counts);
    histograms(&mut page, &counts);
    tiers(&mut page, &stats.scheduler);
    if let Some(tier) = &stats.tier {
        slow(&mut page, tier, stats.scheduler.counters.loads_declined);
    }
    if let Some(topk) = &stats.topk {
        sparse(&mut page, topk, &app.config.sizes);
    }
    service(&mut page, &stats, &counts);
    if let Some(feed) = &app.feed {
        let FeedCounts { n_batches, n_dropped } = feed.counts();
        page.counter("nuthatch:kv_event_batches", "Batches of KV events.", n_batches);
        let what = "Batches of KV events for which there was no room.";
        page.counter("nuthatch:kv_event_batches_dropped", what, n_dropped);
    }
    let config = &app.config;
    let labels = format!(
        "block_size=\"{}\",num_gpu_blocks=\"{}\",num_cpu_blocks=\"{}\",cache_dtype=\"{}\",\
         max_model_len=\"{}\"",
        config.sizes.page_len,
        stats.scheduler.cache.pages_total,
        stats.scheduler.cache.host_total,
        config.sizes.kv_dtype,
        config.endpoint.max_context,
    );
    page.head("vllm:cache_config_info", "gauge", "How large the KV cache is.");
    page.line("vllm:cache_config_info", &labels, 1.0);
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], page.text).into_response())
}

fn gauges(page: &mut Page, stats: &EngineStats) {
    let scheduler = &stats.scheduler;
    let cache = &scheduler.cache;
    page.gauge("vllm:num_requests_running", "Sequences that run.", scheduler.running);
    page.gauge("vllm:num_requests_waiting", "Requests that wait.", scheduler.waiting);
    page.gauge("vllm:num_requests_swapped", "Requests on the host.", scheduler.swapped);
    let reason = "vllm:num_requests_waiting_by_reason";
    page.head(reason, "gauge", "Requests that wait, by why.");
    page.line(reason, "reason=\"capacity\"", f64::from(scheduler.waiting));
    page.line(reason, "reason=\"deferred\"", f64::from(scheduler.parked));
    let total = f64::from(cache.pages_total.max(1));
    let share = f64::from(cache.pages_used) / total;
    for name in ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"] {
        page.gauge(name, "Share of the KV pages that sequences hold, from 0 to 1.", share);
    }
    let host = f64::from(cache.host_used + cache.host_idle) / f64::from(cache.host_total.max(1));
    page.gauge("vllm:cpu_cache_usage_perc", "Share of the host's KV pages in use.", host);
}

fn counters(page: &mut Page, stats: &EngineStats, counts: &Counts) {
    let scheduler = &stats.scheduler.counters;
    let cache = &stats.scheduler.cache.counters;
    let hits = cache.tokens_shared + cache.tokens_copied;
    for prefix in ["vllm:", "vllm:gpu_"] {
        let what = "Tokens that were looked for in the prefix cache.";
        page.counter(&format!("{prefix}prefix_cache_queries"), what, cache.tokens_asked);
        let what = "Tokens that were found in the prefix cache.";
        page.counter(&format!("{prefix}prefix_cache_hits"), what, hits);
    }
    let rate = cache.hit_fraction();
    page.gauge("vllm:gpu_prefix_cache_hit_rate", "Hits in queries, of all time.", rate);
    page.counter("vllm:num_preemptions", "Preemptions.", scheduler.preemptions);
    let prompt = counts.prompt_tokens.sum() as u64;
    page.counter("vllm:prompt_tokens", "Tokens of prompts of ended answers.", prompt);
    let what = "Tokens of prompts that the cache held.";
    page.counter("vllm:prompt_tokens_cached", what, counts.n_cached);
    let name = "vllm:prompt_tokens_by_source_total";
    page.head(name, "counter", "Tokens of prompts, by where they came from.");
    let computed = counts.computed_tokens.sum();
    page.line(name, "source=\"local_compute\"", computed);
    page.line(name, "source=\"local_cache_hit\"", counts.n_cached as f64);
    page.counter("vllm:generation_tokens", "Tokens sampled.", scheduler.sampled_tokens);
    let name = "vllm:request_success_total";
    page.head(name, "counter", "Answers that have ended, by why.");
    for (reason, &n) in REASONS.iter().zip(&counts.ended) {
        page.line(name, &format!("finished_reason=\"{reason}\""), n as f64);
    }
}

fn histograms(page: &mut Page, counts: &Counts) {
    for (name, what, histogram) in [
        ("time_to_first_token_seconds", "Time to the first token.", &counts.time_to_first_token),
        ("inter_token_latency_seconds", "Time between two tokens.", &counts.inter_token),
        ("time_per_output_token_seconds", "Time between two tokens.", &counts.inter_token),
        (
            "request_time_per_output_token_seconds",
            "Mean time between an answer's tokens.",
            &counts.per_token,
        ),
        ("e2e_request_latency_seconds", "Time of an answer as a whole.", &counts.latency),
        ("request_queue_time_seconds", "Time that an answer waited.", &counts.queue),
        ("request_prefill_time_seconds", "Time of an answer's prompt.", &counts.prefill),
        ("request_decode_time_seconds", "Time of an answer's tokens.", &counts.decode),
        ("request_inference_time_seconds", "Time of prompt and tokens.", &counts.inference),
        ("request_prompt_tokens", "Tokens of a prompt.", &counts.prompt_tokens),
        ("request_generation_tokens", "Tokens of an answer.", &counts.generation_tokens),
        (
            "request_prefill_kv_computed_tokens",
            "Tokens of a prompt that were computed.",
            &counts.computed_tokens,
        ),
    ] {
        page.histogram(&format!("vllm:{name}"), what, histogram);
    }
}

/// What no other engine tells of its cache.
fn tiers(page: &mut Page, scheduler: &SchedulerStats) {
    let cache = &scheduler.cache;
    let name = "nuthatch:kv_pages";
    page.head(name, "gauge", "KV pages, by tier and by what they hold.");
    for (tier, state, n) in [
        ("device", "free", cache.pages_free),
        ("device", "used", cache.pages_used),
        ("device", "idle", cache.pages_idle),
        ("host", "free", cache.host_free),
        ("host", "used", cache.host_used),
        ("host", "idle", cache.host_idle),
    ] {
        page.line(name, &format!("tier=\"{tier}\",state=\"{state}\""), f64::from(n));
    }
    let what = "Places in used pages that hold no token.";
    page.gauge("nuthatch:kv_tokens_wasted", what, cache.tokens_wasted);
    labelled(
        page,
        "preemptions_by_cause",
        "Preemptions, by why.",
        "cause",
        &[
            ("pages_short", scheduler.counters.preemptions_short),
            ("displaced", scheduler.counters.displacements),
        ],
    );
    labelled(
        page,
        "preemptions_by_way",
        "Preemptions, by what became of the pages.",
        "way",
        &[
            ("swap", scheduler.counters.preemptions_swap),
            ("recompute", scheduler.counters.preemptions_recompute),
        ],
    );
    labelled(
        page,
        "recomputed_tokens",
        "Tokens computed again, by why.",
        "cause",
        &[
            ("pages_short", scheduler.counters.recomputed_short),
            ("displaced", scheduler.counters.recomputed_displaced),
            ("swap_dropped", scheduler.counters.recomputed_dropped),
        ],
    );
    moves(page, cache);
}

/// What was found in the cache, and what moved.
fn moves(page: &mut Page, cache: &CacheStats) {
    let what = "Requests by why the cache held no more of them.";
    labelled(
        page,
        "prefix_lookups",
        what,
        "reason",
        &[
            ("complete", cache.counters.found_complete),
            ("never_seen", cache.counters.missed_never_seen),
            ("evicted", cache.counters.missed_evicted),
            ("salt", cache.counters.missed_salt),
            ("diverged", cache.counters.missed_diverged),
        ],
    );
    labelled(
        page,
        "pages_moved",
        "KV pages that moved between tiers, by why.",
        "why",
        &[
            ("demoted", cache.counters.pages_demoted),
            ("promoted", cache.counters.pages_promoted),
            ("swapped_out", cache.counters.pages_swapped_out),
            ("swapped_in", cache.counters.pages_swapped_in),
            ("spilled", cache.counters.pages_spilled),
        ],
    );
    page.counter("nuthatch:pages_evicted", "KV pages given up.", cache.counters.pages_evicted);
}

/// What the slower tiers hold and did.
fn slow(page: &mut Page, tier: &TierStats, n_declined: u64) {
    let loads = [
        ("begun", tier.counters.loads),
        ("late", tier.counters.loads_late),
        ("early", tier.counters.loads_early),
        ("undone", tier.counters.loads_undone),
        ("guessed", tier.counters.guesses_missed),
    ];
    labelled(page, "disk_loads", "Loads from slower tiers.", "end", &loads);
    let what = "Requests for which computing was faster than loading.";
    page.counter("nuthatch:disk_loads_declined", what, n_declined);
    let what = "KV pages loaded from slower tiers.";
    page.counter("nuthatch:disk_pages_loaded", what, tier.counters.pages_loaded);
    let what = "Those of them whose tokens stood elsewhere.";
    page.counter("nuthatch:disk_pages_moved", what, tier.counters.pages_moved);
    if let Some(stats) = &tier.disk {
        disk(page, stats, tier.counters.saves_missed);
    }
    if let Some(counters) = &tier.remote {
        remote(page, counters);
    }
}

/// What the store somewhere else did.
fn remote(page: &mut Page, counters: &RemoteCounters) {
    let what = "Bytes written to the remote tier.";
    page.counter("nuthatch:remote_bytes_written", what, counters.bytes_written);
    page.counter("nuthatch:remote_bytes_read", "Bytes read from it.", counters.bytes_read);
    let saves = [
        ("saved", counters.pages_saved),
        ("failed", counters.saves_failed),
        ("refused", counters.saves_refused),
    ];
    labelled(page, "remote_saves", "KV pages to be saved, by what became of them.", "end", &saves);
    let reads = [
        ("read", counters.pages_read),
        ("absent", counters.missed_absent),
        ("io", counters.missed_io),
        ("defect", counters.missed_defect),
    ];
    labelled(page, "remote_reads", "KV pages asked for, by what came.", "end", &reads);
}

/// What the disk tier holds and did.
fn disk(page: &mut Page, disk: &DiskStats, n_missed: u64) {
    let counters = &disk.counters;
    page.gauge("nuthatch:disk_bytes", "Bytes of the disk tier.", disk.bytes as f64);
    page.head("nuthatch:disk_io_info", "gauge", "How the disk tier is read and written.");
    page.line("nuthatch:disk_io_info", &format!("io=\"{}\"", disk.io), 1.0);
    let what = "Bytes that the disk tier may have.";
    page.gauge("nuthatch:disk_bytes_max", what, disk.bytes_max as f64);
    page.gauge("nuthatch:disk_pages", "KV pages on the disk.", disk.pages as f64);
    page.gauge("nuthatch:disk_segments", "Files of the disk tier.", disk.segments as f64);
    let what = "Bytes written to the disk tier.";
    page.counter("nuthatch:disk_bytes_written", what, counters.bytes_written);
    page.counter("nuthatch:disk_bytes_read", "Bytes read from it.", counters.bytes_read);
    let saves = [
        ("saved", counters.pages_saved),
        ("failed", counters.saves_failed),
        ("refused", counters.saves_refused),
        ("missed", n_missed),
        ("evicted", counters.pages_evicted),
    ];
    labelled(page, "disk_saves", "KV pages to be saved, by what became of them.", "end", &saves);
    let misses = [
        ("io", counters.missed_io),
        ("torn", counters.missed_torn + counters.segments_torn),
        ("corrupt", counters.missed_corrupt + counters.records_corrupt + counters.segments_corrupt),
        ("stale", counters.missed_stale),
        ("foreign", counters.segments_foreign),
    ];
    labelled(page, "disk_misses", "What the disk tier could not use.", "reason", &misses);
}

/// Top-k attention, and what is kept near of pages that are far.
fn sparse(page: &mut Page, topk: &TopKStats, sizes: &Sizes) {
    let TopKStats { counts, near, row_bytes } = topk;
    let lookups = [("live", counts.live_lookups), ("frozen", counts.frozen_lookups)];
    let what = "Lookups of selections, by whether the head practically ever selects anew.";
    labelled(page, "topk_lookups", what, "heads", &lookups);
    let hits = [("live", counts.live_hits), ("frozen", counts.frozen_hits)];
    labelled(page, "topk_hits", "Lookups whose selection still served.", "heads", &hits);
    let what = "Lookups whose selection served once more, while the next one was made.";
    page.counter("nuthatch:topk_late", what, counts.late);
    page.counter("nuthatch:topk_selections", "Selections made.", counts.selections);
    let rows = [
        ("all", counts.rows_full),
        ("attended", counts.rows_attended),
        ("moved", counts.rows_moved),
        ("filled", near.n_filled),
    ];
    let what = "Rows, a token's key and value of one head: those of the contexts, those that were \
                attended, those that moved to working sets, those that were missing near.";
    labelled(page, "topk_rows", what, "kind", &rows);
    let moved_bytes = if near.coded_row_bytes > 0 { near.coded_row_bytes } else { *row_bytes };
    let what = "Bytes of a row in a page.";
    page.gauge("nuthatch:kv_row_bytes", what, *row_bytes as f64);
    let what = "Bytes of rows that moved to working sets or were missing near.";
    page.counter(
        "nuthatch:topk_moved_bytes",
        what,
        counts.rows_moved * moved_bytes + near.n_filled * row_bytes,
    );
    let what = "Bytes that were read from the file that pages are in, whatever for.";
    page.counter("nuthatch:kv_file_read_bytes", what, near.file_bytes);
    let link_rate = near.link_rate as f64;
    if let Some(near) = &sizes.near {
        let name = "nuthatch:kv_near_bytes";
        let what = "Bytes on the device for pages that are on the host.";
        page.head(name, "gauge", what);
        let parts = [
            ("deciding", sizes.deciding),
            ("digests", near.digests),
            ("scales", near.scales),
            ("staged", near.staged),
            ("copies", near.copies),
            ("layers", near.layers),
            ("heads", near.heads),
        ];
        for (part, bytes) in parts {
            page.line(name, &format!("part=\"{part}\""), bytes as f64);
        }
        let what = "Bytes that those parts together may take.";
        page.gauge("nuthatch:kv_near_budget_bytes", what, near.budget as f64);
        let what = "KV pages that have copies on the device.";
        page.gauge("nuthatch:kv_near_pages", what, near.n_pages);
        let bytes = sizes.host_kv as f64;
        page.gauge("nuthatch:kv_far_bytes", "Bytes of KV pages on the host.", bytes);
        let what = "Bytes that the link to the host brings in a second, measured at the start; \
                    moved bytes in a second over this are its utilisation.";
        page.gauge("nuthatch:kv_link_bytes_per_second", what, link_rate);
    }
}

/// What the server and the loop did.
fn service(page: &mut Page, stats: &EngineStats, counts: &Counts) {
    let scheduler = &stats.scheduler;
    let what = "Requests whose client left before the end.";
    page.counter("nuthatch:clients_left", what, counts.clients_left);
    page.counter("nuthatch:panics", "Requests that a panic ended.", counts.panics);
    page.counter("nuthatch:steps", "Steps computed.", scheduler.counters.steps);
    page.counter("nuthatch:refused", "Requests refused.", scheduler.counters.refused);
    let seconds = "Seconds spent in steps, and the executor's part of them.";
    page.head("nuthatch:step_seconds_total", "counter", seconds);
    for (part, time) in [("all", stats.step_time), ("execute", stats.execute_time)] {
        let label = format!("part=\"{part}\"");
        page.line("nuthatch:step_seconds_total", &label, time.as_secs_f64());
    }
    let name = "nuthatch:http_responses_total";
    page.head(name, "counter", "Responses, by status.");
    for (status, &n) in &counts.responses {
        page.line(name, &format!("status=\"{status}\""), n as f64);
    }
}

/// A counter of ours with one label.
fn labelled(page: &mut Page, name: &str, what: &str, label: &str, values: &[(&str, u64)]) {
    let name = format!("nuthatch:{name}_total");
    page.head(&name, "counter", what);
    for (value, n) in values {
        page.line(&name, &format!("{label}=\"{value}\""), *n as f64);
    }
}

/// The page as it grows.
struct Page {
    text: String,
    /// Labels that every line has.
    labels: String,
}

impl Page {
    fn new(model: &str) -> Self {
        let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        Page { text: String::new(), labels: format!("model_name=\"{model}\",engine=\"0\"") }
    }

    fn head(&mut self, name: &str, kind: &str, what: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {what}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: f64) {
        let comma = if labels.is_empty() { "" } else { "," };
        let _ = writeln!(self.text, "{name}{{{}{comma}{labels}}} {value}", self.labels);
    }

    fn gauge(&mut self, name: &str, what: &str, value: impl Into<f64>) {
        self.head(name, "gauge", what);
        self.line(name, "", value.into());
    }

    /// A counter; its name on the wire ends with `_total`, as Prometheus's clients have it.
    fn counter(&mut self, name: &str, what: &str, value: u64) {
        let name = format!("{name}_total");
        self.head(&name, "counter", what);
        self.line(&name, "", value as f64);
    }

    fn histogram(&mut self, name: &str, what: &str, histogram: &Histogram) {
        self.head(name, "histogram", what);
        for (bound, n) in histogram.cumulative() {
            let bound = if bound.is_finite() { bound.to_string() } else { "+Inf".to_owned() };
            self.line(&format!("{name}_bucket"), &format!("le=\"{bound}\""), n as f64);
        }
        self.line(&format!("{name}_sum"), "", histogram.sum());
        self.line(&format!("{name}_count"), "", histogram.count() as f64);
    }
}

#[cfg(test)]
mod tests;
