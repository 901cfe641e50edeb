//! Whole decode steps about which the device decides, and what each of their kernels takes. Queries are made
//! up (see `queries.rs`), and keys are random.

use std::collections::BTreeMap;
use std::error::Error;

use nuthatch_backend::topk::{Found, HeadNumbers, Mix, ReuseRule};
use nuthatch_backend::{Backend, Deciding, Digest, DigestKind, Pass, Rules, ScoreBy};
use nuthatch_backend_cuda::Cuda;
use nuthatch_types::{Clock as _, KvDtype, KvShape, SystemClock};

use crate::queries::{Queries, SEEN, TRACED_THRESHOLD, TURNS, Traced, Turn, Way, unevenness};
use crate::rig::Rig;
use crate::step::{self, Acts, Buf, Model, Shape};
use crate::{Outcome, Report, number, random};

/// Steps that are timed.
const STEPS: usize = 40;
/// What decides.
#[derive(Clone, Copy)]
struct Named {
    name: &'static str,
    by: ScoreBy,
    percent: f64,
    working_set: f32,
    is_whole: bool,
    reuses: bool,
    /// The similarity from which on queries that have turned are served late; more than 1 for none.
    soft: f32,
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
    soft: f32::INFINITY,
    ahead: &[false, true],
};

/// The same, if all that has turned is served by what is there, and chooses afterwards.
const LATE: Named = Named { name: "auto, late", soft: -1.0, ahead: &[false], ..AUTO };

const QSAC: Named = Named {
    name: "qsac + delta (hata:256 10%)",
    by: SIGNS,
    percent: 10.0,
    working_set: 1.0,
    ..AUTO
};

/// Selections of each step that keep nothing but themselves: what moves is what one has not in common with the
/// one before.
const OVERLAP: Named = Named {
    name: "each step (loki:32 4%)",
    working_set: 1.0,
    reuses: false,
    soft: f32::INFINITY,
    ..LATE
};

/// `auto`, if all heads choose at each step.
const ALWAYS: Named = Named { name: "auto, always", reuses: false, ahead: &[true], ..AUTO };

/// Those that the literature has. Of a cache of pages that the CPU manages only the rows that it moves
/// are brought, 8.4 % of the context at a step (docs/sparse-answers.md), and nothing that a CPU does is counted.
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

/// One line of a table: what decides, and how many heads in a hundred turn, to which cosine.
struct Part {
    of: Named,
    turn: Turn,
    has_graph: bool,
}

impl Part {
    fn new(of: Named, percent: u32, cosine: f32) -> Self {
        Part { of, turn: Turn { percent, cosine, way: Way::Away }, has_graph: true }
    }
}

/// Steps that choose at each layer, with more and more to bring, and at first and at last nothing.
fn moving() -> Vec<Part> {
    [1.0, 0.999, 0.995, 0.98, 0.95, 0.9, 0.8, 1.0]
        .map(|cosine| Part::new(ALWAYS, 100, cosine))
        .into()
}

/// The parts of LiteCache, taken away one after the other (figures 10 and 12 of the papers). What thresholds
/// and aggregation do to hits is what they did on a real text (docs/sparse-answers.md): 69, 48 and 35 %.
fn parts(cosine: f32) -> Vec<Part> {
    let part = |name, turned, of: Named| Part::new(Named { name, ..of }, turned, cosine);
    let now = Named { ahead: &[false], ..QSAC };
    let whole = Named { is_whole: true, ..now };
    vec![
        part("all parts", 28, Named { ahead: &[true], ..QSAC }),
        part("without prefetch", 28, now),
        part("and without delta", 28, whole),
        part("and without thresholds", 50, whole),
        part("and without aggregation", 63, whole),
        Part { has_graph: false, ..part("and without the graph", 63, whole) },
    ]
}

fn rules(shape: &Shape, of: &Named, traced: Option<&Traced>) -> Rules {
    let group = (shape.n_heads / shape.n_kv_heads) as usize;
    let traced = traced.filter(|_| of.by == CHANNELS);
    let n_heads = shape.n_kv_heads as usize;
    // Of a trace, important heads choose more; those of the literature are all alike.
    let head = |i: usize| {
        let rows = traced.map(|traced| traced.of(shape, (i / n_heads, i % n_heads)).1);
        let weight = rows.map_or(1.0, |rows| 100.0 * rows / AUTO.working_set / AUTO.percent as f32);
        let threshold = if traced.is_some() { TRACED_THRESHOLD } else { 0.85 };
        HeadNumbers { threshold, soft: of.soft, weight, importances: vec![1.0; group] }
    };
    Rules {
        by: of.by,
        percent: of.percent,
        k_min: 64,
        k_max: u32::MAX,
        sinks: 16,
        recent: 64,
        // `follow=0.5`
        fade: if traced.is_some() { 1 << 23 } else { 0 },
        working_set: of.working_set,
        is_whole: of.is_whole,
        reuse: of.reuses.then_some(ReuseRule { mix: Mix::Harmonic, max_age: None }),
        has_choice: true,
        first_layer: 0,
        heads: (0..shape.n_layers as usize * n_heads).map(head).collect(),
    }
}

/// Channels in four bits, or, with `bits=8`, in eight, by a random frame or, of a trace, the channels themselves; and
/// signs.
pub(crate) fn digests(shape: &Shape, words: &[String]) -> [Digest; 2] {
    let d = shape.head_dim as usize;
    let n_heads = (shape.n_layers * shape.n_kv_heads) as usize;
    let (kind, weights) = match number(words, "bits") {
        Some(8) => (DigestKind::Channels, Vec::new()),
        _ => (DigestKind::Nibbles, vec![1.0; n_heads * 32]),
    };
    let frame = match words.iter().any(|word| word.starts_with("heads=")) {
        true => (0..2 * SEEN * d)
            .map(|i| f32::from(i % d == i / d % SEEN + i / d / SEEN * (d / 2)))
            .collect(),
        false => random(32 * d).iter().map(|x| x * 0.15).collect(),
    };
    let channels = Digest { kind, width: 32, frame, mean: Vec::new(), weights };
    let signs = Digest {
        kind: DigestKind::Signs,
        width: 256,
        frame: random(256 * d),
        mean: vec![0.0; n_heads * d],
        weights: Vec::new(),
    };
    [channels, signs]
}

/// What is timed, by the words.
fn lines(words: &[String], is_traced: bool) -> Vec<Part> {
    let has = |name: &str| words.iter().any(|word| word == name);
    let usual = if is_traced { vec![0] } else { vec![100, 45, 25, 10, 0] };
    let percents = number(words, "turn").map_or(usual, |n| vec![n as u32]);
    let cosine = number(words, "cosine").map_or(TURNS, |n| n as f32 / 100.0);
    match has("policies") {
        _ if has("ablation") => parts(cosine),
        _ if has("moves") => moving(),
        is_all => {
            let mut of = POLICIES[..if is_all { POLICIES.len() } else { 1 }].to_vec();
            of.drain(..if has("only") { of.len() } else { 0 });
            of.extend(has("late").then_some(LATE));
            of.extend(has("overlap").then_some(OVERLAP));
            let turns =
                |of: &Named| percents[..if of.reuses { percents.len() } else { 1 }].to_vec();
            let way = match (is_traced, has("around")) {
                (true, _) => Way::Traced,
                (false, true) => Way::Around,
                (false, false) => Way::Away,
            };
            let turn = move |percent| Turn { percent, cosine, way };
            let part = |of: Named| move |percent| Part { of, turn: turn(percent), has_graph: true };
            of.iter().flat_map(|of| turns(of).into_iter().map(part(*of))).collect()
        }
    }
}

/// Times steps at the depths among the words, or at 32768 and 131072, of `batch=N` sequences: by the rules
/// of `auto`, with `policies` also by those of the literature, and with `ahead` decided ahead where they can be; of which heads turn away at several
/// rates, or, with `turn=N`, at that one, and with `around` for a step only, or, with `heads=FILE`, as those of a
/// recorded trace; with channels of `bits=8`; with `wide` by queries from weights as
/// wide as the model's; with `late` also late, with `overlap` also at each step, or, with `only`, so only. With `ablation` LiteCache's parts
/// are taken away one by one; with `moves` all heads choose, and more and more rows move; with `breakdown`,
/// kernels are also timed one by one.
pub(crate) fn steps(cuda: &Cuda, report: &mut Report, words: &[String]) -> Outcome {
    let has = |name: &str| words.iter().any(|word| word == name);
    let n_seqs = number(words, "batch").unwrap_or(1);
    let named: Vec<usize> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let depths = if named.is_empty() { vec![32_768, 131_072] } else { named };
    let mut model = Model::new(cuda, step::named(words))?;
    if !has("wide") {
        model.narrow_deciding(cuda)?;
    }
    let shape = &model.shape;
    let traced = traced(words)?;
    let lines = lines(words, traced.is_some());
    let n_digests = if lines.iter().any(|line| line.of.by == SIGNS) { 2 } else { 1 };
    for depth in depths {
        let (free, _) = cuda.memory()?;
        let mut rig = Rig::with(
            cuda,
            (kv_of(shape), shape.n_heads),
            (n_seqs, depth, 2 * lines.len() * (STEPS + 10)),
            (false, Some(&digests(shape, words)[..n_digests])),
        )?;
        let all_rules: Vec<Rules> =
            lines.iter().map(|line| rules(shape, &line.of, traced.as_ref())).collect();
        let before = cuda.memory()?.0;
        let decides = cuda.decide_by(&rig.plan, &mut rig.kv, &all_rules, n_seqs as u32)?;
        assert!(decides, "this device decides");
        let left = cuda.memory()?.0;
        rig.memory.extend([
            ("working sets, and what decides", before - left),
            ("all of KV", free - left),
        ]);
        report.keep(&format!("{n_seqs} x {depth}, on the device"), &rig.memory);
        let has_kernels = report.has_breakdown;
        let mut run = Run {
            cuda,
            model: &model,
            traced: traced.as_ref(),
            n_seqs,
            depth,
            n_done: 0,
            rules: 0,
            is_ahead: false,
            has_kernels,
        };
        for (i, line) in lines.iter().enumerate() {
            cuda.record_passes(line.has_graph);
            let first = usize::from(has("ahead")).min(line.of.ahead.len() - 1);
            for &is_ahead in &line.of.ahead[first..] {
                (run.rules, run.is_ahead) = (i as u32, is_ahead);
                run.time(&mut rig, report, (line.of.name, line.turn))?;
            }
        }
    }
    Ok(())
}

/// Steps at one depth.
struct Run<'a> {
    cuda: &'a Cuda,
    model: &'a Model,
    traced: Option<&'a Traced>,
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
        (name, turn): (&str, Turn),
    ) -> Outcome {
        let shape = &self.model.shape;
        let n_layers = shape.n_layers as usize;
        let traced = self.traced;
        let of_layer =
            |layer| (0..self.n_seqs).map(move |seq| Queries::new(shape, (layer, seq), traced));
        let mut queries: Vec<Queries> = (0..n_layers).flat_map(of_layer).collect();
        let width = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim;
        let buf = |_| self.cuda.alloc(self.n_seqs * width as usize);
        let mut query_bufs = (0..n_layers).map(buf).collect::<Result<Vec<Buf>, _>>()?;
        let mut acts = Acts::new(self.cuda, shape, self.n_seqs)?;
        rig.renew_plan()?;
        let clock = SystemClock::start();
        let (mut seconds, mut n_lookups, mut n_hits, mut n_moved) = (Vec::new(), 0u64, 0u64, 0u64);
        for step in 0..STEPS + 5 {
            self.turn((step, turn), &mut query_bufs, &mut queries)?;
            self.cuda.wait()?;
            let begin = clock.now();
            self.step(rig, (&query_bufs, &mut acts))?;
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
        let adjacent = queries.iter().map(|queries| queries.adjacent);
        let (sum, n) = adjacent.fold((0.0, 0), |sums, x| (sums.0 + x.0, sums.1 + x.1));
        let turned = match turn.way {
            Way::Traced => "traced".to_owned(),
            Way::Away | Way::Around => format!("{} turn", turn.percent),
        };
        let name = format!(
            "topk {}, {name}{ahead}, {} x {}, {turned}: {hits:.0} % hits, {moved:.2} % moved, cosine {:.3}, mean {:.3} ms",
            shape.name,
            self.n_seqs,
            self.depth,
            sum / f64::from(n),
            seconds.iter().sum::<f64>() / seconds.len() as f64 * 1e3
        );
        report.add(&name, median, self.model.bytes(&kv_of(shape), 0), 0.0);
        if self.is_ahead || !self.has_kernels {
            return Ok(());
        }
        self.kernels(rig, report, (&mut query_bufs, &mut acts), &mut queries, turn)
    }

    /// The next queries of all layers and sequences.
    fn turn(
        &self,
        (step, turn): (usize, Turn),
        query_bufs: &mut [Buf],
        queries: &mut [Queries],
    ) -> Outcome {
        let shape = &self.model.shape;
        let keys = (2 * shape.n_kv_heads * shape.head_dim) as usize;
        // Keys and values of a row lie behind its queries.
        let next = |queries: &mut Queries| {
            let mut row = queries.next(turn, unevenness(step));
            row.resize(row.len() + keys, 0.0);
            row
        };
        // Those of many sequences take longer to make up than a step takes.
        let n_threads = std::thread::available_parallelism()?.get();
        let n_layers = query_bufs.len().div_ceil(n_threads);
        let rows_of = |queries: &mut [Queries]| -> Vec<Vec<f32>> {
            queries
                .chunks_mut(self.n_seqs)
                .map(|seqs| seqs.iter_mut().flat_map(next).collect())
                .collect()
        };
        let rows: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let parts = queries.chunks_mut(n_layers * self.n_seqs);
            let threads: Vec<_> = parts.map(|part| scope.spawn(|| rows_of(part))).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("it ends")).collect()
        });
        for (buf, rows) in query_bufs.iter_mut().zip(&rows) {
            self.cuda.write(buf, rows)?;
        }
        Ok(())
    }

    /// One step of sequences that grow.
    fn step(&mut self, rig: &mut Rig<'_>, (queries, acts): (&[Buf], &mut Acts)) -> Outcome {
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

    /// What a layer's kernels take on the average, each queued by itself; those of a step are spread over its layers.
    fn kernels(
        &mut self,
        rig: &mut Rig<'_>,
        report: &mut Report,
        (query_bufs, acts): (&mut [Buf], &mut Acts),
        queries: &mut [Queries],
        turn: Turn,
    ) -> Outcome {
        const N: usize = 3;
        let mut sums: BTreeMap<&'static str, f64> = BTreeMap::new();
        for step in 0..N {
            self.turn((step, turn), query_bufs, queries)?;
            self.cuda.begin_timing();
            self.step(rig, (query_bufs, acts))?;
            for kernel in self.cuda.end_timing()? {
                *sums.entry(kernel.name).or_default() += kernel.seconds;
            }
        }
        let n_layers = N as f64 * f64::from(self.model.shape.n_layers);
        for (name, seconds) in sums {
            report.add(&format!("    of a layer: {name}"), seconds / n_layers, 0.0, 0.0);
        }
        Ok(())
    }
}

/// What heads of a trace did, if the words name it.
pub(crate) fn traced(words: &[String]) -> Result<Option<Traced>, Box<dyn Error>> {
    words.iter().find_map(|word| word.strip_prefix("heads=")).map(Traced::read).transpose()
}

pub(crate) fn kv_of(shape: &Shape) -> KvShape {
    KvShape {
        n_layers: shape.n_layers,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
        page_len: 16,
        dtype: KvDtype::F16,
    }
}
