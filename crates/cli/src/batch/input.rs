//! Lines of a file that may be of any length.

use std::io::{self, BufRead};

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// Without its newline.
    Text(Vec<u8>),
    /// More bytes than are allowed. None of them was kept.
    TooLong,
}

impl Line {
    /// Whether it holds nothing but white space.
    pub(super) fn is_blank(&self) -> bool {
        matches!(self, Line::Text(bytes) if bytes.trim_ascii().is_empty())
    }
}

/// Reads a file line by line, holding at most one line and no more than `max` bytes of it.
#[derive(Debug)]
pub(super) struct Lines<R> {
    reader: R,
    max: usize,
    n_read: u64,
}

impl<R: BufRead> Lines<R> {
    /// From the reader's place on.
    pub(super) fn new(reader: R, max: usize) -> Self {
        Lines { reader, max, n_read: 0 }
    }

    /// The next line and its number, from 1; `None` at the end.
    pub(super) fn next(&mut self) -> io::Result<Option<(u64, Line)>> {
        let mut text = Vec::new();
        let mut is_long = false;
        let mut is_end = true;
        loop {
            let buffer = self.reader.fill_buf()?;
            if buffer.is_empty() {
                break;
            }
            is_end = false;
            let newline = buffer.iter().position(|&byte| byte == b'\n');
            let part = &buffer[..newline.unwrap_or(buffer.len())];
            is_long |= text.len() + part.len() > self.max;
            if is_long {
                text = Vec::new();
            } else {
                text.extend_from_slice(part);
            }
            let n_used = part.len() + usize::from(newline.is_some());
            self.reader.consume(n_used);
            if newline.is_some() {
                break;
            }
        }
        if is_end {
            return Ok(None);
        }
        self.n_read += 1;
        let line = if is_long { Line::TooLong } else { Line::Text(text) };
        Ok(Some((self.n_read, line)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    fn read(text: &str, max: usize, buffer: usize) -> Vec<(u64, Line)> {
        let mut lines = Lines::new(BufReader::with_capacity(buffer, text.as_bytes()), max);
        std::iter::from_fn(|| lines.next().unwrap()).collect()
    }

    #[test]
    fn lines_are_cut_at_newlines_whatever_the_buffer() {
        let text = |text: &str| Line::Text(text.into());
        for buffer in [1, 2, 3, 100] {
            assert_eq!(read("", 9, buffer), []);
            assert_eq!(read("\n", 9, buffer), [(1, text(""))]);
            assert_eq!(
                read("ab\n\n123456\nabc", 5, buffer),
                [(1, text("ab")), (2, text("")), (3, Line::TooLong), (4, text("abc"))]
            );
        }
        assert!(text(" \r").is_blank() && !text("x").is_blank() && !Line::TooLong.is_blank());
    }
}
