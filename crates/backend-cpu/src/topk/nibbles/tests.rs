//! Scores by four bits are those of the reference on every instruction set.

use nuthatch_backend::topk::nibble_product;

use super::*;

fn check_exponentials<'a>(
    isa: Isa,
    pages: impl Iterator<Item = &'a [u8]> + Clone,
    codes: &Codes,
    scores: &[f32],
) {
    let group = codes.of_queries.len();
    let (mut raw, mut sums) = (vec![0.0; scores.len()], vec![(0.0, 0.0); group]);
    if !nibble_exponentials(isa, pages, codes, &mut raw, &mut sums) {
        return;
    }
    let n = scores.len() / group;
    for ((raw, scores), (from, total)) in raw.chunks_exact(n).zip(scores.chunks_exact(n)).zip(sums)
    {
        let expected = |score: &f32| f64::from(score - from).exp();
        for (&got, score) in raw.iter().zip(scores) {
            let off = (f64::from(got) - expected(score)).abs();
            // A difference is as near as its parts are.
            let near = 5e-7 + 2e-7 * f64::from(score.abs() + from.abs());
            assert!(!got.is_subnormal(), "{got}");
            assert!(off <= near * expected(score) + 1e-37, "{got} of {score} from {from}");
        }
        let sum: f64 = scores.iter().map(expected).sum();
        let near = 1e-5 + 2e-7 * f64::from(2.0 * from.abs());
        assert!((f64::from(total) - sum).abs() <= near * sum, "{total} of {sum}");
    }
}

#[test]
fn scores_may_grow_by_much_after_the_first_pages() {
    let (width, n) = (8usize, 100usize);
    let page_bytes = PAGE * (width / 2 + 2);
    let mut bytes = vec![0; n.div_ceil(PAGE) * page_bytes];
    for place in 0..n {
        let size = if place < 80 { 0.001 } else { place as f32 };
        let page = &mut bytes[place / PAGE * page_bytes..][..page_bytes];
        write(&[size; 8], place % PAGE, page);
    }
    let codes = Codes::new(&[[1.0; 8], [-1.0; 8]].concat(), width, 1.0);
    let pages = || bytes.chunks_exact(page_bytes);
    for isa in Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()) {
        let (mut raw, mut maxima) = (vec![0.0; 2 * n], [0.0; 2]);
        nibble_scores(isa, pages(), &codes, &mut raw, &mut maxima);
        assert!(maxima[0] > 700.0 && maxima[1] < 0.0, "{maxima:?}");
        check_exponentials(isa, pages(), &codes, &raw);
    }
}

#[test]
fn every_instruction_set_scores_as_the_reference_does() {
    let mut state = 5u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    for (width, group, n) in
        [(1usize, 1usize, 1usize), (8, 2, 16), (32, 3, 100), (40, 4, 47), (13, 9, 33)]
    {
        let keys: Vec<Vec<f32>> = (0..n).map(|_| (0..width).map(|_| next()).collect()).collect();
        let page_bytes = PAGE * (width.next_multiple_of(LINE) / 2 + 2);
        let mut bytes = vec![0xff; n.div_ceil(PAGE) * page_bytes];
        for (place, key) in keys.iter().enumerate() {
            write(key, place % PAGE, &mut bytes[place / PAGE * page_bytes..][..page_bytes]);
        }
        let products: Vec<f32> = (0..group * width).map(|_| 9.0 * next()).collect();
        let codes = Codes::new(&products, width, 0.125);
        let mut expected = Vec::new();
        for query in products.chunks_exact(width) {
            let (query, of_query) = query_codes(query);
            let query: Vec<i8> = query.collect();
            expected.extend(keys.iter().map(|key| {
                let (key, unit) = nibbles(key);
                nibble_product(&key, &query) as f32 * unit.to_f32() * (of_query * 0.125)
            }));
        }
        for isa in Isa::ALL.into_iter().filter(|&isa| isa <= Isa::detect()) {
            let (mut raw, mut maxima) = (vec![f32::NAN; group * n], vec![f32::NAN; group]);
            let pages = bytes.chunks_exact(page_bytes);
            nibble_scores(isa, pages, &codes, &mut raw, &mut maxima);
            assert_eq!(raw, expected, "{isa}: width {width}, {group} queries, {n} keys");
            let rows = expected.chunks_exact(n);
            let largest = rows.map(|row| row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            assert_eq!(maxima, largest.collect::<Vec<f32>>(), "{isa}: {group} queries");
            check_exponentials(isa, bytes.chunks_exact(page_bytes), &codes, &expected);
        }
    }
}
