//! The page at `/`, and the numbers behind it.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{Html, IntoResponse as _, Response};
use nuthatch_engine::{Branch, CachePicture, EngineStats, SlotUse};
use nuthatch_tokens::DecodeOptions;
use serde_json::{Value, json as object};

use crate::app::App;
use crate::error::{Handled, json};
use crate::metrics::SHARES;

/// The page: one file, which fetches nothing but numbers.
const PAGE: &str = include_str!("dashboard.html");
/// What the page may do: nothing but what is in it, and asking this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'";
/// Cells of the map of one tier; larger pools have several pages to a cell.
const N_CELLS: usize = 2048;
/// Beginnings that are told.
const N_BRANCHES: usize = 8;
/// Tokens of each that are told.
const N_BRANCH_TOKENS: usize = 64;

/// `GET /`.
pub(crate) async fn page() -> Response {
    ([(header::CONTENT_SECURITY_POLICY, POLICY)], Html(PAGE)).into_response()
}

/// `GET /dashboard.json`.
pub(crate) async fn data(State(app): State<Arc<App>>) -> Handled<Response> {
    let stats = app.ask(|reply| app.engine.ask_stats(reply)).await?;
    let ask = |reply| app.engine.ask_picture(N_BRANCHES, N_BRANCH_TOKENS, reply);
    let picture = app.ask(ask).await?;
    Ok(json(&numbers(&app, &stats, &picture)))
}

fn numbers(app: &App, stats: &EngineStats, picture: &CachePicture) -> Value {
    let (scheduler, cache) = (&stats.scheduler, &stats.scheduler.cache);
    let counts = app.metrics.counts();
    let now = app.engine.now();
    let config = &app.config;
    let branches: Vec<Value> = picture.branches.iter().map(|b| branch(app, b)).collect();
    object!({
        "model": app.model(),
        "version": env!("CARGO_PKG_VERSION"),
        "device": config.device,
        "max_model_len": config.endpoint.max_context,
        "uptime_s": now.saturating_sub(app.metrics.started).as_secs_f64(),
        "now_s": now.as_secs_f64(),
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "swapped": scheduler.swapped,
        "prompt_tokens": counts.prompt_tokens.sum(),
        "cached_tokens": counts.n_cached,
        "computed_tokens": scheduler.counters.computed_tokens,
        "generation_tokens": scheduler.counters.sampled_tokens,
        "hit_rate": cache.counters.hit_fraction(),
        "ttft_s": counts.recent_first.percentiles(now, SHARES),
        "itl_s": counts.recent_next.percentiles(now, SHARES),
        "answers": counts.ended,
        "clients_left": counts.clients_left,
        "preemptions": {
            "all": scheduler.counters.preemptions,
            "swap": scheduler.counters.preemptions_swap,
            "recompute": scheduler.counters.preemptions_recompute,
            "pages_short": scheduler.counters.preemptions_short,
            "displaced": scheduler.counters.displacements,
        },
        "misses": {
            "never_seen": cache.counters.missed_never_seen,
            "evicted": cache.counters.missed_evicted,
            "salt": cache.counters.missed_salt,
            "diverged": cache.counters.missed_diverged,
        },
        "pages": {
            "page_len": cache.page_len,
            "kv_dtype": config.sizes.kv_dtype.to_string(),
            "device": { "total": cache.pages_total, "free": cache.pages_free,
                        "used": cache.pages_used, "idle": cache.pages_idle },
            "host": { "total": cache.host_total, "free": cache.host_free,
                      "used": cache.host_used, "idle": cache.host_idle },
            "map": { "device": cells(&picture.device), "host": cells(&picture.host) },
        },
        "branches": branches,
    })
}

fn branch(app: &App, branch: &Branch) -> Value {
    let options = DecodeOptions { skip_special: false, continuing: false };
    let text = app.config.endpoint.words.tokenizer.decode(&branch.tokens, options);
    object!({
        "text": (!branch.tokens.is_empty()).then_some(text),
        "tokens": branch.n_tokens,
        "hits": branch.n_hits,
        "holders": branch.n_holders,
        "host": branch.is_on_host,
    })
}

/// One letter for each cell, for what most of its pages are; of equals for the busier.
fn cells(slots: &[SlotUse]) -> String {
    use SlotUse::{Free, Held, Idle, Open, Shared};
    let kinds = [(Free, '.'), (Idle, 'i'), (Open, 'o'), (Held, 'h'), (Shared, 's')];
    let n_in_cell = slots.len().div_ceil(N_CELLS).max(1);
    let letter = |cell: &[SlotUse]| {
        let n_of = |kind: SlotUse| cell.iter().filter(|&&slot| slot == kind).count();
        let most = kinds.iter().max_by_key(|(kind, _)| n_of(*kind));
        most.map_or('.', |&(_, letter)| letter)
    };
    slots.chunks(n_in_cell).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_pools_have_several_pages_to_a_cell() {
        use SlotUse::{Free, Held, Idle, Open, Shared};
        assert_eq!(cells(&[Free, Idle, Open, Held, Shared]), ".iohs");
        let mut many = vec![Free; N_CELLS * 3];
        many[4..6].fill(Idle);
        many[6] = Held;
        assert_eq!(&cells(&many)[..3], ".i.");
        assert_eq!(cells(&many).len(), N_CELLS);
        assert_eq!(cells(&[]), "");
    }

    #[test]
    fn the_page_fetches_nothing_from_elsewhere() {
        let rest = PAGE.replace("http://www.w3.org/2000/svg", "");
        assert!(!rest.contains("http:") && !rest.contains("https:") && !rest.contains("src=\"/"));
    }
}
