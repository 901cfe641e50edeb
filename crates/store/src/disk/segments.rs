//! Which record of which segment holds which page, and which segment goes when room is short. Plain
//! bookkeeping: nothing here touches a file.
//!
//! ```text
//!              create          full            victim         removed
//!   (nothing) -------> active -----> sealed ----------> going --------> (nothing)
//! ```
//!
//! The bytes of a segment count until its file is gone, so the bound holds whatever happens. Room for
//! one more segment is made ahead of time, so that saving does not wait for it.

use std::collections::BTreeMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use nuthatch_types::{FastMap, PageKey};

use super::SegmentFile;
use super::record::RecordShape;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: u64,
    pub(crate) record: u32,
}

/// One segment of our own.
pub(crate) struct Segment {
    /// Its file; of a new one, when something was written to it.
    pub(crate) file: Option<Arc<dyn SegmentFile>>,
    /// `[n_records]` the page of each record, if it can be found there.
    pub(crate) keys: Vec<Option<PageKey>>,
    /// Records that are being written.
    n_writing: u32,
    n_hits: u64,
    /// What it is worth, in the terms of [`Segments::floor`].
    value: f64,
}

/// All segments of a directory.
pub(crate) struct Segments {
    pub(crate) shape: RecordShape,
    pub(crate) bytes_max: u64,
    /// Records of a segment.
    records_max: u32,
    own: BTreeMap<u64, Segment>,
    /// Bytes of segments that are not ours, or that could not be removed.
    foreign: BTreeMap<u64, u64>,
    /// The segment whose file is being removed, and its bytes.
    going: Option<(u64, u64)>,
    index: FastMap<PageKey, Place>,
    active: Option<u64>,
    /// Bytes of all files.
    total: u64,
    next_number: u64,
    /// The value of the segment that went last (GreedyDual): what was used since then is worth more.
    floor: f64,
}

/// A victim whose file is to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Victim {
    pub(crate) number: u64,
    /// Pages that are lost with it.
    pub(crate) n_pages: u64,
}

/// A directory should have about so many segments.
const N_SEGMENTS: u64 = 32;
/// The fewest segments of which one record each must fit.
pub(crate) const N_SEGMENTS_MIN: u64 = 4;

impl Segments {
    /// No segments. `bytes_max` has room for the fewest.
    pub(crate) fn new(shape: RecordShape, bytes_max: u64) -> Self {
        let record_bytes = shape.record_bytes() as u64;
        let records_max = (bytes_max / N_SEGMENTS / record_bytes).max(1);
        Segments {
            shape,
            bytes_max,
            records_max: u32::try_from(records_max).unwrap_or(u32::MAX),
            own: BTreeMap::new(),
            foreign: BTreeMap::new(),
            going: None,
            index: FastMap::default(),
            active: None,
            total: 0,
            next_number: 1,
            floor: 0.0,
        }
    }

    /// Bytes of a full segment.
    fn segment_bytes(&self) -> u64 {
        self.shape.record_start(self.records_max)
    }

    /// Takes in a segment that is not ours.
    pub(crate) fn add_foreign(&mut self, number: u64, bytes: u64) {
        self.next_number = self.next_number.max(number.saturating_add(1));
        self.total += bytes;
        self.foreign.insert(number, bytes);
    }

    /// Takes in a segment of ours with the pages of its records. Segments come in order.
    pub(crate) fn add_own(
        &mut self,
        number: u64,
        file: Arc<dyn SegmentFile>,
        keys: Vec<Option<PageKey>>,
    ) {
        self.next_number = self.next_number.max(number.saturating_add(1));
        let n_records = keys.len() as u32;
        self.total += self.shape.record_start(n_records);
        let segment = Segment { file: Some(file), keys, n_writing: 0, n_hits: 0, value: 1.0 };
        for (record, key) in segment.keys.iter().enumerate() {
            let Some(key) = *key else { continue };
            let place = Place { segment: number, record: record as u32 };
            // Of two records of one page the newer one counts.
            if let Some(before) = self.index.insert(key, place)
                && let Some(segment) = self.own.get_mut(&before.segment)
            {
                segment.keys[before.record as usize] = None;
            }
        }
        let places = |key: &Option<PageKey>, record: usize| {
            let place = Place { segment: number, record: record as u32 };
            key.filter(|key| self.index.get(key) == Some(&place))
        };
        let keys = segment.keys.iter().enumerate().map(|(i, key)| places(key, i)).collect();
        self.own.insert(number, Segment { keys, ..segment });
        // The newest one is gone on with.
        self.active = Some(number).filter(|_| n_records < self.records_max);
    }

    /// Where a page is, and the file.
    pub(crate) fn find(&self, key: PageKey) -> Option<(Place, &Arc<dyn SegmentFile>)> {
        let place = *self.index.get(&key)?;
        let file = self.own.get(&place.segment)?.file.as_ref()?;
        Some((place, file))
    }

    /// All pages that can be found.
    pub(crate) fn places(&self) -> impl Iterator<Item = (Place, &Arc<dyn SegmentFile>)> {
        self.own.iter().flat_map(|(&segment, own)| {
            let is_there = |record: &u32| own.keys[*record as usize].is_some();
            let records = (0..own.keys.len() as u32).filter(is_there);
            let file = own.file.as_ref();
            records.filter_map(move |record| Some((Place { segment, record }, file?)))
        })
    }

    /// Whether a page is stored.
    pub(crate) fn contains(&self, key: PageKey) -> bool {
        self.index.contains_key(&key)
    }

    /// A segment that goes to make room for the next one, if it is time for that. Its pages cannot be
    /// found any more; its bytes count until [`Segments::removed`].
    pub(crate) fn next_victim(&mut self) -> Option<Victim> {
        let is_due = self.total + self.segment_bytes() > self.bytes_max;
        if !is_due || self.going.is_some() {
            return None;
        }
        if self.total > self.bytes_max {
            // There was more room once.
            self.active = None;
        }
        // What is not ours goes first.
        if let Some((number, bytes)) = self.foreign.pop_first() {
            self.going = Some((number, bytes));
            return Some(Victim { number, n_pages: 0 });
        }
        let may_go = |(number, segment): &(&u64, &Segment)| {
            Some(**number) != self.active && segment.n_writing == 0
        };
        let sealed = self.own.iter().filter(may_go);
        let (&number, _) = sealed.min_by(|a, b| a.1.value.total_cmp(&b.1.value))?;
        let segment = self.own.remove(&number)?;
        self.floor = self.floor.max(segment.value);
        let mut n_pages = 0;
        for key in segment.keys.iter().flatten() {
            self.index.remove(key);
            n_pages += 1;
        }
        self.going = Some((number, self.shape.record_start(segment.keys.len() as u32)));
        Some(Victim { number, n_pages })
    }

    /// Takes in that the victim's file is gone, or that it could not be removed.
    pub(crate) fn removed(&mut self, number: u64, is_gone: bool) {
        let Some((_, bytes)) = self.going.take().filter(|&(going, _)| going == number) else {
            return;
        };
        self.total -= bytes;
        if !is_gone {
            self.add_foreign(number, bytes);
        }
    }

    /// Whether there is a place for a page now.
    pub(crate) fn has_room(&self) -> bool {
        let header_bytes = if self.active.is_none() { self.shape.record_start(0) } else { 0 };
        self.total + header_bytes + self.shape.record_bytes() as u64 <= self.bytes_max
    }

    /// A place for a page; `None` when there is no room before a victim has gone.
    pub(crate) fn reserve(&mut self) -> Option<Place> {
        if !self.has_room() {
            return None;
        }
        let is_new = self.active.is_none();
        let header_bytes = if is_new { self.shape.record_start(0) } else { 0 };
        let number = self.active.unwrap_or(self.next_number);
        if is_new {
            self.next_number = self.next_number.saturating_add(1);
            let value = self.floor + 1.0;
            let new = Segment { file: None, keys: Vec::new(), n_writing: 0, n_hits: 0, value };
            self.own.insert(number, new);
        }
        self.total += header_bytes + self.shape.record_bytes() as u64;
        let segment = self.own.get_mut(&number)?;
        let record = segment.keys.len() as u32;
        segment.keys.push(None);
        segment.n_writing += 1;
        self.active = Some(number).filter(|_| record + 1 < self.records_max);
        Some(Place { segment: number, record })
    }

    /// The file of a segment, if something was written to it.
    pub(crate) fn file(&self, number: u64) -> Option<&Arc<dyn SegmentFile>> {
        self.own.get(&number)?.file.as_ref()
    }

    /// Takes in that a page was written to the place that it got, or was not.
    pub(crate) fn written(
        &mut self,
        place: Place,
        key: PageKey,
        file: Option<Arc<dyn SegmentFile>>,
    ) {
        let Some(segment) = self.own.get_mut(&place.segment) else { return };
        segment.n_writing -= 1;
        let Some(file) = file else { return };
        segment.file.get_or_insert(file);
        if let Entry::Vacant(vacant) = self.index.entry(key) {
            segment.keys[place.record as usize] = Some(key);
            vacant.insert(place);
        }
    }

    /// Forgets a page whose record is not what it should be, unless it is elsewhere by now.
    pub(crate) fn forget(&mut self, key: PageKey, place: Place) {
        if self.index.get(&key) != Some(&place) {
            return;
        }
        self.index.remove(&key);
        if let Some(segment) = self.own.get_mut(&place.segment) {
            segment.keys[place.record as usize] = None;
        }
    }

    /// Takes in that a page was of use.
    pub(crate) fn hit(&mut self, place: Place) {
        let Some(segment) = self.own.get_mut(&place.segment) else { return };
        segment.n_hits += 1;
        let density = segment.n_hits as f64 / segment.keys.len() as f64;
        segment.value = self.floor + 1.0 + density;
    }

    /// Pages that can be found.
    pub(crate) fn n_pages(&self) -> u64 {
        self.index.len() as u64
    }

    /// Files, with those of others.
    pub(crate) fn n_segments(&self) -> u64 {
        (self.own.len() + self.foreign.len() + usize::from(self.going.is_some())) as u64
    }

    /// Whether a file is being removed.
    pub(crate) fn is_removing(&self) -> bool {
        self.going.is_some()
    }

    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.total
    }
}
