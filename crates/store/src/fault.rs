//! Files and stores that fail as they are told: errors, short reads and writes, a full disk, a slow one,
//! and bits that flip on the way in or out.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::disk::{DiskIo, Files, Moved, Queue, SegmentFile, SystemFile, Transfer};
use crate::remote::{ObjectError, Objects};

/// How often each thing goes wrong, in thousandths of the calls that it can happen to.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultRates {
    /// Any call fails.
    pub error: u32,
    /// A read or a write takes a part only.
    pub short: u32,
    /// A write finds the disk full, and so does everything after it until a file is removed.
    pub full: u32,
    /// A call takes a few milliseconds.
    pub slow: u32,
    /// A bit of what is read or written flips.
    pub flip: u32,
}

/// Files that fail as they are told.
#[derive(Clone)]
pub struct FaultyFiles {
    inner: Arc<dyn Files>,
    faults: Arc<Faults>,
}

/// A store that fails as it is told.
#[derive(Clone)]
pub struct FaultyObjects {
    inner: Arc<dyn Objects>,
    faults: Arc<Faults>,
}

/// A store in memory.
#[derive(Debug, Default)]
pub struct MemoryObjects {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
}

struct Faults {
    state: Mutex<State>,
    n_faults: AtomicU64,
}

struct State {
    rates: FaultRates,
    random: u64,
    is_full: bool,
}

impl FaultyFiles {
    /// Files that fail by these rates, in an order that the seed decides.
    pub fn new(inner: Arc<dyn Files>, rates: FaultRates, seed: u64) -> Self {
        FaultyFiles { inner, faults: Faults::new(rates, seed) }
    }

    /// Fails by other rates from now on.
    pub fn set_rates(&self, rates: FaultRates) {
        let mut state = self.faults.lock();
        state.rates = rates;
        state.is_full = false;
    }

    /// How often something went wrong so far.
    pub fn n_faults(&self) -> u64 {
        self.faults.n_faults.load(Ordering::Relaxed)
    }
}

impl FaultyObjects {
    /// A store that fails by these rates, in an order that the seed decides.
    pub fn new(inner: Arc<dyn Objects>, rates: FaultRates, seed: u64) -> Self {
        FaultyObjects { inner, faults: Faults::new(rates, seed) }
    }

    /// Fails by other rates from now on.
    pub fn set_rates(&self, rates: FaultRates) {
        self.faults.lock().rates = rates;
    }

    /// How often something went wrong so far.
    pub fn n_faults(&self) -> u64 {
        self.faults.n_faults.load(Ordering::Relaxed)
    }
}

impl Faults {
    fn new(rates: FaultRates, seed: u64) -> Arc<Self> {
        let state = Mutex::new(State { rates, random: seed | 1, is_full: false });
        Arc::new(Faults { state, n_faults: AtomicU64::new(0) })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self) {
        self.n_faults.fetch_add(1, Ordering::Relaxed);
    }

    /// A random number if the thing goes wrong this time.
    fn strikes(&self, rate: impl Fn(&FaultRates) -> u32) -> Option<u64> {
        let mut state = self.lock();
        let rate = rate(&state.rates);
        let hit = state.random() % 1000 < u64::from(rate);
        let random = state.random();
        drop(state);
        if hit {
            self.count();
        }
        hit.then_some(random)
    }

    /// What can happen to every call.
    fn begin(&self) -> io::Result<()> {
        if let Some(random) = self.strikes(|rates| rates.slow) {
            std::thread::sleep(Duration::from_millis(1 + random % 5));
        }
        match self.strikes(|rates| rates.error) {
            Some(_) => Err(io::Error::other("a fault that was asked for")),
            None => Ok(()),
        }
    }

    /// How many of `len` bytes are moved.
    fn cut(&self, len: usize) -> usize {
        match self.strikes(|rates| rates.short) {
            Some(random) if len > 1 => 1 + random as usize % (len - 1),
            _ => len,
        }
    }

    /// Flips a bit, or none, and says which.
    fn flip(&self, bytes: &mut [u8]) -> Option<usize> {
        let random = self.strikes(|rates| rates.flip).filter(|_| !bytes.is_empty())?;
        let bit = random as usize % (8 * bytes.len());
        bytes[bit / 8] ^= 1 << (bit % 8);
        Some(bit)
    }

    /// What can happen to every write.
    fn begin_write(&self) -> io::Result<()> {
        self.begin()?;
        if self.strikes(|rates| rates.full).is_some() {
            self.lock().is_full = true;
        }
        if self.lock().is_full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

impl State {
    /// The next of a line of numbers (xorshift).
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 20
    }
}

impl Files for FaultyFiles {
    fn io(&self) -> DiskIo {
        self.inner.io()
    }

    fn queue(&self) -> Box<dyn Queue> {
        let (inner, faults) = (self.inner.queue(), Arc::clone(&self.faults));
        Box::new(FaultyQueue { inner, faults, failed: VecDeque::new(), flips: BTreeMap::new() })
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, u64)>> {
        self.faults.begin()?;
        self.inner.list(dir)
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn SegmentFile>> {
        self.faults.begin()?;
        let inner = self.inner.open(path)?;
        Ok(Arc::new(FaultyFile { inner, faults: Arc::clone(&self.faults) }))
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn SegmentFile>> {
        self.faults.begin()?;
        let inner = self.inner.create(path)?;
        Ok(Arc::new(FaultyFile { inner, faults: Arc::clone(&self.faults) }))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.faults.begin()?;
        self.inner.remove(path)?;
        self.faults.lock().is_full = false;
        Ok(())
    }
}

/// A queue whose transfers fail, by whatever they are carried out.
struct FaultyQueue {
    inner: Box<dyn Queue>,
    faults: Arc<Faults>,
    /// Transfers that did not begin.
    failed: VecDeque<Moved>,
    /// Bits of memory that are other than their owner gave them, by tags.
    flips: BTreeMap<usize, usize>,
}

impl Queue for FaultyQueue {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn push(&mut self, mut transfer: Transfer) {
        let begun = match transfer.is_write {
            true => self.faults.begin_write(),
            false => self.faults.begin(),
        };
        if let Err(error) = begun {
            return self.failed.push_back((transfer, Err(error)));
        }
        let len = self.faults.cut(transfer.range.len());
        if len < transfer.range.len() {
            transfer.range.end = transfer.range.start + len;
            transfer.is_direct = false;
        }
        if transfer.is_write
            && let Some(bit) = self.faults.flip(&mut transfer.bytes[transfer.range.clone()])
        {
            self.flips.insert(transfer.tag, 8 * transfer.range.start + bit);
        }
        self.inner.push(transfer);
    }

    fn pop(&mut self) -> Option<Moved> {
        if let Some(moved) = self.failed.pop_front() {
            return Some(moved);
        }
        let (mut transfer, moved) = self.inner.pop()?;
        if let Some(bit) = self.flips.remove(&transfer.tag) {
            transfer.bytes[bit / 8] ^= 1 << (bit % 8);
        }
        if let (false, Ok(n)) = (transfer.is_write, &moved) {
            let start = transfer.range.start;
            self.faults.flip(&mut transfer.bytes[start..start + n]);
        }
        Some((transfer, moved))
    }
}

struct FaultyFile {
    inner: Arc<dyn SegmentFile>,
    faults: Arc<Faults>,
}

impl SegmentFile for FaultyFile {
    fn system(&self) -> &SystemFile {
        self.inner.system()
    }

    fn len(&self) -> io::Result<u64> {
        self.faults.begin()?;
        self.inner.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.faults.begin()?;
        self.inner.set_len(len)
    }

    fn read_at(&self, target: &mut [u8], start: u64) -> io::Result<usize> {
        self.faults.begin()?;
        let len = self.faults.cut(target.len());
        let n = self.inner.read_at(&mut target[..len], start)?;
        self.faults.flip(&mut target[..n]);
        Ok(n)
    }

    fn write_at(&self, source: &[u8], start: u64) -> io::Result<usize> {
        self.faults.begin_write()?;
        let mut bytes = source[..self.faults.cut(source.len())].to_vec();
        self.faults.flip(&mut bytes);
        self.inner.write_at(&bytes, start)
    }

    fn will_need(&self, start: u64, len: u64) {
        self.inner.will_need(start, len);
    }
}

impl MemoryObjects {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names of all objects.
    pub fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Forgets everything but what is named so.
    pub fn retain(&self, is_kept: impl Fn(&str) -> bool) {
        self.lock().retain(|name, _| is_kept(name));
    }
}

impl Objects for MemoryObjects {
    fn get(&self, name: &str, target: &mut [u8]) -> Result<usize, ObjectError> {
        let objects = self.lock();
        let object = objects.get(name).ok_or(ObjectError::Absent)?;
        let n = object.len().min(target.len());
        target[..n].copy_from_slice(&object[..n]);
        Ok(n)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.lock().insert(name.to_owned(), bytes.to_vec());
        Ok(())
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.lock().entry(name.to_owned()).or_insert_with(|| bytes.to_vec());
        Ok(())
    }
}

impl Objects for FaultyObjects {
    fn get(&self, name: &str, target: &mut [u8]) -> Result<usize, ObjectError> {
        self.faults.begin().map_err(failed)?;
        let n = self.inner.get(name, target)?;
        let n = self.faults.cut(n);
        self.faults.flip(&mut target[..n]);
        Ok(n)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.faults.begin().map_err(failed)?;
        if self.faults.strikes(|rates| rates.full).is_some() {
            return Err(failed(io::ErrorKind::StorageFull.into()));
        }
        let mut bytes = bytes[..self.faults.cut(bytes.len())].to_vec();
        self.faults.flip(&mut bytes);
        self.inner.put(name, &bytes)
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.inner.put_new(name, bytes)
    }
}

fn failed(error: io::Error) -> ObjectError {
    ObjectError::Failed(error.to_string())
}
