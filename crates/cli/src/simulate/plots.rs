//! Four pictures: how long requests wait, what is served over time and to whom, and the pages used.

use super::metrics::ttft;
use super::workload::Workload;
use super::{PolicyArg, Run};
use crate::chart::{Axis, Colour, Figure, Line, Panel, Scale};

/// Intervals over which a rate is averaged, so that curves can be told apart.
const SMOOTH: usize = 5;

/// Names of files and their contents.
pub(super) fn all(workload: &Workload, runs: &[Run]) -> [(&'static str, String); 4] {
    [
        ("ttft.svg", waiting(runs).svg()),
        ("throughput.svg", throughput(runs).svg()),
        ("service.svg", service(workload, runs).svg()),
        ("pages.svg", pages(runs).svg()),
    ]
}

/// Every policy has its colour in all pictures.
fn colour(policy: PolicyArg) -> Colour {
    Colour(match policy {
        PolicyArg::Fcfs => 5,
        PolicyArg::Priority => 1,
        PolicyArg::Prefix => 2,
        PolicyArg::Fair => 0,
        PolicyArg::Mlfq => 3,
    })
}

fn legend(runs: &[Run]) -> Vec<(String, Colour)> {
    runs.iter().map(|run| (run.policy.name().to_owned(), colour(run.policy))).collect()
}

/// The share of the requests that got their first token within a time.
fn waiting(runs: &[Run]) -> Figure {
    let waits = |run: &Run| {
        let mut waits: Vec<f64> = run.outcome.requests.iter().flatten().map(ttft).collect();
        waits.sort_by(f64::total_cmp);
        waits
    };
    let all: Vec<(PolicyArg, Vec<f64>)> = runs.iter().map(|run| (run.policy, waits(run))).collect();
    let ends = |end: fn(&Vec<f64>) -> Option<&f64>| all.iter().filter_map(move |(_, w)| end(w));
    let min = ends(|waits| waits.first()).copied().fold(f64::INFINITY, f64::min);
    let max = ends(|waits| waits.last()).copied().fold(0.0, f64::max);
    let min = 10f64.powf(min.clamp(1e-3, 1.0).log10().floor());
    let lines = all.iter().map(|(policy, waits)| Line {
        colour: colour(*policy),
        points: waits
            .iter()
            .enumerate()
            .map(|(i, &wait)| (wait, (i + 1) as f64 / waits.len() as f64))
            .collect(),
        is_stepped: true,
    });
    Figure {
        title: "Share of requests whose first token came within a time".to_owned(),
        x: Axis {
            label: "seconds to the first token".to_owned(),
            scale: Scale::Log,
            min,
            max: max.max(10.0 * min),
        },
        y: Axis { label: "share of requests".to_owned(), scale: Scale::Linear, min: 0.0, max: 1.0 },
        legend: legend(runs),
        panels: vec![Panel { title: String::new(), lines: lines.collect() }],
    }
}

/// Tokens a second of all tenants, averaged over some intervals.
fn throughput(runs: &[Run]) -> Figure {
    let line = |run: &Run| {
        let totals = run.outcome.curves.served.iter().map(|tenants| tenants.iter().sum::<u64>());
        rate(run, totals.collect())
    };
    over_time("Answer tokens a second", "tokens/s", legend(runs), vec![panel("", runs, line)])
}

/// Pages that sequences hold.
fn pages(runs: &[Run]) -> Figure {
    let line = |run: &Run| {
        let used = run.outcome.curves.pages_used.iter();
        Line {
            colour: colour(run.policy),
            points: used.enumerate().map(|(i, &n)| (time(run, i), f64::from(n))).collect(),
            is_stepped: false,
        }
    };
    over_time("KV pages in use", "pages", legend(runs), vec![panel("", runs, line)])
}

/// A panel for each policy: the heavy tenant, and each of the others.
fn service(workload: &Workload, runs: &[Run]) -> Figure {
    const HEAVY: Colour = Colour(1);
    const OTHER: Colour = Colour(0);
    let panel = |run: &Run| {
        // The heavy tenant is drawn last, above the others.
        let tenants = (1..workload.n_tenants as usize).chain([0]);
        let lines = tenants.map(|tenant| {
            let served = run.outcome.curves.served.iter().map(|tenants| tenants[tenant]);
            let colour = if tenant == 0 { HEAVY } else { OTHER };
            Line { colour, ..rate(run, served.collect()) }
        });
        Panel { title: run.policy.name().to_owned(), lines: lines.collect() }
    };
    let legend = vec![("heavy tenant".to_owned(), HEAVY), ("each of the others".to_owned(), OTHER)];
    let panels = runs.iter().map(panel).collect();
    over_time("Answer tokens a second, by tenant", "tokens/s", legend, panels)
}

fn panel(title: &str, runs: &[Run], line: impl Fn(&Run) -> Line) -> Panel {
    Panel { title: title.to_owned(), lines: runs.iter().map(line).collect() }
}

/// Counts of intervals as a smooth rate.
fn rate(run: &Run, counts: Vec<u64>) -> Line {
    let bin = run.outcome.curves.bin.as_secs_f64();
    let smooth = |i: usize| {
        let (start, end) = (i.saturating_sub(SMOOTH / 2), (i + SMOOTH / 2 + 1).min(counts.len()));
        let sum: u64 = counts[start..end].iter().sum();
        sum as f64 / (bin * (end - start) as f64)
    };
    Line {
        colour: colour(run.policy),
        points: (0..counts.len()).map(|i| (time(run, i), smooth(i))).collect(),
        is_stepped: false,
    }
}

/// The middle of an interval, in seconds.
fn time(run: &Run, bin: usize) -> f64 {
    (bin as f64 + 0.5) * run.outcome.curves.bin.as_secs_f64()
}

fn over_time(title: &str, unit: &str, legend: Vec<(String, Colour)>, panels: Vec<Panel>) -> Figure {
    let points = || panels.iter().flat_map(|panel| &panel.lines).flat_map(|line| &line.points);
    let x_max = points().map(|&(x, _)| x).fold(1.0, f64::max);
    let y_max = points().map(|&(_, y)| y).fold(1.0, f64::max);
    Figure {
        title: title.to_owned(),
        x: Axis { label: "seconds".to_owned(), scale: Scale::Linear, min: 0.0, max: x_max },
        y: Axis::from_zero(unit, y_max),
        legend,
        panels,
    }
}
