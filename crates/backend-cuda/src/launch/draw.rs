//! `draw.cu`: a token from each row of logits.

use std::cell::Cell;
use std::collections::VecDeque;

use cudarc::driver::CudaEvent;
use nuthatch_backend::{DeviceError, Draw};

use super::{Address, count, params};
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel, Memory};
use crate::host_memory::HostMemory;

params! {
    /// Mirrors `Draw`.
    DrawRow {
        uniform: f64,
        temperature: f32,
        top_p: f32,
        min_p: f32,
        top_k: u32,
        first_moved: u32,
        n_moved: u32,
    }
}

params! {
    /// Mirrors `Moved`.
    MovedToken {
        token: u32,
        factor: f32,
        minus: f32,
        plus: f32,
    }
}

params! {
    /// Mirrors `DrawParams`.
    DrawParams {
        logits: Address,
        draws: Address,
        moved: Address,
        tokens: Address,
        vocab: u32,
        padding: u32,
    }
}

const THREADS: u32 = 1024;

/// Passes whose tokens may be on their way.
const MAX_QUEUED: usize = 2;

/// How the tokens of a plan's batches are chosen, and the tokens themselves.
pub(crate) struct Draws {
    /// `[rows]` what was chosen last, or what the host says: the next batch begins with it.
    pub(crate) tokens: Memory,
    rows: Memory,
    moved: Memory,
    /// The same on this side, to be filled again.
    on_host: (Vec<DrawRow>, Vec<MovedToken>),
    /// Of the batch that is planned; none if nothing is drawn.
    n: usize,
    vocab: Cell<usize>,
    /// `[MAX_QUEUED][rows]` tokens of passes, in turn.
    found: HostMemory,
    max_rows: usize,
    /// Passes that were queued, with their vocabulary, and the moment when their tokens are there.
    queued: VecDeque<(usize, usize, CudaEvent)>,
    n_queued: usize,
}

impl Draws {
    pub(crate) fn new(device: &Device, max_rows: usize) -> Result<Self, DeviceError> {
        const WHAT: &str = "the choice of tokens";
        Ok(Draws {
            tokens: device.alloc(max_rows * 4, WHAT)?,
            rows: device.alloc(max_rows * size_of::<DrawRow>(), WHAT)?,
            moved: device.alloc(0, WHAT)?,
            on_host: Default::default(),
            n: 0,
            vocab: Cell::new(0),
            found: HostMemory::new(device, MAX_QUEUED * max_rows * 4)?,
            max_rows,
            queued: VecDeque::new(),
            n_queued: 0,
        })
    }

    /// A batch is planned; nothing is drawn unless it is said how.
    pub(crate) fn clear(&mut self) {
        self.n = 0;
    }

    /// What a recording depends on: how many are drawn, and where it says how.
    pub(crate) fn key(&self) -> (usize, u64) {
        (self.n, self.moved.address())
    }

    /// Uploads how tokens are chosen.
    pub(crate) fn plan(&mut self, device: &Device, draws: &[Draw]) -> Result<(), DeviceError> {
        assert!(draws.len() <= self.max_rows, "no more draws than rows");
        let (rows, moved) = &mut self.on_host;
        rows.clear();
        moved.clear();
        for draw in draws {
            let &Draw { temperature, top_k, top_p, min_p, uniform, .. } = draw;
            let (first_moved, n_moved) = (count(moved.len()), count(draw.moved.len()));
            let row = DrawRow { uniform, temperature, top_p, min_p, top_k, first_moved, n_moved };
            rows.push(row);
            moved.extend(draw.moved.iter().map(|moved| MovedToken {
                token: moved.token,
                factor: moved.factor,
                minus: moved.minus,
                plus: moved.plus,
            }));
        }
        let bytes = size_of_val(&moved[..]);
        if bytes > self.moved.bytes() {
            self.moved = device.alloc(bytes.next_power_of_two(), "the choice of tokens")?;
        }
        self.n = draws.len();
        device.upload(&self.rows, 0, rows)?;
        device.upload(&self.moved, 0, moved)
    }

    /// Chooses.
    pub(crate) fn run(
        &self,
        device: &Device,
        kernel: &Kernel,
        (logits, vocab): (&mut CudaBuf, usize),
    ) -> Result<(), DeviceError> {
        assert!(self.n * vocab <= logits.len && vocab > 0, "the rows are in logits");
        self.vocab.set(vocab);
        if self.n == 0 {
            return Ok(());
        }
        logits.set_stale();
        let params = DrawParams {
            logits: logits.floats.address(),
            draws: self.rows.address(),
            moved: self.moved.address(),
            tokens: self.tokens.address(),
            vocab: count(vocab),
            padding: 0,
        };
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: block `i` touches row `i` of the logits, asserted to be there, and its own draw,
        // moved tokens and token, all of which have room.
        unsafe {
            device.launch(kernel, (count(self.n), 1), THREADS, &params)
        }
    }

    /// The pass is queued: its tokens go to the host, if it chooses some.
    pub(crate) fn end_pass(&mut self, device: &Device) -> Result<(), DeviceError> {
        let n = std::mem::take(&mut self.n);
        if n == 0 {
            return Ok(());
        }
        assert!(self.queued.len() < MAX_QUEUED, "somebody asks for the tokens");
        let start = self.n_queued % MAX_QUEUED * self.max_rows * 4;
        self.n_queued += 1;
        self.found.fetch(device, (&self.tokens, 0), start, n * 4)?;
        let event = device.check(device.main_stream().record_event(None))?;
        self.queued.push_back((n, self.vocab.get(), event));
        Ok(())
    }

    /// Waits for the tokens of the first pass that nobody has asked for.
    pub(crate) fn drawn(
        &mut self,
        device: &Device,
        tokens: &mut [Option<u32>],
    ) -> Result<(), DeviceError> {
        if tokens.is_empty() {
            return device.wait();
        }
        let place = self.n_queued - self.queued.len();
        let (n, vocab, event) = self.queued.pop_front().expect("a pass that draws was queued");
        assert_eq!(tokens.len(), n, "a token for each draw");
        device.enter()?;
        device.check(event.synchronize())?;
        let mut words = vec![0u32; n];
        self.found.read(place % MAX_QUEUED * self.max_rows * 4, &mut words);
        let is_token = |&token: &u32| (token as usize) < vocab;
        for (token, word) in tokens.iter_mut().zip(words) {
            *token = Some(word).filter(is_token);
        }
        Ok(())
    }
}
