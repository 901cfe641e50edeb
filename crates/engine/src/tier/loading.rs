//! A load on its way, and what has come of it.
//!
//! Pages come whole, or part by part: the first layers of all pages, then the next ones, so that a pass
//! can begin with the first layers while the others come.

use std::time::Duration;

use nuthatch_backend::PageCodec;
use nuthatch_store::disk::{N_PARTS, PartChecks, RecordShape};
use nuthatch_types::{PageImage, PageKey, Slot, TokenId};

use crate::moved::MovedPages;

/// A load on its way.
#[derive(Debug)]
pub(super) struct Loading {
    pub(super) slots: Vec<Slot>,
    /// The name of what comes before the first page, and those of the pages.
    pub(super) keys: Vec<PageKey>,
    /// `[n_pages, page_len]`
    pub(super) tokens: Vec<TokenId>,
    /// The tag of the first page.
    pub(super) tag: u64,
    /// Pages that were asked for.
    pub(super) n_asked: usize,
    /// The first page of which nobody knew whether it is there, if there is one: from it on, pages are
    /// guesses.
    pub(super) guess: Option<usize>,
    /// `[n_pages]` what is known of each.
    pub(super) has_come: Vec<Option<bool>>,
    /// Pages that came from each source, and the time that was spent on them.
    pub(super) came: [(u32, u64); 2],
    pub(super) begun: Duration,
    pub(super) deadline: Duration,
    /// Pages that are made of rows of others, and where they begin; their tags come after those of the
    /// pages before them.
    pub(super) moved: MovedPages,
    pub(super) first_moved: usize,
    /// When it ends if nothing has come and its first page was a guess.
    pub(super) guess_deadline: Duration,
    /// If its pages come part by part, what is known of that.
    pub(super) parts: Option<Parts>,
    /// Whether its sequence goes on already, so that nobody waits for its end.
    pub(super) is_early: bool,
}

/// How pages come part by part: each has so many layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerParts {
    pub(super) n_layers: u32,
    /// Bytes of a part in a page.
    pub(super) bytes: usize,
    /// The same as it is stored.
    pub(crate) stored_bytes: usize,
}

impl LayerParts {
    /// `None` where layers cannot come alone.
    pub(crate) fn of(image: &PageImage, codec: Option<&dyn PageCodec>) -> Option<Self> {
        let layer_bytes = image.layer_bytes.filter(|&bytes| bytes > 0)?;
        let stored = match codec {
            Some(codec) => codec.layer_bytes().filter(|layer| layer.0 == layer_bytes)?.1,
            None => layer_bytes,
        };
        let n = (image.bytes / layer_bytes).div_ceil(N_PARTS).max(1);
        let (n_layers, bytes, stored_bytes) = (n as u32, n * layer_bytes, n * stored);
        Some(LayerParts { n_layers, bytes, stored_bytes })
    }
}

/// Pages that come part by part.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) shape: RecordShape,
    /// Bytes of a part in a page, which may be stored in fewer.
    pub(super) bytes: usize,
    /// `[n_pages]` what the parts of each page are checked by, when its first one has come.
    pub(super) checks: Vec<Option<PartChecks>>,
    /// `[n_pages]` a bit for each part that has come.
    came: Vec<u8>,
    n_came: usize,
}

impl Parts {
    pub(super) fn new(shape: RecordShape, bytes: usize, n_pages: usize) -> Self {
        const { assert!(N_PARTS <= 8, "a bit for each part") };
        Parts { shape, bytes, checks: vec![None; n_pages], came: vec![0; n_pages], n_came: 0 }
    }

    /// Takes in that a part of a page has come, and says whether the page is whole.
    pub(super) fn take(&mut self, part: usize, page: usize, checks: PartChecks) -> bool {
        if part == 0 {
            self.checks[page] = Some(checks);
        }
        self.came[page] |= 1 << part;
        self.n_came += 1;
        self.came[page] == mask(self.shape.n_parts() - 1)
    }

    /// Whether all pages have their parts up to this one.
    pub(super) fn has_come(&self, part: usize) -> bool {
        let mask = mask(part);
        self.came.iter().all(|came| came & mask == mask)
    }

    /// The share of everything that has come.
    pub(super) fn share(&self) -> f64 {
        self.n_came as f64 / (self.shape.n_parts() * self.came.len()) as f64
    }
}

/// A bit for each part up to this one.
fn mask(part: usize) -> u8 {
    u8::MAX >> (7 - part)
}

impl Loading {
    /// The pages from the first on that have come.
    pub(super) fn n_whole(&self) -> usize {
        self.has_come.iter().take_while(|has_come| **has_come == Some(true)).count()
    }

    /// Whether nothing more will come that is of use.
    pub(super) fn is_over(&self) -> bool {
        let n_whole = self.n_whole();
        n_whole == self.slots.len() || self.has_come[n_whole] == Some(false)
    }

    /// Whether something did not come.
    pub(super) fn has_failed(&self) -> bool {
        self.has_come.contains(&Some(false))
    }

    /// Things that are read.
    pub(super) fn n_reads(&self) -> usize {
        if let Some(parts) = &self.parts {
            return parts.shape.n_parts() * self.slots.len();
        }
        self.first_moved + self.moved.reads.len()
    }

    /// What came of something that was read for pages that are made of rows of others: of those that
    /// need it, none will be whole if it did not come.
    pub(super) fn lose(&mut self, read: usize) {
        for page in self.moved.reads[read].pages() {
            self.has_come[self.first_moved + page] = Some(false);
        }
    }

    /// Whether it took too long.
    pub(super) fn is_late(&self, now: Duration) -> bool {
        let is_vain_guess = self.guess == Some(0) && self.n_whole() == 0;
        now >= self.deadline || (is_vain_guess && now >= self.guess_deadline)
    }

    /// Whether the next page may be asked for now, which is stored for all that is known or not.
    pub(super) fn may_ask(&mut self, is_stored: bool) -> bool {
        if self.guess.is_none() && is_stored {
            return true;
        }
        let first = *self.guess.get_or_insert(self.n_asked);
        let guesses = &self.has_come[first..];
        let n_right = guesses.iter().filter(|has_come| **has_come == Some(true)).count();
        self.n_asked - first <= 2 * n_right
    }
}
