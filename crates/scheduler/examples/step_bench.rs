//! What the scheduler and the cache take for one step, without a model.
//!
//! ```text
//! cargo run --release -p nuthatch-scheduler --example step_bench [SEQUENCES [HOST_PAGES]]
//! ```
//!
//! Every sequence decodes, so that a step plans and commits one token for each; a page boundary, and
//! with it an entry of the prefix tree, comes every sixteen steps for each of them. Prints one line
//! of JSON for each number of sequences: microseconds for plan and commit together, without the
//! executor's part.

#![expect(clippy::print_stdout, reason = "the figures are what this program is for")]

use std::time::Duration;

use nuthatch_cache::{Cache, Options};
use nuthatch_scheduler::{Config, Scheduler, Submission};
use nuthatch_types::{
    Clock, Limits, Sampled, Sampling, SeqId, StepPlan, StepResult, SystemClock, TokenId,
};

const N_PROMPT: u32 = 100;
const N_WARM: usize = 20;
const N_STEPS: usize = 300;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arg = |i| std::env::args().nth(i).map(|n| n.parse::<u32>()).transpose();
    let (asked, n_host_pages) = (arg(1)?, arg(2)?.unwrap_or(0));
    for n_seqs in asked.map_or(vec![1, 64, 256, 1024, 4096], |n_seqs| vec![n_seqs]) {
        let times = run(n_seqs, n_host_pages)?;
        let sorted = |part: fn(&Times) -> Duration| {
            let mut micros: Vec<f64> = times.iter().map(|t| part(t).as_secs_f64() * 1e6).collect();
            micros.sort_unstable_by(f64::total_cmp);
            micros
        };
        let steps = sorted(|times| times.plan + times.commit);
        let (plans, commits) = (sorted(|times| times.plan), sorted(|times| times.commit));
        let at = |micros: &[f64], percent: usize| micros[(micros.len() - 1) * percent / 100];
        println!(
            "{{\"sequences\": {n_seqs}, \"step_us_median\": {:.1}, \"step_us_p10\": {:.1}, \
             \"step_us_p90\": {:.1}, \"plan_us_median\": {:.1}, \"commit_us_median\": {:.1}}}",
            at(&steps, 50),
            at(&steps, 10),
            at(&steps, 90),
            at(&plans, 50),
            at(&commits, 50),
        );
    }
    Ok(())
}

/// What one step took.
struct Times {
    plan: Duration,
    commit: Duration,
}

/// The times of each step.
fn run(n_seqs: u32, n_host_pages: u32) -> Result<Vec<Times>, Box<dyn std::error::Error>> {
    let n_tokens = N_PROMPT + (N_WARM + N_STEPS) as u32 + 8;
    let n_pages = n_seqs * n_tokens.div_ceil(16);
    let sizes = nuthatch_cache::Config { page_len: 16, n_pages, n_host_pages };
    let cache = Cache::with_options(sizes, Options::default())?;
    let config = Config {
        max_batched_tokens: n_seqs * N_PROMPT,
        max_seqs: n_seqs,
        max_waiting: n_seqs,
        max_context: n_tokens,
        window: None,
    };
    let mut scheduler = Scheduler::new(config, cache)?;
    for seq in 0..n_seqs {
        scheduler.submit(Submission {
            seq: SeqId(u64::from(seq)),
            // Different lengths, so that page boundaries are spread over the steps.
            prompt: (0..N_PROMPT - seq % 16).map(|i| TokenId(seq * 31 + i)).collect(),
            sampling: Sampling::greedy(),
            limits: Limits { max_tokens: u32::MAX, ..Limits::default() },
        })?;
    }
    let clock = SystemClock::start();
    let mut times = Vec::new();
    for n_step in 0..N_WARM + N_STEPS {
        let begin = clock.now();
        let plan = scheduler.plan().ok_or("no sequence is left")?;
        let planned = clock.now();
        let result = answer(&plan, n_step as u32);
        drop(plan);
        let answered = clock.now();
        let outputs = scheduler.commit(result);
        let end = clock.now();
        drop(outputs);
        if n_step >= N_WARM {
            times.push(Times { plan: planned - begin, commit: end - answered });
        }
    }
    Ok(times)
}

/// One sampled token for each sequence that asked for it.
fn answer(plan: &StepPlan, n_step: u32) -> StepResult {
    let sample = |seq: SeqId| {
        let token = TokenId(seq.0 as u32 + n_step);
        Sampled { seq, token, logprob: None, top: Vec::new() }
    };
    let asked = plan.seqs.sampled();
    let sampled = asked.map(|step| sample(step.seq)).collect();
    StepResult { sampled, ..StepResult::default() }
}
