//! The disk tier against a plain map: whatever goes wrong, a page that comes is the right one, and the
//! files never have more bytes than they may.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use nuthatch_types::{SystemClock, TokenId};
use tempfile::TempDir;

use super::*;
use crate::cipher::StoreKey;
use crate::fault::{FaultRates, FaultyFiles};

const SHAPE: RecordShape =
    RecordShape { namespace: 9, page_len: 4, page_bytes: 300, part_bytes: 70, is_encrypted: false };
/// Pages whose records are whole blocks.
const LARGE: RecordShape = RecordShape { page_bytes: 70_000, part_bytes: 12_345, ..SHAPE };
/// All ways to read and write; where the system has no io_uring, threads stand in for it.
const WAYS: [&str; 4] = ["threads", "uring", "threads,direct", "uring,direct"];

/// Room for eleven segments of one record.
fn bytes_max(shape: &RecordShape) -> u64 {
    11 * shape.record_start(1)
}

fn system(way: &str) -> Arc<dyn Files> {
    let io: DiskIo = way.parse().unwrap();
    let threads = || SystemFiles::new(DiskIo { engine: IoEngine::Threads, ..io }).unwrap();
    Arc::new(SystemFiles::new(io).unwrap_or_else(|_| threads()))
}

fn list(dir: &Path) -> Vec<(String, u64)> {
    system("threads").list(dir).unwrap()
}

/// A page whose bytes follow from its number.
#[derive(Clone, Copy)]
struct Page(u32);

impl Page {
    fn key(self) -> PageKey {
        PageKey(u128::from(self.0 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835))
    }

    fn tokens(self) -> [TokenId; 4] {
        [0, 1, 2, 3].map(|i| TokenId(4 * self.0 + i))
    }

    fn with_name<T>(self, take: impl FnOnce(&PageName<'_>) -> T) -> T {
        let tokens = self.tokens();
        let parent = Page(self.0 / 2).key();
        take(&PageName { key: self.key(), parent, tokens: &tokens })
    }

    fn bytes(self) -> Vec<u8> {
        self.bytes_of(&SHAPE)
    }

    fn bytes_of(self, shape: &RecordShape) -> Vec<u8> {
        let byte = |i: u32| self.0.wrapping_mul(31).wrapping_add(i.wrapping_mul(i)) as u8;
        (0..shape.page_bytes as u32).map(byte).collect()
    }
}

fn open(dir: &Path, files: Arc<dyn Files>) -> DiskTier {
    open_shape(dir, files, SHAPE, bytes_max(&SHAPE)).unwrap()
}

fn open_shape(
    dir: &Path,
    files: Arc<dyn Files>,
    shape: RecordShape,
    bytes_max: u64,
) -> Result<DiskTier, DiskError> {
    let clock = Arc::new(SystemClock::start());
    let key = StoreKey::read(&[7; 32]).unwrap();
    let layout = RecordLayout::new(shape, None, shape.is_encrypted.then_some(&key));
    DiskTier::open(DiskDir::open(dir)?, bytes_max, &layout, files, clock)
}

fn save(tier: &mut DiskTier, page: Page) -> bool {
    if !tier.may_save() {
        return false;
    }
    let Some(mut buf) = tier.begin_save() else { return false };
    buf.page_mut().copy_from_slice(&page.bytes_of(&tier.segments.shape));
    page.with_name(|name| tier.save(name, buf));
    true
}

/// Waits until nothing is on its way to the disk.
fn settle(tier: &mut DiskTier) {
    while tier.is_busy() {
        assert!(tier.wait(Duration::from_secs(5)).is_none(), "nothing was asked for");
    }
}

fn read(tier: &mut DiskTier, page: Page) -> Option<Vec<u8>> {
    if page.with_name(|name| tier.read(u64::from(page.0), name)) != Asked::Begun {
        return None;
    }
    loop {
        let Some(loaded) = tier.wait(Duration::from_secs(5)) else { continue };
        assert_eq!(loaded.tag, u64::from(page.0));
        let buf = loaded.page.ok()?;
        let bytes = buf.page().to_vec();
        tier.recycle(buf);
        return Some(bytes);
    }
}

/// The same part by part.
fn read_parts(tier: &mut DiskTier, page: Page) -> Option<Vec<u8>> {
    let (mut bytes, mut checks) = (Vec::new(), PartChecks::default());
    for part in 0..tier.shape().n_parts() {
        let asked = page.with_name(|name| tier.read_part(7, name, (part, checks)));
        assert_eq!(asked, Asked::Begun);
        let loaded = loop {
            if let Some(loaded) = tier.wait(Duration::from_secs(5)) {
                break loaded;
            }
        };
        let buf = loaded.page.ok()?;
        if part == 0 {
            checks = buf.checks();
        }
        bytes.extend_from_slice(buf.page());
        tier.recycle(buf);
    }
    Some(bytes)
}

fn bytes_of(dir: &Path) -> u64 {
    let is_segment = |name: &str| segment_number(name).is_some();
    let list = list(dir);
    list.iter().filter(|(name, _)| is_segment(name)).map(|(_, len)| len).sum()
}

#[test]
fn what_was_saved_is_there_after_a_restart() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("kv");
    for round in 0..3 {
        let mut tier = open(&path, system("auto"));
        for n in 0..3 * round {
            assert_eq!(read(&mut tier, Page(n)), Some(Page(n).bytes()), "page {n}");
        }
        for n in 3 * round..3 * round + 3 {
            assert_eq!(page_key_stored(&tier, n), 0);
            assert!(save(&mut tier, Page(n)));
            assert!(tier.contains(Page(n).key()));
        }
        settle(&mut tier);
        assert!(open_shape(&path, system("auto"), SHAPE, bytes_max(&SHAPE)).is_err(), "in use");
    }
    let mut tier = open(&path, system("auto"));
    assert_eq!(tier.stats().counters.pages_recovered, 9);
    let keys: Vec<PageKey> = (0..20).map(|n| Page(n).key()).collect();
    assert_eq!(tier.n_stored(&keys), 9);
    tier.prefetch(&keys, true);
    assert_eq!(tier.stats().bytes, bytes_of(&path));
}

fn page_key_stored(tier: &DiskTier, n: u32) -> usize {
    tier.n_stored(&[Page(n).key()])
}

/// What one way has written all others read, and around the page cache or not.
#[test]
fn all_ways_read_what_all_have_written() {
    for shape in [LARGE, RecordShape { is_encrypted: true, ..LARGE }] {
        let dir = TempDir::new().unwrap();
        for (n, way) in (0..).zip(WAYS) {
            let files = system(way);
            let mut tier =
                open_shape(dir.path(), Arc::clone(&files), shape, bytes_max(&shape)).unwrap();
            assert_eq!(tier.stats().io.engine, files.io().engine);
            for n in 0..n {
                if n == 1 {
                    tier.prefetch(&[Page(n).key()], true);
                }
                assert_eq!(read(&mut tier, Page(n)), Some(Page(n).bytes_of(&shape)), "{way}");
                if !shape.is_encrypted {
                    let parts = read_parts(&mut tier, Page(n)).unwrap();
                    assert_eq!(parts, Page(n).bytes_of(&shape), "{way}");
                }
            }
            assert!(save(&mut tier, Page(n)));
            settle(&mut tier);
            assert_eq!(tier.stats().counters.saves_failed, 0, "{way}");
            assert!(bytes_of(dir.path()) <= tier.stats().bytes);
        }
    }
}

/// Many transfers on their way at once end each with its own bytes.
#[test]
fn many_at_once() {
    for way in WAYS {
        let dir = TempDir::new().unwrap();
        let mut tier = open_shape(dir.path(), system(way), LARGE, 400 << 20).unwrap();
        for n in 0..200 {
            while !save(&mut tier, Page(n)) {
                tier.wait(Duration::from_secs(5));
            }
        }
        settle(&mut tier);
        let mut n_read = 0;
        let mut asked = 0;
        while n_read < 200 {
            while asked < 200 {
                match Page(asked).with_name(|name| tier.read(u64::from(asked), name)) {
                    Asked::Begun => asked += 1,
                    Asked::Busy => break,
                    Asked::Missing => panic!("{way}: page {asked}"),
                }
            }
            let Some(loaded) = tier.wait(Duration::from_secs(5)) else { continue };
            let buf = loaded.page.unwrap();
            assert_eq!(buf.page(), Page(loaded.tag as u32).bytes_of(&LARGE), "{way}");
            tier.recycle(buf);
            n_read += 1;
        }
    }
}

#[cfg(unix)]
#[test]
fn files_are_private_and_links_are_not_followed() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("kv");
    let mut tier = open(&path, system("auto"));
    save(&mut tier, Page(1));
    settle(&mut tier);
    drop(tier);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    for (name, _) in list(&path) {
        assert_eq!(mode(&path.join(&name)), 0o600, "{name}");
    }
    let target = dir.path().join("elsewhere");
    fs::copy(segment_path(&path, 1), &target).unwrap();
    std::os::unix::fs::symlink(&target, segment_path(&path, 2)).unwrap();
    let tier = open(&path, system("auto"));
    assert_eq!((tier.stats().segments, tier.stats().pages), (1, 1));
    fs::remove_file(path.join("lock")).unwrap();
    drop(tier);
    std::os::unix::fs::symlink(&target, path.join("lock")).unwrap();
    assert!(DiskDir::open(&path).is_err());
}

#[test]
fn the_bound_holds_and_what_is_used_stays() {
    let dir = TempDir::new().unwrap();
    let mut tier = open(dir.path(), system("auto"));
    let hot = Page(1_000_000);
    assert!(save(&mut tier, hot));
    settle(&mut tier);
    let mut n_saved = 0;
    for n in 0..200 {
        while !save(&mut tier, Page(n)) {
            tier.wait(Duration::from_millis(1));
        }
        n_saved += 1;
        settle(&mut tier);
        if n % 2 == 0 {
            tier.touch(&[hot.key()]);
        } else {
            assert_eq!(read(&mut tier, hot), Some(hot.bytes()), "after {n} others");
        }
        let bytes = bytes_of(dir.path());
        assert!(bytes <= bytes_max(&SHAPE), "{bytes}");
    }
    let stats = tier.stats();
    assert_eq!((n_saved, stats.counters.pages_saved), (200, 201));
    assert!(stats.counters.pages_evicted >= 180, "{stats:?}");
    assert_eq!(stats.counters.pages_evicted + stats.pages, 201);
    // Less room than before: the directory shrinks before anything else.
    drop(tier);
    let least = segments::N_SEGMENTS_MIN * SHAPE.record_start(1);
    let tier = open_shape(dir.path(), system("auto"), SHAPE, least).unwrap();
    assert!(bytes_of(dir.path()) <= least && tier.stats().bytes <= least);
    drop(tier);
    let error = open_shape(dir.path(), system("auto"), SHAPE, least - 1).unwrap_err();
    assert!(matches!(error, DiskError::TooSmall { needed, .. } if needed == least));
}

#[test]
fn damage_is_a_miss_with_its_reason() {
    let dir = TempDir::new().unwrap();
    let mut tier = open_shape(dir.path(), system("auto"), SHAPE, 1 << 20).unwrap();
    for n in 0..6 {
        save(&mut tier, Page(n));
    }
    settle(&mut tier);
    drop(tier);
    let path = segment_path(dir.path(), 1);
    let mut bytes = fs::read(&path).unwrap();
    let record = |n: u32| SHAPE.record_start(n) as usize;
    bytes[record(1) + SHAPE.header_bytes() + 7] ^= 1;
    bytes[record(2) + 30] ^= 1;
    // A whole record in the place of another.
    let three = bytes[record(3)..record(4)].to_vec();
    bytes[record(4)..record(5)].copy_from_slice(&three);
    bytes.truncate(record(6) - 1);
    fs::write(&path, &bytes).unwrap();
    fs::write(segment_path(dir.path(), 7), b"NUTHKVS").unwrap();
    fs::write(segment_path(dir.path(), 8), SHAPE.segment_header(3)).unwrap();
    fs::write(dir.path().join("notes.txt"), "not ours").unwrap();

    let mut tier = open_shape(dir.path(), system("auto"), SHAPE, 1 << 20).unwrap();
    let counters = tier.stats().counters;
    assert_eq!((counters.segments_torn, counters.records_corrupt), (1, 1));
    assert_eq!((counters.segments_corrupt, counters.segments_foreign), (1, 1));
    assert_eq!(counters.pages_recovered, 4, "of six, one is torn and one without a header");
    let found: Vec<bool> = (0..6).map(|n| read(&mut tier, Page(n)).is_some()).collect();
    assert_eq!(found, [true, false, false, true, false, false]);
    assert_eq!(tier.stats().counters.missed_corrupt, 1);
    // The same key with other tokens.
    let tokens = Page(9).tokens();
    let name = PageName { key: Page(3).key(), parent: Page(1).key(), tokens: &tokens };
    assert_eq!(tier.read(3, &name), Asked::Begun);
    let loaded = loop {
        if let Some(loaded) = tier.wait(Duration::from_secs(5)) {
            break loaded;
        }
    };
    assert_eq!(loaded.page.unwrap_err(), Miss::Defect(Defect::Stale));
    drop(tier);
    let other = RecordShape { namespace: 10, ..SHAPE };
    let tier = open_shape(dir.path(), system("auto"), other, 1 << 20).unwrap();
    assert_eq!((tier.stats().pages, tier.stats().counters.segments_foreign), (0, 2));
    assert!(dir.path().join("notes.txt").is_file());
}

#[test]
fn only_names_that_we_give_are_segments() {
    for number in [0, 1, 0xFF, u64::MAX] {
        let path = segment_path(Path::new("kv"), number);
        assert_eq!(path.parent(), Some(Path::new("kv")));
        assert_eq!(segment_number(path.file_name().unwrap().to_str().unwrap()), Some(number));
    }
    for name in [
        "1.kvseg",
        "00000000000000FF.kvseg",
        "+000000000000001.kvseg",
        "0000000000000001.kvseg.bak",
        "../000000000001.kvseg",
        "00000000000000000.kvseg",
        "000000000000000\u{e9}.kvseg",
        ".kvseg",
    ] {
        assert_eq!(segment_number(name), None, "{name}");
    }
}

#[test]
fn a_secret_stays_and_a_broken_one_is_replaced() {
    let dir = TempDir::new().unwrap();
    let secret = DiskDir::open(dir.path()).unwrap().secret();
    assert_eq!(DiskDir::open(dir.path()).unwrap().secret(), secret);
    fs::write(dir.path().join("secret"), b"short").unwrap();
    let other = DiskDir::open(dir.path()).unwrap().secret();
    assert_ne!(other, secret);
    assert_eq!(DiskDir::open(dir.path()).unwrap().secret(), other);
}

/// Random saves, reads and restarts with random faults.
fn faulty_rounds(seed: u64, rates: FaultRates) -> (DiskCounters, u64) {
    let dir = TempDir::new().unwrap();
    let way = WAYS[seed as usize % WAYS.len()];
    // Faults are alike whether records are encrypted or not, whole blocks or not.
    let shape = if seed.is_multiple_of(3) { LARGE } else { SHAPE };
    let shape = RecordShape { is_encrypted: seed % 12 >= 6, ..shape };
    let files = FaultyFiles::new(system(way), rates, seed);
    let mut random = seed;
    let mut next = move |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (random >> 33) % n
    };
    let mut all = DiskCounters::default();
    let mut known: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    for _ in 0..6 {
        let opened = open_shape(dir.path(), Arc::new(files.clone()), shape, bytes_max(&shape));
        // A directory that cannot be listed now is tried again by whoever starts the engine.
        let Ok(mut tier) = opened else { continue };
        for i in 0..60 {
            let n = next(40) as u32;
            if next(2) == 0 {
                if !tier.contains(Page(n).key()) && save(&mut tier, Page(n)) {
                    known.insert(n, Page(n).bytes_of(&shape));
                }
            } else if let Some(bytes) = read(&mut tier, Page(n)) {
                assert_eq!(Some(&bytes), known.get(&n), "page {n}, seed {seed}");
            }
            assert!(tier.stats().bytes <= bytes_max(&shape), "{:?}, {seed}", tier.stats());
            if i % 20 == 0 {
                // Nothing is on its way, so that the list is of one moment.
                settle(&mut tier);
                assert!(bytes_of(dir.path()) <= tier.stats().bytes, "seed {seed}");
            }
        }
        // Sometimes it is dropped with writes on their way.
        if next(2) == 0 {
            settle(&mut tier);
        }
        all.pages_saved += tier.stats().counters.pages_saved;
        all.pages_read += tier.stats().counters.pages_read;
        all.missed_corrupt += tier.stats().counters.missed_corrupt;
        all.missed_io += tier.stats().counters.missed_io;
        all.saves_failed += tier.stats().counters.saves_failed;
        all.segments_evicted += tier.stats().counters.segments_evicted;
    }
    (all, files.n_faults())
}

#[test]
fn whatever_fails_a_page_that_comes_is_the_right_one() {
    let mut sum = (DiskCounters::default(), 0);
    for seed in 0..48 {
        let rates = match seed % 6 {
            0 => FaultRates::default(),
            1 => FaultRates { error: 60, ..FaultRates::default() },
            2 => FaultRates { short: 300, ..FaultRates::default() },
            3 => FaultRates { full: 30, error: 10, ..FaultRates::default() },
            4 => FaultRates { flip: 100, ..FaultRates::default() },
            _ => FaultRates { error: 20, short: 50, full: 5, slow: 5, flip: 20 },
        };
        let (counters, n_faults) = faulty_rounds(seed, rates);
        assert_eq!(n_faults > 0, seed % 6 != 0);
        sum.0.pages_saved += counters.pages_saved;
        sum.0.pages_read += counters.pages_read;
        sum.0.missed_corrupt += counters.missed_corrupt;
        sum.0.missed_io += counters.missed_io;
        sum.0.saves_failed += counters.saves_failed;
        sum.0.segments_evicted += counters.segments_evicted;
        sum.1 += n_faults;
    }
    let (all, n_faults) = sum;
    assert!(all.pages_saved > 300 && all.pages_read > 100, "{all:?}");
    assert!(all.missed_corrupt > 2 && all.missed_io > 2 && all.saves_failed > 10, "{all:?}");
    assert!(all.segments_evicted > 100 && n_faults > 200, "{all:?}, {n_faults}");
}
