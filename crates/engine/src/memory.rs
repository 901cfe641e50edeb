//! How large everything is, computed once from the configuration, the model and the memory.
//!
//! ```text
//!   memory   [ weights | working memory | KV pages ............ | host pages ... | left to others ]
//!                                         n_pages * page_bytes    n_host_pages * page_bytes
//! ```
//!
//! Nothing grows afterwards: what does not fit is refused here, with the numbers, or when a request
//! is submitted. How much memory there is, the caller says; nothing is read from the machine.

mod error;
mod far;
mod forecast;

use nuthatch_model::{ModelFiles, kv_shape};
use nuthatch_types::{HostReads, KvDtype, KvShape, Window};

pub use error::MemoryError;
pub use far::{CodeBytes, FarRequest, NearSizes};
pub use forecast::{Forecast, ForecastRequest, Rates};

use far::FarRoom;

/// The largest plans that an executor carries out. A larger one is a programmer error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Tokens of one step.
    pub max_rows: u32,
    /// Sequences that it knows at one time; each has a table.
    pub max_seqs: u32,
    /// Tokens of one sequence's table.
    pub max_context: u32,
    /// Tokens of one page.
    pub page_len: u32,
    /// Slots of both tiers.
    pub n_slots: u32,
}

impl Capacity {
    /// Entries of one table.
    pub fn table_len(&self) -> u32 {
        self.max_context.div_ceil(self.page_len)
    }
}

/// How much memory may be used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// This many bytes for KV pages; weights and working memory come on top.
    KvBytes(u64),
    /// This share of what is available, from 0 to 1, for everything together.
    Share(f64),
    /// This many bytes for KV pages, which are not in memory.
    OutsideBytes(u64),
}

/// What the sizes are computed from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SizeRequest {
    /// Shape of the model's KV.
    pub kv: KvShape,
    /// Bytes of digests beside one page, over all layers; 0 without top-k attention.
    pub digest_page_bytes: u64,
    /// Bytes that a device that decides about top-k attention by itself needs for that: for
    /// `max_seqs` sequences of the context that is asked for.
    pub deciding: u64,
    /// Bytes of the weights, as they lie in memory.
    pub weights: u64,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Floats of activations for one row of a batch.
    pub row_floats: u64,
    /// How far back every layer of the model sees; `None` when some layer sees everything.
    pub window: Option<u32>,
    /// The context that the model was made for.
    pub model_context: u32,
    /// The context that the user asks for. It fits, or it is an error; without it, the model's is
    /// cut down to what fits.
    pub max_context: Option<u32>,
    /// Most sequences that run at one time.
    pub max_seqs: u32,
    /// Most tokens computed in one step.
    pub max_rows: u32,
    /// Bytes that are available before anything is loaded.
    pub available: u64,
    /// How much of it may be used.
    pub budget: Budget,
    /// Bytes for pages of the host tier, where pages wait that the device tier has no room for;
    /// rounded down to whole pages. They are taken from the same available bytes. 0 is no such tier.
    pub host_bytes: u64,
    /// Whether and how well the device reads pages of the host
    /// ([`nuthatch_backend::Backend::host_reads`]): unless never, a sequence for which the device tier
    /// has no room may run on them.
    pub host_reads: HostReads,
    /// If given, pages are in the host's memory, and the device keeps copies of some.
    pub far: Option<FarRequest>,
}

/// How large everything is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Pages of the device tier.
    pub n_pages: u32,
    /// Pages of the host tier.
    pub n_host_pages: u32,
    /// Whether and how well sequences run on pages of the host tier.
    pub host_reads: HostReads,
    /// Tokens of one page.
    pub page_len: u32,
    /// How keys and values are stored.
    pub kv_dtype: KvDtype,
    /// Most tokens of one sequence.
    pub max_context: u32,
    /// How far back every layer of the model sees; pages before it are freed.
    pub window: Option<u32>,
    /// Most sequences that run at one time.
    pub max_seqs: u32,
    /// Most tokens computed in one step.
    pub max_rows: u32,
    /// Bytes of the weights.
    pub weights: u64,
    /// Bytes of the KV pages on the device; if they are far, of what is kept of them there.
    pub kv: u64,
    /// Bytes of the KV pages on the host.
    pub host_kv: u64,
    /// What is kept of pages that are far.
    pub near: Option<NearSizes>,
    /// Bytes of tables, activations and logits.
    pub working: u64,
    /// Bytes of what the device decides by.
    pub deciding: u64,
}

impl SizeRequest {
    /// What a model's files say, with everything else at its default: eight sequences, steps of
    /// 512 tokens, and four fifths of the `available` bytes.
    pub fn for_model(files: &ModelFiles, kv_dtype: KvDtype, available: u64) -> Self {
        let config = files.config();
        let [hidden, ff, head_dim] = [config.hidden, config.ff, config.head_dim].map(u64::from);
        let heads = u64::from(config.n_heads) * head_dim;
        let kv_heads = u64::from(config.n_kv_heads) * head_dim;
        SizeRequest {
            kv: kv_shape(config, kv_dtype),
            digest_page_bytes: 0,
            deciding: 0,
            weights: files.weight_bytes(),
            vocab: config.vocab,
            // The residual stream and its norm; q, k and v; the attended heads; gate, up and both
            // together.
            row_floats: 2 * hidden + 2 * heads + 2 * kv_heads + 3 * ff,
            window: config.widest_window(),
            model_context: config.max_context,
            max_context: None,
            max_seqs: 8,
            max_rows: 512,
            available,
            budget: Budget::Share(0.8),
            host_bytes: 0,
            host_reads: HostReads::Near,
            far: None,
        }
    }
}

impl Sizes {
    /// [`Sizes::compute`] with steps of `most_rows`, or fewer where there is no room for what they write, but not
    /// fewer than the request has.
    pub fn with_rows(request: &SizeRequest, most_rows: u32) -> Result<Self, MemoryError> {
        let sizes =
            Self::compute(&SizeRequest { max_rows: most_rows.max(request.max_rows), ..*request });
        match sizes {
            Err(_) if most_rows > request.max_rows => Self::with_rows(request, most_rows / 2),
            sizes => sizes,
        }
    }

    /// Computes the sizes, or says what does not fit.
    ///
    /// There are never more pages than all sequences need at full length: a small model in a large
    /// machine does not take memory that it cannot use. A sequence of a model with a window needs the
    /// pages of its window and of one step, however long it is. One that may spill has the pages of
    /// both tiers.
    pub fn compute(request: &SizeRequest) -> Result<Self, MemoryError> {
        check(request)?;
        let far = request.far.map(|far| FarRoom::new(request, &far)).transpose()?;
        let kv_budget = match &far {
            Some(room) => room.host_bytes,
            None => kv_budget(request)?,
        };
        let page_bytes = request.kv.page_bytes() as u64 + request.digest_page_bytes;
        let page_len = u64::from(request.kv.page_len);
        let n_affordable = match &far {
            Some(room) => (kv_budget / room.host_page).min(room.n_digests),
            None => kv_budget / page_bytes,
        };
        let may_spill = request.host_reads != HostReads::Never;
        let n_spilled = if may_spill { request.host_bytes / page_bytes } else { 0 };
        let n_reachable = n_affordable + n_spilled;
        let asked = request.max_context.unwrap_or(request.model_context);
        let least = request.max_context.unwrap_or(CONTEXT_MIN);
        let fits = n_reachable * page_len;
        if n_affordable == 0 || pages_per_seq(request, least) > n_reachable {
            return Err(MemoryError::Context {
                max_context: asked,
                kv_needed: pages_per_seq(request, asked) * page_bytes,
                kv_budget: kv_budget + n_spilled * page_bytes,
                fits,
            });
        }
        let max_context = match u32::try_from(fits) {
            Ok(fits) if pages_per_seq(request, asked) > n_reachable => asked.min(fits),
            _ => asked,
        };
        let pages_wanted = u64::from(request.max_seqs) * pages_per_seq(request, max_context);
        // Tokens are counted in 32 bits everywhere.
        let pages_countable = u64::from(u32::MAX) / page_len;
        let n_pages = n_affordable.min(pages_wanted).min(pages_countable);
        let n_host_pages = (request.host_bytes / page_bytes).min(pages_countable - n_pages);
        let countable = |n: u64| u32::try_from(n).expect("at most 2^32 - 1 tokens");
        let near = far.as_ref().map(|room| room.near(request, n_pages));
        let both = far.as_ref().zip(near);
        let far_bytes = both.map_or(0, |(room, near)| room.host_kv(request, n_pages, &near));
        let deciding = both
            .map_or(request.deciding, |(room, near)| room.deciding(request, near.n_layers.into()));
        Ok(Sizes {
            n_pages: countable(n_pages),
            n_host_pages: countable(n_host_pages),
            host_reads: request.host_reads,
            page_len: request.kv.page_len,
            kv_dtype: request.kv.dtype,
            max_context,
            window: request.window,
            max_seqs: request.max_seqs,
            max_rows: request.max_rows,
            weights: request.weights,
            kv: near.map_or(n_pages * page_bytes, |near| near.bytes()),
            host_kv: far_bytes + n_host_pages * page_bytes,
            near,
            working: working_bytes(request),
            deciding,
        })
    }

    /// Bytes of everything together.
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.host_kv + self.working + self.deciding
    }

    /// The executor's part.
    pub fn capacity(&self) -> Capacity {
        Capacity {
            max_rows: self.max_rows,
            max_seqs: self.max_seqs,
            max_context: self.max_context,
            page_len: self.page_len,
            n_slots: self.cache().slots().total(),
        }
    }

    /// The cache's part.
    pub fn cache(&self) -> nuthatch_cache::Config {
        let Sizes { page_len, n_pages, n_host_pages, .. } = *self;
        nuthatch_cache::Config { page_len, n_pages, n_host_pages }
    }

    /// The scheduler's part; the queue has its default length.
    pub fn scheduler(&self) -> nuthatch_scheduler::Config {
        nuthatch_scheduler::Config {
            max_batched_tokens: self.max_rows,
            max_seqs: self.max_seqs,
            max_context: self.max_context,
            window: self.window,
            ..nuthatch_scheduler::Config::default()
        }
    }
}

/// The shortest context that is worth an engine: a prompt of one token and its answer.
const CONTEXT_MIN: u32 = 2;

fn check(request: &SizeRequest) -> Result<(), MemoryError> {
    let least = |field, value: u64, least: u64, allowed| {
        if value >= least { Ok(()) } else { Err(MemoryError::Invalid { field, value, allowed }) }
    };
    let at_least_1 = "at least 1";
    least("page_len", request.kv.page_len.into(), 1, at_least_1)?;
    least("bytes of KV for one token", request.kv.token_bytes() as u64, 1, at_least_1)?;
    least("max_seqs", request.max_seqs.into(), 1, at_least_1)?;
    let per_seq = "at least max_seqs, so that every running sequence has its turn";
    least("max_rows", request.max_rows.into(), request.max_seqs.into(), per_seq)?;
    let context = request.max_context.unwrap_or(request.model_context);
    least("max_context", context.into(), CONTEXT_MIN.into(), "at least 2")
}

/// The most pages that one sequence of `n_tokens` holds at one time.
fn pages_per_seq(request: &SizeRequest, n_tokens: u32) -> u64 {
    let page_len = request.kv.page_len;
    let n_pages = match request.window {
        Some(n_tokens_seen) => Window { n_tokens: n_tokens_seen, max_chunk: request.max_rows }
            .pages_max(n_tokens, page_len),
        None => n_tokens.div_ceil(page_len),
    };
    u64::from(n_pages)
}

/// Bytes that pages of the device may take.
fn kv_budget(request: &SizeRequest) -> Result<u64, MemoryError> {
    let SizeRequest { weights, available, host_bytes, deciding, max_seqs, .. } = *request;
    let working = working_bytes(request);
    let taken = [working, host_bytes, deciding].into_iter().fold(weights, u64::saturating_add);
    let too_few =
        |usable| MemoryError::Weights { weights, working, deciding, max_seqs, host_bytes, usable };
    match request.budget {
        Budget::KvBytes(kv_asked) => {
            if taken > available {
                return Err(too_few(available));
            }
            if kv_asked > available - taken {
                return Err(MemoryError::Kv {
                    kv_asked,
                    host_bytes,
                    weights,
                    working,
                    deciding,
                    max_seqs,
                    available,
                });
            }
            Ok(kv_asked)
        }
        Budget::Share(share) => {
            // A share that is no number becomes 0, and the error below.
            let usable = (available as f64 * share.clamp(0.0, 1.0)) as u64;
            if taken >= usable {
                return Err(too_few(usable));
            }
            Ok(usable - taken)
        }
        Budget::OutsideBytes(_) if taken > available => Err(too_few(available)),
        Budget::OutsideBytes(kv_asked) => Ok(kv_asked),
    }
}

/// Bytes of tables, activations and logits. The tables are those of the context that was asked
/// for, which bounds the one that is used.
fn working_bytes(request: &SizeRequest) -> u64 {
    const FLOAT: u64 = size_of::<f32>() as u64;
    let max_seqs = u64::from(request.max_seqs);
    let context = u64::from(request.max_context.unwrap_or(request.model_context));
    let tables = max_seqs * context.div_ceil(u64::from(request.kv.page_len)) * FLOAT;
    // Logits lie on the device and, for sampling, on the host; sampling needs about as much again
    // for one sequence.
    let logits = (2 * max_seqs + 4) * u64::from(request.vocab) * FLOAT;
    let activations = u64::from(request.max_rows).saturating_mul(request.row_floats * FLOAT);
    tables.saturating_add(logits).saturating_add(activations)
}

#[cfg(test)]
mod tests;
