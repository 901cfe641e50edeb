//! Pages that a sequence no longer needs, because its model sees no further back than a window.
//!
//! ```text
//!   positions   0                    computed + 1 - window       computed
//!   pages       [ out | out | out |  a page that is half seen   ... ][ the next step's tokens ]
//! ```
//!
//! A page that is out loses this holder at once: it is free, unless others hold it or it can be found
//! by its tokens. Its entry stays in the table, so that positions stay what they are.

use nuthatch_types::SeqId;

use crate::cache::Cache;

impl Cache {
    /// Gives back the pages of a sequence that no token after the first `n_computed` sees. Does
    /// nothing to a sequence without a window.
    pub fn slide(&mut self, seq: SeqId, n_computed: u32) {
        let page_len = self.config.page_len;
        let table = self.table(seq);
        let Some(window) = table.window else { return };
        let retention = table.retention;
        let n_out = window.pages_out(n_computed, page_len);
        while let Some(page) = self.table_mut(seq).take_out(n_out) {
            self.version += 1;
            self.counters.pages_out += 1;
            self.count_spilled(seq, self.pages.tier(page.id()), None);
            self.leave_page(page, retention);
        }
    }

    /// Pages that an admitted sequence still takes from the available ones, at most, until
    /// `n_tokens` of it are computed.
    pub fn n_outstanding(&self, seq: SeqId, n_tokens: u32) -> u32 {
        let page_len = self.config.page_len;
        let table = self.table(seq);
        let all = n_tokens.div_ceil(page_len).saturating_sub(table.n_out());
        let most = match table.window {
            Some(window) => all.min(window.pages_max(n_tokens, page_len)),
            None => all,
        };
        most.saturating_sub(table.n_pages() - table.n_out())
    }

    /// Whether a sequence still holds what a fork of its first `n_shared` tokens sees, where the fork
    /// may see it.
    pub fn can_fork(&self, source: SeqId, n_shared: u32) -> bool {
        let page_len = self.config.page_len;
        let table = self.table(source);
        let n_full = n_shared / page_len;
        let seen = table.window.map_or(0, |window| window.pages_out(n_full * page_len, page_len));
        let may_be_stuck = !table.may_spill && self.n_spilled > 0;
        let mut pages = (seen..n_full).filter_map(|i| table.page(i as usize));
        table.n_dropped() == 0
            && table.n_out() <= seen
            && !(may_be_stuck && pages.any(|page| self.is_stuck(page)))
    }
}
