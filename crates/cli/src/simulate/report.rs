//! What was simulated and what came of it: tables for people, JSON for scripts.

use serde::Serialize;

use super::cost::Cost;
use super::metrics::Metrics;
use super::workload::Workload;
use super::{PAGE_LEN, Run};
use crate::args::{HostReadsArg, SimulateArgs, WorkloadArgs};
use crate::config::BatchSizes;
use crate::table::{Align, Table};

/// Everything that one call says.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    version: &'static str,
    seed: u64,
    workload: &'a WorkloadArgs,
    n_requests: usize,
    /// Tokens of one page.
    page_len: u32,
    n_pages: u32,
    n_host_pages: u32,
    host_reads: HostReadsArg,
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    cost_us: Cost,
    policies: Vec<PolicyReport<'a>>,
}

#[derive(Debug, Serialize)]
struct PolicyReport<'a> {
    policy: &'static str,
    #[serde(flatten)]
    metrics: &'a Metrics,
    /// Seconds between the points of the curves.
    bin_s: f64,
    /// `[bin][tenant]` tokens of answers.
    served: &'a [Vec<u64>],
    /// `[bin]` most pages that sequences held.
    pages_used: &'a [u32],
}

impl<'a> Report<'a> {
    pub(super) fn new(
        args: &'a SimulateArgs,
        batch: BatchSizes,
        workload: &Workload,
        runs: &'a [Run],
    ) -> Self {
        let policy = |run: &'a Run| PolicyReport {
            policy: run.policy.name(),
            metrics: &run.metrics,
            bin_s: run.outcome.curves.bin.as_secs_f64(),
            served: &run.outcome.curves.served,
            pages_used: &run.outcome.curves.pages_used,
        };
        Report {
            version: env!("CARGO_PKG_VERSION"),
            seed: args.seed,
            workload: &args.workload,
            n_requests: workload.requests.len(),
            page_len: PAGE_LEN,
            n_pages: args.pages,
            n_host_pages: args.host_pages,
            host_reads: args.host_reads,
            max_num_seqs: batch.n_seqs,
            max_num_batched_tokens: batch.max_rows,
            cost_us: args.cost,
            policies: runs.iter().map(policy).collect(),
        }
    }

    /// For scripts.
    pub(super) fn json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        format!(
            "{} requests in {} s of {} tenants, seed {}; {} pages of {} tokens, {} on the host, {} sequences, steps \
             of {} tokens; microseconds: {}\n\n{}\nSeconds to the first token, by who asks\n\n{}",
            self.n_requests,
            self.workload.duration,
            self.workload.tenants,
            self.seed,
            self.n_pages,
            self.page_len,
            self.n_host_pages,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.cost_us,
            self.overview().markdown(),
            self.by_who().markdown(),
        )
    }

    fn overview(&self) -> Table {
        // Without a host tier nobody spills.
        let has_host = self.n_host_pages > 0;
        let columns = ["TTFT mean", "p50", "p99", "end mean", "p99", "tokens/s", "preempted"];
        let spilled = has_host.then_some("spilled");
        let last = ["prefix hits", "fairness", "worst tenant"];
        let numbers = columns.into_iter().chain(spilled).chain(last);
        let head = std::iter::once(("policy", Align::Left));
        let mut table = Table::new(head.chain(numbers.map(|name| (name, Align::Right))));
        for PolicyReport { policy, metrics, .. } in &self.policies {
            let hits = 100.0 * metrics.cached_tokens as f64 / metrics.prompt_tokens.max(1) as f64;
            let mut cells = vec![
                (*policy).to_owned(),
                seconds(metrics.ttft.mean),
                seconds(metrics.ttft.p50),
                seconds(metrics.ttft.p99),
                seconds(metrics.end_to_end.mean),
                seconds(metrics.end_to_end.p99),
                format!("{:.1}", metrics.tokens_per_s),
                format!("{} ({} swapped)", metrics.preemptions, metrics.swaps),
            ];
            cells.extend(has_host.then(|| metrics.spilled.to_string()));
            cells.extend([
                format!("{} ({hits:.0} %)", metrics.cached_tokens),
                format!("{:.3}", metrics.fairness),
                seconds(metrics.worst_tenant_ttft),
            ]);
            table.push(cells);
        }
        table
    }

    fn by_who(&self) -> Table {
        let mut columns = vec!["urgent", "p99", "heavy tenant", "p99", "the others", "p99"];
        let has_long = self.workload.long_share > 0.0;
        columns.extend(["long prompts", "p99"].iter().filter(|_| has_long));
        columns.push("refused");
        let head = std::iter::once(("policy", Align::Left));
        let rest = columns.into_iter().map(|name| (name, Align::Right));
        let mut table = Table::new(head.chain(rest));
        for PolicyReport { policy, metrics, .. } in &self.policies {
            let spreads = [metrics.ttft_urgent, metrics.ttft_heavy, metrics.ttft_others];
            let long = Some(metrics.ttft_long).filter(|_| has_long);
            let spreads: Vec<_> = spreads.into_iter().chain(long).collect();
            let cells = spreads.iter().flat_map(|s| [seconds(s.mean), seconds(s.p99)]);
            let refused = metrics.refused.to_string();
            table.push(std::iter::once((*policy).to_owned()).chain(cells).chain([refused]));
        }
        table
    }
}

fn seconds(seconds: f64) -> String {
    format!("{seconds:.2}")
}
