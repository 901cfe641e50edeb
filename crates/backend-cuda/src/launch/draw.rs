//! `draw.cu`: a token from each row of logits.

use nuthatch_backend::{DeviceError, Draw};

use super::{Address, count, params};
use crate::buf::CudaBuf;
use crate::device::{Device, Kernel, Memory};

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

/// The rows and the moved tokens of all of them, as the kernel reads them.
pub(crate) struct Draws {
    rows: Vec<DrawRow>,
    moved: Vec<MovedToken>,
}

impl Draws {
    pub(crate) fn new(draws: &[Draw]) -> Self {
        let (mut rows, mut moved) = (Vec::with_capacity(draws.len()), Vec::new());
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
        Draws { rows, moved }
    }

    /// Bytes of the rows, then of the moved tokens, then of the result.
    fn sizes(&self) -> [usize; 3] {
        [size_of_val(&self.rows[..]), size_of_val(&self.moved[..]), 4 * self.rows.len()]
    }

    /// Bytes that a draw needs on the device.
    pub(crate) fn bytes(&self) -> usize {
        self.sizes().iter().sum()
    }

    /// Chooses, and waits for the tokens.
    pub(crate) fn run(
        &self,
        device: &Device,
        kernel: &Kernel,
        (logits, vocab): (&mut CudaBuf, usize),
        room: &Memory,
        tokens: &mut [Option<u32>],
    ) -> Result<(), DeviceError> {
        assert!(self.rows.len() * vocab <= logits.len && vocab > 0, "the rows are in logits");
        assert_eq!(tokens.len(), self.rows.len(), "a token for each row");
        logits.set_stale();
        let [rows, moved, _] = self.sizes();
        device.upload(room, 0, &self.rows)?;
        device.upload(room, rows, &self.moved)?;
        let params = DrawParams {
            logits: logits.floats.address(),
            draws: room.address(),
            moved: room.address() + rows as u64,
            tokens: room.address() + (rows + moved) as u64,
            vocab: count(vocab),
            padding: 0,
        };
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: block `i` touches row `i` of the logits, asserted to be there, and its own draw,
        // moved tokens and token, for which `bytes` were asked.
        unsafe {
            device.launch(kernel, (count(self.rows.len()), 1), THREADS, &params)?;
        }
        let mut found = vec![0u32; self.rows.len()];
        device.download_from(room, rows + moved, &mut found)?;
        let is_token = |&token: &u32| (token as usize) < vocab;
        tokens.iter_mut().zip(found).for_each(|(to, from)| *to = Some(from).filter(is_token));
        Ok(())
    }
}
