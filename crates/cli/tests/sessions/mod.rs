//! What outlives the process: KV pages on a disk, and conversations.

use serde_json::Value;

use super::tiny::Tiny;
use super::{nuthatch, text};

fn ask(tiny: &Tiny, words: &[&str]) -> Value {
    let mut all = vec!["--greedy", "--json", "--max-tokens", "12"];
    all.extend(words);
    let output = tiny.output("run", &all, "");
    assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn pages_outlive_the_process() {
    let tiny = Tiny::new();
    let dir = tiny.dir.path().join("kv");
    let disk = format!("{}:4MiB", dir.display());
    let question = "the same question of more than sixteen letters";
    let without = ask(&tiny, &[question]);
    for (round, is_cached) in [false, true, true].into_iter().enumerate() {
        let answer = ask(&tiny, &[question, "--kv-disk", &disk]);
        assert_eq!(answer["ids"], without["ids"], "round {round}");
        assert_eq!(answer["stats"]["cached_tokens"].as_u64().unwrap() > 0, is_cached);
    }
    // What is in other bits belongs to somebody else.
    for dtype in ["int8", "fp8"] {
        let words = [question, "--kv-cache-dtype", dtype];
        let without = ask(&tiny, &words);
        let with_disk = [&words[..], &["--kv-disk", &disk]].concat();
        for is_cached in [false, true] {
            let answer = ask(&tiny, &with_disk);
            assert_eq!(answer["ids"], without["ids"], "{dtype}");
            assert_eq!(answer["stats"]["cached_tokens"].as_u64().unwrap() > 0, is_cached);
        }
    }
    assert!(dir.join("lock").is_file());
    let small = format!("{}:12", tiny.dir.path().join("small").display());
    for (disk, expect) in [(&*small, "too few"), ("kv", "PATH:SIZE"), ("/dev/null/kv:1MiB", "kv")] {
        let output = tiny.output("run", &[question, "--kv-disk", disk], "");
        assert!(!output.status.success());
        let error = text(&output.stderr);
        assert!(error.contains(expect) && !error.contains("panicked"), "{error}");
    }
}

#[test]
fn a_session_goes_on_in_another_process() {
    let tiny = Tiny::new();
    let sessions = |words: &[&str]| {
        let mut all = vec!["sessions"];
        all.extend(words);
        let output = nuthatch(tiny.dir.path(), &all).output().unwrap();
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    };
    assert_eq!(sessions(&["list"]), (true, String::new()));
    let first = ask(&tiny, &["first question", "--session", "birds", "--system", "be brief"]);
    let second = ask(&tiny, &["second question", "--session", "birds"]);
    let ids = |answer: &Value| answer["prompt_ids"].as_array().unwrap().clone();
    // The template ends a prompt with `a:` and begins an answer with `assistant:`.
    let said = &ids(&first)[..ids(&first).len() - 1];
    assert!(ids(&second).starts_with(said), "it begins with all that was said");
    assert!(second["stats"]["cached_tokens"].as_u64().unwrap() > 0, "pages are kept by themselves");
    let (_, list) = sessions(&["list"]);
    assert!(list.starts_with("birds  4 messages"), "{list}");

    let file = tiny.dir.path().join("birds-2.json");
    let file = file.to_str().unwrap();
    assert!(sessions(&["export", "birds", file]).0);
    assert!(sessions(&["import", file]).0);
    assert!(!sessions(&["import", file]).0, "there is one already");
    assert_eq!(sessions(&["export", "birds-2"]).1, sessions(&["export", "birds"]).1);
    assert!(sessions(&["delete", "birds"]).0);
    let (_, list) = sessions(&["list", "--json"]);
    let list: Value = serde_json::from_str(&list).unwrap();
    assert_eq!((list[0]["name"].as_str(), list.as_array().unwrap().len()), (Some("birds-2"), 1));

    let output = tiny.output("run", &["x", "--session", "../birds"], "");
    assert!(text(&output.stderr).contains("no name for a session"));
    assert!(!sessions(&["delete", "none"]).0);
}
