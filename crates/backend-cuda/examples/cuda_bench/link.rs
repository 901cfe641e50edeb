//! Rows that come over the link: how fast, and what a step beside them loses.

use std::error::Error;
use std::fs::File;
use std::io::{BufRead as _, BufReader};

use nuthatch_backend_cuda::Cuda;
use nuthatch_types::{KvDtype, KvShape, LayerIdx};
use serde_json::Value;

use crate::queries::Random;
use crate::rig::Rig;
use crate::step::{self, Model};
use crate::topk::kv_of;
use crate::{Outcome, Report, time};

/// Tokens from which rows are brought.
const DEPTH: usize = 131_072;
const N_HEADS: u32 = 8;

/// Times steps of one sequence of 8192 tokens alone, while the copy engine brings as much as it can, and while
/// blocks bring rows; with as many resident layers as the shape has.
pub(crate) fn beside(cuda: &Cuda, report: &mut Report, words: &[String]) -> Outcome {
    const FAR: usize = 98_304;
    let model = Model::new(cuda, step::named(words))?;
    let kv = kv_of(&model.shape);
    // The last ones are far.
    let all = KvShape { n_layers: kv.n_layers + 4, ..kv };
    let mut far = Rig::with(cuda, (all, model.shape.n_heads), (1, FAR, 1), (false, Some(&[])))?;
    far.lay_out(&[(0, FAR - 1, 1)])?;
    // 256 MiB, for longer than a step takes.
    let lists = vec![(0..65_536).map(|i| 3 * i / 2).collect(); kv.n_kv_heads as usize];
    let listed = cuda.list_rows(&far.plan, &far.kv, &lists)?;
    let beside = cuda.beside()?;
    let mut step = |what: &str, begin: &dyn Fn(usize) -> Outcome| {
        let seconds = model.time_beside(cuda, (kv, 8192), begin)?;
        let name = format!("step {}, 1 x 8192, {what}", model.shape.name);
        report.add(&name, seconds, model.bytes(&kv, 8192), 0.0);
        Outcome::Ok(())
    };
    step("alone", &|_| Ok(()))?;
    step("beside the copy engine", &|_| Ok(cuda.copy_beside(&beside, &far.kv, 256 << 20)?))?;
    for n_blocks in [4, 5, 6, 7, 8] {
        step(&format!("beside {n_blocks} blocks"), &|i| {
            let layer = LayerIdx(kv.n_layers + i as u32 % 4);
            Ok(cuda.bring_beside(&beside, (&far.plan, &far.kv), layer, &listed, n_blocks)?)
        })?;
    }
    step("alone again", &|_| Ok(()))
}

/// Times bringing rows to working sets: by several numbers of blocks, by threads of the host if there are any
/// (`threads=8`), and copies of as many bytes by the copy engine; rows of 512 bytes, with `widths` also of
/// half and twice. Their places are random, in order, of as many rows as a figure of the CLO paper has and fewer;
/// or, with `places=FILE`, those of the selections that `nuthatch eval --record-trace FILE` wrote for one
/// policy. Pages lie in a scattered order, or `ordered`.
pub(crate) fn bring(cuda: &Cuda, report: &mut Report, words: &[String]) -> Outcome {
    let has = |name: &str| words.iter().any(|word| word == name);
    let all = match words.iter().find_map(|word| word.strip_prefix("places=")) {
        Some(path) => recorded(path)?,
        None if has("short") => [512, 2048, 4096, 8192].map(made_up).into(),
        None => [64, 256, 512, 1024, 2048, 4096, 8192, 16_384].map(made_up).into(),
    };
    for head_dim in if has("widths") { vec![64, 128, 256] } else { vec![128] } {
        let (n_layers, dtype) = (4, KvDtype::F16);
        let kv = KvShape { n_layers, n_kv_heads: N_HEADS, head_dim, page_len: 16, dtype };
        let mut rig = Rig::with(cuda, (kv, 32), (1, DEPTH, 1), (has("ordered"), Some(&[])))?;
        rig.lay_out(&[(0, DEPTH - 1, 1)])?;
        let threads = cuda.threads(&rig.kv)?;
        let row_bytes = 4 * head_dim as usize;
        for Selections { lists, what } in &all {
            let n: usize = lists.iter().map(Vec::len).sum();
            let bytes = (n * row_bytes) as f64;
            let layer = |i: usize| LayerIdx(i as u32 % kv.n_layers);
            let listed = cuda.list_rows(&rig.plan, &rig.kv, lists)?;
            for blocks in [4, 5, 6, 7, 8] {
                let seconds = time(cuda, |i| {
                    Ok(cuda.bring_rows(&rig.plan, layer(i), &rig.kv, &listed, blocks)?)
                })?;
                let name = format!("bring {n} rows of {row_bytes}{what}, {blocks} blocks");
                report.add(&name, seconds, bytes, 0.0);
            }
            if let Some(threads) = &threads {
                let seconds = time(cuda, |i| {
                    Ok(cuda.bring_by(threads, (&rig.plan, &rig.kv), layer(i), &listed, 8)?)
                })?;
                let name = format!("bring {n} rows of {row_bytes}{what}, threads");
                report.add(&name, seconds, bytes, 0.0);
            }
            let seconds = time(cuda, |_| Ok(cuda.copy_pages_of(&rig.kv, n * row_bytes)?))?;
            report.add(&format!("copy engine, {} KiB", bytes / 1024.0), seconds, bytes, 0.0);
        }
    }
    Ok(())
}

/// Places of each head, in order.
struct Selections {
    lists: Vec<Vec<u32>>,
    /// Where they are from, if they are not made up.
    what: String,
}

fn made_up(n: usize) -> Selections {
    let mut random = Random(n as u64);
    let mut places: Vec<u32> =
        (0..n).map(|_| (random.unit() * (DEPTH - 1) as f32) as u32).collect();
    places.sort_unstable();
    Selections { lists: vec![places; N_HEADS as usize], what: String::new() }
}

/// The first selections of a recorded trace, and the last, whichever layers they are of: one for each head in a
/// context as long as theirs, and in longer ones several for a head, each one's places behind the other's.
fn recorded(path: &str) -> Result<Vec<Selections>, Box<dyn Error>> {
    let (mut chosen, mut longest) = (Vec::new(), 0);
    for line in BufReader::new(File::open(path)?).lines() {
        let decision: Value = serde_json::from_str(&line?)?;
        let number = |of: &Value| of.as_u64().and_then(|n| u32::try_from(n).ok());
        let kv_len = number(&decision["kv_len"]).filter(|&n| n as usize <= DEPTH);
        let kv_len = kv_len.ok_or(format!("a decision without `kv_len` of up to {DEPTH}"))?;
        longest = longest.max(kv_len);
        let Some(places) = decision["chosen"].as_array() else { continue };
        let place = |of: &Value| number(of).filter(|&place| place < kv_len);
        let places: Option<Vec<u32>> = places.iter().map(place).collect();
        chosen.push(places.ok_or("a selection of other places")?);
    }
    let mut all = Vec::new();
    for n_times in [1, 2, 4, 8, 16].into_iter().filter(|n| n * longest <= DEPTH as u32) {
        let n = (N_HEADS * n_times) as usize;
        let start = chosen.len().checked_sub(n).ok_or("too few selections")?;
        for (when, of) in [("first", &chosen[..n]), ("last", &chosen[start..])] {
            let behind = |(i, places): (u32, &Vec<u32>)| {
                places.iter().map(|place| place + i * longest).collect::<Vec<_>>()
            };
            let list = |some: &[Vec<u32>]| (0..).zip(some).flat_map(behind).collect();
            let lists: Vec<Vec<u32>> = of.chunks(n_times as usize).map(list).collect();
            let is_next = |two: &&[u32]| two[0] + 1 == two[1];
            let n_next = lists.iter().flat_map(|list| list.windows(2)).filter(is_next).count();
            let percent = 100 * n_next / lists.iter().map(Vec::len).sum::<usize>().max(1);
            let what = format!(" ({when}, {n_times} x {longest}, {percent} % next to each other)");
            all.push(Selections { lists, what });
        }
    }
    Ok(all)
}
