//! What the stages of a step take: every kernel timed by itself, summed by stage and layer.

use nuthatch_backend_cuda::KernelTime;
use serde::Serialize;

use crate::table::{Align, Table};

/// The steps of one test, taken apart.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Breakdown {
    pub(super) test: String,
    pub(super) steps: u32,
    pub(super) stages: Vec<Stage>,
}

/// One stage of all layers, or one that layers do not have; microseconds of a step.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Stage {
    pub(super) name: &'static str,
    /// The kernels that it queues, in order.
    pub(super) kernels: Vec<&'static str>,
    pub(super) total_us: f64,
    /// Of each layer; empty if layers do not have it.
    pub(super) layers_us: Vec<f64>,
}

impl Breakdown {
    /// Of the kernels of some steps.
    pub(super) fn new(test: String, steps: u32, kernels: &[KernelTime]) -> Self {
        let mut stages: Vec<Stage> = Vec::new();
        for kernel in kernels {
            let us = kernel.seconds * 1e6 / f64::from(steps.max(1));
            let at = stages.iter().position(|stage| stage.name == kernel.stage);
            let at = at.unwrap_or_else(|| {
                let (kernels, layers_us) = (Vec::new(), Vec::new());
                stages.push(Stage { name: kernel.stage, kernels, total_us: 0.0, layers_us });
                stages.len() - 1
            });
            let stage = &mut stages[at];
            stage.total_us += us;
            if !stage.kernels.contains(&kernel.name) {
                stage.kernels.push(kernel.name);
            }
            if let Some(layer) = kernel.layer.map(|layer| layer.0 as usize) {
                stage.layers_us.resize(stage.layers_us.len().max(layer + 1), 0.0);
                stage.layers_us[layer] += us;
            }
        }
        Breakdown { test, steps, stages }
    }

    /// A Markdown table.
    pub(super) fn table(&self) -> String {
        let all: f64 = self.stages.iter().map(|stage| stage.total_us).sum();
        let mut table = Table::new([
            ("stage", Align::Left),
            ("us a step", Align::Right),
            ("share", Align::Right),
            ("us a layer", Align::Right),
            ("slowest layer", Align::Right),
            ("kernels", Align::Left),
        ]);
        for stage in &self.stages {
            let layers = &stage.layers_us;
            let slowest = (0..layers.len()).max_by(|&a, &b| layers[a].total_cmp(&layers[b]));
            table.push([
                stage.name.to_owned(),
                format!("{:.1}", stage.total_us),
                format!("{:.1} %", 100.0 * stage.total_us / all.max(f64::MIN_POSITIVE)),
                slowest.map_or_else(String::new, |_| {
                    format!("{:.2}", stage.total_us / layers.len() as f64)
                }),
                slowest.map_or_else(String::new, |i| format!("{i}: {:.2}", layers[i])),
                stage.kernels.join(", "),
            ]);
        }
        format!(
            "\n{}, {} steps, kernels one after the other: {all:.0} us a step\n\n{}",
            self.test,
            self.steps,
            table.markdown()
        )
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::LayerIdx;

    use super::*;

    #[test]
    fn kernels_are_summed_by_stage_and_layer() {
        let kernel = |stage, layer: Option<u32>, name, seconds| KernelTime {
            stage,
            layer: layer.map(LayerIdx),
            name,
            seconds,
        };
        let kernels = [
            kernel("embed", None, "embed", 2e-6),
            kernel("attend", Some(0), "attend_split", 4e-6),
            kernel("attend", Some(0), "merge", 2e-6),
            kernel("attend", Some(1), "attend_split", 8e-6),
        ];
        let breakdown = Breakdown::new("tg2".to_owned(), 2, &kernels);
        let [embed, attend] = &breakdown.stages[..] else { panic!("two stages") };
        assert_eq!((embed.name, embed.layers_us.len()), ("embed", 0));
        assert_eq!(attend.kernels, ["attend_split", "merge"]);
        assert!((attend.total_us - 7.0).abs() < 1e-9);
        assert!((attend.layers_us[0] - 3.0).abs() < 1e-9);
        let table = breakdown.table();
        assert!(table.contains("87.5 %") && table.contains("1: 4.00"), "{table}");
    }
}
