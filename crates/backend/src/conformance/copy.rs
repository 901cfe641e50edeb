//! Buffers, layers of the arena, and pages copied inside it.

use nuthatch_types::{
    ColdDtype, ColdKv, HostReads, KvDtype, LayerIdx, LayerSet, PageCopy, PageImage, Slot,
};

use crate::{Backend, LayoutCodec, PageCodec as _, RopeStyle};

use super::compare::{download, same_bits};
use super::inputs::Random;
use super::rig::{Case, DTYPES, N_HOST_SLOTS, N_LAYERS, Part, Rig, Room, Sequence};
use super::truth::attend;

/// New buffers are zero; writes and reads touch the start only.
pub fn buffers_match<B: Backend>(b: &B) {
    let mut buf = b.alloc(100).expect("a small buffer fits");
    let zero = download(b, &buf, 100);
    same_bits(&zero, &[0.0; 100], &|| "a new buffer".into());

    let values = Random::new(21).values(100);
    b.write(&mut buf, &values).expect("the device takes a buffer");
    b.write(&mut buf, &[f32::NAN, f32::NEG_INFINITY, -0.0]).expect("the device takes a start");
    b.wait().expect("the device finishes");
    let mut expected = values.clone();
    expected[..3].copy_from_slice(&[f32::NAN, f32::NEG_INFINITY, -0.0]);
    same_bits(&download(b, &buf, 100), &expected, &|| "a buffer whose start was written".into());
    same_bits(&download(b, &buf, 50), &expected[..50], &|| "the start of a buffer".into());
    assert!(!b.name().is_empty(), "a device has a name");
}

/// A different sequence in each layer, all on the slots of one table.
pub(super) struct Layers<'a, B: Backend> {
    pub(super) rig: Rig<'a, B>,
    pub(super) sequences: Vec<Sequence>,
}

impl<'a, B: Backend> Layers<'a, B> {
    pub(super) const ROWS: usize = 40;
    const N_SLOTS: u32 = 12;

    pub(super) fn new(b: &'a B, case: &'a Case, random: &mut Random, slots: &[Slot]) -> Self {
        let room =
            Room { n_slots: Self::N_SLOTS as usize, n_tables: 2, max_rows: 64, max_context: 64 };
        let mut rig = Rig::new(b, case, room);
        rig.write_table(0, 0, slots);
        let sequences: Vec<Sequence> =
            (0..N_LAYERS).map(|_| Sequence::new(random, case, Self::ROWS)).collect();
        for (layer, seq) in sequences.iter().enumerate() {
            rig.append(seq, 0, Self::ROWS, LayerIdx(layer as u32));
        }
        Layers { rig, sequences }
    }

    /// The last row's output of each layer, by way of a table.
    pub(super) fn last_rows(&mut self, table: u32) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        for (layer, seq) in self.sequences.iter().enumerate() {
            let part = Part { seq, table, start: Self::ROWS - 1, end: Self::ROWS };
            let layer = LayerIdx(layer as u32);
            let qkv = self.rig.rotate(&[part], layer);
            rows.extend(self.rig.attend(&[part], &qkv, layer));
        }
        rows
    }
}

/// Layers and heads of the arena do not overlap, of one type or of two.
pub fn layers_match<B: Backend>(b: &B) {
    let mut random = Random::new(22);
    let wide = |layers: &[u32]| LayerSet::of(layers).expect("there are such layers");
    let (first, second) = (KvDtype::Int8(wide(&[1])), KvDtype::Fp8(wide(&[0, 2])));
    let cases = [KvDtype::F16, first, second].map(|dtype| Case::new(dtype, 2, 3, 64));
    for case in cases {
        let mut layers = Layers::new(b, &case, &mut random, &[Slot(7), Slot(2), Slot(11)]);
        let rows = layers.last_rows(0);
        for (layer, (seq, got)) in layers.sequences.iter().zip(rows).enumerate() {
            let end = seq.rows;
            let mut case = case.clone();
            case.kv.dtype = case.kv.dtype.of_layer(layer as u32);
            let truth = attend(b, &case, seq, end - 1..end);
            truth.check(&got, &|| format!("attention of layer {layer}, {}", case.name()));
        }
    }
}

/// Copied pages hold the same bits in all layers; copies run in order; sources stay.
pub fn copy_pages_matches<B: Backend>(b: &B) {
    let mut random = Random::new(23);
    for dtype in DTYPES {
        let case = Case::new(dtype, 2, 3, 64).rotated(RopeStyle::Halves, 64);
        let mut layers = Layers::new(b, &case, &mut random, &[Slot(4), Slot(9), Slot(0)]);
        let expected = layers.last_rows(0);
        let copy = |source, target| PageCopy { source: Slot(source), target: Slot(target) };
        // 4 goes to 6 by way of 5, after 5 went elsewhere; 9 and 0 go straight.
        let copies = [copy(9, 5), copy(5, 10), copy(4, 5), copy(5, 6), copy(0, 3)];
        b.copy_pages(&mut layers.rig.kv, &copies).expect("copy_pages runs");
        b.copy_pages(&mut layers.rig.kv, &[]).expect("nothing is copied");
        // Entries are written in two goes, the second one first.
        layers.rig.write_table(1, 1, &[Slot(10), Slot(3)]);
        layers.rig.write_table(1, 0, &[Slot(6)]);
        for table in [1, 0] {
            for (layer, (got, expected)) in
                layers.last_rows(table).iter().zip(&expected).enumerate()
            {
                same_bits(got, expected, &|| {
                    format!("attention of layer {layer} by table {table} after copies, {dtype}")
                });
            }
        }
    }
}

/// Pages keep their bits on the way to the host and back, and a slot whose page has gone to the host
/// can be the target of a later copy of the same list.
pub fn copy_tiers_match<B: Backend>(b: &B) {
    let mut random = Random::new(24);
    for dtype in DTYPES {
        let case = Case::new(dtype, 2, 3, 64).rotated(RopeStyle::Halves, 64);
        let mut layers = Layers::new(b, &case, &mut random, &[Slot(4), Slot(9), Slot(0)]);
        let expected = layers.last_rows(0);
        let host: Vec<u32> = (0..N_HOST_SLOTS).map(|i| Layers::<B>::N_SLOTS + i).collect();
        let copy = |source, target| PageCopy { source: Slot(source), target: Slot(target) };
        // All three go to the host, one of them by way of another host slot; two come back in one
        // another's places, the third in a later call.
        let copies = [copy(4, host[2]), copy(9, host[1]), copy(host[2], host[0]), copy(0, host[2])];
        b.copy_pages(&mut layers.rig.kv, &copies).expect("copy_pages runs");
        let copies = [copy(host[0], 9), copy(host[1], 4)];
        b.copy_pages(&mut layers.rig.kv, &copies).expect("copy_pages runs");
        b.copy_pages(&mut layers.rig.kv, &[copy(host[2], 11)]).expect("copy_pages runs");
        layers.rig.write_table(1, 0, &[Slot(9), Slot(4), Slot(11)]);
        for (layer, (got, expected)) in layers.last_rows(1).iter().zip(&expected).enumerate() {
            same_bits(got, expected, &|| {
                format!("attention of layer {layer} after pages were on the host, {dtype}")
            });
        }
    }
}

/// Pages that left the device and come back to other slots, of both tiers and of another arena, keep
/// their bits.
pub fn page_images_match<B: Backend>(b: &B) {
    let mut random = Random::new(26);
    for dtype in DTYPES {
        let case = Case::new(dtype, 2, 3, 64).rotated(RopeStyle::Halves, 64);
        let slots = [Slot(4), Slot(9), Slot(0)];
        let mut layers = Layers::new(b, &case, &mut random, &slots);
        let Some(image) = b.page_image(&layers.rig.kv) else { return };
        let expected = layers.last_rows(0);
        let mut pages = vec![vec![0; image.bytes]; slots.len()];
        for (page, &slot) in pages.iter_mut().zip(&slots) {
            b.read_page(&layers.rig.kv, slot, page).expect("a page is read");
        }
        let mut other = Layers::new(b, &case, &mut random, &[Slot(1), Slot(2), Slot(3)]);
        let same = b.page_image(&other.rig.kv);
        assert_eq!(same.as_ref(), Some(&image), "two arenas of one shape");
        other.sequences = layers.sequences;
        let host = Slot(Layers::<B>::N_SLOTS + 1);
        // In order with all else, and then beside it.
        for (beside, targets) in
            [(false, [Slot(0), host, Slot(5)]), (true, [Slot(8), host, Slot(4)])]
        {
            put_pages(b, &mut other.rig.kv, &pages, (&targets, &image), beside);
            for (page, slot) in pages.iter().zip(targets) {
                let mut again = vec![0; page.len()];
                b.read_page(&other.rig.kv, slot, &mut again).expect("a page is read");
                assert!(again == *page, "a page is read as it was written, {dtype}");
            }
            let back = PageCopy { source: host, target: Slot(11) };
            b.copy_pages(&mut other.rig.kv, &[back]).expect("copy_pages runs");
            other.rig.write_table(1, 0, &[targets[0], Slot(11), targets[2]]);
            for (layer, (got, expected)) in other.last_rows(1).iter().zip(&expected).enumerate() {
                same_bits(got, expected, &|| {
                    format!("attention of layer {layer} after pages left the device, {dtype}")
                });
            }
        }
    }
}

/// Writes pages, the second layers first where layers can come alone.
fn put_pages<B: Backend>(
    b: &B,
    kv: &mut B::Kv,
    pages: &[Vec<u8>],
    (slots, image): (&[Slot], &PageImage),
    beside: bool,
) {
    if beside {
        b.land_pages(kv, true).expect("pages may come");
    }
    let cut = image.layer_bytes.unwrap_or(image.bytes);
    for layers in [cut..image.bytes, 0..cut] {
        for (page, &slot) in pages.iter().zip(slots).filter(|_| !layers.is_empty()) {
            let bytes = &page[layers.clone()];
            b.write_page(kv, slot, layers.start, bytes).expect("a page is written");
        }
        if beside {
            b.land_pages(kv, layers.start > 0).expect("pages have come");
        }
    }
}

/// A layout says where each token's key and value of each head is: in eight bits with a scale for
/// each, numbers that have so few bits beside their own scale keep them all, and no others do.
pub fn page_layouts_match<B: Backend>(b: &B) {
    let mut random = Random::new(27);
    for (dtype, d) in DTYPES.into_iter().flat_map(|dtype| [(dtype, 64), (dtype, 80)]) {
        let case = Case::new(dtype, 2, 3, d);
        let mut layers = Layers::new(b, &case, &mut random, &[Slot(4), Slot(9), Slot(0)]);
        let Some(layout) = b.page_layout(&layers.rig.kv) else { continue };
        for seq in &mut layers.sequences {
            for vector in seq.qkv.chunks_exact_mut(d) {
                let scale = 2f32.powi(random.below(13) as i32 - 6);
                vector.iter_mut().for_each(|x| *x = (random.below(255) as f32 - 127.0) * scale);
                vector[random.below(d)] = 127.0 * scale;
            }
        }
        for (layer, seq) in layers.sequences.iter().enumerate() {
            layers.rig.append(seq, 0, Layers::<B>::ROWS, LayerIdx(layer as u32));
        }
        let cold = ColdKv { dtype: ColdDtype::Int8, exact_layers: vec![] };
        let codec = LayoutCodec::new(layout, &cold).expect("all layers are coded");
        let mut page = vec![0; codec.page_bytes()];
        b.read_page(&layers.rig.kv, Slot(9), &mut page).expect("a page is read");
        let (mut coded, mut back) = (vec![0; codec.coded_bytes()], vec![0; page.len()]);
        codec.encode(&page, &mut coded);
        codec.decode(&coded, &mut back);
        assert!(back == page, "numbers of eight bits keep them, {dtype}, heads of {d}");
        assert!(codec.coded_bytes() < page.len(), "fewer bytes");
    }
}

/// On a device that reads them, slots of the host serve like those of the device, bit for bit.
pub fn host_slots_agree<B: Backend>(b: &B) {
    if b.host_reads() == HostReads::Never {
        return;
    }
    for dtype in DTYPES {
        let case = Case::new(dtype, 2, 3, 64).rotated(RopeStyle::Halves, 64);
        let host = |i: u32| Slot(Layers::<B>::N_SLOTS + i);
        let mut on_device =
            Layers::new(b, &case, &mut Random::new(25), &[Slot(4), Slot(9), Slot(0)]);
        let mut on_both = Layers::new(b, &case, &mut Random::new(25), &[host(2), Slot(9), host(0)]);
        let expected = on_device.last_rows(0);
        for (layer, (got, expected)) in on_both.last_rows(0).iter().zip(&expected).enumerate() {
            same_bits(got, expected, &|| {
                format!("attention of layer {layer} over slots of the host, {dtype}")
            });
        }
    }
}
