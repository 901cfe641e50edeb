//! Where the numbers of a device's page are, so that the host can read and write them: pages in fewer
//! bits, `[layer][head][tokens][K|V]` vectors of [`cold`](crate::cold), or the head's part as it is,
//! then what is kept beside keys and values as it is.

use half::{bf16, f16};
use nuthatch_types::{ColdDtype, ColdKv, KvDtype};

use crate::cold::{PageCodec, decode, encode, vector_bytes};

/// How a device lays out a page whose layers are all alike.
#[derive(Clone, Debug)]
pub struct PageLayout {
    /// Layers that own keys and values, and heads of each.
    pub n_layers: u32,
    /// Key and value heads of one layer.
    pub n_kv_heads: u32,
    /// Width of one head.
    pub d: usize,
    /// What numbers are: floats.
    pub dtype: KvDtype,
    /// `[tokens][K|V][d]` where each number of one head's part is, counted in numbers.
    pub places: Vec<u32>,
    /// Numbers of one head's part; those that have no place are zero.
    pub head_len: usize,
    /// Bytes behind all heads' parts.
    pub tail_bytes: usize,
}

impl PageLayout {
    /// The layout of a page in which a token's key or value has its numbers where `place(token,
    /// is_value, number)` says.
    pub fn places(
        page_len: usize,
        d: usize,
        place: impl Fn(usize, bool, usize) -> usize,
    ) -> Vec<u32> {
        let vectors = (0..page_len).flat_map(|token| [(token, false), (token, true)]);
        let numbers = |(token, is_value)| (0..d).map(move |i| (token, is_value, i));
        vectors.flat_map(numbers).map(|(token, v, i)| place(token, v, i) as u32).collect()
    }

    /// Heads of all layers.
    pub fn n_heads(&self) -> usize {
        self.n_layers as usize * self.n_kv_heads as usize
    }

    /// Bytes of one head's part.
    pub fn head_bytes(&self) -> usize {
        self.head_len * self.dtype.bytes()
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.n_heads() * self.head_bytes() + self.tail_bytes
    }

    /// The numbers of one head's part, in its order.
    pub fn widen(&self, bytes: &[u8], numbers: &mut [f32]) {
        widen(self.dtype, bytes, numbers);
    }

    /// Writes the numbers of one head's part.
    pub fn narrow(&self, numbers: &[f32], bytes: &mut [u8]) {
        narrow(self.dtype, numbers, bytes);
    }
}

/// Numbers of a type that has no codes, in full width.
pub fn widen(dtype: KvDtype, bytes: &[u8], numbers: &mut [f32]) {
    let (twos, fours) = (bytes.as_chunks().0.iter(), bytes.as_chunks().0.iter());
    match dtype {
        KvDtype::F16 => {
            twos.zip(numbers).for_each(|(&two, x)| *x = f16::from_le_bytes(two).to_f32());
        }
        KvDtype::Bf16 => {
            twos.zip(numbers).for_each(|(&two, x)| *x = bf16::from_le_bytes(two).to_f32());
        }
        KvDtype::F32 => fours.zip(numbers).for_each(|(&four, x)| *x = f32::from_le_bytes(four)),
        KvDtype::Int8(_) | KvDtype::Fp8(_) => unreachable!("numbers, not codes"),
    }
}

/// Writes numbers as a type that has no codes.
pub fn narrow(dtype: KvDtype, numbers: &[f32], bytes: &mut [u8]) {
    match dtype {
        KvDtype::F16 => {
            for (two, x) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
                // As everywhere in the cache: an infinity would spoil what must not see it.
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
        KvDtype::Int8(_) | KvDtype::Fp8(_) => unreachable!("numbers, not codes"),
    }
}

/// Turns pages of one layout into fewer bytes and back.
#[derive(Debug)]
pub struct LayoutCodec {
    layout: PageLayout,
    dtype: ColdDtype,
    /// `[layers * heads]` whether the head's part stays as it is.
    is_exact: Vec<bool>,
}

impl LayoutCodec {
    /// `None` if there is no such layer as is to stay as it is.
    pub fn new(layout: PageLayout, cold: &ColdKv) -> Option<Self> {
        if cold.exact_layers.iter().any(|&layer| layer >= layout.n_layers) {
            return None;
        }
        let layer = |head: usize| head as u32 / layout.n_kv_heads;
        let is_exact = |head| cold.exact_layers.contains(&layer(head));
        let is_exact = (0..layout.n_heads()).map(is_exact).collect();
        Some(LayoutCodec { layout, dtype: cold.dtype, is_exact })
    }

    /// Bytes of a head's part that is coded.
    fn coded_head_bytes(&self) -> usize {
        let PageLayout { d, places, .. } = &self.layout;
        places.len() / d * vector_bytes(self.dtype, *d)
    }

    /// Bytes of a head's part in a record.
    fn kept_bytes(&self, is_exact: bool) -> usize {
        if is_exact { self.layout.head_bytes() } else { self.coded_head_bytes() }
    }

    /// Decodes so many heads, and gives what is left.
    fn decode_heads<'a>(&self, coded: &'a [u8], heads: &mut [u8], is_exact: &[bool]) -> &'a [u8] {
        let (mut coded, d) = (coded, self.layout.d);
        let (mut numbers, mut x) = (vec![0.0; self.layout.head_len], vec![0.0; d]);
        let heads = heads.chunks_exact_mut(self.layout.head_bytes());
        for (head, &is_exact) in heads.zip(is_exact) {
            let (codes, rest) = coded.split_at(self.kept_bytes(is_exact));
            coded = rest;
            if is_exact {
                head.copy_from_slice(codes);
                continue;
            }
            let codes = codes.chunks_exact(vector_bytes(self.dtype, d));
            for (places, codes) in self.layout.places.chunks_exact(d).zip(codes) {
                decode(self.dtype, codes, &mut x);
                places.iter().zip(&x).for_each(|(&place, &x)| numbers[place as usize] = x);
            }
            self.layout.narrow(&numbers, head);
        }
        coded
    }
}

impl PageCodec for LayoutCodec {
    fn page_bytes(&self) -> usize {
        self.layout.page_bytes()
    }

    fn coded_bytes(&self) -> usize {
        let heads = self.is_exact.iter().map(|&is_exact| self.kept_bytes(is_exact));
        heads.sum::<usize>() + self.layout.tail_bytes
    }

    fn encode(&self, page: &[u8], coded: &mut [u8]) {
        let (mut page, mut coded) = (page, coded);
        let d = self.layout.d;
        let (mut numbers, mut x) = (vec![0.0; self.layout.head_len], vec![0.0; d]);
        for &is_exact in &self.is_exact {
            let (head, rest) = page.split_at(self.layout.head_bytes());
            page = rest;
            let (codes, rest) = coded.split_at_mut(self.kept_bytes(is_exact));
            coded = rest;
            if is_exact {
                codes.copy_from_slice(head);
                continue;
            }
            self.layout.widen(head, &mut numbers);
            let codes = codes.chunks_exact_mut(vector_bytes(self.dtype, d));
            for (places, codes) in self.layout.places.chunks_exact(d).zip(codes) {
                x.iter_mut().zip(places).for_each(|(x, &place)| *x = numbers[place as usize]);
                encode(self.dtype, &x, codes);
            }
        }
        coded.copy_from_slice(page);
    }

    fn decode(&self, coded: &[u8], page: &mut [u8]) {
        let (page, tail) = page.split_at_mut(self.layout.n_heads() * self.layout.head_bytes());
        let rest = self.decode_heads(coded, page, &self.is_exact);
        tail.copy_from_slice(rest);
    }

    fn layer_bytes(&self) -> Option<(usize, usize)> {
        let PageLayout { n_kv_heads, tail_bytes, .. } = self.layout;
        let is_even = tail_bytes == 0 && !self.is_exact.contains(&true);
        let heads = n_kv_heads as usize;
        is_even.then(|| (heads * self.layout.head_bytes(), heads * self.coded_head_bytes()))
    }

    fn decode_layers(&self, coded: &[u8], layers: &mut [u8]) {
        let n_heads = layers.len() / self.layout.head_bytes();
        let rest = self.decode_heads(coded, layers, &self.is_exact[..n_heads]);
        assert!(rest.is_empty(), "as many layers as are coded");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers of three heads, whose numbers lie backwards with a hole in front.
    fn layout(dtype: KvDtype) -> PageLayout {
        let (page_len, d) = (16, 64);
        let head_len = 2 * page_len * d + 5;
        let place =
            |token, is_value, i| head_len - 1 - ((2 * token + usize::from(is_value)) * d + i);
        let places = PageLayout::places(page_len, d, place);
        PageLayout { n_layers: 2, n_kv_heads: 3, d, dtype, places, head_len, tail_bytes: 7 }
    }

    #[test]
    fn pages_come_back_nearly_and_exact_layers_and_what_is_behind_as_they_were() {
        for stored in [KvDtype::F16, KvDtype::Bf16, KvDtype::F32] {
            let layout = layout(stored);
            let n = layout.n_heads() * layout.head_len;
            let numbers: Vec<f32> = (0..n)
                .map(|i| match i % layout.head_len {
                    0..5 => 0.0,
                    _ => ((i * i) % 1009) as f32 / 500.0 - 1.0,
                })
                .collect();
            let mut page = vec![7; layout.page_bytes()];
            layout.narrow(&numbers, &mut page);
            let mut before = vec![0.0; n];
            layout.widen(&page, &mut before);
            for (dtype, bound) in
                [(ColdDtype::Int8, 0.006), (ColdDtype::Fp8, 0.07), (ColdDtype::Int4, 0.08)]
            {
                for exact_layers in [vec![], vec![1]] {
                    let n_exact = exact_layers.len() * n / 2;
                    let cold = ColdKv { dtype, exact_layers };
                    let codec = LayoutCodec::new(layout.clone(), &cold).unwrap();
                    assert_eq!(codec.page_bytes(), page.len());
                    let mut coded = vec![0; codec.coded_bytes()];
                    codec.encode(&page, &mut coded);
                    let mut back = vec![0; page.len()];
                    codec.decode(&coded, &mut back);
                    assert_eq!(back[back.len() - 7..], [7; 7]);
                    assert_eq!(codec.layer_bytes(), None, "there is something behind the layers");
                    let mut after = vec![0.0; n];
                    layout.widen(&back, &mut after);
                    for (i, (before, after)) in before.iter().zip(&after).enumerate() {
                        let bound = if i >= n - n_exact { 0.0 } else { bound };
                        let far = (before - after).abs();
                        assert!(far <= bound, "{stored} {cold}: {far} at {i}");
                    }
                }
            }
            let cold = ColdKv { dtype: ColdDtype::Int8, exact_layers: vec![2] };
            assert!(LayoutCodec::new(layout, &cold).is_none());
        }
    }

    #[test]
    fn layers_come_alone_where_all_are_coded() {
        let layout = PageLayout { tail_bytes: 0, ..layout(KvDtype::F16) };
        let page: Vec<u8> = (0..layout.page_bytes()).map(|i| (i * i % 251) as u8 & 0x3F).collect();
        let cold = |exact_layers| ColdKv { dtype: ColdDtype::Int4, exact_layers };
        let codec = LayoutCodec::new(layout.clone(), &cold(vec![])).unwrap();
        let (layer, coded_layer) = codec.layer_bytes().unwrap();
        assert_eq!((2 * layer, 2 * coded_layer), (page.len(), codec.coded_bytes()));
        let (mut coded, mut whole) = (vec![0; codec.coded_bytes()], vec![0; page.len()]);
        codec.encode(&page, &mut coded);
        codec.decode(&coded, &mut whole);
        for (coded, expected) in coded.chunks(coded_layer).zip(whole.chunks(layer)) {
            let mut alone = vec![0xFF; layer];
            codec.decode_layers(coded, &mut alone);
            assert!(alone == expected);
        }
        assert_eq!(LayoutCodec::new(layout, &cold(vec![1])).unwrap().layer_bytes(), None);
    }
}
