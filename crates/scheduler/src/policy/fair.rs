//! The tenant who was served least first.
//!
//! Each tenant has a virtual counter of the tokens it was served, divided by its weight. Whoever has
//! someone waiting and the lowest counter is next. A tenant that comes back after a pause starts at
//! the lowest counter of those who wait, or at that of the last who waited: a pause earns no credit.

use std::collections::{BTreeMap, BTreeSet};

use nuthatch_types::SeqId;

use super::sorted::Sorted;
use super::{Arrival, Ask, Queue, Rank, Service, Tenant, Waiter};
use crate::Hints;

/// What a token of a prompt adds to the counter of a tenant of weight one. A multiple of many
/// weights, so that the division loses little.
const PROMPT_COST: u64 = 5040;
/// A token of an answer costs a step of its own; the factor is customary.
const ANSWER_COST: u64 = 2 * PROMPT_COST;
/// Tenants that are remembered although none of their requests is there.
const MAX_IDLE_TENANTS: usize = 1024;

/// The tenant who was served least first.
#[derive(Debug, Default)]
pub(super) struct Fair {
    tenants: BTreeMap<Tenant, Account>,
    /// Tenants who have someone waiting that never ran, by their counters.
    queued: BTreeSet<(u64, Tenant)>,
    /// The counter of the tenant who waited last.
    floor: u64,
    /// Those who were preempted, of all tenants.
    started: Sorted,
    n_waiting: usize,
}

#[derive(Debug)]
struct Account {
    counter: u64,
    weight: u64,
    /// Requests that wait and never ran, in order of arrival.
    fresh: BTreeMap<Rank, SeqId>,
}

impl Default for Account {
    fn default() -> Self {
        Account { counter: 0, weight: 1, fresh: BTreeMap::new() }
    }
}

impl Fair {
    /// Tenants who are remembered.
    #[cfg(test)]
    pub(super) fn n_tenants(&self) -> usize {
        self.tenants.len()
    }

    /// Forgets tenants of ordinary weight who have nothing here, those first who were served least,
    /// and half as many as may stay: so that it is not done for every request.
    fn forget_idle(&mut self) {
        if self.tenants.len() <= self.queued.len() + MAX_IDLE_TENANTS {
            return;
        }
        let idle = self.tenants.iter();
        let idle = idle.filter(|(_, account)| account.fresh.is_empty() && account.weight == 1);
        let mut idle: Vec<(u64, Tenant)> =
            idle.map(|(&tenant, account)| (account.counter, tenant)).collect();
        idle.sort_unstable();
        idle.truncate(idle.len().saturating_sub(MAX_IDLE_TENANTS / 2));
        for (counter, tenant) in idle {
            self.tenants.remove(&tenant);
            // Whoever was forgotten starts again no lower than those who were forgotten with it.
            self.floor = self.floor.max(counter);
        }
    }
}

impl Queue for Fair {
    fn rank(&self, arrival: Arrival, _hints: &Hints, _n_prompt: u32) -> Rank {
        Rank { class: 0, arrival }
    }

    fn push(&mut self, waiter: Waiter) {
        self.n_waiting += 1;
        if waiter.is_started {
            self.started.push(waiter);
            return;
        }
        let lowest = self.queued.first().map(|&(counter, _)| counter);
        let account = self.tenants.entry(waiter.tenant).or_default();
        if account.fresh.is_empty() {
            account.counter = account.counter.max(lowest.unwrap_or(self.floor));
            self.queued.insert((account.counter, waiter.tenant));
        }
        account.fresh.insert(waiter.rank, waiter.seq);
        self.forget_idle();
    }

    fn remove(&mut self, waiter: &Waiter) {
        self.n_waiting -= 1;
        if waiter.is_started {
            self.started.remove(waiter);
            return;
        }
        let account = self.tenants.get_mut(&waiter.tenant).expect("its tenant has one waiting");
        let removed = account.fresh.remove(&waiter.rank);
        assert_eq!(removed, Some(waiter.seq), "it waits with this rank");
        if account.fresh.is_empty() {
            self.queued.remove(&(account.counter, waiter.tenant));
            self.floor = account.counter;
        }
    }

    fn next(&mut self, ask: &Ask<'_>) -> Option<SeqId> {
        let started = self.started.first(false);
        if started.is_some() || !ask.may_start {
            return started;
        }
        let &(_, tenant) = self.queued.first()?;
        self.tenants[&tenant].fresh.first_key_value().map(|(_, &seq)| seq)
    }

    fn len(&self) -> usize {
        self.n_waiting
    }

    fn counts_service(&self) -> bool {
        true
    }

    fn serve(&mut self, waiter: &Waiter, service: Service) -> Option<Rank> {
        let account = self.tenants.entry(waiter.tenant).or_default();
        let is_queued = self.queued.remove(&(account.counter, waiter.tenant));
        let cost = u64::from(service.n_computed) * PROMPT_COST
            + u64::from(service.n_sampled) * ANSWER_COST;
        account.counter += cost / account.weight;
        if is_queued {
            self.queued.insert((account.counter, waiter.tenant));
        }
        None
    }

    fn set_weight(&mut self, tenant: Tenant, weight: u32) {
        self.tenants.entry(tenant).or_default().weight = u64::from(weight.max(1));
    }
}
