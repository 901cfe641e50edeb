//! What is remembered of one key/value head of one sequence.

use nuthatch_backend::WorkingSet;

use super::near_rows::NearRows;
use super::policy::{Policy, Refresh, Reuse};
use super::reuse::{aggregate, soft_threshold, threshold};

/// What decides about one key/value head, the same for all sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadRule {
    /// `[group]` importances of its query heads, from 0 to 1.
    pub importances: Vec<f32>,
    /// The similarity that a query must keep; a head where it is below 0 is called frozen, because
    /// adjacent queries practically never differ that much.
    pub threshold: f32,
    /// The similarity from which on a query that misses is served by the selection that there is, while
    /// the next one is made; more than any query has if none is.
    pub soft: f32,
    /// Its share of rows, as a multiple of the average head's.
    pub weight: f32,
}

/// The power of importance by which heads share rows: heads that matter little have about the same.
const FOCUS_POWER: i32 = 3;

impl HeadRule {
    /// The rule of a head whose query heads are this important. The most important one sets the
    /// threshold.
    pub fn new(policy: &Policy, importances: &[f32]) -> Self {
        let most = importances.iter().copied().fold(0.0, f32::max);
        let (threshold, soft) = match &policy.reuse {
            Reuse::Qsac(qsac) => (threshold(most, qsac), soft_threshold(most, qsac)),
            Reuse::Never | Reuse::PageLru { .. } => (1.0, f32::INFINITY),
        };
        HeadRule { importances: importances.to_vec(), threshold, soft, weight: 1.0 }
    }

    /// Shares the rows among all heads of a model, by the importance of each one's most important
    /// query head.
    pub fn share_rows(policy: &Policy, rules: &mut [HeadRule]) {
        let wish = |rule: &HeadRule| {
            let most = rule.importances.iter().copied().fold(0.0, f32::max);
            1.0 + (policy.focus - 1.0) * most.clamp(0.0, 1.0).powi(FOCUS_POWER)
        };
        let mean = rules.iter().map(wish).sum::<f32>() / rules.len().max(1) as f32;
        for rule in rules {
            rule.weight = wish(rule) / mean;
        }
    }

    /// Whether the head practically never refreshes.
    pub fn is_frozen(&self) -> bool {
        self.threshold < 0.0
    }
}

/// Whether the last selection serves.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lookup {
    /// There is none yet.
    First,
    /// It does; the query is this similar.
    Hit(f32),
    /// The query has turned away; nothing if it turned by a right angle or more.
    Turned(Option<f32>),
    /// The same, but it serves once more, and the next selection, which this query makes, serves from the
    /// next step on.
    Late(Option<f32>),
    /// It was made too long ago.
    Aged,
    /// Nobody asked: the policy selects at each step.
    Always,
}

impl Lookup {
    /// Whether the last selection serves.
    pub fn is_hit(&self) -> bool {
        matches!(self, Lookup::Hit(_))
    }

    /// Whether it serves once more.
    pub fn is_late(&self) -> bool {
        matches!(self, Lookup::Late(_))
    }
}

/// What is remembered of one key/value head of one sequence: the label, which is the query that the
/// selection was made for, the selection, and the rows that stay.
///
/// ```text
///   [ sinks | ... candidates ... | cut .............. kv_len )
///             working set          the tail: recent tokens and those that came since
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Head {
    /// `[group][D]`; empty before the first selection.
    label: Vec<f32>,
    /// The last selection, ascending.
    pub(super) chosen: Vec<u32>,
    set: WorkingSet,
    /// Where the rows that stay are near, if they are brought there.
    pub(super) near: NearRows,
    /// Pages of the selection, where rows are cached by the page; then their rows that are near, and
    /// where the selection's are.
    pages: Vec<u32>,
    kept: Vec<u32>,
    shown: Vec<u32>,
    cut: u32,
    age: u32,
}

impl Head {
    /// Forgets everything.
    pub fn clear(&mut self) {
        self.label.clear();
        self.chosen.clear();
        self.set.clear();
        self.near.clear();
        self.shown.clear();
        self.age = 0;
    }

    /// Whether the last selection serves the group's queries, `[group][D]`, as the cosines say that they have with
    /// those it was made for. Changes nothing.
    pub fn look_up(
        &self,
        policy: &Policy,
        rule: &HeadRule,
        queries: &[f32],
        cosine: impl Fn(&[f32], &[f32]) -> f32,
    ) -> Lookup {
        let Reuse::Qsac(qsac) = &policy.reuse else { return Lookup::Always };
        if self.label.is_empty() {
            return Lookup::First;
        }
        if qsac.max_age.is_some_and(|max_age| self.age >= max_age) {
            return Lookup::Aged;
        }
        let d = queries.len() / rule.importances.len();
        let pairs = queries.chunks_exact(d).zip(self.label.chunks_exact(d));
        let similarities = pairs.map(|(a, b)| cosine(a, b));
        match aggregate(similarities, &rule.importances, qsac.aggregate) {
            Some(similarity) if similarity > rule.threshold => Lookup::Hit(similarity),
            similarity if similarity.unwrap_or(-1.0) >= rule.soft => Lookup::Late(similarity),
            similarity => Lookup::Turned(similarity),
        }
    }

    /// The queries that the selection was made for.
    pub(super) fn label(&self) -> &[f32] {
        &self.label
    }

    /// The rows that stay.
    pub(super) fn set(&self) -> &WorkingSet {
        &self.set
    }

    /// Goes on with the last selection.
    pub fn reuse(&mut self) {
        self.age += 1;
    }

    /// Takes over the selection that was made for these queries, with the tail beginning at `cut`,
    /// and returns how many rows move.
    pub fn refresh(&mut self, policy: &Policy, queries: &[f32], chosen: &[u32], cut: u32) -> usize {
        self.chosen.clear();
        self.chosen.extend_from_slice(chosen);
        self.take_over(policy, queries, cut, WorkingSet::admit)
    }

    /// [`Head::refresh`] with a selection that was written to `chosen`, and [`WorkingSet::admit`] or what does
    /// the same.
    pub(super) fn take_over(
        &mut self,
        policy: &Policy,
        queries: &[f32],
        cut: u32,
        admit: impl FnOnce(&mut WorkingSet, &[u32], usize) -> usize,
    ) -> usize {
        self.label.clear();
        if matches!(policy.reuse, Reuse::Qsac(_)) {
            self.label.extend_from_slice(queries);
        }
        (self.cut, self.age) = (cut, 1);
        let k = self.chosen.len();
        if let Reuse::PageLru { page, capacity } = policy.reuse {
            self.pages.clear();
            self.pages.extend(self.chosen.iter().map(|place| place / page));
            self.pages.dedup();
            let n_pages = (k as f32 * capacity / page as f32).ceil() as usize;
            return admit(&mut self.set, &self.pages, n_pages) * page as usize;
        }
        if policy.refresh == Refresh::Whole && policy.working_set == 1.0 {
            self.set.clear();
        }
        let n_missing = admit(&mut self.set, &self.chosen, policy.set_size(k));
        match policy.refresh {
            Refresh::Delta => n_missing,
            Refresh::Whole => k,
        }
    }

    /// Gives the rows that stay their places near, and returns how many have to come: all of the
    /// selection, if the policy has it come again.
    pub(super) fn place_near(&mut self, policy: &Policy) -> usize {
        if let Reuse::PageLru { page, .. } = policy.reuse {
            let rows = |&p: &u32| p * page..(p * page + page).min(self.cut);
            self.kept.clear();
            self.kept.extend(self.set.members.iter().flat_map(rows));
            self.near.change(&self.kept, &[]);
            self.near.find(&self.chosen, &mut self.shown);
        } else {
            let again = if policy.refresh == Refresh::Whole { &self.chosen[..] } else { &[] };
            self.near.change(&self.set.members, again);
        }
        self.near.missing().0.len()
    }

    /// Nothing stays near.
    pub(super) fn leave_near(&mut self) {
        self.near.change(&[], &[]);
        self.shown.clear();
    }

    /// Where the places that are attended are near.
    pub(super) fn near_rows(&self, policy: &Policy) -> &[u32] {
        match policy.reuse {
            Reuse::PageLru { .. } => &self.shown,
            Reuse::Never | Reuse::Qsac(_) => self.near.rows(),
        }
    }

    /// Places between sinks and tail that are attended, ascending.
    pub fn places(&self, policy: &Policy) -> &[u32] {
        match policy.reuse {
            Reuse::PageLru { .. } => &self.chosen,
            Reuse::Never | Reuse::Qsac(_) => &self.set.members,
        }
    }

    /// Whether rows of earlier selections are there.
    pub fn has_rows(&self) -> bool {
        !self.set.members.is_empty()
    }

    /// Where the tail begins.
    pub fn cut(&self) -> u32 {
        self.cut
    }

    /// The last selection, ascending.
    pub fn chosen(&self) -> &[u32] {
        &self.chosen
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use nuthatch_backend::topk::cosine;
    use proptest::prelude::*;

    use super::*;

    fn policy(text: &str) -> Policy {
        text.parse().unwrap()
    }

    #[test]
    fn labels_change_only_on_a_miss() {
        let policy = policy("hata,reuse=qsac(eta=0.8,p=3,max_age=4)");
        let rule = HeadRule::new(&policy, &[1.0]);
        let mut head = Head::default();
        assert_eq!(head.look_up(&policy, &rule, &[1.0, 0.0], cosine), Lookup::First);
        assert_eq!(head.refresh(&policy, &[1.0, 0.0], &[3, 4], 9), 2);
        // Two small turns, each of them similar to the one before, but not both together.
        let near = [0.85, 0.527];
        assert!(head.look_up(&policy, &rule, &near, cosine).is_hit());
        head.reuse();
        let far = [0.45, 0.893];
        assert!(cosine(&near, &far) > 0.8);
        assert!(matches!(head.look_up(&policy, &rule, &far, cosine), Lookup::Turned(Some(_))));
        assert_eq!(head.look_up(&policy, &rule, &[-1.0, 0.0], cosine), Lookup::Turned(None));
        assert_eq!(head.refresh(&policy, &far, &[4, 5], 10), 1);
        assert_eq!((head.places(&policy), head.cut()), (&[4, 5][..], 10));
        for _ in 0..3 {
            assert!(head.look_up(&policy, &rule, &far, cosine).is_hit());
            head.reuse();
        }
        assert_eq!(head.look_up(&policy, &rule, &far, cosine), Lookup::Aged);
    }

    #[test]
    fn what_has_turned_a_little_is_served_late() {
        let policy = policy("hata,reuse=qsac(eta=0.8,thresholds=fixed,soft=0.4)");
        let rule = HeadRule::new(&policy, &[1.0]);
        let mut head = Head::default();
        assert_eq!(head.look_up(&policy, &rule, &[1.0, 0.0], cosine), Lookup::First);
        head.refresh(&policy, &[1.0, 0.0], &[3, 4], 9);
        assert!(head.look_up(&policy, &rule, &[0.85, 0.527], cosine).is_hit());
        assert!(head.look_up(&policy, &rule, &[0.5, 0.866], cosine).is_late());
        assert!(matches!(
            head.look_up(&policy, &rule, &[0.3, 0.954], cosine),
            Lookup::Turned(Some(_))
        ));
        assert_eq!(head.look_up(&policy, &rule, &[-1.0, 0.0], cosine), Lookup::Turned(None));
        let always = HeadRule { soft: -1.0, ..rule };
        assert_eq!(head.look_up(&policy, &always, &[-1.0, 0.0], cosine), Lookup::Late(None));
        assert_eq!((head.places(&policy), head.cut()), (&[3, 4][..], 9));
    }

    #[test]
    fn important_heads_have_more_rows_and_the_average_stays() {
        let policy = policy("hata,focus=5");
        let importances = [[0.1, 1.0], [0.2, 0.1], [0.0, 0.0], [0.5, 0.4]];
        let mut rules = importances.map(|importances| HeadRule::new(&policy, &importances));
        HeadRule::share_rows(&policy, &mut rules);
        let weights = rules.map(|rule| rule.weight);
        assert!((weights.iter().sum::<f32>() - 4.0).abs() < 1e-5, "{weights:?}");
        assert!((weights[0] / weights[2] - 5.0).abs() < 1e-5, "{weights:?}");
        assert!(weights[3] > weights[1] && weights[1] > weights[2], "{weights:?}");
    }

    #[test]
    fn frozen_heads_are_those_with_negative_thresholds() {
        let policy = policy("hata,reuse=qsac(eta=0.8,p=3)");
        assert!(HeadRule::new(&policy, &[0.1, 0.8]).is_frozen());
        assert!(!HeadRule::new(&policy, &[0.1, 0.9]).is_frozen());
    }

    proptest! {
        /// Moved rows and attended places of each policy, against sets.
        #[test]
        fn rows_move_as_the_policy_says(
            steps in prop::collection::vec(prop::collection::btree_set(0u32..64, 1..12), 1..20)
        ) {
            for text in [
                "hata", "hata,refresh=whole", "hata,working_set=2", "hata,reuse=lru(page=8,capacity=3)",
            ] {
                let policy = policy(text);
                let mut head = Head::default();
                let mut cached: BTreeSet<u32> = BTreeSet::new();
                for chosen in &steps {
                    let list: Vec<u32> = chosen.iter().copied().collect();
                    let moved = head.refresh(&policy, &[1.0], &list, 64);
                    let places: BTreeSet<u32> = head.places(&policy).iter().copied().collect();
                    prop_assert!(places.is_superset(chosen));
                    match text {
                        "hata" => {
                            prop_assert_eq!(moved, chosen.difference(&cached).count());
                            prop_assert_eq!(&places, chosen);
                            cached = places;
                        }
                        "hata,refresh=whole" => {
                            prop_assert_eq!(moved, chosen.len());
                            prop_assert_eq!(&places, chosen);
                        }
                        "hata,working_set=2" => {
                            prop_assert_eq!(moved, chosen.difference(&cached).count());
                            prop_assert!(places.len() <= 2 * chosen.len());
                            cached = places;
                        }
                        _ => {
                            prop_assert_eq!(&places, chosen);
                            let pages: BTreeSet<u32> = chosen.iter().map(|p| p / 8).collect();
                            prop_assert!(moved % 8 == 0 && moved <= 8 * pages.len());
                        }
                    }
                }
            }
        }
    }
}
