//! Kills an engine with a disk tier again and again, and looks at what is left.
//!
//! A child (`crates/engine/examples/crash_load.rs`) answers requests with a small cache over a small
//! directory and is killed (`SIGKILL`) at a random moment, wherever it is. Each time the directory must
//! open, must hold no more bytes than it may and no file that is not counted, and every answer must be,
//! bit for bit, the one that is computed without a disk.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::args::Args;
use crate::shell;

/// Rounds of the lane, and of the chore unless it is told otherwise.
const ROUNDS_CI: u32 = 20;
const ROUNDS: u32 = 500;
/// How lives read and write, in turn (`--kv-disk-io`); where there is no io_uring, by threads.
const WAYS: [&str; 4] = ["auto", "threads", "auto,direct", "threads,direct"];
/// Bytes of the directory: some dozens of the model's pages, so that segments go all the time.
const BYTES_MAX: u64 = 400_000;
/// The longest that a child lives after it has begun to answer.
const LIFE_MAX: u64 = 250;

/// The chore: `[--rounds 500] [--seed 1]`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let rounds = args.value("--rounds")?.unwrap_or(ROUNDS);
    let seed = args.value("--seed")?.unwrap_or(1);
    args.finish()?;
    rounds_of(rounds, seed)
}

/// The lane.
pub(crate) fn check() -> Result<()> {
    rounds_of(ROUNDS_CI, 1)
}

fn rounds_of(rounds: u32, seed: u64) -> Result<()> {
    let child = build()?;
    let model = shell::root().join("crates/model/tests/golden/llama3");
    let dir = shell::target_dir().join(format!("crash-{}", std::process::id()));
    // What a run before this one left.
    let _ = std::fs::remove_dir_all(&dir);
    let answers = shell::capture(shell::command(&child).arg(&model))?;
    let truth: BTreeMap<u32, String> = answers
        .lines()
        .map(|line| answer(line).map(|(i, _, hash)| (i, hash)))
        .collect::<Result<_>>()?;
    ensure!(truth.len() > 10, "the child knows {} requests", truth.len());
    let mut random = seed;
    let (mut n_answers, mut n_cached, mut n_recovered) = (0_u64, 0_u64, 0_u64);
    for round in 0..rounds {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
        let io = WAYS[round as usize % WAYS.len()];
        let mut life = Life::begin(&child, &model, &dir, (random >> 1, io))?;
        n_recovered += life.check_directory(&dir).with_context(|| format!("round {round}"))?;
        life.go()?;
        std::thread::sleep(Duration::from_millis((random >> 40) % LIFE_MAX));
        for line in life.kill()? {
            let (request, cached, hash) = answer(&line)?;
            let expected = truth.get(&request).context("a request that is not known")?;
            ensure!(
                hash == *expected,
                "round {round}, seed {seed}: request {request} with {cached} cached tokens gave \
                 {hash}, not {expected}"
            );
            n_answers += 1;
            n_cached += u64::from(cached);
        }
    }
    println!(
        "{rounds} kills: {n_answers} answers, all of them right, {n_cached} of their tokens cached; \
         {n_recovered} pages were there after a kill"
    );
    let least = u64::from(rounds);
    ensure!(n_answers > least && n_recovered > least, "too little was tried");
    std::fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())
}

/// Builds the child as the tests have it.
fn build() -> Result<PathBuf> {
    let words = ["build", "--quiet", "--workspace", "--example", "crash_load"];
    shell::run(shell::cargo().args(words))?;
    let name = format!("crash_load{}", std::env::consts::EXE_SUFFIX);
    Ok(shell::target_dir().join("debug").join("examples").join(name))
}

/// A line of an answer: the request, its cached tokens, and the hash.
fn answer(line: &str) -> Result<(u32, u32, String)> {
    let words: Vec<&str> = line.split(' ').collect();
    let ["answer", request, cached, hash] = words[..] else { bail!("the child said {line:?}") };
    Ok((request.parse()?, cached.parse()?, hash.to_owned()))
}

/// A child that has opened the directory.
struct Life {
    child: Child,
    lines: Receiver<String>,
    /// Pages, bytes and segments that it found.
    found: (u64, u64, u64),
}

impl Life {
    fn begin(program: &Path, model: &Path, dir: &Path, how: (u64, &str)) -> Result<Self> {
        let mut command = shell::command(program);
        let (seed, io) = how;
        command.arg(model).arg(dir).arg(BYTES_MAX.to_string()).arg(seed.to_string()).arg(io);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().context("the child has no output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let first = lines.recv_timeout(Duration::from_secs(60));
        let first = first.context("the child did not open the directory")?;
        let words: Vec<&str> = first.split(' ').collect();
        let ["open", pages, bytes, segments] = words[..] else { bail!("the child said {first:?}") };
        let found = (pages.parse()?, bytes.parse()?, segments.parse()?);
        Ok(Life { child, lines, found })
    }

    /// Compares what is in the directory with what the child counts. Gives the pages.
    fn check_directory(&self, dir: &Path) -> Result<u64> {
        let (mut bytes, mut n_files) = (0, 0);
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().ends_with(".kvseg") {
                bytes += entry.metadata()?.len();
                n_files += 1;
            }
        }
        let (pages, counted, segments) = self.found;
        ensure!(bytes <= BYTES_MAX, "{bytes} bytes, where {BYTES_MAX} may be");
        ensure!(
            (bytes, n_files) == (counted, segments),
            "{n_files} files with {bytes} bytes, but {segments} with {counted} are counted"
        );
        Ok(pages)
    }

    /// Lets it begin.
    fn go(&mut self) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("the child has no input")?;
        Ok(writeln!(stdin)?)
    }

    /// Kills it, and gives its whole lines.
    fn kill(mut self) -> Result<Vec<String>> {
        ensure!(self.child.try_wait()?.is_none(), "the child ended by itself");
        self.child.kill()?;
        self.child.wait()?;
        let lines: Vec<String> = self.lines.iter().collect();
        // The last line may have been cut.
        let is_whole = |line: &&String| answer(line).is_ok_and(|(_, _, hash)| hash.len() == 16);
        Ok(lines.iter().filter(is_whole).cloned().collect())
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        // After an error, nobody else would.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
