//! How results are compared, and how they get on and off a device.

use crate::Backend;

/// Relative error of one rounding to `f32`: half a unit in the last place.
pub(super) const ROUNDING: f64 = 1.0 / (1 << 24) as f64;

/// Results below this may be flushed to zero; `f32` has no precision left there.
pub(super) const TINY: f64 = 1e-34;

/// What a value must be, and how far off it may be.
#[derive(Clone, Debug, Default)]
pub(super) struct Truth {
    pub(super) value: Vec<f64>,
    pub(super) bound: Vec<f64>,
}

impl Truth {
    pub(super) fn push(&mut self, value: f64, bound: f64) {
        self.value.push(value);
        self.bound.push(bound);
    }

    /// Panics at the first element that is out of its bound; NaN always is.
    pub(super) fn check(&self, got: &[f32], what: &dyn Fn() -> String) {
        assert_eq!(got.len(), self.value.len(), "{}: number of results", what());
        for (i, (&got, (&value, &bound))) in
            got.iter().zip(self.value.iter().zip(&self.bound)).enumerate()
        {
            let off = (f64::from(got) - value).abs();
            assert!(
                off <= bound,
                "{}: element {i} is {got:e}, but should be {value:e} within {bound:e} (off {off:e})",
                what()
            );
        }
    }
}

/// Panics at the first element whose bits differ.
pub(super) fn same_bits(got: &[f32], expected: &[f32], what: &dyn Fn() -> String) {
    assert_eq!(got.len(), expected.len(), "{}: number of results", what());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            got.to_bits() == expected.to_bits(),
            "{}: element {i} is {got:e} ({:08x}), but was {expected:e} ({:08x})",
            what(),
            got.to_bits(),
            expected.to_bits()
        );
    }
}

/// A buffer that holds `values`.
pub(super) fn upload<B: Backend>(b: &B, values: &[f32]) -> B::Buf {
    let mut buf = b.alloc(values.len()).expect("small buffers fit the device");
    b.write(&mut buf, values).expect("the device takes a buffer");
    buf
}

/// A buffer of NaN, so that what an operation leaves unwritten shows.
pub(super) fn unwritten<B: Backend>(b: &B, len: usize) -> B::Buf {
    upload(b, &vec![f32::NAN; len])
}

/// The first `len` floats of a buffer.
pub(super) fn download<B: Backend>(b: &B, buf: &B::Buf, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    b.read(buf, &mut values).expect("the device gives a buffer back");
    values
}
