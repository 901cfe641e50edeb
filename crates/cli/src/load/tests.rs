//! What a plan says of itself.

use nuthatch_engine::NearSizes;
use nuthatch_types::{HostReads, KvDtype};

use super::*;

/// Sizes of pages that are far.
pub(super) fn far_sizes() -> Sizes {
    let near = NearSizes {
        n_pages: 9,
        copies: 1,
        n_layers: 3,
        layers: 1,
        n_heads: 2,
        heads: 1,
        digests: 1,
        scales: 1,
        staged: 1,
        budget: 9,
    };
    Sizes { near: Some(near), host_kv: 1 << 30, ..some_sizes() }
}

fn some_sizes() -> Sizes {
    Sizes {
        n_pages: 35,
        n_host_pages: 0,
        host_reads: HostReads::Never,
        page_len: 16,
        kv_dtype: KvDtype::F16,
        max_context: 160,
        window: None,
        max_seqs: 8,
        max_rows: 64,
        weights: 0,
        kv: 3500,
        host_kv: 0,
        near: None,
        working: 0,
        deciding: 0,
    }
}

#[test]
fn a_plan_says_why() {
    let forecast = Forecast {
        full: 0.008,
        here: 0.005,
        far: 0.0055,
        n_in_time: 11,
        n_layers: 2,
        break_even: 30_000,
    };
    let far = far_sizes();
    let here = Sizes { host_kv: 0, ..far };
    let text = describe_forecast(&forecast, &here, 32);
    assert!(text.contains("nothing leaves") && text.contains("below 32768 tokens"), "{text}");
    let text = describe_forecast(&forecast, &far, 32);
    assert!(text.contains("1.00 GiB of KV leave") && text.contains("2 heads stay"), "{text}");
    assert!(text.contains("on the host     5.50 ms  yes"), "{text}");
    let near = far.near.map(|near| NearSizes { n_heads: 0, ..near });
    let text = describe_forecast(&forecast, &Sizes { near, ..far }, 32);
    assert!(text.contains("3 of 32 layers stay (the link would need 2 layers)"), "{text}");
}

#[test]
fn virtual_pages_have_room_for_whole_tables() {
    let sizes = some_sizes();
    let mut fewer = sizes;
    reserve_tables(&mut fewer, true).unwrap();
    assert_eq!((fewer.max_seqs, fewer.n_pages, fewer.kv), (3, 30, 3000));
    let error = reserve_tables(&mut { sizes }, false).unwrap_err().to_string();
    assert!(error.contains("3 sequences of 160 tokens, not for 8"), "{error}");
    let long = Sizes { max_context: 16_000, ..sizes };
    assert!(reserve_tables(&mut { long }, true).is_err());
}
