//! Events as bytes: MessagePack, in either of vLLM's two forms.
//!
//! A batch is `[seconds since 1970, events, data-parallel rank]` in both. Pages that follow each other
//! are told in one event, so that a prompt of a hundred pages is one, not a hundred.

use std::time::Duration;

use nuthatch_engine::{CacheEvent, CachedPage, ContentId, Tier};

use super::Encoding;
use super::msgpack::Writer;

/// Which of several copies of the model this is; we have one.
const RANK: u64 = 0;

/// When the engine's clock and the world's were read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    pub(crate) unix_start: u64,
    pub(crate) clock_start: Duration,
}

/// Makes bytes of events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoder {
    pub(crate) encoding: Encoding,
    pub(crate) page_len: u32,
    pub(crate) stamp: Stamp,
}

/// Neighbours that are told in one event.
#[derive(Debug)]
enum Group<'a> {
    /// Pages of a tier, each after the one before it.
    Stored(Vec<&'a CachedPage>),
    Removed(Tier, Vec<ContentId>),
    Cleared,
}

impl Encoder {
    /// A batch of what changed.
    pub(crate) fn batch(&self, events: &[CacheEvent], now: Duration) -> Vec<u8> {
        let mut groups = Vec::new();
        for event in events {
            match event {
                CacheEvent::Stored(page) => add_stored(&mut groups, page),
                CacheEvent::Removed { id, tier } => match groups.last_mut() {
                    Some(Group::Removed(of, ids)) if of == tier => ids.push(*id),
                    _ => groups.push(Group::Removed(*tier, vec![*id])),
                },
                CacheEvent::Cleared => groups.push(Group::Cleared),
            }
        }
        self.write(&groups, now)
    }

    /// A batch that gives everything there is to somebody who has nothing.
    pub(crate) fn snapshot(&self, pages: &[CachedPage], now: Duration) -> Vec<u8> {
        let mut groups = Vec::new();
        pages.iter().for_each(|page| add_stored(&mut groups, page));
        self.write(&groups, now)
    }

    fn write(&self, groups: &[Group<'_>], now: Duration) -> Vec<u8> {
        let Stamp { unix_start, clock_start } = self.stamp;
        let mut out = Writer::default();
        out.array(3);
        out.float(unix_start as f64 + now.saturating_sub(clock_start).as_secs_f64());
        out.array(groups.len());
        for group in groups {
            match group {
                Group::Stored(pages) => self.stored(&mut out, pages),
                Group::Removed(tier, ids) => self.removed(&mut out, *tier, ids),
                Group::Cleared => self.open(&mut out, "AllBlocksCleared", 0),
            }
        }
        out.number(RANK);
        out.into_bytes()
    }

    fn stored(&self, out: &mut Writer, pages: &[&CachedPage]) {
        let Some(first) = pages.first() else { return };
        let has_salt = first.salt.is_some();
        let n_fields = match self.encoding {
            Encoding::Map => 5 + usize::from(has_salt),
            // Positions count here, so what lies between is there too.
            Encoding::Array => 7 + usize::from(has_salt),
        };
        self.open(out, "BlockStored", n_fields);
        self.name(out, "block_hashes");
        out.array(pages.len());
        pages.iter().for_each(|page| out.number(page.id.0));
        self.name(out, "parent_block_hash");
        match first.parent {
            Some(parent) => out.number(parent.0),
            None => out.nil(),
        }
        self.name(out, "token_ids");
        out.array(pages.iter().map(|page| page.tokens.len()).sum());
        let tokens = pages.iter().flat_map(|page| &page.tokens);
        tokens.for_each(|token| out.number(u64::from(token.0)));
        self.name(out, "block_size");
        out.number(u64::from(self.page_len));
        self.skip(out); // lora_id
        self.name(out, "medium");
        out.text(medium(first.tier));
        self.skip(out); // lora_name
        if let Some(salt) = first.salt {
            self.name(out, "extra_keys");
            out.array(pages.len());
            out.array(1);
            out.text(&format!("{salt:016x}"));
            pages[1..].iter().for_each(|_| out.nil());
        }
    }

    fn removed(&self, out: &mut Writer, tier: Tier, ids: &[ContentId]) {
        self.open(out, "BlockRemoved", 2);
        self.name(out, "block_hashes");
        out.array(ids.len());
        ids.iter().for_each(|id| out.number(id.0));
        self.name(out, "medium");
        out.text(medium(tier));
    }

    /// Begins an event of so many fields.
    fn open(&self, out: &mut Writer, tag: &str, n_fields: usize) {
        match self.encoding {
            Encoding::Map => {
                out.map(1 + n_fields);
                out.text("type");
            }
            Encoding::Array => out.array(1 + n_fields),
        }
        out.text(tag);
    }

    fn name(&self, out: &mut Writer, name: &str) {
        if self.encoding == Encoding::Map {
            out.text(name);
        }
    }

    /// A field that is always empty: it is not there, or nothing is.
    fn skip(&self, out: &mut Writer) {
        if self.encoding == Encoding::Array {
            out.nil();
        }
    }
}

fn add_stored<'a>(groups: &mut Vec<Group<'a>>, page: &'a CachedPage) {
    if let Some(Group::Stored(pages)) = groups.last_mut()
        && let Some(last) = pages.last()
        && page.parent == Some(last.id)
        && page.tier == last.tier
    {
        return pages.push(page);
    }
    groups.push(Group::Stored(vec![page]));
}

/// The tiers in the words of routers, for whom what the model runs on is the GPU.
pub(crate) fn medium(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "GPU",
        Tier::Host => "CPU",
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::TokenId;

    use super::*;

    fn page(id: u64, parent: Option<u64>, salt: Option<u64>) -> CachedPage {
        let tokens = [TokenId(id as u32), TokenId(300)].into();
        let (id, parent) = (ContentId(id), parent.map(ContentId));
        CachedPage { id, parent, tokens, tier: Tier::Device, salt }
    }

    fn encoded(encoding: Encoding, events: &[CacheEvent]) -> Vec<u8> {
        let stamp = Stamp { unix_start: 1, clock_start: Duration::ZERO };
        let bytes = Encoder { encoding, page_len: 2, stamp }.batch(events, Duration::ZERO);
        let (head, rest) = bytes.split_at(10);
        assert_eq!(head, [0x93, 0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0], "[1.0, ...");
        let (&rank, events) = rest.split_last().unwrap();
        assert_eq!(rank, 0);
        events.to_vec()
    }

    #[test]
    fn neighbours_are_one_event() {
        let stored = |id, parent| CacheEvent::Stored(page(id, parent, None));
        let removed = |id, tier| CacheEvent::Removed { id: ContentId(id), tier };
        let events = [
            stored(1, None),
            stored(2, Some(1)),
            removed(1, Tier::Host),
            removed(2, Tier::Host),
            removed(2, Tier::Device),
            CacheEvent::Cleared,
        ];
        let mut expect = vec![0x94, 0x98, 0xab];
        expect.extend(b"BlockStored");
        // Two hashes, nothing before them, four tokens, two a page, no adapter, where, no name.
        expect.extend([0x92, 1, 2, 0xc0, 0x94, 1, 0xcd, 1, 44, 2, 0xcd, 1, 44, 2, 0xc0, 0xa3]);
        expect.extend(b"GPU");
        expect.push(0xc0);
        expect.extend([0x93, 0xac]);
        expect.extend(b"BlockRemoved");
        expect.extend([0x92, 1, 2, 0xa3]);
        expect.extend(b"CPU");
        expect.extend([0x93, 0xac]);
        expect.extend(b"BlockRemoved");
        expect.extend([0x91, 2, 0xa3]);
        expect.extend(b"GPU");
        expect.extend([0x91, 0xb0]);
        expect.extend(b"AllBlocksCleared");
        assert_eq!(encoded(Encoding::Array, &events), expect);
    }

    #[test]
    fn maps_name_their_fields_and_salts_are_told_with_the_first_page() {
        let events = [CacheEvent::Stored(page(7, None, Some(0xab)))];
        let mut expect = vec![0x91, 0x87, 0xa4];
        expect.extend(b"type\xabBlockStored\xacblock_hashes\x91\x07");
        expect.extend(b"\xb1parent_block_hash\xc0\xa9token_ids\x92\x07\xcd\x01\x2c");
        expect.extend(b"\xaablock_size\x02\xa6medium\xa3GPU");
        expect.extend(b"\xaaextra_keys\x91\x91\xb000000000000000ab");
        assert_eq!(encoded(Encoding::Map, &events), expect);
    }
}
