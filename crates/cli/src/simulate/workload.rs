//! The requests of a simulation: chats that begin at random, of tenants who share system prompts.
//!
//! ```text
//!   a chat's first prompt   [ system prompt of its group ][ what the user says ]
//!   its next                [ .......... everything so far, the answer included ][ what they say ]
//! ```
//!
//! What is said and answered is fixed beforehand, so that every policy gets the same requests. A
//! turn comes at its planned time or, if that is later, when the answer before it has ended.

use std::collections::BTreeMap;
use std::time::Duration;

use nuthatch_types::TokenId;

use crate::args::WorkloadArgs;
use crate::random::Random;

/// Tokens are drawn from so many.
const VOCAB: u32 = 50_000;
/// Most turns of a chat.
const TURNS_MAX: u32 = 32;
/// Most requests: a slip in a flag should not fill the memory.
const REQUESTS_MAX: f64 = 200_000.0;

/// The requests of a simulation, in order of their planned times.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Workload {
    pub(super) requests: Vec<Request>,
    pub(super) n_tenants: u32,
    /// The time in which requests are planned.
    pub(super) duration: Duration,
}

/// One turn of a chat.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Request {
    /// When it is planned to come.
    pub(super) at: Duration,
    /// The request of the turn before, which must have ended.
    pub(super) after: Option<usize>,
    pub(super) prompt: Vec<TokenId>,
    pub(super) answer: Vec<TokenId>,
    pub(super) tenant: u32,
    pub(super) is_urgent: bool,
    /// Whether it is the first to bring a long document.
    pub(super) is_long: bool,
}

/// A workload that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("--{flag} is {value}, but must be {allowed}")]
pub(super) struct WorkloadError {
    flag: &'static str,
    value: f64,
    allowed: &'static str,
}

impl Workload {
    /// Makes the requests.
    pub(super) fn new(args: &WorkloadArgs, seed: u64) -> Result<Self, WorkloadError> {
        check(args)?;
        let mut random = Random::new(seed);
        let systems: Vec<Vec<TokenId>> =
            (0..args.groups).map(|_| tokens(&mut random, args.system_tokens)).collect();
        let mut requests = Vec::new();
        let mut time = 0.0;
        loop {
            time += random.exponential(args.turns / args.rate);
            if time >= args.duration {
                break;
            }
            // Each chat has a stream of its own, so that a longer one does not change the next.
            let mut random = Random::new(random.bits());
            let system = &systems[random.below(args.groups) as usize];
            chat(args, &mut random, system, time, &mut requests);
        }
        Ok(Workload {
            requests: in_order(requests),
            n_tenants: args.tenants,
            duration: Duration::from_secs_f64(args.duration),
        })
    }
}

fn check(args: &WorkloadArgs) -> Result<(), WorkloadError> {
    let positive = "a positive number";
    let share = "from 0 to 1";
    let is_positive = |value: f64| value > 0.0 && value.is_finite();
    let is_share = |value: f64| (0.0..=1.0).contains(&value);
    let n_requests = args.rate * args.duration;
    let rules = [
        ("duration", args.duration, is_positive(args.duration), positive),
        ("rate", args.rate, is_positive(args.rate), positive),
        ("rate", args.rate, n_requests <= REQUESTS_MAX, "at most 200000 requests in all"),
        ("prompt-mean", args.prompt_mean, is_positive(args.prompt_mean), positive),
        (
            "prompt-sigma",
            args.prompt_sigma,
            (0.0..=4.0).contains(&args.prompt_sigma),
            "from 0 to 4",
        ),
        ("answer-mean", args.answer_mean, is_positive(args.answer_mean), positive),
        (
            "answer-sigma",
            args.answer_sigma,
            (0.0..=4.0).contains(&args.answer_sigma),
            "from 0 to 4",
        ),
        ("turns", args.turns, (1.0..=16.0).contains(&args.turns), "from 1 to 16"),
        ("think", args.think, is_positive(args.think), positive),
        ("groups", args.groups.into(), (1..=10_000).contains(&args.groups), "from 1 to 10000"),
        ("tenants", args.tenants.into(), (2..=64).contains(&args.tenants), "from 2 to 64"),
        ("heavy-share", args.heavy_share, is_share(args.heavy_share), share),
        ("urgent-share", args.urgent_share, is_share(args.urgent_share), share),
        ("long-share", args.long_share, is_share(args.long_share), share),
    ];
    for (flag, value, is_fine, allowed) in rules {
        if !is_fine {
            return Err(WorkloadError { flag, value, allowed });
        }
    }
    let least = f64::from(args.system_tokens) + 64.0;
    if f64::from(args.max_model_len) < least {
        let value = f64::from(args.max_model_len);
        let allowed = "at least 64 more than --system-tokens";
        return Err(WorkloadError { flag: "max-model-len", value, allowed });
    }
    Ok(())
}

/// Adds the turns of a chat that begins at `time`, or at another time if its tenant is the heavy
/// one.
fn chat(
    args: &WorkloadArgs,
    random: &mut Random,
    system: &[TokenId],
    time: f64,
    requests: &mut Vec<Request>,
) {
    let is_heavy = random.unit() < args.heavy_share;
    let tenant = if is_heavy { 0 } else { 1 + random.below(args.tenants - 1) };
    let is_urgent = random.unit() < args.urgent_share;
    let mut time = if is_heavy { (args.duration + time) / 3.0 } else { time };
    // Without long documents, chats are what they were before there were any.
    let mut is_long = args.long_share > 0.0 && random.unit() < args.long_share;
    let mut history = system.to_vec();
    let mut after = None;
    for _ in 0..TURNS_MAX {
        let room = args.max_model_len as usize - history.len().min(args.max_model_len as usize);
        let n_said = length(random, args.prompt_mean, args.prompt_sigma);
        let n_prompt = n_said + if is_long { args.long_tokens } else { 0 };
        let n_answer = length(random, args.answer_mean, args.answer_sigma);
        if (n_prompt + n_answer) as usize > room {
            break;
        }
        history.extend(tokens(random, n_prompt));
        let answer = tokens(random, n_answer);
        requests.push(Request {
            at: Duration::from_micros((time * 1e6) as u64),
            after,
            prompt: history.clone(),
            answer: answer.clone(),
            tenant,
            is_urgent,
            is_long: std::mem::take(&mut is_long),
        });
        after = Some(requests.len() - 1);
        history.extend(answer);
        time += random.exponential(args.think);
        // So many turns on average, whatever came before.
        if random.unit() < 1.0 / args.turns {
            break;
        }
    }
}

/// Tokens of a text: at least one, and not more than anybody types.
fn length(random: &mut Random, mean: f64, sigma: f64) -> u32 {
    random.log_normal(mean, sigma).round().clamp(1.0, 2048.0) as u32
}

fn tokens(random: &mut Random, n: u32) -> Vec<TokenId> {
    (0..n).map(|_| TokenId(random.below(VOCAB))).collect()
}

/// Sorts by planned time; `after` follows.
fn in_order(requests: Vec<Request>) -> Vec<Request> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&i| (requests[i].at, i));
    let place: BTreeMap<usize, usize> =
        order.iter().enumerate().map(|(to, &of)| (of, to)).collect();
    let mut sorted: Vec<(usize, Request)> =
        requests.into_iter().enumerate().map(|(i, request)| (place[&i], request)).collect();
    sorted.sort_by_key(|&(to, _)| to);
    let follow = |(_, request): (usize, Request)| Request {
        after: request.after.map(|before| place[&before]),
        ..request
    };
    sorted.into_iter().map(follow).collect()
}
