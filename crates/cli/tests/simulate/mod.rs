//! `simulate` from the outside: the table of a small workload, and the same bytes each time.

use serde_json::Value;

use super::{check_snapshot, fails, run, text};

/// A small workload under pressure, so that every policy has something to do.
const SMALL: [&str; 11] = [
    "simulate",
    "--seed",
    "7",
    "--duration",
    "60",
    "--rate",
    "1.5",
    "--pages",
    "300",
    "--max-num-seqs",
    "6",
];

fn output(words: &[&str]) -> String {
    let output = run(&[&SMALL, words].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn the_table_of_a_small_workload() {
    check_snapshot("simulate-small.txt", &output(&[]));
}

#[test]
fn a_seed_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let plots = |name: &str| {
        let folder = dir.path().join(name);
        let json = output(&["--json", "-", "--plots", folder.to_str().unwrap()]);
        let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
        (json, ["ttft.svg", "throughput.svg", "service.svg", "pages.svg"].map(read))
    };
    let first = plots("a");
    assert_eq!(first, plots("b"));
    assert!(first.1.iter().all(|svg| svg.starts_with("<svg") && svg.ends_with("</svg>\n")));
    let other = run(&["simulate", "--seed", "8", "--duration", "60", "--json", "-"]);
    assert_ne!(first.0, text(&other.stdout));
}

#[test]
fn every_policy_answers_every_request() {
    let json: Value = serde_json::from_str(&output(&["--json", "-"])).unwrap();
    let n_requests = json["n_requests"].as_u64().unwrap();
    let policies = json["policies"].as_array().unwrap();
    assert_eq!(policies.len(), 5);
    let tokens = |policy: &Value| -> u64 {
        let bins = policy["served"].as_array().unwrap().iter();
        bins.flat_map(|bin| bin.as_array().unwrap()).map(|n| n.as_u64().unwrap()).sum()
    };
    for policy in policies {
        assert_eq!(policy["answered"], n_requests, "{}", policy["policy"]);
        assert_eq!(policy["refused"], 0);
        assert_eq!(tokens(policy), tokens(&policies[0]), "the same answers");
        let fairness = policy["fairness"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&fairness), "{fairness}");
        let most = policy["pages_used"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap());
        assert!(most.max().unwrap() <= 300);
    }
}

#[test]
fn without_a_cache_nothing_is_found() {
    let words = ["--no-enable-prefix-caching", "--policies", "fcfs,prefix", "--json", "-"];
    let json: Value = serde_json::from_str(&output(&words)).unwrap();
    for policy in json["policies"].as_array().unwrap() {
        assert_eq!(policy["cached_tokens"], 0);
    }
}

#[test]
fn a_workload_must_make_sense() {
    for (words, expect) in [
        (&["--rate", "0"][..], "--rate is 0, but must be a positive number"),
        (&["--rate", "1e9"], "at most 200000 requests"),
        (&["--tenants", "1"], "--tenants is 1, but must be from 2 to 64"),
        (&["--heavy-share", "2"], "--heavy-share is 2, but must be from 0 to 1"),
        (&["--duration", "nan"], "--duration is NaN"),
        (&["--pages", "0"], "the cache has 0 pages"),
        (&["--max-model-len", "100"], "at least 64 more than --system-tokens"),
    ] {
        let error = fails(&[&["simulate"], words].concat(), 1);
        assert!(error.contains(expect), "{words:?}: {error}");
    }
    // What does not fit is refused, and the rest goes on.
    let words = ["simulate", "--duration", "60", "--pages", "60", "--json", "-"];
    let json: Value = serde_json::from_slice(&run(&words).stdout).unwrap();
    assert!(json["policies"][0]["refused"].as_u64().unwrap() > 0);
}
