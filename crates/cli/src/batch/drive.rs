//! The loop: lines in, steps, answers out.
//!
//! One thread does everything in turn, because a step is long against reading and writing a line.

use std::collections::BTreeSet;
use std::io::BufRead;
use std::time::Duration;

use anyhow::Context as _;
use nuthatch_engine::{Engine, Execute, SharedClock};
use nuthatch_server::{Endpoint, Heading, Job, Origin, refusal};
use nuthatch_wire::{
    ApiError, BatchError, BatchLine, BatchOutput, BatchResponse, ErrorKind, Request, caps,
};

use super::input::{Line, Lines};
use super::job::{LineJob, Part};
use super::output::{Answered, OutputFile};
use super::summary::Counts;
use crate::interrupt::Interrupt;

/// Everything that one batch needs.
pub(super) struct Driver<'a, E, R> {
    pub(super) engine: Engine<E>,
    pub(super) clock: SharedClock,
    pub(super) endpoint: Endpoint,
    pub(super) lines: Lines<R>,
    pub(super) output: OutputFile,
    pub(super) answered: Answered,
    pub(super) interrupt: &'a Interrupt,
    /// The model's own name, for the answers.
    pub(super) model: String,
    /// Seconds since 1970 when the batch began.
    pub(super) created: u64,
    /// Most sequences that are submitted and not answered.
    pub(super) n_seqs_max: usize,
    /// Lines that are read before the next step.
    pub(super) n_lines_max: u32,
}

/// What changes while a batch runs.
#[derive(Debug, Default)]
struct State {
    jobs: Vec<LineJob>,
    /// Names of the lines so far.
    names: BTreeSet<String>,
    is_end: bool,
    counts: Counts,
}

impl<E: Execute, R: BufRead> Driver<'_, E, R> {
    /// Runs the batch to its end, or until Ctrl-C, telling `show` how it goes.
    pub(super) fn run(mut self, mut show: impl FnMut(&Counts)) -> anyhow::Result<Counts> {
        let interrupt = self.interrupt;
        let _running = interrupt.begin();
        let begin = self.clock.now();
        let mut state = State::default();
        while !interrupt.requested() {
            self.take_lines(&mut state)?;
            let has_run = self.engine.step().context("the device failed")?;
            state.counts.note_running(&self.engine.stats().scheduler);
            self.collect(&mut state)?;
            state.counts.elapsed = self.clock.now().saturating_sub(begin);
            show(&state.counts);
            if !has_run && state.jobs.is_empty() && state.is_end {
                break;
            }
        }
        state.counts.is_interrupted = interrupt.requested();
        let counters = self.engine.stats().scheduler.counters;
        state.counts.preemptions = counters.preemptions;
        state.counts.swaps = counters.preemptions_swap;
        state.counts.elapsed = state.counts.elapsed.max(Duration::from_nanos(1));
        Ok(state.counts)
    }

    /// Submits the next lines, while the queue has room.
    fn take_lines(&mut self, state: &mut State) -> anyhow::Result<()> {
        for _ in 0..self.n_lines_max {
            let n_seqs: usize = state.jobs.iter().map(|job| job.n_seqs).sum();
            if state.is_end || n_seqs + caps::CHOICES > self.n_seqs_max {
                return Ok(());
            }
            match self.lines.next()? {
                None => state.is_end = true,
                Some((_, line)) if line.is_blank() => {}
                Some((number, line)) => self.take_line(number, &line, state)?,
            }
        }
        Ok(())
    }

    fn take_line(&mut self, number: u64, line: &Line, state: &mut State) -> anyhow::Result<()> {
        let (name, request) = match read(line) {
            Ok((name, _)) if !state.names.insert(name.clone()) => {
                let message = format!("custom_id `{name}` was used before");
                return self.push_nameless(number, &message, state);
            }
            Ok(named) => named,
            Err(error) => return self.push_nameless(number, &error.message, state),
        };
        if self.answered.has_name(&name) {
            state.counts.skipped += 1;
            return Ok(());
        }
        if let Ok(request) = &request {
            state.counts.note_model(request.options().model.as_deref(), &self.model);
        }
        match request.and_then(|request| self.submit(number, name.clone(), &request)) {
            Ok(job) => state.jobs.push(job),
            Err(error) => self.push_error(number, &name, &error, state)?,
        }
        // A refusal is the request's fault, a failure is not.
        match self.engine.stats().error {
            Some(error) => anyhow::bail!("the engine has failed: {error}"),
            None => Ok(()),
        }
    }

    fn submit(&mut self, line: u64, name: String, request: &Request) -> Result<LineJob, ApiError> {
        if request.options().stream {
            let message = "an answer in a file cannot be streamed";
            return Err(ApiError::new(ErrorKind::InvalidRequest, message).about("stream"));
        }
        // Without a seed of its own a request gets its line's number, so that a batch can be repeated.
        let origin = Origin { seed: line, now: self.clock.now(), ..Origin::default() };
        let submissions = self.endpoint.submissions(request, &origin)?;
        let job = Job::new(request, &self.endpoint, &submissions);
        let n_seqs = submissions.iter().map(|s| s.beam.map_or(s.n, |b| b.width) as usize).sum();
        let mut parts: Vec<Part> = Vec::with_capacity(submissions.len());
        for submission in submissions {
            let (sender, outputs) = crossbeam_channel::unbounded();
            match self.engine.submit(submission, sender, self.clock.now()) {
                Ok(seq) => parts.push(Part { seq, outputs }),
                Err(error) => {
                    parts.iter().for_each(|part| self.engine.cancel(part.seq));
                    return Err(refusal(&error));
                }
            }
        }
        Ok(LineJob { line, custom_id: name, job, parts, n_seqs })
    }

    /// Takes in what the step gave, and writes the answers that are whole.
    fn collect(&mut self, state: &mut State) -> anyhow::Result<()> {
        for job in &mut state.jobs {
            let engine = &mut self.engine;
            job.poll(|seq, index| engine.end_answer(seq, index));
            // An answer that was just ended says so at once.
            job.poll(|_, _| {});
        }
        let done: Vec<LineJob> = state.jobs.extract_if(.., |job| job.job.is_done()).collect();
        for LineJob { line, custom_id, job, .. } in done {
            if let Some(error) = job.failure() {
                self.push_error(line, &custom_id, &error, state)?;
                continue;
            }
            let body = job.body(&Heading {
                id: format!("{}{line}", job.id_prefix()),
                created: self.created,
                model: self.model.clone(),
            });
            let request_id = format!("req_{line}");
            let response = BatchResponse { status_code: 200, request_id, body };
            self.output.push(&BatchOutput {
                id: id_of(line),
                custom_id: Some(&custom_id),
                response: Some(response),
                error: None,
            })?;
            state.counts.add(&job.usage());
        }
        Ok(())
    }

    /// Writes the error of a line that has a name.
    fn push_error(
        &mut self,
        line: u64,
        name: &str,
        error: &ApiError,
        state: &mut State,
    ) -> anyhow::Result<()> {
        state.counts.errors += 1;
        let (status_code, request_id) = (error.kind.status(), format!("req_{line}"));
        let response = BatchResponse { status_code, request_id, body: error.body() };
        let message = format!("line {line}: {error}");
        let code = error.code.unwrap_or("invalid_request");
        self.output.push(&BatchOutput {
            id: id_of(line),
            custom_id: Some(name),
            response: Some(response),
            error: Some(BatchError { code, message }),
        })
    }

    /// Writes the error of a line without a name of its own, once.
    fn push_nameless(&mut self, line: u64, what: &str, state: &mut State) -> anyhow::Result<()> {
        let id = id_of(line);
        if self.answered.has_id(&id) {
            state.counts.skipped += 1;
            return Ok(());
        }
        state.counts.errors += 1;
        let error = BatchError { code: "invalid_line", message: format!("line {line}: {what}") };
        let error = Some(error);
        self.output.push(&BatchOutput::<()> { id, custom_id: None, response: None, error })
    }
}

/// A line's name and its request, or why it has no name.
fn read(line: &Line) -> Result<(String, Result<Request, ApiError>), ApiError> {
    let text = match line {
        Line::Text(text) => text,
        Line::TooLong => {
            let message = format!("the line has more than {} bytes", caps::BODY_BYTES);
            return Err(ApiError::new(ErrorKind::InvalidRequest, message));
        }
    };
    let line = BatchLine::parse(text)?;
    Ok((line.custom_id()?, line.request().map_err(ApiError::from)))
}

fn id_of(line: u64) -> String {
    format!("batch_req_{line}")
}
