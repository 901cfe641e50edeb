//! Writing MessagePack: as much of it as events need.

/// Bytes to which values are added one after another.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// The next `n` values are the elements of an array.
    pub(crate) fn array(&mut self, n: usize) {
        self.head(n, 0x90, 0xdc);
    }

    /// The next `n` pairs of values are those of a map.
    pub(crate) fn map(&mut self, n: usize) {
        self.head(n, 0x80, 0xde);
    }

    pub(crate) fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    pub(crate) fn float(&mut self, value: f64) {
        self.bytes.push(0xcb);
        self.bytes.extend(value.to_be_bytes());
    }

    /// A number, in as few bytes as it needs.
    pub(crate) fn number(&mut self, value: u64) {
        if let Ok(value) = u8::try_from(value) {
            if value >= 0x80 {
                self.bytes.push(0xcc);
            }
            self.bytes.push(value);
        } else if let Ok(value) = u16::try_from(value) {
            self.bytes.push(0xcd);
            self.bytes.extend(value.to_be_bytes());
        } else if let Ok(value) = u32::try_from(value) {
            self.bytes.push(0xce);
            self.bytes.extend(value.to_be_bytes());
        } else {
            self.bytes.push(0xcf);
            self.bytes.extend(value.to_be_bytes());
        }
    }

    /// A text of at most 255 bytes: names of fields, and of what they hold.
    pub(crate) fn text(&mut self, text: &str) {
        let len = u8::try_from(text.len()).expect("names are short");
        if len < 32 {
            self.bytes.push(0xa0 | len);
        } else {
            self.bytes.extend([0xd9, len]);
        }
        self.bytes.extend(text.as_bytes());
    }

    /// The head of an array or a map of `n`; `wide` is followed by 16 bits, and the next code by 32.
    fn head(&mut self, n: usize, narrow: u8, wide: u8) {
        let n = u32::try_from(n).expect("a batch has fewer than 2^32 of anything");
        if n < 16 {
            self.bytes.push(narrow | n as u8);
        } else if let Ok(n) = u16::try_from(n) {
            self.bytes.push(wide);
            self.bytes.extend(n.to_be_bytes());
        } else {
            self.bytes.push(wide + 1);
            self.bytes.extend(n.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(write: impl FnOnce(&mut Writer), expect: &[u8]) {
        let mut writer = Writer::default();
        write(&mut writer);
        assert_eq!(writer.into_bytes(), expect);
    }

    #[test]
    fn values_are_as_the_specification_says() {
        check(|w| w.number(127), &[127]);
        check(|w| w.number(128), &[0xcc, 128]);
        check(|w| w.number(256), &[0xcd, 1, 0]);
        check(|w| w.number(65_536), &[0xce, 0, 1, 0, 0]);
        check(|w| w.number(u64::MAX), &[0xcf, 255, 255, 255, 255, 255, 255, 255, 255]);
        check(|w| w.array(15), &[0x9f]);
        check(|w| w.array(16), &[0xdc, 0, 16]);
        check(|w| w.array(65_536), &[0xdd, 0, 1, 0, 0]);
        check(|w| w.map(2), &[0x82]);
        check(|w| w.map(300), &[0xde, 1, 44]);
        check(|w| w.text("ab"), &[0xa2, b'a', b'b']);
        check(|w| w.float(1.0), &[0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0]);
        check(Writer::nil, &[0xc0]);
        let long = "x".repeat(32);
        check(|w| w.text(&long), &[&[0xd9, 32], long.as_bytes()].concat());
    }
}
