//! `nuthatch simulate`: what each scheduling policy does to the same requests.
//!
//! ```text
//!   workload --arrivals--> world: scheduler.plan -> cost of the plan -> scheduler.commit --> metrics
//! ```
//!
//! The scheduler and the cache are the real ones. There is no model: an answer's tokens are fixed
//! beforehand, and a step takes as long as `cost` says.

mod cost;
mod metrics;
mod plots;
mod report;
mod workload;
mod world;

use std::io::{self, Write as _};
use std::path::Path;

use anyhow::Context as _;
use nuthatch_cache::Options;
use nuthatch_scheduler::Config;

use crate::args::{PolicyArg, SimulateArgs};
use crate::config::{BATCH_SEQS, BatchSizes, prefix_caching};
use metrics::Metrics;
use report::Report;
use workload::Workload;
use world::{Outcome, Setup, simulate};

pub(crate) use cost::{Cost, parse_cost};

/// Tokens of one page.
const PAGE_LEN: u32 = 16;

/// How one policy did.
#[derive(Debug)]
pub(crate) struct Run {
    policy: PolicyArg,
    outcome: Outcome,
    metrics: Metrics,
}

/// Runs the command.
pub(crate) fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    let batch = BatchSizes::new(&args.scheduling, BATCH_SEQS)?;
    let workload = Workload::new(&args.workload, args.seed)?;
    let mut runs = Vec::new();
    for &policy in &args.policies {
        let outcome = simulate(&workload, &setup(args, batch, policy)?);
        let metrics = Metrics::new(&workload, &outcome);
        runs.push(Run { policy, outcome, metrics });
    }
    if let Some(folder) = &args.plots {
        write_plots(folder, &workload, &runs)
            .with_context(|| format!("cannot write plots to {}", folder.display()))?;
    }
    let report = Report::new(args, batch, &workload, &runs);
    let mut out = io::stdout().lock();
    match args.json.as_deref() {
        Some(path) if path == Path::new("-") => {
            return Ok(out.write_all(report.json()?.as_bytes())?);
        }
        Some(path) => std::fs::write(path, report.json()?)
            .with_context(|| format!("cannot write {}", path.display()))?,
        None => {}
    }
    Ok(out.write_all(report.text().as_bytes())?)
}

fn setup(args: &SimulateArgs, batch: BatchSizes, policy: PolicyArg) -> anyhow::Result<Setup> {
    let (max_seqs, policy) = batch.policy(policy)?;
    let scheduler = Config {
        max_batched_tokens: batch.max_rows,
        max_seqs,
        max_waiting: u32::MAX,
        max_context: args.workload.max_model_len,
        window: None,
    };
    let (n_pages, n_host_pages) = (args.pages, args.host_pages);
    let cache = nuthatch_cache::Config { page_len: PAGE_LEN, n_pages, n_host_pages };
    scheduler.validate()?;
    cache.validate()?;
    let options = Options {
        prefix: prefix_caching(&args.scheduling.cache),
        eviction: args.scheduling.cache.eviction_policy.into(),
        host_reads: args.host_reads.into(),
        ..Options::default()
    };
    Ok(Setup { scheduler, cache, options, policy, cost: args.cost })
}

fn write_plots(folder: &Path, workload: &Workload, runs: &[Run]) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for (name, svg) in plots::all(workload, runs) {
        std::fs::write(folder.join(name), svg)?;
    }
    Ok(())
}
