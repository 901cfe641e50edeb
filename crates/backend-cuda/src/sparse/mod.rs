//! Top-k attention: digests beside the pages, scores by them, and attention to what is picked.
//!
//! An arena that keeps digests holds pages of rows (`kernels/kv.cuh`), so that single tokens can be
//! read; attention to everything has kernels of its own for such pages, which give the same bits.
//! Digests lie as the pages do, `[layer][kv head][slot]`, in both tiers.
//!
//! What is picked is first brought to a *working set*, pages in which only such rows are, and then
//! attended page by page. Here the host picks; `decide` has the device that decides by itself.

mod bring;
mod decide;
mod digest;
mod late;
mod measure;
mod room;
mod rules;
mod scratch;
mod told;

pub(crate) use told::Told;

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaModule;
use nuthatch_backend::{Ask, AttnSpec, DeviceError, Digest, Pick, ScoreBy};
use nuthatch_types::{KvDtype, LayerIdx};

use crate::Cuda;
use crate::buf::CudaBuf;
use crate::device::Kernel;
use crate::kv::{CudaKv, PAGE_LEN, refuse_rows};
use crate::launch::attend::AttendKernels;
use crate::launch::attend_shape::AttendShape;
use crate::launch::sparse::{
    Gather, GatherRowsParams, HeadState, MAX_GROUP, MAX_WIDTH, ReadKeysParams, SparseHeads,
    SparsePages, SparseRow, gather_ring_bytes, gather_rows, kind_number, read_keys,
};
use crate::launch::sparse_attend::{
    MAX_NUMBERS, SparseAttend, SparseParams, SparseShape, attend, max_tasks,
};
use crate::launch::sparse_score::{
    AskedParams, PIECE, Question, SCORE_KEYS, ScoreKernels, ScoreParams, answer, shared_bytes,
};
use crate::launch::{CodeRows, count};
use crate::plan::{CudaPlan, Seq};
use crate::program::Program;
use decide::Decider;
use digest::{DigestArena, changed_by_token};
pub use measure::{Beside, ListedRows, Threads};
pub use room::{DecidingShape, deciding_bytes};
use scratch::Scratch;

/// What an arena keeps for top-k attention.
pub(crate) struct Sparse {
    /// Attention to everything over pages of rows.
    pub(crate) attend: Arc<AttendKernels>,
    digests: Vec<DigestArena>,
    kernels: SparseKernels,
    /// Query heads that the kernels have room for.
    group: usize,
    scratch: Mutex<Scratch>,
    /// If it decides by itself.
    decider: Option<Decider>,
}

impl Sparse {
    /// Whether no step needs the digests of the tokens that it appends: the last ones are always seen.
    pub(crate) fn digests_may_wait(&self) -> bool {
        let changed = |by| match by {
            ScoreBy::Digest(digest) => changed_by_token(self.digests[digest].kind),
            ScoreBy::Keys => 1,
        };
        self.decider.as_ref().is_some_and(|decider| decider.sees_last(changed))
    }
}

/// The kernels of top-k attention.
struct SparseKernels {
    module: Arc<CudaModule>,
    digest: Kernel,
    read_keys: Kernel,
    score: ScoreKernels,
    /// For rows as they are, and in eight bits.
    gather: [Gather; 2],
    post: Gather,
    attend: SparseAttend,
}

/// One layer of one batch.
#[derive(Clone, Copy)]
pub(crate) struct SparseLayer<'a> {
    pub(crate) plan: &'a CudaPlan,
    pub(crate) layer: LayerIdx,
    pub(crate) spec: &'a AttnSpec<'a, Cuda>,
    pub(crate) qkv: &'a CudaBuf,
    pub(crate) kv: &'a CudaKv,
    /// Whether it is worked on while other layers are computed.
    pub(crate) is_late: bool,
}

impl SparseLayer<'_> {
    fn sparse(&self) -> &Sparse {
        self.kv.sparse.as_ref().expect("an arena that keeps digests")
    }

    fn group(&self) -> usize {
        (self.spec.n_heads / self.kv.shape.n_kv_heads) as usize
    }

    fn n_kv_heads(&self) -> usize {
        self.kv.shape.n_kv_heads as usize
    }

    /// Floats of a row of q, and of k and v if the layer owns them.
    fn q_stride(&self) -> u32 {
        let n_kv_heads = if self.spec.owns_kv { self.kv.shape.n_kv_heads } else { 0 };
        (self.spec.n_heads + 2 * n_kv_heads) * self.kv.page.head_dim
    }

    fn pages(&self) -> SparsePages {
        SparsePages {
            layer: self.kv.layer_address(self.layer.0),
            tables: self.plan.tables,
            head_bytes: self.kv.head_bytes(),
            near: match self.is_late {
                true => self.kv.lasting_pages(self.layer.0),
                false => self.kv.near_pages(self.layer.0),
            },
            table_len: self.plan.table_len,
            padding: 0,
        }
    }

    /// A sequence that has one row.
    fn row_of(&self, seq: u32) -> &Seq {
        let seq = &self.plan.seqs[seq as usize];
        assert_eq!(seq.n_rows, 1, "a sequence with one row");
        assert!((seq.first_row + 1) * self.q_stride() as usize <= self.qkv.len, "a row of qkv");
        seq
    }

    /// What scoring is told; the scratch is somebody else's.
    fn score_params(&self, by: ScoreBy) -> ScoreParams {
        let mut params = ScoreParams {
            qkv: self.qkv.floats.address(),
            digests: 0,
            frame: 0,
            weights: 0,
            raw: 0,
            scores: 0,
            sums: 0,
            digest_head_bytes: 0,
            frame_stride: 0,
            pages: self.pages(),
            stride: 0,
            q_stride: self.q_stride(),
            group: count(self.group()),
            kind: SCORE_KEYS,
            width: 0,
            page_bytes: 0,
            scale: self.spec.scale,
            padding: 0,
        };
        if let ScoreBy::Digest(i) = by {
            let digest = &self.sparse().digests[i];
            let first_head = self.layer.0 as usize * self.n_kv_heads();
            params.digests = digest.address(self.kv, first_head);
            params.frame = digest.frame_address(self.kv, first_head);
            params.weights = digest.weights_address(first_head);
            params.digest_head_bytes = digest.head_bytes(self.kv);
            params.frame_stride = digest.frame_stride(self.kv);
            params.kind = kind_number(digest.kind);
            params.width = count(digest.width);
            params.page_bytes = count(digest.page_bytes);
        }
        params
    }
}

impl SparseKernels {
    fn new(cuda: &Cuda, attend: AttendShape, score_bytes: usize) -> Result<Self, DeviceError> {
        let limit = cuda.device.shared_bytes_max();
        let module =
            cuda.device.load(cuda.cubin(&Program::sparse(attend, limit, cuda.tuning))?)?;
        let kernel = |name, shared| cuda.device.kernel(&module, name, shared);
        let threads = cuda.tuning.threads;
        let rings = threads as usize / 32 * gather_ring_bytes(attend.page, cuda.tuning);
        let gather = |name, rings| {
            let kernel = kernel(name, Gather::shared_bytes(rings, MAX_NUMBERS))?;
            Ok::<_, DeviceError>(Gather { kernel, threads, rings })
        };
        let split = |shape: SparseShape| {
            Ok::<_, DeviceError>((shape, kernel(shape.name(), shape.shared_bytes(attend))?))
        };
        let split_kernels = match attend.page.dtype {
            KvDtype::F32 => SparseAttend::F32(kernel("sparse_attend_f32", 0)?),
            KvDtype::F16 | KvDtype::Bf16 | KvDtype::Int8(_) | KvDtype::Fp8(_) => {
                let splits = SparseShape::fitting(attend, limit).into_iter().map(split);
                let splits = splits.collect::<Result<_, _>>()?;
                SparseAttend::Mma { splits, merge: kernel("sparse_merge", 0)? }
            }
        };
        Ok(SparseKernels {
            digest: kernel("digest_keys", 0)?,
            read_keys: kernel("read_keys", 0)?,
            score: ScoreKernels {
                pieces: kernel("score_pieces", score_bytes)?,
                finish: kernel("score_finish", 0)?,
            },
            gather: [gather("sparse_gather", rings)?, gather("sparse_gather_codes", rings)?],
            post: gather("sparse_post", 0)?,
            attend: split_kernels,
            module,
        })
    }
}

impl Cuda {
    /// Keeps digests beside the pages, which become rows.
    pub(crate) fn keep(&self, kv: &mut CudaKv, digests: &[Digest]) -> Result<(), DeviceError> {
        if kv.shape.dtype.is_coded() {
            return Err(refuse_rows(kv.shape.dtype));
        }
        let group = self.sparse_group(kv);
        let d = kv.page.head_dim as usize;
        let bytes = digests
            .iter()
            .map(|digest| (kind_number(digest.kind), digest.width))
            .chain([(SCORE_KEYS, 0)])
            .map(|(kind, width)| shared_bytes(kind, width, group, d))
            .max();
        let shape = AttendShape { by_rows: true, ..AttendShape::new(kv.page, self.is_exact) };
        kv.sparse = None;
        if let Some(near) = &kv.near {
            near.clear(&self.device, kv.slots)?;
        }
        let arenas = digests.iter().map(|digest| DigestArena::new(&self.device, kv, digest));
        let digests = arenas.collect::<Result<Vec<_>, _>>()?;
        kv.sparse = Some(Sparse {
            attend: self.attend_kernels(kv.page, true)?,
            digests,
            kernels: SparseKernels::new(self, shape, bytes.unwrap_or(0))?,
            group,
            scratch: Mutex::new(Scratch::default()),
            decider: None,
        });
        Ok(())
    }

    /// The largest group that there is shared memory for.
    fn sparse_group(&self, kv: &CudaKv) -> usize {
        let d = kv.page.head_dim as usize;
        let fits = |group: &usize| {
            let widest = [(SCORE_KEYS, 0), (0, MAX_WIDTH), (1, MAX_WIDTH)];
            let bytes = widest.map(|(kind, width)| shared_bytes(kind, width, *group, d));
            // Beside what `decide` has of its own.
            bytes.into_iter().max().unwrap_or(0) + 16 * 1024 <= self.device.shared_bytes_max()
        };
        (1..=MAX_GROUP).rev().find(fits).unwrap_or(1)
    }

    /// The keys of one head at the first places of a sequence.
    pub(crate) fn keys_of(
        &self,
        plan: &CudaPlan,
        layer: LayerIdx,
        kv: &CudaKv,
        (seq, head, n): (u32, u32, u32),
    ) -> Result<Vec<f32>, DeviceError> {
        let sparse = kv.sparse.as_ref().expect("an arena that keeps digests");
        let seq = &plan.seqs[seq as usize];
        assert!(n as usize <= seq.kv_len() && head < kv.shape.n_kv_heads, "keys of the sequence");
        let mut keys = vec![0.0f32; n as usize * kv.page.head_dim as usize];
        let memory = self.device.alloc(size_of_val(&keys[..]), "keys to read")?;
        let pages = SparsePages {
            layer: kv.layer_address(layer.0),
            tables: plan.tables,
            head_bytes: kv.head_bytes(),
            near: kv.near_pages(layer.0),
            table_len: plan.table_len,
            padding: 0,
        };
        let (out, table_row) = (memory.address(), seq.table_row);
        let params = ReadKeysParams { pages, out, table_row, head, n, padding: 0 };
        read_keys(&self.device, &sparse.kernels.read_keys, &params)?;
        self.device.download_from(&memory, 0, &mut keys)?;
        Ok(keys)
    }

    /// Answers questions, and waits.
    pub(crate) fn answer(
        &self,
        at: &SparseLayer<'_>,
        asks: &[Ask],
        scores: &mut [u32],
    ) -> Result<(), DeviceError> {
        let (sparse, group) = (at.sparse(), at.group());
        check_group(group, sparse.group)?;
        let mut scratch = sparse.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        for same in asks.chunk_by(|a, b| a.by == b.by) {
            let n = same.iter().map(|ask| ask.n as usize).max().unwrap_or(0);
            if n == 0 {
                continue;
            }
            let stride = n.next_multiple_of(PIECE);
            let questions: Vec<Question> = (0..)
                .zip(same)
                .map(|(number, ask)| {
                    let seq = at.row_of(ask.seq);
                    assert!(ask.n as usize <= seq.kv_len(), "places of the sequence");
                    assert!((ask.head as usize) < at.n_kv_heads(), "a head of the layer");
                    let (row, table_row) = (count(seq.first_row), seq.table_row);
                    Question { number, row, table_row, head: ask.head, n: ask.n }
                })
                .collect();
            let room = scratch.scores(&self.device, questions.len(), group, stride)?;
            self.device.upload(room.asks, 0, &questions)?;
            let score = ScoreParams {
                raw: room.raw.address(),
                scores: room.scores.address(),
                sums: room.sums.address(),
                stride: count(stride),
                ..at.score_params(same[0].by)
            };
            let params = AskedParams { score, asks: room.asks.address() };
            answer(&self.device, &sparse.kernels.score, &params, (questions.len(), n))?;
            let mut found = vec![0u32; questions.len() * stride];
            self.device.download_from(room.scores, 0, &mut found)?;
            for (ask, found) in same.iter().zip(found.chunks_exact(stride)) {
                scores[ask.at..ask.at + ask.n as usize].copy_from_slice(&found[..ask.n as usize]);
            }
        }
        Ok(())
    }

    /// Attends to what the host has picked, and where nothing is picked, to everything.
    pub(crate) fn attend_picked(
        &self,
        at: &SparseLayer<'_>,
        picks: &[Pick<'_>],
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let &SparseLayer { plan, layer, spec, qkv, kv, .. } = at;
        let n_heads = at.n_kv_heads();
        assert!(picks.len().is_multiple_of(n_heads), "picks for all heads of a sequence");
        let n_rows = picks.len() / n_heads;
        if n_rows < plan.seqs.len() {
            self.attention(plan, layer, spec, (qkv, kv)).run(out)?;
        }
        // A block counts the tasks of so many heads.
        for some in picks.chunks((MAX_NUMBERS / n_heads).max(1) * n_heads) {
            self.attend_some(at, some, out)?;
        }
        out.set_fresh(plan.n_rows() * (spec.n_heads * kv.page.head_dim) as usize);
        Ok(())
    }

    fn attend_some(
        &self,
        at: &SparseLayer<'_>,
        picks: &[Pick<'_>],
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let (sparse, n_heads, group) = (at.sparse(), at.n_kv_heads(), at.group());
        check_group(group, sparse.group)?;
        let mut scratch = sparse.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let picked = Picked::new(at, picks);
        let width = at.kv.page.width();
        let room = scratch.picked(&self.device, &picked.sizes(group, width, at.kv.page.bytes()))?;
        let pages = room.pages.address();
        let rows: Vec<SparseRow> =
            picked.rows.iter().map(|row| SparseRow { pages, ..*row }).collect();
        self.device.upload(room.rows, 0, &rows)?;
        self.device.upload(room.states, 0, &picked.states)?;
        self.device.upload(room.moves, 0, &picked.moves)?;
        let heads = SparseHeads {
            rows: room.rows.address(),
            states: room.states.address(),
            state_stride: count(n_heads),
            n_rows: count(rows.len()),
            n_kv_heads: count(n_heads),
            group: count(group),
        };
        let kept = at.kv.chosen.as_ref().filter(|_| picks.iter().any(|pick| !pick.rows.is_empty()));
        assert!(
            kept.is_none() || picks.iter().all(|pick| pick.rows.len() == pick.places.len()),
            "all rows of a step are kept, or none"
        );
        let (pages, codes) = match kept {
            Some(kept) => (kept.of_layer(at.kv, at.layer), CodeRows::NONE),
            None => (at.pages(), at.kv.codes_of(at.layer.0)),
        };
        let gather = GatherRowsParams::of_moves(
            (heads, pages),
            (room.moves.address(), picked.stride),
            codes,
        );
        let blocks = self.device.n_multiprocessors();
        gather_rows(&self.device, &sparse.kernels.gather, &gather, (blocks, None))?;
        assert!(at.plan.n_rows() * (at.spec.n_heads * at.kv.page.head_dim) as usize <= out.len);
        let params = SparseParams {
            heads,
            pages: at.pages(),
            qkv: at.qkv.floats.address(),
            out: out.floats.address(),
            rounded: out.rounded.address(),
            partials: room.partials.address(),
            sums: room.sums.address(),
            tasks: room.tasks.address(),
            done: 0,
            asked: 0,
            q_stride: at.q_stride(),
            scale: at.spec.scale * std::f32::consts::LOG2_E,
            row_tasks: 0,
            is_early: 0,
        };
        attend(&self.device, (&sparse.kernels.attend, false), &params)
    }
}

fn check_group(group: usize, most: usize) -> Result<(), DeviceError> {
    if group <= most {
        return Ok(());
    }
    let fault = format!("{group} query heads share a key head; top-k attention has up to {most}");
    Err(DeviceError::Fault(fault))
}

/// Picks as the kernels take them.
struct Picked {
    rows: Vec<SparseRow>,
    /// `[row][G]`
    states: Vec<HeadState>,
    /// `[row][G][stride]`
    moves: Vec<[u32; 2]>,
    stride: usize,
    n_pages: usize,
    n_tasks: usize,
}

impl Picked {
    fn new(at: &SparseLayer<'_>, picks: &[Pick<'_>]) -> Self {
        let n_heads = at.n_kv_heads();
        let stride = picks.iter().map(|pick| pick.places.len()).max().unwrap_or(0).max(1);
        let (mut rows, mut states) = (Vec::new(), Vec::new());
        let mut moves = vec![[0; 2]; picks.len() * stride];
        let (mut n_pages, mut n_tasks) = (0, 0);
        for (i, pick) in picks.iter().enumerate() {
            let seq = at.row_of(pick.seq);
            let kv_len = count(seq.kv_len());
            assert_eq!(pick.head as usize, i % n_heads, "heads in order");
            assert!(pick.n_first <= kv_len && pick.tail <= kv_len, "places of the table");
            assert!(pick.places.iter().all(|&place| place < kv_len), "places of the table");
            if pick.head == 0 {
                let (row, table_row) = (count(seq.first_row), seq.table_row);
                let state_row = count(rows.len());
                rows.push(SparseRow { row, kv_len, table_row, state_row, marks: 0, pages: 0 });
            }
            assert_eq!(rows[i / n_heads].row, count(seq.first_row), "all heads of a sequence");
            let own_pages = pick.places.len().div_ceil(PAGE_LEN);
            let n = count(pick.places.len());
            states.push(HeadState {
                cut: pick.tail,
                n_first: pick.n_first,
                n_members: n,
                n_moves: n,
                n_gone: n,
                ..HeadState::empty(n_pages * at.kv.page.bytes(), own_pages)
            });
            // Where the host keeps rows on the device, they come from there.
            let sources = if pick.rows.is_empty() { pick.places } else { pick.rows };
            assert_eq!(sources.len(), pick.places.len(), "a row for each place");
            for (row, (&source, target)) in (0..).zip(sources.iter().zip(&mut moves[i * stride..]))
            {
                *target = [source, row];
            }
            n_pages += own_pages;
            let n_seen = pick.n_first as usize + pick.places.len() + (kv_len - pick.tail) as usize;
            // Each run may begin and end within a page.
            n_tasks += max_tasks(n_seen + 2 * PAGE_LEN);
        }
        Picked { rows, states, moves, stride, n_pages, n_tasks }
    }

    /// Bytes of everything that is needed.
    fn sizes(&self, group: usize, width: usize, page_bytes: usize) -> scratch::PickedSizes {
        scratch::PickedSizes {
            rows: size_of_val(&self.rows[..]),
            states: size_of_val(&self.states[..]),
            moves: size_of_val(&self.moves[..]),
            pages: self.n_pages * page_bytes,
            partials: self.n_tasks * group * width * 4,
            sums: self.n_tasks * group * 8,
            tasks: (self.states.len() + 1) * 4,
        }
    }
}
