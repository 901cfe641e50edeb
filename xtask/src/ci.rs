//! Every lane a change must pass, in the order in which they fail cheapest.
//!
//! What gets built, so that the whole stays quick on two cores: clippy checks the workspace once, and
//! everything else shares the dev build. No lane builds the workspace in a profile of its own.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::args::Args;
use crate::{crash, fmt, kernels, shell, smoke, test, tidy};

/// A named check.
struct Lane {
    name: &'static str,
    check: fn() -> Result<()>,
}

const LANES: &[Lane] = &[
    Lane { name: "fmt", check: || fmt::format(true) },
    Lane { name: "tidy", check: tidy::check },
    Lane { name: "clippy", check: clippy },
    Lane { name: "test", check: || test::tests(&[]) },
    Lane { name: "doc test", check: test::doc_tests },
    Lane { name: "doc", check: doc },
    Lane { name: "crash", check: crash::check },
    Lane { name: "kernels", check: kernels::check },
    Lane { name: "smoke", check: smoke::check },
];

/// How one lane ended.
enum Ending {
    Passed(Duration),
    Failed(Duration),
    NotRun,
}

/// Runs the lanes until the first failure and prints what each took.
///
/// `--only LANE` runs one of them, `--skip LANE` leaves one out.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let only: Option<String> = args.value("--only")?;
    let skip: Option<String> = args.value("--skip")?;
    args.finish()?;
    for name in only.iter().chain(&skip) {
        if !LANES.iter().any(|lane| lane.name == name) {
            bail!("no lane named {name:?}");
        }
    }
    let start = shell::now();
    let mut endings = Vec::new();
    let mut failure = None;
    for lane in LANES {
        let wanted = only.as_ref().is_none_or(|name| name == lane.name)
            && skip.as_ref().is_none_or(|name| name != lane.name);
        if failure.is_some() || !wanted {
            endings.push((lane.name, Ending::NotRun));
            continue;
        }
        println!("\n=== {} ===", lane.name);
        let lane_start = shell::now();
        let outcome = (lane.check)();
        let time = lane_start.elapsed();
        println!("=== {}: {} in {}", lane.name, verdict(outcome.is_ok()), shell::pretty(time));
        match outcome {
            Ok(()) => endings.push((lane.name, Ending::Passed(time))),
            Err(error) => {
                endings.push((lane.name, Ending::Failed(time)));
                failure = Some((lane.name, error));
            }
        }
    }
    summary(&endings, start.elapsed());
    match failure {
        None => Ok(()),
        Some((name, error)) => Err(error.context(format!("lane {name} failed"))),
    }
}

fn summary(endings: &[(&str, Ending)], total: Duration) {
    println!("\n{:<10}{:<10}{:>12}", "lane", "result", "time");
    for (name, ending) in endings {
        let (word, time) = match ending {
            Ending::Passed(time) => (verdict(true), shell::pretty(*time)),
            Ending::Failed(time) => (verdict(false), shell::pretty(*time)),
            Ending::NotRun => ("not run", String::new()),
        };
        println!("{name:<10}{word:<10}{time:>12}");
    }
    println!("{:<20}{:>12}", "all", shell::pretty(total));
}

fn verdict(passed: bool) -> &'static str {
    if passed { "passed" } else { "FAILED" }
}

fn clippy() -> Result<()> {
    shell::run(shell::cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--quiet",
        "--",
        "-D",
        "warnings",
    ]))
}

fn doc() -> Result<()> {
    let mut command = shell::cargo();
    command.args(["doc", "--workspace", "--no-deps", "--document-private-items", "--quiet"]);
    shell::run(command.env("RUSTDOCFLAGS", "-D warnings"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_have_distinct_names() {
        for (at, lane) in LANES.iter().enumerate() {
            assert!(LANES[..at].iter().all(|other| other.name != lane.name), "{}", lane.name);
        }
    }
}
