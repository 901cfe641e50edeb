//! Fuzzing: every target for a while, with `cargo fuzz`.
//!
//! Without a sanitizer a stable compiler is enough: what is fuzzed is safe code, where a fault shows
//! as a panic, an endless loop or a flood of memory. The crates' own tests run the same entry points
//! over mutated files, so a machine without cargo-fuzz still has a part of this.

use anyhow::{Result, bail, ensure};

use crate::args::Args;
use crate::shell;

/// The chore: `[TARGET] [--seconds 60]`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let wanted = args.word();
    let seconds: u32 = args.value("--seconds")?.unwrap_or(60);
    args.finish()?;
    if !shell::has_cargo_tool("fuzz") {
        bail!("cargo-fuzz is not installed: cargo install cargo-fuzz");
    }
    let targets = targets()?;
    if let Some(name) = &wanted {
        ensure!(targets.contains(name), "no target {name:?}; there are {}", targets.join(", "));
    }
    for target in targets.iter().filter(|name| wanted.as_ref().is_none_or(|wanted| wanted == *name))
    {
        println!("=== fuzz {target} for {seconds} s");
        let mut command = shell::cargo();
        command.args(["fuzz", "run", "--sanitizer", "none", target]);
        let seeds = shell::root().join("fuzz").join("seeds").join(target);
        if seeds.is_dir() {
            // The first folder receives what is found; the second is only read.
            let corpus = shell::root().join("fuzz").join("corpus").join(target);
            std::fs::create_dir_all(&corpus)?;
            command.arg(corpus).arg(seeds);
        }
        command.args(["--", &format!("-max_total_time={seconds}"), "-timeout=10"]);
        command.args(["-rss_limit_mb=2048", "-max_len=65536", "-print_final_stats=1"]);
        shell::run(&mut command)?;
    }
    Ok(())
}

/// One target for each file in `fuzz/fuzz_targets`.
fn targets() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(shell::root().join("fuzz").join("fuzz_targets"))? {
        let path = entry?.path();
        if let (Some("rs"), Some(stem)) = (
            path.extension().and_then(|end| end.to_str()),
            path.file_stem().and_then(|stem| stem.to_str()),
        ) {
            names.push(stem.to_owned());
        }
    }
    names.sort();
    Ok(names)
}
