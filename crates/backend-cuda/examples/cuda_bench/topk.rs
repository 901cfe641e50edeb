//! Whole decode steps about which the device decides, and what each of their kernels takes.
//!
//! Queries are made up: those of a key/value head stay near their label, or turn away from it, at the
//! rate that is asked for. All layers have the same queries, and keys are random, so what a turned query
//! chooses has little in common with what was chosen before: more rows move than for a real text.

use std::collections::BTreeMap;

use nuthatch_backend::topk::{Found, HeadNumbers, Mix, ReuseRule};
use nuthatch_backend::{Backend, Deciding, Digest, DigestKind, Pass, Rules, ScoreBy};
use nuthatch_backend_cuda::Cuda;
use nuthatch_types::{Clock as _, KvDtype, KvShape, LayerIdx, SystemClock};

use crate::rig::Rig;
use crate::step::{self, Acts, Buf, Model, Shape};
use crate::{Outcome, Report, number, random, time};

/// Steps that are timed.
const STEPS: usize = 24;
/// A query that stays has this cosine with the one before, and one that turns away this one.
const STAYS: f32 = 0.995;
const TURNS: f32 = 0.7;

/// Small numbers that their seed determines.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 40) as f32 / (1 << 24) as f32
    }

    fn bell(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

/// The queries of one row.
struct Queries {
    random: Random,
    /// `[G][group D]`
    heads: Vec<Vec<f32>>,
}

impl Queries {
    fn new(shape: &Shape, seq: usize) -> Self {
        let mut random = Random(9 + 1000 * seq as u64);
        let group = (shape.n_heads / shape.n_kv_heads * shape.head_dim) as usize;
        let heads = (0..shape.n_kv_heads).map(|_| (0..group).map(|_| random.bell()).collect());
        let heads = heads.collect();
        Queries { random, heads }
    }

    /// The next step's, of which `turned` heads in a hundred turn away.
    fn next(&mut self, turned: u32) -> Vec<f32> {
        for head in &mut self.heads {
            let cosine = if self.random.unit() * 100.0 < turned as f32 { TURNS } else { STAYS };
            let sine = (1.0 - cosine * cosine).sqrt();
            for x in head.iter_mut() {
                *x = cosine * *x + sine * self.random.bell();
            }
        }
        self.heads.concat()
    }
}

/// What decides.
#[derive(Clone, Copy)]
struct Named {
    name: &'static str,
    by: ScoreBy,
    percent: f64,
    working_set: f32,
    is_whole: bool,
    reuses: bool,
    /// Whether layers are decided about before their turn: not, so, or both.
    ahead: &'static [bool],
}

const CHANNELS: ScoreBy = ScoreBy::Digest(0);
const SIGNS: ScoreBy = ScoreBy::Digest(1);

/// `auto`, without what needs a head profile.
const AUTO: Named = Named {
    name: "auto (loki:32 4% x 2.5)",
    by: CHANNELS,
    percent: 4.0,
    working_set: 2.5,
    is_whole: false,
    reuses: true,
    ahead: &[false, true],
};

const QSAC: Named = Named {
    name: "qsac + delta (hata:256 10%)",
    by: SIGNS,
    percent: 10.0,
    working_set: 1.0,
    ..AUTO
};

/// Those that the literature has. Of a cache of pages that the CPU manages only the rows that it moves
/// are brought, 8.4 % of the context at a step (docs/sparse.md), and nothing that a CPU does is counted.
const POLICIES: [Named; 6] = [
    AUTO,
    QSAC,
    Named { name: "LiteCache: qsac + whole", is_whole: true, ..QSAC },
    Named { name: "always + delta", reuses: false, ..QSAC },
    Named {
        name: "InfiniGen: prefetch only",
        is_whole: true,
        reuses: false,
        ahead: &[true],
        ..QSAC
    },
    Named {
        name: "page LRU: its rows only",
        percent: 8.4,
        is_whole: true,
        reuses: false,
        ahead: &[false],
        ..QSAC
    },
];

fn rules(shape: &Shape, of: &Named) -> Rules {
    let group = (shape.n_heads / shape.n_kv_heads) as usize;
    let head = HeadNumbers { threshold: 0.85, weight: 1.0, importances: vec![1.0; group] };
    Rules {
        by: of.by,
        percent: of.percent,
        k_min: 64,
        k_max: u32::MAX,
        sinks: 16,
        recent: 64,
        working_set: of.working_set,
        is_whole: of.is_whole,
        reuse: of.reuses.then_some(ReuseRule { mix: Mix::Harmonic, max_age: None }),
        has_choice: true,
        first_layer: 0,
        heads: vec![head; (shape.n_layers * shape.n_kv_heads) as usize],
    }
}

fn digests(shape: &Shape) -> [Digest; 2] {
    let d = shape.head_dim as usize;
    let channels = Digest {
        kind: DigestKind::Channels,
        width: 32,
        frame: random(32 * d).iter().map(|x| x * 0.15).collect(),
        mean: Vec::new(),
    };
    let n_heads = (shape.n_layers * shape.n_kv_heads) as usize;
    let signs = Digest {
        kind: DigestKind::Signs,
        width: 256,
        frame: random(256 * d),
        mean: vec![0.0; n_heads * d],
    };
    [channels, signs]
}

/// Times steps at the depths among the words, or at 32768 and 131072, of `batch=N` sequences: by the rules
/// of `auto`, with `policies` also by those of the literature; of which heads turn away at several
/// rates, or, with `turn=N`, at that one. With `breakdown`, kernels are also timed one by one.
pub(crate) fn steps(cuda: &Cuda, report: &mut Report, words: &[String]) -> Outcome {
    let has = |name: &str| words.iter().any(|word| word == name);
    let n_seqs = number(words, "batch").unwrap_or(1);
    let named: Vec<usize> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let depths = if named.is_empty() { vec![32_768, 131_072] } else { named };
    let model = Model::new(cuda, step::named(words))?;
    let shape = &model.shape;
    let all = if has("policies") { &POLICIES[..] } else { &POLICIES[..1] };
    let n_digests = if has("policies") { 2 } else { 1 };
    let turns = number(words, "turn").map_or(vec![100, 45, 25, 10, 0], |n| vec![n as u32]);
    for depth in depths {
        let (free, _) = cuda.memory()?;
        let mut rig = Rig::with(
            cuda,
            (kv_of(shape), shape.n_heads),
            (n_seqs, depth, 2 * all.len() * turns.len() * (STEPS + 10)),
            (false, Some(&digests(shape)[..n_digests])),
        )?;
        let all_rules: Vec<Rules> = all.iter().map(|of| rules(shape, of)).collect();
        let decides = cuda.decide_by(&rig.plan, &mut rig.kv, &all_rules, n_seqs as u32)?;
        assert!(decides, "this device decides");
        let used = (free - cuda.memory()?.0) as f64;
        println!("{n_seqs} x {depth}: {:.2} GB on the device for KV", used / 1e9);
        let has_kernels = report.has_breakdown;
        let model = &model;
        let mut run =
            Run { cuda, model, n_seqs, depth, n_done: 0, rules: 0, is_ahead: false, has_kernels };
        for (i, of) in all.iter().enumerate() {
            for &turned in turns.iter().take(if of.reuses { turns.len() } else { 1 }) {
                for &is_ahead in of.ahead {
                    (run.rules, run.is_ahead) = (i as u32, is_ahead);
                    run.time(&mut rig, report, (of.name, turned))?;
                }
            }
        }
    }
    Ok(())
}

/// Steps at one depth.
struct Run<'a> {
    cuda: &'a Cuda,
    model: &'a Model,
    n_seqs: usize,
    depth: usize,
    n_done: usize,
    /// Whose rules decide.
    rules: u32,
    /// Whether layers are decided about before their turn.
    is_ahead: bool,
    /// Whether kernels are timed one by one.
    has_kernels: bool,
}

impl Run<'_> {
    fn time(
        &mut self,
        rig: &mut Rig<'_>,
        report: &mut Report,
        (name, turned): (&str, u32),
    ) -> Outcome {
        let shape = &self.model.shape;
        let mut queries: Vec<Queries> =
            (0..self.n_seqs).map(|seq| Queries::new(shape, seq)).collect();
        let width = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim;
        let mut query_buf = self.cuda.alloc(self.n_seqs * width as usize)?;
        let mut acts = Acts::new(self.cuda, shape, self.n_seqs)?;
        rig.renew_plan()?;
        let clock = SystemClock::start();
        let (mut seconds, mut n_lookups, mut n_hits, mut n_moved) = (Vec::new(), 0u64, 0u64, 0u64);
        for step in 0..STEPS + 5 {
            self.turn(&mut query_buf, &mut queries, turned)?;
            self.cuda.wait()?;
            let begin = clock.now();
            self.step(rig, (&query_buf, &mut acts))?;
            self.cuda.wait()?;
            let passed = (clock.now() - begin).as_secs_f64();
            // The first ones choose for the first time, and are recorded.
            if step < 5 {
                continue;
            }
            seconds.push(passed);
            for seq in 0..self.n_seqs as u32 {
                for head in self.cuda.decided(&rig.kv, seq)? {
                    n_lookups += 1;
                    n_hits += u64::from(head.found == Found::Hit);
                    n_moved += u64::from(head.n_moved);
                }
            }
        }
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        let hits = 100.0 * n_hits as f64 / n_lookups as f64;
        let moved = 100.0 * n_moved as f64 / n_lookups as f64 / self.depth as f64;
        let ahead = if self.is_ahead { ", ahead" } else { "" };
        let name = format!(
            "topk {}, {name}{ahead}, {} x {}, {turned} turn: {hits:.0} % hits, {moved:.2} % moved",
            shape.name, self.n_seqs, self.depth
        );
        report.add(&name, median, self.model.bytes(&kv_of(shape), 0), 0.0);
        if self.is_ahead || !self.has_kernels {
            return Ok(());
        }
        self.kernels(rig, report, (&mut query_buf, &mut acts), &mut queries, turned)
    }

    /// The next queries of all sequences.
    fn turn(&self, query_buf: &mut Buf, queries: &mut [Queries], turned: u32) -> Outcome {
        let shape = &self.model.shape;
        let keys = (2 * shape.n_kv_heads * shape.head_dim) as usize;
        // Keys and values of a row lie behind its queries.
        let next = |queries: &mut Queries| {
            let mut row = queries.next(turned);
            row.resize(row.len() + keys, 0.0);
            row
        };
        let rows: Vec<f32> = queries.iter_mut().flat_map(next).collect();
        Ok(self.cuda.write(query_buf, &rows)?)
    }

    /// One step of sequences that grow.
    fn step(&mut self, rig: &mut Rig<'_>, (queries, acts): (&Buf, &mut Acts)) -> Outcome {
        let at = self.depth + self.n_done;
        self.n_done += 1;
        let parts: Vec<_> = (0..self.n_seqs).map(|seq| (seq, at, 1)).collect();
        rig.lay_out(&parts)?;
        // Other rules begin anew by themselves.
        let row = |seq| Deciding { seq, table_row: seq, rules: self.rules, is_new: false };
        let rows: Vec<Deciding> = (0..self.n_seqs as u32).map(row).collect();
        self.cuda.begin_deciding(&mut rig.plan, &rig.kv, &rows)?;
        if self.cuda.begin_pass(&mut rig.plan, &rig.kv)? == Pass::Needed {
            self.model.pass_with(self.cuda, rig, acts, (None, Some(queries), self.is_ahead))?;
            self.cuda.end_pass(&mut rig.plan)?;
        }
        Ok(())
    }

    /// What the kernels of one layer take on the average, each queued by itself.
    fn kernels(
        &mut self,
        rig: &mut Rig<'_>,
        report: &mut Report,
        (query_buf, acts): (&mut Buf, &mut Acts),
        queries: &mut [Queries],
        turned: u32,
    ) -> Outcome {
        const N: usize = 3;
        let mut sums: BTreeMap<&'static str, (f64, usize)> = BTreeMap::new();
        for _ in 0..N {
            self.turn(query_buf, queries, turned)?;
            self.cuda.begin_timing();
            self.step(rig, (query_buf, acts))?;
            for kernel in self.cuda.end_timing()? {
                let sum = sums.entry(kernel.name).or_default();
                *sum = (sum.0 + kernel.seconds, sum.1 + 1);
            }
        }
        for (name, (seconds, n)) in sums {
            let is_ours =
                ["decide", "sparse_", "digest", "rope_"].iter().any(|s| name.starts_with(s));
            if is_ours {
                report.add(&format!("    {name}, {turned} turn"), seconds / n as f64, 0.0, 0.0);
            }
        }
        Ok(())
    }
}

fn kv_of(shape: &Shape) -> KvShape {
    KvShape {
        n_layers: shape.n_layers,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
        page_len: 16,
        dtype: KvDtype::F16,
    }
}

/// Times bringing rows of random places, in order, to working sets, by several numbers of blocks, and
/// copies of as many bytes by the copy engine.
pub(crate) fn bring(cuda: &Cuda, report: &mut Report) -> Outcome {
    const DEPTH: usize = 131_072;
    for head_dim in [64, 128, 256] {
        let kv =
            KvShape { n_layers: 4, n_kv_heads: 8, head_dim, page_len: 16, dtype: KvDtype::F16 };
        let mut rig = Rig::with(cuda, (kv, 32), (1, DEPTH, 1), (false, Some(&[])))?;
        rig.lay_out(&[(0, DEPTH - 1, 1)])?;
        let row_bytes = 4 * head_dim as usize;
        for n in [64, 256, 1024, 4096, 16_384] {
            let mut random = Random(n as u64);
            let mut places: Vec<u32> =
                (0..n).map(|_| (random.unit() * (DEPTH - 1) as f32) as u32).collect();
            places.sort_unstable();
            let bytes = (8 * n * row_bytes) as f64;
            for blocks in [4, 8, 16, 32] {
                let seconds = time(cuda, |i| {
                    let layer = LayerIdx(i as u32 % kv.n_layers);
                    Ok(cuda.bring_rows(&rig.plan, layer, &rig.kv, &places, blocks)?)
                })?;
                let name = format!("bring 8 x {n} rows of {row_bytes}, {blocks} blocks");
                report.add(&name, seconds, bytes, 0.0);
            }
            let seconds = time(cuda, |_| Ok(cuda.copy_pages_of(&rig.kv, 8 * n * row_bytes)?))?;
            report.add(&format!("copy engine, {} KiB", bytes / 1024.0), seconds, bytes, 0.0);
        }
    }
    Ok(())
}
