//! The forward pass against Hugging Face transformers, on tiny random models: on the CPU, and on a
//! GPU where there is one.
//!
//! Each model computes the golden's whole sequence (prompt and greedy tokens) over a paged cache
//! whose slots are out of order, cut into steps in several ways. The logits are held against the
//! reference, the argmaxes against its greedy tokens, and the cuts against each other: those agree bit
//! for bit, because a row's result does not depend on the rows beside it.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests may panic and print"
)]

mod common;

use std::sync::Arc;

use common::Golden;
use nuthatch_backend::{Backend, BatchLayout};
use nuthatch_backend_cpu::{Cpu, CpuConfig, Isa};
use nuthatch_backend_cuda::{Cuda, CudaConfig, OpenError};
use nuthatch_model::{BatchLimits, Model, ModelFiles, PAGE_LEN, kv_shape};
use nuthatch_store::KvStore;
use nuthatch_types::{KvDtype, KvSlots, LayerSet, Slot};

/// How far logits may be from the reference, as a share of their standard deviation.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
struct Error {
    /// The largest difference of any logit.
    max: f32,
    /// The root of the mean square.
    rms: f32,
}

/// Weights that are floats: f32 sums in another order. Measured: max below 1.5e-5.
const FLOAT: Error = Error { max: 1e-4, rms: 1e-5 };
/// Quantised weights: their products round the activations to eight bits, and these models are too
/// narrow to average it out. Measured: max 0.14, rms 0.023.
const QUANTISED: Error = Error { max: 0.2, rms: 0.04 };
/// Keys and values rounded to 11 bits. Measured: max 5.4e-3.
const KV_F16: Error = Error { max: 0.02, rms: 2e-3 };
/// Keys and values rounded to 8 bits. Measured: max 4.2e-2.
const KV_BF16: Error = Error { max: 0.12, rms: 0.02 };

/// Activations rounded to 8 bits before each product. Guessed: half of what `QUANTISED` allows.
const ROUNDED: Error = Error { max: 0.1, rms: 0.02 };

/// How a golden is run.
#[derive(Clone, Copy, Debug)]
struct Way {
    kv_dtype: KvDtype,
    /// Tokens of one step.
    cut: usize,
}

fn cpu(isa: Isa) -> Arc<Cpu> {
    Arc::new(Cpu::new(CpuConfig { threads: 2, isa: Some(isa) }).unwrap())
}

/// The first GPU, or none where there is no driver.
fn gpu(is_exact: bool) -> Option<Arc<Cuda>> {
    gpu_with(CudaConfig { is_exact, ..CudaConfig::default() })
}

fn gpu_with(config: CudaConfig) -> Option<Arc<Cuda>> {
    let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
    match Cuda::open(0, CudaConfig { cache_dir, ..config }) {
        Ok(cuda) => Some(Arc::new(cuda)),
        Err(error @ (OpenError::NoDriver | OpenError::NoDevice { .. })) => {
            println!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Runs the golden's sequence and returns the logits of every position.
fn logits_of<B: Backend>(backend: &Arc<B>, golden: &Golden, way: Way) -> Vec<Vec<f32>> {
    let Way { kv_dtype, cut } = way;
    let files = ModelFiles::open(&golden.model).unwrap();
    let tokens = golden.tokens();
    let limits = BatchLimits {
        max_rows: cut,
        max_seqs: 1,
        max_context: golden.max_context,
        max_outputs: cut,
        kv_dtype,
    };
    let mut model = Model::load(Arc::clone(backend), &files, &limits).unwrap();
    let shape = kv_shape(files.config(), kv_dtype);
    let n_pages = tokens.len().div_ceil(PAGE_LEN as usize) as u32;
    let mut store = KvStore::new(&**backend, shape, KvSlots::on_device(n_pages + 3)).unwrap();
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

fn error_of(golden: &Golden, logits: &[Vec<f32>]) -> Error {
    let (mut max, mut squares, mut n) = (0f32, 0f32, 0f32);
    for (&row, expected) in golden.rows.iter().zip(&golden.logits) {
        let found = &logits[row as usize];
        assert_eq!(found.len(), expected.len());
        for (x, y) in found.iter().zip(expected) {
            assert!(x.is_finite(), "{}: position {row}", golden.name);
            max = max.max((x - y).abs());
            squares += (x - y).powi(2);
            n += 1.0;
        }
    }
    let unit = deviation(&golden.logits);
    Error { max: max / unit, rms: (squares / n).sqrt() / unit }
}

fn assert_within(error: Error, tolerance: Error, what: &str) {
    println!("{what}: max {:.1e}, rms {:.1e}", error.max, error.rms);
    assert!(error.max <= tolerance.max, "{what}: {error:?}, allowed {tolerance:?}");
    assert!(error.rms <= tolerance.rms, "{what}: {error:?}, allowed {tolerance:?}");
}

/// The greedy tokens that these logits give.
fn greedy_of(golden: &Golden, logits: &[Vec<f32>]) -> Vec<u32> {
    let last = golden.prompt.len() - 1;
    (0..golden.greedy.len()).map(|i| argmax(&logits[last + i])).collect()
}

fn is_quantised(golden: &Golden) -> bool {
    golden.name.contains("q4_0") || golden.name.contains("q8_0")
}

/// Every instruction set that this machine has.
fn instruction_sets() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()).collect()
}

#[test]
fn logits_are_those_of_transformers() {
    for golden in Golden::all() {
        let tolerance = if is_quantised(&golden) { QUANTISED } else { FLOAT };
        for isa in instruction_sets() {
            let way = Way { kv_dtype: KvDtype::F32, cut: golden.tokens().len() };
            let logits = logits_of(&cpu(isa), &golden, way);
            let what = format!("{} on {isa}", golden.name);
            assert_within(error_of(&golden, &logits), tolerance, &what);
            if !is_quantised(&golden) {
                assert_eq!(greedy_of(&golden, &logits), golden.greedy, "{what}");
            }
        }
    }
}

#[test]
fn every_cut_of_a_sequence_gives_the_same_logits() {
    for golden in Golden::all() {
        cuts_agree(&cpu(Isa::detect()), &golden);
    }
}

fn cuts_agree<B: Backend>(backend: &Arc<B>, golden: &Golden) {
    let way = Way { kv_dtype: KvDtype::F16, cut: golden.tokens().len() };
    let whole = logits_of(backend, golden, way);
    for cut in [1, 7, PAGE_LEN as usize] {
        let cut_up = logits_of(backend, golden, Way { cut, ..way });
        assert!(cut_up == whole, "{}: steps of {cut} differ", golden.name);
    }
}

#[test]
fn a_gpu_computes_the_logits_of_transformers() {
    let Some(gpu) = gpu(true) else { return };
    for golden in Golden::all() {
        let way = Way { kv_dtype: KvDtype::F32, cut: golden.tokens().len() };
        let logits = logits_of(&gpu, &golden, way);
        let what = format!("{} on {}", golden.name, gpu.name());
        assert_within(error_of(&golden, &logits), FLOAT, &what);
        assert_eq!(greedy_of(&golden, &logits), golden.greedy, "{what}");
        for (kv_dtype, tolerance) in [(KvDtype::F16, KV_F16), (KvDtype::Bf16, KV_BF16)] {
            let error = error_of(&golden, &logits_of(&gpu, &golden, Way { kv_dtype, ..way }));
            assert_within(error, tolerance, &format!("{what} with {kv_dtype} keys and values"));
        }
        cuts_agree(&gpu, &golden);
    }
}

#[test]
fn a_gpu_that_rounds_activations_stays_close() {
    let Some(gpu) = gpu(false) else { return };
    for golden in Golden::all() {
        let way = Way { kv_dtype: KvDtype::F16, cut: golden.tokens().len() };
        let error = error_of(&golden, &logits_of(&gpu, &golden, way));
        assert_within(error, ROUNDED, &format!("{} on {}, rounded", golden.name, gpu.name()));
        cuts_agree(&gpu, &golden);
    }
}

/// Eight bits are far from none, but a GPU's are no farther than a CPU's.
#[test]
fn eight_bits_on_a_gpu_are_as_close_as_on_a_cpu() {
    let Some(gpu) = gpu(true) else { return };
    let wide = LayerSet::of(&[0]).unwrap();
    for golden in ["llama3", "mistral-window", "qwen3"].map(Golden::read) {
        for kv_dtype in [
            KvDtype::Int8(LayerSet::NONE),
            KvDtype::Fp8(LayerSet::NONE),
            KvDtype::Int8(wide),
            KvDtype::Fp8(wide),
        ] {
            let way = Way { kv_dtype, cut: golden.tokens().len() };
            let here = error_of(&golden, &logits_of(&cpu(Isa::detect()), &golden, way));
            let tolerance = Error { max: 1.5 * here.max, rms: 1.3 * here.rms };
            let whole = logits_of(&gpu, &golden, way);
            let what = format!("{} with {kv_dtype} keys and values", golden.name);
            assert_within(error_of(&golden, &whole), tolerance, &what);
            for cut in [1, 7] {
                let cut_up = logits_of(&gpu, &golden, Way { cut, ..way });
                assert!(cut_up == whole, "{what}: steps of {cut} differ");
            }
        }
    }
}

#[test]
fn a_recorded_pass_gives_the_bits_of_one_that_is_queued() {
    let eager = CudaConfig { is_eager: true, ..CudaConfig::default() };
    let (Some(eager), Some(recorded)) = (gpu_with(eager), gpu(false)) else { return };
    for golden in Golden::all() {
        let way = Way { kv_dtype: KvDtype::F16, cut: 1 };
        let expected = logits_of(&eager, &golden, way);
        assert!(logits_of(&recorded, &golden, way) == expected, "{}", golden.name);
    }
}

#[test]
fn narrow_keys_and_values_stay_close() {
    for name in ["llama3", "mistral-window", "qwen3"] {
        let golden = Golden::read(name);
        for (kv_dtype, tolerance) in [(KvDtype::F16, KV_F16), (KvDtype::Bf16, KV_BF16)] {
            let way = Way { kv_dtype, cut: golden.tokens().len() };
            let error = error_of(&golden, &logits_of(&cpu(Isa::detect()), &golden, way));
            assert_within(error, tolerance, &format!("{name} with {kv_dtype} keys and values"));
        }
    }
}

/// The goldens are worth their bytes only if they notice a small mistake.
#[test]
fn a_changed_detail_is_noticed() {
    for (name, from, to) in [
        ("mistral-window", r#""sliding_window": 21"#, r#""sliding_window": 22"#),
        ("qwen2-window", r#""sliding_attention","#, r#""full_attention","#),
        ("llama-tied", r#""rms_norm_eps": 1e-05"#, r#""rms_norm_eps": 2e-03"#),
        ("llama3", r#""high_freq_factor": 4.0"#, r#""high_freq_factor": 4.5"#),
        ("linear", r#""factor": 4.0"#, r#""factor": 4.01"#),
        ("yarn", r#""beta_fast": 4.0"#, r#""beta_fast": 1.1"#),
        ("yarn-mscale", r#""mscale": 0.7"#, r#""mscale": 0.8"#),
        ("dynamic", r#""factor": 2.0"#, r#""factor": 2.01"#),
        ("longrope", r#""factor": 4.0"#, r#""factor": 5.0"#),
        ("kv-shared-map", "2,\n    0\n  ]", "2,\n    2\n  ]"),
    ] {
        let mut golden = Golden::read(name);
        let dir = tempfile::TempDir::new().unwrap();
        for entry in std::fs::read_dir(&golden.model).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        let path = dir.path().join("config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        assert!(config.contains(from), "{name}: {from} is not in {config}");
        std::fs::write(&path, config.replacen(from, to, 1)).unwrap();
        golden.model = dir.path().to_owned();
        let way = Way { kv_dtype: KvDtype::F32, cut: golden.tokens().len() };
        let error = error_of(&golden, &logits_of(&cpu(Isa::detect()), &golden, way));
        assert!(error.max > 2.0 * FLOAT.max, "{name} with {to}: {error:?} goes unnoticed");
    }
}
