//! A text without end in a cache of fixed size, and how well the model reads it.
//!
//! ```text
//! cargo run --release -p nuthatch-engine --example streaming -- MODEL [TOKENS [WINDOW [SINKS]]]
//! ```
//!
//! Samples `TOKENS` tokens (3000) from the model alone, keeping `SINKS` (4) and `WINDOW` (512) of
//! them; a window of 0 keeps everything. Then the same model reads the text in a fresh cache, each
//! segment after the one before it, and its perplexity is printed: a text that has fallen apart is
//! improbable to a model that sees it as it is.

#![expect(clippy::print_stdout, reason = "a measurement prints")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use nuthatch_backend::{Backend, BatchLayout};
use nuthatch_backend_cpu::{Cpu, CpuConfig};
use nuthatch_engine::{Budget, Engine, EngineOptions, Output, SizeRequest, Sizes, Submission};
use nuthatch_model::{BatchLimits, Model, ModelFiles, PAGE_LEN, kv_shape};
use nuthatch_store::KvStore;
use nuthatch_types::{KvDtype, KvSlots, Limits, Sampling, Slot, Streaming, SystemClock, TokenId};

/// Tokens of a segment.
const SEGMENT: usize = 256;

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("the path of a model is missing")?;
    let mut number = |default: u32| args.next().map_or(Ok(default), |text| text.parse());
    let (n_tokens, window, n_sinks) = (number(3000)?, number(512)?, number(4)?);
    let streaming = (window > 0).then_some(Streaming { n_sinks, window });
    let files = ModelFiles::open(Path::new(&path))?;
    let backend = Arc::new(Cpu::new(CpuConfig::default())?);
    println!("{path}: {n_tokens} tokens, {streaming:?}, {}", backend.name());

    let (text, segments) = generate(&backend, &files, n_tokens, streaming)?;
    let mut reader = Reader::new(backend, &files)?;
    println!("{:>10} {:>12} {:>12} {:>6}", "tokens", "as sampled", "read afresh", "pages");
    for (i, segment) in segments.iter().enumerate() {
        let end = (i + 1) * SEGMENT;
        let start = end.saturating_sub(2 * SEGMENT);
        let n_read = if i == 0 { SEGMENT - 1 } else { SEGMENT };
        let read = reader.perplexity(&text[start..end], n_read)?;
        println!("{end:>10} {:>12.2} {read:>12.2} {:>6}", segment.perplexity, segment.pages);
    }
    Ok(())
}

/// What is known of a segment when it was sampled.
struct Sampled {
    /// Under the cache that it was sampled with.
    perplexity: f64,
    /// Pages in use at its end.
    pages: u32,
}

fn generate(
    backend: &Arc<Cpu>,
    files: &ModelFiles,
    n_tokens: u32,
    streaming: Option<Streaming>,
) -> Result<(Vec<TokenId>, Vec<Sampled>), Failure> {
    let request = SizeRequest::for_model(files, KvDtype::F16, 4 << 30);
    let n_pages = match streaming {
        Some(streaming) => streaming.pages_max(PAGE_LEN),
        None => n_tokens / PAGE_LEN + 2,
    };
    let budget = Budget::KvBytes(request.kv.page_bytes() as u64 * u64::from(n_pages));
    let sizes = Sizes::compute(&SizeRequest { max_seqs: 1, budget, ..request })?;
    let clock = Arc::new(SystemClock::start());
    let engine =
        Engine::load(Arc::clone(backend), files, &sizes, &EngineOptions::default(), clock)?
            .spawn()?;
    let bos = files.config().bos.unwrap_or_default();
    let ticket = engine.submit(Submission {
        prompt: vec![bos],
        // The model's own distribution: a small model that samples less freely falls into loops.
        sampling: Sampling { seed: 1, n_logprobs: Some(0), ..Sampling::default() },
        limits: Limits { max_tokens: n_tokens, ..Limits::default() },
        streaming,
        ..Submission::default()
    })?;
    let (mut text, mut segments) = (vec![bos], Vec::new());
    let mut sum = 0.0;
    while let Some(Output::Token { token, logprob, .. }) = ticket.recv() {
        text.push(token);
        sum += f64::from(logprob.unwrap_or(f32::NAN));
        if text.len().is_multiple_of(SEGMENT) {
            let perplexity = (-sum / SEGMENT as f64).exp();
            let pages = engine.stats().map_or(0, |stats| stats.scheduler.cache.pages_used);
            segments.push(Sampled { perplexity, pages });
            sum = 0.0;
        }
    }
    engine.shutdown()?;
    Ok((text, segments))
}

/// The model with an empty cache.
struct Reader {
    backend: Arc<Cpu>,
    model: Model<Cpu>,
    store: KvStore<Cpu>,
    tables: <Cpu as Backend>::Tables,
}

impl Reader {
    fn new(backend: Arc<Cpu>, files: &ModelFiles) -> Result<Self, Failure> {
        let max_rows = 2 * SEGMENT;
        let kv_dtype = KvDtype::F16;
        let limits = BatchLimits {
            max_rows,
            max_seqs: 1,
            max_context: files.config().max_context as usize,
            max_outputs: max_rows,
            kv_dtype,
        };
        let model = Model::load(Arc::clone(&backend), files, &limits)?;
        let n_pages = max_rows as u32 / PAGE_LEN;
        let shape = kv_shape(files.config(), kv_dtype);
        let store = KvStore::new(&*backend, shape, KvSlots::on_device(n_pages))?;
        let mut tables = backend.alloc_tables(1, n_pages)?;
        let slots: Vec<Slot> = (0..n_pages).map(Slot).collect();
        backend.write_table(&mut tables, 0, 0, &slots)?;
        Ok(Reader { backend, model, store, tables })
    }

    /// How improbable the last `n_read` of the tokens are, each after all before it.
    fn perplexity(&mut self, tokens: &[TokenId], n_read: usize) -> Result<f64, Failure> {
        let rows = tokens.len() as u32;
        let layout = BatchLayout {
            tokens: tokens.iter().map(|token| token.0).collect(),
            positions: (0..rows).collect(),
            query_start: vec![0, rows],
            kv_len: vec![rows],
            table_row: vec![0],
            output_rows: (0..rows).collect(),
        };
        let vocab = self.model.config().vocab as usize;
        let out = self.model.forward(&mut self.store, &self.tables, &layout)?;
        let mut logits = vec![0.0; tokens.len() * vocab];
        self.backend.read(out, &mut logits)?;
        let mut sum = 0.0;
        for i in tokens.len() - n_read..tokens.len() {
            let row = &logits[(i - 1) * vocab..i * vocab];
            let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f64 = row.iter().map(|&x| f64::from(x - top).exp()).sum();
            sum += f64::from(row[tokens[i].0 as usize] - top) - total.ln();
        }
        Ok((-sum / n_read as f64).exp())
    }
}
