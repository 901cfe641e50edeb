//! An engine with a disk tier under load, to be killed at any moment: the child of `cargo xtask crash`.
//!
//! ```text
//! crash_load MODEL                     prints what each request's answer is without a disk
//! crash_load MODEL DIR BYTES SEED IO   says what DIR holds, waits for a line, answers requests for ever
//! ```
//!
//! A line of an answer is `answer REQUEST CACHED HASH`, where the hash is of all bits of its tokens and
//! of their probabilities.

#![expect(clippy::print_stdout, reason = "its parent reads what it prints")]

use std::collections::VecDeque;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use nuthatch_backend_cpu::{Cpu, CpuConfig};
use nuthatch_engine::{
    Budget, DiskIo, DiskOptions, Engine, EngineHandle, EngineOptions, Output, SizeRequest, Sizes,
    SlowOptions, Submission, Ticket,
};
use nuthatch_model::ModelFiles;
use nuthatch_types::{KvDtype, Limits, Sampling, SystemClock, TokenId};

/// Different requests.
const N_REQUESTS: u32 = 40;
/// Requests that are answered at one time.
const N_AT_ONCE: usize = 4;
/// Pages in memory: too few for all requests, so that the disk is asked.
const N_PAGES: u64 = 40;

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("the path of a model is missing")?;
    let mut engine = load(Path::new(&model))?;
    let Some(dir) = args.next() else {
        let handle = engine.spawn()?;
        for request in 0..N_REQUESTS {
            report(request, &handle.submit(submission(request))?);
        }
        return Ok(());
    };
    let bytes_max = args.next().ok_or("the size is missing")?.parse()?;
    let mut random: u64 = args.next().ok_or("the seed is missing")?.parse()?;
    let io: DiskIo = args.next().ok_or("how to read and write is missing")?.parse()?;
    let disk = Some(DiskOptions { dir: dir.into(), bytes_max, io });
    engine.keep_pages(&SlowOptions { disk, ..SlowOptions::default() })?;
    let disk = engine.stats().tier.unwrap_or_default().disk.unwrap_or_default();
    println!("open {} {} {}", disk.pages, disk.bytes, disk.segments);
    std::io::stdin().read_line(&mut String::new())?;
    let handle = engine.spawn()?;
    let mut tickets: VecDeque<(u32, Ticket)> = VecDeque::new();
    loop {
        while tickets.len() < N_AT_ONCE {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            let request = (random >> 33) as u32 % N_REQUESTS;
            tickets.push_back((request, submit(&handle, request)?));
        }
        if let Some((request, ticket)) = tickets.pop_front() {
            report(request, &ticket);
        }
    }
}

fn submit(handle: &EngineHandle, request: u32) -> Result<Ticket, Failure> {
    Ok(handle.submit(submission(request))?)
}

fn load(model: &Path) -> Result<Engine<impl nuthatch_engine::Execute + Send + 'static>, Failure> {
    let files = ModelFiles::open(model)?;
    let request = SizeRequest::for_model(&files, KvDtype::F32, 1 << 30);
    let budget = Budget::KvBytes(N_PAGES * request.kv.page_bytes() as u64);
    let request = SizeRequest { budget, max_rows: 64, max_seqs: 4, ..request };
    let sizes = Sizes::compute(&request)?;
    let backend = Arc::new(Cpu::new(CpuConfig { threads: 1, isa: None })?);
    let clock = Arc::new(SystemClock::start());
    Ok(Engine::load(backend, &files, &sizes, &EngineOptions::default(), clock)?)
}

/// The requests begin in few ways and go on differently, so that they share pages.
fn submission(request: u32) -> Submission {
    let (begin, length) = (request % 5, 40 + 6 * (request / 5));
    let token = |i: u32| TokenId((begin * 31 + i * i + (i / 100) * request) % 90);
    let sampling = Sampling { seed: request.into(), n_logprobs: Some(0), ..Sampling::default() };
    let limits = Limits { max_tokens: 20, ..Limits::default() };
    Submission {
        prompt: (0..length).map(token).collect(),
        sampling,
        limits,
        ..Submission::default()
    }
}

/// Waits for an answer and prints it.
fn report(request: u32, ticket: &Ticket) {
    // FNV-1a, which is the same in every process.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    while let Some(output) = ticket.recv() {
        match output {
            Output::Token { token, logprob, .. } => {
                for word in [token.0, logprob.map_or(0, f32::to_bits)] {
                    hash = (hash ^ u64::from(word)).wrapping_mul(0x0000_0100_0000_01b3);
                }
            }
            Output::Finished { usage, .. } => {
                println!("answer {request} {} {hash:016x}", usage.cached_tokens);
            }
        }
    }
}
