//! A head profile, a table of importances or a policy of any bytes is usable, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nuthatch_attention::topk::{Policy, Profile};

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(policy) = text.parse::<Policy>() {
        assert_eq!(policy.to_string().parse::<Policy>(), Ok(policy));
    }
    if let Ok(mut profile) = Profile::from_json(text) {
        for policy in ["hata:64", "loki:4", "ds:4", "quest"] {
            let policy: Policy = policy.parse().expect("a policy");
            if profile.serves(&policy) && profile.head_dim <= 256 && profile.n_kv_layers <= 64 {
                let _ = profile.digest(policy.retriever);
            }
        }
        let _ = profile.importances(0, 0);
        let _ = profile.import_table("0.5\t0.5");
    }
});
