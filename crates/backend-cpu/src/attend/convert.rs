//! Pages as the products read them: converted, and with the scales of codes beside them.

use nuthatch_types::KvDtype;

use super::element::{scale_row, to_floats};
use super::{Attention, CHUNK_PAGES, Pages, Scratch, rows};
use crate::coded::{CodedPage, code};
use crate::kv::PAGE;
use crate::plan::{CHUNK, PlanSeq};

impl Attention<'_> {
    /// How this layer is stored.
    pub(super) fn dtype(&self) -> KvDtype {
        self.kv.shape.dtype.of_layer(self.layer as u32)
    }

    /// Reads the scales of pages that have any.
    pub(super) fn load_scales(&self, pages: &[*const u8], scales: &mut [Vec<f32>; 2]) {
        let Some(code) = code(self.dtype()) else { return };
        let coded = CodedPage { code, d: self.d(), by_rows: self.kv.by_rows };
        let len = self.kv.head_page_bytes(self.kv.head_number(self.layer, 0));
        for (is_value, scales) in [false, true].into_iter().zip(scales) {
            scales.resize(CHUNK, 0.0);
            for (&page, scales) in pages.iter().zip(scales.chunks_exact_mut(PAGE)) {
                #[expect(unsafe_code, reason = "pages are addressed by pointers here")]
                // SAFETY: each address is that of a page of a head of this layer.
                let page = unsafe { std::slice::from_raw_parts(page, len) };
                coded.scales(page, is_value, scales);
            }
        }
    }

    /// The scales from a token of the chunk on, if the layer has any.
    pub(super) fn scales<'s>(
        &self,
        scales: &'s [Vec<f32>; 2],
        first: usize,
    ) -> Option<[&'s [f32]; 2]> {
        self.dtype().is_coded().then(|| [&scales[0][first..], &scales[1][first..]])
    }

    /// Converts pages to floats once for a whole tile, and gives their addresses. Codes are converted
    /// without their scales, which are read too.
    pub(super) fn convert(
        &self,
        head: usize,
        seq: &PlanSeq,
        (first_page, n_pages): (usize, usize),
        Scratch { keys, values, scales, stored, .. }: &mut Scratch,
    ) -> ([*const u8; CHUNK_PAGES], [*const u8; CHUNK_PAGES]) {
        let d = self.d();
        let (mut key_at, mut value_at) = match &self.kv.file {
            None => self.addresses(head, seq, first_page, n_pages),
            Some(file) => {
                self.read_pages(file, head, seq, first_page..first_page + n_pages, stored);
                let mut key_at = [std::ptr::null(); CHUNK_PAGES];
                let number = self.kv.head_number(self.layer, head);
                let pages = stored.chunks_exact(self.kv.head_page_bytes(number));
                key_at.iter_mut().zip(pages).for_each(|(at, page)| *at = page.as_ptr());
                (key_at, [std::ptr::null(); CHUNK_PAGES])
            }
        };
        let dtype = self.dtype();
        self.load_scales(&key_at[..n_pages], scales);
        if dtype == KvDtype::F32 && !self.kv.by_rows {
            return (key_at, value_at);
        }
        let page_bytes = self.kv.head_page_bytes(self.kv.head_number(self.layer, head));
        keys.resize(CHUNK * d, 0.0);
        values.resize(CHUNK * d, 0.0);
        for page in 0..n_pages {
            if self.kv.by_rows {
                let range = page * PAGE * d..(page + 1) * PAGE * d;
                #[expect(unsafe_code, reason = "pages are addressed by pointers here")]
                // SAFETY: `addresses` points at a page of rows.
                let source = unsafe { std::slice::from_raw_parts(key_at[page], page_bytes) };
                let (keys, values) = (&mut keys[range.clone()], &mut values[range]);
                rows::to_page(self.isa, dtype, source, keys, values);
                (key_at[page], value_at[page]) = (keys.as_ptr().cast(), values.as_ptr().cast());
                continue;
            }
            for (buffer, at) in [(&mut *keys, &mut key_at), (&mut *values, &mut value_at)] {
                let target = &mut buffer[page * PAGE * d..(page + 1) * PAGE * d];
                #[expect(unsafe_code, reason = "pages are addressed by pointers here")]
                // SAFETY: `addresses` points at `PAGE * d` elements of keys or values.
                let source =
                    unsafe { std::slice::from_raw_parts(at[page], PAGE * d * dtype.bytes()) };
                to_floats(self.isa, dtype, source, target);
                at[page] = target.as_ptr().cast();
            }
        }
        (key_at, value_at)
    }

    /// Multiplies rows of [`CHUNK`] scores or weights by their tokens' scales.
    pub(super) fn scale_rows(&self, pages: &Pages<'_>, scales: &[f32], rows: &mut [f32]) {
        let n = pages.keys.len() * PAGE;
        for row in rows.chunks_exact_mut(CHUNK) {
            scale_row(self.isa, &mut row[..n], &scales[..n]);
        }
    }
}
