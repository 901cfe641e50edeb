//! A segment of any bytes is read without a fault, and only what was written opens.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nuthatch_store::disk::{PageName, RecordShape};
use nuthatch_types::{PageKey, TokenId};

const SHAPE: RecordShape =
    RecordShape { namespace: 7, page_len: 4, page_bytes: 64, part_bytes: 9, is_encrypted: false };
const TOKENS: [TokenId; 4] = [TokenId(1), TokenId(2), TokenId(3), TokenId(u32::MAX)];

fuzz_target!(|bytes: &[u8]| {
    let name = PageName { key: PageKey(5), parent: PageKey(9), tokens: &TOKENS };
    for (number, bytes) in [(1, bytes), (u64::MAX, bytes.get(1..).unwrap_or(&[]))] {
        let _ = SHAPE.check_segment(bytes, number);
        let _ = RecordShape { is_encrypted: true, ..SHAPE }.read_key(bytes);
        let is_known = SHAPE.read_key(bytes).is_ok();
        let is_open = SHAPE.open(&name, bytes).is_ok();
        assert!(is_known || !is_open);
    }
    // Any page comes back as it was.
    let mut record = vec![0; SHAPE.record_bytes()];
    let body = &mut record[SHAPE.header_bytes()..];
    for (target, byte) in body.iter_mut().zip(bytes) {
        *target = *byte;
    }
    let body = body.to_vec();
    SHAPE.seal(&name, &mut record);
    assert_eq!(SHAPE.open(&name, &record), Ok(&body[..]));
    // And with any change it does not.
    if let [at, change, ..] = bytes {
        let at = usize::from(*at) * record.len() / 256;
        record[at] ^= change | 1;
        assert!(SHAPE.open(&name, &record).is_err());
    }
});
