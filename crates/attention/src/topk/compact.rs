//! Directions as text: rows of length 1, two hexadecimal digits for each number.
//!
//! A profile has thousands of them, and they need few digits: each number is a whole multiple of the
//! row's largest over 127, and the length says the rest.

use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

pub(super) fn serialize<S: Serializer>(rows: &[Vec<f32>], to: S) -> Result<S::Ok, S::Error> {
    let rows: Vec<String> = rows.iter().map(|row| encode(row)).collect();
    rows.serialize(to)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<f32>>, D::Error> {
    let rows = Vec::<String>::deserialize(from)?;
    let decode = |row: &String| decode(row).ok_or_else(|| D::Error::custom("a row of no digits"));
    rows.iter().map(decode).collect()
}

/// The row as it is when it was written and read.
pub(super) fn rounded(row: &[f32]) -> Vec<f32> {
    decode(&encode(row)).unwrap_or_default()
}

fn encode(row: &[f32]) -> String {
    let most = row.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = if most > 0.0 { 127.0 / most } else { 0.0 };
    row.iter().map(|x| format!("{:02x}", (x * scale).round() as i8)).collect()
}

fn decode(text: &str) -> Option<Vec<f32>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let number = |pair: &[u8; 2]| {
        let text = std::str::from_utf8(pair).ok().filter(|text| !text.starts_with('+'))?;
        Some(f32::from(u8::from_str_radix(text, 16).ok()?.cast_signed()))
    };
    let row = pairs.iter().map(number).collect::<Option<Vec<f32>>>()?;
    let length = row.iter().map(|x| x * x).sum::<f32>().sqrt().max(1.0);
    rest.is_empty().then(|| row.iter().map(|x| x / length).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_keep_their_direction() {
        let row = [0.6, -0.1, 0.0, 0.79];
        let found = rounded(&row);
        assert!(row.iter().zip(&found).all(|(a, b)| (a - b).abs() < 0.01), "{found:?}");
        assert!((found.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(rounded(&found), found, "what was read is written as it was");
        assert_eq!(rounded(&[0.0; 3]), [0.0; 3]);
        for bad in ["0", "0g", "+1", "7f8"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
