//! A segment of any bytes is read without a fault, and only what was written opens: as it is and
//! encrypted, whole and part by part.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nuthatch_store::disk::{PageName, RecordShape};
use nuthatch_store::{RecordForm, StoreKey};
use nuthatch_types::{PageKey, TokenId};

const SHAPE: RecordShape =
    RecordShape { namespace: 7, page_len: 4, page_bytes: 64, part_bytes: 9, is_encrypted: false };
const TOKENS: [TokenId; 4] = [TokenId(1), TokenId(2), TokenId(3), TokenId(u32::MAX)];
const NAME: PageName<'_> = PageName { key: PageKey(5), parent: PageKey(9), tokens: &TOKENS };

/// What opens of a record's header and parts, each alone.
fn open_parts(form: &RecordForm, shape: &RecordShape, record: &[u8]) -> Option<Vec<u8>> {
    let mut front = record.get(..shape.header_bytes())?.to_vec();
    let checks = form.open_header(&NAME, &mut front).ok()?;
    let mut body = record.get(shape.body())?.to_vec();
    for part in 0..shape.n_parts() {
        form.open_part(NAME.key, part, &mut body[shape.part(part)], &checks).ok()?;
    }
    Some(body)
}

fuzz_target!(|bytes: &[u8]| {
    let key = StoreKey::read(&[1; 32]).expect("32 bytes are a key");
    for is_encrypted in [false, true] {
        let shape = RecordShape { is_encrypted, ..SHAPE };
        let form = RecordForm::new(shape, is_encrypted.then_some(&key));
        for (number, bytes) in [(1, bytes), (u64::MAX, bytes.get(1..).unwrap_or(&[]))] {
            let _ = shape.check_segment(bytes, number);
            let is_known = shape.read_key(bytes).is_ok();
            let is_open = form.open(&NAME, &mut bytes.to_vec()).is_ok();
            assert!(is_known || !is_open);
            assert_eq!(open_parts(&form, &shape, bytes).is_some(), is_open);
        }
        // Any page comes back as it was.
        let mut record = vec![0; shape.record_bytes()];
        let body = &mut record[shape.body()];
        for (target, byte) in body.iter_mut().zip(bytes) {
            *target = *byte;
        }
        let body = body.to_vec();
        form.seal(&NAME, &mut record).expect("there are random numbers");
        assert_eq!(open_parts(&form, &shape, &record).as_deref(), Some(&body[..]));
        let mut opened = record.clone();
        assert_eq!(form.open(&NAME, &mut opened), Ok(()));
        assert_eq!(opened[shape.body()], body);
        // And with any change it does not.
        if let [at, change, ..] = bytes {
            let at = usize::from(*at) * record.len() / 256;
            record[at] ^= change | 1;
            assert_eq!(open_parts(&form, &shape, &record), None);
            assert!(form.open(&NAME, &mut record).is_err());
        }
    }
});
