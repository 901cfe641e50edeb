//! The rotation of keys as a number: pages whose keys were rotated otherwise are others.

use nuthatch_backend::RopeSpec;
use xxhash_rust::xxh3::xxh3_128;

/// Names the rotation of keys, which some models choose by how long a context may become.
pub(crate) fn rope_mark(rope: &RopeSpec) -> u128 {
    let RopeSpec { inv_freq, attention_factor, style } = rope;
    let floats = inv_freq.iter().chain([attention_factor]);
    let mut bytes: Vec<u8> = floats.flat_map(|x| x.to_le_bytes()).collect();
    bytes.extend(format!("{style:?}").bytes());
    xxh3_128(&bytes)
}

#[cfg(test)]
mod tests {
    use nuthatch_backend::RopeStyle;

    use super::*;

    #[test]
    fn keys_that_are_rotated_otherwise_have_another_mark() {
        let rope = |inv_freq: &[f32], attention_factor, style| {
            rope_mark(&RopeSpec { inv_freq: inv_freq.to_vec(), attention_factor, style })
        };
        let marks = [
            rope(&[1.0, 0.5], 1.0, RopeStyle::Halves),
            rope(&[1.0, 0.25], 1.0, RopeStyle::Halves),
            rope(&[1.0, 0.5], 1.25, RopeStyle::Halves),
            rope(&[1.0, 0.5], 1.0, RopeStyle::Pairs),
            rope(&[1.0], 0.5, RopeStyle::Halves),
        ];
        for (i, mark) in marks.iter().enumerate() {
            assert!(marks[..i].iter().all(|other| other != mark), "mark {i}");
        }
        assert_eq!(marks[0], rope(&[1.0, 0.5], 1.0, RopeStyle::Halves));
    }
}
