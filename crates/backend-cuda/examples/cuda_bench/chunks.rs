//! The time of a long prompt by that of its chunks: some chunks at several depths of a filled cache, and
//! what all of them would take by that.

use nuthatch_backend::{Backend as _, Digest, Pass};
use nuthatch_backend_cuda::Cuda;
use nuthatch_types::{Clock as _, SystemClock};

use crate::rig::Rig;
use crate::step::{self, Acts, Model};
use crate::topk::{digests, kv_of};
use crate::{Outcome, Report, number};

/// Tokens of a chunk, unless `rows=N` says another number.
const ROWS: usize = 8192;
/// Times that a chunk is computed at each depth, after once.
const TIMES: usize = 2;

/// Times chunks at the depths among the words, the last of which is where the prompt ends, and adds up all
/// chunks of such a prompt, with times between two depths on the line between them. Pages are as top-k
/// attention has them, with digests.
pub(crate) fn chunks(cuda: &Cuda, report: &mut Report, words: &[String]) -> Outcome {
    let mut depths: Vec<usize> = words.iter().filter_map(|word| word.parse().ok()).collect();
    depths.sort_unstable();
    let (Some(&end), rows) = (depths.last(), number(words, "rows").unwrap_or(ROWS)) else {
        return Err("chunks of a prompt: at which depths?".into());
    };
    let model = Model::new(cuda, step::named(words))?;
    let (kv, all) = (kv_of(&model.shape), digests(&model.shape, words));
    let some: &[Digest] = &all[..1];
    let (free, _) = cuda.memory()?;
    let mut rig = Rig::with(cuda, (kv, model.shape.n_heads), (1, end, rows), (false, Some(some)))?;
    let used = (free - cuda.memory()?.0) as f64;
    let name = model.shape.name;
    println!("1 x {end}: {:.2} GB on the device for KV, digests and copies", used / 1e9);
    let mut acts = Acts::new(cuda, &model.shape, rows)?;
    acts.outputs = 1;
    let clock = SystemClock::start();
    let mut found: Vec<(f64, f64)> = Vec::new();
    for depth in depths {
        rig.renew_plan()?;
        rig.lay_out(&[(0, depth, rows)])?;
        let mut least = f64::INFINITY;
        for _ in 0..=TIMES {
            cuda.wait()?;
            let begin = clock.now();
            if cuda.begin_pass(&mut rig.plan, &rig.kv)? == Pass::Needed {
                model.pass(cuda, &mut rig, &mut acts, None)?;
                cuda.end_pass(&mut rig.plan)?;
            }
            cuda.wait()?;
            let passed = (clock.now() - begin).as_secs_f64();
            // The first brings copies of pages.
            least = if least.is_infinite() { f64::MAX } else { least.min(passed) };
        }
        report.add(&format!("chunk {name}, {rows} at {depth}"), least, 0.0, 0.0);
        found.push((depth as f64, least));
    }
    let total: f64 = (0..end / rows).map(|i| between(&found, (i * rows) as f64)).sum();
    report.add(&format!("prefill {name}, {end} by chunks of {rows}, added up"), total, 0.0, 0.0);
    println!("{:.0} tokens/s", end as f64 / total);
    Ok(())
}

/// What a chunk takes at a depth: on the line between those that were timed, or as the nearest.
fn between(found: &[(f64, f64)], depth: f64) -> f64 {
    let after = found.partition_point(|&(at, _)| at < depth);
    match (after.checked_sub(1).map(|i| found[i]), found.get(after)) {
        (Some((low, low_s)), Some(&(high, high_s))) => {
            low_s + (high_s - low_s) * (depth - low) / (high - low)
        }
        (Some((_, seconds)), None) => seconds,
        (None, first) => first.map_or(0.0, |&(_, seconds)| seconds),
    }
}
