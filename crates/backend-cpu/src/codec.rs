//! Pages of this device in fewer bits: `[layer][head][16 tokens][K|V]` vectors of
//! [`nuthatch_backend::cold`], or the head's page as it is, then digests as they are.

use half::{bf16, f16};
use nuthatch_backend::cold::{PageCodec, decode, encode, vector_bytes};
use nuthatch_types::{ColdDtype, ColdKv, KvDtype};

use crate::kv::{CpuKv, PAGE};

/// Turns pages of one arena's layout into fewer bytes and back.
pub(crate) struct CpuCodec {
    dtype: ColdDtype,
    stored: KvDtype,
    d: usize,
    /// `[layers * heads]` whether the head's page stays as it is.
    is_exact: Vec<bool>,
    by_rows: bool,
    /// Bytes of digests.
    tail_bytes: usize,
}

impl CpuCodec {
    /// `None` if pages have codes already, or if there is no such layer as is to stay as it is.
    pub(crate) fn new(kv: &CpuKv, cold: &ColdKv, page_bytes: usize) -> Option<Self> {
        let shape = kv.shape;
        if shape.dtype.is_coded() || cold.exact_layers.iter().any(|&layer| layer >= shape.n_layers)
        {
            return None;
        }
        let layer = |head| head as u32 / shape.n_kv_heads;
        let heads = 0..kv.n_heads();
        Some(CpuCodec {
            dtype: cold.dtype,
            stored: shape.dtype,
            d: shape.head_dim as usize,
            is_exact: heads.map(|head| cold.exact_layers.contains(&layer(head))).collect(),
            by_rows: kv.by_rows,
            tail_bytes: page_bytes - shape.page_bytes(),
        })
    }

    /// Where a token's key or value is in a page of one head: the first element, and the distance
    /// from each to the next.
    fn place(&self, token: usize, is_value: bool) -> (usize, usize) {
        match (self.by_rows, is_value) {
            (true, _) => ((2 * token + usize::from(is_value)) * self.d, 1),
            (false, false) => (token, PAGE),
            (false, true) => ((PAGE + token) * self.d, 1),
        }
    }

    /// Elements of a page of one head.
    fn head_len(&self) -> usize {
        2 * PAGE * self.d
    }

    fn coded_head_bytes(&self) -> usize {
        2 * PAGE * vector_bytes(self.dtype, self.d)
    }

    /// All vectors of a page of one head, in order: the token, and whether it is the value.
    fn vectors() -> impl Iterator<Item = (usize, bool)> {
        (0..PAGE).flat_map(|token| [(token, false), (token, true)])
    }
}

impl PageCodec for CpuCodec {
    fn page_bytes(&self) -> usize {
        self.is_exact.len() * self.head_len() * self.stored.bytes() + self.tail_bytes
    }

    fn coded_bytes(&self) -> usize {
        let n_exact = self.is_exact.iter().filter(|is_exact| **is_exact).count();
        n_exact * self.head_len() * self.stored.bytes()
            + (self.is_exact.len() - n_exact) * self.coded_head_bytes()
            + self.tail_bytes
    }

    fn encode(&self, page: &[u8], coded: &mut [u8]) {
        let (mut page, mut coded) = (page, coded);
        let mut numbers = vec![0.0; self.head_len()];
        let mut x = vec![0.0; self.d];
        for &is_exact in &self.is_exact {
            let (head, rest) = page.split_at(self.head_len() * self.stored.bytes());
            page = rest;
            let len = if is_exact { head.len() } else { self.coded_head_bytes() };
            let (codes, rest) = coded.split_at_mut(len);
            coded = rest;
            if is_exact {
                codes.copy_from_slice(head);
                continue;
            }
            widen(self.stored, head, &mut numbers);
            let codes = codes.chunks_exact_mut(vector_bytes(self.dtype, self.d));
            for ((token, is_value), codes) in Self::vectors().zip(codes) {
                let (first, step) = self.place(token, is_value);
                for (x, &number) in x.iter_mut().zip(numbers[first..].iter().step_by(step)) {
                    *x = number;
                }
                encode(self.dtype, &x, codes);
            }
        }
        coded.copy_from_slice(page);
    }

    fn decode(&self, coded: &[u8], page: &mut [u8]) {
        let (mut page, mut coded) = (page, coded);
        let mut numbers = vec![0.0; self.head_len()];
        let mut x = vec![0.0; self.d];
        for &is_exact in &self.is_exact {
            let (head, rest) = page.split_at_mut(self.head_len() * self.stored.bytes());
            page = rest;
            let len = if is_exact { head.len() } else { self.coded_head_bytes() };
            let (codes, rest) = coded.split_at(len);
            coded = rest;
            if is_exact {
                head.copy_from_slice(codes);
                continue;
            }
            let codes = codes.chunks_exact(vector_bytes(self.dtype, self.d));
            for ((token, is_value), codes) in Self::vectors().zip(codes) {
                decode(self.dtype, codes, &mut x);
                let (first, step) = self.place(token, is_value);
                for (number, &x) in numbers[first..].iter_mut().step_by(step).zip(&x) {
                    *number = x;
                }
            }
            narrow(self.stored, &numbers, head);
        }
        page.copy_from_slice(coded);
    }
}

/// The numbers of a page.
fn widen(dtype: KvDtype, bytes: &[u8], numbers: &mut [f32]) {
    let (twos, fours) = (bytes.as_chunks().0.iter(), bytes.as_chunks().0.iter());
    match dtype {
        KvDtype::F16 => {
            twos.zip(numbers).for_each(|(&two, x)| *x = f16::from_le_bytes(two).to_f32());
        }
        KvDtype::Bf16 => {
            twos.zip(numbers).for_each(|(&two, x)| *x = bf16::from_le_bytes(two).to_f32());
        }
        KvDtype::F32 => fours.zip(numbers).for_each(|(&four, x)| *x = f32::from_le_bytes(four)),
        KvDtype::Int8(_) | KvDtype::Fp8(_) => unreachable!("`CpuCodec::new` refuses them"),
    }
}

/// Writes the numbers of a page.
fn narrow(dtype: KvDtype, numbers: &[f32], bytes: &mut [u8]) {
    match dtype {
        KvDtype::F16 => {
            for (two, x) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
                // As everywhere in the cache, see `write_token`.
                *two = f16::from_f32(x.clamp(-65504.0, 65504.0)).to_le_bytes();
            }
        }
        KvDtype::Bf16 => {
            for (two, x) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
                *two = bf16::from_f32(*x).to_le_bytes();
            }
        }
        KvDtype::F32 => {
            for (four, x) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
                *four = x.to_le_bytes();
            }
        }
        KvDtype::Int8(_) | KvDtype::Fp8(_) => unreachable!("`CpuCodec::new` refuses them"),
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::KvShape;

    use super::*;

    #[test]
    fn pages_of_every_type_and_order_come_back_nearly_and_exact_layers_as_they_were() {
        for stored in [KvDtype::F16, KvDtype::Bf16, KvDtype::F32] {
            let shape = KvShape {
                n_layers: 2,
                n_kv_heads: 3,
                head_dim: 64,
                page_len: PAGE as u32,
                dtype: stored,
            };
            for by_rows in [false, true] {
                let mut kv = CpuKv::new(shape, 2, None).unwrap();
                kv.by_rows = by_rows;
                let n = shape.page_bytes() / stored.bytes();
                let numbers: Vec<f32> =
                    (0..n).map(|i| ((i * i) % 1009) as f32 / 500.0 - 1.0).collect();
                let mut page = vec![0; shape.page_bytes()];
                narrow(stored, &numbers, &mut page);
                let mut before = vec![0.0; n];
                widen(stored, &page, &mut before);
                for (dtype, bound) in
                    [(ColdDtype::Int8, 0.006), (ColdDtype::Fp8, 0.07), (ColdDtype::Int4, 0.08)]
                {
                    for exact_layers in [vec![], vec![1]] {
                        let n_exact = exact_layers.len() * n / 2;
                        let cold = ColdKv { dtype, exact_layers };
                        let codec = CpuCodec::new(&kv, &cold, page.len()).unwrap();
                        assert_eq!(codec.page_bytes(), page.len());
                        let mut coded = vec![0; codec.coded_bytes()];
                        codec.encode(&page, &mut coded);
                        let mut back = vec![0; page.len()];
                        codec.decode(&coded, &mut back);
                        let mut after = vec![0.0; n];
                        widen(stored, &back, &mut after);
                        for (i, (before, after)) in before.iter().zip(&after).enumerate() {
                            let bound = if i >= n - n_exact { 0.0 } else { bound };
                            let far = (before - after).abs();
                            assert!(far <= bound, "{stored} {cold} {by_rows}: {far} at {i}");
                        }
                    }
                }
                let cold = ColdKv { dtype: ColdDtype::Int8, exact_layers: vec![2] };
                assert!(CpuCodec::new(&kv, &cold, page.len()).is_none());
            }
        }
    }
}
