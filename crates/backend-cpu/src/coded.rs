//! Pages in eight bits: codes with a scale for each token's key, and value, of one head.
//!
//! ```text
//!   across tokens   K: [D][16 tokens], V: [16 tokens][D], then scales: [K|V][16 tokens]
//!   rows            [16 tokens][K|V]: a scale, then codes [D]
//! ```
//!
//! Attention multiplies with codes as they are. A score is then multiplied by its key's scale, and a
//! weight by its value's: one product a token instead of one an element.

use nuthatch_backend::cold::{decode, encode};
use nuthatch_types::{ColdDtype, KvDtype};

use crate::kv::PAGE;

const SCALE_BYTES: usize = size_of::<f32>();

/// The code of a dtype that has codes.
pub(crate) fn code(dtype: KvDtype) -> Option<ColdDtype> {
    match dtype {
        KvDtype::Int8(_) => Some(ColdDtype::Int8),
        KvDtype::Fp8(_) => Some(ColdDtype::Fp8),
        KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => None,
    }
}

/// The number that a code of eight bits stands for, as the kernels load it: see [`unit()`].
#[inline(always)]
pub(crate) fn e4m3_as_half(code: u8) -> u16 {
    u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 7
}

/// What kernels' numbers are to be multiplied by. The bits of an e4m3 number are, moved, those of the
/// half-precision number that is a 256th of it, so that is what they load.
fn unit(code: ColdDtype) -> f32 {
    if code == ColdDtype::Fp8 { 256.0 } else { 1.0 }
}

/// One head's coded pages.
#[derive(Clone, Copy)]
pub(crate) struct CodedPage {
    pub(crate) code: ColdDtype,
    pub(crate) d: usize,
    pub(crate) by_rows: bool,
}

/// Where a vector's scale is, its first code, and the distance from each code to the next.
struct Place {
    scale: usize,
    first: usize,
    step: usize,
}

impl CodedPage {
    fn place(&self, token: usize, is_value: bool) -> Place {
        let (d, value) = (self.d, usize::from(is_value));
        if self.by_rows {
            let scale = (2 * token + value) * (SCALE_BYTES + d);
            return Place { scale, first: scale + SCALE_BYTES, step: 1 };
        }
        let scale = 2 * PAGE * d + (value * PAGE + token) * SCALE_BYTES;
        let (first, step) = if is_value { ((PAGE + token) * d, 1) } else { (token, PAGE) };
        Place { scale, first, step }
    }

    /// Writes a token's key or value; `buffer` is scratch.
    pub(crate) fn write(
        &self,
        page: &mut [u8],
        (token, is_value): (usize, bool),
        x: &[f32],
        buffer: &mut Vec<u8>,
    ) {
        let Place { scale, first, step } = self.place(token, is_value);
        buffer.resize(SCALE_BYTES + x.len(), 0);
        encode(self.code, x, buffer);
        let (head, codes) = buffer.split_at(SCALE_BYTES);
        page[scale..scale + SCALE_BYTES].copy_from_slice(head);
        for (target, &code) in page[first..].iter_mut().step_by(step).zip(codes) {
            *target = code;
        }
    }

    /// Reads a token's key or value; `buffer` is scratch.
    pub(crate) fn read(
        &self,
        page: &[u8],
        (token, is_value): (usize, bool),
        x: &mut [f32],
        buffer: &mut Vec<u8>,
    ) {
        let Place { scale, first, step } = self.place(token, is_value);
        buffer.clear();
        buffer.extend_from_slice(&page[scale..scale + SCALE_BYTES]);
        buffer.extend(page[first..].iter().step_by(step).take(x.len()));
        decode(self.code, buffer, x);
    }

    /// What the scores of a page's keys, or the weights of its values, are multiplied by.
    pub(crate) fn scales(&self, page: &[u8], is_value: bool, out: &mut [f32]) {
        let (first, unit) = (self.place(0, is_value).scale, unit(self.code));
        if self.by_rows {
            let rows = page[first..].chunks(2 * (SCALE_BYTES + self.d));
            out.iter_mut().zip(rows).for_each(|(out, row)| *out = scale_at(self.code, row));
            return;
        }
        // A register of them: every page of a decode step comes by here.
        let (scales, _) = page[first..][..PAGE * SCALE_BYTES].as_chunks();
        for (out, &scale) in out[..PAGE].iter_mut().zip(scales) {
            *out = f32::from_le_bytes(scale) * unit;
        }
    }
}

/// The scale that some bytes begin with, for kernels' numbers.
pub(crate) fn scale_at(code: ColdDtype, bytes: &[u8]) -> f32 {
    let (scale, _) = bytes.split_first_chunk().expect("a scale");
    f32::from_le_bytes(*scale) * unit(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::f16_to_f32;

    #[test]
    fn vectors_keep_to_their_places_in_both_orders() {
        const D: usize = 24;
        for code in [ColdDtype::Int8, ColdDtype::Fp8] {
            for by_rows in [false, true] {
                let coded = CodedPage { code, d: D, by_rows };
                let mut page = vec![0xa5; 2 * PAGE * (SCALE_BYTES + D)];
                let (mut buffer, mut back) = (Vec::new(), vec![0.0; D]);
                let vector = |token: usize, is_value: bool| -> Vec<f32> {
                    let size = (token + 1) as f32 * if is_value { -3.0 } else { 1.0 };
                    (0..D).map(|i| size * (1.0 - i as f32 / D as f32)).collect()
                };
                let all = || (0..PAGE).flat_map(|token| [(token, false), (token, true)]);
                for (token, is_value) in all() {
                    coded.write(
                        &mut page,
                        (token, is_value),
                        &vector(token, is_value),
                        &mut buffer,
                    );
                }
                for (token, is_value) in all() {
                    coded.read(&page, (token, is_value), &mut back, &mut buffer);
                    let x = vector(token, is_value);
                    let largest = x[0].abs();
                    for (x, back) in x.iter().zip(&back) {
                        assert!((x - back).abs() <= largest / 15.0, "{code} {by_rows} {x} {back}");
                    }
                    let mut scales = [0.0; PAGE];
                    coded.scales(&page, is_value, &mut scales);
                    let top = if code == ColdDtype::Int8 { 127.0 } else { 448.0 / 256.0 };
                    assert!((scales[token] * top / largest - 1.0).abs() < 1e-6);
                }
            }
        }
    }

    #[test]
    fn half_numbers_stand_for_all_codes() {
        let mut x = [0.0];
        for byte in (0..=255u8).filter(|byte| byte & 0x7f != 0x7f) {
            let [a, b, c, d] = 1f32.to_le_bytes();
            decode(ColdDtype::Fp8, &[a, b, c, d, byte], &mut x);
            assert_eq!(f16_to_f32(e4m3_as_half(byte)) * unit(ColdDtype::Fp8), x[0], "{byte:02x}");
        }
    }
}
