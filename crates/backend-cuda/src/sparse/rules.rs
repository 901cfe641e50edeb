//! Rules that a device decides by, as its kernels have them.

use nuthatch_backend::topk::{HeadNumbers, Mix};
use nuthatch_backend::{DeviceError, Rules};

use crate::device::{Device, Kernel, Memory};
use crate::kv::PAGE_LEN;
use crate::launch::sparse::HeadState;
use crate::launch::sparse_score::{HeadRule, NOTHING, REUSES, WHOLE, most_blocks};

use super::decide::WHAT;

/// Rules as the kernels have them.
pub(super) struct DeviceRules {
    pub(super) rules: Rules,
    /// Whether every query is served by a selection that is there, however it has turned.
    pub(super) serves_all: bool,
    pub(super) kernel: Kernel,
    /// The same for a layer that is decided about while the one before is computed.
    pub(super) beside: Kernel,
    /// Their blocks that can be on the device at once.
    pub(super) n_at_once: usize,
    pub(super) n_beside: usize,
    /// `[layer][G]`, and `[layer][G][group]`.
    pub(super) head_rules: Memory,
    pub(super) importances: Memory,
    /// Where each head's working set begins, and how many pages it has.
    pub(super) pages: Vec<(usize, usize)>,
    /// Bytes of a page.
    pub(super) set_page: usize,
}

impl DeviceRules {
    pub(super) fn new(
        device: &Device,
        [kernel, beside]: [Kernel; 2],
        (max_context, set_page): (usize, usize),
        rules: &Rules,
    ) -> Result<Self, DeviceError> {
        let head_rule = |head: &HeadNumbers| {
            let &HeadNumbers { threshold, weight, soft, .. } = head;
            HeadRule { threshold, weight, soft, padding: 0 }
        };
        let head_rules: Vec<HeadRule> = rules.heads.iter().map(head_rule).collect();
        let importances: Vec<f32> =
            rules.heads.iter().flat_map(|head| head.importances.iter().copied()).collect();
        let made = DeviceRules {
            n_at_once: most_blocks(device, &kernel)?,
            n_beside: most_blocks(device, &beside)?,
            kernel,
            beside,
            head_rules: device.alloc(size_of_val(&head_rules[..]), WHAT)?,
            importances: device.alloc(size_of_val(&importances[..]), WHAT)?,
            pages: working_sets(rules, max_context),
            set_page,
            serves_all: serves_all(rules),
            rules: rules.clone(),
        };
        device.upload(&made.head_rules, 0, &head_rules)?;
        device.upload(&made.importances, 0, &importances)?;
        Ok(made)
    }

    /// Whether a sequence of so many tokens has places to choose from.
    pub(super) fn has_choice_at(&self, kv_len: u32) -> bool {
        let Rules { sinks, recent, has_choice, .. } = self.rules;
        has_choice && kv_len.saturating_sub(recent) > sinks
    }

    /// Bytes of the working sets of all heads.
    pub(super) fn set_bytes(&self) -> usize {
        self.pages.last().map_or(0, |&(first, n)| (first + n) * self.set_page)
    }

    /// What is remembered of the heads of a sequence that is new.
    pub(super) fn empty_states(&self) -> Vec<HeadState> {
        let empty = |&(first, n)| HeadState::empty(first * self.set_page, n);
        self.pages.iter().map(empty).collect()
    }

    /// How similarities are mixed, as the kernel calls it.
    pub(super) fn aggregate(&self) -> u32 {
        self.rules.reuse.map_or(0, |reuse| match reuse.mix {
            Mix::Harmonic => 0,
            Mix::Least => 1,
            Mix::Mean => 2,
        })
    }

    /// Flags of the kernel.
    pub(super) fn flags(&self) -> u32 {
        let Rules { reuse, is_whole, has_choice, .. } = &self.rules;
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        flag(reuse.is_some(), REUSES) + flag(*is_whole, WHOLE) + flag(!has_choice, NOTHING)
    }
}

fn serves_all(rules: &Rules) -> bool {
    let never_ages = rules.reuse.is_some_and(|reuse| reuse.max_age.is_none());
    never_ages && rules.heads.iter().all(|head| head.soft <= -1.0)
}

/// Where working sets begin and how many pages each has, for sequences of up to `n` tokens.
fn working_sets(rules: &Rules, n: usize) -> Vec<(usize, usize)> {
    let mut first = 0;
    let of = |head: &HeadNumbers| {
        let wanted = (rules.percent * f64::from(head.weight) * n as f64 / 100.0).ceil();
        let n = if rules.has_choice { n } else { 0 };
        let k = (wanted as u64).max(u64::from(rules.k_min)).min(u64::from(rules.k_max));
        let k = k.min(n as u64);
        let rows = (k as f32 * rules.working_set).ceil() as usize;
        let n_pages = rows.max(k as usize).min(n).div_ceil(PAGE_LEN) + 1;
        first += n_pages;
        (first - n_pages, n_pages)
    };
    rules.heads.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use nuthatch_backend::ScoreBy;
    use nuthatch_backend::topk::ReuseRule;

    use super::*;

    #[test]
    fn working_sets_have_room_for_what_the_rules_allow() {
        let head = |weight| HeadNumbers {
            threshold: 0.8,
            soft: f32::INFINITY,
            weight,
            importances: vec![1.0],
        };
        let rules = Rules {
            by: ScoreBy::Keys,
            percent: 10.0,
            k_min: 16,
            k_max: 300,
            sinks: 4,
            recent: 4,
            fade: 0,
            working_set: 2.0,
            is_whole: false,
            reuse: None,
            has_choice: true,
            first_layer: 0,
            heads: vec![head(1.0), head(0.01), head(9.0)],
        };
        // 100, 16 and 300 rows, twice, in pages of 16 and one more.
        assert_eq!(working_sets(&rules, 1000), [(0, 14), (14, 3), (17, 39)]);
        assert_eq!(working_sets(&Rules { has_choice: false, ..rules.clone() }, 1000)[2], (2, 1));
        assert!(!serves_all(&rules));
        let mut soft = Rules { reuse: Some(ReuseRule { mix: Mix::Mean, max_age: None }), ..rules };
        soft.heads.iter_mut().for_each(|head| head.soft = -1.0);
        assert!(serves_all(&soft));
        soft.heads[1].soft = -0.5;
        assert!(!serves_all(&soft));
    }
}
