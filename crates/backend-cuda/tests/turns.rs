//! Prompts that have more pages than there are copies of: layers take turns, or parts of them, and nothing changes.
//!
//! The same batches, prompts in chunks beside sequences that decode, with pages on the device and with pages
//! on the host of which few have copies; attention has to give the same bits.
//!
//! Without a driver the test says so and passes: nothing was judged, and the output shows it.

#![expect(clippy::print_stdout, reason = "a skip must be seen")]

mod gpu;

use nuthatch_backend::{
    AttnSpec, Backend, BatchLayout, DeviceError, Digest, DigestKind, Pass, PlanShape, RopeSpec,
    RopeStyle,
};
use nuthatch_backend_cuda::{Cuda, FarPages};
use nuthatch_types::{HeadSet, KvDtype, KvShape, KvSlots, LayerIdx, LayerSet, Slot};

use gpu::open;

const N_HEADS: u32 = 24;
const N_LAYERS: u32 = 7;
const TABLE_LEN: u32 = 40;
/// `[batch][sequence]` rows: a prompt alone, one beside a sequence that decodes, more of both, decoding only,
/// and a prompt again.
const BATCHES: [[usize; 2]; 8] =
    [[200, 0], [1, 150], [1, 77], [1, 1], [1, 1], [130, 1], [90, 60], [1, 1]];

/// Floats that their seed determines.
fn random(n: usize, seed: usize) -> Vec<f32> {
    let mut state = seed as u32 * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// The batch's rows, after as many of each sequence.
fn layout(before: [usize; 2], rows: [usize; 2]) -> BatchLayout {
    let mut layout = BatchLayout { query_start: vec![0], ..BatchLayout::default() };
    for seq in (0..2).filter(|&seq| rows[seq] > 0) {
        let (start, n) = (before[seq], rows[seq]);
        layout.tokens.extend(std::iter::repeat_n(0, n));
        layout.positions.extend((start..start + n).map(|position| position as u32));
        layout.query_start.push(layout.tokens.len() as u32);
        layout.kv_len.push((start + n) as u32);
        layout.table_row.push(seq as u32);
        layout.output_rows.push(layout.tokens.len() as u32 - 1);
    }
    layout
}

/// What attention of all layers and batches gives, and rows that were copied to the device.
fn attend(cuda: &Cuda, kv: KvShape) -> Result<(Vec<Vec<f32>>, u64), DeviceError> {
    let d = kv.head_dim as usize;
    let rope =
        RopeSpec { inv_freq: vec![0.02; d / 2], attention_factor: 1.0, style: RopeStyle::Halves };
    let max_rows = 200;
    let shape = PlanShape {
        max_rows,
        max_seqs: 2,
        max_context: TABLE_LEN as usize * 16,
        n_heads: N_HEADS as usize,
        kv,
        rope,
    };
    let mut arena = cuda.alloc_kv(kv, KvSlots::on_device(2 * TABLE_LEN + 3))?;
    let signs = Digest {
        kind: DigestKind::Signs,
        width: 64,
        frame: random(64 * d, 3),
        mean: vec![0.0; (kv.n_layers * kv.n_kv_heads) as usize * d],
        weights: Vec::new(),
    };
    cuda.keep_digests(&mut arena, &[signs])?;
    let mut tables = cuda.alloc_tables(2, TABLE_LEN)?;
    for row in 0..2 {
        // Both sequences' pages mixed, and not in order.
        let slots: Vec<Slot> =
            (0..TABLE_LEN).map(|i| Slot((2 * i + row) * 29 % (2 * TABLE_LEN))).collect();
        cuda.write_table(&mut tables, row, 0, &slots)?;
    }
    let mut plan = cuda.alloc_plan(&shape)?;
    let scale = 1.0 / (d as f32).sqrt();
    let n_heads = N_HEADS;
    let spec =
        AttnSpec { n_heads, scale, window: None, owns_kv: true, head_norms: None, eps: 1e-6 };
    let (width, out_width) = ((N_HEADS + 2 * kv.n_kv_heads) as usize * d, N_HEADS as usize * d);
    let mut layers: Vec<_> = (0..kv.n_layers)
        .map(|_| Ok((cuda.alloc(max_rows * width)?, cuda.alloc(max_rows * out_width)?)))
        .collect::<Result<_, DeviceError>>()?;
    let (mut before, mut found) = ([0; 2], Vec::new());
    for (step, rows) in BATCHES.into_iter().enumerate() {
        let n: usize = rows.iter().sum();
        cuda.plan(&mut plan, &tables, &layout(before, rows))?;
        for (layer, (qkv, _)) in layers.iter_mut().enumerate() {
            cuda.write(qkv, &random(n * width, 100 * step + layer))?;
        }
        if cuda.begin_pass(&mut plan, &arena)? == Pass::Needed {
            // As if one layer followed the other: nothing waits in between.
            for (layer, (qkv, out)) in (0..).map(LayerIdx).zip(&mut layers) {
                cuda.rope_append(&plan, layer, &spec, qkv, &mut arena)?;
                // Some layers are followed by one that reads their keys and values.
                for _ in 0..1 + layer.0 % 2 {
                    cuda.attend(&plan, layer, &spec, qkv, &arena, out)?;
                }
            }
            cuda.end_pass(&mut plan)?;
        }
        for (_, out) in &layers {
            let mut all = vec![0.0; n * out_width];
            cuda.read(out, &mut all)?;
            found.push(all);
        }
        before = [before[0] + rows[0], before[1] + rows[1]];
    }
    Ok((found, cuda.near_counts(&arena).n_filled))
}

#[test]
fn layers_that_take_turns_change_nothing() {
    let Some(here) = open(None) else { return };
    for (dtype, head_dim, n_kv_heads) in [
        (KvDtype::F16, 128, 8),
        (KvDtype::Bf16, 64, 3),
        (KvDtype::Bf16, 128, 4),
        (KvDtype::F32, 64, 2),
    ] {
        let kv = KvShape { n_layers: N_LAYERS, n_kv_heads, head_dim, page_len: 16, dtype };
        let (expected, _) = attend(&here, kv).unwrap();
        // Two that stay, so that those before and behind one of them are both even. With few copies heads take turns
        // too, by two and one by one.
        let shapes = [(12, &[][..]), (8, &[0, 3]), (6, &[]), (4, &[2]), (3, &[]), (100, &[])];
        let counts = shapes.map(|(n_near, stay)| {
            let (n_threads, code, fails_after) = (0, None, None);
            let resident = LayerSet::of(stay).unwrap();
            let coded_here = HeadSet::NONE;
            let far = FarPages { n_near, resident, n_threads, code, coded_here, fails_after };
            let cuda = open(Some(far)).unwrap();
            let (found, n_filled) = attend(&cuda, kv).unwrap();
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let (step, layer) = (i / N_LAYERS as usize, i % N_LAYERS as usize);
                let same = found.iter().zip(expected).filter(|(a, b)| a == b).count();
                let all = expected.len();
                assert_eq!(same, all, "{dtype} {n_near}: step {step}, layer {layer}");
            }
            n_filled / u64::from(16 * n_kv_heads * (N_LAYERS - stay.len() as u32))
        });
        println!("{dtype} {head_dim}: pages that came {counts:?}");
        // All that a prompt sees comes again with each chunk where layers take turns, and nothing where
        // there is room.
        assert!(counts[0] > 30 && counts[5] == 0, "{counts:?}");
    }
}
