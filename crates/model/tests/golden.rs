//! The forward pass on the CPU against Hugging Face transformers, on tiny random models.
//!
//! Each model computes the golden's whole sequence (prompt and greedy tokens) over a paged cache
//! whose slots are out of order, cut into steps in several ways. The logits are held against the
//! reference, the argmaxes against its greedy tokens, and the cuts against each other: those agree bit
//! for bit, because a row's result does not depend on the rows beside it.

mod common;

use std::sync::Arc;

use common::Golden;
use nuthatch_backend::{Backend, BatchLayout};
use nuthatch_backend_cpu::{Cpu, CpuConfig, Isa};
use nuthatch_model::{BatchLimits, Model, ModelFiles, PAGE_LEN, kv_shape};
use nuthatch_store::KvStore;
use nuthatch_types::{KvDtype, Slot};

/// Largest difference of a logit, as a share of the logits' standard deviation: for weights that are
/// floats, what f32 sums in another order make of it.
const FLOAT_TOLERANCE: f32 = 2e-3;
/// The same for quantised weights, whose products round the activations to eight bits.
const QUANT_TOLERANCE: f32 = 0.15;

/// Runs the golden's sequence in steps of `cut` tokens and returns the logits of every position.
fn logits_of(golden: &Golden, isa: Isa, cut: usize) -> Vec<Vec<f32>> {
    let backend = Arc::new(Cpu::new(CpuConfig { threads: 2, isa: Some(isa) }).unwrap());
    let files = ModelFiles::open(&golden.model).unwrap();
    let tokens = golden.tokens();
    let limits = BatchLimits {
        max_rows: cut,
        max_seqs: 1,
        max_context: golden.max_context,
        max_outputs: cut,
        kv_dtype: KvDtype::F32,
    };
    let mut model = Model::load(Arc::clone(&backend), &files, &limits).unwrap();
    let shape = kv_shape(files.config(), limits.kv_dtype);
    let n_pages = tokens.len().div_ceil(PAGE_LEN as usize) as u32;
    let mut store = KvStore::new(&*backend, shape, n_pages + 3).unwrap();
    let mut tables = backend.alloc_tables(1, n_pages).unwrap();
    // Backwards, and not from the end: an identity map would hide a confusion of page and slot.
    let slots: Vec<Slot> = (0..n_pages).map(|page| Slot(n_pages + 1 - page)).collect();
    backend.write_table(&mut tables, 0, 0, &slots).unwrap();

    let vocab = files.config().vocab as usize;
    let mut logits = Vec::new();
    for (step, chunk) in tokens.chunks(cut).enumerate() {
        let (start, rows) = ((step * cut) as u32, chunk.len() as u32);
        let layout = BatchLayout {
            tokens: chunk.to_vec(),
            positions: (start..start + rows).collect(),
            query_start: vec![0, rows],
            kv_len: vec![start + rows],
            table_row: vec![0],
            output_rows: (0..rows).collect(),
        };
        let out = model.forward(&mut store, &tables, &layout).unwrap();
        let mut flat = vec![0.0; chunk.len() * vocab];
        backend.read(out, &mut flat).unwrap();
        logits.extend(flat.chunks(vocab).map(<[f32]>::to_vec));
    }
    logits
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
    best.0 as u32
}

fn deviation(values: &[Vec<f32>]) -> f32 {
    let all: Vec<f32> = values.iter().flatten().copied().collect();
    let mean = all.iter().sum::<f32>() / all.len() as f32;
    (all.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / all.len() as f32).sqrt()
}

/// Holds one run against the golden and returns its error.
fn check(golden: &Golden, logits: &[Vec<f32>], what: &str) -> f32 {
    let is_quantised = golden.name.contains("q4_0") || golden.name.contains("q8_0");
    let tolerance = if is_quantised { QUANT_TOLERANCE } else { FLOAT_TOLERANCE };
    let unit = deviation(&golden.logits);
    let mut worst = 0f32;
    for (&row, expected) in golden.rows.iter().zip(&golden.logits) {
        let found = &logits[row as usize];
        assert_eq!(found.len(), expected.len());
        for (token, (x, y)) in found.iter().zip(expected).enumerate() {
            let error = (x - y).abs() / unit;
            assert!(error <= tolerance, "{what}: position {row}, token {token}: {x}, not {y}");
            worst = worst.max(error);
        }
    }
    if !is_quantised {
        let last = golden.prompt.len() - 1;
        let greedy: Vec<u32> =
            (0..golden.greedy.len()).map(|i| argmax(&logits[last + i])).collect();
        assert_eq!(greedy, golden.greedy, "{what}");
    }
    worst
}

/// Every instruction set that this machine has.
fn instruction_sets() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()).collect()
}

#[test]
fn logits_are_those_of_transformers_however_the_sequence_is_cut() {
    for golden in Golden::all() {
        let whole = golden.tokens().len();
        let mut worst = 0f32;
        for isa in instruction_sets() {
            let at_once = logits_of(&golden, isa, whole);
            worst = worst.max(check(&golden, &at_once, &format!("{} on {isa}", golden.name)));
            for cut in [1, 7, PAGE_LEN as usize] {
                let cut_up = logits_of(&golden, isa, cut);
                assert!(cut_up == at_once, "{} on {isa}: steps of {cut} differ", golden.name);
            }
        }
        println!("{}: largest difference {worst:.1e} of a standard deviation", golden.name);
    }
}

#[test]
fn half_precision_keys_and_values_stay_close() {
    let golden = Golden::read("llama3");
    let backend = Arc::new(Cpu::new(CpuConfig { threads: 1, isa: None }).unwrap());
    let files = ModelFiles::open(&golden.model).unwrap();
    for kv_dtype in [KvDtype::F16, KvDtype::Bf16] {
        let limits = BatchLimits {
            max_rows: 64,
            max_seqs: 1,
            max_context: golden.max_context,
            max_outputs: 1,
            kv_dtype,
        };
        assert!(Model::load(Arc::clone(&backend), &files, &limits).is_ok(), "{kv_dtype}");
    }
}
