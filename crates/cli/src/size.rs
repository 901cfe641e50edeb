//! Sizes as people write and read them: `128K` tokens, `80GiB` of memory.
//!
//! Tokens count in binary thousands, because context lengths do: 128K is 131,072. Bytes take the
//! units of memory: `KiB`, `MiB`, `GiB`, `TiB`, short forms without `iB`, and the decimal `KB`,
//! `MB`, `GB`, `TB`.

use std::fmt;

use nuthatch_engine::{DiskIo, DiskOptions};

/// A size that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SizeError {
    /// There is no number at the start.
    #[error("`{0}` does not start with a number")]
    NoNumber(String),
    /// The unit is not known.
    #[error("unknown unit `{unit}`, use {allowed}")]
    Unit {
        /// What follows the number.
        unit: String,
        /// The units that are known.
        allowed: &'static str,
    },
    /// There is no directory before the size, or no size after it.
    #[error("`{0}` is not PATH:SIZE, such as ./kv-cache:20GiB")]
    NoPath(String),
    /// The value is zero, or too large to count.
    #[error("`{0}` is out of range")]
    Range(String),
}

/// Reads a number of tokens: `4096`, `128K`, `1M`.
pub(crate) fn parse_tokens(text: &str) -> Result<u32, SizeError> {
    let (number, unit) = split(text)?;
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" => 1.0,
        "k" | "ki" => 1024.0,
        "m" | "mi" => 1024.0 * 1024.0,
        _ => return Err(SizeError::Unit { unit: unit.to_owned(), allowed: "K or M" }),
    };
    let tokens = (number * factor).round();
    if !(1.0..=f64::from(u32::MAX)).contains(&tokens) {
        return Err(SizeError::Range(text.to_owned()));
    }
    Ok(tokens as u32)
}

/// Reads a number of bytes: `1073741824`, `80GiB`, `2G`, `500MB`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    let (number, unit) = split(text)?;
    let factor: f64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "ki" | "kib" => 1024.0,
        "m" | "mi" | "mib" => 1024f64.powi(2),
        "g" | "gi" | "gib" => 1024f64.powi(3),
        "t" | "ti" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => {
            let allowed = "KiB, MiB, GiB, TiB, KB, MB, GB or TB";
            return Err(SizeError::Unit { unit: unit.to_owned(), allowed });
        }
    };
    let bytes = (number * factor).round();
    // Above 2^53 a float no longer counts single bytes, and no machine has that many.
    if !(1.0..=9.0e15).contains(&bytes) {
        return Err(SizeError::Range(text.to_owned()));
    }
    Ok(bytes as u64)
}

/// Reads the size of the swap space: bytes with a unit, else GiB, as vLLM counts it; 0 is none.
pub(crate) fn parse_swap(text: &str) -> Result<u64, SizeError> {
    match split(text)? {
        (0.0, _) => Ok(0),
        (_, "") => parse_bytes(&format!("{}GiB", text.trim())),
        _ => parse_bytes(text),
    }
}

/// Reads where pages are kept and how many bytes of them: `./kv-cache:20GiB`.
pub(crate) fn parse_disk(text: &str) -> Result<DiskOptions, SizeError> {
    match text.rsplit_once(':') {
        Some((dir, size)) if !dir.is_empty() => {
            let (dir, io) = (dir.into(), DiskIo::default());
            Ok(DiskOptions { dir, bytes_max: parse_bytes(size)?, io })
        }
        Some(_) | None => Err(SizeError::NoPath(text.to_owned())),
    }
}

/// Splits `12.5GiB` into the number and its unit.
fn split(text: &str) -> Result<(f64, &str), SizeError> {
    let text = text.trim();
    let end =
        text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let number =
        digits.replace('_', "").parse::<f64>().map_err(|_| SizeError::NoNumber(text.to_owned()))?;
    Ok((number, unit.trim()))
}

/// Bytes for people: three significant digits and a binary unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        // 1023.96 would round to 1024.0 in the smaller unit.
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = match unit {
            0 => format!("{} B", self.0),
            _ if value >= 99.95 => format!("{value:.0} {}", UNITS[unit]),
            _ if value >= 9.995 => format!("{value:.1} {}", UNITS[unit]),
            _ => format!("{value:.2} {}", UNITS[unit]),
        };
        f.pad(&text)
    }
}

/// A number of tokens for people: `128K` where it is a whole number of thousands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tokens(pub(crate) u32);

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            n if n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{}M", n >> 20),
            n if n >= 1 << 10 && n.is_multiple_of(1 << 10) => format!("{}K", n >> 10),
            n => n.to_string(),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_in_binary_thousands() {
        for (text, expect) in [
            ("1", 1),
            ("4096", 4096),
            ("2k", 2048),
            ("128K", 131_072),
            ("1M", 1 << 20),
            ("1.5K", 1536),
            (" 32 K ", 32_768),
            ("8_192", 8192),
        ] {
            assert_eq!(parse_tokens(text), Ok(expect), "{text}");
        }
        for text in ["", "K", "-1", "0", "128Q", "5G", "1e3", "1.2.3", "99999999999"] {
            assert!(parse_tokens(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bytes_are_read_with_binary_and_decimal_units() {
        for (text, expect) in [
            ("1", 1),
            ("80GiB", 80 << 30),
            ("80G", 80 << 30),
            ("2gib", 2 << 30),
            ("80GB", 80_000_000_000),
            ("512 MiB", 512 << 20),
            ("1.5K", 1536),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(parse_bytes(text), Ok(expect), "{text}");
        }
        for text in ["", "GiB", "0", "-5G", "5 PiB", "1e400", "nan", "inf", "99999999TiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_disk_tier_is_a_path_and_a_size() {
        let disk = |dir: &str, bytes_max| {
            Ok(DiskOptions { dir: dir.into(), bytes_max, io: DiskIo::default() })
        };
        assert_eq!(parse_disk("./a:b/kv:20GiB"), disk("./a:b/kv", 20 << 30));
        assert_eq!(parse_disk("kv:5M"), disk("kv", 5 << 20));
        for text in ["kv", ":5M", ""] {
            assert_eq!(parse_disk(text), Err(SizeError::NoPath(text.to_owned())));
        }
        assert!(parse_disk("kv:").is_err() && parse_disk("kv:0").is_err());
        assert!(parse_disk("kv:5 apples").is_err());
    }

    #[test]
    fn swap_space_counts_in_gib() {
        for (text, expect) in
            [("0", 0), ("4", 4 << 30), ("0.5", 1 << 29), ("512MiB", 512 << 20), ("0GiB", 0)]
        {
            assert_eq!(parse_swap(text), Ok(expect), "{text}");
        }
        for text in ["", "-1", "4 parsecs", "99999999999"] {
            assert!(parse_swap(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bytes_are_written_with_three_digits() {
        for (bytes, expect) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (320 << 10, "320 KiB"),
            (5 << 19, "2.50 MiB"),
            (40 << 30, "40.0 GiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (u64::MAX, "16777216 TiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), expect);
        }
    }

    #[test]
    fn tokens_are_written_as_they_are_read() {
        for n in [1, 1000, 1024, 8192, 131_072, 1 << 20, 3 << 20, 100_000] {
            assert_eq!(parse_tokens(&Tokens(n).to_string()), Ok(n));
        }
        assert_eq!(Tokens(131_072).to_string(), "128K");
    }
}
