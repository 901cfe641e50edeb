//! The binary on the real default model: what a user does first, and what it promises.
//!
//! The dev build serves, because the tests have made it already and its kernels are optimised as the
//! release's are; `cargo xtask smoke --release` takes the other.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::args::Args;
use crate::{clients, shell};

const QUESTION: &str = "Why do transformers cache keys and values?";

/// The chore.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let is_release = args.flag("--release");
    args.finish()?;
    if is_release { check_binary(&shell::release_binary()?) } else { check() }
}

/// The lane.
pub(crate) fn check() -> Result<()> {
    check_binary(&shell::dev_binary()?)
}

fn check_binary(nuthatch: &Path) -> Result<()> {
    greedy(nuthatch)?;
    sampled(nuthatch)?;
    plan(nuthatch)?;
    bench(nuthatch)?;
    errors(nuthatch)?;
    clients::check(nuthatch)
}

fn command(nuthatch: &Path, words: &[&str]) -> Command {
    let mut command = shell::command(nuthatch);
    command.args(words);
    command
}

fn answer(nuthatch: &Path, words: &[&str]) -> Result<String> {
    let mut all = vec!["run", QUESTION, "--max-tokens", "48"];
    all.extend(words);
    let text = shell::capture(&mut command(nuthatch, &all))?;
    ensure!(!text.trim().is_empty(), "an empty answer to {words:?}");
    Ok(text)
}

/// The first run may fetch the model, so its progress goes to the terminal.
fn greedy(nuthatch: &Path) -> Result<()> {
    println!("$ nuthatch run {QUESTION:?} --greedy --max-tokens 48");
    shell::run(command(nuthatch, &["pull"]).stdout(std::process::Stdio::null()))?;
    let first = answer(nuthatch, &["--greedy"])?;
    println!("{}\n", first.trim_end());
    let words = first.split_whitespace().count();
    ensure!(words >= 8, "an answer of {words} words");
    ensure!(first == answer(nuthatch, &["--greedy"])?, "two greedy runs gave different answers");
    Ok(())
}

fn sampled(nuthatch: &Path) -> Result<()> {
    let draw = |seed: &str| answer(nuthatch, &["--temperature", "0.9", "--seed", seed]);
    let first = draw("7")?;
    ensure!(first == draw("7")?, "the same seed gave different answers");
    ensure!(first != draw("8")?, "different seeds gave the same answer");
    println!("same seed, same answer: yes");
    Ok(())
}

fn plan(nuthatch: &Path) -> Result<()> {
    let table =
        shell::capture(&mut command(nuthatch, &["plan", "--context", "8K", "--batch", "8"]))?;
    println!("\n{}", table.trim_end());
    ensure!(table.contains("GQA"), "the plan does not speak of GQA");
    Ok(())
}

fn bench(nuthatch: &Path) -> Result<()> {
    let words = ["bench", "--prompt", "64", "--gen", "16", "--json", "-"];
    let text = shell::capture(&mut command(nuthatch, &words))?;
    let result: Value = serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))?;
    let tests = result["tests"].as_array().context("a bench result without tests")?;
    for name in ["pp", "tg"] {
        let test = tests.iter().find(|test| test["name"] == name);
        let speed = test.and_then(|test| test["tokens_per_s"][0].as_f64());
        let speed = speed.with_context(|| format!("bench did not measure {name}: {text}"))?;
        ensure!(speed > 0.0, "{name} ran at {speed} tokens/s");
        println!("{name}: {speed:.0} tokens/s");
    }
    Ok(())
}

/// A bad input is an error with a name, never a panic.
fn errors(nuthatch: &Path) -> Result<()> {
    let folder = shell::target_dir().join("smoke");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let hostile = folder.join("hostile.gguf");
    std::fs::write(&hostile, b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff")?;
    for model in [folder.join("missing.gguf"), hostile] {
        let output =
            shell::output(command(nuthatch, &["run", "--prompt", "Hi", "--model"]).arg(&model))?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            bail!("{} was accepted", model.display());
        }
        ensure!(!complaint.contains("panicked"), "a panic: {complaint}");
        let name = model.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        ensure!(complaint.contains(&*name), "the error does not name {name}: {complaint}");
        println!("refused as it should be: {}", complaint.lines().next().unwrap_or_default());
    }
    Ok(())
}
