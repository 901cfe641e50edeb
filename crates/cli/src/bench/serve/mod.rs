//! `nuthatch bench serve`: a load on any OpenAI-compatible server, measured in vLLM's terms.
//!
//! ```text
//!   arrivals --> a seat, if there are few --> one thread a request --> outcomes --> figures
//!                                                  (blocking HTTP)
//! ```

mod client;
mod dataset;
mod figures;
mod memory;

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use crossbeam_channel::{Sender, bounded, unbounded};
use nuthatch_types::{Clock as _, SystemClock};

use self::client::{Client, Outcome};
use self::dataset::Dataset;
use self::figures::Report;
use self::memory::MemoryWatch;
use crate::args::BenchServeArgs;
use crate::config::ConfigError;
use crate::interrupt::Interrupt;
use crate::random::Random;

/// The stack of a thread that waits for one answer.
const STACK_BYTES: usize = 256 << 10;
/// How often the one who waits looks whether it is to stop.
const POLL: Duration = Duration::from_millis(100);

/// Runs the command.
pub(crate) fn run(args: &BenchServeArgs, interrupt: &Interrupt) -> anyhow::Result<()> {
    check(args)?;
    let clock = Arc::new(SystemClock::start());
    let client = Arc::new(Client::new(args, Arc::clone(&clock))?);
    let dataset = Dataset::new(args, client.model())?;
    // What goes wrong always is known before a thousand threads find out.
    for i in 0..args.num_warmups {
        let outcome = client.ask(&dataset.request(u64::MAX - u64::from(i)));
        if let Some(error) = outcome.error {
            anyhow::bail!("{} does not answer: {error}", args.base_url);
        }
    }
    let memory =
        args.watch_pid.map(|pid| MemoryWatch::start(pid, Arc::clone(&clock))).transpose()?;
    let running = interrupt.begin();
    let begin = clock.now();
    let outcomes = load(args, &client, &dataset, &clock, interrupt)?;
    let elapsed = clock.now() - begin;
    drop(running);
    let report = Report::new(args, client.model(), elapsed, &outcomes);
    print(args.json.as_deref(), &report.with_memory(memory.map(MemoryWatch::stop)))?;
    ensure!(report.completed() > 0, "no request was answered");
    Ok(())
}

fn check(args: &BenchServeArgs) -> Result<(), ConfigError> {
    let counts = [
        ("--num-prompts", args.num_prompts),
        ("--random-input-len", args.random_input_len),
        ("--random-output-len", args.random_output_len),
        ("--num-prefixes", args.num_prefixes),
        ("--max-concurrency", args.max_concurrency.unwrap_or(1)),
    ];
    if let Some((flag, _)) = counts.into_iter().find(|&(_, n)| n == 0) {
        return Err(ConfigError::Zero(flag));
    }
    let is_positive = |value: f64| value > 0.0;
    if !is_positive(args.request_rate) {
        return Err(ConfigError::Zero("--request-rate"));
    }
    if !args.duration.is_none_or(|seconds| is_positive(seconds) && seconds.is_finite()) {
        return Err(ConfigError::Zero("--duration"));
    }
    Ok(())
}

/// Sends all requests at their times, and waits for all answers.
fn load(
    args: &BenchServeArgs,
    client: &Arc<Client>,
    dataset: &Dataset,
    clock: &SystemClock,
    interrupt: &Interrupt,
) -> anyhow::Result<Vec<Outcome>> {
    let begin = clock.now();
    let mut random = Random::new(args.seed ^ 0xa11_71fe);
    let mut arrival = Duration::ZERO;
    let n_requests = match args.duration {
        Some(_) => u64::MAX,
        None => dataset.len().unwrap_or(u64::MAX).min(u64::from(args.num_prompts)),
    };
    // A seat is taken by sending into the channel and given back by receiving from it.
    let (seats, leaving) = bounded(args.max_concurrency.unwrap_or(u32::MAX).min(1 << 16) as usize);
    let (sender, outcomes) = unbounded();
    for i in 0..n_requests {
        if args.request_rate.is_finite() {
            arrival += Duration::from_secs_f64(random.exponential(1.0 / args.request_rate));
        }
        let is_over = || {
            let is_late = |seconds| clock.now() - begin >= Duration::from_secs_f64(seconds);
            interrupt.requested() || args.duration.is_some_and(is_late)
        };
        if !wait_until(begin + arrival, clock, &is_over) || !take_seat(&seats, &is_over) {
            break;
        }
        let (client, request) = (Arc::clone(client), dataset.request(i));
        let (sender, leaving) = (sender.clone(), leaving.clone());
        let ask = move || {
            // Whoever collects them stays until all threads are gone.
            let _ = sender.send(client.ask(&request));
            let _ = leaving.recv();
        };
        let builder = std::thread::Builder::new().name("load".to_owned()).stack_size(STACK_BYTES);
        builder.spawn(ask).context("cannot start a thread for a request")?;
    }
    drop(sender);
    Ok(outcomes.iter().collect())
}

/// Waits for a time; false if it is all over before.
fn wait_until(time: Duration, clock: &SystemClock, is_over: &dyn Fn() -> bool) -> bool {
    loop {
        if is_over() {
            return false;
        }
        match time.checked_sub(clock.now()) {
            None | Some(Duration::ZERO) => return true,
            Some(rest) => std::thread::sleep(rest.min(POLL)),
        }
    }
}

/// Waits for a seat; false if it is all over before.
fn take_seat(seats: &Sender<()>, is_over: &dyn Fn() -> bool) -> bool {
    loop {
        match seats.send_timeout((), POLL) {
            Ok(()) => return true,
            Err(_) if is_over() => return false,
            Err(_) => {}
        }
    }
}

fn print(json: Option<&Path>, report: &Report) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    let Some(path) = json else {
        return Ok(out.write_all(report.table().as_bytes())?);
    };
    let mut text = serde_json::to_string_pretty(&report.json())?;
    text.push('\n');
    if path == Path::new("-") {
        return Ok(out.write_all(text.as_bytes())?);
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(out.write_all(report.table().as_bytes())?)
}
