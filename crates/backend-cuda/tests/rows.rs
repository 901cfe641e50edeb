//! Rows that come from far in eight bits are, bit for bit, those of the reference (`RowCode::round`): attention
//! to them is that to an arena which was filled with rounded rows. Whoever wrote their pages: appending, a
//! prompt that writes beside the pass, and copies.
//!
//! Without a driver the test says so and passes: nothing was judged, and the output shows it.

#![expect(clippy::print_stdout, reason = "a skip must be seen, and how far results are")]

mod gpu;

use nuthatch_backend::{
    AttnSpec, Backend, BatchLayout, Deciding, DeviceError, Pass, Pick, PlanShape, RopeSpec,
    RopeStyle, RowCode, Rules, ScoreBy, narrow, topk::HeadNumbers, widen,
};
use nuthatch_backend_cuda::{Cuda, FarPages};
use nuthatch_types::{HeadSet, KvDtype, KvShape, KvSlots, LayerIdx, LayerSet, PageCopy, Slot};

use gpu::open;

const LAYER: LayerIdx = LayerIdx(1);
const N_KV: usize = 2;
/// Query heads.
const N_HEADS: usize = 4;
/// More of them than one matrix instruction takes.
const MANY_HEADS: usize = 24;
/// Tokens of the sequence: a prompt, and one by one.
const N_PROMPT: usize = 70;
const N_ALL: usize = 75;
/// Places that are seen where they are, when a device decides.
const SINKS: u32 = 4;
const RECENT: u32 = 9;

/// `[token][q | k | v]`, of sizes from tiny to large, one vector all zeros.
fn tokens(n_heads: usize, d: usize) -> Vec<Vec<f32>> {
    let mut state: u32 = 5;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    let width = (n_heads + 2 * N_KV) * d;
    let token = |i: usize| {
        let size = [1.0, 0.02, 7.0, 1.7][i % 4];
        let x = (0..width).map(|_| size * next()).collect::<Vec<f32>>();
        if i == 9 { vec![0.0; width] } else { x }
    };
    (0..N_ALL).map(token).collect()
}

/// The same with keys and values as they come from far.
fn rounded(tokens: &[Vec<f32>], d: usize, (code, dtype): (RowCode, KvDtype)) -> Vec<Vec<f32>> {
    let round = |token: &Vec<f32>| {
        let mut token = token.clone();
        let queries = token.len() - 2 * N_KV * d;
        for head in token[queries..].chunks_exact_mut(d) {
            let mut bytes = vec![0; d * dtype.bytes()];
            // As the page has it, and as it then comes.
            narrow(dtype, head, &mut bytes);
            widen(dtype, &bytes, head);
            code.round(head);
        }
        token
    };
    tokens.iter().map(round).collect()
}

/// What a device decides by that chooses everything between the first places and the last ones.
fn choose_all(group: usize) -> Rules {
    let head = HeadNumbers {
        threshold: 0.0,
        soft: f32::INFINITY,
        weight: 1.0,
        importances: vec![1.0; group],
    };
    Rules {
        by: ScoreBy::Keys,
        percent: 100.0,
        k_min: 0,
        k_max: u32::MAX,
        sinks: SINKS,
        recent: RECENT,
        fade: 0,
        working_set: 1.0,
        is_whole: false,
        reuse: None,
        has_choice: true,
        first_layer: 0,
        heads: vec![head; 3 * N_KV],
    }
}

fn spec(n_heads: usize, d: usize) -> AttnSpec<'static, Cuda> {
    AttnSpec {
        n_heads: n_heads as u32,
        scale: 1.0 / (d as f32).sqrt(),
        window: None,
        owns_kv: true,
        head_norms: None,
        eps: 1e-6,
    }
}

/// Attention of the last token to some places, or to all by working sets that the device decides about, after all
/// were appended and their pages copied.
fn attend(
    cuda: &Cuda,
    kv: KvShape,
    tokens: &[Vec<f32>],
    places: Option<&[u32]>,
) -> Result<Vec<f32>, DeviceError> {
    let d = kv.head_dim as usize;
    let n_all_heads = tokens[0].len() / d;
    let n_heads = n_all_heads - 2 * N_KV;
    let rope =
        RopeSpec { inv_freq: vec![0.0; d / 2], attention_factor: 1.0, style: RopeStyle::Halves };
    let shape = PlanShape { max_rows: N_PROMPT, max_seqs: 1, max_context: 96, n_heads, kv, rope };
    let n_pages = N_ALL.div_ceil(16) as u32;
    let mut arena = cuda.alloc_kv(kv, KvSlots::on_device(3 * n_pages))?;
    cuda.keep_digests(&mut arena, &[])?;
    let mut tables = cuda.alloc_tables(1, n_pages)?;
    let slots: Vec<Slot> = (0..n_pages).map(|i| Slot(2 * i + 1)).collect();
    cuda.write_table(&mut tables, 0, 0, &slots)?;
    let mut plan = cuda.alloc_plan(&shape)?;
    let spec = spec(n_heads, d);
    let mut qkv = cuda.alloc(N_PROMPT * n_all_heads * d)?;
    let lay_out = |start: usize, n: usize, qkv: &mut _, (tables, plan): (&_, &mut _)| {
        let layout = BatchLayout {
            tokens: vec![0; n],
            positions: (start as u32..(start + n) as u32).collect(),
            query_start: vec![0, n as u32],
            kv_len: vec![(start + n) as u32],
            table_row: vec![0],
            output_rows: vec![n as u32 - 1],
        };
        cuda.plan(plan, tables, &layout)?;
        cuda.write(qkv, &tokens[start..start + n].concat())
    };
    let steps = std::iter::once((0, N_PROMPT)).chain((N_PROMPT..N_ALL).map(|start| (start, 1)));
    for (start, n) in steps {
        lay_out(start, n, &mut qkv, (&tables, &mut plan))?;
        if cuda.begin_pass(&mut plan, &arena)? == Pass::Queued {
            continue;
        }
        for layer in (0..kv.n_layers).map(LayerIdx) {
            cuda.rope_append(&plan, layer, &spec, &mut qkv, &mut arena)?;
        }
        cuda.end_pass(&mut plan)?;
    }
    // Every other page moves.
    let moved = |i: u32| if i.is_multiple_of(2) { Slot(2 * n_pages + i) } else { Slot(2 * i + 1) };
    let copies =
        (0..n_pages).step_by(2).map(|i| PageCopy { source: Slot(2 * i + 1), target: moved(i) });
    cuda.copy_pages(&mut arena, &copies.collect::<Vec<_>>())?;
    let slots: Vec<Slot> = (0..n_pages).map(moved).collect();
    cuda.write_table(&mut tables, 0, 0, &slots)?;
    lay_out(N_ALL - 1, 1, &mut qkv, (&tables, &mut plan))?;
    let mut out = cuda.alloc(n_heads * d)?;
    match places {
        Some(places) => {
            let pick =
                |head| Pick { seq: 0, head, n_first: 0, places, tail: N_ALL as u32, rows: &[] };
            let picks: Vec<Pick<'_>> = (0..N_KV as u32).map(pick).collect();
            cuda.attend_picks(&plan, LAYER, &spec, &qkv, &arena, &picks, &mut out)?;
        }
        None => {
            assert!(
                cuda.decide_by(&plan, &mut arena, &[choose_all(n_heads / N_KV)], 1)?,
                "a device that decides"
            );
            let row = Deciding { seq: 0, table_row: 0, rules: 0, is_new: true };
            cuda.begin_deciding(&mut plan, &arena, &[row])?;
            cuda.attend_deciding(&plan, (1, LAYER), &spec, &qkv, &arena, &mut out)?;
        }
    }
    let mut found = vec![0.0; n_heads * d];
    cuda.read(&out, &mut found)?;
    Ok(found)
}

#[test]
fn rows_in_eight_bits_are_those_of_the_reference() {
    let far = |n_near, code| {
        // The layer that is looked at is the only one on the host, between two that are not.
        let resident = LayerSet::of(&[0, 2]).unwrap();
        // The rows of its second head are on the device, where all pages have copies.
        let coded_here = if n_near > 2 { HeadSet::of([3]) } else { HeadSet::NONE };
        open(Some(FarPages { n_near, resident, n_threads: 0, code, coded_here, fails_after: None }))
    };
    let Some(here) = open(None) else { return };
    let attend = |cuda: &Cuda, kv, tokens: &[Vec<f32>], places: &[u32]| {
        attend(cuda, kv, tokens, Some(places)).unwrap()
    };
    let far_plain = far(2, None).unwrap();
    let coded = RowCode::ALL.map(|code| (code, [1, 64].map(|n| far(n, Some(code)).unwrap())));
    let all: Vec<u32> = (0..N_ALL as u32).collect();
    let some: Vec<u32> = all.iter().copied().filter(|place| place % 3 != 1).collect();
    for (dtype, head_dim) in [(KvDtype::F16, 128), (KvDtype::Bf16, 80), (KvDtype::F32, 64)] {
        let kv = KvShape { n_layers: 3, n_kv_heads: N_KV as u32, head_dim, page_len: 16, dtype };
        let d = head_dim as usize;
        let exact = tokens(N_HEADS, d);
        for places in [&all, &some] {
            let plain = attend(&here, kv, &exact, places);
            assert_eq!(attend(&far_plain, kv, &exact, places), plain, "{dtype} {d}");
            for (code, devices) in &coded {
                let expected = attend(&here, kv, &rounded(&exact, d, (*code, dtype)), places);
                assert_ne!(expected, plain, "{code} {dtype} {d}: nothing is rounded");
                for cuda in devices {
                    let found = attend(cuda, kv, &exact, places);
                    let same = found.iter().zip(&expected).filter(|(a, b)| a == b).count();
                    assert_eq!(found, expected, "{code} {dtype} {d}: {same} same");
                }
            }
        }
    }
}

/// Working sets may keep rows in eight bits: attention to them is that to rounded rows, but for the order of sums.
/// The last places and the first are not rounded. Some numbers are so large that their power of two is none that an
/// element can be multiplied by at once.
#[test]
fn working_sets_in_eight_bits_have_the_rows_of_the_reference() {
    let Some(here) = open(None) else { return };
    let far = |resident: &[u32], code| {
        let resident = LayerSet::of(resident).unwrap();
        let coded_here = if resident.is_empty() { HeadSet::of([3]) } else { HeadSet::NONE };
        let far =
            FarPages { n_near: 64, resident, n_threads: 0, code, coded_here, fails_after: None };
        open(Some(far)).unwrap()
    };
    for code in RowCode::ALL {
        // Some layers' working sets have rows as they are; and all have the same.
        for cuda in [far(&[0, 2], Some(code)), far(&[], Some(code))] {
            for (dtype, head_dim, n_heads) in [
                (KvDtype::Bf16, 128, N_HEADS),
                (KvDtype::Bf16, 80, N_HEADS),
                (KvDtype::Bf16, 64, N_HEADS),
                (KvDtype::Bf16, 24, N_HEADS),
                (KvDtype::Bf16, 128, MANY_HEADS),
                (KvDtype::Bf16, 256, N_HEADS),
                (KvDtype::F16, 128, N_HEADS),
                (KvDtype::F16, 128, MANY_HEADS),
                (KvDtype::F16, 96, N_HEADS),
                (KvDtype::F16, 256, MANY_HEADS),
            ] {
                let kv =
                    KvShape { n_layers: 3, n_kv_heads: N_KV as u32, head_dim, page_len: 16, dtype };
                let d = head_dim as usize;
                let mut exact = tokens(n_heads, d);
                // One value that outweighs the others, a key that does, and one of each that is next to nothing.
                let by = if dtype == KvDtype::Bf16 { [1e8, 1e6, 1e-20] } else { [6e4, 6e4, 1e-6] };
                for (at, (x, most)) in [
                    (20, (N_KV * d, by[0])),
                    (41, (0, by[1])),
                    (33, (N_KV * d, by[2])),
                    (35, (0, by[2])),
                ] {
                    let vector = &mut exact[at][n_heads * d + x..][..d];
                    let largest = vector.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    vector.iter_mut().for_each(|x| *x *= most / largest);
                }
                let mut coded = rounded(&exact, d, (code, dtype));
                let end = N_ALL - RECENT as usize;
                coded[..SINKS as usize].clone_from_slice(&exact[..SINKS as usize]);
                coded[end..].clone_from_slice(&exact[end..]);
                let expected = attend(&here, kv, &coded, None).unwrap();
                let plain = attend(&here, kv, &exact, None).unwrap();
                let found = attend(&cuda, kv, &exact, None).unwrap();
                for (head, ((found, expected), plain)) in
                    (0..).zip(found.chunks(d).zip(expected.chunks(d)).zip(plain.chunks(d)))
                {
                    let most = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    let distance = |other: &[f32]| {
                        expected
                            .iter()
                            .zip(other)
                            .fold(0.0f32, |far, (a, b)| far.max((a - b).abs()))
                    };
                    let (far, rounding) = (distance(found), distance(plain));
                    println!(
                        "{code} {dtype} {d} head {head}: {far} of {most}, rounding {rounding}"
                    );
                    assert!(far <= 2e-3 * most, "{code} {dtype} {d} head {head}: {far} of {most}");
                }
            }
        }
    }
}
