//! The arithmetic of KV memory: `2 x layers x KV heads x (head width x bytes + scale)` for each token.

use nuthatch_backend::cold::vector_bytes;
use nuthatch_model::PAGE_LEN;
use nuthatch_types::{ColdDtype, KvDtype, KvShape, LayerSet};
use serde::Serialize;

use super::shape::PlanModel;

/// Types of KV elements; what is no type of memory is int4, for `--kv-cold-dtype` alone.
const DTYPES: [(&str, Option<KvDtype>); 6] = [
    ("f32", Some(KvDtype::F32)),
    ("f16", F16),
    ("bf16", Some(KvDtype::Bf16)),
    ("fp8", Some(KvDtype::Fp8(LayerSet::NONE))),
    ("int8", Some(KvDtype::Int8(LayerSet::NONE))),
    ("int4", None),
];
const F16: Option<KvDtype> = Some(KvDtype::F16);

/// Contexts that every report shows, besides the asked one.
const CONTEXTS: [u32; 4] = [2 << 10, 8 << 10, 32 << 10, 128 << 10];

/// What the user wants to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    /// Most tokens of a sequence.
    pub(super) context: u32,
    /// Sequences at one time.
    pub(super) batch: u32,
    /// Average tokens of a sequence; half the context if not given.
    pub(super) average: Option<u32>,
    /// Memory for weights and KV, if known.
    pub(super) memory: Option<u64>,
    /// Whether the user gave it.
    pub(super) memory_is_given: bool,
}

/// Everything that the command prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Report {
    pub(super) model: PlanModel,
    pub(super) page_len: u32,
    /// By how much the asked context stretches the model's, if it is longer.
    pub(super) rope_scale: Option<u32>,
    pub(super) per_token: Vec<PerToken>,
    pub(super) per_sequence: Vec<PerSequence>,
    pub(super) batch: Batch,
    pub(super) fit: Option<Fit>,
}

/// KV of one token in one type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct PerToken {
    pub(super) dtype: &'static str,
    /// Whether memory may hold it, and not only a disk.
    #[serde(rename = "supported")]
    pub(super) is_supported: bool,
    /// If every query head had its own KV head.
    pub(super) mha_bytes: u64,
    /// With the model's own KV heads.
    pub(super) bytes: u64,
}

/// KV of one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct PerSequence {
    pub(super) context: u32,
    pub(super) mha_f16_bytes: u64,
    /// By type.
    pub(super) bytes: Vec<(&'static str, u64)>,
}

/// KV of the asked batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Batch {
    pub(super) n_seqs: u32,
    pub(super) context: u32,
    pub(super) f16_bytes: u64,
}

/// How many sequences a memory holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Fit {
    pub(super) memory_bytes: u64,
    pub(super) memory_is_given: bool,
    pub(super) weights_bytes: u64,
    /// What the weights leave, if they fit.
    pub(super) kv_bytes: Option<u64>,
    pub(super) context: u32,
    pub(super) average: u32,
    pub(super) rows: Vec<FitRow>,
}

/// How many sequences fit with one type of KV.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct FitRow {
    pub(super) dtype: &'static str,
    /// With pages on demand.
    pub(super) paged_seqs: u64,
    /// Share of the pages' tokens that stays empty.
    pub(super) paged_waste: f64,
    /// With the whole context reserved for each sequence.
    pub(super) contiguous_seqs: u64,
    /// Share of the reservation that stays empty.
    pub(super) contiguous_waste: f64,
}

impl FitRow {
    /// How many times more sequences paging admits.
    pub(super) fn gain(&self) -> Option<f64> {
        (self.contiguous_seqs > 0).then(|| self.paged_seqs as f64 / self.contiguous_seqs as f64)
    }
}

impl Report {
    /// Computes everything.
    pub(super) fn new(model: &PlanModel, ask: &Ask) -> Self {
        let mut contexts: Vec<u32> = CONTEXTS.into_iter().chain([ask.context]).collect();
        contexts.sort_unstable();
        contexts.dedup();
        let per_token = DTYPES.iter().map(|&(name, dtype)| PerToken {
            dtype: name,
            is_supported: dtype.is_some(),
            mha_bytes: token_bytes(model, model.n_heads, dtype),
            bytes: token_bytes(model, model.n_kv_heads, dtype),
        });
        let per_sequence = contexts.iter().map(|&context| PerSequence {
            context,
            mha_f16_bytes: token_bytes(model, model.n_heads, F16) * u64::from(context),
            bytes: DTYPES
                .iter()
                .map(|&(name, dtype)| {
                    (name, token_bytes(model, model.n_kv_heads, dtype) * u64::from(context))
                })
                .collect(),
        });
        let f16_bytes = token_bytes(model, model.n_kv_heads, F16)
            * u64::from(ask.context)
            * u64::from(ask.batch);
        Report {
            model: model.clone(),
            page_len: PAGE_LEN,
            rope_scale: (ask.context > model.context)
                .then(|| ask.context.div_ceil(model.context.max(1))),
            per_token: per_token.collect(),
            per_sequence: per_sequence.collect(),
            batch: Batch { n_seqs: ask.batch, context: ask.context, f16_bytes },
            fit: ask.memory.map(|memory| fit(model, ask, memory)),
        }
    }

    /// How query heads share KV heads, for people.
    pub(super) fn sharing(&self) -> String {
        let group = self.model.n_heads / self.model.n_kv_heads.max(1);
        match self.sharing_name() {
            "MHA" => "full multi-head attention".to_owned(),
            name => format!("{name}, {group} times smaller than MHA"),
        }
    }

    /// The name of how query heads share KV heads.
    pub(super) fn sharing_name(&self) -> &'static str {
        match self.model.n_kv_heads {
            n if n == self.model.n_heads => "MHA",
            1 => "MQA",
            _ => "GQA",
        }
    }
}

/// Keys and values of one token over all layers that own them, with their scales.
fn token_bytes(model: &PlanModel, n_kv_heads: u32, dtype: Option<KvDtype>) -> u64 {
    let PlanModel { n_kv_layers: n_layers, head_dim, .. } = *model;
    let Some(dtype) = dtype else {
        let vector = vector_bytes(ColdDtype::Int4, head_dim as usize) as u64;
        return 2 * u64::from(n_layers) * u64::from(n_kv_heads) * vector;
    };
    KvShape { n_layers, n_kv_heads, head_dim, page_len: PAGE_LEN, dtype }.token_bytes() as u64
}

fn fit(model: &PlanModel, ask: &Ask, memory: u64) -> Fit {
    let average = ask.average.unwrap_or(ask.context.div_ceil(2)).min(ask.context);
    let kv_bytes = memory.checked_sub(model.weights.bytes);
    let rows = DTYPES.iter().filter(|(_, dtype)| dtype.is_some()).map(|&(name, dtype)| {
        let token = token_bytes(model, model.n_kv_heads, dtype);
        // Sequences end anywhere in a page, so half of the last one is empty on average.
        let paged_tokens = u64::from(average) + u64::from(PAGE_LEN / 2);
        let kv = kv_bytes.unwrap_or(0);
        FitRow {
            dtype: name,
            paged_seqs: kv / (token * paged_tokens).max(1),
            paged_waste: 1.0 - f64::from(average) / paged_tokens as f64,
            contiguous_seqs: kv / (token * u64::from(ask.context)).max(1),
            contiguous_waste: 1.0 - f64::from(average) / f64::from(ask.context),
        }
    });
    Fit {
        memory_bytes: memory,
        memory_is_given: ask.memory_is_given,
        weights_bytes: model.weights.bytes,
        kv_bytes,
        context: ask.context,
        average,
        rows: rows.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::shape;

    fn report(model: &str, context: u32, memory: Option<u64>, average: Option<u32>) -> Report {
        let model = shape::find(model).unwrap().into_plan_model();
        Report::new(&model, &Ask { context, batch: 8, average, memory, memory_is_given: true })
    }

    #[test]
    fn llama2_70b_costs_what_the_textbook_says() {
        let report = report("llama2-70b", 8 << 10, None, None);
        let f16 = report.per_token.iter().find(|row| row.dtype == "f16").unwrap();
        assert_eq!(f16.mha_bytes, 5 << 19, "2.5 MiB with full multi-head attention");
        assert_eq!(f16.bytes, 320 << 10, "320 KiB with grouped queries");
        let fp8 = report.per_token.iter().find(|row| row.dtype == "fp8").unwrap();
        assert_eq!(fp8.bytes, 165 << 10, "160 KiB in 8 bits, and a scale for each vector");
        assert_eq!(report.rope_scale, Some(2), "the model was made for 4K");
        let gib = |context: u32| {
            let row = report.per_sequence.iter().find(|row| row.context == context).unwrap();
            let f16 = row.bytes.iter().find(|(dtype, _)| *dtype == "f16").unwrap().1;
            (f16 as f64 / (1u64 << 30) as f64, row.mha_f16_bytes >> 30)
        };
        assert_eq!(gib(2 << 10), (0.625, 5));
        assert_eq!(gib(8 << 10), (2.5, 20));
        assert_eq!(gib(32 << 10), (10.0, 80));
        assert_eq!(gib(128 << 10), (40.0, 320));
        assert_eq!(report.batch.f16_bytes, 20 << 30);
        assert_eq!(report.fit, None);
    }

    #[test]
    fn paging_admits_what_reservation_wastes() {
        // 160 GB hold 140 GB of weights and 20 GB of KV, as in the textbook.
        let report = report("llama2-70b", 8 << 10, Some(160_000_000_000), Some(2 << 10));
        let fit = report.fit.unwrap();
        let f16 = fit.rows.iter().find(|row| row.dtype == "f16").unwrap();
        assert_eq!(f16.contiguous_seqs, 8);
        assert_eq!(f16.contiguous_waste, 0.75);
        assert_eq!(f16.paged_seqs, 32);
        assert!(f16.paged_waste < 0.004);
        assert_eq!(f16.gain(), Some(4.0));
    }

    #[test]
    fn weights_that_do_not_fit_leave_nothing() {
        let fit = report("llama2-70b", 8 << 10, Some(80 << 30), None).fit.unwrap();
        assert_eq!(fit.kv_bytes, None);
        assert!(fit.rows.iter().all(|row| row.paged_seqs == 0 && row.gain().is_none()));
    }

    #[test]
    fn an_average_longer_than_the_context_is_the_context() {
        let fit = report("llama3-8b", 8 << 10, Some(80 << 30), Some(1 << 20)).fit.unwrap();
        assert_eq!(fit.average, 8 << 10);
    }
}
