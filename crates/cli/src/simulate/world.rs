//! One policy on one workload, in virtual time: the real scheduler and cache, and a cost for each
//! step.

use std::collections::BTreeSet;
use std::time::Duration;

use nuthatch_cache::{Cache, Options};
use nuthatch_scheduler::{Config, Hints, Output, Policy, Scheduler, Stats, Submission, Tenant};
use nuthatch_types::{Limits, Sampled, Sampling, SeqId, StepPlan, StepResult};

use super::cost::{Cost, Took};
use super::workload::Workload;

/// Intervals of time for which curves have a point, over the workload's duration.
const N_BINS: u32 = 100;

/// What is simulated, besides the workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) scheduler: Config,
    pub(super) cache: nuthatch_cache::Config,
    pub(super) options: Options,
    pub(super) policy: Policy,
    pub(super) cost: Cost,
}

/// What became of the requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    /// One for each request of the workload; `None` if it was refused.
    pub(super) requests: Vec<Option<Times>>,
    pub(super) curves: Curves,
    /// When the last request ended.
    pub(super) end: Duration,
    pub(super) stats: Stats,
}

/// What became of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) submitted: Duration,
    /// The first token of the answer.
    pub(super) first: Duration,
    pub(super) end: Duration,
    /// Tokens of the prompt that the cache held.
    pub(super) cached: u32,
}

/// What happened in each interval of time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Curves {
    /// Length of an interval.
    pub(super) bin: Duration,
    /// `[bin][tenant]` tokens of answers.
    pub(super) served: Vec<Vec<u64>>,
    /// `[bin][tenant]` tokens of the answers to requests that came.
    pub(super) asked: Vec<Vec<u64>>,
    /// `[bin]` most pages that sequences held.
    pub(super) pages_used: Vec<u32>,
}

impl Curves {
    fn new(workload: &Workload) -> Self {
        let bin = workload.duration.div_f64(f64::from(N_BINS)).max(Duration::from_nanos(1));
        Curves { bin, served: Vec::new(), asked: Vec::new(), pages_used: Vec::new() }
    }

    /// The interval of a moment; there is one afterwards.
    fn bin(&mut self, now: Duration, n_tenants: u32) -> usize {
        let bin = (now.as_nanos() / self.bin.as_nanos()) as usize;
        while self.served.len() <= bin {
            self.served.push(vec![0; n_tenants as usize]);
            self.asked.push(vec![0; n_tenants as usize]);
            self.pages_used.push(0);
        }
        bin
    }
}

/// A simulation on its way.
struct World<'a> {
    workload: &'a Workload,
    cost: Cost,
    scheduler: Scheduler,
    now: Duration,
    /// Requests that will come, by time.
    coming: BTreeSet<(Duration, usize)>,
    /// `[request]` the request of the next turn.
    next: Vec<Option<usize>>,
    times: Vec<Option<Times>>,
    curves: Curves,
}

/// Lets every request of the workload end.
pub(super) fn simulate(workload: &Workload, setup: &Setup) -> Outcome {
    let n_requests = workload.requests.len();
    let cache = Cache::with_options(setup.cache, setup.options).expect("the sizes were checked");
    let scheduler = Scheduler::with_policy(setup.scheduler, cache, setup.policy);
    let mut world = World {
        workload,
        cost: setup.cost,
        scheduler: scheduler.expect("the limits were checked"),
        now: Duration::ZERO,
        coming: BTreeSet::new(),
        next: vec![None; n_requests],
        times: vec![None; n_requests],
        curves: Curves::new(workload),
    };
    for (i, request) in workload.requests.iter().enumerate() {
        match request.after {
            None => drop(world.coming.insert((request.at, i))),
            Some(before) => world.next[before] = Some(i),
        }
    }
    while world.step() {}
    let stats = world.scheduler.stats();
    Outcome { requests: world.times, curves: world.curves, end: world.now, stats }
}

impl World<'_> {
    /// One step, or a jump to the next arrival; false at the end of the world.
    fn step(&mut self) -> bool {
        while let Some(&(at, i)) = self.coming.first().filter(|&&(at, _)| at <= self.now) {
            self.coming.remove(&(at, i));
            self.submit(at, i);
        }
        let Some(plan) = self.scheduler.plan() else {
            let Some(&(at, _)) = self.coming.first() else { return false };
            self.now = self.now.max(at);
            return true;
        };
        let n_prompt = |seq: SeqId| self.workload.requests[seq.0 as usize].prompt.len() as u32;
        let n_host = |seq: SeqId| self.scheduler.cache().n_spilled(seq);
        let took = self.cost.of(&plan, |step| n_prompt(step.seq), |step| n_host(step.seq));
        self.now += took.copies + took.pass;
        let result = self.result(&plan, took);
        // Pages are counted before those who end give theirs back.
        let pages_used = self.scheduler.stats().cache.pages_used;
        let bin = self.curves.bin(self.now, self.workload.n_tenants);
        self.curves.pages_used[bin] = self.curves.pages_used[bin].max(pages_used);
        for output in self.scheduler.commit(result) {
            self.record(&output, bin);
        }
        true
    }

    fn submit(&mut self, at: Duration, i: usize) {
        let request = &self.workload.requests[i];
        let n_answer = request.answer.len() as u32;
        let submission = Submission {
            seq: SeqId(i as u64),
            prompt: request.prompt.clone(),
            sampling: Sampling::greedy(),
            limits: Limits { max_tokens: n_answer, ..Limits::default() },
        };
        let hints = Hints {
            priority: u8::from(request.is_urgent),
            tenant: Tenant(request.tenant.into()),
            ..Hints::default()
        };
        // What is refused has no next turn either.
        if self.scheduler.submit_with(submission, hints).is_err() {
            return;
        }
        self.times[i] = Some(Times { submitted: at, ..Times::default() });
        let bin = self.curves.bin(at, self.workload.n_tenants);
        self.curves.asked[bin][request.tenant as usize] += u64::from(n_answer);
    }

    /// The tokens that the workload has foreseen. The times tell the scheduler whether to swap.
    fn result(&self, plan: &StepPlan, took: Took) -> StepResult {
        let sampled = plan.seqs.sampled().map(|step| {
            let request = &self.workload.requests[step.seq.0 as usize];
            let position = step.start as usize + step.tokens.len() - request.prompt.len();
            let token = request.answer[position];
            Sampled { seq: step.seq, token, logprob: None, top: Vec::new() }
        });
        StepResult {
            sampled: sampled.collect(),
            copy_nanos: took.copies.as_nanos() as u64,
            compute_nanos: took.pass.as_nanos() as u64,
            ..StepResult::default()
        }
    }

    fn record(&mut self, output: &Output, bin: usize) {
        let i = output.seq().0 as usize;
        let times = self.times[i].as_mut().expect("it was submitted");
        match output {
            Output::Token(_) => {
                if times.first == Duration::ZERO {
                    times.first = self.now;
                }
                let tenant = self.workload.requests[i].tenant;
                self.curves.served[bin][tenant as usize] += 1;
            }
            Output::Candidates { .. } => unreachable!("no request asks for candidates"),
            Output::Finished { usage, .. } => {
                times.end = self.now;
                times.cached = usage.cached_tokens;
                if let Some(next) = self.next[i] {
                    let at = self.workload.requests[next].at.max(self.now);
                    self.coming.insert((at, next));
                }
            }
        }
    }
}
