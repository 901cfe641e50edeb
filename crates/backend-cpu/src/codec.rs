//! Pages of this device in fewer bits: `[layer][head][16 tokens][K|V]` vectors of
//! [`nuthatch_backend::cold`], then digests as they are.

use half::{bf16, f16};
use nuthatch_backend::cold::{PageCodec, decode, encode, vector_bytes};
use nuthatch_types::{ColdDtype, KvDtype};

use crate::kv::{CpuKv, PAGE};

/// Turns pages of one arena's layout into fewer bytes and back.
pub(crate) struct CpuCodec {
    dtype: ColdDtype,
    stored: KvDtype,
    d: usize,
    heads: usize,
    by_rows: bool,
    /// Bytes of digests.
    tail_bytes: usize,
}

impl CpuCodec {
    pub(crate) fn new(kv: &CpuKv, dtype: ColdDtype, page_bytes: usize) -> Self {
        let heads = kv.n_heads();
        CpuCodec {
            dtype,
            stored: kv.shape.dtype,
            d: kv.shape.head_dim as usize,
            heads,
            by_rows: kv.by_rows,
            tail_bytes: page_bytes - heads * kv.head_page_bytes(),
        }
    }

    /// Where element `i` of a token's key or value is in a page of one head, in elements.
    fn place(&self, token: usize, is_value: bool, i: usize) -> usize {
        let d = self.d;
        match (self.by_rows, is_value) {
            (true, _) => (2 * token + usize::from(is_value)) * d + i,
            (false, false) => i * PAGE + token,
            (false, true) => (PAGE + token) * d + i,
        }
    }

    fn head_bytes(&self) -> usize {
        2 * PAGE * self.d * self.stored.bytes()
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
        self.heads * self.head_bytes() + self.tail_bytes
    }

    fn coded_bytes(&self) -> usize {
        self.heads * self.coded_head_bytes() + self.tail_bytes
    }

    fn encode(&self, page: &[u8], coded: &mut [u8]) {
        let (pages, tail) = page.split_at(self.heads * self.head_bytes());
        let (codes, coded_tail) = coded.split_at_mut(self.heads * self.coded_head_bytes());
        coded_tail.copy_from_slice(tail);
        let mut x = vec![0.0; self.d];
        let heads = pages.chunks_exact(self.head_bytes());
        for (page, codes) in heads.zip(codes.chunks_exact_mut(self.coded_head_bytes())) {
            let codes = codes.chunks_exact_mut(vector_bytes(self.dtype, self.d));
            for ((token, is_value), codes) in Self::vectors().zip(codes) {
                for (i, x) in x.iter_mut().enumerate() {
                    *x = read(self.stored, page, self.place(token, is_value, i));
                }
                encode(self.dtype, &x, codes);
            }
        }
    }

    fn decode(&self, coded: &[u8], page: &mut [u8]) {
        let (pages, tail) = page.split_at_mut(self.heads * self.head_bytes());
        let (codes, coded_tail) = coded.split_at(self.heads * self.coded_head_bytes());
        tail.copy_from_slice(coded_tail);
        let mut x = vec![0.0; self.d];
        let heads = pages.chunks_exact_mut(self.head_bytes());
        for (page, codes) in heads.zip(codes.chunks_exact(self.coded_head_bytes())) {
            let codes = codes.chunks_exact(vector_bytes(self.dtype, self.d));
            for ((token, is_value), codes) in Self::vectors().zip(codes) {
                decode(self.dtype, codes, &mut x);
                for (i, &x) in x.iter().enumerate() {
                    write(self.stored, page, self.place(token, is_value, i), x);
                }
            }
        }
    }
}

/// The number at a place of a page.
fn read(dtype: KvDtype, page: &[u8], place: usize) -> f32 {
    let two = || [page[2 * place], page[2 * place + 1]];
    match dtype {
        KvDtype::F16 => f16::from_le_bytes(two()).to_f32(),
        KvDtype::Bf16 => bf16::from_le_bytes(two()).to_f32(),
        KvDtype::F32 => {
            let mut four = [0; 4];
            four.copy_from_slice(&page[4 * place..4 * place + 4]);
            f32::from_le_bytes(four)
        }
    }
}

/// Writes a number to a place of a page.
fn write(dtype: KvDtype, page: &mut [u8], place: usize, x: f32) {
    match dtype {
        KvDtype::F16 => {
            let x = f16::from_f32(x.clamp(-65504.0, 65504.0));
            page[2 * place..2 * place + 2].copy_from_slice(&x.to_le_bytes());
        }
        KvDtype::Bf16 => {
            page[2 * place..2 * place + 2].copy_from_slice(&bf16::from_f32(x).to_le_bytes());
        }
        KvDtype::F32 => page[4 * place..4 * place + 4].copy_from_slice(&x.to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use nuthatch_types::{KvShape, Slot};

    use super::*;

    #[test]
    fn pages_of_every_type_and_order_come_back_nearly() {
        for stored in [KvDtype::F16, KvDtype::Bf16, KvDtype::F32] {
            let shape = KvShape {
                n_layers: 2,
                n_kv_heads: 3,
                head_dim: 64,
                page_len: PAGE as u32,
                dtype: stored,
            };
            for by_rows in [false, true] {
                let mut kv = CpuKv::new(shape, 2).unwrap();
                if by_rows {
                    kv.keep_digests(&[]).unwrap();
                }
                let n = shape.page_bytes() / stored.bytes();
                let mut page = vec![0; shape.page_bytes()];
                for i in 0..n {
                    write(stored, &mut page, i, ((i * i) % 1009) as f32 / 500.0 - 1.0);
                }
                kv.write_page(Slot(1), &page);
                for (dtype, bound) in
                    [(ColdDtype::Int8, 0.006), (ColdDtype::Fp8, 0.07), (ColdDtype::Int4, 0.08)]
                {
                    let codec = CpuCodec::new(&kv, dtype, page.len());
                    let mut coded = vec![0; codec.coded_bytes()];
                    codec.encode(&page, &mut coded);
                    assert!(coded.len() * 5 < page.len() * 3 || stored == KvDtype::F32);
                    let mut back = vec![0; page.len()];
                    codec.decode(&coded, &mut back);
                    for i in 0..n {
                        let far = (read(stored, &page, i) - read(stored, &back, i)).abs();
                        assert!(far < bound, "{stored} {dtype} {by_rows}: {far} at {i}");
                    }
                }
            }
        }
    }
}
