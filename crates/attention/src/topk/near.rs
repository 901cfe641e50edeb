//! How a budget of near memory is shared: digests of all pages, working sets of all heads, and whole
//! heads as far as there is room.

use nuthatch_backend::{Near, NearHead};

use super::head::HeadRule;
use super::policy::{Policy, Reuse};
use super::residency::residency;

/// Steps that a head goes on with one selection before its last rows are read from far, if its
/// policy sets no limit.
const TAIL_STEPS: u32 = 128;

/// What is asked of near memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NearRequest {
    /// Bytes for rows and digests, never exceeded; without it, as many as working sets need.
    pub budget: Option<u64>,
    /// Whether heads stay whole where the budget allows it.
    pub keeps_heads: bool,
    /// Heads of a layer that are fetched ahead in time, and need not stay.
    pub n_prefetchable: u32,
}

/// What near memory is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NearNeeds {
    /// Tables of sequences.
    pub n_tables: u32,
    /// Tokens of a sequence.
    pub max_context: u32,
    /// Bytes of a token's key and value of one head.
    pub row_bytes: usize,
    /// Bytes of the digests of all pages.
    pub digest_bytes: u64,
}

/// How near memory is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NearPlan {
    /// What the device keeps.
    pub near: Near,
    /// `[layer][G]` whether the head stays whole.
    pub is_resident: Vec<bool>,
    /// Bytes of rows.
    pub row_bytes: u64,
    /// Bytes of digests.
    pub digest_bytes: u64,
}

/// Why near memory cannot be used as was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NearError {
    /// The budget is too small.
    #[error(
        "{n_tables} sequences of {max_context} tokens need {rows} bytes for the rows that they \
         attend to and {digests} for digests, not {budget}; fewer sequences, a shorter context or a \
         policy with fewer rows need less"
    )]
    Budget {
        /// What was given.
        budget: u64,
        /// Tables of sequences.
        n_tables: u32,
        /// Tokens of each.
        max_context: u32,
        /// Bytes of rows.
        rows: u64,
        /// Bytes of digests.
        digests: u64,
    },
    /// Layers without KV of their own.
    #[error("layers of this model share keys and values: it cannot be offloaded")]
    SharedLayers,
}

impl NearPlan {
    /// Shares the budget. `rules` are those of each policy, `[layer][G]`, and `similarities` what
    /// adjacent queries of a head have on the average, or nothing.
    pub fn new(
        policies: &[(Policy, &[HeadRule])],
        (n_kv_heads, similarities): (usize, &[f32]),
        needs: &NearNeeds,
        request: &NearRequest,
    ) -> Result<Self, NearError> {
        let n_heads = policies.first().map_or(0, |(_, rules)| rules.len());
        let whole = NearHead { n_first: 0, n_last: needs.max_context, n_chosen: 0 };
        let cost = |head: &NearHead| head.bytes(needs.row_bytes) * u64::from(needs.n_tables);
        // A short context may be as cheap whole.
        let mut is_resident = vec![false; n_heads];
        let mut heads: Vec<NearHead> = (0..n_heads)
            .map(|i| {
                let parts = policies.iter().map(|(policy, rules)| part(policy, &rules[i], needs));
                parts.reduce(larger).unwrap_or_default()
            })
            .collect();
        for (head, is_resident) in heads.iter_mut().zip(&mut is_resident) {
            if request.keeps_heads && cost(&whole) <= cost(head) {
                (*head, *is_resident) = (whole, true);
            }
        }
        let mut rows: u64 = heads.iter().map(cost).sum();
        let digests = needs.digest_bytes;
        let budget = request.budget.unwrap_or(rows + digests);
        let NearNeeds { n_tables, max_context, .. } = *needs;
        let too_few = NearError::Budget { budget, n_tables, max_context, rows, digests };
        let mut room = budget.checked_sub(rows + digests).ok_or(too_few)?;
        let first = policies.first().filter(|_| request.keeps_heads);
        for i in first.map_or(Vec::new(), |(_, rules)| {
            let thresholds: Vec<f32> = rules.iter().map(|rule| rule.threshold).collect();
            let n_prefetchable = request.n_prefetchable as usize;
            residency(n_kv_heads, &thresholds, similarities, n_prefetchable)
        }) {
            let more = cost(&whole).saturating_sub(cost(&heads[i]));
            if is_resident[i] || more > room {
                continue;
            }
            (room, rows) = (room - more, rows + more);
            (heads[i], is_resident[i]) = (whole, true);
        }
        let near = Near { n_tables: needs.n_tables, heads };
        Ok(NearPlan { near, is_resident, row_bytes: rows, digest_bytes: digests })
    }

    /// Heads that stay whole.
    pub fn n_resident(&self) -> usize {
        self.is_resident.iter().filter(|&&is_resident| is_resident).count()
    }
}

/// The rows that one policy needs of a head.
fn part(policy: &Policy, rule: &HeadRule, needs: &NearNeeds) -> NearHead {
    let context = needs.max_context;
    let n_steps = match policy.reuse {
        Reuse::Qsac(qsac) => qsac.max_age.map_or(TAIL_STEPS, |age| age.min(TAIL_STEPS)),
        Reuse::Never | Reuse::PageLru { .. } => 0,
    };
    let n_first = policy.sinks.min(context);
    let n_last = policy.recent.saturating_add(n_steps).clamp(1, context.max(1));
    NearHead { n_first, n_last, n_chosen: policy.rows_max(context, rule.weight) }
}

fn larger(a: NearHead, b: NearHead) -> NearHead {
    NearHead {
        n_first: a.n_first.max(b.n_first),
        n_last: a.n_last.max(b.n_last),
        n_chosen: a.n_chosen.max(b.n_chosen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: NearNeeds =
        NearNeeds { n_tables: 2, max_context: 1000, row_bytes: 256, digest_bytes: 5000 };
    const FREE: NearRequest = NearRequest { budget: None, keeps_heads: true, n_prefetchable: 0 };

    fn plan(policy: &str, request: NearRequest) -> Result<NearPlan, NearError> {
        let policy: Policy = policy.parse().unwrap();
        let rules: Vec<HeadRule> =
            [0.1, 0.9, 0.5, 0.2].map(|importance| HeadRule::new(&policy, &[importance])).into();
        NearPlan::new(&[(policy, &rules)], (2, &[0.8; 4]), &NEEDS, &request)
    }

    #[test]
    fn a_budget_is_used_and_never_exceeded() {
        let policy = "hata,k=10%,k_min=0,working_set=2,sinks=16,recent=64,reuse=qsac(max_age=20)";
        let least = plan(policy, FREE).unwrap();
        let head = NearHead { n_first: 16, n_last: 84, n_chosen: 200 };
        assert_eq!(least.near, Near { n_tables: 2, heads: vec![head; 4] });
        let rows = 2 * 4 * (300 * 256 + 100 * 4);
        assert_eq!((least.row_bytes, least.n_resident()), (rows, 0));
        assert_eq!(least.near.bytes(256), rows);
        let with = |budget| plan(policy, NearRequest { budget: Some(budget), ..FREE });
        let too_few = with(rows + 4999).unwrap_err().to_string();
        assert!(too_few.contains("2 sequences of 1000 tokens need 617600"), "{too_few}");
        assert_eq!(with(rows + 5000).unwrap(), least);
        // One more whole head is 700 rows and 900 numbers in each table.
        let more = 2 * (700 * 256 + 900 * 4);
        for n in 0..5u64 {
            for off in [0, more - 1] {
                let budget = rows + 5000 + n * more + off;
                let found = with(budget).unwrap();
                assert_eq!(found.n_resident() as u64, n.min(4));
                assert!(found.near.bytes(256) + found.digest_bytes <= budget);
                assert_eq!(found.near.bytes(256), found.row_bytes);
            }
        }
        // The first layer, then the most difficult.
        assert_eq!(with(rows + 5000 + 3 * more).unwrap().is_resident, [true, true, true, false]);
        let none = NearRequest { budget: Some(1 << 30), keeps_heads: false, n_prefetchable: 0 };
        assert_eq!(plan(policy, none).unwrap(), least);
    }

    #[test]
    fn pages_have_room_for_all_of_a_selection_and_what_is_whole_stays() {
        // A selection of 100 rows may be of 100 pages of 8; whole, the head is cheaper.
        let request = NearRequest { keeps_heads: false, ..FREE };
        let lru = plan("hata,k=10%,k_min=0,reuse=lru(page=8,capacity=3)", request).unwrap();
        assert!(lru.near.heads.iter().all(|head| head.n_chosen == 800), "{lru:?}");
        let whole = plan("hata,k=30%,k_min=0,reuse=lru(page=8,capacity=3)", FREE).unwrap();
        assert_eq!(whole.n_resident(), whole.is_resident.len());
        assert_eq!(plan("hata,k=95%,working_set=2", FREE).unwrap().n_resident(), 4);
    }
}
