//! Pages written from others with their keys at other positions.
//!
//! Keys lie across tokens, so that an element of all sixteen keys of a page is turned at once, and
//! by the same angle: the page moves as a whole.

use half::{bf16, f16};
use nuthatch_backend::{RopeSpec, RopeStyle};
use nuthatch_types::{KvDtype, PageShift};

use crate::coded::{CodedPage, code};
use crate::kv::{CpuKv, PAGE};
use crate::mem::SharedMut;
use crate::pool::Pool;

/// Sixteen keys' element.
type Lanes = [f32; PAGE];

/// Writes pages in order, each head of each layer on a thread of its own.
pub(crate) fn shift_pages(pool: &Pool, kv: &mut CpuKv, rope: &RopeSpec, shifts: &[PageShift]) {
    let n_slots = kv.n_slots;
    let in_arena = |shift: &PageShift| (shift.source.0.max(shift.target.0) as usize) < n_slots;
    assert!(shifts.iter().all(in_arena), "slot outside the arena");
    let turns: Vec<Vec<Turn>> = shifts.iter().map(|shift| turns(rope, shift.by)).collect();
    let n_heads = kv.n_heads();
    let heads: Vec<Head> = (0..n_heads).map(|head| Head::new(kv, head)).collect();
    if let Some(file) = kv.file.clone() {
        let kv = &*kv;
        let head = |head: usize| {
            let mut page = Vec::new();
            for (shift, turns) in shifts.iter().zip(&turns) {
                kv.page(head, shift.source.0 as usize, &mut page);
                heads[head].turn(&mut page, turns);
                file.write(kv.page_start(head, shift.target.0 as usize), &page);
            }
        };
        return pool.run(n_heads, &head);
    }
    let bytes = SharedMut::new(&mut kv.bytes);
    let head = |head: usize| {
        let head = &heads[head];
        let page_bytes = head.page_bytes;
        #[expect(unsafe_code, reason = "threads write disjoint heads")]
        // SAFETY: the arena is `[layer][kv head][slot]`, and each head is handled once.
        let pages = unsafe { bytes.part(head.start, n_slots * page_bytes) };
        for (shift, turns) in shifts.iter().zip(&turns) {
            let source = shift.source.0 as usize * page_bytes;
            let target = shift.target.0 as usize * page_bytes;
            pages.copy_within(source..source + page_bytes, target);
            head.turn(&mut pages[target..target + page_bytes], turns);
        }
    };
    pool.run(n_heads, &head);
}

/// The pages of one head.
struct Head {
    start: usize,
    page_bytes: usize,
    dtype: KvDtype,
    d: usize,
    by_rows: bool,
}

impl Head {
    fn new(kv: &CpuKv, head: usize) -> Self {
        Head {
            start: kv.page_start(head, 0),
            page_bytes: kv.head_page_bytes(head),
            dtype: kv.shape.dtype.of_layer(head as u32 / kv.shape.n_kv_heads),
            d: kv.shape.head_dim as usize,
            by_rows: kv.by_rows,
        }
    }

    /// Turns the keys of one page.
    fn turn(&self, page: &mut [u8], turns: &[Turn]) {
        let &Head { dtype, d, by_rows, .. } = self;
        match code(dtype) {
            Some(code) => turn_codes(page, CodedPage { code, d, by_rows }, turns),
            None if by_rows => turn_rows(page, d, dtype, turns),
            None => turn_keys(&mut page[..self.page_bytes / 2], dtype, turns),
        }
    }
}

/// Two elements of a head that are rotated together, and by how much.
struct Turn {
    first: usize,
    second: usize,
    cos: f32,
    sin: f32,
}

/// The rotation by `by` positions, and nothing when that is 0: stored keys then keep their bits.
fn turns(rope: &RopeSpec, by: i32) -> Vec<Turn> {
    let half = rope.inv_freq.len();
    let turn = |(i, &inv_freq): (usize, &f32)| {
        let (sin, cos) = (f64::from(by) * f64::from(inv_freq)).sin_cos();
        let (first, second) = match rope.style {
            RopeStyle::Halves => (i, i + half),
            RopeStyle::Pairs => (2 * i, 2 * i + 1),
        };
        Turn { first, second, cos: cos as f32, sin: sin as f32 }
    };
    let n_turned = if by == 0 { 0 } else { half };
    rope.inv_freq.iter().enumerate().take(n_turned).map(turn).collect()
}

/// Turns the keys of one page of one head, `[D][16]`.
fn turn_keys(keys: &mut [u8], dtype: KvDtype, turns: &[Turn]) {
    let size = PAGE * dtype.bytes();
    for &Turn { first, second, cos, sin } in turns {
        let a = load(&keys[first * size..][..size], dtype);
        let b = load(&keys[second * size..][..size], dtype);
        let (mut turned_a, mut turned_b) = ([0.0; PAGE], [0.0; PAGE]);
        for i in 0..PAGE {
            turned_a[i] = a[i] * cos - b[i] * sin;
            turned_b[i] = b[i] * cos + a[i] * sin;
        }
        store(&turned_a, &mut keys[first * size..][..size], dtype);
        store(&turned_b, &mut keys[second * size..][..size], dtype);
    }
}

/// The same for a page in eight bits, whose scales change too.
fn turn_codes(page: &mut [u8], coded: CodedPage, turns: &[Turn]) {
    if turns.is_empty() {
        return;
    }
    let (mut key, mut buffer) = (vec![0.0; coded.d], Vec::new());
    for token in 0..PAGE {
        coded.read(page, (token, false), &mut key, &mut buffer);
        for &Turn { first, second, cos, sin } in turns {
            let (a, b) = (key[first], key[second]);
            (key[first], key[second]) = (a * cos - b * sin, b * cos + a * sin);
        }
        coded.write(page, (token, false), &key, &mut buffer);
    }
}

/// The same for a page of rows, `[16][K|V][D]`.
fn turn_rows(page: &mut [u8], d: usize, dtype: KvDtype, turns: &[Turn]) {
    let size = dtype.bytes();
    let mut keys = vec![0; PAGE * d * size];
    let at = |e: usize, token: usize| ((e * PAGE + token) * size, (token * 2 * d + e) * size);
    for (e, token) in (0..d).flat_map(|e| (0..PAGE).map(move |token| (e, token))) {
        let (across, along) = at(e, token);
        keys[across..across + size].copy_from_slice(&page[along..along + size]);
    }
    turn_keys(&mut keys, dtype, turns);
    for (e, token) in (0..d).flat_map(|e| (0..PAGE).map(move |token| (e, token))) {
        let (across, along) = at(e, token);
        page[along..along + size].copy_from_slice(&keys[across..across + size]);
    }
}

fn load(bytes: &[u8], dtype: KvDtype) -> Lanes {
    let mut lanes = [0.0; PAGE];
    match dtype {
        KvDtype::F32 => {
            let (words, _) = bytes.as_chunks::<4>();
            lanes.iter_mut().zip(words).for_each(|(lane, word)| *lane = f32::from_le_bytes(*word));
        }
        KvDtype::F16 => {
            let (words, _) = bytes.as_chunks::<2>();
            let value = |word: [u8; 2]| f16::from_le_bytes(word).to_f32();
            lanes.iter_mut().zip(words).for_each(|(lane, word)| *lane = value(*word));
        }
        KvDtype::Bf16 => {
            let (words, _) = bytes.as_chunks::<2>();
            let value = |word: [u8; 2]| bf16::from_le_bytes(word).to_f32();
            lanes.iter_mut().zip(words).for_each(|(lane, word)| *lane = value(*word));
        }
        KvDtype::Int8(_) | KvDtype::Fp8(_) => unreachable!("`turn_codes` turns them"),
    }
    lanes
}

fn store(lanes: &Lanes, bytes: &mut [u8], dtype: KvDtype) {
    match dtype {
        KvDtype::F32 => {
            let (words, _) = bytes.as_chunks_mut::<4>();
            lanes.iter().zip(words).for_each(|(lane, word)| *word = lane.to_le_bytes());
        }
        KvDtype::F16 => {
            // Saturated like a key that is stored for the first time.
            const MAX: f32 = 65504.0;
            let (words, _) = bytes.as_chunks_mut::<2>();
            let word = |lane: f32| f16::from_f32(lane.clamp(-MAX, MAX)).to_le_bytes();
            lanes.iter().zip(words).for_each(|(lane, target)| *target = word(*lane));
        }
        KvDtype::Bf16 => {
            let (words, _) = bytes.as_chunks_mut::<2>();
            let word = |lane: f32| bf16::from_f32(lane).to_le_bytes();
            lanes.iter().zip(words).for_each(|(lane, target)| *target = word(*lane));
        }
        KvDtype::Int8(_) | KvDtype::Fp8(_) => unreachable!("`turn_codes` turns them"),
    }
}
