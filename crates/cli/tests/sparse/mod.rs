//! Top-k attention from the command line, on a tiny model.

use std::collections::BTreeMap;

use serde_json::Value;

use super::text;
use super::tiny::Tiny;

#[test]
fn everything_attended_is_the_exact_answer() {
    let tiny = Tiny::new();
    let words = ["-p", "Hello, hello, hello!", "--max-tokens", "24", "--greedy", "--json"];
    let ids = |more: &[&str]| tiny.json("run", &[&words[..], more].concat())["answers"].clone();
    let exact = ids(&[]);
    assert_eq!(ids(&["--sparse", "full"]), exact);
    assert_eq!(ids(&["--sparse", "hata:64"]), exact, "short contexts are attended whole");
}

#[test]
fn a_typo_shows_the_grammar() {
    let tiny = Tiny::new();
    let output = tiny.output("run", &["Hello", "--sparse", "hata,kk=1"], "");
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(error.contains("\"kk\" is no option"), "{error}");
    assert!(error.contains("qsac(eta=0.8,p=3"), "{error}");
}

/// The tiny model's context is too short for questions, so importances come from a table.
#[test]
fn a_profile_is_made_used_and_refused_by_other_models() {
    let tiny = Tiny::new();
    tiny.write("heads.tsv", "0.5\n-0.001\n");
    let (file, table) = (tiny.dir.path().join("heads.json"), tiny.dir.path().join("heads.tsv"));
    let (path, table) = (file.to_str().unwrap(), table.to_str().unwrap());
    let output = tiny.output("profile", &["--import", table, "-o", path], "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let profile: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!((&profile["version"], &profile["importance"][0]), (&1.into(), &0.5.into()));
    let run = ["Hello", "--max-tokens", "4", "--sparse", "hata:64", "--head-profile", path];
    assert!(tiny.output("run", &run, "").status.success());
    let mut other = profile.clone();
    other["n_kv_heads"] = 2.into();
    std::fs::write(&file, other.to_string()).unwrap();
    let output = tiny.output("run", &run, "");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("head profile"), "{}", text(&output.stderr));
    let output = tiny.output("profile", &["--samples", "2", "-o", path], "");
    assert!(text(&output.stderr).contains("does not fit"), "{}", text(&output.stderr));
}

/// A profile that was made here serves every command that has top-k attention, by the model's fingerprint: none of
/// them goes on where it cannot be read.
#[test]
fn a_profile_is_found_by_the_models_fingerprint() {
    let tiny = Tiny::new();
    tiny.write("heads.tsv", "0.5\n-0.001\n");
    let table = tiny.dir.path().join("heads.tsv");
    let output = tiny.output("profile", &["--import", table.to_str().unwrap()], "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let path = std::path::Path::new(said.trim());
    assert!(path.starts_with(tiny.dir.path()), "{said}");
    let commands: [(&str, &[&str]); 4] = [
        ("run", &["Hello", "--max-tokens", "4", "--sparse", "auto"]),
        ("bench", &["--prompt", "8", "--gen", "4", "-r", "1", "--sparse", "auto"]),
        ("eval", &["--samples", "1", "--length", "96", "--policy", "auto"]),
        ("serve", &["--port", "0", "--sparse", "auto"]),
    ];
    for (command, words) in commands {
        if command != "serve" {
            let output = tiny.output(command, words, "");
            assert!(output.status.success(), "{command}: {}", text(&output.stderr));
        }
    }
    std::fs::write(path, "{").unwrap();
    for (command, words) in commands {
        let output = tiny.output(command, words, "");
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.contains("head profile"), "{command}: {error}");
        assert!(error.contains(said.trim()), "{command}: {error}");
    }
}

const BUDGET: &str =
    "error: --kv-device-budget 1.00 KiB is too small: 1 sequences of 128 tokens need";

/// Pages in a file: the same answer, no name left behind, and a clear word when it cannot be.
#[test]
fn pages_in_a_file_give_the_same_answer() {
    let tiny = Tiny::new();
    let policy = "hata:64,k=8,sinks=2,recent=4,reuse=qsac(eta=0.9)";
    let prompt = "Hello, hello, hello! ".repeat(4);
    let words = ["-p", &prompt, "--max-tokens", "12", "--greedy", "--json", "--sparse", policy];
    let answers = |more: &[&str]| tiny.json("run", &[&words[..], more].concat())["answers"].clone();
    let here = answers(&[]);
    let coded = answers(&["--kv-cache-dtype", "int8"]);
    let folder = tiny.dir.path().join("kv");
    std::fs::create_dir(&folder).unwrap();
    let disk = format!("disk:{}", folder.display());
    for far in ["host", &disk] {
        assert_eq!(answers(&["--kv-offload", far]), here, "{far}");
        let int8 = ["--kv-cache-dtype", "int8", "--kv-offload", far];
        assert_eq!(answers(&int8), coded, "{far}");
        let with_budget = ["--kv-offload", far, "--kv-device-budget", "1GiB"];
        assert_eq!(answers(&with_budget), here, "{far}");
        assert_eq!(answers(&[&with_budget[..], &["--kv-resident", "off"]].concat()), here);
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    for (more, said) in [
        (&["--kv-offload", "disk:/nowhere/at/all"][..], "/nowhere/at/all"),
        (&["--kv-offload", "tape:/x"], "neither host nor disk:PATH"),
        (&["--kv-offload", &disk, "--kv-device-budget", "1KiB"], BUDGET),
        (&["--kv-device-budget", "1MiB"], "--kv-offload"),
        (
            &["--kv-cache-dtype", "int8", "--kv-cache-dtype-skip-layers", "0"],
            "leave out --kv-cache-dtype-skip-layers, or --sparse",
        ),
    ] {
        let output = tiny.output("run", &[&words[..], more].concat(), "");
        assert!(!output.status.success());
        assert!(text(&output.stderr).contains(said), "{}", text(&output.stderr));
    }
    let output = tiny.output("run", &["Hello", "--kv-offload", "host"], "");
    assert!(text(&output.stderr).contains("needs --sparse"), "{}", text(&output.stderr));
}

/// LongBench's files as they come: what is too long loses its middle, and every question is scored.
#[test]
fn questions_of_longbench_are_asked_and_scored() {
    let tiny = Tiny::new();
    let folder = tiny.dir.path().join("LongBench");
    std::fs::create_dir_all(folder.join("data")).unwrap();
    std::fs::create_dir_all(folder.join("config")).unwrap();
    let context = "The owl sits in the old oak and waits for the night. ".repeat(40);
    let line = serde_json::json!({ "input": "Who waits?", "context": context, "answers": ["owl"] });
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write("data/qasper.jsonl", &format!("{line}\n{line}\n"));
    write("config/dataset2prompt.json", r#"{"qasper": "{context} {input}"}"#);
    write("config/dataset2maxlen.json", r#"{"qasper": 6}"#);
    let (data, json) = (folder.join("data"), folder.join("results.json"));
    let (data, json) = (data.to_str().unwrap(), json.to_str().unwrap());
    let words = ["--longbench", data, "--length", "96", "--samples", "3", "--json", json];
    let words = [&words[..], &["--policy", "full", "--policy", "streaming"]].concat();
    let output = tiny.output("eval", &words, "");
    let (table, log) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{log}");
    assert!(table.contains("qasper @ 96") && !table.contains("niah"), "{table}");
    assert!(log.contains("has no question 2: skipped"), "{log}");
    let results: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let records = results["records"].as_array().unwrap();
    assert_eq!(records.len(), 4);
    for record in records {
        let (n_prompt, n_answer) = (&record["n_prompt"], &record["n_answer"]);
        let (n_prompt, n_answer) = (n_prompt.as_u64().unwrap(), n_answer.as_u64().unwrap());
        assert!((80..=90).contains(&n_prompt) && n_answer <= 6, "{record}");
    }
    let output = tiny.output("eval", &["--longbench", folder.to_str().unwrap()], "");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no .jsonl file"), "{}", text(&output.stderr));
}

/// What a query that has turned away is served with, if it is served late, is what the step before chose; what
/// it chooses itself serves the next one.
#[test]
fn what_is_served_late_was_chosen_a_step_before() {
    let tiny = Tiny::new();
    let folder = tiny.dir.path().join("LongBench");
    std::fs::create_dir_all(folder.join("data")).unwrap();
    std::fs::create_dir_all(folder.join("config")).unwrap();
    let context = "The owl sits in the old oak and waits for the night. ".repeat(40);
    let line = serde_json::json!({ "input": "Who waits?", "context": context, "answers": ["owl"] });
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write("data/qasper.jsonl", &format!("{line}\n"));
    write("config/dataset2prompt.json", r#"{"qasper": "{context} {input}"}"#);
    write("config/dataset2maxlen.json", r#"{"qasper": 6}"#);
    let (data, trace) = (folder.join("data"), folder.join("trace.jsonl"));
    let (data, file) = (data.to_str().unwrap(), trace.to_str().unwrap());
    let policy = "exact,k=8,sinks=2,recent=4,reuse=qsac(eta=1,thresholds=fixed,soft=-1)";
    let words = ["--longbench", data, "--length", "96", "--samples", "1", "--record-trace", file];
    let output = tiny.output("eval", &[&words[..], &["--policy", policy]].concat(), "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut before: BTreeMap<(u64, u64), Value> = BTreeMap::new();
    let mut n_late = 0;
    for line in std::fs::read_to_string(&trace).unwrap().lines() {
        let decision: Value = serde_json::from_str(line).unwrap();
        let number = |name: &str| decision[name].as_u64().unwrap();
        assert_eq!(decision["chosen"].as_array().unwrap().len(), 8, "{decision}");
        if let Some(before) = before.get(&(number("layer"), number("head"))) {
            assert!(decision["lookup"].get("late").is_some(), "{decision}");
            assert_eq!(number("kv_len"), before["kv_len"].as_u64().unwrap() + 1);
            assert_eq!(decision["places"], before["chosen"], "{decision}");
            assert_eq!(number("tail"), before["kv_len"].as_u64().unwrap() - 4);
            n_late += 1;
        } else {
            assert_eq!(decision["lookup"], "first");
            assert_eq!(decision["places"], decision["chosen"]);
        }
        before.insert((number("layer"), number("head")), decision);
    }
    assert!(n_late > 0 && n_late % before.len() == 0, "{n_late}");
}
