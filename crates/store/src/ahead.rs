//! Pages of prompts that wait, fetched from a store before somebody asks for them.
//!
//! A prompt's pages are asked for in order: those that are known to be there at once, and from the
//! first of which nobody knows on, one, and two more for each that came, up to the first that is not
//! there. What has come waits in memory of its own until it is asked for, or until it is stale and
//! the room is needed.

use std::collections::VecDeque;
use std::time::Duration;

use nuthatch_types::{FastMap, PageKey};

use crate::page_buf::{Buffers, OwnedName, PageBuf};

/// How long a page waits at least. A guess: longer than requests usually wait.
const FRESH: Duration = Duration::from_secs(30);
/// Most prompts whose pages are fetched.
const N_PROMPTS_MAX: usize = 256;

/// Pages that are fetched ahead.
pub(crate) struct Ahead {
    prompts: VecDeque<Prompt>,
    pages: FastMap<PageKey, Page>,
    free: Buffers,
}

/// What is left to fetch of one prompt.
struct Prompt {
    names: Vec<OwnedName>,
    /// Pages that are there for all that is known, and those beyond them that came.
    n_known: usize,
    n_right: usize,
    /// Pages that were asked for.
    n_asked: usize,
}

enum Page {
    /// On its way; somebody may wait for it by this tag.
    Asked(Option<u64>),
    Here {
        buf: PageBuf,
        nanos: u64,
        since: Duration,
    },
}

/// What is known of a page that somebody wants now.
pub(crate) enum Found {
    /// It is here, and what fetching it took.
    Here(PageBuf, u64),
    /// It will come by the tag.
    Coming,
    /// It was not asked for.
    No,
}

impl Ahead {
    pub(crate) fn new(free: Buffers) -> Self {
        Ahead { prompts: VecDeque::new(), pages: FastMap::default(), free }
    }

    /// Fetches a prompt's pages, the first `n_known` of which are known to be there.
    pub(crate) fn add(&mut self, names: Vec<OwnedName>, n_known: usize) {
        if !names.is_empty() && self.prompts.len() < N_PROMPTS_MAX {
            self.prompts.push_back(Prompt { names, n_known, n_right: 0, n_asked: 0 });
        }
    }

    /// Fetches nothing more of the prompts so far.
    pub(crate) fn forget(&mut self) {
        self.prompts.clear();
    }

    /// The next page to ask for, and a buffer for it.
    pub(crate) fn next(&mut self, now: Duration) -> Option<(OwnedName, PageBuf)> {
        loop {
            let (pages, prompts) = (&self.pages, &mut self.prompts);
            prompts.retain(|prompt| prompt.n_asked < prompt.names.len());
            let prompt = prompts.iter_mut().find(|prompt| prompt.may_ask())?;
            let name = &prompt.names[prompt.n_asked];
            if pages.contains_key(&name.key) {
                // Somebody else's prompt begins alike.
                let key = name.key;
                prompt.n_asked += 1;
                if let Page::Here { .. } = pages[&key] {
                    prompt.note(key);
                }
                continue;
            }
            let name = name.clone();
            let buf = self.free.take().or_else(|| self.drop_stale(now))?;
            let prompt = self.prompts.iter_mut().find(|prompt| prompt.may_ask())?;
            prompt.n_asked += 1;
            self.pages.insert(name.key, Page::Asked(None));
            return Some((name, buf));
        }
    }

    /// Takes in what came of a page, and gives it back if somebody waits for it by a tag.
    pub(crate) fn came(
        &mut self,
        key: PageKey,
        (buf, nanos): (PageBuf, u64),
        (is_there, now): (bool, Duration),
    ) -> Option<(u64, PageBuf)> {
        let tag = match self.pages.remove(&key) {
            Some(Page::Asked(tag)) => tag,
            Some(Page::Here { .. }) | None => None,
        };
        if is_there {
            self.prompts.iter_mut().for_each(|prompt| prompt.note(key));
        } else {
            self.prompts.retain(|prompt| !prompt.asked().any(|name| name.key == key));
        }
        match tag {
            Some(tag) => return Some((tag, buf)),
            None if is_there => {
                self.pages.insert(key, Page::Here { buf, nanos, since: now });
            }
            None => self.free.give_back(buf),
        }
        None
    }

    /// Finds a page that is wanted now. If it was asked for, `spare` is kept in place of its buffer.
    pub(crate) fn find(
        &mut self,
        key: PageKey,
        tag: u64,
        spare: impl FnOnce() -> Option<PageBuf>,
    ) -> Option<Found> {
        // Whoever asks for the next page himself needs nobody to do so.
        let is_next =
            |prompt: &Prompt| prompt.names.get(prompt.n_asked).is_some_and(|n| n.key == key);
        self.prompts.retain(|prompt| !is_next(prompt));
        let Some(page) = self.pages.get_mut(&key) else { return Some(Found::No) };
        if let Page::Asked(Some(_)) = page {
            // Two wait for one page: the second asks for itself.
            return Some(Found::No);
        }
        self.free.give_back(spare()?);
        if let Page::Asked(waits) = page {
            *waits = Some(tag);
            return Some(Found::Coming);
        }
        match self.pages.remove(&key) {
            Some(Page::Here { buf, nanos, .. }) => Some(Found::Here(buf, nanos)),
            Some(Page::Asked(_)) | None => Some(Found::No),
        }
    }

    /// The buffer of a page that nobody asked for in time.
    fn drop_stale(&mut self, now: Duration) -> Option<PageBuf> {
        let is_stale = |(&key, page): (&PageKey, &Page)| match page {
            Page::Here { since, .. } if *since + FRESH <= now => Some((*since, key)),
            Page::Here { .. } | Page::Asked(_) => None,
        };
        let (_, key) = self.pages.iter().filter_map(is_stale).min()?;
        match self.pages.remove(&key) {
            Some(Page::Here { buf, .. }) => Some(buf),
            Some(Page::Asked(_)) | None => None,
        }
    }
}

impl Prompt {
    /// Whether the next page may be asked for now.
    fn may_ask(&self) -> bool {
        let n_beyond = self.n_asked.checked_sub(self.n_known);
        self.n_asked < self.names.len() && n_beyond.is_none_or(|n| n <= 2 * self.n_right)
    }

    /// Takes in that a page has come.
    fn note(&mut self, key: PageKey) {
        let place = self.asked().position(|name| name.key == key);
        self.n_right += usize::from(place.is_some_and(|place| place >= self.n_known));
    }

    fn asked(&self) -> impl Iterator<Item = &OwnedName> {
        self.names[..self.n_asked].iter()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nuthatch_types::{SystemClock, TokenId};

    use crate::disk::{Asked, Loaded, PageName, RecordShape};
    use crate::fault::MemoryObjects;
    use crate::remote::RemoteTier;
    use crate::{RecordLayout, remote::Objects};

    use super::*;

    const N_TOKENS: usize = 4;

    fn tier(objects: &Arc<MemoryObjects>) -> RemoteTier {
        let (page_len, page_bytes) = (N_TOKENS as u32, 64);
        let shape =
            RecordShape { namespace: 7, page_len, page_bytes, part_bytes: 20, is_encrypted: false };
        let objects: Arc<dyn Objects> = Arc::<MemoryObjects>::clone(objects);
        let layout = RecordLayout::new(shape, None, None);
        RemoteTier::start(objects, layout, Arc::new(SystemClock::start())).unwrap()
    }

    fn name(i: usize, tokens: &[TokenId]) -> PageName<'_> {
        let key = |i: usize| PageKey(1000 + i as u128);
        PageName { key: key(i + 1), parent: key(i), tokens }
    }

    fn page(i: usize) -> [u8; 64] {
        [i as u8 + 1; 64]
    }

    /// Takes in what ends until it is so.
    fn until(tier: &mut RemoteTier, is_so: impl Fn(&RemoteTier) -> bool) -> Vec<Loaded> {
        let mut all = Vec::new();
        for _ in 0..10_000 {
            all.extend(tier.poll());
            if is_so(tier) {
                return all;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("it never was: {:?}", tier.counters());
    }

    #[test]
    fn what_waits_is_there_when_it_is_asked_for() {
        let (objects, tokens) = (Arc::new(MemoryObjects::default()), [TokenId(3); N_TOKENS]);
        let mut writer = tier(&objects);
        for i in 0..5 {
            let mut buf = writer.begin_save().unwrap();
            buf.page_mut().copy_from_slice(&page(i));
            writer.save(&name(i, &tokens), buf);
        }
        until(&mut writer, |tier| tier.counters().pages_saved == 5);

        // Nobody knows what is there: it asks for what it must, and not for what comes after a gap.
        let mut reader = tier(&objects);
        reader.prefetch((0..9).map(|i| name(i, &tokens)), 0);
        let is_over = |tier: &RemoteTier| tier.counters().missed_absent >= 1;
        assert!(until(&mut reader, is_over).is_empty(), "nobody asked for these");
        let mut loaded = Vec::new();
        for i in 0..5 {
            assert_eq!(reader.read(i as u64, &name(i, &tokens)), Asked::Begun);
        }
        for _ in 0..10_000 {
            loaded.extend(reader.poll());
            if loaded.len() == 5 {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        loaded.sort_by_key(|loaded| loaded.tag);
        for (i, loaded) in loaded.into_iter().enumerate() {
            assert_eq!((loaded.tag, loaded.is_remote), (i as u64, true));
            assert_eq!(loaded.page.unwrap().page(), page(i));
        }
        assert_eq!(reader.counters().pages_read, 5, "each was read once");
    }

    #[test]
    fn a_page_on_its_way_comes_to_whoever_asks_for_it_meanwhile() {
        let (objects, tokens) = (Arc::new(MemoryObjects::default()), [TokenId(3); N_TOKENS]);
        let mut one = tier(&objects);
        let mut buf = one.begin_save().unwrap();
        buf.page_mut().copy_from_slice(&page(0));
        one.save(&name(0, &tokens), buf);
        until(&mut one, |tier| tier.counters().pages_saved == 1);
        for round in 0..20 {
            let mut reader = tier(&objects);
            // The second is not there.
            reader.prefetch((0..2).map(|i| name(i, &tokens)), 2);
            for i in 0..2 {
                assert_eq!(reader.read(i as u64, &name(i, &tokens)), Asked::Begun);
            }
            let mut loaded = Vec::new();
            for _ in 0..10_000 {
                loaded.extend(reader.poll());
                if loaded.len() == 2 {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            loaded.sort_by_key(|loaded| loaded.tag);
            let is_there: Vec<bool> = loaded.iter().map(|loaded| loaded.page.is_ok()).collect();
            assert_eq!(is_there, [true, false], "round {round}");
            assert_eq!(reader.counters().pages_read, 1);
        }
    }
}
