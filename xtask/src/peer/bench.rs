//! Speed: prefill and decode of both engines, round after round.
//!
//! The engines take turns (A B A B), so that a noisy machine disturbs both; medians are compared.
//! llama.cpp runs with and without flash attention, and the better one counts.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::Bed;
use super::quiet;
use super::table::{Samples, TARGETS, Test, compare, render};
use crate::args::Args;
use crate::shell;

/// The chore.
pub(super) fn run(mut args: Args) -> Result<()> {
    let rounds: u32 = args.value("--rounds")?.unwrap_or(3);
    let file: Option<PathBuf> = args.value("--json")?;
    let check = args.flag("--check");
    let longest = if args.flag("--quick") { SHORT_TOKENS } else { u32::MAX };
    let bed = Bed::prepare(&mut args)?;
    args.finish()?;

    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    let mut peer = Value::Null;
    let mut busiest: f64 = 0.0;
    for round in 1..=rounds {
        if let Some(busy) = quiet::busy_share() {
            busiest = busiest.max(busy);
        }
        println!("round {round} of {rounds}: llama.cpp");
        let result = llama_cpp(&bed, longest)?;
        theirs.add(&result, Some("flash_attn"), 0.0)?;
        peer = json!({ "engine": result["engine"], "system": result["system"] });
        println!("round {round} of {rounds}: nuthatch");
        for (result, stolen) in nuthatch(&bed, longest)? {
            ours.add(&result, None, stolen)?;
        }
    }
    let lines = compare(&ours, &theirs);
    println!("\n{}", render(&lines));
    let quiet = busiest <= quiet::BUSY_MAX;
    if !quiet {
        eprintln!(
            "THE MACHINE WAS BUSY: others used {:.0} % of it, so this is no fair comparison",
            busiest * 100.0
        );
    }
    if let Some(file) = file {
        let record = json!({
            "what": "nuthatch against llama.cpp, one run, same file, same threads",
            "command": "cargo xtask peer llama-cpp",
            "machine": machine()?, "threads": bed.threads, "rounds": rounds, "peer": peer,
            "others_used": busiest, "fair": quiet,
            "model": bed.model.file_name().map(|name| name.to_string_lossy()),
            "table": lines.iter().map(|line| line.to_json()).collect::<Vec<_>>(),
            "samples": { "nuthatch": ours.to_json(), "llama_cpp": theirs.to_json() },
        });
        let text = serde_json::to_string_pretty(&record).context("the record")?;
        std::fs::write(&file, text + "\n").with_context(|| file.display().to_string())?;
        println!("written to {}", file.display());
    }
    if check && (!quiet || !lines.iter().all(|line| line.is_quiet())) {
        bail!("the machine was busy");
    }
    let missed = lines.iter().filter(|line| !line.met()).count();
    if check && missed > 0 {
        bail!("{missed} targets missed");
    }
    Ok(())
}

fn llama_cpp(bed: &Bed, longest: u32) -> Result<Value> {
    let (prefill, depth) = (list(prefill_tokens, longest), list(decode_depth, longest));
    let mut command = shell::command(&bed.python);
    command.arg("eval/peers/llama_cpp.py").arg("--model").arg(&bed.model);
    command.args(["--threads", &bed.threads.to_string()]);
    command.args(["--prefill", &prefill, "--depth", &depth, "--json", "-"]);
    parse(&shell::capture(command.stderr(Stdio::inherit()))?)
}

/// Prefills this short are measured as often as llama_cpp.py measures them.
const SHORT_TOKENS: u32 = 512;
const SHORT_REPEATS: u32 = 3;

/// One call for each test: they differ in their numbers of tokens and repeats.
fn nuthatch(bed: &Bed, longest: u32) -> Result<Vec<(Value, f64)>> {
    let bench = |prompt: u32, steps: u32, depth: u32, repeat: u32| {
        let mut command = shell::command(&bed.nuthatch);
        command.arg("bench").arg(&bed.model);
        command.args(["--threads", &bed.threads.to_string()]);
        for (name, number) in
            [("--prompt", prompt), ("--gen", steps), ("--depth", depth), ("--repeat", repeat)]
        {
            command.args([name, &number.to_string()]);
        }
        let (text, stolen) = quiet::stolen_during(|| shell::capture(command.args(["--json", "-"])));
        Ok::<_, anyhow::Error>((parse(&text?)?, stolen))
    };
    let mut results = Vec::new();
    for (test, steps, _) in TARGETS {
        match test {
            Test::Prefill { tokens } if tokens <= longest => {
                let repeat = if tokens <= SHORT_TOKENS { SHORT_REPEATS } else { 1 };
                results.push(bench(tokens, 0, 0, repeat)?);
            }
            Test::Decode { depth } if depth <= longest => results.push(bench(0, steps, depth, 1)?),
            Test::Prefill { .. } | Test::Decode { .. } => {}
        }
    }
    Ok(results)
}

/// The numbers of the tests of one kind, up to the longest, with commas.
fn list(number: fn(Test) -> Option<u32>, longest: u32) -> String {
    let numbers = TARGETS.iter().filter_map(|(test, _, _)| number(*test)).filter(|n| *n <= longest);
    numbers.map(|n| n.to_string()).collect::<Vec<_>>().join(",")
}

fn prefill_tokens(test: Test) -> Option<u32> {
    match test {
        Test::Prefill { tokens } => Some(tokens),
        Test::Decode { .. } => None,
    }
}

fn decode_depth(test: Test) -> Option<u32> {
    match test {
        Test::Prefill { .. } => None,
        Test::Decode { depth } => Some(depth),
    }
}

fn parse(text: &str) -> Result<Value> {
    serde_json::from_str(text).with_context(|| format!("not JSON: {text}"))
}

/// Where and when, so that a result can be read later.
fn machine() -> Result<Value> {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let cpu = cpu.and_then(|line| line.split_once(':')).map_or("unknown", |(_, name)| name.trim());
    let words = |program: &str, words: &[&str]| {
        shell::capture(shell::command(program).args(words)).map(|text| text.trim().to_owned())
    };
    Ok(json!({
        "cpu": cpu,
        "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        "system": words("uname", &["-sr"])?,
        "date": words("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"])?,
        "commit": words("git", &["describe", "--always", "--dirty"])?,
    }))
}
